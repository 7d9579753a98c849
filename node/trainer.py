"""The parent's side of the trainer: an :class:`Island` whose compute is a child process that owns the device.

The child may die (out of memory, a driver fault, the kernel's killer) without taking the peer down: it is started
again, with a smaller micro-batch when memory was the reason, and goes on from what ``local`` holds. One that hangs is
ended first: when it does not answer an order in time, or makes no step though it ought to (:mod:`.watchdog`). The
parent never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from atoll.protocol import errors
from atoll.protocol.errors import AtollError, ResourceError
from atoll.protocol.island import Island, Progress, Run, Snapshot
from atoll.protocol.messages import Span
from atoll.protocol.overlap import left, move

from .channel import (
    Coding,
    Commit,
    Encoded,
    Failed,
    Freeze,
    Frozen,
    Grant,
    Move,
    Moved,
    Piece,
    Place,
    Placed,
    Ready,
    Resume,
    Revoke,
    Setup,
    ToChild,
    line,
    to_parent,
)
from .config import DataConfig, InnerConfig, ModelConfig
from .encoder import TrainerEncoder, encoded_bytes
from .sharedmem import Counters, SharedMemory
from .specs import ONE_THREAD_BELOW, count_parameters
from .watchdog import LOOK, Seen, Watchdog, first_limit, share_of

Log = Callable[[str, dict[str, Any]], None]
Answer = Frozen | Moved | Placed

START_TIMEOUT = 120.0
"""Seconds from the start of a child until it is ready: imports, data, device."""
FREEZE_TIMEOUT = 10.0
"""Seconds that a freeze may take beyond ``FREEZE_STEPS`` inner steps, which must end first."""
FREEZE_STEPS = 4
FIRST_STEP_TIMEOUT = 60.0
"""The same before the first step has ended and its length is known."""
CLOSE_TIMEOUT = 5.0
MAX_RESTARTS = 5
"""Restarts in a row; a child that lived ``HEALTHY`` seconds begins a new row."""
HEALTHY = 600.0
RESTART_DELAY = 0.5
"""Seconds before the first restart, doubled each time, so that a child that dies at once does not eat a core."""
STDERR_TAIL = 4000
"""Characters of the child's last words that are kept for the log."""


