"""Notices when this process does not run: suspended, stopped, or starved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class HoldUps:
    """Looks at the clock again and again, by a timer: a task for so little would cost twice as much.

    now: a clock that goes on meanwhile. every: seconds between two looks. most: seconds that a look may be late.
    told: called with the seconds by which one was later.
    """

    def __init__(self, now: Callable[[], float], told: Callable[[float], None], *, every: float, most: float) -> None:
        self._now = now
        self._told = told
        self._every = every
        self._most = most
        self._last = 0.0
        self._timer: asyncio.Handle | None = None

    def start(self) -> None:
        self._last = self._now()
        self._timer = asyncio.get_running_loop().call_later(self._every, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        before, self._last = self._last, self._now()
        late = self._last - before - self._every
        loop = asyncio.get_running_loop()
        if late > self._most:
            # After what has become due meanwhile: some of it may have been said by others.
            self._timer = loop.call_soon(self._late, late)
        else:
            self._timer = loop.call_later(self._every, self._look)

    def _late(self, seconds: float) -> None:
        self._told(seconds)
        self.start()
