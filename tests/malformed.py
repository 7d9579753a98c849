"""Payloads of every codec that no encoder writes, and norms that no tensor can have (docs/wire/codecs.md), each made
from an honest one."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np

from atoll.protocol.codecs import averages_codec

from .hostile import AVERAGE, CONTRIBUTION, Case, Wire, huge_values

Spoil = Callable[[bytearray, int], None]
"""Writes over the payload of so many values."""
STRETCH = 4096
HUGE = 1e30


def word(value: int, at: int = 0) -> Spoil:
    """16 bits, a scale or the two magnitudes of a sparse stretch."""

    def spoil(payload: bytearray, n: int) -> None:
        struct.pack_into("<H", payload, at, value)

    return spoil


def number(form: str, value: float) -> Spoil:
    """The first value."""

    def spoil(payload: bytearray, n: int) -> None:
        struct.pack_into(form, payload, 0, value)

    return spoil


def upper(value: float, shift: int) -> int:
    """The upper bits of a float32."""
    return int(np.array([value], np.float32).view(np.uint32)[0]) >> shift


def all_huge(payload: bytearray, n: int) -> None:
    """Every value of an int8 payload."""
    payload[:] = huge_values(n)


def level_128(payload: bytearray, n: int) -> None:
    payload[-1] = 0x80


def filling(payload: bytearray, n: int) -> None:
    """Only a chunk of an odd number of values has any; in the others a scale is wrong."""
    if n % 2:
        payload[-1] |= 0xF0
    else:
        word(0x7FC0)(payload, n)


def indices(*found: int) -> Spoil:
    """The first two of a sparse stretch."""

    def spoil(payload: bytearray, n: int) -> None:
        first, second = found
        payload[2:5] = (first | second << 12).to_bytes(3, "little")

    return spoil


def spare_bit(payload: bytearray, n: int) -> None:
    kept = -(-min(n, STRETCH) // 64)
    assert 2 * kept % 8, "the last byte of a sparse payload has bits to spare"
    payload[-1] |= 0x80


def records(text: str) -> Spoil:
    """An average of sparse contributions, as hex: a count, indices, a scale, levels."""

    def spoil(payload: bytearray, n: int) -> None:
        assert 96 < n <= 128
        payload[:] = bytes.fromhex(text)

    return spoil


def pair(first: int, second: int, spare: int = 0) -> str:
    """The first places of that, two of 97 to 128: of each the upper 2 bits by the place of a one, then the lower 5."""
    code = 1 << (first >> 5) | 2 << (second >> 5) | (first & 31) << 5 | (second & 31) << 10 | spare << 15
    return "0200" + code.to_bytes(2, "little").hex()


BLOCKS = {
    "a scale that is NaN": word(0x7FC0),
    "an infinite scale": word(0x7F80),
    "a negative scale": word(0x8001),
    "1e30": word(upper(HUGE / 127, 16)),
}
MALFORMED: dict[str, dict[str, Spoil]] = {
    "float32": {
        "NaN": number("<f", math.nan), "an infinity": number("<f", -math.inf), "1e30": number("<f", HUGE),
    },
    "float16": {"NaN": number("<e", math.nan), "an infinity": number("<e", -math.inf)},
    "int8": {**BLOCKS, "1e30": all_huge, "a level of -128": level_128},
    "int4": {**BLOCKS, "filling": filling},
    "sparse": {
        "NaN": word(upper(math.nan, 19) << 4), "an infinity": word(upper(math.inf, 19) << 4),
        "1e30": word(upper(HUGE, 19) << 4 | 15), "indices out of order": indices(7, 3),
        "an index twice": indices(7, 7), "an index out of range": indices(7, 4095), "spare bits": spare_bit,
    },
    "lowrank": BLOCKS,
    "union": {
        "indices out of order": records(pair(7, 3) + "803f" + "0102"),
        "an index twice": records(pair(7, 7) + "803f" + "0102"),
        "spare bits": records(pair(3, 7, 1) + "803f" + "0102"),
        "one place for two": records("0200" + "0100" + "803f" + "0102"),
        "more than it has kept": records("0300" + "0000" + "803f" + "01"),
        "a count beyond the end": records("ffff"),
        "a record cut off": records(pair(3, 7) + "803f" + "01"),
        "bytes behind": records("0100" + "01" + "803f" + "01" + "00"),
        "a scale that is NaN": records(pair(3, 7) + "c07f" + "0102"),
        "a negative scale": records(pair(3, 7) + "0180" + "0102"),
        "1e30": records(pair(3, 7) + struct.pack("<H", upper(HUGE / 127, 16)).hex() + "7f7f"),
        "a level of -128": records(pair(3, 7) + "803f" + "0180"),
    },
}  # fmt: skip
NORMS = {
    "NaN": (math.nan, "a norm of nan"),
    "an infinity": (math.inf, "a norm of inf"),
    "negative zero": (-0.0, "a norm of -0.0"),
    "below zero": (-1.0, "a norm of -1.0"),
    "too small for any": (2.0**-101, "a norm of"),
    "too small for what comes": (2.0**-90, "is longer than the norm"),
    "1e30": (HUGE, "a norm of 1"),
}
"""What is stated for each tensor of a chunk that is merged by norms and directions, and what is said of it."""
REASON = "what no encoder writes"


def of_a_member(codec: str, what: str) -> Case:
    """The second chunk that it sends to each reducer is such a payload."""

    async def malformed(wire: Wire) -> None:
        await wire.begin()
        index = wire.part.first + 1
        payload = wire.payload(index)
        MALFORMED[codec][what](payload, wire.size(index))
        await wire.frame(CONTRIBUTION, index, payload)

    return Case(malformed, REASON, counts=1, as_member=True)


def of_a_reducer(codec: str, what: str) -> Case:
    """The second of its averages is such a payload, of the codec in which averages travel."""

    async def malformed(wire: Wire) -> None:
        await wire.average(wire.part.first)
        index = wire.part.first + 1
        payload = wire.mean(index)
        MALFORMED[averages_codec(codec).name][what](payload, wire.size(index))
        await wire.frame(AVERAGE, index, wire.packed(index, [wire.round.me], payload))

    return Case(malformed, REASON)


def norms_of_a_member(what: str) -> Case:
    """It states such norms before its second chunk."""
    value, reason = NORMS[what]

    async def malformed(wire: Wire) -> None:
        await wire.begin()
        index = wire.part.first + 1
        count = wire.round.around.manifest.merging.pieces(index)
        assert count
        payload = wire.payload(index)
        payload[: 4 * count] = struct.pack("<f", value) * count
        await wire.frame(CONTRIBUTION, index, payload)

    return Case(malformed, reason, counts=1, as_member=True)
