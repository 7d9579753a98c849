"""The kernels as loops that numba compiles (see :mod:`.kernels`). This module itself does not import numba.

Each function is written so that LLVM turns it into vector code without fast-math: maxima run over integer bit
patterns, rounding to integers adds and subtracts 1.5·2²³, and every float operation is one float32 operation whose
result is stored or used as it is. Nothing here checks the lengths of its arguments: the callers do.

``payload`` arguments are uint8, and read scalars wider than a byte byte by byte, so that a payload may begin at any
address. Results are the same bits as those of the functions of the same names in :mod:`.kernels_numpy`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

BLOCK = 64
ROUNDER = np.float32(12582912.0)
"""1.5·2²³: adding and subtracting it rounds |q| < 2²² to an integer, half to even."""
MAGNITUDE = np.uint32(0x7FFFFFFF)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
LOW = np.uint64(0x0000FFFF0000FFFF)
CENTRE = 4 * 65535


def largest(values: Floats) -> Any:
    """Bits of the largest magnitude; NaN and infinities are 0x7F800000 and above."""
    worst = np.uint32(0)
    for i in range(values.size):
        worst = max(worst, np.uint32(np.float32(values[i]).view(np.uint32) & MAGNITUDE))
    return worst


def outer_nesterov(params: Floats, momentum: Floats, mean: Floats, lr: Any, mu: Any) -> None:
    """See :func:`atoll.protocol.outer.outer_step`."""
    for i in range(params.size):
        m = mean[i]
        b = np.float32(np.float32(mu * momentum[i]) + m)
        momentum[i] = b
        step = np.float32(m + np.float32(mu * b))
        params[i] = np.float32(params[i] - np.float32(lr * step))


def outer_sgd(params: Floats, mean: Floats, lr: Any) -> None:
    """See :func:`atoll.protocol.outer.outer_step`."""
    for i in range(params.size):
        params[i] = np.float32(params[i] - np.float32(lr * mean[i]))


def float32_add(values: Floats, weight: Any, into: Floats) -> None:
    """``into += weight * values``."""
    for i in range(values.size):
        into[i] = np.float32(into[i] + np.float32(weight * values[i]))


def int8_encode(values: Floats, payload: Bytes, limit: Any) -> bool:
    """False when a magnitude is above ``limit`` (bits); the payload is then partly written."""
    n = values.size
    blocks = (n + BLOCK - 1) // BLOCK
    whole = n // BLOCK
    levels = payload[2 * blocks :]
    for block in range(blocks):
        start = block * BLOCK
        worst = np.uint32(0)
        if block < whole:
            for j in range(BLOCK):
                worst = max(worst, np.uint32(np.float32(values[start + j]).view(np.uint32) & MAGNITUDE))
        else:
            for i in range(start, n):
                worst = max(worst, np.uint32(np.float32(values[i]).view(np.uint32) & MAGNITUDE))
        if worst > limit:
            return False
        exact = np.float32(np.uint32(worst).view(np.float32) / np.float32(127))
        bits = np.uint32((np.float32(exact).view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16))
        payload[2 * block] = np.uint8(bits & np.uint32(0xFF))
        payload[2 * block + 1] = np.uint8(bits >> np.uint32(8))
        scale = np.uint32(bits << np.uint32(16)).view(np.float32)
        if bits == 0:
            scale = np.float32(1)
        if block < whole:
            for j in range(BLOCK):
                quotient = np.float32(values[start + j] / scale)
                rounded = np.float32(np.float32(quotient + ROUNDER) - ROUNDER)
                levels[start + j] = np.uint8(np.int32(rounded))
        else:
            for i in range(start, n):
                quotient = np.float32(values[i] / scale)
                rounded = np.float32(np.float32(quotient + ROUNDER) - ROUNDER)
                levels[i] = np.uint8(np.int32(rounded))
    return True


def int8_valid(payload: Bytes, n: int, limit: int) -> bool:
    """Whether every scale is below ``limit`` (bits) and no level is -128."""
    blocks = (n + BLOCK - 1) // BLOCK
    for block in range(blocks):
        if np.int32(payload[2 * block]) + np.int32(payload[2 * block + 1]) * np.int32(256) >= limit:
            return False
    levels = payload[2 * blocks :]
    bad = np.uint8(0)
    for i in range(n):
        bad |= np.uint8(levels[i] == np.uint8(128))
    return bool(bad == 0)


def int8_decode(payload: Bytes, out: Floats) -> None:
    """``out = level * scale`` (exact in float32)."""
    n = out.size
    blocks = (n + BLOCK - 1) // BLOCK
    whole = n // BLOCK
    levels = payload[2 * blocks :]
    for block in range(blocks):
        bits = np.uint32(payload[2 * block]) | (np.uint32(payload[2 * block + 1]) << np.uint32(8))
        scale = np.uint32(bits << np.uint32(16)).view(np.float32)
        start = block * BLOCK
        if block < whole:
            for j in range(BLOCK):
                out[start + j] = np.float32(np.float32(np.int8(levels[start + j])) * scale)
        else:
            for i in range(start, n):
                out[i] = np.float32(np.float32(np.int8(levels[i])) * scale)


def int8_add(payload: Bytes, weight: Any, into: Floats) -> None:
    """``into += weight * (level * scale)``."""
    n = into.size
    blocks = (n + BLOCK - 1) // BLOCK
    whole = n // BLOCK
    levels = payload[2 * blocks :]
    for block in range(blocks):
        bits = np.uint32(payload[2 * block]) | (np.uint32(payload[2 * block + 1]) << np.uint32(8))
        scale = np.uint32(bits << np.uint32(16)).view(np.float32)
        start = block * BLOCK
        if block < whole:
            for j in range(BLOCK):
                value = np.float32(np.float32(np.int8(levels[start + j])) * scale)
                into[start + j] = np.float32(into[start + j] + np.float32(weight * value))
        else:
            for i in range(start, n):
                value = np.float32(np.float32(np.int8(levels[i])) * scale)
                into[i] = np.float32(into[i] + np.float32(weight * value))


def float16_encode(values: Floats, payload: Bytes, limit: Any) -> bool:
    """False when a magnitude is above ``limit`` (bits); the payload is then partly written."""
    worst = np.uint32(0)
    for i in range(values.size):
        bits = np.uint32(np.float32(values[i]).view(np.uint32))
        magnitude = np.uint32(bits & MAGNITUDE)
        worst = max(worst, magnitude)
        sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
        magnitude = min(magnitude, np.uint32(0x477FE000))  # 65504
        # normal: rebias the exponent, and add half of the last place, less one bit where that place is even
        normal = np.uint32(
            (magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1)))
            >> np.uint32(13)
        )
        # subnormal: adding 0.5 lets the float adder round at 2^-24
        shifted = np.float32(np.uint32(magnitude).view(np.float32) + np.float32(0.5)).view(np.uint32)
        small = np.uint32(shifted - np.uint32(0x3F000000))
        half = small if magnitude < np.uint32(0x38800000) else normal
        half = np.uint32(half | sign)
        payload[2 * i] = np.uint8(half & np.uint32(0xFF))
        payload[2 * i + 1] = np.uint8(half >> np.uint32(8))
    return bool(worst <= limit)


def float16_valid(payload: Bytes, n: int) -> bool:
    """Whether no element is an infinity or NaN."""
    bad = np.uint8(0)
    for i in range(n):
        bad |= np.uint8((payload[2 * i + 1] & np.uint8(0x7C)) == np.uint8(0x7C))
    return bool(bad == 0)


def float16_decode(payload: Bytes, out: Floats) -> None:
    """Widen to float32 (exact)."""
    for i in range(out.size):
        half = np.uint32(payload[2 * i]) | (np.uint32(payload[2 * i + 1]) << np.uint32(8))
        sign = np.uint32((half & np.uint32(0x8000)) << np.uint32(16))
        shifted = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
        normal = np.uint32(shifted + np.uint32(0x38000000))
        # subnormal: k · 2^-24 as (0.5 + k · 2^-24) - 0.5, so that no float32 subnormal arises
        raised = np.uint32((half & np.uint32(0x7FFF)) | np.uint32(0x3F000000)).view(np.float32)
        small = np.float32(raised - np.float32(0.5)).view(np.uint32)
        bits = small if shifted < np.uint32(0x00800000) else normal
        out[i] = np.uint32(bits | sign).view(np.float32)


def float16_add(payload: Bytes, weight: Any, into: Floats) -> None:
    """``into += weight * value``."""
    for i in range(into.size):
        half = np.uint32(payload[2 * i]) | (np.uint32(payload[2 * i + 1]) << np.uint32(8))
        sign = np.uint32((half & np.uint32(0x8000)) << np.uint32(16))
        shifted = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
        normal = np.uint32(shifted + np.uint32(0x38000000))
        raised = np.uint32((half & np.uint32(0x7FFF)) | np.uint32(0x3F000000)).view(np.float32)
        small = np.float32(raised - np.float32(0.5)).view(np.uint32)
        bits = small if shifted < np.uint32(0x00800000) else normal
        value = np.uint32(bits | sign).view(np.float32)
        into[i] = np.float32(into[i] + np.float32(weight * value))


def theta0_normal(out: Floats, first: Any, factor: Any) -> None:
    """See :func:`atoll.protocol.theta0.fill`; ``first`` is the counter of the first element's first word."""
    state = np.uint64(first)
    for i in range(out.size):
        z = state + np.uint64(2 * i) * GOLDEN
        z = (z ^ (z >> np.uint64(30))) * MIX_1
        z = (z ^ (z >> np.uint64(27))) * MIX_2
        a = z ^ (z >> np.uint64(31))
        z = state + np.uint64(2 * i + 1) * GOLDEN
        z = (z ^ (z >> np.uint64(30))) * MIX_1
        z = (z ^ (z >> np.uint64(27))) * MIX_2
        b = z ^ (z >> np.uint64(31))
        total = (a & LOW) + ((a >> np.uint64(16)) & LOW) + (b & LOW) + ((b >> np.uint64(16)) & LOW)
        total = (total & np.uint64(0xFFFFFFFF)) + (total >> np.uint64(32))
        out[i] = np.float32(np.float32(np.int32(total) - np.int32(CENTRE)) * factor)
