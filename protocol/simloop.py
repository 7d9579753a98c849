"""An asyncio event loop under a virtual clock: what simulated peers run on.

Plain asyncio code (tasks, timeouts, queues, task groups) runs on it unchanged. Nothing waits: when no callback is
ready the clock jumps to the next timer, so hours pass in seconds, and one program has one order of execution.
``asyncio.wait`` and ``TaskGroup`` iterate sets of tasks, and objects hash by their address; the tasks and futures of
this loop hash by a serial number instead, so that the order does not change from run to run.

A :class:`SimProcess` is a set of callbacks that live and die together. A context variable says which one a callback
belongs to; it is inherited by every task and timer that the process' code makes. A frozen process' callbacks wait
(SIGSTOP), a killed one's never run again: no ``finally``, no cancellation (SIGKILL).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import math
import sys
import warnings
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import msgspec

from .errors import SimulationError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

RUNNING, FROZEN, DEAD = 0, 1, 2
_PROCESS: ContextVar[SimProcess | None] = ContextVar("atoll_sim_process", default=None)
_SPIN_LIMIT = 1_000_000
_CLOSE_LIMIT = 1_000
_GOODBYE = 60.0


class _Gone(GeneratorExit):
    """Raised into code of the dead that is being closed when it asks the loop for anything."""


def _never() -> bool:
    return False


def current_process() -> SimProcess | None:
    """The simulated process whose code is running, or None (a test's own code, the network)."""
    return _PROCESS.get()


class SimHandle(msgspec.Struct, eq=False):
    """A callback to run, at once or at a virtual time. ``context`` None: the network's own, never held back.

    What asyncio asks of a handle, and none of its classes: hundreds of thousands are made in a simulated hour.
    """

    callback: Callable[..., object] | None
    arguments: tuple[Any, ...]
    context: Context | None
    time: float = -math.inf
    """Virtual; of a timer only."""
    loop: SimLoop | None = None
    """Of a timer that waits."""
    is_cancelled: bool = False

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self.callback = None
            self.arguments = ()
            if self.loop is not None:
                self.loop._timer_cancelled()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        """The virtual time of a timer."""
        return self.time

    def __repr__(self) -> str:
        when = f" at {self.time:.6f}" if self.time > -math.inf else ""
        return f"<SimHandle {'cancelled' if self.is_cancelled else self.callback!r}{when}>"


class SimTask(asyncio.Task[Any]):
    """A task that hashes by its serial number in its loop."""

    __slots__ = ("context", "process", "serial")

    def __init__(
        self, coroutine: Any, loop: SimLoop, name: object, context: Context | None, serial: int, **options: Any
    ) -> None:
        self.serial = serial
        self.context = context = copy_context() if context is None else context
        self.process = context.get(_PROCESS)
        super().__init__(
            coroutine, loop=loop, name=f"task-{serial}" if name is None else str(name), context=context, **options
        )

    def __hash__(self) -> int:
        return self.serial


class SimFuture(asyncio.Future[Any]):
    """A future that hashes by its serial number in its loop."""

    __slots__ = ("serial",)
    serial: int

    def __hash__(self) -> int:
        return self.serial


class SimProcess:
    """Callbacks that run, stop and die together."""

    __slots__ = ("_loop", "backlog", "context", "name", "state")

    def __init__(self, loop: SimLoop, name: str) -> None:
        self._loop = loop
        self.name = name
        self.state = RUNNING
        self.backlog: list[SimHandle] = []
        self.context = loop.base_context.copy()
        self.context.run(_PROCESS.set, self)

    def create_task(self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a coroutine inside the process, whoever calls."""
        return self._loop.create_task(coroutine, name=name, context=self.context.copy())

    def freeze(self) -> None:
        """SIGSTOP: what becomes due waits for :meth:`thaw`. The callback that is running ends first."""
        if self.state == RUNNING:
            self.state = FROZEN

    def thaw(self) -> None:
        """SIGCONT: what became due meanwhile runs now, in its order."""
        if self.state == FROZEN:
            self.state = RUNNING
            self._loop._prepend(self.backlog)
            self.backlog = []

    def kill(self) -> None:
        """SIGKILL: nothing of the process runs again.

        When its own code causes the kill (an event hook), that code goes on up to its next suspension.
        """
        if self.state != DEAD:
            self.state = DEAD
            self._loop._bury(self)
            self.backlog = []

    def __repr__(self) -> str:
        return f"<SimProcess {self.name} {('running', 'frozen', 'dead')[self.state]}>"


class SimLoop(asyncio.AbstractEventLoop):
    """The loop. For one run: :func:`run` closes it.

    start: virtual seconds at which the clock begins.
    """

    def __init__(self, *, start: float = 0.0) -> None:
        self.clock = start
        """Virtual seconds, as :meth:`time` returns them."""
        self.base_context = copy_context()
        self.base_context.run(_PROCESS.set, None)
        self.callbacks = 0
        """Callbacks run so far."""
        self.defects: list[BaseException] = []
        """Unhandled exceptions; :func:`run` raises them at its end."""
        self._ready: deque[SimHandle] = deque()
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._cancelled_timers = 0
        self._sequence = 0
        self._serial = 0
        self._spins = 0
        self._processes: list[SimProcess] = []
        self._graveyard: list[SimTask] = []
        self._watched: list[asyncio.Task[Any]] = []
        self._muted = False
        self._closing = False
        self._closed = False
        self._running = False
        self._stopping = False
        self._debug = False
        self._exception_handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None

    # -- scheduling

    def time(self) -> float:
        return self.clock

    # asyncio cancels what these return, and asks no more of it.

    def call_soon(  # type: ignore[override]
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> SimHandle:
        if self._muted:
            raise _Gone
        handle = SimHandle(callback, args, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> SimHandle:
        """As :meth:`call_soon`. The loop never sleeps, so there is nothing to wake; order between threads is open."""
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> SimHandle:
        return self._schedule(self.clock + delay, callback, args, copy_context() if context is None else context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> SimHandle:
        return self._schedule(when, callback, args, copy_context() if context is None else context)

    def kernel_at(self, when: float, callback: Callable[[*Ts], object], *args: *Ts) -> SimHandle:
        """As :meth:`call_at`, for the simulated world itself: belongs to no process, whoever calls."""
        if self._muted:
            raise _Gone
        handle = SimHandle(callback, args, None, when, self)
        self._sequence = sequence = self._sequence + 1
        heapq.heappush(self._timers, (when, sequence, handle))
        return handle

    def _schedule(
        self, when: float, callback: Callable[..., object], arguments: tuple[Any, ...], context: Context | None
    ) -> SimHandle:
        if self._muted:
            raise _Gone
        handle = SimHandle(callback, arguments, context, when, self)
        self._sequence = sequence = self._sequence + 1
        heapq.heappush(self._timers, (when, sequence, handle))
        return handle

    def _timer_cancelled(self) -> None:
        self._cancelled_timers += 1
        if self._cancelled_timers > 1000 and self._cancelled_timers * 2 > len(self._timers):
            # Most timers are timeouts that never fire. In place: the running loop holds the list.
            self._timers[:] = [entry for entry in self._timers if not entry[2].is_cancelled]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def _prepend(self, handles: list[SimHandle]) -> None:
        self._ready.extendleft(reversed(handles))

    # -- processes

    def process(self, name: str) -> SimProcess:
        """A new process: host code starts by its :meth:`SimProcess.create_task`."""
        process = SimProcess(self, name)
        self._processes.append(process)
        return process

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Report at the end of the run the exception that this task ended with, unless someone retrieved it."""
        self._watched.append(task)

    def _bury(self, process: SimProcess) -> None:
        # A coroutine that is collected runs its ``finally`` blocks, which a killed process does not; so its tasks
        # are kept to the end of the run.
        self._graveyard.extend(sorted(self._pending(process), key=hash))
        if process in self._processes:
            self._processes.remove(process)

    def tasks_of(self, process: SimProcess) -> list[asyncio.Task[Any]]:
        """The tasks of a process that have not ended, oldest first."""
        return sorted(self._pending(process), key=hash)

    def _pending(self, process: SimProcess | None) -> list[SimTask]:
        return [task for task in asyncio.all_tasks(self) if isinstance(task, SimTask) and task.process is process]

    # -- futures and tasks

    def create_future(self) -> asyncio.Future[Any]:
        if self._muted:
            raise _Gone
        future = SimFuture(loop=self)
        self._serial = future.serial = self._serial + 1
        return future

    def create_task(  # asyncio passes further options from 3.13 on
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[T]:
        if self._muted:
            coro.close()
            raise _Gone
        self._serial += 1
        task = SimTask(coro, self, name, context, self._serial, **options)
        if task.process is not None and task.process.state == DEAD:
            self._graveyard.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Runs ``func`` here and now."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def set_task_factory(self, factory: Any) -> None:
        if factory is not None:
            raise SimulationError("the simulated loop makes its own tasks; leave the task factory unset")

    def get_task_factory(self) -> None:
        return None

    # -- running

    def run_forever(self) -> None:
        self._run(None)

    def run_until_complete(self, future: Any) -> Any:
        self._check_open()
        main = asyncio.ensure_future(future, loop=self)
        self._run(main)
        return main.result()

    def _run(self, main: asyncio.Future[Any] | None, limit: float | None = None) -> None:
        """Run until ``main`` is done or :meth:`stop`, at most to the virtual time ``limit``."""
        self._check_open()
        if events._get_running_loop() is not None:
            raise RuntimeError("a simulated loop cannot run inside a running event loop")
        self._running = True
        self._stopping = False
        hooks = sys.get_asyncgen_hooks()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(finalizer=self._finalize_generator)
        try:
            self._turn(main, limit)
        finally:
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(None)
            self._running = False

    def _turn(self, main: asyncio.Future[Any] | None, limit: float | None) -> None:
        """Again and again: jump to the next timer when nothing is ready, and run what is. One function, since all that
        a simulated hour costs passes through it."""
        ready, timers, pop, owner = self._ready, self._timers, heapq.heappop, _PROCESS
        take, put = ready.popleft, ready.append
        done = _never if main is None else main.done
        while not self._stopping and not done():
            if not ready:
                while timers and timers[0][2].is_cancelled:
                    pop(timers)
                    self._cancelled_timers -= 1
                if not timers:
                    waiting = self._report(main)
                    raise SimulationError(f"deadlock at {self.clock:.6f} s: nothing is due any more{waiting}")
                when = timers[0][0]
                if when > self.clock:
                    if limit is not None and when > limit:
                        raise SimulationError(f"not done after {limit:g} virtual seconds{self._report(main)}")
                    self.clock = when
                    self._spins = 0
            self._spins += 1
            if self._spins > _SPIN_LIMIT:
                raise SimulationError(
                    f"the clock stands still at {self.clock:.6f} s: some task spins (sleep(0) in a loop?)"
                    f"{self._report(main)}"
                )
            clock = self.clock
            while timers and timers[0][0] <= clock:
                handle = pop(timers)[2]
                if handle.is_cancelled:
                    self._cancelled_timers -= 1
                else:
                    handle.loop = None
                    put(handle)
            count = len(ready)
            self.callbacks += count
            for _ in range(count):
                handle = take()
                if handle.is_cancelled:
                    continue
                context = handle.context
                try:
                    if context is None:
                        handle.callback(*handle.arguments)  # type: ignore[misc]
                        continue
                    process = context.get(owner)
                    if process is not None and process.state != RUNNING:
                        if process.state == FROZEN:
                            process.backlog.append(handle)
                        continue
                    context.run(handle.callback, *handle.arguments)  # type: ignore[arg-type]
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    message = f"exception in callback {handle.callback!r}"
                    self.call_exception_handler({"message": message, "exception": error, "handle": handle})

    def _report(self, main: asyncio.Future[Any] | None) -> str:
        lines = []
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, SimTask)]
        buried = set(self._graveyard)
        tasks = [task for task in sorted(tasks, key=hash) if task not in buried]
        for task in tasks[:12]:
            frames = task.get_stack(limit=1)
            where = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "not started"
            process = "" if task.process is None else f" of {task.process.name}"
            lines.append(f"  {'main, ' if task is main else ''}{task.get_name()}{process}: waits in {where}")
        if len(tasks) > 12:
            lines.append(f"  and {len(tasks) - 12} more")
        for frozen in self._processes:
            if frozen.state == FROZEN:
                lines.append(f"  {frozen.name} is frozen with {len(frozen.backlog)} callbacks waiting")
        return "".join("\n" + line for line in lines)

    def _finalize_generator(self, generator: Any) -> None:
        if not (self._muted or self._closed):
            self.create_task(generator.aclose())
            return
        closing = generator.aclose()
        with contextlib.suppress(BaseException):
            closing.send(None)

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closing(self) -> bool:
        """The run is over: what is left is being ended."""
        return self._closing

    def is_closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the simulated loop is closed; make a new one for every run")

    def close(self) -> None:
        """End everything: processes as by a power cut, other tasks by cancellation. Idempotent."""
        if self._closed:
            return
        self._closing = True
        try:
            self._end()
        finally:
            self._closed = self._muted = True
            self._ready.clear()
            self._timers.clear()

    def _end(self) -> None:
        for process in list(self._processes):
            process.kill()
        loose = sorted(self._pending(None), key=hash)
        for task in loose:
            task.cancel()
        if loose:
            with contextlib.suppress(SimulationError):
                self._run(asyncio.gather(*loose, return_exceptions=True), limit=self.clock + _GOODBYE)
        self._graveyard.extend(task for task in loose if not task.done())
        for watched in self._watched:
            # The flag tells whether anybody has asked for the task's exception.
            if watched.done() and getattr(watched, "_log_traceback", False):
                error = watched.exception()
                assert error is not None
                self.defects.append(error)
        self._watched.clear()
        self._empty_graveyard()
        # Exceptions that nobody retrieved are reported when their task is collected.
        gc.collect()

    def _empty_graveyard(self) -> None:
        """Close the coroutines of the dead, at the end of everything.

        Python does not let go of a suspended coroutine without running its ``finally`` blocks. Nothing that they
        await or schedule is done: the loop raises :class:`_Gone` into them, which no ``except Exception`` catches.
        """
        for task in self._graveyard:
            asyncio.Future.cancel(task)  # done, so whoever awaits it in a ``finally`` goes on at once
        self._muted = True
        events._set_running_loop(self)
        try:
            with warnings.catch_warnings():
                # A coroutine that a dying frame had made and not yet awaited.
                warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
                while self._graveyard:
                    self._close_coroutine(self._graveyard.pop())
        finally:
            events._set_running_loop(None)
            self._muted = False
            self._ready.clear()

    def _close_coroutine(self, task: SimTask) -> None:
        coroutine: Any = task.get_coro()
        asyncio.tasks._enter_task(self, task)
        try:
            for _ in range(_CLOSE_LIMIT):
                try:
                    task.context.run(coroutine.close)
                    break
                except RuntimeError as error:
                    if "ignored GeneratorExit" not in str(error):
                        break
                except BaseException:
                    break
        finally:
            asyncio.tasks._leave_task(self, task)

    # -- the rest of the interface

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._exception_handler is not None:
            self._exception_handler(self, context)
            return
        if self._muted:
            return
        task = context.get("task") or context.get("future")
        if isinstance(task, SimTask) and task.process is not None and task.process.state == DEAD and not self._closed:
            return  # whoever would have retrieved it has been killed
        error = context.get("exception")
        if not isinstance(error, BaseException):
            error = SimulationError(f"{context.get('message')}: {task!r}")
        self.defects.append(error)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def set_exception_handler(self, handler: Any) -> None:
        self._exception_handler = handler

    def get_exception_handler(self) -> Any:
        return self._exception_handler

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do: generators are closed as they are collected."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to do: there is no executor."""

    def set_default_executor(self, executor: Any) -> None:
        """Ignored: functions run in the caller."""

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        self._debug = enabled

    if TYPE_CHECKING:  # no files, sockets, signals or processes: these raise NotImplementedError
        add_reader: Any
        remove_reader: Any
        add_writer: Any
        remove_writer: Any
        sock_recv: Any
        sock_recv_into: Any
        sock_sendall: Any
        sock_connect: Any
        sock_accept: Any
        sock_recvfrom: Any
        sock_recvfrom_into: Any
        sock_sendto: Any
        sock_sendfile: Any
        add_signal_handler: Any
        remove_signal_handler: Any
        create_connection: Any
        create_server: Any
        create_unix_connection: Any
        create_unix_server: Any
        create_datagram_endpoint: Any
        connect_read_pipe: Any
        connect_write_pipe: Any
        subprocess_shell: Any
        subprocess_exec: Any
        getaddrinfo: Any
        getnameinfo: Any
        start_tls: Any
        sendfile: Any
        connect_accepted_socket: Any


def run(main: Coroutine[Any, Any, T], loop: SimLoop | None = None, *, limit: float | None = None) -> T:
    """Run ``main`` on ``loop`` (default: a new one) to its end, close the loop, return the result.

    limit: virtual seconds after which the run is given up.
    Raises what ``main`` raises; :class:`SimulationError` for a deadlock, a spin or the limit; else the exceptions
    that nobody handled meanwhile: one as it is, several as a group.
    """
    loop = SimLoop() if loop is None else loop
    failure: BaseException | None = None
    result: Any = None
    task = loop.create_task(main, name="main", context=loop.base_context.copy())
    try:
        loop._run(task, limit=None if limit is None else loop.clock + limit)
        result = task.result()
    except BaseException as error:
        failure = error
    del task
    loop.close()
    defects = loop.defects
    if failure is not None:
        for defect in defects:
            if defect is not failure:
                failure.add_note(f"unhandled during the run: {defect!r}")
        try:
            raise failure
        finally:
            failure = None
    if len(defects) == 1:
        raise defects[0]
    if defects:
        raise BaseExceptionGroup("unhandled exceptions in the simulated run", defects)
    return result  # type: ignore[no-any-return]