class TrainerProcess(Island):
    """One trainer child. Make it with :meth:`start`; end it with :meth:`close`.

    When the child dies, ``local`` holds the last state that is known (on a CPU the parameters as its last step left
    them, half an update included if it was killed in the middle of one; on CUDA those of the last freeze or resume) and
    the counters tell of that state; sample units that the child had taken are never handed out again. Where it encodes
    on its device (``encoder``) ``local`` holds the global parameters, and the counters are 0 then. If nobody asked for
    a freeze in between, the next child just trains on. If :meth:`freeze` raised :class:`ResourceError`, the
    island stays frozen until :meth:`resume`: the caller may write ``local`` first (``reload=True``), or freeze again
    to take what is there.
    """

    def __init__(
        self,
        model: ModelConfig,
        data: DataConfig,
        inner: InnerConfig,
        inner_steps: int,
        rounds: int,
        *,
        device: str = "auto",
        threads: int | None = None,
        micro_batch: int | None = None,
        overlap: bool = False,
        fragments: int = 1,
        coding: Coding | None = None,
        several: bool = False,
        log: Log | None = None,
    ) -> None:
        """Allocates the shared memory; :meth:`start` makes the child as well."""
        self.device = device
        """As asked for; once the child is ready, the device it uses (``cpu``, ``cuda:0``)."""
        self.threads = 0
        """Threads that the child computes with on a CPU, once it is ready."""
        self.restarts = 0
        self._log: Log = log if log is not None else lambda event, fields: None
        self.encoder: TrainerEncoder | None = None
        encoded = encoded_bytes(count_parameters(model), fragments, coding) if coding is not None else 0
        self._memory = SharedMemory.create(count_parameters(model), frozen=overlap, encoded=encoded)
        self.local = self._memory.array
        self.frozen = self._memory.frozen
        self._setup = Setup(
            fd=self._memory.fd,
            parameters=count_parameters(model),
            frozen=overlap,
            model=model.to_table(),
            data=data.to_table(),
            inner=inner.to_table(),
            inner_steps=inner_steps,
            rounds=rounds,
            fragments=fragments,
            device=device,
            threads=threads,
            micro_batch=micro_batch,
            coding=coding,
            encoded=encoded,
        )
        self._batch = inner.batch
        self._several = several
        self._spans: list[tuple[int, int]] = []
        """Sample units granted in this generation of leases and perhaps not yet drawn."""
        self._granted = 0
        """Units granted in this generation."""
        self._passed = 0
        """Units of this generation that left ``_spans`` because they were drawn."""
        self._epoch = 0
        self._orders = 0
        """Freezes, snapshots, moves and resumes so far; each has its number."""
        self._asked = 0
        """Number of the last one that is to be answered."""
        self._froze = (0, 0)
        """Number of the last freeze or snapshot, and the life in which it was made."""
        self._outer_step = 0
        self._until: int | None = None
        """Number of steps at which the child pauses while a round is in flight, or the run winds up."""
        self._ahead: int | None = None
        """How many more these were when that was said."""
        self._writing = asyncio.Lock()
        """Held while a thread of this side writes ``local``: no child may read it then."""
        self._training = False
        """Whether the child is to train: resumed, and not frozen since."""
        self._spending: list[_Spending] = []
        """Orders to lower the counters that no child may have followed yet."""
        self._alone = True
        """Whether no child is there that writes the counters, so that this side may."""
        self._base = self._memory.read()
        """Counters that belong to what ``local`` held at the last freeze or resume."""
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[Answer] | None = None
        self._settled = asyncio.Event()
        """Whether spans and counters tell of what a child that was ended has left."""
        self._failure: AtollError | None = None
        """Why there is no child now; ``None`` while there is one."""
        self._ended_here: AtollError | None = None
        """Why this side has killed the present child; ``None`` while it has not."""
        self._watchdog = Watchdog()
        self._look_timer: asyncio.TimerHandle | None = None
        self._hung = 0.0
        """Seconds for which the present child had been silent when it was ended for that; 0 while it has not been."""
        self._patience = 0.0
        """Those that it might have been."""
        self._to_host = False
        """Whether the next child is to leave encoding to the host: there is no room for it, or it keeps failing."""
        self._closing = False
        self._since = 0.0
        """``time.monotonic()`` when the first child was ready; 0 before."""
        self._end: asyncio.Future[AtollError] = asyncio.get_running_loop().create_future()
        """Why no child will be started any more."""
        self._supervision: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        model: ModelConfig,
        data: DataConfig,
        inner: InnerConfig,
        inner_steps: int,
        rounds: int,
        device: str = "auto",
        threads: int | None = None,
        micro_batch: int | None = None,
        overlap: bool = False,
        fragments: int = 1,
        coding: Coding | None = None,
        several: bool = False,
        log: Log | None = None,
    ) -> TrainerProcess:
        """Start a child and wait until it is ready (2 to 10 s: it imports torch).

        inner_steps: H; rounds: of each fragment in the whole run (schedules). threads: of torch on a CPU, chosen by the
        model's size when ``None``. overlap: whether there will be snapshots (four more bytes a parameter). coding: how
        to encode on the device; None: on the host. several: whether rounds of several fragments may be in flight at
        once. log: called with an event's name and fields (``warning``, ``trainer``, ``ended``).

        Raises :class:`DataError` when the data are missing or differ from the pin, :class:`ResourceError` when the
        device is absent or there is no memory.
        """
        self = cls(
            model,
            data,
            inner,
            inner_steps,
            rounds,
            device=device,
            threads=threads,
            micro_batch=micro_batch,
            overlap=overlap,
            fragments=fragments,
            coding=coding,
            several=several,
            log=log,
        )
        self._supervision = asyncio.create_task(self._supervise(), name="trainer")
        try:
            await self._ready
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def pid(self) -> int | None:
        """Process id of the child, ``None`` while there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def failed(self) -> AtollError | None:
        """Why the island cannot train at the moment (or, after too many restarts, ever); ``None`` while it can."""
        return self._failure

    async def watch(self) -> None:
        """Returns never; raises once no child will be started any more, with the reason.

        :class:`ResourceError` after too many restarts in a row; what the child found, if starting it again cannot help
        (:class:`DataError` when the text is gone).
        """
        raise await asyncio.shield(self._end)

    def progress(self) -> Progress:
        counters = self._counters()
        rate = self._batch * self._setup.model["context"] / counters.step_time if counters.step_time else 0.0
        now = time.monotonic()
        trained = counters.stepping + (now - counters.begun if counters.begun else 0.0)
        held = counters.held + (now - counters.held_since if counters.held_since else 0.0)
        return Progress(
            steps=counters.steps,
            tokens=counters.tokens,
            units=counters.units,
            leased=self._leased() // self._batch * self._batch,
            step_time=counters.step_time,
            loss=counters.loss if counters.loss == counters.loss else None,
            fields={
                "tokens_per_s": rate,
                "rate": counters.rate,
                "micro_batch": counters.micro_batch,
                "skipped": counters.skipped,
                "restarts": self.restarts,
                "trained": trained,
                "held": held,
                "waited": max(now - self._since - trained - held, 0.0) if self._since else 0.0,
            },
        )

    def lease(self, spans: list[Span]) -> None:
        new = [(span.start, span.count) for span in spans if span.count]
        if not new:
            return
        drawn = self._drawn()
        while self._spans and self._passed + self._spans[0][1] <= drawn:
            self._passed += self._spans.pop(0)[1]
        self._spans += new
        self._granted += sum(count for _, count in new)
        self._tell(Grant(new))

    def revoke(self) -> None:
        self._begin_generation([])
        self._tell(Revoke(self._epoch))

    def keep(self) -> str:
        counters = self._counters()
        return msgspec.json.encode(_Kept(counters.steps, counters.tokens, counters.units, self._undrawn())).decode()

    def restore(self, kept: str) -> None:
        if self._orders or self._granted:
            raise ValueError("a trainer that has been given orders already")
        try:
            told = msgspec.json.decode(kept, type=_Kept)
        except msgspec.MsgspecError as error:
            raise ValueError(f"what was kept of the trainer is unreadable: {error}") from None
        # The child writes no counters before its first order, and reads them at each.
        counters = self._memory.read()
        counters.steps, counters.tokens, counters.units = told.steps, told.tokens, told.units
        self._memory.write(counters)
        self._base = counters
        self.lease([Span(start, count) for start, count in told.spans])

    async def freeze(self) -> Snapshot:
        self._training = False
        self._limit(None, 0)
        answer = await self._ask(Freeze(self._number()))
        assert isinstance(answer, Frozen)
        self._froze = (answer.number, self.life)
        self._base = self._counters()
        return self._snapshot(answer, 0.0)

    async def snapshot(self, ahead: int, parts: Sequence[slice], until: int | None = None) -> Snapshot:
        if self.frozen is None:
            raise ValueError("this trainer was started without room for snapshots")
        apart = self.encoder is not None
        self._training = False
        self._limit(None, 0)
        # What lies in a device's memory is copied whole, for ``local`` to be what the counters tell of: by way of
        # ``frozen``, beside training, unless parts of that are of other rounds in flight.
        store = self._several and not self._shares and not apart
        only = [(part.start, part.stop) for part in parts] if self._shares or apart or store else None
        answer = await self._ask(Freeze(self._number(), ahead, only, until, store))
        assert isinstance(answer, Frozen)
        self._froze = (answer.number, self.life)
        self._training = True
        self._limit(answer.steps + ahead if until is None else min(answer.steps + ahead, until), answer.steps)
        if not self._shares and not apart:
            counters = self._counters()
            counters.steps, counters.tokens, counters.units = answer.steps, answer.tokens, answer.units
            self._base = counters
            if not store:
                async with self._writing:
                    await asyncio.to_thread(self.local.__setitem__, slice(None), self.frozen)
        return self._snapshot(answer, answer.stopped)

    async def resume(
        self,
        *,
        reload: bool,
        spent: float,
        outer_step: int,
        of: Snapshot | None = None,
        ahead: int | None = None,
        until: int | None = None,
    ) -> None:
        self._outer_step = outer_step
        before = self._counters().steps
        order = self._spend(self._number(), spent, of)
        if self._training:
            # only a limit is lifted, or changed
            assert not reload
            assert not spent
            self._limit(until, before)
        else:
            if not self._unknown or self._shares:
                self._base = self._counters()  # else these may be of steps that are lost with the child
            self._training = True
            limits = [self._base.steps + ahead] if ahead is not None else []
            limits += [until - (before - self._base.steps)] if until is not None else []
            self._limit(min(limits, default=None), self._base.steps)
        self._tell(Resume(order.number, reload, outer_step, self._until, order.share, order.of))

    async def move(
        self, runs: list[Run], *, spent: float, outer_step: int, of: Snapshot | None, until: int | None = None
    ) -> Snapshot:
        self._outer_step = outer_step
        self._limit(None, 0)
        number = self._number()
        spending = _Spending.of_snapshot(number, spent, of)
        order = Move(number, [(run.start, run.stop, run.keep) for run in runs], spent, spending.of, outer_step, until)
        try:
            answer = await self._ask(order)
        except ResourceError as error:
            # it may have begun all the same, and been ended for being slow
            if not await self._quiet() or self._memory.read().moved == number:
                self._training = False
                raise ResourceError(f"the trainer ended while its parameters were being moved: {error}") from None
            await self._move_here(runs)
            # What the device had learnt since died with it, whether that has been written down yet or not.
            counters = self._counters() if self._shares else self._base
            moved = Snapshot(counters.steps, counters.tokens, counters.units, self._leased())
            # The child that died has not followed it, and no next one will be asked to: its first counters have it off.
            self._spending.append(spending)
            if self._alone:
                self._settle()
            self._limit(until, counters.steps)
            self._until = _lowered(until, counters.steps, spending)
            return moved
        assert isinstance(answer, Moved)
        self._limit(until, answer.steps)
        self._until = _lowered(until, answer.steps, spending)
        if not self._shares:
            self._base.spend(number, spent, spending.of)
            await self._move_here(runs)
        return Snapshot(answer.steps, answer.tokens, answer.units, self._leased(), answer.stopped)

    async def close(self) -> None:
        """End the child (it holds nothing worth saving) and free the memory. Idempotent."""
        self._closing = True
        self._training = False
        if self._failure is None:
            self._failure = ResourceError("the trainer was closed")
        self._kill()
        if self._supervision is not None:
            task, self._supervision = self._supervision, None
            task.cancel()
            # not the caller's wait: after SIGKILL only a driver stuck in the kernel can last longer
            await asyncio.wait({task}, timeout=CLOSE_TIMEOUT)
        self._memory.close()

    # the child

    @property
    def _shares(self) -> bool:
        """Whether the child trains in the very memory that ``local`` is, so that this side must leave it alone."""
        return self.device.startswith("cpu") and self.encoder is None

    def _limit(self, until: int | None, steps: int) -> None:
        """Note at what number of steps the child pauses. steps: those that its counters hold."""
        self._until = until
        self._ahead = None if until is None else max(until - steps, 0)

    def _number(self) -> int:
        self._orders += 1
        return self._orders

    async def _ask(self, order: Freeze | Move | Commit | Place, more: float = 0.0) -> Answer:
        """Send, and wait for the answer. Raises :class:`ResourceError` when there is no child, it dies, or it does not
        answer in time: then it is ended. more: seconds that it may take beyond what a freeze may."""
        if self._failure is not None:
            await self._known()
            raise _gone(self._failure or ResourceError("it is being started again"))
        counters = self._memory.read()
        step = counters.step_time
        running = time.monotonic() - counters.begun if counters.begun else 0.0
        limit = FREEZE_TIMEOUT + FREEZE_STEPS * step if step else max(FIRST_STEP_TIMEOUT, FREEZE_TIMEOUT + running)
        limit += more
        self._answer, self._asked = asyncio.get_running_loop().create_future(), order.number
        self._tell(order)
        try:
            return await asyncio.wait_for(asyncio.shield(self._answer), limit)
        except TimeoutError:
            error = ResourceError(
                f"the trainer did not answer a {type(order).__name__.lower()} within {limit:.0f} s (a step takes "
                f"{step:.2f} s); "
                "it was ended and is being started again"
            )
            self._answer = None  # nobody waits for it any more
            await self._end_child(error, limit, limit)
            raise error from None
        finally:
            self._answer = None

    async def _end_child(self, why: ResourceError, hung: float = 0.0, limit: float = 0.0) -> None:
        """End a child that is of no use any more; the next one is started. Waits a while for what it leaves behind to
        be known, since by that goes what the next one may do. hung, limit: as in :meth:`_end_at_once`."""
        self._end_at_once(why, hung, limit)
        await self._known()

    @property
    def _unknown(self) -> bool:
        """Whether a child was ended and what it leaves behind is not known yet."""
        return self._ended_here is not None and not self._settled.is_set()

    async def _known(self) -> None:
        """Wait a while, if a child was ended, for what it leaves behind to be known."""
        if self._unknown:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await self._settled.wait()

    def _end_at_once(self, why: ResourceError, hung: float, limit: float) -> None:
        """End a child. hung: seconds for which it was silent, if that is the reason, else 0; limit: those that it might
        have been."""
        self._failure = self._ended_here = why
        self._hung, self._patience = hung, limit
        self._settled.clear()
        self._kill()
        if self._writer is not None:
            self._writer.transport.abort()  # one that the kernel does not let go keeps its end of the channel open

    def _seen(self, counters: Counters) -> Seen:
        """What the watchdog is to know of the child. ``counters``: with everything off that it was told to take off."""
        ought = (
            self._training
            and self._answer is None
            and self._failure is None
            and (self._leased() >= self._batch or counters.begun > 0)
            and (self._until is None or counters.steps < self._until)
        )
        return Seen(self._memory.writes, ought, counters.stepping, counters.took)

    def _look(self) -> None:
        """End the child if it hangs; else look again in a while. By a timer: a task would cost twice as much."""
        self._look_timer = None
        process = self._process
        if process is None or self._failure is not None:
            return
        loop, dog = asyncio.get_running_loop(), self._watchdog
        limit = dog.limit
        if dog.look(loop.time(), self._seen(self._counters()), lambda: share_of(process.pid)):
            since = f", since the longest of the last ones took {dog.longest:.2f} s" if dog.longest else ""
            error = ResourceError(
                f"the trainer has made no step for {dog.silent:.0f} s, though it ought to; {limit:.0f} s are allowed"
                f"{since}. It hangs: it was ended and is being started again"
            )
            self._end_at_once(error, dog.silent, limit)
        else:
            self._look_timer = loop.call_later(LOOK, self._look)

    def _not_gone(self) -> None:
        """A child that was killed is still there."""
        message = (
            f"the trainer was killed {CLOSE_TIMEOUT:.0f} s ago and has not ended: as a rule a driver holds it in the "
            "kernel; no other is started until it has. If it stays so, restart the machine"
        )
        self._log("warning", {"message": message})

    def _spend(self, number: int, share: float, of: Snapshot | None) -> _Spending:
        """Lower the counters, by an order that the child is about to be sent. Between two children there is none, and
        what the next one finds has it off already."""
        spending = _Spending.of_snapshot(number, share, of)
        self._spending.append(spending)
        if self._alone:
            self._settle()
        return spending

    def _counters(self) -> Counters:
        """The counters with everything off that the child has been told to take off."""
        counters = self._memory.read()
        self._spending = [spending for spending in self._spending if spending.number > counters.spent]
        for spending in self._spending:
            counters.spend(spending.number, spending.share, spending.of)
        return counters

    def _settle(self) -> None:
        """Write down what no child has taken off. There is none that writes at this moment."""
        self._memory.write(self._counters())
        self._base = self._memory.read()
        self._spending = []

    def _snapshot(self, answer: Frozen, stopped: float) -> Snapshot:
        drawn = answer.drawn if answer.epoch == self._epoch else 0
        return Snapshot(answer.steps, answer.tokens, answer.units, self._granted - drawn, stopped)

    async def _quiet(self) -> bool:
        """Whether a child that is being ended is really gone, so that it writes no more; waits for that a while."""
        process = self._process
        if process is None or self._ended_here is None:
            return True
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await process.wait()
        except TimeoutError:
            return False
        return True

    async def _move_here(self, runs: list[Run]) -> None:
        """Change ``local`` as the child changes its own, which is elsewhere or not there."""
        shift = self.frozen
        assert shift is not None

        def work() -> None:
            for run in runs:
                move(self.local[run.start : run.stop], run.keep, shift[run.start : run.stop])

        async with self._writing:
            await asyncio.to_thread(work)

    def _leased(self) -> int:
        return self._granted - self._drawn()

    def _drawn(self) -> int:
        """Units of this generation that were taken. A child that has not seen the last revoke yet has taken none."""
        counters = self._memory.read()
        return counters.drawn if counters.epoch == self._epoch else 0

    def _undrawn(self) -> list[tuple[int, int]]:
        """The sample units that are leased and were never taken, in order."""
        drawn = self._drawn() - self._passed
        left: list[tuple[int, int]] = []
        for start, count in self._spans:
            skip = min(drawn, count)
            drawn -= skip
            if skip < count:
                left.append((start + skip, count - skip))
        return left

    def _begin_generation(self, spans: list[tuple[int, int]]) -> None:
        self._epoch += 1
        self._spans, self._passed, self._granted = spans, 0, sum(count for _, count in spans)

    def _tell(self, message: ToChild) -> None:
        """Send, if there is a child that listens; a child that is started later is told the state as a whole."""
        if self._writer is not None and self._failure is None:
            self._writer.write(line(message))

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            # not Process.kill(): it polls first, and would take the exit code away from asyncio's watcher
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def _supervise(self) -> None:
        """Start the child, and again when it ends, until closed or given up."""
        try:
            await self._lives()
        finally:
            self._settled.set()

    async def _lives(self) -> None:
        in_a_row = 0
        while True:
            began = time.monotonic()
            try:
                failure, memory = await self._one_life()
            except OSError as error:
                failure, memory = ResourceError(f"the trainer cannot be started: {error.strerror or error}"), False
                self._failure = failure
            if self._closing:
                return
            if not self._ready.done() and not memory and not self._to_host:
                self._give_up(failure)  # what it has found when it began, it would find again
                return
            in_a_row = 1 if time.monotonic() - began > HEALTHY else in_a_row + 1
            self._log("warning", {"message": str(failure)})
            if in_a_row > MAX_RESTARTS or not isinstance(failure, ResourceError):
                kind = ResourceError if isinstance(failure, ResourceError) else type(failure)
                again = f"was started {in_a_row} times in a row and failed again" if in_a_row > 1 else "failed"
                self._give_up(kind(f"the trainer {again}: {failure}"))
                return
            if self._to_host:
                self._encode_on_host(str(failure))
            elif memory:
                current = self._memory.read().micro_batch or self._setup.micro_batch or self._batch
                self._change(micro_batch=max(current // 2, 1))
            before = self._counters()
            self._after_death()
            self._tell_lost(failure, before)
            self.restarts += 1
            await asyncio.sleep(RESTART_DELAY * 2 ** (in_a_row - 1))

    async def _one_life(self) -> tuple[AtollError, bool]:
        """Run one child to its end; why it ended, and whether memory was the reason."""
        self._ended_here, self._hung = None, 0.0
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        setup = self._setup
        environment = dict(os.environ)
        if setup.threads is not None or setup.parameters < ONE_THREAD_BELOW:
            environment["OMP_NUM_THREADS"] = str(setup.threads or 1)
        with theirs, contextlib.ExitStack() as on_error:
            on_error.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "atoll.node.worker",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(), self._memory.fd),
                start_new_session=True,
                env=environment,
            )
            on_error.pop_all()
        self._process = process
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
        last_words = asyncio.create_task(_tail(process.stderr))
        reported: Failed | None = None
        try:
            writer.write(line(setup))
            async with asyncio.timeout(START_TIMEOUT) as deadline:
                while text := await reader.readline():
                    message = to_parent.decode(text)
                    if isinstance(message, Ready):
                        deadline.reschedule(None)
                        try:
                            await asyncio.to_thread(self._memory.reserve, encodes=message.encodes)
                        except ResourceError as error:
                            reported = Failed("ResourceError", str(error), crowded=message.encodes)
                            break
                        async with self._writing:
                            self._begin(message, writer)
                    elif isinstance(message, Encoded | Piece):
                        if self.encoder is not None:
                            self.encoder.answered(message)
                    elif isinstance(message, Frozen | Moved | Placed):
                        waiting = self._answer if message.number == self._asked else None
                        if waiting is not None and not waiting.done():
                            waiting.set_result(message)
                    else:
                        reported = message
        except TimeoutError:
            reported = Failed("ResourceError", f"it was not ready within {START_TIMEOUT:.0f} s")
        except ConnectionError:
            pass
        finally:
            self._writer = None
            if self._look_timer is not None:
                self._look_timer.cancel()
            self._kill()
            writer.close()
            not_gone = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT, self._not_gone)
            # the end of the channel comes before the exit code; cancellation must not leave a zombie
            try:
                await asyncio.shield(asyncio.gather(process.wait(), last_words))
            finally:
                not_gone.cancel()
            self._process = None
        self._to_host |= reported is not None and reported.crowded
        failure = _reason(reported, process.returncode, last_words.result())
        if self._ended_here is not None:
            failure = self._ended_here
        self._failure = failure
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_gone(failure))
        if self.encoder is not None:
            self.encoder.died(_gone(failure))
        # the kernel's killer, that is, when it was not this side
        killed = process.returncode == -signal.SIGKILL and self._ended_here is None
        return failure, reported.memory if reported is not None else killed

    def _begin(self, ready: Ready, writer: asyncio.StreamWriter) -> None:
        """The child is ready: tell it the state, and let it train if it should."""
        self.device, self.threads = ready.device, ready.threads
        self._since = self._since or time.monotonic()
        if ready.encodes and self.encoder is None:
            self.encoder = TrainerEncoder(self)
        elif not ready.encodes:
            self.encoder = None
            if self._setup.coding is not None:
                self._encode_on_host(ready.note)
        if ready.pageable:
            message = f"copies between {ready.device} and this machine's memory take longer, it is not page-locked: "
            self._log("warning", {"message": message + ready.pageable})
        # it writes nothing before its first order
        self._settle()
        counters = self._memory.read()
        # a revoke while there was no child was heard by none
        counters.epoch, counters.drawn = self._epoch, 0
        counters.micro_batch = ready.micro_batch
        self._memory.write(counters)
        self._writer, self._failure, self._alone = writer, None, False
        self._log(
            "trainer",
            {
                "pid": self.pid,
                "device": ready.device,
                "name": ready.name,
                "threads": ready.threads,
                "precision": ready.precision,
                "micro_batch": ready.micro_batch,
                "encode": "device" if ready.encodes else "host",
            },
        )
        if self._spans:
            self._tell(Grant(self._spans))
        if self._training:
            self._tell(Resume(counters.spent, True, self._outer_step, self._until))
        loop, tokens = asyncio.get_running_loop(), self._batch * self._setup.model["context"]
        first = first_limit(ready.device, self._setup.parameters, tokens)
        self._watchdog.begin(loop.time(), self._seen(counters), first)
        self._look_timer = loop.call_later(LOOK, self._look)
        if not self._ready.done():
            self._ready.set_result(None)

    def _encode_on_host(self, why: str) -> None:
        """From the next child on, nothing is encoded on the device. why: empty when nobody had asked for it."""
        self._to_host = False
        if self._setup.coding is not None and why:
            self._log("warning", {"message": f"contributions are encoded on the host, not on the device: {why}"})
        self._change(coding=None)

    def _after_death(self) -> None:
        """Make spans and counters tell of what ``local`` holds now. There is no child at this moment."""
        counters = self._memory.read()
        self._begin_generation(self._undrawn())
        if self.encoder is not None:
            # and with it all that the device had learnt since the last commit
            counters.steps = counters.tokens = counters.units = 0
            self._spending = []
            # It was not to outrun a round in flight by more than so much; or, with 0, to make no more of what it had
            # to hand over, of which nothing is left.
            self._until = self._ahead or None
            self.life += 1
        elif not self._shares:
            # what the device had learnt since the last freeze or resume died with it
            counters.steps, counters.tokens, counters.units = self._base.steps, self._base.tokens, self._base.units
            counters.spent = self._base.spent
        counters.epoch, counters.drawn, counters.begun = self._epoch, 0, 0.0
        counters.let_go()
        self._memory.write(counters)
        self._settle()
        self._alone = True
        self._settled.set()

    def _tell_lost(self, failure: AtollError, before: Counters) -> None:
        """Say what went with a child. before: the counters as it left them; now they tell of what ``local`` holds."""
        now = self._memory.read()
        # the step that was cut off has taken its samples, and is in no counter
        cut = self._batch if before.begun else 0
        fields: dict[str, Any] = {"reason": str(failure), "hung": self._hung > 0}
        if self._hung:
            fields |= {"silent": round(self._hung, 3), "limit": round(self._patience, 3)}
        self._log(
            "ended",
            fields
            | {
                "lost_steps": before.steps - now.steps,
                "lost_tokens": before.tokens - now.tokens,
                "lost_units": before.units - now.units + cut,
            },
        )

    def _change(self, **fields: Any) -> None:
        self._setup = Setup(**{name: getattr(self._setup, name) for name in Setup.__struct_fields__} | fields)

    def _give_up(self, failure: AtollError) -> None:
        self._failure = failure
        if not self._ready.done():
            self._ready.set_exception(failure)
            # start() may have been cancelled, and then nobody asks
            self._ready.exception()
        elif not self._end.done():
            self._log("warning", {"message": f"giving up: {failure}"})
            self._end.set_result(failure)


_Natural = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What :meth:`TrainerProcess.keep` tells."""

    steps: _Natural
    tokens: _Natural
    units: _Natural
    spans: list[tuple[_Natural, _Natural]]
    """Sample units ``[start, count]`` that are leased and not used."""


