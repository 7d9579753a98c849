"""The log of a run's commits with their averaged chunks, one file a commit.

File ``log/<height, 12 digits>-<first 16 hex digits of the id>.commit``, integers big-endian uint32::

    "ATLLOG1\\n", length of the commit, number of chunks, length of each chunk, commit, chunks, BLAKE3

The hash covers everything before the chunks; each chunk is covered by its own hash in the commit's body, so that a
log of gigabytes opens without being read whole, and damage to any byte is found when that byte is used. A damaged
file is moved to ``damaged/`` and reported, never fatal. Several commits may stand at one height (forks): the chain is
made by the parents they name.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from blake3 import blake3

from .commits import Position, position_of
from .disk import Buffer, Disk
from .errors import AtollError, CheckpointError, PeerMisbehaved
from .messages import MAX_CHUNKS, Commit, Head, decode, encode, hash_of

MAGIC = b"ATLLOG1\n"
MAX_COMMIT = 128 * 1024 * 1024
"""Bytes of the largest commit that is read: a million chunks with their contributors fit."""
KEEP_DAMAGED = 4
"""Damaged files kept for a human; older ones are removed."""
_SIZES = struct.Struct(">8sII")
_HASH = 32


@dataclass(frozen=True)
class LogEntry:
    """A commit on disk: what stays in memory of it."""

    position: Position
    parent: bytes
    state: bytes
    """State digest at the parent."""
    name: str
    commit_at: int
    commit_size: int
    commit_hash: bytes
    """BLAKE3 of the encoded commit: its id does not cover the votes."""
    offsets: tuple[int, ...]
    """Where each chunk begins in the file, and where the last one ends."""
    hashes: bytes
    """The chunks' hashes, 32 bytes each."""

    @property
    def id(self) -> bytes:
        return self.position.head.id

    @property
    def head(self) -> Head:
        return self.position.head


class CommitLog:
    """The commits on one disk. Methods may be called from any thread.

    warn: called with a sentence for everything that was found damaged.
    """

    def __init__(self, disk: Disk, run_id: bytes, warn: Callable[[str], None]) -> None:
        self._disk = disk
        self._run = run_id
        self._warn = warn
        self._entries: dict[bytes, LogEntry] = {}
        self._guard = threading.RLock()
        for name in disk.names("log"):
            try:
                entry = self._scan(name)
            except (OSError, CheckpointError) as error:
                self._set_aside(name, str(error))
            else:
                self._entries[entry.id] = entry

    def _scan(self, name: str) -> LogEntry:
        size = self._disk.size(name)
        magic, commit_size, count = _unpack_sizes(self._disk.read(name, 0, _SIZES.size))
        if magic != MAGIC or count > MAX_CHUNKS or commit_size > MAX_COMMIT:
            raise CheckpointError("not a commit file of this version")
        commit_at = _SIZES.size + 4 * count
        front = self._disk.read(name, 0, commit_at + commit_size)
        if len(front) != commit_at + commit_size:
            raise CheckpointError(f"truncated at {size} bytes")
        lengths = struct.unpack_from(f">{count}I", front, _SIZES.size)
        offsets = tuple(accumulate(lengths, initial=len(front)))
        if size != offsets[-1] + _HASH:
            raise CheckpointError(f"{size} bytes where {offsets[-1] + _HASH} belong")
        if self._disk.read(name, offsets[-1], _HASH) != blake3(front).digest():
            raise CheckpointError("the hash does not match")
        commit = _decode(front[commit_at:])
        if commit.body.run != self._run:
            raise CheckpointError(f"a commit of run {commit.body.run.hex()[:12]}, this is {self._run.hex()[:12]}")
        entry = _entry_of(commit, name, front[commit_at:], commit_at, offsets)
        if name != _name_of(entry.head):
            raise CheckpointError(f"holds commit {entry.id.hex()[:16]} of height {entry.head.height}")
        return entry

    def _set_aside(self, name: str, reason: str) -> None:
        set_aside(self._disk, name, reason, self._warn)

    def append(self, commit: Commit, chunks: Sequence[Buffer]) -> LogEntry:
        """Write a commit with its averaged chunks, durably and atomically. Writing it again changes nothing.

        Raises :class:`~atoll.protocol.errors.DiskFull` when there is no space, :class:`ValueError` when the chunks are
        not as many as the body names, or the commit is of another run.
        """
        body = commit.body
        if len(chunks) != len(body.chunks) or body.run != self._run:
            raise ValueError(f"{len(chunks)} chunks for a commit of {len(body.chunks)}, or another run's commit")
        data = encode(commit)
        with self._guard:
            known = self._entries.get(hash_of(body))
        if known is not None:
            return known
        front = b"".join(
            [
                _SIZES.pack(MAGIC, len(data), len(chunks)),
                struct.pack(f">{len(chunks)}I", *(len(chunk) for chunk in chunks)),
                data,
            ]
        )
        offsets = tuple(accumulate((len(chunk) for chunk in chunks), initial=len(front)))
        position = position_of(body, hash_of(body))
        entry = _entry_of(commit, _name_of(position.head), data, len(front) - len(data), offsets)
        self._disk.write(entry.name, [front, *chunks, blake3(front).digest()])
        with self._guard:
            self._entries[entry.id] = entry
        return entry

    def get(self, commit_id: bytes) -> LogEntry | None:
        """What is known of a commit on disk."""
        with self._guard:
            return self._entries.get(commit_id)

    def entries(self) -> list[LogEntry]:
        """All commits, forks too, by height and id."""
        with self._guard:
            return sorted(self._entries.values(), key=lambda entry: (entry.head.height, entry.id))

    def commit(self, commit_id: bytes) -> Commit | None:
        """The commit itself, read from disk; None when it is not there, or no longer."""
        data = self.commit_bytes(commit_id)
        return None if data is None else _decode(data)

    def commit_bytes(self, commit_id: bytes) -> bytes | None:
        """The canonical encoding of a commit, read from disk."""
        entry = self.get(commit_id)
        if entry is None:
            return None
        try:
            data = self._disk.read(entry.name, entry.commit_at, entry.commit_size)
            if blake3(data).digest() == entry.commit_hash:
                return data
            reason = "the commit changed on disk"
        except OSError as error:
            reason = str(error)
        self._drop(entry, reason)
        return None

    def chunk(self, chunk_hash: bytes) -> bytes | None:
        """An averaged chunk by its hash, verified; None when no commit on disk has it."""
        for entry in reversed(self.entries()):
            at = _find(entry.hashes, chunk_hash)
            if at is not None:
                data = self._chunk(entry, at)
                if data is not None:
                    return data
        return None

    def chunks(self, commit_id: bytes) -> list[bytes]:
        """All averaged chunks of a commit, verified.

        Raises :class:`CheckpointError` when they are not all there; a damaged file has been set aside then.
        """
        entry = self.get(commit_id)
        if entry is None:
            raise CheckpointError(f"commit {commit_id.hex()[:16]} is not in the log")
        chunks = []
        for at in range(len(entry.offsets) - 1):
            data = self._chunk(entry, at)
            if data is None:
                raise CheckpointError(f"the log of commit {commit_id.hex()[:16]} is damaged; fetch it again from peers")
            chunks.append(data)
        return chunks

    def _chunk(self, entry: LogEntry, at: int) -> bytes | None:
        start, end = entry.offsets[at], entry.offsets[at + 1]
        try:
            data = self._disk.read(entry.name, start, end - start)
            if blake3(data).digest() == entry.hashes[at * _HASH : (at + 1) * _HASH]:
                return data
            reason = f"chunk {at} does not match its hash"
        except OSError as error:
            reason = str(error)
        self._drop(entry, reason)
        return None

    def _drop(self, entry: LogEntry, reason: str) -> None:
        with self._guard:
            # Another thread may have found the same, or pruned the file between the look-up and the reading.
            if self._entries.get(entry.id) is not entry:
                return
            del self._entries[entry.id]
        self._set_aside(entry.name, reason)

    def chain(self, commit_id: bytes, first: int = 0) -> list[LogEntry]:
        """The commits from height ``first``, or as far down as the log reaches without a gap, up to ``commit_id``."""
        with self._guard:
            found = []
            entry = self._entries.get(commit_id)
            while entry is not None and entry.head.height >= first:
                found.append(entry)
                entry = self._entries.get(entry.parent)
        return found[::-1]

    def above(self, bases: Iterable[bytes]) -> dict[bytes, LogEntry]:
        """The commits whose chain reaches down to one of the given ids (``NO_DIGEST``: to the run's beginning)."""
        reached = set(bases)
        found = {}
        for entry in self.entries():
            if entry.parent in reached:
                reached.add(entry.id)
                found[entry.id] = entry
        return found

    def prune(self, below: int) -> None:
        """Remove the commits of heights below ``below``."""
        with self._guard:
            old = [entry for entry in self._entries.values() if entry.head.height < below]
            for entry in old:
                del self._entries[entry.id]
        for entry in old:
            self._disk.remove(entry.name)


