"""An averaged chunk as bytes: the unit that a commit names by hash, that donors serve and that everyone decodes.

Layout, big-endian: version u8 (1), bitmap length u8, chunk index u32, sum of weights u64, bitmap, then the mean in
the run's codec (or the one in which its averages travel: int8 for sparse contributions). A chunk that nobody
contributed to has an empty bitmap value, weight 0 and no payload.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from .codecs import Codec, averages_codec
from .commits import members_in
from .errors import PeerMisbehaved
from .layout import ChunkLayout
from .messages import Body, Member

VERSION = 1
_HEADER = struct.Struct(">BBIQ")


@dataclass(frozen=True)
class Averaged:
    """The header of an averaged chunk, and where its payload begins."""

    index: int
    contributors: bytes
    weight: int
    payload: memoryview


def pack(index: int, contributors: bytes, weight: int, payload: bytes | bytearray | memoryview) -> bytes:
    """The bytes of an averaged chunk."""
    return b"".join((_HEADER.pack(VERSION, len(contributors), index, weight), contributors, payload))


def unpack(data: bytes) -> Averaged:
    """Split an averaged chunk. Raises :class:`PeerMisbehaved` when it is too short or of another version."""
    if len(data) < _HEADER.size:
        raise PeerMisbehaved(f"an averaged chunk of {len(data)} bytes")
    version, length, index, weight = _HEADER.unpack_from(data)
    if version != VERSION or len(data) < _HEADER.size + length:
        raise PeerMisbehaved(f"an averaged chunk of version {version} and {len(data)} bytes")
    start = _HEADER.size + length
    return Averaged(index, data[_HEADER.size : start], weight, memoryview(data)[start:])


def size_limit(codec: Codec, elements: int, members: int) -> int:
    """Bytes of the largest averaged chunk of so many elements."""
    return _HEADER.size + (members + 7) // 8 + averages_codec(codec.name).encoded_size(elements)


def hash_chunk(data: bytes) -> bytes:
    """What a commit names an averaged chunk by."""
    return blake3(data).digest()


def check_all(body: Body, chunks: Sequence[bytes], layout: ChunkLayout, codec: Codec) -> list[Averaged]:
    """Validate all averaged chunks of a body; after it none can fail to decode.

    Raises :class:`PeerMisbehaved`: hashes alone say only that the chunks are those that somebody signed for.
    """
    if len(chunks) != len(body.chunks):
        raise PeerMisbehaved(f"{len(chunks)} chunks for a body of {len(body.chunks)}")
    found = []
    part = layout.fragment(body.fragment)
    for index, (data, entry) in enumerate(zip(chunks, body.chunks, strict=True)):
        averaged = check(data, index, body.seal.members, codec, part.size(index))
        if averaged.contributors != entry.contributors:
            raise PeerMisbehaved(f"chunk {index} has other contributors than its commit says")
        found.append(averaged)
    return found


def check(data: bytes, index: int, members: Sequence[Member], codec: Codec, elements: int) -> Averaged:
    """Validate an averaged chunk of so many elements: place, contributors, weight, and a payload that decodes to
    finite numbers. Raises :class:`PeerMisbehaved`.
    """
    chunk = unpack(data)
    if chunk.index != index:
        raise PeerMisbehaved(f"averaged chunk {chunk.index} in place of {index}")
    inside = members_in(chunk.contributors, len(members))
    weight = sum(members[i].weight for i in inside)
    if weight != chunk.weight or any(members[i].weight == 0 for i in inside):
        raise PeerMisbehaved(f"averaged chunk {index} states weight {chunk.weight}, its contributors have {weight}")
    if inside:
        averages_codec(codec.name).validate(chunk.payload, elements)
    elif len(chunk.payload):
        raise PeerMisbehaved(f"averaged chunk {index} has a payload and no contributors")
    return chunk