async def _tail(stream: asyncio.StreamReader | None) -> str:
    """The last of what a stream says, read to its end so that its writer never blocks."""
    assert stream is not None
    kept = b""
    while data := await stream.read(1 << 16):
        kept = (kept + data)[-STDERR_TAIL:]
    return kept.decode("utf-8", "replace").strip()


class _Spending(NamedTuple):
    """An order to lower the counters (:meth:`.sharedmem.Counters.spend`)."""

    number: int
    share: float
    of: tuple[int, int, int] | None

    @classmethod
    def of_snapshot(cls, number: int, share: float, of: Snapshot | None) -> _Spending:
        return cls(number, share, (of.steps, of.tokens, of.units) if of is not None else None)


def _lowered(until: int | None, steps: int, spending: _Spending) -> int | None:
    """A limit on the number of steps, once the counter has been lowered from ``steps``."""
    if until is None:
        return None
    return until - steps + left(steps, spending.share, spending.of[0] if spending.of is not None else None)


def _gone(failure: AtollError) -> ResourceError:
    """The failure as what :meth:`Island.freeze` may raise: whatever it was, there is no trainer now."""
    return failure if isinstance(failure, ResourceError) else ResourceError(f"there is no trainer: {failure}")


def _reason(reported: Failed | None, code: int | None, words: str) -> AtollError:
    """The error that says why a child ended: its own report, or how it died and what it said last."""
    if reported is not None:
        kind = getattr(errors, reported.kind, None)
        if isinstance(kind, type) and issubclass(kind, AtollError):
            return kind(reported.message)
        return ResourceError(f"the trainer failed with {reported.kind}: {reported.message}")
    how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
    said = f"; it said last: {words.splitlines()[-1]}" if words else ""
    return ResourceError(f"the trainer {how}{said}")
