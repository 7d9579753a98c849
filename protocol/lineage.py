"""What a peer's disk knows of the organiser's newest anchor: which commits have it behind them, and the proof of it.

That a commit has the anchor behind it follows from the parents that bodies name, down to the anchored commit: a
commit's id is the hash of its body, so nothing else needs to be believed. The log holds the newest commits only. So
the bodies (not the averages) of those between the anchor and the log stay in a folder of their own, and are given to
newcomers, who would otherwise have to take somebody's word.

Files: ``anchor`` (the sealed anchor and the ids of :attr:`Lineage._roots`, then BLAKE3),
``lineage/<height>-<id>.body`` (the body as it was signed; its hash is its name). Methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import msgspec
from blake3 import blake3

from .anchor import Anchor, SealedAnchor, peek
from .commitlog import LogEntry, set_aside
from .disk import Disk
from .errors import AtollError, PeerMisbehaved
from .messages import Body, Digest, decode

ANCHOR_FILE = "anchor"
MAX_LINEAGE = 1 << 14
"""Bodies kept at most …"""
MAX_LINEAGE_BYTES = 64 << 20
"""… and their bytes. Beyond that the oldest go, and newcomers can no longer be shown that the anchor is behind."""
MAX_ROOTS = 64
"""Chains of which it is remembered that the anchor is behind them, though it can no longer be shown."""
_HASH = 32


class _Kept(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    sealed: SealedAnchor
    roots: Annotated[list[Digest], msgspec.Meta(max_length=MAX_ROOTS)]


class _Link(NamedTuple):
    """A body on disk."""

    height: int
    parent: bytes
    name: str
    size: int


class Lineage:
    """The anchor kept on one disk, and what is known to stand on it.

    log: all logged commits; asked for at the moment they are needed, since commits are logged meanwhile.
    warn: called with a sentence for everything found damaged, and when the proof grows too long to be kept.
    """

    def __init__(self, disk: Disk, log: Callable[[], Sequence[LogEntry]], warn: Callable[[str], None]) -> None:
        self._disk = disk
        self._log = log
        self._warn = warn
        self._guard = threading.RLock()
        self.anchor: Anchor | None = None
        self.sealed = b""
        self._roots: list[bytes] = []
        """Commits that had the anchor behind them when the bodies below were given up, one a chain."""
        self._bodies: dict[bytes, _Link] = {}
        self._above: set[bytes] = set()
        """Commits that have the anchor behind them, itself included."""
        self._told = False
        self._read()
        self.rebuild()

    def _read(self) -> None:
        if self._disk.size(ANCHOR_FILE) >= 0:
            try:
                data = self._disk.read(ANCHOR_FILE)
                if blake3(data[:-_HASH]).digest() != data[-_HASH:]:
                    raise PeerMisbehaved("the hash does not match")
                kept = decode(data[:-_HASH], _Kept)
                self.anchor, self.sealed, self._roots = peek(kept.sealed), kept.sealed, kept.roots
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
            data = msgspec.msgpack.encode(_Kept(self.sealed, self._roots))
        self._disk.write(ANCHOR_FILE, [data, blake3(data).digest()])

    def adopt(self, anchor: Anchor, sealed: bytes) -> None:
        """From now on this anchor counts; :meth:`save` makes it last."""
        with self._guard:
            self.anchor, self.sealed, self._roots, self._told = anchor, sealed, [], False
            self.rebuild()

    def forget(self) -> None:
        """Nothing on this disk counts: what it says was not signed by the run's owner."""
        with self._guard:
            self.anchor, self.sealed, self._roots = None, b"", []
            self._above = set()
            self._disk.remove(ANCHOR_FILE)

    def rebuild(self) -> None:
        """Find out anew what stands on the anchor, from the bodies kept and all logged commits."""
        with self._guard:
            self._above = set()
            if self.anchor is None:
                return
            self._above |= {self.anchor.head.id, *self._roots}
            # One order by height: bodies may stand on logged commits, and those on bodies.
            known = [(link.height, body_id, link.parent) for body_id, link in self._bodies.items()]
            known += [(entry.head.height, entry.id, entry.parent) for entry in self._log()]
            for _, commit_id, parent in sorted(known):
                self._link(commit_id, parent)

    def _link(self, commit_id: bytes, parent: bytes) -> None:
        if parent in self._above:
            self._above.add(commit_id)

    def link(self, commit_id: bytes, parent: bytes) -> None:
        """A commit has been logged: it must be in the log by now, or :meth:`rebuild` might miss it."""
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

    def keep(self, bodies: Sequence[bytes]) -> None:
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
            self.rebuild()
            gone, roots = self._superfluous()
            for body_id in gone:
                del self._bodies[body_id]
            if roots:
                self._roots = roots
            long = 2 * len(self._bodies) > MAX_LINEAGE
            long = long or 2 * sum(link.size for link in self._bodies.values()) > MAX_LINEAGE_BYTES
        for link in gone.values():
            self._disk.remove(link.name)
        if roots:
            self.save()
        if long and not self._told:
            self._told = True
            self._warn(
                f"the organiser's anchor is {len(self._bodies)} commits old; before long newcomers can no longer be "
                "shown it: a new one is due"
            )

    def _superfluous(self) -> tuple[dict[bytes, _Link], list[bytes]]:
        """What is not, or no longer, between the anchor and the log, and the oldest beyond the bounds; of the latter
        those on which what remains stands, if any are given up (else none)."""
        lowest = self.anchor.head.height if self.anchor is not None else 1 << 63
        size = count = 0
        gone, cut = {}, set()
        for body_id, link in sorted(self._bodies.items(), key=lambda item: -item[1].height):
            useful = body_id in self._above and link.height > lowest
            size, count = size + link.size * useful, count + useful
            if useful and size <= MAX_LINEAGE_BYTES and count <= MAX_LINEAGE:
                continue
            if useful:
                cut.add(body_id)
            gone[body_id] = link
        if not cut:
            return gone, []
        left = [(link.height, link.parent) for body_id, link in self._bodies.items() if body_id not in gone]
        left += [(entry.head.height, entry.parent) for entry in self._log()]
        # The highest first: if there are too many chains, the shortest are forgotten.
        ends = dict.fromkeys(parent for _, parent in sorted(left, reverse=True) if parent in cut)
        return gone, [*ends, *(root for root in self._roots if root not in ends)][:MAX_ROOTS]


def keep_quietly(lineage: Lineage, bodies: Sequence[bytes]) -> None:
    """:meth:`Lineage.keep`, where the disk may be full: what cannot be shown later is no reason to stop now."""
    try:
        lineage.keep(bodies)
    except AtollError as error:
        lineage._warn(f"what shows that the anchor is in this chain was not kept: {error}")


def _name_of(height: int, body_id: bytes) -> str:
    return f"lineage/{height:012d}-{body_id.hex()[:16]}.body"
