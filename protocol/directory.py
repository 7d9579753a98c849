"""Who takes part: peer records in the DHT, and what was learned by hearing from peers directly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from .errors import PeerMisbehaved
from .identity import Signer
from .manifest import Manifest
from .messages import GENESIS
from .records import BUCKETS, Record, bucket_of, dht_key, open_record, seal_record
from .transport import PeerId, Transport
from .wakeup import Wakeup

PUBLISH_EVERY = 10.0
"""Seconds between two publications of the own record; a change of state is published earlier."""
EXPIRES_IN = 60.0
READ_EVERY = (1.0, 10.0)
"""Seconds between two readings: doubling from the first to the second, again and again from the first while nobody
is known."""
READ_SHARE = 0.5
"""Seconds between two readings for each peer known, where that is more: what reading costs grows with them."""
BARREN = 2
"""Whole readings in a row without a valid record of another after which this peer counts as alone …"""
SETTLED = 2.5
"""… but not within so many seconds of its start."""
SETTLE = 1.0
"""Seconds for which a new state must last to be published: states flicker at the end of a round."""
MAX_KNOWN = 4096
"""Peers known at once; ids cost nothing, so memory needs a bound."""
CANDIDATE_STATES = frozenset({"joining", "training", "averaging", "waiting"})
"""States of peers that train; others (observing, serving, finished) lead no rounds."""


@dataclass
class Known:
    """What is known of one peer."""

    record: Record | None
    since: float
    """``Transport.now()`` when it was first seen."""
    seen: float
    """… when a record or a message of it came last."""
    raw: bytes = b""
    """The record as it was read, so that the same bytes are not verified twice."""


class Directory:
    """The peers of the run as one peer knows them.

    record: makes the own record's current content.
    changed: called when a peer appears. told: called with each record that is new. forgotten:
    called when a peer has been gone for long.
    """

    def __init__(
        self, transport: Transport, signer: Signer, manifest: Manifest, *,
        record: Callable[[float], Record], refused: Callable[[PeerId, str], None],
        changed: Callable[[], None], told: Callable[[PeerId, Record], None],
        forgotten: Callable[[PeerId], None],
    ) -> None:  # fmt: skip
        self._transport = transport
        self._signer = signer
        self._manifest = manifest
        self._record = record
        self._refused = refused
        self._changed = changed
        self._told = told
        self._forgotten = forgotten
        self.known: dict[PeerId, Known] = {}
        self._candidates: list[PeerId] | None = None
        self._publish_now = Wakeup()
        self._read_now = Wakeup()
        self._anew = False
        self._began = transport.now()
        self._barren = 0
        """Readings in a row that brought no record of another that could be believed."""

    def lonely(self) -> bool:
        """Whether this peer reads again and again, and finds no record of another that it can believe."""
        return self._barren > BARREN and self._transport.now() - self._began > SETTLED

    def runs(self) -> bool:
        """Whether anybody whose record is alive says that the run has begun."""
        since = self._transport.now() - EXPIRES_IN
        return any(
            known.record is not None and known.record.head != GENESIS and known.seen > since
            for known in self.known.values()
        )

    def anew(self) -> None:
        """The wall clock is another: read all records, and publish the own one, at once."""
        self.publish_anew()
        for known in self.known.values():
            known.raw = b""
        self._read_now.set()

    def publish_anew(self) -> None:
        """Publish the own record at once: it says something that others should not wait for."""
        self._anew = True
        self._publish_now.set()

    def publish_soon(self) -> None:
        """Publish the own record soon: its state has changed."""
        self._publish_now.set()

    def heard(self, peer: PeerId) -> None:
        """A peer of the run spoke to this one: it is known, whatever the DHT says."""
        now = self._transport.now()
        known = self.known.get(peer)
        if known is None:
            if len(self.known) < MAX_KNOWN:
                self.known[peer] = Known(None, now, now)
                self._candidates = None
                self._changed()
        else:
            known.seen = now

    def forget_stale(self) -> None:
        """Drop whoever has neither a live record nor spoken for a while."""
        limit = self._transport.now() - 2 * EXPIRES_IN
        for peer in [peer for peer, known in self.known.items() if known.seen < limit]:
            del self.known[peer]
            self._candidates = None
            self._forgotten(peer)

    def candidates(self) -> list[PeerId]:
        """Others who may lead or join a round, oldest acquaintance first. The same list until that changes, which is
        not for the caller to write."""
        if self._candidates is None:
            self._candidates = [
                peer for peer, known in self.known.items()
                if known.record is None or known.record.state in CANDIDATE_STATES
            ]  # fmt: skip
        return self._candidates

    async def publish(self) -> None:
        """Keep the own record in the DHT; runs until cancelled."""
        key = dht_key(self._manifest.run_id, bucket_of(self._transport.peer_id, BUCKETS))
        published, due = "", float("-inf")
        while True:
            self._publish_now.clear()
            record = self._record(self._transport.wall() + EXPIRES_IN)
            if record.state != published or self._transport.now() >= due or self._anew:
                self._anew = False
                stored = await self._transport.dht.publish(key, seal_record(record, self._signer), EXPIRES_IN)
                published, due = record.state, self._transport.now() + (PUBLISH_EVERY if stored else SETTLE)
            if await self._publish_now.wait(max(due - self._transport.now(), 0.01)):
                await asyncio.sleep(SETTLE)

    async def read(self) -> None:
        """Keep ``known`` up to date from the DHT; runs until cancelled."""
        pause = READ_EVERY[0]
        while True:
            self._read_now.clear()
            self._barren += 1
            for bucket in range(BUCKETS):
                for peer, data in (await self._transport.dht.read(dht_key(self._manifest.run_id, bucket))).items():
                    self._take(peer, data)
            self.forget_stale()
            await self._read_now.wait(pause)
            longest = max(READ_EVERY[1], READ_SHARE * len(self.known))
            pause = min(2 * pause, longest) if self.known else READ_EVERY[0]

    def _take(self, peer: PeerId, data: bytes) -> None:
        if peer == self._transport.peer_id or not self._manifest.admits(peer):
            return
        known = self.known.get(peer)
        if known is not None and known.record is not None and known.raw == data:
            if known.record.expires >= self._transport.wall():
                self._barren = 0
            return
        try:
            record = open_record(data, self._signer, self._manifest.run_id, now=self._transport.wall(), subkey=peer)
        except PeerMisbehaved as error:
            self._refused(peer, str(error))
            return
        self._barren, now = 0, self._transport.now()
        if known is None:
            if len(self.known) >= MAX_KNOWN:
                return
            self.known[peer] = Known(record, now, now, data)
            self._candidates = None
            self._changed()
        elif known.record is None or record.issued >= known.record.issued:
            fresh = known.record is None or record.issued > known.record.issued
            if known.record is None or known.record.state != record.state:
                self._candidates = None
            known.record, known.raw = record, data
            if fresh:
                known.seen = now
        self._transport.learn(peer, list(record.addresses))
        self._told(peer, record)
