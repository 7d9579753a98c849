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
ROUNDER_64 = np.float64(6755399441055744.0)
"""1.5·2⁵², the same for float64."""
MAGNITUDE = np.uint32(0x7FFFFFFF)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
LOW = np.uint64(0x0000FFFF0000FFFF)
CENTRE = 4 * 65535
INT4_LEVELS = np.array([-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127], np.float32)
"""The sixteen levels of ``int4``, by code. Integers, so that level · scale is exact in float32."""
INT4_ZERO = np.uint8(7)
"""The code of level 0."""
LEAST_SHARE = np.float64(2.0**-30)
"""Of a vector's squared length, that must be left when the ones before it are taken out, for it to count as another
direction: what is left of rounded float32 numbers lies below."""
STRETCH = 4096
"""Values of ``sparse`` that compete for being kept; of each 64, rounded up, one is."""


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


def outer_delayed(
    params: Floats, momentum: Floats, mean: Floats, lr: Any, mu: Any, share: Any, first: Any, last: Any
) -> None:
    """See :func:`atoll.protocol.outer.outer_step`."""
    for i in range(params.size):
        m = np.float32(share * mean[i])
        b = momentum[i]
        if first:
            b = np.float32(mu * b)
        b = np.float32(b + m)
        momentum[i] = b
        if last:
            m = np.float32(m + np.float32(mu * b))
        params[i] = np.float32(params[i] - np.float32(lr * m))


def outer_sgd(params: Floats, mean: Floats, lr: Any) -> None:
    """See :func:`atoll.protocol.outer.outer_step`."""
    for i in range(params.size):
        params[i] = np.float32(params[i] - np.float32(lr * mean[i]))


def contribution(params: Floats, local: Floats, residual: Floats, decay: Any, out: Floats) -> None:
    """``out = (params - local) + decay * residual``."""
    for i in range(out.size):
        out[i] = np.float32(np.float32(params[i] - local[i]) + np.float32(decay * residual[i]))


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
    # A lane for each place in a block: as one number, the flag would be widened to 64 bits.
    bad = np.zeros(BLOCK, np.uint8)
    whole = n // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        for j in range(BLOCK):
            bad[j] |= np.uint8(levels[start + j] == np.uint8(128))
    for i in range(whole, n):
        bad[0] |= np.uint8(levels[i] == np.uint8(128))
    return bool(bad.max() == 0)


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


