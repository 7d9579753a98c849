"""An averaged chunk as bytes: the unit that a commit names by hash, that donors serve and that everyone decodes.

Layout, big-endian: version u8 (1), bitmap length u8, chunk index u32, sum of weights u64, bitmap, then the mean in
the run's codec (or the one in which its averages travel: union for sparse contributions). A chunk that nobody
contributed to has an empty bitmap value, weight 0 and no payload. Where tensors are merged by norms and directions
(:mod:`.radial`) the version is 2, and between bitmap and payload stand the norms: float32, little-endian, for each
piece of a tensor those of the contributors in the order of their numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from .codecs import Codec, averages_codec
from .commits import members_in
from .errors import PeerMisbehaved
from .layout import ChunkLayout
from .merging import Merging
from .messages import Body, Member
from .radial import NORM_BYTES, outsized, read

VERSION, WITH_NORMS = 1, 2
_HEADER = struct.Struct(">BBIQ")


@dataclass(frozen=True)
class Averaged:
    """The header of an averaged chunk, and where its payload begins."""

    index: int
    contributors: bytes
    weight: int
    payload: memoryview
    norms: NDArray[np.float32]
    """For each piece of a tensor those of its contributors; empty where there are none."""


def pack(
    index: int, contributors: bytes, weight: int, payload: bytes | bytearray | memoryview, norms: bytes | None = None
) -> bytes:
    """The bytes of an averaged chunk. norms: those before the payload, where the run has them."""
    version = VERSION if norms is None else WITH_NORMS
    return b"".join((_HEADER.pack(version, len(contributors), index, weight), contributors, norms or b"", payload))


def unpack(data: bytes, pieces: int | None = None) -> Averaged:
    """Split an averaged chunk. pieces: of tensors in it whose norms stand there; None in a run without.

    Raises :class:`PeerMisbehaved` when it is too short or of another version, or a norm is none.
    """
    if len(data) < _HEADER.size:
        raise PeerMisbehaved(f"an averaged chunk of {len(data)} bytes")
    version, length, index, weight = _HEADER.unpack_from(data)
    start = _HEADER.size + length
    contributors = data[_HEADER.size : start]
    count = (pieces or 0) * int.from_bytes(contributors, "little").bit_count()
    end = start + NORM_BYTES * count
    if version != (VERSION if pieces is None else WITH_NORMS) or len(data) < end:
        raise PeerMisbehaved(f"an averaged chunk of version {version} and {len(data)} bytes")
    norms = np.empty((pieces or 0, 0), np.float32)
    if count:
        norms = read(memoryview(data)[start:end]).reshape(len(norms), -1)
    return Averaged(index, contributors, weight, memoryview(data)[end:], norms)


def size_limit(codec: Codec, elements: int, members: int, merging: Merging) -> int:
    """Bytes of the largest averaged chunk of so many elements."""
    norms = NORM_BYTES * members * merging.most_norms
    payload = averages_codec(codec.name).average_size(elements, members)
    return _HEADER.size + (members + 7) // 8 + norms + payload


def hash_chunk(data: bytes) -> bytes:
    """What a commit names an averaged chunk by."""
    return blake3(data).digest()


def check_all(
    body: Body, chunks: Sequence[bytes], layout: ChunkLayout, codec: Codec, merging: Merging
) -> list[Averaged]:
    """Validate all averaged chunks of a body; after it none can fail to decode.

    Raises :class:`PeerMisbehaved`: hashes alone say only that the chunks are those that somebody signed for.
    """
    if len(chunks) != len(body.chunks):
        raise PeerMisbehaved(f"{len(chunks)} chunks for a body of {len(body.chunks)}")
    found = []
    wire, merging = layout.wire(body.fragment, body.seal.rank), merging.of(body.fragment)
    for index, (data, entry) in enumerate(zip(chunks, body.chunks, strict=True)):
        averaged = check(data, index, body.seal.members, codec, wire.size(index), merging)
        if averaged.contributors != entry.contributors:
            raise PeerMisbehaved(f"chunk {index} has other contributors than its commit says")
        found.append(averaged)
    return found


def outsized_in(body: Body, averages: Sequence[Averaged]) -> dict[int, float]:
    """Members of a commit's roster, by number, that stated norms which count for less (:func:`.radial.outsized`), and
    how many times the largest of the others the most extreme one is."""
    members = body.seal.members
    found: dict[int, float] = {}
    for averaged in averages:
        inside = members_in(averaged.contributors, len(members))
        steps = [members[i].steps for i in inside]
        for norms in averaged.norms:
            for place, times in outsized(list(map(float, norms)), steps).items():
                found[inside[place]] = max(found.get(inside[place], 0.0), times)
    return found


def check(
    data: bytes, index: int, members: Sequence[Member], codec: Codec, elements: int, merging: Merging
) -> Averaged:
    """Validate an averaged chunk of so many values (:meth:`.layout.ChunkLayout.wire`): place, contributors, weight,
    norms, and a payload that decodes to finite numbers. merging: of the chunk's fragment. Raises
    :class:`PeerMisbehaved`.
    """
    chunk = unpack(data, merging.pieces(index))
    if chunk.index != index:
        raise PeerMisbehaved(f"averaged chunk {chunk.index} in place of {index}")
    inside = members_in(chunk.contributors, len(members))
    weight = merging.total(members, inside)
    if weight != chunk.weight or any(members[i].weight == 0 for i in inside):
        raise PeerMisbehaved(f"averaged chunk {index} states weight {chunk.weight}, its contributors have {weight}")
    if inside:
        averages_codec(codec.name).validate(chunk.payload, elements, len(inside))
    elif len(chunk.payload):
        raise PeerMisbehaved(f"averaged chunk {index} has a payload and no contributors")
    return chunk
