"""Run a coroutine as a process: a signal ends it in order, so that nothing it started is left behind.

Ctrl-C (SIGINT) and a closed terminal (SIGHUP) interrupt: exit code 130. SIGTERM asks a service to leave, which then is
done what was asked: exit code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

INTERRUPTED = 130

T = TypeVar("T")


class Ending:
    """Which signal, if any, has asked this process to end; the first one counts."""

    def __init__(self, *, service: bool) -> None:
        self.signal: int | None = None
        self._service = service

    @property
    def code(self) -> int:
        """The exit code of an orderly end: 0, or 130 when it was interrupted."""
        return 0 if self.signal is None or (self._service and self.signal == signal.SIGTERM) else INTERRUPTED

    @property
    def reason(self) -> str:
        if self.signal is None:
            return "done"
        return "interrupted" if self.code else "asked to end"

    def heard(self, number: int) -> bool:
        """Note a signal; True when it is the first."""
        first = self.signal is None
        if first:
            self.signal = number
        return first


_ending: ContextVar[Ending] = ContextVar("ending")


def ending() -> Ending:
    """Of the process that :func:`run_to_end` runs; where it does not, one that nothing has asked to end."""
    try:
        return _ending.get()
    except LookupError:
        return Ending(service=True)


def run_to_end(work: Coroutine[Any, Any, int], *, service: bool = False) -> int:
    """``asyncio.run``, with a signal cancelling the work, once. Returns its exit code, or that of the signal.

    service: the work goes on until it is asked to end, so SIGTERM is an end like any other (code 0). A second signal
    does not interrupt the leaving. Work that must not be cancelled takes the signals itself (:func:`on_signals`).
    """
    return asyncio.run(_guarded(work, Ending(service=service)))


async def _guarded(work: Coroutine[Any, Any, int], now: Ending) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    _ending.set(now)

    def cancel(number: int) -> None:
        if now.heard(number):
            task.cancel()

    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
        for number in _signals():
            loop.add_signal_handler(number, cancel, number)
    try:
        return await work
    except asyncio.CancelledError:
        if now.signal is not None:
            return now.code
        raise


@contextlib.contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at a signal instead of cancelling; :func:`ending` tells which one.

    The process leaves after this, whatever the reason, and in bounded time; so from then on signals say nothing more.
    """
    loop, now = asyncio.get_running_loop(), ending()

    def heard(number: int) -> None:
        if now.heard(number):
            stop()

    numbers = _signals()
    for number in numbers:
        loop.add_signal_handler(number, heard, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.add_signal_handler(number, lambda: None)


def _signals() -> list[int]:
    """What asks us to end. SIGHUP is left alone where it is ignored: ``nohup`` wants the process to go on."""
    hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangup else [])]


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
