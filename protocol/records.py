"""Signed, expiring records of peers, and what the DHT may store (docs/wire/records.md).

A peer keeps one record, under its own peer id, in one of a few fixed keys of the DHT. Whoever stores or reads it
checks it: only records signed by their peer count.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Literal
from typing import Protocol as Interface

import msgspec
from blake3 import blake3

from .address import is_multiaddr
from .anchor import SealedAnchor
from .errors import PeerMisbehaved, UsageError
from .identity import Signer
from .messages import Digest, Head, Natural, Peer, Ratio, Signature, decode, encode
from .transport import PeerId

BUCKETS = 4
"""Keys of the DHT over which the peers of a run spread. At about 1.1 KB a record, a dictionary of hivemind's stays
under the 4 MiB that it can send up to some 3,800 peers a bucket."""
MAX_RECORD = 1024
"""Bytes of the longest sealed record."""
MAX_ADDRESSES = 8
MAX_NAME = 32
MAX_LIFETIME = 3600.0
"""Seconds between the issue and the expiry of a record, at most."""
CLOCK_SLACK = 10.0
"""Seconds by which the wall clocks of two peers may differ before one's records are refused by the other."""
EXPIRY_SLACK = 2.0
"""Seconds by which an entry of the DHT may outlive the record in it: both are set moments apart by one machine."""

State = Literal[
    "starting", "joining", "training", "averaging", "waiting", "finished", "leaving", "serving", "observing"
]
"""What a peer is doing. ``serving``: a bootstrap peer, which does not train; ``observing``: a peer that only looks."""


class Verifier(Interface):
    """What checks signatures: any :class:`~atoll.protocol.identity.Signer`."""

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool: ...


class Record(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a peer says of itself."""

    run: Digest
    peer: Peer
    issued: Ratio
    """Wall time, seconds since 1970. Of two records of a peer the one issued later counts."""
    expires: Ratio
    """Wall time after which the record says nothing any more."""
    addresses: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=8)]
    """Multiaddresses to dial, without the peer's own ``/p2p/ID`` at the end. Best first."""
    state: State
    head: Head
    step_time: Ratio = 0.0
    """Seconds an inner step takes; 0 when unknown."""
    tokens: Natural = 0
    """Tokens contributed to commits in all."""
    upload: Ratio = 0.0
    """Bytes per second it can send; 0 when unknown."""
    download: Ratio = 0.0
    version: Annotated[str, msgspec.Meta(max_length=32)] = ""
    """Version of the software, for people."""
    reachable: bool = False
    """Whether others can dial it."""
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    """Public name, for people; nobody's proof of anything."""
    anchor: SealedAnchor = b""
    """The organiser's newest anchor that it knows; empty: none. Whoever uses it checks it."""
    anchored: bool = False
    """Whether that anchor is behind :attr:`head`; a claim like the head itself."""


class _Sealed(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD)]
    signature: Signature


def record_bytes(body: bytes) -> bytes:
    """What a peer signs under its record; ``body`` is the record's encoding."""
    return b"atoll record 1\0" + body


def check_name(name: str) -> str:
    """``name`` when it may stand in a record. Raises :class:`UsageError`."""
    if len(name) > MAX_NAME:
        raise UsageError(f"the name may have {MAX_NAME} characters at most, found {len(name)}; choose a shorter one")
    if not name.isprintable():
        raise UsageError("the name may have printable characters only; choose another one")
    return name


def seal_record(record: Record, signer: Signer) -> bytes:
    """The record, signed: at most :data:`MAX_RECORD` bytes.

    Addresses that peers could not dial, and, from the end, those for which there is no room, are left out.
    Raises ValueError for a record that nobody would accept.
    """
    if record.peer != signer.peer_id:
        raise ValueError(f"expected a record of {signer.peer_id}, found one of {record.peer}")
    addresses = [address for address in record.addresses if len(address) <= 256 and is_multiaddr(address)]
    del addresses[MAX_ADDRESSES:]
    while True:
        body = encode(msgspec.structs.replace(record, addresses=tuple(addresses)))
        sealed = encode(_Sealed(body, signer.sign(record_bytes(body))))
        if len(sealed) <= MAX_RECORD or not addresses:
            break
        addresses.pop()
    try:
        _check(sealed, signer, record.run, signer.peer_id)
    except PeerMisbehaved as error:
        raise ValueError(f"nobody would accept this record: {error}") from None
    return sealed


def open_record(data: bytes, verifier: Verifier, run_id: bytes, now: float, subkey: PeerId) -> Record:
    """The record in ``data``, which was found under the peer ``subkey`` at wall time ``now``.

    Raises :class:`PeerMisbehaved`, attributed to ``subkey``, for anything wrong: malformed or oversized, not in
    canonical form, of another run or peer, not signed by its peer, expired, or from the future.
    """
    record = _check(data, verifier, run_id, subkey)
    if record.expires < now - CLOCK_SLACK:
        raise PeerMisbehaved(f"a record that expired {now - record.expires:.0f} s ago", subkey)
    if record.issued > now + CLOCK_SLACK:
        raise PeerMisbehaved(
            f"a record issued {record.issued - now:.0f} s in the future; one of the two clocks is wrong", subkey
        )
    return record


