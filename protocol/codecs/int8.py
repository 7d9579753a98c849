"""``int8``: blocks of 64 values that share a scale.

Blockwise absmax quantization as in arXiv:2110.02861, with linear levels. The scale is a bfloat16: 8 exponent bits, so
the relative error is the same at any magnitude (a float16 scale would fail below 1e-5), and 2 bytes, so that a block
of 64 costs 3 % more and outliers spoil only their 63 neighbours.
"""

from __future__ import annotations

import numpy as np

from ..kernels import table
from .base import LIMIT_BITS, Bytes, Codec, Floats

BLOCK = 64
SCALE_LIMIT = 0x5C80
"""bfloat16 bits of 2⁵⁸, just above the scale of ``MAX_MAGNITUDE``; as unsigned numbers, negative scales, infinities
and NaN lie above it too."""


class Int8(Codec):
    """All scales (bfloat16, little-endian, one a block), then one signed byte a value, -127 … 127.

    The error of a value is at most 0.504/127 of the largest magnitude in its block.
    """

    name = "int8"
    lossless = False
    _invalid = "a scale that is negative, NaN, infinite or too large, or a level of -128"

    def encoded_size(self, n: int) -> int:
        return n + 2 * -(-n // BLOCK)

    def error(self, largest: float) -> float:
        return 0.504 / 127 * largest + 2.0**-134  # half of the smallest scale but 0

    def _encode(self, values: Floats, payload: Bytes) -> bool:
        return bool(table().int8_encode(values, payload, LIMIT_BITS))

    def _valid(self, payload: Bytes, n: int) -> bool:
        return bool(table().int8_valid(payload, n, SCALE_LIMIT))

    def _decode(self, payload: Bytes, out: Floats) -> None:
        table().int8_decode(payload, out)

    def _add(self, payload: Bytes, weight: np.float32, into: Floats) -> None:
        table().int8_add(payload, weight, into)
