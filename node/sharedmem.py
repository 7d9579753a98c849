"""Memory that the supervisor and its trainer child both see: a page of counters, then the parameters, then (for runs
that overlap rounds and training) those that a round averages, then (for a child that encodes on its device) encoded
contributions, and a window for what is fetched piece by piece. Of the last two kinds a child needs one; where it is
not known yet which, they take memory once they are reserved.

It is anonymous (``memfd_create``; elsewhere an unlinked, fully allocated file) and passed by descriptor, so it needs
no room in /dev/shm, has no name to clean up, and is gone with the last process that holds it.

The counters have one writer: the child, as long as there is one that has begun to take orders. What the parent wants
changed goes to it as an order; only between two children does the parent write. Each write fills the one of two slots
that is not in use and then turns to it, so the parent reads a consistent set at any time without asking, and a child
that is stopped or killed in the middle of a write has changed nothing.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from dataclasses import astuple, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from atoll.protocol.errors import ResourceError
from atoll.protocol.overlap import left

PAGE = 4096


@dataclass
class Counters:
    """How far the island is. See :class:`atoll.protocol.island.Progress` for the first ones."""

    steps: int = 0
    tokens: int = 0
    units: int = 0
    epoch: int = 0
    """Number of the leases' generation that the child works on; a revoke begins the next."""
    drawn: int = 0
    """Sample units of this generation that were taken, counted before their step begins: never taken again."""
    micro_batch: int = 0
    skipped: int = 0
    """Steps whose gradient was not finite."""
    step_time: float = 0.0
    loss: float = float("nan")
    rate: float = 0.0
    """Factor of the learning rate in the last step."""
    begun: float = 0.0
    """``time.monotonic()`` when the running step began; 0 between steps."""
    took: float = 0.0
    """Seconds of the last step."""
    cpu: float = 0.0
    """Processor seconds of the last step, all threads together."""
    moved: int = 0
    """Number of the last move of the parameters that was begun: after a death in the middle nobody knows them."""
    spent: int = 0
    """Number of the last order by which counters were lowered: what later ones take is not off them yet."""

    stepping: float = 0.0
    """Seconds of all steps since the process of the peer began, that which is running excepted."""
    held: float = 0.0
    """Seconds for which rounds have kept it from training since then, the present while excepted: from a freeze to the
    resume (one to save what it has done, and a new start at another head, are among them), at the limit of an overlap,
    for a copy or a move of its parameters."""
    held_since: float = 0.0
    """``time.monotonic()`` when the present while began; 0 when nothing keeps it."""

    def hold(self) -> None:
        """A round keeps it from training from now on, if none does already."""
        self.held_since = self.held_since or time.monotonic()

    def let_go(self) -> None:
        """Nothing keeps it from training any more."""
        if self.held_since:
            self.held += time.monotonic() - self.held_since
            self.held_since = 0.0

    def spend(self, number: int, share: float, of: tuple[int, int, int] | None) -> None:
        """Take off what a commit has taken over, by order ``number``: a share of the counters, or of those of the
        snapshot ``of`` (steps, tokens, units); see :func:`atoll.protocol.overlap.left`."""
        steps, tokens, units = of or (None, None, None)
        self.steps = left(self.steps, share, steps)
        self.tokens = left(self.tokens, share, tokens)
        self.units = left(self.units, share, units)
        self.spent = number


_FIELDS = len(fields(Counters))
SLOT = 1024
"""Bytes of one set of counters, and of what stands before the first."""


WINDOW = 1 << 20
"""Elements of the window."""


