"""A bootstrap peer keeps the organiser's newest anchor: it takes it from whoever brings it, and passes it on.

It has no chain of its own, so it says nothing of whose chain holds the anchor. Peers find the anchor in its record;
those whose own records show an older one, or none, are brought it.
"""

from __future__ import annotations

from pathlib import Path

from atoll.protocol.anchor import Anchor, newer, peek
from atoll.protocol.anchoring import Anchors
from atoll.protocol.disk import replace_file
from atoll.protocol.errors import PeerMisbehaved
from atoll.protocol.eventlog import EventLog
from atoll.protocol.identity import Signer
from atoll.protocol.manifest import Manifest
from atoll.protocol.records import BUCKETS, Record, dht_key, open_record
from atoll.protocol.transport import PeerId, Transport

ANCHOR_FILE = "anchor"
"""The sealed anchor, as it travels."""
LONELY = 45.0
"""Seconds without a record that can be believed after which a bootstrap peer looks at its clock."""


class AnchorKeeper:
    """The newest anchor, in a file of the state folder."""

    def __init__(self, transport: Transport, signer: Signer, manifest: Manifest, folder: Path, log: EventLog) -> None:
        self._transport = transport
        self._signer = signer
        self._manifest = manifest
        self._path = folder / ANCHOR_FILE
        self._log = log
        self._believed = transport.now()
        """When a record of another was last read and believed."""
        self.anchors = Anchors(
            transport, signer, manifest, adopted=self._adopted,
            refused=lambda peer, reason: log.write("refused", reason=reason, fault="hostile", **{"from": peer}),
        )  # fmt: skip
        self._restore()

    @property
    def sealed(self) -> bytes:
        """What stands in the own record."""
        return self.anchors.sealed

    def _restore(self) -> None:
        try:
            kept = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self._log.write("warning", message=f"the anchor in {self._path} cannot be read: {error.strerror}")
            return
        if not self.anchors.restore(kept):
            self._log.write("warning", message=f"{self._path} holds no anchor of this run's owner; going on without it")

    def _adopted(self, anchor: Anchor, sealed: bytes) -> None:
        head = anchor.head
        self._log.write(
            "anchor", number=anchor.number, commit=head.id.hex(), round=head.round, outer_step=head.outer_step,
            height=head.height,
        )  # fmt: skip
        try:
            replace_file(self._path, sealed)
        except OSError as error:
            # The peers of the run keep it as well.
            self._log.write("warning", message=f"the anchor was not written down: {error.strerror}")

    def lonely(self) -> bool:
        """Whether no record of another could be believed for a while: the run may be asleep, or the own clock wrong."""
        return self._transport.now() - self._believed > LONELY

    async def start(self) -> None:
        """Take and give anchors from now on."""
        await self.anchors.start()

    async def turn(self) -> None:
        """Look into the records of the run's peers: take what is newer, bring the newest to those who lack it."""
        records = await self._records()
        for peer, record in records.items():
            self.anchors.learn(record.anchor, peer)
        if self.anchors.newest is not None:
            await self.anchors.spread([peer for peer, record in records.items() if self._lacks(record)])

    def _lacks(self, record: Record) -> bool:
        if not record.reachable:
            return False
        try:
            return not record.anchor or newer(self.anchors.newest, peek(record.anchor))  # type: ignore[arg-type]
        except PeerMisbehaved:
            return False

    async def _records(self) -> dict[PeerId, Record]:
        run_id, own = self._manifest.run_id, self._transport.peer_id
        found: dict[PeerId, Record] = {}
        for bucket in range(BUCKETS):
            for peer, data in (await self._transport.dht.read(dht_key(run_id, bucket))).items():
                if peer == own or not self._manifest.admits(peer):
                    continue
                try:
                    found[peer] = open_record(data, self._signer, run_id, self._transport.wall(), peer)
                except PeerMisbehaved:
                    continue  # peers that use records say so
                self._believed = self._transport.now()
                self._transport.learn(peer, list(found[peer].addresses))
        return found