def int4_encode(values: Floats, payload: Bytes, limit: Any) -> bool:
    """False when a magnitude is above ``limit`` (bits); the payload is then partly written."""
    n = values.size
    blocks = (n + BLOCK - 1) // BLOCK
    whole = n // BLOCK
    # Each block passes through these two, so that the last one, filled up with zeros, is like the others.
    part = np.zeros(BLOCK, np.float32)
    codes = np.empty(BLOCK, np.int32)
    for block in range(blocks):
        start = block * BLOCK
        half = BLOCK // 2
        if block < whole:
            for j in range(BLOCK):
                part[j] = values[start + j]
        else:
            half = (n - start + 1) // 2
            part[:] = np.float32(0)
            for i in range(start, n):
                part[i - start] = values[i]
        worst = np.uint32(0)
        for j in range(BLOCK):
            worst = max(worst, np.uint32(np.float32(part[j]).view(np.uint32) & MAGNITUDE))
        if worst > limit:
            return False
        exact = np.float32(np.uint32(worst).view(np.float32) / np.float32(127))
        bits = np.uint32((np.float32(exact).view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16))
        payload[2 * block] = np.uint8(bits & np.uint32(0xFF))
        payload[2 * block + 1] = np.uint8(bits >> np.uint32(8))
        scale = np.uint32(bits << np.uint32(16)).view(np.float32)
        if bits == 0:
            scale = np.float32(1)
        for j in range(BLOCK):
            q = np.float32(part[j] / scale)
            # The half-way points between levels that q has passed; on one, the level nearer to zero is taken.
            # Counting all of them makes vector code, a search does not.
            code = np.int32(q >= np.float32(-107.5)) + np.int32(q >= np.float32(-77.5))
            code += np.int32(q >= np.float32(-58.5)) + np.int32(q >= np.float32(-43))
            code += np.int32(q >= np.float32(-29.5)) + np.int32(q >= np.float32(-17.5))
            code += np.int32(q >= np.float32(-6)) + np.int32(q > np.float32(5))
            code += np.int32(q > np.float32(15)) + np.int32(q > np.float32(25.5))
            code += np.int32(q > np.float32(37)) + np.int32(q > np.float32(49.5))
            code += np.int32(q > np.float32(63.5)) + np.int32(q > np.float32(81.5))
            code += np.int32(q > np.float32(109.5))
            codes[j] = code
        first = 2 * blocks + block * (BLOCK // 2)
        if block < whole:
            for j in range(BLOCK // 2):
                payload[first + j] = np.uint8(codes[j] | (codes[j + BLOCK // 2] << np.int32(4)))
        else:
            for j in range(half):
                payload[first + j] = np.uint8(codes[j] | (codes[j + half] << np.int32(4)))
    return True


def int4_valid(payload: Bytes, n: int, limit: int) -> bool:
    """Whether every scale is below ``limit`` (bits) and the half of a byte that holds no value is level 0."""
    blocks = (n + BLOCK - 1) // BLOCK
    for block in range(blocks):
        if np.int32(payload[2 * block]) + np.int32(payload[2 * block + 1]) * np.int32(256) >= limit:
            return False
    return bool(n % 2 == 0 or payload[2 * blocks + (n - 1) // 2] >> np.uint8(4) == INT4_ZERO)


def int4_decode(payload: Bytes, out: Floats) -> None:
    """``out = level * scale`` (exact in float32)."""
    n = out.size
    blocks = (n + BLOCK - 1) // BLOCK
    whole = n // BLOCK
    for block in range(blocks):
        bits = np.uint32(payload[2 * block]) | (np.uint32(payload[2 * block + 1]) << np.uint32(8))
        scale = np.uint32(bits << np.uint32(16)).view(np.float32)
        start = block * BLOCK
        first = 2 * blocks + block * (BLOCK // 2)
        if block < whole:
            for j in range(BLOCK // 2):
                out[start + j] = np.float32(INT4_LEVELS[payload[first + j] & np.uint8(15)] * scale)
            for j in range(BLOCK // 2):
                out[start + BLOCK // 2 + j] = np.float32(INT4_LEVELS[payload[first + j] >> np.uint8(4)] * scale)
        else:
            half = (n - start + 1) // 2
            for i in range(start, n):
                octet = payload[first + (i - start) % half]
                code = octet >> np.uint8(4) if i - start >= half else octet & np.uint8(15)
                out[i] = np.float32(INT4_LEVELS[code] * scale)


def int4_add(payload: Bytes, weight: Any, into: Floats) -> None:
    """``into += weight * (level * scale)``."""
    n = into.size
    blocks = (n + BLOCK - 1) // BLOCK
    whole = n // BLOCK
    for block in range(blocks):
        bits = np.uint32(payload[2 * block]) | (np.uint32(payload[2 * block + 1]) << np.uint32(8))
        scale = np.uint32(bits << np.uint32(16)).view(np.float32)
        start = block * BLOCK
        first = 2 * blocks + block * (BLOCK // 2)
        if block < whole:
            for j in range(BLOCK // 2):
                value = np.float32(INT4_LEVELS[payload[first + j] & np.uint8(15)] * scale)
                into[start + j] = np.float32(into[start + j] + np.float32(weight * value))
            for j in range(BLOCK // 2):
                value = np.float32(INT4_LEVELS[payload[first + j] >> np.uint8(4)] * scale)
                i = start + BLOCK // 2 + j
                into[i] = np.float32(into[i] + np.float32(weight * value))
        else:
            half = (n - start + 1) // 2
            for i in range(start, n):
                octet = payload[first + (i - start) % half]
                code = octet >> np.uint8(4) if i - start >= half else octet & np.uint8(15)
                value = np.float32(INT4_LEVELS[code] * scale)
                into[i] = np.float32(into[i] + np.float32(weight * value))


def sparse_encode(values: Floats, payload: Bytes, limit: Any) -> bool:
    """False when a magnitude is above ``limit`` (bits); the payload is then partly written."""
    n = values.size
    bits = np.empty(STRETCH, np.uint32)
    lanes = np.empty(BLOCK, np.uint32)
    candidates = np.empty(STRETCH, np.uint32)
    places = np.empty(STRETCH, np.int32)
    kept = np.empty(BLOCK, np.int32)
    order = np.empty(BLOCK, np.float64)
    sums = np.empty(BLOCK, np.float64)
    position = 0
    for start in range(0, n, STRETCH):
        m = min(STRETCH, n - start)
        k = (m + BLOCK - 1) // BLOCK
        lanes[:] = np.uint32(0)
        for row in range(m // BLOCK):
            for j in range(BLOCK):
                magnitude = np.uint32(np.float32(values[start + row * BLOCK + j]).view(np.uint32) & MAGNITUDE)
                bits[row * BLOCK + j] = magnitude
                lanes[j] = max(lanes[j], magnitude)
        for i in range(m // BLOCK * BLOCK, m):
            magnitude = np.uint32(np.float32(values[start + i]).view(np.uint32) & MAGNITUDE)
            bits[i] = magnitude
            lanes[i % BLOCK] = max(lanes[i % BLOCK], magnitude)
        low, high = lanes[0], lanes[0]
        for j in range(BLOCK):
            low, high = min(low, lanes[j]), max(high, lanes[j])
        if high > limit:
            return False

        # The smallest of 64 disjoint maxima: at least 64 >= k magnitudes reach it, usually few more.
        count = np.int64(0)
        for i in range(m):
            candidates[count] = bits[i]
            places[count] = i
            count += np.int64(bits[i] >= low)
        # The k-th largest, by halving; low always is reached by k or more, high + 1 by fewer.
        while low < high:
            middle = np.uint32(low + (high - low + np.uint32(1)) // np.uint32(2))
            reached = np.int32(0)
            for i in range(count):
                reached += np.int32(candidates[i] >= middle)
            if reached == k:
                low = middle
                break
            if reached > k:
                low = middle
            else:
                high = np.uint32(middle - np.uint32(1))
        spare = np.int64(k)
        for i in range(count):
            spare -= np.int64(candidates[i] > low)
        found = 0
        for i in range(count):
            if candidates[i] > low or (candidates[i] == low and spare > 0):
                spare -= np.int64(candidates[i] == low)
                kept[found] = places[i]
                found += 1

        # Magnitudes from the largest down (an insertion sort: 64 at most), and their sums one by one.
        for i in range(k):
            magnitude_ = np.float64(np.uint32(bits[kept[i]]).view(np.float32))
            j = i
            while j > 0 and order[j - 1] < magnitude_:
                order[j] = order[j - 1]
                j -= 1
            order[j] = magnitude_
        total = np.float64(0)
        for i in range(k):
            total = total + order[i]
            sums[i] = total
        # The split into c large and k - c small ones whose means leave the least squared error.
        best, split = np.float64(-1), 1
        for c in range(1, k + 1):
            score = sums[c - 1] * sums[c - 1] / np.float64(c)
            if c < k:
                rest = total - sums[c - 1]
                score = score + rest * rest / np.float64(k - c)
            if score > best:
                best, split = score, c
        mean = np.float32(sums[split - 1] / np.float64(split))
        raw = np.float32(mean).view(np.uint32)
        upper = np.uint32((raw + np.uint32(0x3FFFF) + ((raw >> np.uint32(19)) & np.uint32(1))) >> np.uint32(19))
        large = np.uint32(upper << np.uint32(19)).view(np.float32)
        sixteenths = np.uint32(0)
        if upper > 0 and split < k:
            ratio = (total - sums[split - 1]) / np.float64(k - split) * np.float64(16) / np.float64(large)
            sixteenths = np.uint32(min((ratio + ROUNDER_64) - ROUNDER_64, np.float64(15)))
        small = np.float32(large * np.float32(np.float32(sixteenths) * np.float32(0.0625)))
        boundary = np.float32(np.float32(large + small) * np.float32(0.5))

        word = np.uint32((upper << np.uint32(4)) | sixteenths)
        payload[position] = np.uint8(word & np.uint32(0xFF))
        payload[position + 1] = np.uint8(word >> np.uint32(8))
        index_at = position + 2
        code_at = index_at + (3 * k + 1) // 2
        position = code_at + (k + 3) // 4
        payload[index_at:position] = np.uint8(0)
        for i in range(k):
            place = kept[i]
            octet = index_at + 3 * (i // 2)
            if i % 2 == 0:
                payload[octet] = np.uint8(place & 0xFF)
                payload[octet + 1] = np.uint8(place >> 8)
            else:
                payload[octet + 1] |= np.uint8((place & 0xF) << 4)
                payload[octet + 2] = np.uint8(place >> 4)
            above = np.uint32(bits[place]).view(np.float32) > boundary
            sign = np.float32(values[start + place]).view(np.uint32) >> np.uint32(31)
            payload[code_at + i // 4] |= np.uint8((np.uint32(above) | (sign << np.uint32(1))) << np.uint32(2 * (i % 4)))
    return True


def sparse_valid(payload: Bytes, n: int, limit: int) -> bool:
    """Whether every magnitude is at most ``limit`` (12 bits), indices rise and lie inside, and spare bits are 0."""
    position = 0
    for start in range(0, n, STRETCH):
        m = min(STRETCH, n - start)
        k = (m + BLOCK - 1) // BLOCK
        word = np.int32(payload[position]) + np.int32(payload[position + 1]) * np.int32(256)
        if word >> np.int32(4) > limit:
            return False
        index_at = position + 2
        code_at = index_at + (3 * k + 1) // 2
        position = code_at + (k + 3) // 4
        last = np.int32(-1)
        for i in range(k):
            octet = index_at + 3 * (i // 2)
            middle = np.int32(payload[octet + 1])
            if i % 2 == 0:
                place = np.int32(payload[octet]) | ((middle & np.int32(15)) << np.int32(8))
            else:
                place = (middle >> np.int32(4)) | (np.int32(payload[octet + 2]) << np.int32(4))
            if place <= last:
                return False
            last = place
        if last >= m:
            return False
        if k % 2 == 1 and payload[code_at - 1] >> np.uint8(4) != 0:
            return False
        if k % 4 != 0 and payload[position - 1] >> np.uint8(2 * (k % 4)) != 0:
            return False
    return True


def sparse_decode(payload: Bytes, out: Floats) -> None:
    """Zeros, and at the places kept ± large or small."""
    n = out.size
    position = 0
    out[:] = np.float32(0)
    for start in range(0, n, STRETCH):
        k = (min(STRETCH, n - start) + BLOCK - 1) // BLOCK
        word = np.uint32(payload[position]) | (np.uint32(payload[position + 1]) << np.uint32(8))
        large = np.uint32((word >> np.uint32(4)) << np.uint32(19)).view(np.float32)
        small = np.float32(large * np.float32(np.float32(word & np.uint32(15)) * np.float32(0.0625)))
        index_at = position + 2
        code_at = index_at + (3 * k + 1) // 2
        position = code_at + (k + 3) // 4
        for i in range(k):
            octet = index_at + 3 * (i // 2)
            middle = np.int64(payload[octet + 1])
            if i % 2 == 0:
                place = np.int64(payload[octet]) | ((middle & 15) << 8)
            else:
                place = (middle >> 4) | (np.int64(payload[octet + 2]) << 4)
            code = (payload[code_at + i // 4] >> np.uint8(2 * (i % 4))) & np.uint8(3)
            value = large if code & np.uint8(1) else small
            out[start + place] = np.float32(-value) if code & np.uint8(2) else value


def sparse_add(payload: Bytes, weight: Any, into: Floats) -> None:
    """``into += weight * value`` at the places kept; the others are not touched."""
    n = into.size
    position = 0
    for start in range(0, n, STRETCH):
        k = (min(STRETCH, n - start) + BLOCK - 1) // BLOCK
        word = np.uint32(payload[position]) | (np.uint32(payload[position + 1]) << np.uint32(8))
        large = np.uint32((word >> np.uint32(4)) << np.uint32(19)).view(np.float32)
        small = np.float32(large * np.float32(np.float32(word & np.uint32(15)) * np.float32(0.0625)))
        index_at = position + 2
        code_at = index_at + (3 * k + 1) // 2
        position = code_at + (k + 3) // 4
        for i in range(k):
            octet = index_at + 3 * (i // 2)
            middle = np.int64(payload[octet + 1])
            if i % 2 == 0:
                place = np.int64(payload[octet]) | ((middle & 15) << 8)
            else:
                place = (middle >> 4) | (np.int64(payload[octet + 2]) << 4)
            code = (payload[code_at + i // 4] >> np.uint8(2 * (i % 4))) & np.uint8(3)
            value = large if code & np.uint8(1) else small
            value = np.float32(-value) if code & np.uint8(2) else value
            into[start + place] = np.float32(into[start + place] + np.float32(weight * value))


def union_encode(values: Floats, payload: Bytes, limit: Any) -> Any:
    """Bytes written, into a payload that has room for all values; -1 when a magnitude is above ``limit`` (bits)."""
    n = values.size
    places = np.empty(STRETCH, np.int32)
    position = np.int64(0)
    for start in range(0, n, STRETCH):
        m = np.int64(min(STRETCH, n - start))
        count = np.int64(0)
        worst = np.uint32(0)
        for i in range(m):
            magnitude = np.uint32(np.float32(values[start + i]).view(np.uint32) & MAGNITUDE)
            worst = max(worst, magnitude)
            places[count] = i
            count += np.int64(magnitude != 0)
        if worst > limit:
            return np.int64(-1)
        payload[position] = np.uint8(count & 255)
        payload[position + 1] = np.uint8(count >> 8)
        position += 2
        bits, low = m, np.int64(0)
        for width in range(1, 13):
            size = count * (width + 1) + ((m - 1) >> width)
            if size < bits:
                bits, low = size, np.int64(width)
        octets = (bits + 7) // 8 if count > 0 else np.int64(0)
        for i in range(octets):
            payload[position + i] = np.uint8(0)
        upper = count + ((m - 1) >> low)
        for i in range(count):
            place = np.int64(places[i])
            at = (place >> low) + i if low > 0 else place
            payload[position + (at >> 3)] |= np.uint8(1 << (at & 7))
            if low > 0:
                at = upper + i * low
                rest = (place & ((np.int64(1) << low) - 1)) << (at & 7)
                octet = position + (at >> 3)
                while rest > 0:
                    payload[octet] |= np.uint8(rest & 255)
                    rest >>= 8
                    octet += 1
        position += octets
        # The values kept, as ``int8``.
        blocks = (count + BLOCK - 1) // BLOCK
        levels = position + 2 * blocks
        for block in range(blocks):
            first = block * BLOCK
            end: Any = min(count, first + BLOCK)
            worst = np.uint32(0)
            for i in range(first, end):
                worst = max(worst, np.uint32(np.float32(values[start + places[i]]).view(np.uint32) & MAGNITUDE))
            exact = np.float32(np.uint32(worst).view(np.float32) / np.float32(127))
            word = np.uint32((np.float32(exact).view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16))
            payload[position + 2 * block] = np.uint8(word & np.uint32(0xFF))
            payload[position + 2 * block + 1] = np.uint8(word >> np.uint32(8))
            scale = np.uint32(word << np.uint32(16)).view(np.float32)
            if word == 0:
                scale = np.float32(1)
            for i in range(first, end):
                quotient = np.float32(values[start + places[i]] / scale)
                rounded = np.float32(np.float32(quotient + ROUNDER) - ROUNDER)
                payload[levels + i] = np.uint8(np.int32(rounded))
        position = levels + count
    return position


def union_valid(payload: Bytes, n: int, limit: int, share: int) -> bool:
    """Whether the payload is the records of ``n`` values and nothing else; none keeps more than ``share`` of each 64
    values begun; indices rise and lie inside, spare bits are 0, and the values are ``int8`` with scales below ``limit``
    (bits). Nothing beyond the payload's end is read."""
    end = np.int64(payload.size)
    position = np.int64(0)
    for start in range(0, n, STRETCH):
        m = np.int64(min(STRETCH, n - start))
        if end - position < 2:
            return False
        count = np.int64(payload[position]) | (np.int64(payload[position + 1]) << 8)
        position += 2
        if count > min(m, share * ((m + BLOCK - 1) // BLOCK)):
            return False
        if count == 0:
            continue
        bits, low = m, np.int64(0)
        for width in range(1, 13):
            size = count * (width + 1) + ((m - 1) >> width)
            if size < bits:
                bits, low = size, np.int64(width)
        octets = (bits + 7) // 8
        blocks = (count + BLOCK - 1) // BLOCK
        if end - position < octets + 2 * blocks + count:
            return False
        if bits % 8 != 0 and payload[position + octets - 1] >> np.uint8(bits % 8) != 0:
            return False
        upper = count + ((m - 1) >> low) if low > 0 else m
        found, last = np.int64(0), np.int64(-1)
        for at in range(upper):
            if (payload[position + (at >> 3)] >> np.uint8(at & 7)) & np.uint8(1) == 0:
                continue
            if found == count:
                return False
            place = np.int64(at)
            if low > 0:
                place = (at - found) << low
                for j in range(low):
                    bit = upper + found * low + j
                    place |= ((np.int64(payload[position + (bit >> 3)]) >> (bit & 7)) & 1) << j
            if place <= last or place >= m:
                return False
            last = place
            found += 1
        if found != count:
            return False
        position += octets
        for block in range(blocks):
            word = np.int64(payload[position + 2 * block]) | (np.int64(payload[position + 2 * block + 1]) << 8)
            if word >= limit:
                return False
        position += 2 * blocks
        for i in range(count):
            if payload[position + i] == np.uint8(128):
                return False
        position += count
    return bool(position == end)


def union_decode(payload: Bytes, out: Floats) -> None:
    """Zeros, and at the places kept level * scale."""
    n = out.size
    position = np.int64(0)
    out[:] = np.float32(0)
    for start in range(0, n, STRETCH):
        m = np.int64(min(STRETCH, n - start))
        count = np.int64(payload[position]) | (np.int64(payload[position + 1]) << 8)
        position += 2
        if count == 0:
            continue
        bits, low = m, np.int64(0)
        for width in range(1, 13):
            size = count * (width + 1) + ((m - 1) >> width)
            if size < bits:
                bits, low = size, np.int64(width)
        scales = position + (bits + 7) // 8
        levels = scales + 2 * ((count + BLOCK - 1) // BLOCK)
        upper = count + ((m - 1) >> low) if low > 0 else m
        found = np.int64(0)
        for at in range(upper):
            if (payload[position + (at >> 3)] >> np.uint8(at & 7)) & np.uint8(1) == 0:
                continue
            place = np.int64(at)
            if low > 0:
                place = (at - found) << low
                for j in range(low):
                    bit = upper + found * low + j
                    place |= ((np.int64(payload[position + (bit >> 3)]) >> (bit & 7)) & 1) << j
            pair = scales + 2 * (found // BLOCK)
            word = np.uint32(payload[pair]) | (np.uint32(payload[pair + 1]) << np.uint32(8))
            scale = np.uint32(word << np.uint32(16)).view(np.float32)
            out[start + place] = np.float32(np.float32(np.int8(payload[levels + found])) * scale)
            found += 1
        position = levels + count


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
    bad = np.zeros(BLOCK, np.uint8)  # lanes as in int8_valid
    whole = n // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        for j in range(BLOCK):
            bad[j] |= np.uint8((payload[2 * (start + j) + 1] & np.uint8(0x7C)) == np.uint8(0x7C))
    for i in range(whole, n):
        bad[0] |= np.uint8((payload[2 * i + 1] & np.uint8(0x7C)) == np.uint8(0x7C))
    return bool(bad.max() == 0)


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


def matrix_times(x: Floats, factor: Floats, rank: int, out: Floats) -> None:
    """``out[c, i] = sum over j of x[i, j] * factor[j, c]``, j rising; x [rows, columns], factor [columns, rank]."""
    rows = out.size // rank
    columns = factor.size // rank
    sums = np.empty(rank, np.float32)
    for i in range(rows):
        row = x[i * columns : (i + 1) * columns]
        sums[:] = np.float32(0)
        for j in range(columns):
            value = row[j]
            line = factor[j * rank : (j + 1) * rank]
            for c in range(rank):
                sums[c] = np.float32(sums[c] + np.float32(value * line[c]))
        for c in range(rank):
            out[c * rows + i] = sums[c]


def times_matrix(factor: Floats, x: Floats, rank: int, out: Floats) -> None:
    """``out[c, j] = sum over i of factor[c, i] * x[i, j]``, i rising; factor [rank, rows], x [rows, columns]."""
    rows = factor.size // rank
    columns = out.size // rank
    out[:] = np.float32(0)
    for i in range(rows):
        row = x[i * columns : (i + 1) * columns]
        for c in range(rank):
            weight = factor[c * rows + i]
            line = out[c * columns : (c + 1) * columns]
            for j in range(columns):
                line[j] = np.float32(line[j] + np.float32(weight * row[j]))


def outer_add(left: Floats, right: Floats, rank: int, out: Floats) -> None:
    """``out[i, j] += left[c, i] * right[c, j]``, c rising; left [rank, rows], right [rank, columns]."""
    rows = left.size // rank
    columns = right.size // rank
    for i in range(rows):
        row = out[i * columns : (i + 1) * columns]
        for c in range(rank):
            weight = left[c * rows + i]
            line = right[c * columns : (c + 1) * columns]
            for j in range(columns):
                row[j] = np.float32(row[j] + np.float32(weight * line[j]))


def orthonormal(vectors: Floats, spare: Floats, rank: int, out: Floats) -> None:
    """See :func:`atoll.protocol.lowrank.orthonormal`; all three [rank, length]."""
    length = out.size // rank
    basis = np.zeros((rank, length), np.float64)
    line = np.empty(length, np.float64)
    for c in range(rank):
        kept = False
        for source in range(2):
            if kept:
                break
            for i in range(length):
                line[i] = np.float64(vectors[c * length + i] if source == 0 else spare[c * length + i])
            total = line[0] * line[0]
            for i in range(1, length):
                total = total + line[i] * line[i]
            before = total
            for _ in range(2):
                for other in range(c):
                    against = basis[other]
                    along = line[0] * against[0]
                    for i in range(1, length):
                        along = along + line[i] * against[i]
                    for i in range(length):
                        line[i] = line[i] - along * against[i]
            total = line[0] * line[0]
            for i in range(1, length):
                total = total + line[i] * line[i]
            if total > before * LEAST_SHARE:
                norm = np.sqrt(total)
                kept = True
                for i in range(length):
                    basis[c, i] = line[i] / norm
    for c in range(rank):
        for i in range(length):
            out[c * length + i] = np.float32(basis[c, i])
