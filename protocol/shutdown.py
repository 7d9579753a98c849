"""Run a coroutine as a process: Ctrl-C and SIGTERM both end it in order, so that nothing it started is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

INTERRUPTED = 130

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, int]) -> int:
    """``asyncio.run``, with SIGINT and SIGTERM both cancelling the work, once. Returns its exit code, or 130.

    A second signal does not interrupt the leaving. While the work has signal handlers of its own, those count.
    """
    return asyncio.run(_guarded(work))


async def _guarded(work: Coroutine[Any, Any, int]) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    cancelled = False

    def cancel() -> None:
        nonlocal cancelled
        if not cancelled:
            cancelled = True
            task.cancel()

    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if cancelled:
            return INTERRUPTED
        raise


async def aside(function: Callable[[], T]) -> T:
    """Run what may take long (imports, compiling, scoring) in a daemon thread, which nobody waits for when leaving.

    ``asyncio.to_thread`` is for what must be finished: the end of the loop, and of the process, waits for it.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def tell(set_it: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            set_it(value)

    def work() -> None:
        told: tuple[Callable[[Any], None], Any]
        try:
            told = result.set_result, function()
        except BaseException as error:
            told = result.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=work, daemon=True, name="atoll aside").start()
    return await result
