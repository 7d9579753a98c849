"""The bound on the time to the next commit, checked for whoever no fault touches.

``(v + 1)(D + 3T)`` is promised to a group that could commit all the while: a quorum of peers that no fault touches and
that reach one another, whatever happens to the others meanwhile. So no fault of another starts the clock anew.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Commit(NamedTuple):
    """When a commit was first had by anybody, and who was in its roster."""

    at: float
    members: frozenset[str]


class Fault(NamedTuple):
    """Who could not take part, from when until when. apart: the victims still reach one another, and nobody else."""

    at: float
    until: float
    victims: frozenset[str]
    apart: bool = False


@dataclass(frozen=True)
class Stall:
    """A group that could have committed, and did not."""

    since: float
    seconds: float
    allowed: float
    group: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{', '.join(self.group)} could commit all the while, and did not for {self.seconds:.1f} s from "
            f"{self.since:.1f} s, {self.allowed:.1f} s at most"
        )


def stalls(
    commits: Iterable[Commit],
    faults: Collection[Fault],
    peers: Collection[str],
    *,
    end: float,
    quorum: int,
    recovers: float,
    able: Callable[[Collection[str]], bool],
    allowed: Callable[[float, float], float],
) -> tuple[list[Stall], float]:
    """Groups that stood still for longer than they may, and the largest share of what was allowed that any wait took.

    able: whether these peers can commit by themselves (that some of them can be dialled). recovers: seconds after a
    fault's end from which its victims count again. allowed: seconds between two moments without a commit of a group.
    """
    done = sorted(commits)
    times = [commit.at for commit in done]
    edges = {0.0, end, *(t for t in times if t < end)}
    for fault in faults:
        edges |= {t for t in (fault.at, fault.until + recovers) if 0 <= t < end}
    marks = sorted(edges)
    worst, found, covered = 0.0, list[Stall](), float("-inf")
    for index, begin in enumerate(marks):
        first, stall = bisect_right(times, begin), None
        for groups, until in _groups(begin, marks[index + 1 :], faults, peers, recovers):
            since = done[first : bisect_left(times, until)]  # a commit at that moment ends the wait until then
            waiting = [
                group for group in groups
                if len(group) >= quorum and able(group) and not any(group & commit.members for commit in since)
            ]  # fmt: skip
            if not waiting:
                break
            limit = allowed(begin, until)
            worst = max(worst, (until - begin) / limit)
            if until - begin > limit and begin >= covered:
                stall = Stall(begin, until - begin, limit, tuple(sorted(waiting[0])))
        if stall is not None:
            found.append(stall)
            covered = begin + stall.seconds
    return found, worst


def _groups(
    begin: float, later: Sequence[float], faults: Collection[Fault], peers: Collection[str], recovers: float
) -> Iterable[tuple[list[frozenset[str]], float]]:
    """For each of the later moments the groups of peers that no fault has touched since ``begin``."""
    for until in later:
        at_once = [f for f in faults if f.at < until and f.until + recovers > begin]
        whole = frozenset(peers).difference(*(f.victims for f in at_once if not f.apart))
        groups = [whole]
        for fault in at_once:
            if fault.apart:
                groups = [part for group in groups for part in (group & fault.victims, group - fault.victims)]
        yield [group for group in groups if group], until
