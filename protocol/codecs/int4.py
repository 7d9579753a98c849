"""``int4``: blocks of 64 values that share a scale, two values a byte.

Blocks and scales are those of ``int8``. The sixteen levels are those of NF4 (arXiv:2305.14314), quantiles of the normal
distribution, rounded to 127ths, so that a decoded value is an integer times the scale and exact. Measurements behind
the choice: docs/decisions-codecs.md.
"""

from __future__ import annotations

import numpy as np

from ..kernels import table
from .base import LIMIT_BITS, Bytes, Codec, Floats
from .int8 import BLOCK, SCALE_LIMIT


class Int4(Codec):
    """All scales (bfloat16, little-endian, one a block), then the codes, 4 bits a value.

    The error of a value is at most 19.7/127 of the largest magnitude in its block, its norm about a tenth of the
    values' norm.
    """

    name = "int4"
    lossless = False
    _invalid = "a scale that is negative, NaN, infinite or too large, or filling that is not level 0"

    def encoded_size(self, n: int) -> int:
        return -(-n // 2) + 2 * -(-n // BLOCK)

    def error(self, largest: float) -> float:
        return 19.7 / 127 * largest + 19.5 * 2.0**-133  # half of the widest gap, times the smallest scale but 0

    def _encode(self, values: Floats, payload: Bytes) -> bool:
        return bool(table().int4_encode(values, payload, LIMIT_BITS))

    def _valid(self, payload: Bytes, n: int) -> bool:
        return bool(table().int4_valid(payload, n, SCALE_LIMIT))

    def _decode(self, payload: Bytes, out: Floats) -> None:
        table().int4_decode(payload, out)

    def _add(self, payload: Bytes, weight: np.float32, into: Floats) -> None:
        table().int4_add(payload, weight, into)
