"""Waiting for news, with a limit: cheaper than ``asyncio.timeout`` around an ``asyncio.Event``, without exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Wakeup:
    """Wakes the tasks that wait for it. :meth:`set` is remembered until :meth:`clear`, :meth:`pulse` is not."""

    __slots__ = ("_flag", "_waiters")

    def __init__(self) -> None:
        self._flag = False
        self._waiters: list[asyncio.Future[bool]] = []

    def set(self) -> None:
        """Wake all who wait, and whoever waits before it is cleared."""
        self._flag = True
        self.pulse()

    def clear(self) -> None:
        self._flag = False

    def pulse(self) -> None:
        """Wake all who wait now."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)

    async def wait(self, seconds: float) -> bool:
        """Until woken, at most ``seconds``; whether it was."""
        if self._flag:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = asyncio.Future(loop=loop)
        timer = loop.call_later(seconds, _expire, waiter)
        self._waiters.append(waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.remove(waiter)


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


class Agenda:
    """When a task looks again: what changes by news wakes it, what comes due by time alone is noted as it looks.

    now: the clock.
    """

    __slots__ = ("_now", "look_at", "wake")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.wake = Wakeup()
        self.look_at = float("-inf")
        """When it looks again, unless woken earlier."""

    def begin(self, seconds: float) -> None:
        """It looks now, and in so many seconds at the latest."""
        self.wake.clear()
        self.look_at = self._now() + seconds

    def reached(self, moment: float) -> bool:
        """Whether that moment has come; if not, it looks again then."""
        if self._now() >= moment:
            return True
        if moment < self.look_at:
            self.look_at = moment
        return False

    def wait(self) -> Awaitable[bool]:
        """Until it is to look again."""
        return self.wake.wait(max(self.look_at - self._now(), 0.001))
