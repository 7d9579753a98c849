"""An island of arithmetic: trains under the virtual clock at no cost, and keeps a ledger of every sample it used."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import lru_cache

import numpy as np

from atoll.protocol.errors import ResourceError
from atoll.protocol.island import Island, Progress, Snapshot
from atoll.protocol.messages import Span

NOISES = 257


@lru_cache(maxsize=4)
def _noises(parameters: int) -> np.ndarray:
    return np.float32(0.002) * np.random.default_rng(parameters).standard_normal((NOISES, parameters), np.float32)


def noise(unit: int, parameters: int) -> np.ndarray:
    """What a step that begins with that sample unit adds to θ, float32[parameters]."""
    row: np.ndarray = _noises(parameters)[(unit * 2654435761 >> 7) % NOISES]
    return row


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
        self.pending: list[range] = []
        """Sample units whose progress is in θ and has not been committed."""
        self.used: list[range] = []
        """Every unit ever trained on by this incarnation."""
        self.frozen = True
        self.closed = False
        self.fail_next = False
        """The next freeze fails, as when a trainer child has died."""
        self.fail_always = False
        self.revoked = 0
        """Units of leases that were taken back unused: their chain was left."""
        self._spans: deque[Span] = deque()
        self._leased = 0
        self._units = 0
        self._steps = 0
        self._since = 0.0

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def leased(self) -> int:
        """Sample units leased and unused."""
        return self._leased

    def _advance(self) -> None:
        """Do the steps that the clock and the lease allow."""
        if self.frozen or self.closed:
            return
        now = self._now()
        for _ in range(int((now - self._since) / self.step_time)):
            if not self._leased:
                self._since = now
                break
            first = self._take(self.batch)
            self.local += np.float32(0.01) * (self.target - self.local)
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

    def progress(self) -> Progress:
        self._advance()
        return Progress(self._steps, self._units * self.tokens_per_unit, self._units, self._leased, self.step_time)

    def lease(self, spans: list[Span]) -> None:
        self._advance()
        if not self._spans:
            self._since = self._now()
        self._spans.extend(spans)
        self._leased = sum(span.count for span in self._spans)

    def revoke(self) -> None:
        self.revoked += self._leased
        self._spans.clear()
        self._leased = 0

    async def freeze(self) -> Snapshot:
        self._advance()
        if self.fail_next or self.fail_always:
            self.fail_next, self.frozen = False, True
            raise ResourceError("the trainer died")
        self.frozen = True
        if self.freeze_time:
            await asyncio.sleep(self.freeze_time)
        return Snapshot(self._steps, self._units * self.tokens_per_unit, self._units, self._leased)

    async def resume(self, *, reload: bool, spent: float, outer_step: int) -> None:
        if spent > 0:
            # The oldest go first.
            drop = self._units - round(self._units * (1 - spent)) if spent < 1 else self._units
            self._units -= drop
            while drop:
                oldest = self.pending[0]
                take = min(drop, len(oldest))
                drop -= take
                if take == len(oldest):
                    del self.pending[0]
                else:
                    self.pending[0] = oldest[take:]
            self._steps = round(self._steps * (1 - spent)) if spent < 1 else 0
        self.frozen = False
        self._since = self._now()

    async def close(self) -> None:
        self.closed = True
