"""Run a coroutine as a process: Ctrl-C and SIGTERM both end it in order, so that nothing it started is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any

INTERRUPTED = 130


def run_to_end(work: Coroutine[Any, Any, int]) -> int:
    """``asyncio.run``, with SIGTERM cancelling the work as SIGINT does. Returns its exit code, or 130 when cancelled.

    While the work has signal handlers of its own, those count.
    """
    return asyncio.run(_guarded(work))


async def _guarded(work: Coroutine[Any, Any, int]) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    cancelled = False

    def cancel() -> None:
        nonlocal cancelled
        cancelled = True
        task.cancel()

    with contextlib.suppress(NotImplementedError, ValueError):
        loop.add_signal_handler(signal.SIGTERM, cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if cancelled:
            return INTERRUPTED
        raise
