"""Where a peer keeps bytes that must survive a crash: a folder on disk, or memory that plays one.

The store of a run (:mod:`atoll.protocol.store`) is the same on both. Names are relative, with ``/`` between folder and
file; one level of folders. Every method may be called from any thread. Errors are those of
:func:`disk_error`, but a missing file is ``FileNotFoundError`` and a file that cannot be read is ``OSError``: both
are ordinary to the store, which reports and goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import AtollError, DiskFull, ResourceError
from .statefolder import StateFolder, folder_error

Buffer = bytes | bytearray | memoryview
FOLDERS = ("log", "checkpoints", "incoming", "lineage", "damaged")
TEMPORARY = ".tmp"
_WHOLE = 1 << 62


class Disk(ABC):
    """Named byte strings that survive a crash, each replaced whole or not at all."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The files in a folder, as ``folder/file``, sorted."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file; -1 when there is none."""

    @abstractmethod
    def read(self, name: str, offset: int = 0, length: int = _WHOLE) -> bytes:
        """At most ``length`` bytes from ``offset``; fewer at the end of the file."""

    @abstractmethod
    def write(self, name: str, pieces: Iterable[Buffer]) -> None:
        """Write or replace a file, atomically and durably: after a crash it is there whole, or as it was before."""

    @abstractmethod
    def allocate(self, name: str, size: int) -> None:
        """Make a file of ``size`` bytes to be filled by :meth:`patch`, its space reserved. Replaces an older one."""

    @abstractmethod
    def patch(self, name: str, offset: int, data: Buffer) -> None:
        """Overwrite bytes in place. Neither atomic nor durable; :meth:`sync` makes it durable."""

    @abstractmethod
    def sync(self, name: str) -> None:
        """Make what was patched durable."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename, durably; replaces ``new``."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; nothing happens when there is none."""

    @abstractmethod
    def close(self) -> None:
        """Let the place go. Idempotent."""


class FolderDisk(Disk):
    """A private folder (mode 0700), locked for this process.

    Raises :class:`~atoll.protocol.errors.StateLocked` when another process holds it, and the errors of
    :func:`disk_error` when it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._errors():
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = StateFolder(path)
        try:
            with self._errors():
                path.chmod(0o700)
                for folder in FOLDERS:
                    (path / folder).mkdir(exist_ok=True, mode=0o700)
                for leftover in [*path.glob(f"*{TEMPORARY}"), *path.glob(f"*/*{TEMPORARY}")]:
                    leftover.unlink()
        except BaseException:
            self._lock.close()
            raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(self.path, error) from error

    def names(self, folder: str) -> list[str]:
        with self._errors():
            found = os.listdir(self.path / folder)
        return sorted(f"{folder}/{name}" for name in found if not name.endswith(TEMPORARY))

    def size(self, name: str) -> int:
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return -1

    def read(self, name: str, offset: int = 0, length: int = _WHOLE) -> bytes:
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            left = min(length, max(0, os.fstat(descriptor).st_size - offset))
            pieces = []
            while left > 0:
                piece = os.pread(descriptor, min(left, 1 << 30), offset)
                if not piece:
                    break
                pieces.append(piece)
                offset += len(piece)
                left -= len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        finally:
            os.close(descriptor)

    def write(self, name: str, pieces: Iterable[Buffer]) -> None:
        target = self.path / name
        temporary = target.with_name(target.name + TEMPORARY)
        with self._errors():
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                try:
                    for piece in pieces:
                        _write_all(descriptor, piece)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                os.replace(temporary, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
            _sync_folder(target.parent)

    def allocate(self, name: str, size: int) -> None:
        with self._errors():
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            descriptor = os.open(self.path / name, flags, 0o600)
            try:
                _reserve(descriptor, size)
            except BaseException:
                with contextlib.suppress(OSError):
                    (self.path / name).unlink()
                raise
            finally:
                os.close(descriptor)

    def patch(self, name: str, offset: int, data: Buffer) -> None:
        with self._errors():
            descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.lseek(descriptor, offset, os.SEEK_SET)
                _write_all(descriptor, data)
            finally:
                os.close(descriptor)

    def sync(self, name: str) -> None:
        with self._errors():
            descriptor = os.open(self.path / name, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        with self._errors():
            os.replace(self.path / old, self.path / new)
            for folder in {str(Path(old).parent): None, str(Path(new).parent): None}:
                _sync_folder(self.path / folder)

    def remove(self, name: str) -> None:
        with self._errors():
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.close()

    def __str__(self) -> str:
        return str(self.path)


class MemoryDisk(Disk):
    """A disk in memory, for the simulated network and for peers that keep nothing.

    capacity: bytes that fit, or None for no limit. The object outlives its store, as a disk outlives a process; give
    it to the next :class:`~atoll.protocol.store.Store` to play a restart, or damage ``files`` to play an old disk.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.files: dict[str, bytes | bytearray] = {}
        self.capacity = capacity
        self._guard = threading.Lock()

    def _put(self, name: str, data: bytes | bytearray) -> None:
        with self._guard:
            if self.capacity is not None:
                used = sum(len(held) for other, held in self.files.items() if other != name)
                if used + len(data) > self.capacity:
                    raise disk_error(Path(str(self)), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            self.files[name] = data

    def names(self, folder: str) -> list[str]:
        with self._guard:
            return sorted(name for name in self.files if name.startswith(folder + "/"))

    def size(self, name: str) -> int:
        held = self.files.get(name)
        return -1 if held is None else len(held)

    def read(self, name: str, offset: int = 0, length: int = _WHOLE) -> bytes:
        held = self.files.get(name)
        if held is None:
            raise FileNotFoundError(name)
        return bytes(memoryview(held)[offset : offset + length])

    def write(self, name: str, pieces: Iterable[Buffer]) -> None:
        self._put(name, b"".join(pieces))

    def allocate(self, name: str, size: int) -> None:
        self._put(name, bytearray(size))

    def patch(self, name: str, offset: int, data: Buffer) -> None:
        held = self.files[name]
        if not isinstance(held, bytearray):
            held = self.files[name] = bytearray(held)
        held[offset : offset + len(data)] = data

    def sync(self, name: str) -> None:
        pass

    def rename(self, old: str, new: str) -> None:
        with self._guard:
            self.files[new] = self.files.pop(old)

    def remove(self, name: str) -> None:
        with self._guard:
            self.files.pop(name, None)

    def close(self) -> None:
        pass

    def __str__(self) -> str:
        return "memory"


def disk_error(path: Path, error: OSError) -> AtollError:
    """The error of this project for an operating system's complaint; :class:`DiskFull` when space ran out."""
    # EFBIG: the process's own limit of file size, or the file system's, which to us is the same as no space.
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason = "file size limit reached" if error.errno == errno.EFBIG else "no space left on the disk"
        return DiskFull(f"{reason} of {path}; free some, or choose another place with --state")
    if error.errno == errno.EIO:
        return ResourceError(
            f"the disk of {path} reports input/output errors; check it, or choose another with --state"
        )
    return folder_error(path, error)


def replace_file(target: Path, data: bytes, *, durable: bool = False) -> None:
    """Write or replace a file as a whole: whoever reads it, and whatever happens, finds the old or the new one.

    durable: also after a power cut. Raises OSError, and leaves nothing of the new one then.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(target.parent)


def _write_all(descriptor: int, piece: Buffer) -> None:
    view = memoryview(piece).cast("B")
    while view.nbytes:
        view = view[os.write(descriptor, view[: 1 << 30]) :]


def _reserve(descriptor: int, size: int) -> None:
    """Make the file ``size`` bytes long, its blocks reserved where the system can, so that space runs out now."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(descriptor, size)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
