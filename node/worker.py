"""The trainer child: ``python -m atoll.node.worker FD``, started by :mod:`atoll.node.trainer` and by nobody else.

It owns the device. One thread reads the control channel, so that the end of the parent ends the child at once even
in the middle of a long step; the main thread trains and looks at the messages between steps. Where contributions are
encoded here, a third thread does that, and reads what goes to the disk, beside training.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from atoll.protocol.errors import AtollError, ResourceError
from atoll.protocol.overlap import Merge, Overlap

from .channel import (
    Commit,
    Encode,
    Encoded,
    Failed,
    Freeze,
    Frozen,
    Grant,
    Hold,
    Move,
    Moved,
    Piece,
    Place,
    Placed,
    Read,
    Ready,
    Resume,
    Revoke,
    Service,
    Setup,
    ToChild,
    ToParent,
    line,
    to_child,
)

if TYPE_CHECKING:
    from .sharedmem import Counters

SMOOTHING = 0.1
"""Weight of the newest step in the averages of step time and loss."""
NICENESS = 5
"""A trainer that fills every core must not starve its own supervisor, whose silence counts as death."""


def main() -> None:
    """Serve the control channel on the inherited descriptor until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    inbox: queue.SimpleQueue[ToChild] = queue.SimpleQueue()
    services: queue.SimpleQueue[Service] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(control, inbox, services), daemon=True).start()
    worker: Worker | None = None
    try:
        setup = inbox.get()
        assert isinstance(setup, Setup)
        worker = Worker(setup, control, inbox)
        if worker.replica is not None:
            threading.Thread(target=worker.serve, args=(services,), daemon=True).start()
        worker.run()
    except AtollError as error:
        # of what a trainer runs out of while it trains, this is all that it can do without
        crowded = isinstance(error, ResourceError) and worker is not None and worker.replica is not None
        _send(control, Failed(type(error).__name__, str(error), crowded=crowded))
    except MemoryError:
        _send(control, Failed("ResourceError", "the machine's memory ran out while training", True))
    except RuntimeError as error:
        memory = out_of_memory(error)
        crowded = memory and worker is not None and worker.replica is not None
        _send(control, Failed("ResourceError" if memory else "RuntimeError", str(error), memory, crowded))
        if not memory:
            raise
    # skip the interpreter's teardown: the listening thread is inside a system call
    sys.stderr.flush()
    os._exit(1)


def out_of_memory(error: Exception) -> bool:
    """Whether this is an allocation that failed, here or on the device."""
    # torch has no type of its own for one that failed on the CPU or inside a CUDA library
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


