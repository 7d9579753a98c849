"""An island of arithmetic: trains under the virtual clock at no cost, and keeps a ledger of every sample it used."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from atoll.node.trainer import FREEZE_STEPS, FREEZE_TIMEOUT
from atoll.node.watchdog import SLACK, STEPS
from atoll.protocol.errors import ResourceError
from atoll.protocol.island import Island, Progress, Run, Snapshot
from atoll.protocol.messages import Span
from atoll.protocol.overlap import left, move

NOISES = 257
START = 5.0
"""Seconds that a trainer child takes to start again."""


@lru_cache(maxsize=4)
def _noises(parameters: int) -> np.ndarray:
    return np.float32(0.002) * np.random.default_rng(parameters).standard_normal((NOISES, parameters), np.float32)


def noise(unit: int, parameters: int) -> np.ndarray:
    """What a step that begins with that sample unit adds to θ, float32[parameters]."""
    row: np.ndarray = _noises(parameters)[(unit * 2654435761 >> 7) % NOISES]
    return row


class SimulatedIsland(Island):
    """Trains one step every ``step_time`` virtual seconds while it has a lease and is not paused.

    A step pulls θ towards ``target`` and adds noise drawn from its sample units, so that every peer's Δ differs and
    the run has a loss (the distance to the target) that falls.
    """

    pull = 0.01
    """With 0 a step does not depend on θ."""

    def __init__(
        self, parameters: int, *, step_time: float = 0.1, batch: int = 4, tokens_per_unit: int = 10,
        target: np.ndarray | None = None, freeze_time: float = 0.0, overlap: bool = False, several: bool = False,
    ) -> None:  # fmt: skip
        self.local = np.zeros(parameters, np.float32)
        self.frozen = np.zeros(parameters, np.float32) if overlap else None
        self.several = several
        """Whether rounds of several fragments may be in flight at once."""
        self.target = np.ones(parameters, np.float32) if target is None else target
        self.step_time = step_time
        self.batch = batch
        self.tokens_per_unit = tokens_per_unit
        self.freeze_time = freeze_time
        self.pending: list[range] = []
        """Sample units whose progress is in θ and has not been committed."""
        self.used: list[range] = []
        """Every unit ever trained on by this incarnation."""
        self.brought: tuple[np.ndarray, tuple[range, ...]] = (self.local.copy(), ())
        """θ and the pending units at the last freeze or snapshot: what the next roster is given."""
        self.brought_count = 0
        """Units ever used until then."""
        self.paused = True
        self.closed = False
        self.in_flight = 0
        """Steps made between a snapshot and the end of its round."""
        self.fail_next = False
        """The next freeze, snapshot or move fails, as when a trainer child has died."""
        self.fail_always = False
        self.cut = 0
        """Units that steps had taken which a hang cut off."""
        self._hung = False
        """Whether its trainer child answers nothing, and makes no step, until it is ended for that."""
        self._silent: float | None = None
        """Since when it ought to have made a step and has not, if it hangs."""
        self._up = 0.0
        """When its present child is ready."""
        self.revoked = 0
        """Units of leases that were taken back unused: their chain was left."""
        self._time: Callable[[], float] | None = None
        """The virtual clock."""
        self._spans: deque[Span] = deque()
        self._leased = 0
        self._units = 0
        self._steps = 0
        self._since = 0.0
        self._begun = 0.0
        """Seconds of the step that a freeze found running: a trainer ends it first, and loses nothing."""
        self._until: int | None = None
        self._ahead: int | None = None
        """How many more steps that was when it was said."""
        self._still = 0.0
        """Since when it stands at its limit; 0 while it does not."""
        self._stood = 0.0
        """Seconds for which it has stood there and not told so."""
        self.idle = 0.0
        """Seconds for which it has stood still for rounds, paused or at its limit, in all."""
        self._froze_at = 0.0

    @property
    def count(self) -> int:
        """Units ever trained on."""
        return sum(map(len, self.used))

    def units(self, start: int, stop: int) -> tuple[range, ...]:
        """Of the units ever used, in order, those from number ``start`` to before ``stop``."""
        found, at = [], 0
        for span in self.used:
            first, last = max(start - at, 0), min(stop - at, len(span))
            if first < last:
                found.append(span[first:last])
            at += len(span)
        return tuple(found)

    def _now(self) -> float:
        if self._time is None:
            self._time = asyncio.get_running_loop().time
        return self._time()

    @property
    def leased(self) -> int:
        """Sample units leased and unused."""
        return self._leased

    @property
    def hangs(self) -> bool:
        """Whether its trainer child hangs, or is being started again."""
        self._advance()
        return self._hung or self._now() < self._up

    def hang(self) -> None:
        """Its trainer child answers nothing from now on. It is ended as a real one is: when it has made no step for
        long though it ought to (:mod:`atoll.node.watchdog`), or does not answer an order. Its parameters stay."""
        self._advance()
        self._hung, self._silent = True, None
        if self._ought():
            first = self._spans[0]
            count = min(self.batch, first.count)
            self._spans[0] = Span(first.start + count, first.count - count)
            if count == first.count:
                self._spans.popleft()
            self._leased -= count
            self.cut += count
        self._watch()

    def _ought(self) -> bool:
        return not self.paused and self._leased > 0 and (self._until is None or self._steps < self._until)

    def _watch(self) -> None:
        """What the watchdog of a trainer that hangs does until now."""
        if not self._ought():
            self._silent = None
            return
        now = self._now()
        if self._silent is None:
            self._silent = now
        if now >= self._silent + SLACK + STEPS * self.step_time:
            self._ended(self._silent + SLACK + STEPS * self.step_time)

    def _ended(self, at: float) -> None:
        """Its child was ended then, and another is being started."""
        self._hung, self._silent, self._up = False, None, at + START

    async def _answer(self) -> bool:
        """Wait for an answer of the child, as long as a real one is waited for; whether it came."""
        if self._hung:
            await asyncio.sleep(FREEZE_TIMEOUT + FREEZE_STEPS * self.step_time)
            if self._hung:
                self._ended(self._now())
        return self._now() >= self._up

    def _advance(self) -> None:
        """Do the steps that the clock and the lease allow."""
        if self._hung and not self.closed:
            self._watch()
        if self.paused or self.closed or self._hung:
            return
        now = self._now()
        self._since = max(self._since, self._up)
        if now - self._since < self.step_time:
            return
        for _ in range(int((now - self._since) / self.step_time)):
            if self._until is not None and self._steps >= self._until:
                self._still = self._still or self._since
                break
            if not self._leased:
                self._since = now
                break
            self.in_flight += self._until is not None
            first = self._take(self.batch)
            self.local += np.float32(self.pull) * (self.target - self.local)
            self.local += noise(first, len(self.local))
            self._steps += 1
            self._since += self.step_time

    def _take(self, count: int) -> int:
        """Use up to so many units; the first of them."""
        first = self._spans[0].start
        while self._spans and count:
            span = self._spans.popleft()
            take = min(span.count, count)
            count -= take
            for ledger in (self.pending, self.used):
                if ledger and ledger[-1].stop == span.start:
                    ledger[-1] = range(ledger[-1].start, span.start + take)
                else:
                    ledger.append(range(span.start, span.start + take))
            self._leased -= take
            self._units += take
            if take < span.count:
                self._spans.appendleft(Span(span.start + take, span.count - take))
        return first

    @property
    def standing(self) -> bool:
        """Whether it does not train because of a round: paused, or as far ahead of it as it may be."""
        self._advance()
        return self.paused or self._still > 0

    def progress(self) -> Progress:
        self._advance()
        return Progress(self._steps, self._units * self.tokens_per_unit, self._units, self._leased, self.step_time)

    def lease(self, spans: list[Span]) -> None:
        self._advance()
        if not self._spans:
            self._since = self._now()
        self._spans.extend(spans)
        self._leased = sum(span.count for span in self._spans)
        if self._hung:
            self._watch()

    def revoke(self) -> None:
        self.revoked += self._leased
        self._spans.clear()
        self._leased = 0

    def _fail(self) -> None:
        if self.fail_next or self.fail_always:
            self.fail_next, self.paused = False, True
            raise ResourceError("the trainer died")

    async def _dead(self) -> None:
        """An order to a child that hangs, or is not there."""
        self.paused = True
        await self._answer()
        raise ResourceError("the trainer hung, and is being started again")

    def _snapshot(self) -> Snapshot:
        self.brought, self.brought_count = (self.local.copy(), tuple(self.pending)), self.count
        return Snapshot(self._steps, self._units * self.tokens_per_unit, self._units, self._leased)

    def keep(self) -> str:
        assert self.paused
        pending = [[units.start, units.stop] for units in self.pending]
        spans = [[span.start, span.count] for span in self._spans]
        return json.dumps({"steps": self._steps, "pending": pending, "spans": spans})

    def restore(self, kept: str) -> None:
        told = json.loads(kept)
        self.pending = [range(start, stop) for start, stop in told["pending"]]
        self._units = sum(map(len, self.pending))
        self._steps = told["steps"]
        self.lease([Span(start, count) for start, count in told["spans"]])

    async def freeze(self) -> Snapshot:
        self._advance()
        if self.hangs:
            await self._dead()
        self._fail()
        if not self.paused and self._leased and self._until is None:
            self._begun = self._now() - self._since
        self._froze_at = self._froze_at if self.paused else self._now()
        self.paused = True
        if self.freeze_time:
            await asyncio.sleep(self.freeze_time)
        return self._snapshot()

    async def snapshot(self, ahead: int, parts: Sequence[slice], until: int | None = None) -> Snapshot:
        assert self.frozen is not None
        assert not self.paused
        self._advance()
        if self.hangs:
            await self._dead()
        self._fail()
        if not self.several:
            self.frozen.fill(np.nan)  # of no use to anyone but the fragment
        for part in parts:
            self.frozen[part] = self.local[part]
        if self._until is None:
            self._stood = 0.0
        self._limit(self._steps + ahead if until is None else min(self._steps + ahead, until))
        return self._snapshot()

    def _limit(self, until: int | None) -> None:
        if self._still:
            stood = self._now() - self._still
            self._stood += stood
            self.idle += stood
            self._since = self._now()
        self._until, self._still = until, 0.0
        self._ahead = None if until is None else max(until - self._steps, 0)

    def _spend(self, spent: float, of: Snapshot | None) -> None:
        """The oldest go first."""
        drop = self._units - left(self._units, spent, of.units if of is not None else None)
        self._units -= drop
        while drop:
            oldest = self.pending[0]
            take = min(drop, len(oldest))
            drop -= take
            if take == len(oldest):
                del self.pending[0]
            else:
                self.pending[0] = oldest[take:]
        self._steps = left(self._steps, spent, of.steps if of is not None else None)

    async def move(
        self, runs: list[Run], *, spent: float, outer_step: int, of: Snapshot | None, until: int | None = None
    ) -> Snapshot:
        assert self.frozen is not None
        assert not self.paused
        self._advance()
        await self._answer()  # if none comes, the peer moves the parameters itself
        if self.fail_next or self.fail_always:
            self.local[:] = np.nan
        self._fail()
        for run in runs:
            move(self.local[run.start : run.stop], run.keep, self.frozen[run.start : run.stop])
        before = (self._steps, self._units * self.tokens_per_unit, self._units, self._leased)
        self._spend(spent, of)
        self._limit(until - (before[0] - self._steps) if until is not None else None)
        stood, self._stood = self._stood, 0.0
        return Snapshot(*before, stood)

    async def resume(
        self, *, reload: bool, spent: float, outer_step: int, of: Snapshot | None = None, ahead: int | None = None,
        until: int | None = None,
    ) -> None:  # fmt: skip
        assert self.paused or not (reload or spent)
        self._advance()
        before = self._steps
        self._spend(spent, of)
        limits = [self._steps + ahead] if ahead is not None else []
        limits += [until - (before - self._steps)] if until is not None else []
        self._limit(min(limits, default=None))
        if self.paused:
            self.idle += self._now() - self._froze_at if self._froze_at else 0.0
            self._froze_at = 0.0
            self._since = self._now() - (0.0 if reload else self._begun)
            self._begun = 0.0
        self.paused = False
        if self._hung:
            self._watch()

    async def close(self) -> None:
        self.closed = True
