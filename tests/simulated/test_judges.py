"""The judges of the simulated swarm find what is wrong, when something is: each is shown a planted fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from atoll.protocol.messages import Commit, hash_of

from .accounts import Accounts
from .swarm import Swarm
from .test_swarm import build, inner_seconds, run


@pytest.fixture
def swarm() -> Swarm:
    """Three peers that have made ten outer steps, about which nothing is wrong."""
    swarm = build(3, seed=3)
    run(swarm)
    assert swarm.violations == []
    return swarm


def averages(swarm: Swarm) -> list[tuple[bytes, Commit]]:
    """The chain's commits with averages, the newest first."""
    chain = swarm.chain(swarm.best_head().id)
    return [(hash_of(commit.body), commit) for commit in reversed(chain) if commit.body.chunks]


def judged(swarm: Swarm, commit_id: bytes) -> str:
    """What is said of the newest averages, judged once more."""
    swarm._check_mean("p0", swarm.commits[commit_id], swarm.commit_rosters[commit_id])
    return "\n".join(swarm.violations)


def test_a_mean_that_is_none_of_what_was_brought(swarm: Swarm) -> None:
    commit_id, _ = averages(swarm)[0]
    assert judged(swarm, commit_id) == ""
    key = "p1", swarm.commit_rosters[commit_id].hex()
    honest = swarm.contributions[key]
    swarm.contributions[key] = replace(honest, x=honest.x + 0.5)
    assert "mean off by" in judged(swarm, commit_id)


def test_a_weight_of_more_than_was_trained(swarm: Swarm) -> None:
    commit_id, _ = averages(swarm)[0]
    key = "p1", swarm.commit_rosters[commit_id].hex()
    honest = swarm.contributions[key]
    assert honest.units
    swarm.contributions[key] = replace(honest, units=honest.units[:-1])
    assert "weight" in judged(swarm, commit_id)


def test_a_contribution_of_somebody_who_brought_none(swarm: Swarm) -> None:
    commit_id, _ = averages(swarm)[0]
    del swarm.contributions["p2", swarm.commit_rosters[commit_id].hex()]
    assert "contributed to a roster it never saw" in judged(swarm, commit_id)


def test_units_that_are_averaged_twice(swarm: Swarm) -> None:
    swarm.check_samples()
    assert swarm.violations == []
    (newest, _), (older, _) = averages(swarm)[:2]
    before = swarm.contributions["p0", swarm.commit_rosters[older].hex()]
    key = "p1", swarm.commit_rosters[newest].hex()
    swarm.contributions[key] = replace(swarm.contributions[key], units=before.units)
    swarm.check_samples()
    assert "were averaged in round" in swarm.violations[0]


def test_units_that_are_leased_twice(swarm: Swarm) -> None:
    leases = [(i, c) for i, c in swarm.commits.items() if c.body.leases]
    (_, first), (later_id, later) = leases[:2]
    body = msgspec.structs.replace(later.body, leases=first.body.leases)
    swarm.commits[later_id] = msgspec.structs.replace(later, body=body)
    swarm.commit_rosters[hash_of(body)] = swarm.commit_rosters[later_id]
    swarm.check_samples()
    assert any("leased twice" in what for what in swarm.violations)


def test_two_digests_at_one_head_and_two_commits_of_one_roster(swarm: Swarm) -> None:
    commit_id, commit = averages(swarm)[0]
    swarm._event("p0", "digest", {"commit": commit_id.hex(), "digest": "00", "round": commit.body.round})
    assert "different digests at one head" in swarm.violations[-1]
    twin = bytes(32)
    swarm.rosters[swarm.commit_rosters[commit_id].hex()].add(twin)
    del swarm.commits[commit_id]
    swarm._committed("p0", {"id": commit_id.hex()})
    assert any("one roster, two commits" in what for what in swarm.violations)


@pytest.mark.parametrize("planted", [False, True])
def test_two_signatures_for_one_roster(planted: bool) -> None:
    swarm = build(3, seed=4, budget={"rounds": 3})

    def forge(name: str, event: str, fields: dict[str, Any]) -> None:
        if planted and event == "seal":
            swarm.signed.setdefault((name, bytes.fromhex(fields["roster"])), bytes(32))

    swarm.hooks.append(forge)
    if not planted:
        run(swarm)
        return
    with pytest.raises(AssertionError, match="signed two bodies for one roster"):
        run(swarm)


def test_a_chain_that_begins_again_and_leases_that_are_lost() -> None:
    swarm = build(3, seed=5)
    accounts = Accounts(swarm, None, inner_seconds(swarm))
    run(swarm)
    end = max(swarm.commit_times())
    assert accounts.check_progress(end) == []
    assert accounts.lost_leases()[1] == []
    first = next(i for i, commit in swarm.commits.items() if not commit.body.chunks)
    swarm.commits[bytes(32)] = swarm.commits[first]
    swarm.committed_at[bytes(32)] = swarm.committed_at[first] + 61
    assert "the run began again" in accounts.check_progress(end)[0]
    for life in swarm.lives["p1"]:
        assert life.island is not None
        life.island.used.clear()
    assert "p1 lost leases" in accounts.lost_leases()[1][0]
