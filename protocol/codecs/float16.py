"""``float16``: half precision. Below 6.1e-5 its step is a fixed 6e-8, so pseudo-gradients around 1e-6 keep 4 bits."""

from __future__ import annotations

import numpy as np

from ..kernels import table
from .base import LIMIT_BITS, Bytes, Codec, Floats

MOST = 65504.0
"""The largest half."""


class Float16(Codec):
    """2 bytes a value: IEEE binary16, little-endian, rounded half to even.

    Magnitudes above ``MOST`` saturate there: with error feedback the rest stays with the sender.
    """

    name = "float16"
    lossless = False

    def encoded_size(self, n: int) -> int:
        return 2 * n

    def error(self, largest: float) -> float:
        return max(largest * 2.0**-11, 2.0**-25, largest - MOST)

    def _encode(self, values: Floats, payload: Bytes) -> bool:
        return bool(table().float16_encode(values, payload, LIMIT_BITS))

    def _valid(self, payload: Bytes, n: int) -> bool:
        return bool(table().float16_valid(payload, n))

    def _decode(self, payload: Bytes, out: Floats) -> None:
        table().float16_decode(payload, out)

    def _add(self, payload: Bytes, weight: np.float32, into: Floats) -> None:
        table().float16_add(payload, weight, into)
