"""What a peer's disk knows of the organiser's newest anchor: which commits have it behind them, and the proof of it.

That a commit has the anchor behind it follows from the parents that bodies name, down to the anchored commit: a
commit's id is the hash of its body, so nothing else needs to be believed. The log holds the newest commits only. So
the bodies (not the averages) of those between the anchor and the log stay in a folder of their own, and are given to
newcomers, who would otherwise have to take somebody's word.

Files: ``anchor`` (the sealed anchor and :attr:`Lineage.root`, then BLAKE3), ``lineage/<height>-<id>.body`` (the body as
it was signed; its hash is its name). Methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
from blake3 import blake3

from .anchor import Anchor, SealedAnchor, peek
from .commitlog import LogEntry, set_aside
from .disk import Disk
from .errors import AtollError, PeerMisbehaved
from .messages import NO_DIGEST, Body, decode

ANCHOR_FILE = "anchor"
MAX_LINEAGE = 1 << 14
"""Bodies kept at most …"""
MAX_LINEAGE_BYTES = 64 << 20
"""… and their bytes. Beyond that the oldest go, and newcomers can no longer be shown that the anchor is behind."""
_HASH = 32


class _Kept(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    sealed: SealedAnchor
    root: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class _Link(NamedTuple):
    """A body on disk."""

    height: int
    parent: bytes
    name: str
    size: int


class Lineage:
    """The anchor kept on one disk, and what is known to stand on it.

    warn: called with a sentence for everything found damaged, and when the proof grows too long to be kept.
    """

    def __init__(self, disk: Disk, warn: Callable[[str], None]) -> None:
        self._disk = disk
        self._warn = warn
        self._guard = threading.RLock()
        self.anchor: Anchor | None = None
        self.sealed = b""
        self.root = NO_DIGEST
        """A commit that had the anchor behind it when bodies below it were given up; zero: none."""
        self._bodies: dict[bytes, _Link] = {}
        self._above: set[bytes] = set()
        """Commits that have the anchor behind them, itself included."""
        self._told = False
        self._read()

    def _read(self) -> None:
        if self._disk.size(ANCHOR_FILE) >= 0:
            try:
                data = self._disk.read(ANCHOR_FILE)
                if blake3(data[:-_HASH]).digest() != data[-_HASH:]:
                    raise PeerMisbehaved("the hash does not match")
                kept = decode(data[:-_HASH], _Kept)
                self.anchor, self.sealed, self.root = peek(kept.sealed), kept.sealed, kept.root
            except (OSError, PeerMisbehaved) as error:
                set_aside(self._disk, ANCHOR_FILE, str(error), self._warn)
        for name in self._disk.names("lineage"):
            try:
                data = self._disk.read(name)
                body, body_id = decode(data, Body), blake3(data).digest()
                if name != _name_of(body.height, body_id):
                    raise PeerMisbehaved("the hash does not match")
            except (OSError, PeerMisbehaved) as error:
                set_aside(self._disk, name, str(error), self._warn)
            else:
                self._bodies[body_id] = _Link(body.height, body.parent, name, len(data))

    def save(self) -> None:
        """Write down the anchor. Raises :class:`~atoll.protocol.errors.DiskFull`."""
        with self._guard:
            data = msgspec.msgpack.encode(_Kept(self.sealed, self.root))
        self._disk.write(ANCHOR_FILE, [data, blake3(data).digest()])

    def adopt(self, anchor: Anchor, sealed: bytes, log: Iterable[LogEntry]) -> None:
        """From now on this anchor counts; :meth:`save` makes it last. ``log``: all logged commits."""
        with self._guard:
            self.anchor, self.sealed, self.root, self._told = anchor, sealed, NO_DIGEST, False
            self.rebuild(log)

    def forget(self) -> None:
        """Nothing on this disk counts: what it says was not signed by the run's owner."""
        with self._guard:
            self.anchor, self.sealed, self.root = None, b"", NO_DIGEST
            self._above = set()
            self._disk.remove(ANCHOR_FILE)

    def rebuild(self, log: Iterable[LogEntry]) -> None:
        """Find out anew what stands on the anchor, from the bodies kept and all logged commits."""
        with self._guard:
            self._above = set()
            if self.anchor is None:
                return
            self._above |= {self.anchor.head.id, self.root} - {NO_DIGEST}
            # One order by height: bodies may stand on logged commits, and those on bodies.
            known = [(link.height, body_id, link.parent) for body_id, link in self._bodies.items()]
            known += [(entry.head.height, entry.id, entry.parent) for entry in log]
            for _, commit_id, parent in sorted(known):
                self._link(commit_id, parent)

    def _link(self, commit_id: bytes, parent: bytes) -> None:
        if parent in self._above:
            self._above.add(commit_id)

    def link(self, commit_id: bytes, parent: bytes) -> None:
        """A commit has been logged."""
        with self._guard:
            self._link(commit_id, parent)

    def holds(self, commit_id: bytes) -> bool:
        """Whether the anchor is known to be behind this commit, or to be it."""
        with self._guard:
            return commit_id in self._above

    def body(self, body_id: bytes) -> bytes | None:
        """A body that is kept here, as it was signed."""
        with self._guard:
            link = self._bodies.get(body_id)
        if link is None:
            return None
        try:
            data = self._disk.read(link.name)
            if blake3(data).digest() == body_id:
                return data
            reason = "the body changed on disk"
        except OSError as error:
            reason = str(error)
        with self._guard:
            self._bodies.pop(body_id, None)
        set_aside(self._disk, link.name, reason, self._warn)
        return None

    def keep(self, bodies: Sequence[bytes], log: Iterable[LogEntry]) -> None:
        """Keep canonical bodies between the anchor and the log: those that are about to leave the log, or that others
        have shown. Which of them stand on the anchor is found out from the parents they name; the others are dropped.
        """
        fresh: dict[bytes, _Link] = {}
        for data in bodies:
            body, body_id = decode(data, Body), blake3(data).digest()
            if body_id not in self._bodies:
                # Written without the lock: whoever asks what is known must not wait for the disk.
                name = _name_of(body.height, body_id)
                self._disk.write(name, [data])
                fresh[body_id] = _Link(body.height, body.parent, name, len(data))
        with self._guard:
            self._bodies |= fresh
            self.rebuild(log)
            gone, root = self._superfluous()
            for body_id in gone:
                del self._bodies[body_id]
            if root != NO_DIGEST:
                self.root = root
        for link in gone.values():
            self._disk.remove(link.name)
        if root != NO_DIGEST:
            self.save()
            if not self._told:
                self._told = True
                self._warn(
                    "the organiser's anchor is so old that newcomers cannot be shown it any more; a new one is due"
                )

    def _superfluous(self) -> tuple[dict[bytes, _Link], bytes]:
        """What is not, or no longer, between the anchor and the log, and the oldest beyond the bounds; of the latter
        the highest (zero: none)."""
        lowest = self.anchor.head.height if self.anchor is not None else 1 << 63
        size = count = 0
        gone, root = {}, NO_DIGEST
        for body_id, link in sorted(self._bodies.items(), key=lambda item: -item[1].height):
            useful = body_id in self._above and link.height > lowest
            size, count = size + link.size * useful, count + useful
            if useful and size <= MAX_LINEAGE_BYTES and count <= MAX_LINEAGE:
                continue
            if useful and root == NO_DIGEST:
                root = body_id
            gone[body_id] = link
        return gone, root


def keep_quietly(lineage: Lineage, bodies: Sequence[bytes], log: Iterable[LogEntry]) -> None:
    """:meth:`Lineage.keep`, where the disk may be full: what cannot be shown later is no reason to stop now."""
    try:
        lineage.keep(bodies, log)
    except AtollError as error:
        lineage._warn(f"what shows that the anchor is in this chain was not kept: {error}")


def _name_of(height: int, body_id: bytes) -> str:
    return f"lineage/{height:012d}-{body_id.hex()[:16]}.body"
