"""The kernels in numpy: used before :func:`atoll.protocol.kernels.warm_up` and wherever numba cannot compile.

Same names, arguments and result bits as :mod:`.kernels_numba`; these allocate temporaries and are some five to ten
times slower. ``payload`` may begin at any address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kernels_numba import BLOCK, CENTRE, GOLDEN, LOW, MAGNITUDE, MIX_1, MIX_2

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
HALF_MAX = np.float32(65504)


def largest(values: Floats) -> Any:
    if values.size == 0:
        return np.uint32(0)
    return np.max(values.view(np.uint32) & MAGNITUDE)


def outer_nesterov(params: Floats, momentum: Floats, mean: Floats, lr: Any, mu: Any) -> None:
    with np.errstate(all="ignore"):
        np.multiply(momentum, mu, out=momentum)
        np.add(momentum, mean, out=momentum)
        step = momentum * mu
        np.add(step, mean, out=step)
        np.multiply(step, lr, out=step)
        np.subtract(params, step, out=params)


def outer_sgd(params: Floats, mean: Floats, lr: Any) -> None:
    with np.errstate(all="ignore"):
        np.subtract(params, mean * lr, out=params)


def float32_add(values: Floats, weight: Any, into: Floats) -> None:
    with np.errstate(all="ignore"):
        np.add(into, values * weight, out=into)


def _scales(payload: Bytes, blocks: int) -> Floats:
    bits: NDArray[np.uint32] = payload[: 2 * blocks].view("<u2").astype(np.uint32)
    return (bits << np.uint32(16)).view(np.float32)


def int8_encode(values: Floats, payload: Bytes, limit: Any) -> bool:
    n = values.size
    blocks = -(-n // BLOCK)
    if n % BLOCK:
        padded = np.zeros(blocks * BLOCK, np.float32)
        padded[:n] = values
        values = padded
    rows = values.reshape(blocks, BLOCK)
    worst = (rows.view(np.uint32) & MAGNITUDE).max(axis=1)
    if worst.max(initial=np.uint32(0)) > limit:
        return False
    with np.errstate(all="ignore"):
        exact = worst.view(np.float32) / np.float32(127)
        bits = (exact.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
        payload[: 2 * blocks].view("<u2")[:] = bits
        scales = (bits << np.uint32(16)).view(np.float32)
        scales[bits == 0] = 1
        levels = np.rint(rows / scales[:, None]).astype(np.int8)
    payload[2 * blocks :].view(np.int8)[:] = levels.reshape(-1)[:n]
    return True


def int8_valid(payload: Bytes, n: int, limit: int) -> bool:
    blocks = -(-n // BLOCK)
    if blocks == 0:
        return True
    return bool(payload[: 2 * blocks].view("<u2").max() < limit and not np.any(payload[2 * blocks :] == 128))


def int8_decode(payload: Bytes, out: Floats) -> None:
    n = out.size
    blocks = -(-n // BLOCK)
    levels = payload[2 * blocks :].view(np.int8)
    with np.errstate(all="ignore"):
        np.multiply(levels.astype(np.float32), np.repeat(_scales(payload, blocks), BLOCK)[:n], out=out)


def int8_add(payload: Bytes, weight: Any, into: Floats) -> None:
    values = np.empty_like(into)
    int8_decode(payload, values)
    float32_add(values, weight, into)


def float16_encode(values: Floats, payload: Bytes, limit: Any) -> bool:
    if largest(values) > limit:
        return False
    with np.errstate(all="ignore"):
        payload.view("<f2")[:] = np.clip(values, -HALF_MAX, HALF_MAX)
    return True


def float16_valid(payload: Bytes, n: int) -> bool:
    return not bool(np.any((payload[1 : 2 * n : 2] & 0x7C) == 0x7C))


def float16_decode(payload: Bytes, out: Floats) -> None:
    out[:] = payload.view("<f2")


def float16_add(payload: Bytes, weight: Any, into: Floats) -> None:
    values: Floats = payload.view("<f2").astype(np.float32)
    float32_add(values, weight, into)


def theta0_normal(out: Floats, first: Any, factor: Any) -> None:
    piece = 1 << 14  # keeps the temporaries in the cache
    for start in range(0, out.size, piece):
        part = out[start : start + piece]
        words = np.arange(2 * start, 2 * (start + part.size), dtype=np.uint64) * GOLDEN + np.uint64(first)
        words = (words ^ (words >> np.uint64(30))) * MIX_1
        words = (words ^ (words >> np.uint64(27))) * MIX_2
        words = words ^ (words >> np.uint64(31))
        lanes = (words & LOW) + ((words >> np.uint64(16)) & LOW)
        total = lanes[0::2] + lanes[1::2]
        total = (total & np.uint64(0xFFFFFFFF)) + (total >> np.uint64(32))
        np.multiply((total.astype(np.int32) - np.int32(CENTRE)).astype(np.float32), factor, out=part)
