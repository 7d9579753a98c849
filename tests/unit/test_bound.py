"""The judge of the bound on the next commit, with planted stalls."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.simulated.bound import Commit, Fault, stalls

PEERS = ("a", "b", "c", "d")
ALL = frozenset(PEERS)
LIMIT, RECOVERS = 10.0, 4.0


def judge(
    commits: list[Commit], faults: Collection[Fault] = (), *, end: float = 60.0, quorum: int = 2, hidden: str = ""
) -> list[tuple[float, float]]:
    """When groups began to stand still for too long, and for how long."""
    found, worst = stalls(
        commits, faults, PEERS, end=end, quorum=quorum, recovers=RECOVERS,
        able=lambda group: len(group) == 1 or any(name not in hidden for name in group),
        allowed=lambda begin, until: LIMIT,
    )  # fmt: skip
    assert (worst > 1) == bool(found)
    return [(stall.since, stall.seconds) for stall in found]


def every(seconds: float, *, until: float = 60.0, members: frozenset[str] = ALL) -> list[Commit]:
    return [Commit(seconds * n, members) for n in range(1, int(until / seconds) + 1)]


def test_commits_in_time_are_right() -> None:
    assert judge(every(9.0)) == []


def test_a_wait_in_the_middle_one_at_the_end_and_a_run_without_commits_are_found() -> None:
    assert judge([c for c in every(9.0) if not 20 < c.at < 40]) == [(18.0, 27.0)]
    assert judge([c for c in every(9.0) if c.at < 40]) == [(36.0, 24.0)]
    assert judge([]) == [(0.0, 60.0)]


def test_faults_of_others_do_not_start_the_clock_anew() -> None:
    """A peer is struck every four seconds, and the three others, which could, commit nothing for half a minute."""
    faults = [Fault(4.0 * n, 4.0 * n + 2, frozenset("d")) for n in range(5, 12)]
    commits = [c for c in every(9.0) if not 20 < c.at < 50]
    assert judge(commits, faults) == [(18.0, 36.0)]


def test_nothing_is_expected_of_those_whom_faults_touch() -> None:
    faults = [Fault(19.0, 41.0, frozenset("abc"))]
    commits = [c for c in every(9.0) if not 20 < c.at < 54]
    assert judge(commits, faults) == []
    late = [c for c in every(9.0) if not 20 < c.at < 60]
    assert judge(late, faults, end=70) == [(45.0, 25.0)], "they have recovered 4 s after its end"


@pytest.mark.parametrize("side", [frozenset("ab"), frozenset("cd")])
def test_both_sides_of_a_split_have_to_go_on(side: frozenset[str]) -> None:
    split = Fault(20.0, 50.0, frozenset("ab"), apart=True)
    both = [*every(9.0, until=20.0), *every(5.0, members=side), *every(5.0, members=ALL - side)]
    assert judge(both, [split]) == []
    one = [*every(9.0, until=20.0), *(c for c in every(5.0, members=side) if c.at > 20)]
    assert judge(one, [split])


def test_a_group_that_nobody_can_dial_or_that_is_no_quorum_may_wait() -> None:
    split = Fault(20.0, 60.0, frozenset("ab"), apart=True)
    commits = [*every(9.0, until=20.0), *(c for c in every(5.0, members=frozenset("cd")) if c.at > 20)]
    assert judge(commits, [split], hidden="ab") == []
    assert judge([c for c in commits if c.at < 20], [split], quorum=3) == []
