"""``sparse``: of every 4096 values the 64 largest, as signs and two magnitudes (SparseLoCo, arXiv:2508.15706).

What is not sent must come back as residual: this codec is of no use without error feedback. The mean of sparse
contributions keeps what any of them does, so averages travel in another codec (:attr:`~.base.Codec.averages`).
"""

from __future__ import annotations

import numpy as np

from ..kernels import table
from .base import LIMIT_BITS, Bytes, Codec, Floats

STRETCH = 4096
KEPT = 64
MAGNITUDE_LIMIT = 0xBF0
"""Exponent and four mantissa bits of ``MAX_MAGNITUDE``; infinities and NaN lie above."""


class Sparse(Codec):
    """For each stretch of 4096 values: two magnitudes in 16 bits, 64 indices of 12 bits, 64 codes of 2 bits.

    114 bytes, 143.7 times less than float32. The magnitudes are the means of the larger and the smaller kept values,
    split where that leaves the least squared error; so a lone outlier does not blow up its neighbours, and zeros that
    had to be kept, because too little else was there, stay zeros or, among small values, near them.
    """

    name = "sparse"
    version = 2
    """1: averages in ``int8``."""
    lossless = False
    averages = "union"
    _invalid = "indices out of order, twice or out of range, a magnitude that is too large, or spare bits that are set"

    def encoded_size(self, n: int) -> int:
        whole, rest = divmod(n, STRETCH)
        return whole * _size(STRETCH) + (_size(rest) if rest else 0)

    def _encode(self, values: Floats, payload: Bytes) -> bool:
        return bool(table().sparse_encode(values, payload, LIMIT_BITS))

    def _valid(self, payload: Bytes, n: int) -> bool:
        return bool(table().sparse_valid(payload, n, MAGNITUDE_LIMIT))

    def _decode(self, payload: Bytes, out: Floats) -> None:
        table().sparse_decode(payload, out)

    def _add(self, payload: Bytes, weight: np.float32, into: Floats) -> None:
        table().sparse_add(payload, weight, into)


def _size(m: int) -> int:
    """Bytes of a stretch of m values."""
    kept = -(-m * KEPT // STRETCH)
    return 2 + (12 * kept + 7) // 8 + (2 * kept + 7) // 8
