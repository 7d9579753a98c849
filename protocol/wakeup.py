"""Waiting for news, with a limit: cheaper than ``asyncio.timeout`` around an ``asyncio.Event``, without exceptions."""

from __future__ import annotations

import asyncio


class Wakeup:
    """Wakes the tasks that wait for it. :meth:`set` is remembered until :meth:`clear`, :meth:`pulse` is not."""

    __slots__ = ("_flag", "_waiters")

    def __init__(self) -> None:
        self._flag = False
        self._waiters: dict[asyncio.Future[bool], None] = {}

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
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(seconds, _expire, waiter)
        self._waiters[waiter] = None
        try:
            return await waiter
        finally:
            timer.cancel()
            del self._waiters[waiter]


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