def set_aside(disk: Disk, name: str, reason: str, warn: Callable[[str], None]) -> None:
    """Move a damaged file to ``damaged/``, keep a few of those, report."""
    kept = f"damaged/{name.rpartition('/')[2]}"
    try:
        if disk.size(name) >= 0:
            disk.rename(name, kept)
        others = [other for other in disk.names("damaged") if other != kept]
        for old in others[: max(0, len(others) + 1 - KEEP_DAMAGED)]:
            disk.remove(old)
    except AtollError as error:
        warn(f"{name} in {disk} is damaged ({reason}) and cannot be moved away ({error}); going on without it")
    else:
        warn(f"{name} in {disk} is damaged ({reason}); moved to {kept}, going on without it")


def _name_of(head: Head) -> str:
    return f"log/{head.height:012d}-{head.id.hex()[:16]}.commit"


def _unpack_sizes(data: bytes) -> tuple[bytes, int, int]:
    if len(data) != _SIZES.size:
        raise CheckpointError(f"truncated at {len(data)} bytes")
    magic, size, count = _SIZES.unpack(data)
    return magic, size, count


def _decode(data: bytes) -> Commit:
    try:
        commit = decode(data, Commit)
    except PeerMisbehaved as error:
        raise CheckpointError(str(error)) from None
    if encode(commit) != data:
        raise CheckpointError("the commit is not in its canonical form")
    return commit


def _entry_of(commit: Commit, name: str, data: bytes, commit_at: int, offsets: tuple[int, ...]) -> LogEntry:
    body = commit.body
    if len(offsets) != len(body.chunks) + 1:
        raise CheckpointError(f"{len(offsets) - 1} chunks for a commit of {len(body.chunks)}")
    return LogEntry(
        position=position_of(body, hash_of(body)),
        parent=body.parent,
        state=body.state,
        name=name,
        commit_at=commit_at,
        commit_size=len(data),
        commit_hash=blake3(data).digest(),
        offsets=offsets,
        hashes=b"".join(entry.hash for entry in body.chunks),
    )


def _find(hashes: bytes, wanted: bytes) -> int | None:
    at = hashes.find(wanted)
    # A match that straddles two hashes is chance; look on.
    while at >= 0 and at % _HASH:
        at = hashes.find(wanted, at + 1)
    return at // _HASH if at >= 0 else None
