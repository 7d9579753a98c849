"""``float32``: the values as they are."""

from __future__ import annotations

from typing import cast

import numpy as np

from ..kernels import frozen, table
from .base import LIMIT_BITS, Bytes, Codec, Floats


class Float32(Codec):
    """4 bytes a value: IEEE binary32, little-endian."""

    name = "float32"
    lossless = True

    def encoded_size(self, n: int) -> int:
        return 4 * n

    def _encode(self, values: Floats, payload: Bytes) -> bool:
        if table().largest(values) > LIMIT_BITS:
            return False
        payload.view("<f4")[:] = values
        return True

    def _valid(self, payload: Bytes, n: int) -> bool:
        return bool(table().largest(_values(payload)) <= LIMIT_BITS)

    def _decode(self, payload: Bytes, out: Floats) -> None:
        out[:] = payload.view("<f4")

    def _add(self, payload: Bytes, weight: np.float32, into: Floats) -> None:
        table().float32_add(_values(payload), weight, into)


def _values(payload: Bytes) -> Floats:
    """The payload as an aligned, native array; copied only where it is not one already."""
    native = np.require(payload.view("<f4"), np.float32, ["C", "A"])
    return cast(Floats, frozen(native))
