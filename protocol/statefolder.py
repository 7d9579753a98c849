"""The folder in which a process keeps what must survive a restart: identity, commits, checkpoints, event log.

One process at a time uses a folder; the lock goes with the process, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from pathlib import Path
from types import TracebackType

from .errors import AtollError, ResourceError, StateError, StateLocked

LOCK_FILE = "lock"
# What replace_file of atoll.protocol.disk leaves when its process is killed in the middle.
HALF_WRITTEN = re.compile(r"\..+\.\d+\.tmp")


def state_home() -> Path:
    """Where atoll keeps state unless told otherwise: ``$XDG_STATE_HOME/atoll``, by default ``~/.local/state/atoll``."""
    base = os.environ.get("XDG_STATE_HOME")
    # The XDG specification says to ignore relative paths.
    root = Path(base) if base and os.path.isabs(base) else Path.home() / ".local" / "state"
    return root / "atoll"


def default_state(run_id: bytes | str, prefix: str = "") -> Path:
    """The default state folder of one run: the run id's first 12 hex digits under :func:`state_home`."""
    text = run_id.hex() if isinstance(run_id, bytes) else run_id
    return state_home() / f"{prefix}{text[:12]}"


class StateFolder:
    """A state folder that this process holds. Use as a context manager, or call :meth:`close`.

    What a process that was killed left half written here, or one folder below, is removed.

    Raises :class:`StateLocked` when another process holds it, :class:`StateError` when it cannot be used, and
    :class:`ResourceError` when the disk is full or read-only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise folder_error(path, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 64, 0).decode("ascii", "replace").strip()
            self.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise folder_error(path, error) from error
            who = f" (process {holder})" if holder else ""
            raise StateLocked(
                f"the state folder {path} is in use by another atoll process{who}; "
                "stop that one, or give this one its own folder with --state"
            ) from None
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            self.close()
            raise folder_error(path, error) from error
        for leftover in [*path.glob(".*.tmp"), *path.glob("*/.*.tmp")]:
            if HALF_WRITTEN.fullmatch(leftover.name):
                # It is in nobody's way, so an error is none.
                with contextlib.suppress(OSError):
                    leftover.unlink()

    def close(self) -> None:
        """Let the folder go. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> StateFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def folder_error(path: Path, error: OSError) -> AtollError:
    """The error of this project for an operating system's complaint about ``path``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"no space left on the disk of {path}; free some, or choose another place with --state")
    if error.errno == errno.EROFS:
        return ResourceError(f"{path} is on a read-only file system; choose another place with --state")
    if error.errno in (errno.EACCES, errno.EPERM):
        return StateError(f"no permission to write to {path}; change its owner, or choose another place with --state")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return StateError(f"{path} is not a folder (or a parent of it is a file); choose another place with --state")
    return StateError(f"cannot use the state folder {path}: {error.strerror or error}; choose another with --state")
