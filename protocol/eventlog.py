"""The event log: one JSON object a line, appended by the process whose life it tells.

Every line has ``t`` (seconds since 1970), ``event`` and ``peer``. The events and their fields stand in
:mod:`atoll.node.events`; the bootstrap peer writes the same kind of file.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from .statefolder import folder_error

EVENT_FILE = "events.jsonl"
ROTATE_AT = 64 * 1024 * 1024
"""Bytes after which the file becomes ``events.jsonl.1`` and a new one begins: a volunteer's disk must not fill."""


class EventLog:
    """Appends events to a file; safe to use from several threads.

    path: the file, or None to write none (``echo`` still sees the events). ``echo`` is called with each event, for a
    console. A disk that fills later does not stop the process: the events that did not fit are counted in ``dropped``.
    """

    def __init__(
        self,
        path: Path | None,
        peer: str = "",
        *,
        echo: Callable[[dict[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.time,
        rotate_at: int = ROTATE_AT,
    ) -> None:
        self.path = path
        self.peer = peer
        self.dropped = 0
        self._echo = echo
        self._clock = clock
        self._rotate_at = rotate_at
        self._lock = threading.Lock()
        self._file = -1
        self._closed = path is None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._open(path)
            except OSError as error:
                raise folder_error(path, error) from error

    def _open(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        # A crash may have left half a line; what follows must not be glued to it.
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, event: str, /, **fields: Any) -> None:
        """Append one event. Bytes (ids, digests) are written as hex; NaN and infinity as null.

        A field ``peer`` is about another peer and is written as ``from``: ``peer`` is whose log this is.
        """
        record: dict[str, Any] = {"t": round(self._clock(), 3), "event": event, "peer": self.peer}
        for key, value in fields.items():
            plain = value.hex() if isinstance(value, bytes | bytearray | memoryview) else value
            record["from" if key == "peer" else key] = plain
        line = msgspec.json.encode(record) + b"\n"
        with self._lock:
            if not self._closed and self.path is not None:
                try:
                    size = os.fstat(self._file).st_size + len(line)
                    if size > self._rotate_at:
                        try:
                            self._rotate(self.path)
                        except OSError:
                            # The next event tries again; meanwhile there is room for as much once more.
                            if size > 2 * self._rotate_at:
                                raise
                    os.write(self._file, line)
                except OSError:
                    self.dropped += 1
        if self._echo is not None:
            self._echo(record)

    def _rotate(self, path: Path) -> None:
        """Begin a new file; raises OSError, and then the old one goes on."""
        new = path.with_name(path.name + ".new")
        opened = os.open(new, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        kept = path.with_name(path.name + ".1")
        try:
            with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                os.replace(path, kept)
            try:
                os.replace(new, path)
            except OSError:
                os.replace(kept, path)
                raise
        except OSError:
            os.close(opened)
            raise
        # Never a closed number in _file: the system gives it to whatever is opened next.
        old, self._file = self._file, opened
        os.close(old)

    def close(self) -> None:
        """Close the file. Idempotent; later events reach only ``echo``."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._file)
