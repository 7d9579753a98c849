"""Memory that the supervisor and its trainer child both see: a page of counters, then the parameters, then (for runs
that overlap rounds and training) those that a round averages.

It is anonymous (``memfd_create``; elsewhere an unlinked, fully allocated file) and passed by descriptor, so it needs
no room in /dev/shm, has no name to clean up, and is gone with the last process that holds it.

The counters have one writer at a time: the child while it trains, the parent between a freeze and the next resume.
A sequence number, odd during a write, lets the parent read a consistent set at any time without asking.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import astuple, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from atoll.protocol.errors import ResourceError

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


_FIELDS = len(fields(Counters))


class SharedMemory:
    """``parameters`` float32 elements (``array``) behind one page of counters, and as many more (``frozen``) when
    they are asked for, else None."""

    def __init__(self, fd: int, parameters: int, *, frozen: bool = False) -> None:
        """Map an existing descriptor, which stays the caller's to close (the mapping lives on without it)."""
        self.fd = fd
        self._map = mmap.mmap(fd, _size(parameters, frozen))
        self._sequence = np.frombuffer(self._map, np.int64, 1)
        # every counter as float64: exact for integers below 2**53
        self._values = np.frombuffer(self._map, np.float64, _FIELDS, 64)
        self.array: NDArray[np.float32] = np.frombuffer(self._map, np.float32, parameters, PAGE)
        self.frozen: NDArray[np.float32] | None = None
        if frozen:
            self.frozen = np.frombuffer(self._map, np.float32, parameters, PAGE + _whole_pages(4 * parameters))

    @classmethod
    def create(cls, parameters: int, *, frozen: bool = False) -> SharedMemory:
        """New memory, zeroed and really allocated. Raises :class:`ResourceError` when there is not enough."""
        size = _size(parameters, frozen)
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
                os.posix_fallocate(fd, 0, size)
            memory = cls(fd, parameters, frozen=frozen)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ResourceError(
                f"no memory for {parameters} parameters ({size / 2**20:.0f} MiB shared with the trainer): {error}"
            ) from None
        memory.write(Counters())
        return memory

    def write(self, counters: Counters) -> None:
        """Publish all counters at once."""
        self._sequence[0] += 1
        self._values[:] = astuple(counters)
        self._sequence[0] += 1

    def read(self) -> Counters:
        """A consistent set of counters.

        A writer that died in the middle of a write leaves an odd number for ever, so this does not wait for long.
        """
        for _ in range(1000):
            before = int(self._sequence[0])
            values = self._values.tolist()
            if before % 2 == 0 and int(self._sequence[0]) == before:
                break
        return Counters(*(int(v) if kind else v for kind, v in zip(_INTEGER, values, strict=True)))

    def repair(self) -> None:
        """After the death of the writer: make the sequence number even again."""
        self._sequence[0] += int(self._sequence[0]) % 2

    def close(self) -> None:
        """Close the descriptor; the mapping goes when nobody uses ``array`` any more. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _size(parameters: int, frozen: bool) -> int:
    return PAGE + (_whole_pages(4 * parameters) if frozen else 0) + 4 * parameters


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
