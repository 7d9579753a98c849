"""Every structure that crosses the network or is signed, as msgspec structs.

Encoding: MessagePack arrays, one element a field in the order written here, no field names; integers in their
shortest form; floats as float64. This encoding is canonical: one value has one byte string, and ids and signatures
cover exactly those bytes (:func:`encode`). Control messages are tagged: the array begins with the tag string.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from blake3 import blake3

from .errors import PeerMisbehaved

T = TypeVar("T")

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
Peer = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""Rates and seconds; the bound refuses infinity."""
MAX_ROUND_GAP = 4096
"""Rounds that may be void on one base: round numbers are told from peer to peer, so they need a bound."""
MAX_MEMBERS = 256
MAX_CHUNKS = 1 << 20

NO_DIGEST = bytes(32)
"""The parent of a run's first commit, and the id of the head "nothing committed yet"."""


class Head(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A commit as peers compare it. ``GENESIS`` stands for θ₀, before any commit."""

    id: Digest
    height: Natural
    """Commits in the chain up to and including this one."""
    weight: Natural
    """Averaged tokens of commits with rosters of two or more members, summed along the chain."""
    round: Natural
    outer_step: Natural
    """Outer steps taken along the chain (commits of leases alone take none)."""


GENESIS = Head(NO_DIGEST, 0, 0, 0, 0)


class Span(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Sample units ``start … start + count - 1``."""

    start: Natural
    count: Natural


class Member(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One member of a roster, as it entered."""

    peer: Peer
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """Drawn once per process start: after a restart a peer never signs for a roster it had entered before."""
    weight: Natural
    """Uncommitted tokens in its x, clipped to the manifest's cap; 0: it only receives."""
    steps: Natural
    """Inner steps in its x."""
    want: Natural
    """Sample units it asks to be leased."""
    upload: Ratio
    """Bytes per second it can send, 0 when unknown."""
    download: Ratio
    reachable: bool


class Part(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Chunks ``first … first + count - 1`` are averaged by member number ``reducer``."""

    reducer: Natural
    first: Natural
    count: Natural


class Limit(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a round is held to, in a run that re-estimates its rank (``codec.window``)."""

    seconds: Ratio
    """D, as in any other run."""
    rank: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    """Of the factors, in force for this round."""


class Seal(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A roster as its coordinator sealed it. Its hash is the roster id and stands on every later message."""

    run: Digest
    round: Natural
    fragment: Natural
    base: Head
    coordinator: Peer
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    members: Annotated[list[Member], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    parts: Annotated[list[Part], msgspec.Meta(max_length=MAX_MEMBERS)]
    leases: bool
    """Called for leases alone: no member has frozen, so none may have a weight."""
    limit: Ratio | Limit

    @property
    def deadline(self) -> float:
        """D: seconds from the arrival of the seal to the end of the round, on each receiver's clock."""
        return self.limit.seconds if isinstance(self.limit, Limit) else self.limit

    @property
    def rank(self) -> int:
        """Of the factors that matrices travel as in this round; 0 where the manifest alone says it."""
        return self.limit.rank if isinstance(self.limit, Limit) else 0


class ChunkEntry(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One averaged chunk of a commit."""

    hash: Digest
    """BLAKE3 of the averaged chunk: header and payload."""
    contributors: Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERS // 8)]
    """Bit i (least significant first) of byte i // 8: member i's contribution is in the average."""


class Lease(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    member: Natural
    span: Span


class Body(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One outer step, as it is signed. The commit's id is the BLAKE3 of its encoding.

    It names no proposer, time or signature, so whoever proposes from the same chunks proposes the same body.
    """

    run: Digest
    round: Natural
    fragment: Natural
    height: Natural
    outer_step: Natural
    parent: Digest
    state: Digest
    """State digest at the parent (before this commit)."""
    seal: Seal
    chunks: Annotated[list[ChunkEntry], msgspec.Meta(max_length=MAX_CHUNKS)]
    """One entry a chunk of the fragment, in order; empty for a commit of leases alone."""
    leases: Annotated[list[Lease], msgspec.Meta(max_length=MAX_MEMBERS)]
    cursor: Natural
    """First sample unit that no commit has leased yet."""
    tokens: Natural
    """Averaged tokens summed along the chain, lone commits included."""
    weight: Natural
    """As in :class:`Head`."""


class Vote(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A member's signature under a body's id (see :func:`vote_bytes`)."""

    member: Natural
    signature: Signature


class Commit(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A body with the signatures of more than half of its roster."""

    body: Body
    votes: Annotated[list[Vote], msgspec.Meta(max_length=MAX_MEMBERS)]


def encode(value: Any) -> bytes:
    """The canonical encoding."""
    return _ENCODER.encode(value)


_REMEMBERED = 1 << 16
"""Bytes of the encoding of the largest object whose hash is remembered."""
_HASHED: list[tuple[Any, bytes] | None] = [None] * 61
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def decode(data: bytes, kind: type[T], peer: str | None = None) -> T:
    """Decode and validate. Raises :class:`PeerMisbehaved`, attributed to ``peer``, for anything malformed."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    try:
        value: T = decoder.decode(data)
        return value
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PeerMisbehaved(f"malformed {getattr(kind, '__name__', 'message')}: {error}", peer) from None


def hash_of(value: Any) -> bytes:
    """BLAKE3 (32 bytes) of the canonical encoding: roster id of a :class:`Seal`, commit id of a :class:`Body`.

    Remembered for a few objects, which nobody may change afterwards: one body is asked for its id again and again.
    """
    slot = (id(value) >> 4) % len(_HASHED)
    known = _HASHED[slot]
    if known is not None and known[0] is value:
        return known[1]
    data = encode(value)
    digest = blake3(data).digest()
    if len(data) <= _REMEMBERED:
        _HASHED[slot] = (value, digest)
    return digest


def vote_bytes(commit_id: bytes) -> bytes:
    """What a member signs to vote for a commit."""
    return b"atoll vote 1\0" + commit_id


def seal_bytes(roster_id: bytes) -> bytes:
    """What a coordinator signs under its seal."""
    return b"atoll seal 1\0" + roster_id


def head_of(body: Body, commit_id: bytes) -> Head:
    """The head that a commit makes."""
    return Head(commit_id, body.height, body.weight, body.round, body.outer_step)


def better(a: Head, b: Head) -> bool:
    """Whether head ``a`` is better than ``b``: weight, then height, then the smaller id."""
    if a.weight != b.weight:
        return a.weight > b.weight
    if a.height != b.height:
        return a.height > b.height
    return a.id < b.id