class Worker:
    """The child's state: a learner, what is leased, and whether it may train."""

    def __init__(self, setup: Setup, control: socket.socket, inbox: queue.SimpleQueue[ToChild]) -> None:
        self.control, self.inbox = control, inbox
        import torch

        from atoll.protocol.fragments import make_layout

        from . import codecs_torch, data, pinned
        from .config import DataConfig, InnerConfig, ModelConfig
        from .device_replica import DeviceReplica, side_stream
        from .learner import Learner, choose_device, default_threads
        from .optim import rate
        from .sharedmem import SharedMemory

        self.rate = rate
        threads = setup.threads or default_threads(setup.parameters)
        torch.set_num_threads(threads)
        model = ModelConfig.from_table(setup.model)
        corpus = data.load(DataConfig.from_table(setup.data), model.context)
        self.memory = SharedMemory(setup.fd, setup.parameters, frozen=setup.frozen, encoded=setup.encoded)
        self.frozen = torch.from_numpy(self.memory.frozen) if self.memory.frozen is not None else None
        self.replica: DeviceReplica | None = None
        """Where contributions are encoded here: what that takes."""
        self.loaded = False
        """Whether θ has been taken from the shared memory."""
        place = choose_device(setup.device)

        def learner(apart: bool) -> Learner:
            return Learner(
                model,
                InnerConfig.from_table(setup.inner),
                setup.inner_steps,
                setup.rounds,
                corpus.train,
                self.memory.array,
                device=str(place),
                micro_batch=setup.micro_batch,
                fragments=setup.fragments,
                apart=apart,
            )

        coding, note = setup.coding, ""
        wanted = coding is not None and (coding.must or place.type == "cuda")
        if coding is not None and wanted and not (note := codecs_torch.defect(coding.codec, place)):
            layout = make_layout(setup.parameters, coding.chunk, coding.layers, setup.fragments, coding.packing)
            memory: list[torch.Tensor] = []
            try:
                memory += DeviceReplica.allocate(setup.parameters, place, coding.decay)
                self.learner = learner(True)
                self.replica = DeviceReplica(self.learner.flat, layout, coding.codec, coding.decay, memory)
            except RuntimeError as error:  # of which running out of memory is a kind
                note = f"{place} has no room to encode on it: {str(error).splitlines()[0]}"
            memory.clear()
        if self.replica is None and place.type == "cuda":
            torch.cuda.empty_cache()
        if self.replica is None:
            self.learner = learner(False)
        self.batch = self.learner.inner.batch
        self.spans: deque[tuple[int, int]] = deque()
        self.leased = 0
        self.training = False
        self.until: int | None = None
        """Number of steps at which training pauses while a round is in flight."""
        self.still: float | None = None
        """Since when it stands still there."""
        self.stopped = 0.0
        """Seconds for which it has stood still since the last move, or since a snapshot before which it had no
        limit."""
        self.outer_step = 0
        self.resumed = False
        self.told = False
        """Whether an order has come. Until then the parent writes the counters, and this side must not."""
        """Whether it has been told to train in this life: what keeps it from that before is no round."""
        device = self.learner.device
        if device.type == "cpu":
            be_nice()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        precision = "bfloat16" if self.learner.dtype is torch.bfloat16 else "float32"
        self.beside = side_stream(device)
        encodes = self.replica is not None
        pageable = pinned.lock([self.memory.array], device)
        _send(control, Ready(str(device), name, threads, precision, self.learner.micro_batch, encodes, note, pageable))

    def run(self) -> None:
        """Train whenever allowed and leased; never returns while the parent lives."""
        while True:
            while not self.may_step():
                self.rest()
                self.handle(self.inbox.get())
            while not self.inbox.empty():
                self.handle(self.inbox.get())
            if self.may_step():
                self.step()

    def may_step(self) -> bool:
        """Whether it is told to train, has samples, and has not run as far ahead of a round as it may."""
        if not (self.training and self.leased >= self.batch):
            return False
        if self.until is not None and self.memory.read().steps >= self.until:
            self.still = self.still or time.monotonic()
            return False
        return True

    def rest(self) -> None:
        """Note why no step is to be made now: a round keeps it from training, or there is nothing to train on."""
        if not self.told:
            return
        counters = self.memory.read()
        if self.resumed and (not self.training or (self.until is not None and counters.steps >= self.until)):
            counters.hold()
        else:
            counters.let_go()
        self.memory.write(counters)

    def hold(self) -> Counters:
        """The counters, with a round at work on the parameters from now on."""
        counters = self.memory.read()
        counters.hold()
        self.memory.write(counters)
        return counters

    def handle(self, message: ToChild) -> None:
        self.told = True
        if isinstance(message, Grant):
            self.spans.extend(message.spans)
            self.leased += sum(count for _, count in message.spans)
        elif isinstance(message, Revoke):
            self.spans.clear()
            self.leased = 0
            counters = self.memory.read()
            counters.epoch, counters.drawn = message.epoch, 0
            self.memory.write(counters)
        elif isinstance(message, Freeze):
            self.freeze(message)
        elif isinstance(message, Move):
            self.move(message)
        elif isinstance(message, Commit):
            self.commit(message)
        elif isinstance(message, Hold):
            assert self.replica is not None
            self.replica.hold(message.numbers)
        elif isinstance(message, Place):
            self.place(message)
        elif isinstance(message, Resume):
            self.outer_step = message.outer_step
            self.load(message.reload)
            if self.replica is not None:
                self.replica.go_on()
            counters = self.memory.read()
            counters.spend(message.number, message.spent, message.of)
            self.memory.write(counters)
            self.training = self.resumed = True
            self.go_on(message.until)

    def load(self, again: bool = False) -> None:
        """Take θ from the shared memory, if that has not been done in this life, or has to be done again."""
        from . import pinned

        if not self.loaded:
            # Only now has the parent allocated the rest of what this child needs.
            memory = self.memory
            if self.replica is not None:
                pinned.lock([memory.window, memory.encoded], self.learner.device)
            elif memory.frozen is not None:
                pinned.lock([memory.frozen], self.learner.device)
        if again or not self.loaded:
            self.learner.load()
            if self.replica is not None:
                self.replica.reset()
            self.loaded = True

    def go_on(self, until: int | None) -> None:
        if self.still is not None:
            self.stopped += time.monotonic() - self.still
            self.still = None
        self.until = until

    def freeze(self, message: Freeze) -> None:
        counters, began = self.hold(), time.monotonic()
        self.load()
        if message.ahead is None:
            self.training = False
            if self.replica is not None:
                self.replica.freeze(message.number)
            else:
                self.learner.store()
        elif self.replica is not None:
            self.replica.snapshot(message.number, message.parts or [(0, self.learner.flat.numel())])
            self.go_on(counters.steps + message.ahead)
            self.stopped = 0.0
        else:
            assert self.frozen is not None
            for start, stop in message.parts or [(0, len(self.frozen))]:
                self.learner.snapshot(self.frozen, start, stop)
            if message.store:
                self.learner.store()
            if self.until is None:
                self.stopped = 0.0
            limit = counters.steps + message.ahead
            self.go_on(limit if message.until is None else min(limit, message.until))
        took = time.monotonic() - began
        _send(
            self.control,
            Frozen(
                message.number, counters.steps, counters.tokens, counters.units, counters.drawn, counters.epoch, took
            ),
        )

    def move(self, message: Move) -> None:
        assert self.frozen is not None
        self.load()
        self.still = self.still or time.monotonic()
        counters = self.hold()
        counters.moved = message.number
        self.memory.write(counters)
        for start, stop, keep in message.runs:
            self.learner.move(self.frozen, start, stop, keep)
        moved = Moved(message.number, counters.steps, counters.tokens, counters.units, 0.0)
        counters.spend(message.number, message.spent, message.of)
        self.memory.write(counters)
        self.outer_step = message.outer_step
        spent = moved.steps - counters.steps
        self.go_on(message.until - spent if message.until is not None else None)
        _send(self.control, msgspec.structs.replace(moved, stopped=self.stopped))
        self.stopped = 0.0

    def commit(self, message: Commit) -> None:
        import torch

        assert self.replica is not None
        self.still = self.still or time.monotonic()
        self.hold()
        self.load()
        known = self.replica.commit(
            message.fragment, message.mine, message.others, torch.from_numpy(self.memory.array), source=message.source,
            rule=Overlap(Merge(message.merge), alpha=message.alpha), lost=message.lost, dropped=message.dropped,
            head=message.head,
        )  # fmt: skip
        counters = self.memory.read()
        moved = Moved(message.number, counters.steps, counters.tokens, counters.units, 0.0, known)
        counters.spend(message.number, message.spent if known else 1.0, message.of if known else None)
        self.memory.write(counters)
        self.outer_step, self.training, self.resumed = message.outer_step, True, True
        self.go_on(message.until if known else None)
        _send(self.control, msgspec.structs.replace(moved, stopped=self.stopped))

    def place(self, message: Place) -> None:
        import torch

        assert self.replica is not None
        if message.what == "params":
            self.load(True)
            self.replica.head = message.head
        else:
            self.replica.place(message.what, torch.from_numpy(self.memory.array))
        _send(self.control, Placed(message.number))

    def serve(self, services: queue.SimpleQueue[Service]) -> None:
        """Encode, and read what goes to the disk, beside training; never returns."""
        import torch

        assert self.replica is not None
        encoded, window = torch.from_numpy(self.memory.encoded), torch.from_numpy(self.memory.window)
        while True:
            message = services.get()
            try:
                with self.beside():
                    if isinstance(message, Encode):
                        sound, moved = self.replica.encode(message.freeze, message.fragment, encoded, message.share)
                        _send(self.control, Encoded(message.number, sound, moved))
                    else:
                        out = window[: message.stop - message.start]
                        _send(self.control, Piece(message.number, self.replica.read(message.what, message.start, out)))
            except Exception as error:
                # The device's memory, mostly. The parent goes on without; a thread that ended would let it wait.
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                if isinstance(message, Encode):
                    _send(self.control, Encoded(message.number, False, 0, why, out_of_memory(error)))
                else:
                    _send(self.control, Piece(message.number, "", why))

    def draw(self) -> list[int]:
        """The next batch of leased sample units."""
        units: list[int] = []
        while len(units) < self.batch:
            start, count = self.spans.popleft()
            taken = min(count, self.batch - len(units))
            units.extend(range(start, start + taken))
            if taken < count:
                self.spans.appendleft((start + taken, count - taken))
        self.leased -= len(units)
        return units

    def step(self) -> None:
        import numpy as np

        memory, counters = self.memory, self.memory.read()
        units = self.draw()
        counters.drawn += len(units)
        counters.let_go()
        counters.begun = begun = time.monotonic()
        used = time.process_time()
        memory.write(counters)
        loss = self.learner.step(np.array(units, np.int64), self.outer_step, counters.steps)
        took = time.monotonic() - begun
        counters.rate = self.rate(self.learner.inner, self.learner.progress(self.outer_step, counters.steps))
        counters.stepping += took
        counters.steps += 1
        counters.tokens += self.learner.tokens_per_step
        counters.units += len(units)
        counters.took, counters.cpu = took, time.process_time() - used
        counters.step_time = _smooth(counters.step_time or took, took)
        if loss == loss:
            counters.loss = _smooth(counters.loss if counters.loss == counters.loss else loss, loss)
        counters.micro_batch, counters.skipped = self.learner.micro_batch, self.learner.skipped
        counters.begun = 0.0
        memory.write(counters)


def _smooth(average: float, value: float) -> float:
    return average + SMOOTHING * (value - average)


def _listen(
    control: socket.socket, inbox: queue.SimpleQueue[ToChild], services: queue.SimpleQueue[Service]
) -> None:  # fmt: skip
    try:
        with control.makefile("rb") as lines:
            for text in lines:
                message = to_child.decode(text)
                if isinstance(message, Encode | Read):
                    services.put(message)
                else:
                    inbox.put(message)
    finally:
        # the parent is gone (or spoke nonsense): nothing here is worth keeping
        os._exit(0)


_sending = threading.Lock()
"""Two threads answer; each line goes out whole."""


def _send(control: socket.socket, message: ToParent) -> None:
    try:
        with _sending:
            control.sendall(line(message))
    except OSError:
        os._exit(0)


def be_nice() -> None:
    """Leave the cores to others first. Where autogroups are on, Linux weighs sessions against each other, and this
    process has one of its own: then its own niceness counts for nothing, and the session's must be set."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write(str(NICENESS))


def die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this process when its parent dies; elsewhere the closed channel does it."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
