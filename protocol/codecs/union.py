"""``union``: averages of ``sparse`` contributions, which are zero but where somebody kept a value.

No codec of a run by itself: a manifest that says ``sparse`` has its averages written so. The places are an Elias-Fano
code (Elias, J. ACM 21, 1974; Fano, MIT CSG memo 61, 1971), whose length follows from their number and is some 0.6 bits
a value above the least; the values are ``int8``. The reducer drops nothing, so it needs no residual.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ..digest import BytesLike
from ..errors import PeerMisbehaved
from ..kernels import frozen, table
from .base import LIMIT_BITS, Bytes, Codec, Floats
from .int8 import BLOCK, SCALE_LIMIT, Int8
from .sparse import KEPT, STRETCH

MOST = STRETCH // KEPT
"""Contributions that keep all values between them: more have no larger averages."""


class Union(Codec):
    """For each stretch of 4096 values: how many are not zero, where, and these as ``int8``.

    246 bytes for the 128 values of two contributions that keep no place in common, 458 for four, 850 for eight.
    """

    name = "union"
    lossless = False
    fixed = False
    _invalid = "counts, indices or scales that are out of range, or another length than they make"

    def encoded_size(self, n: int) -> int:
        return self.average_size(n, MOST)

    def average_size(self, n: int, contributions: int) -> int:
        whole, rest = divmod(n, STRETCH)
        share = min(contributions, MOST)
        return whole * _size(STRETCH, share) + (_size(rest, share) if rest else 0)

    def error(self, largest: float) -> float:
        return Int8().error(largest)

    def _write(self, values: Floats, payload: Bytes) -> int:
        return int(table().union_encode(values, payload, LIMIT_BITS))

    def _encode(self, values: Floats, payload: Bytes) -> bool:
        return self._write(values, payload) >= 0

    def _validated(self, payload: BytesLike, n: int, contributions: int | None = None) -> Bytes:
        share = MOST if contributions is None else min(contributions, MOST)
        data, most = frozen(np.frombuffer(payload, np.uint8)), self.average_size(n, share)
        if data.size > most:
            raise PeerMisbehaved(f"a chunk of {n} values in {self.name} takes {most} bytes, received {data.size}")
        if not table().union_valid(data, n, SCALE_LIMIT, share):
            raise PeerMisbehaved(f"{data.size} bytes in {self.name} hold what no encoder writes: {self._invalid}")
        return data

    def _valid(self, payload: Bytes, n: int) -> bool:
        return bool(table().union_valid(payload, n, SCALE_LIMIT, MOST))

    def _decode(self, payload: Bytes, out: Floats) -> None:
        table().union_decode(payload, out)

    def _add(self, payload: Bytes, weight: np.float32, into: Floats) -> None:
        # Nobody adds averages up; this is here because every codec has it.
        values = np.empty_like(into)
        table().union_decode(payload, values)
        table().float32_add(frozen(values), weight, into)


@cache
def _size(m: int, share: int) -> int:
    """Most bytes of the record of m values, when of each 64 begun at most ``share`` are not zero. It grows with their
    number."""
    count = min(m, share * -(-m // BLOCK))
    if count == 0:
        return 2
    bits = min([m, *(count * (low + 1) + ((m - 1) >> low) for low in range(1, 13))])
    return 2 + (bits + 7) // 8 + 2 * -(-count // BLOCK) + count
