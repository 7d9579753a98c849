"""When a round is due: by the inner steps of a quorum, by the tokens of the swarm, or by time.

Decoupled DiLoCo (arXiv 2604.21428) waits for the steps of a quorum, and so does a manifest that says nothing else. Pure
rules of what a coordinator was told; they are its own, and nobody checks them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

By = Literal["steps", "tokens", "time"]


class Done(Protocol):
    """What a peer has done since its last contribution to a fragment, as in :class:`.island.Progress`."""

    @property
    def steps(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def leased(self) -> int: ...

    @property
    def step_time(self) -> float: ...


class Told(Done, Protocol):
    """What a peer says of itself, as in :class:`.control.Report`: all of it claims."""

    @property
    def ready(self) -> bool: ...

    @property
    def eta(self) -> float: ...


@dataclass(frozen=True)
class Schedule:
    """The rule of one run.

    by: what makes a round due. every: tokens that the live hold together, or seconds since the last commit that took an
    outer step, for a round of each fragment; 0 with steps. quorum, fragments: as in the manifest. cap: tokens that one
    peer counts for at most. regular: outer steps after which the run winds up.
    """

    by: By
    every: float
    quorum: int
    fragments: int
    cap: int
    regular: int

    def tokens(self, outer_step: int) -> float:
        """Uncommitted tokens of all live peers that make the round after so many outer steps due, if rounds go by
        them. The first rounds of fragments come early, so that all are spread: they hold fewer tokens."""
        return self.every * min(outer_step + 1, self.fragments) / self.fragments

    @property
    def seconds(self) -> float:
        """Seconds from one outer step to the next round, of whatever fragment, if rounds go by time."""
        return self.every / self.fragments

    def own(self, done: Done, wanting: int, *, outer_step: int, elapsed: float, peers: int) -> tuple[bool, float]:
        """Whether a peer is ready, as it reports, and else in how many seconds.

        With steps: it has done those of its round, or cannot go on. With tokens: its equal share, or it cannot go on.
        With time: it has something to hand over, and the time has come. Where the run winds up: it has something.

        wanting: inner steps that its round lacks. elapsed: seconds since the last outer step, as it saw it. peers: that
        it knows of, itself included.
        """
        winding_up = self.regular <= outer_step < self.regular + self.fragments - 1
        if self.by == "steps":
            ready = wanting == 0 or (done.tokens > 0 and (done.leased == 0 or winding_up))
            return ready, 0.0 if ready else (1 if winding_up else wanting) * done.step_time
        if self.by == "time":
            left = 0.0 if winding_up else max(self.seconds - elapsed, 0.0)
            ready = done.tokens > 0 and left == 0
            return ready, 0.0 if ready else max(left, 0.0 if done.tokens else done.step_time)
        share = self.tokens(outer_step) / max(peers, 1)
        ready = done.tokens > 0 and (done.tokens >= share or done.leased == 0 or winding_up)
        if ready or not done.tokens:
            return ready, 0.0 if ready else done.step_time
        return False, (share - done.tokens) * done.step_time * done.steps / done.tokens

    def wait(self, trainers: Sequence[Told], *, outer_step: int, elapsed: float) -> float:
        """Seconds until the next round is due, by the reports of those live peers that have samples or tokens: 0 when
        it is, infinite when nobody can tell."""
        needed = max(1, min(self.quorum, len(trainers)))
        ready = sorted([0.0 if told.ready else told.eta or math.inf for told in trainers])[needed - 1]
        if self.by == "steps" or outer_step >= self.regular:
            return ready
        # A quorum has something to hand over.
        bringing = sorted([0.0 if told.tokens else told.eta or math.inf for told in trainers])[needed - 1]
        if self.by == "time":
            # A coordinator that has just come goes by the others' clocks.
            return max(bringing, 0.0 if ready == 0 else self.seconds - elapsed, 0.0)
        if all(told.tokens and (not told.leased or told.tokens >= self.cap) for told in trainers):
            return 0.0  # more of it would not count, or cannot be had
        missing = self.tokens(outer_step) - sum(min(told.tokens, self.cap) for told in trainers)
        if missing <= 0:
            return bringing
        pace = sum(
            told.tokens / (told.steps * told.step_time)
            for told in trainers if told.leased and told.steps and told.step_time
        )  # fmt: skip
        return max(bringing, missing / pace if pace else math.inf)