def _check(data: bytes, verifier: Verifier, run_id: bytes, peer: PeerId) -> Record:
    """All that does not depend on anyone's clock, so that everybody comes to the same decision."""
    if len(data) > MAX_RECORD:
        raise PeerMisbehaved(f"a record of {len(data)} bytes, {MAX_RECORD} are allowed", peer)
    try:
        sealed, record = _parse(data)
    except PeerMisbehaved as error:
        raise PeerMisbehaved(str(error), peer) from None
    if record.run != run_id:
        raise PeerMisbehaved(f"a record of another run ({record.run.hex()[:12]}…)", peer)
    if record.peer != peer:
        raise PeerMisbehaved(f"a record of {record.peer} under another peer's name", peer)
    if not record.issued <= record.expires <= record.issued + MAX_LIFETIME:
        raise PeerMisbehaved(f"a record that lives {record.expires - record.issued:.0f} s, not 0 to an hour", peer)
    if not verifier.verify(peer, record_bytes(sealed.body), sealed.signature):
        raise PeerMisbehaved("a record that its peer did not sign", peer)
    return record


@lru_cache(maxsize=512)
def _parse(data: bytes) -> tuple[_Sealed, Record]:
    """What a record says, once its form is sound. The DHT's gate and the directory see the same bytes again and again,
    and so do the peers of a simulation."""
    sealed = decode(data, _Sealed)
    record = decode(sealed.body, Record)
    if encode(sealed) != data or encode(record) != sealed.body:
        raise PeerMisbehaved("a record that is not in canonical form")
    if not (record.name.isprintable() and record.version.isprintable()):
        raise PeerMisbehaved("a record whose name or version is not printable")
    if not all(map(is_multiaddr, record.addresses)):
        raise PeerMisbehaved("a record with an address that is no multiaddress")
    return sealed, record


def expiry_of(data: bytes) -> float:
    """When a sealed record expires (wall time): what the DHT's entry should expire at. Unchecked; for own records."""
    return decode(decode(data, _Sealed).body, Record).expires


# -------------------------------------------------------------------------------------------- where records lie


def bucket_of(peer: PeerId, buckets: int = BUCKETS) -> int:
    """In which bucket a peer's record lies: 0 … ``buckets`` - 1."""
    return int.from_bytes(blake3(peer.encode()).digest(8), "big") % buckets


def dht_key(run_id: bytes, bucket: int) -> str:
    """The key of a bucket in the DHT."""
    return f"{run_id.hex()}/peers/{bucket}"


def dht_id(key: str) -> bytes:
    """What hivemind's record validator sees of a key: 20 bytes, the SHA-1 of the MessagePack-encoded text.

    (``DHTID.generate(source=key).to_bytes()``, without importing hivemind.)
    """
    return hashlib.sha1(encode(key), usedforsecurity=False).digest()


class RecordGate:
    """Decides what the DHT of a run may hold: the whole policy, for storing and for reading alike.

    Accepted is a peer's own valid record, under its own subkey, in its own bucket. Everything else is refused:
    plain values instead of dictionaries, keys that the run does not use, an entry that outlives its record, peers
    that the manifest does not admit. One subkey a peer bounds what an identity can store.

    A plain hivemind reader throws away the whole dictionary that a replica sends when one subkey in it is refused
    (atoll's own DHT drops the bad entry only). So whatever one peer stores, every other should accept when it reads,
    or a single record could hide all others: the decision depends on the clock only at an hour's distance. Expired
    entries are no reason to refuse (hivemind drops them itself, and :func:`open_record` refuses them).

    admits: whether a peer may take part (the manifest's access rule).
    """

    def __init__(
        self,
        run_id: bytes,
        verifier: Verifier,
        *,
        buckets: int = BUCKETS,
        admits: Callable[[PeerId], bool] = lambda peer: True,
        cache: int = 8192,
    ) -> None:
        self.run_id = run_id
        self.buckets = buckets
        self.protected: dict[bytes, int] = {dht_id(dht_key(run_id, bucket)): bucket for bucket in range(buckets)}
        """The ids of the keys that the run uses, and their buckets."""
        self._verifier = verifier
        self._admits = admits
        self._verified: OrderedDict[bytes, float] = OrderedDict()
        self._capacity = cache

    def validate(self, record: Any) -> bool:
        """:meth:`acceptable` as hivemind's record validators are asked, so that a gate serves as one."""
        return self.acceptable(record.key, record.subkey, record.value, record.expiration_time, time.time())

    def acceptable(self, key: bytes, subkey: bytes, value: bytes, expiration: float, now: float) -> bool:
        """Whether an entry may be stored, or believed when read. Never raises.

        All as a ``RecordValidatorBase`` of hivemind sees it: ``key`` the 20-byte id, ``subkey`` and ``value`` as
        MessagePack, ``expiration`` in wall time; ``now`` is this peer's wall time.
        """
        bucket = self.protected.get(bytes(key))
        if bucket is None or len(subkey) > 130 or len(value) > MAX_RECORD + 3:
            return False
        name = blake3(bytes(key)).update(len(subkey).to_bytes(2, "big") + subkey).update(value).digest()
        expires = self._verified.get(name)
        if expires is None:
            try:
                peer = decode(subkey, str)
                data = decode(value, bytes)
            except PeerMisbehaved:
                return False
            if encode(peer) != subkey or encode(data) != value or bucket_of(PeerId(peer), self.buckets) != bucket:
                return False
            if not self._admits(PeerId(peer)):
                return False
            try:
                expires = _check(data, self._verifier, self.run_id, PeerId(peer)).expires
            except PeerMisbehaved:
                return False
            self._verified[name] = expires
            if len(self._verified) > self._capacity:
                self._verified.popitem(last=False)
        else:
            self._verified.move_to_end(name)
        return expiration <= expires + EXPIRY_SLACK and expires <= now + MAX_LIFETIME + CLOCK_SLACK