class SharedMemory:
    """``parameters`` float32 elements (``array``) behind one page of counters, as many more (``frozen``) when they are
    asked for, else None, and so many bytes of encoded contributions (``encoded``), with a window of float32 elements
    (``window``), both empty where there are none."""

    def __init__(self, fd: int, parameters: int, *, frozen: bool = False, encoded: int = 0) -> None:
        """Map an existing descriptor, which stays the caller's to close (the mapping lives on without it)."""
        self.fd = fd
        self._parameters, self._frozen, self._encoded = parameters, frozen, encoded
        self._map = mmap.mmap(fd, _size(parameters, frozen, encoded))
        self._writes = np.frombuffer(self._map, np.int64, 1)
        # every counter as float64: exact for integers below 2**53
        self._slots = [np.frombuffer(self._map, np.float64, _FIELDS, SLOT * (1 + slot)) for slot in range(2)]
        self.array: NDArray[np.float32] = np.frombuffer(self._map, np.float32, parameters, PAGE)
        self.frozen: NDArray[np.float32] | None = None
        if frozen:
            self.frozen = np.frombuffer(self._map, np.float32, parameters, PAGE + _whole_pages(4 * parameters))
        end, window = _size(parameters, frozen, 0), min(WINDOW, parameters) if encoded else 0
        self.window: NDArray[np.float32] = np.zeros(0, np.float32)
        self.encoded: NDArray[np.uint8] = np.zeros(0, np.uint8)
        if encoded:
            self.window = np.frombuffer(self._map, np.float32, window, _whole_pages(end))
            self.encoded = np.frombuffer(self._map, np.uint8, encoded, _whole_pages(end) + _whole_pages(4 * window))

    @classmethod
    def create(cls, parameters: int, *, frozen: bool = False, encoded: int = 0) -> SharedMemory:
        """New memory, zeroed and really allocated, but that with ``encoded`` only counters and parameters are: see
        :meth:`reserve`. Raises :class:`ResourceError` when there is not enough."""
        size = _size(parameters, frozen, encoded)
        # asking the kernel for more than there is would wake its killer, not return an error
        if size > (free := _available()):
            raise ResourceError(
                f"no memory for {parameters} parameters: {size / 2**20:.0f} MiB are to be shared with the trainer, "
                f"{free / 2**20:.0f} MiB are free; free some, or join a run with a smaller model"
            )
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("atoll", os.MFD_CLOEXEC)
        else:
            fd, path = tempfile.mkstemp(prefix="atoll-")
            os.unlink(path)
        try:
            os.ftruncate(fd, size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, _size(parameters, False, 0) if encoded else size)
            memory = cls(fd, parameters, frozen=frozen, encoded=encoded)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ResourceError(
                f"no memory for {parameters} parameters ({size / 2**20:.0f} MiB shared with the trainer): {error}"
            ) from None
        memory.write(Counters())
        return memory

    def reserve(self, *, encodes: bool) -> None:
        """Allocate what a child needs that encodes, or one that does not. Raises :class:`ResourceError`."""
        end = _size(self._parameters, self._frozen, 0)
        start = _whole_pages(end) if encodes else PAGE + 4 * self._parameters
        stop = _size(self._parameters, self._frozen, self._encoded) if encodes else end
        if not self._encoded or start >= stop or not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(self.fd, start, stop - start)
        except OSError as error:
            raise ResourceError(
                f"no memory for rounds of {self._parameters} parameters ({(stop - start) / 2**20:.0f} MiB shared with "
                f"the trainer): {error}"
            ) from None

    def write(self, counters: Counters) -> None:
        """Publish all counters at once. One writer at a time."""
        writes = int(self._writes[0]) + 1
        self._slots[writes % 2][:] = astuple(counters)
        self._writes[0] = writes

    @property
    def writes(self) -> int:
        """How often counters have been written: what goes up as long as their writer does something."""
        return int(self._writes[0])

    def read(self) -> Counters:
        """A consistent set of counters: the newest that was written whole."""
        while True:
            writes = int(self._writes[0])
            values = self._slots[writes % 2].tolist()
            # the writer is at the other slot until the next write has ended
            if int(self._writes[0]) == writes:
                return Counters(*(int(v) if kind else v for kind, v in zip(_INTEGER, values, strict=True)))

    def close(self) -> None:
        """Close the descriptor; the mapping goes when nobody uses ``array`` any more. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _size(parameters: int, frozen: bool, encoded: int) -> int:
    size = PAGE + (_whole_pages(4 * parameters) if frozen else 0) + 4 * parameters
    if encoded:
        size = _whole_pages(size) + _whole_pages(4 * min(WINDOW, parameters)) + encoded
    return size


def _available() -> int:
    """Bytes of memory that can be had without harm, as far as the system tells."""
    try:
        with open("/proc/meminfo") as lines:
            for text in lines:
                if text.startswith("MemAvailable:"):
                    return int(text.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 1 << 62


_INTEGER = [field.type == "int" for field in fields(Counters)]
