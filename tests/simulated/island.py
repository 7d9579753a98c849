"""An island of arithmetic: trains under the virtual clock at no cost, and keeps a ledger of every sample it used."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np

from atoll.protocol.errors import ResourceError
from atoll.protocol.island import Island, Progress, Snapshot
from atoll.protocol.messages import Span


class SimulatedIsland(Island):
    """Trains one step every ``step_time`` virtual seconds while it has a lease and is not frozen.

    A step pulls θ towards ``target`` and adds noise drawn from its sample units, so that every peer's Δ differs and
    the run has a loss (the distance to the target) that falls.
    """

    def __init__(
        self, parameters: int, *, step_time: float = 0.1, batch: int = 4, tokens_per_unit: int = 10,
        target: np.ndarray | None = None, freeze_time: float = 0.0,
    ) -> None:  # fmt: skip
        self.local = np.zeros(parameters, np.float32)
        self.target = np.ones(parameters, np.float32) if target is None else target
        self.step_time = step_time
        self.batch = batch
        self.tokens_per_unit = tokens_per_unit
        self.freeze_time = freeze_time
        self.pending: list[int] = []
        """Sample units whose progress is in θ and has not been committed."""
        self.used: list[int] = []
        """Every unit ever trained on by this incarnation."""
        self.frozen = True
        self.closed = False
        self.fail_next = False
        """The next freeze fails, as when a trainer child has died."""
        self.fail_always = False
        self._spans: deque[Span] = deque()
        self._steps = 0
        self._since = 0.0

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _leased(self) -> int:
        return sum(span.count for span in self._spans)

    def _advance(self) -> None:
        """Do the steps that the clock and the lease allow."""
        if self.frozen or self.closed:
            return
        due = int((self._now() - self._since) / self.step_time)
        for _ in range(due):
            if self._leased() < 1:
                self._since = self._now()
                break
            units = self._take(self.batch)
            noise = np.random.default_rng(units[0]).standard_normal(len(self.local), np.float32)
            self.local += np.float32(0.01) * (self.target - self.local) + np.float32(0.002) * noise
            self.pending += units
            self.used += units
            self._steps += 1
            self._since += self.step_time

    def _take(self, count: int) -> list[int]:
        units: list[int] = []
        while self._spans and len(units) < count:
            span = self._spans.popleft()
            take = min(span.count, count - len(units))
            units += range(span.start, span.start + take)
            if take < span.count:
                self._spans.appendleft(Span(span.start + take, span.count - take))
        return units

    def progress(self) -> Progress:
        self._advance()
        units = len(self.pending)
        return Progress(self._steps, units * self.tokens_per_unit, units, self._leased(), self.step_time)

    def lease(self, spans: list[Span]) -> None:
        self._advance()
        if not self._spans:
            self._since = self._now()
        self._spans.extend(spans)

    def revoke(self) -> None:
        self._spans.clear()

    async def freeze(self) -> Snapshot:
        self._advance()
        if self.fail_next or self.fail_always:
            self.fail_next, self.frozen = False, True
            raise ResourceError("the trainer died")
        self.frozen = True
        if self.freeze_time:
            await asyncio.sleep(self.freeze_time)
        return Snapshot(self._steps, len(self.pending) * self.tokens_per_unit, len(self.pending), self._leased())

    async def resume(self, *, reload: bool, spent: float, outer_step: int) -> None:
        if spent >= 1:
            self.pending.clear()
            self._steps = 0
        elif spent > 0:
            keep = round(len(self.pending) * (1 - spent))
            self.pending = self.pending[len(self.pending) - keep :]
            self._steps = round(self._steps * (1 - spent))
        self.frozen = False
        self._since = self._now()

    async def close(self) -> None:
        self.closed = True
