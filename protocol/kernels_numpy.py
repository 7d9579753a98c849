"""The kernels in numpy: used before :func:`atoll.protocol.kernels.warm_up` and wherever numba cannot compile.

Same names, arguments and result bits as :mod:`.kernels_numba`; these allocate temporaries and are some five to ten
times slower. ``payload`` may begin at any address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kernels_numba import (
    BLOCK,
    CENTRE,
    GOLDEN,
    INT4_LEVELS,
    INT4_ZERO,
    LEAST_SHARE,
    LOW,
    MAGNITUDE,
    MIX_1,
    MIX_2,
    STRETCH,
)

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
HALF_MAX = np.float32(65504)
PIECE = 1 << 16
# Codes of ``int4`` by twice the quotient, rounded away from zero, from -255 to 255: half-way points between levels are
# multiples of a half, and a quotient on one of them takes the level nearer to zero.
_MIDPOINTS = INT4_LEVELS[1:] + INT4_LEVELS[:-1]
_INT4_CODES: NDArray[np.uint8] = np.array(
    [np.sum(np.where(_MIDPOINTS > 0, twice > _MIDPOINTS, twice >= _MIDPOINTS)) for twice in range(-255, 256)], np.uint8
)


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


def outer_delayed(
    params: Floats, momentum: Floats, mean: Floats, lr: Any, mu: Any, share: Any, first: Any, last: Any
) -> None:
    with np.errstate(all="ignore"):
        step = mean * share
        if first:
            np.multiply(momentum, mu, out=momentum)
        np.add(momentum, step, out=momentum)
        if last:
            np.add(step, momentum * mu, out=step)
        np.multiply(step, lr, out=step)
        np.subtract(params, step, out=params)


def outer_sgd(params: Floats, mean: Floats, lr: Any) -> None:
    with np.errstate(all="ignore"):
        np.subtract(params, mean * lr, out=params)


def contribution(params: Floats, local: Floats, residual: Floats, decay: Any, out: Floats) -> None:
    with np.errstate(all="ignore"):
        for start in range(0, out.size, PIECE):  # each stays in a core's cache between the passes over it
            part = slice(start, start + PIECE)
            np.subtract(params[part], local[part], out=out[part])
            out[part] += residual[part] * decay


def float32_add(values: Floats, weight: Any, into: Floats) -> None:
    with np.errstate(all="ignore"):
        np.add(into, values * weight, out=into)


def _scales(payload: Bytes, blocks: int) -> Floats:
    bits: NDArray[np.uint32] = payload[: 2 * blocks].view("<u2").astype(np.uint32)
    return (bits << np.uint32(16)).view(np.float32)


def _blocks(values: Floats, payload: Bytes, limit: Any) -> tuple[Floats, Floats] | None:
    """Write the scales; rows of 64 (zeros fill the last) and what to divide each by. None: a value is refused."""
    n = values.size
    blocks = -(-n // BLOCK)
    if n % BLOCK:
        padded = np.zeros(blocks * BLOCK, np.float32)
        padded[:n] = values
        values = padded
    rows = values.reshape(blocks, BLOCK)
    worst = (rows.view(np.uint32) & MAGNITUDE).max(axis=1)
    if worst.max(initial=np.uint32(0)) > limit:
        return None
    exact = worst.view(np.float32) / np.float32(127)
    bits = (exact.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
    payload[: 2 * blocks].view("<u2")[:] = bits
    scales = (bits << np.uint32(16)).view(np.float32)
    scales[bits == 0] = 1
    return rows, scales


def int8_encode(values: Floats, payload: Bytes, limit: Any) -> bool:
    n = values.size
    with np.errstate(all="ignore"):
        found = _blocks(values, payload, limit)
        if found is None:
            return False
        rows, scales = found
        levels = np.rint(rows / scales[:, None]).astype(np.int8)
    payload[2 * len(rows) :].view(np.int8)[:] = levels.reshape(-1)[:n]
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


def int4_encode(values: Floats, payload: Bytes, limit: Any) -> bool:
    n = values.size
    with np.errstate(all="ignore"):
        found = _blocks(values, payload, limit)
        if found is None:
            return False
        rows, scales = found
        twice = rows / scales[:, None] * np.float32(2)
    codes = _INT4_CODES[np.copysign(np.ceil(np.abs(twice)), twice).astype(np.int16) + np.int16(255)]
    octets = codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << np.uint8(4))
    whole = n // BLOCK
    first = 2 * len(rows)
    payload[first : first + whole * BLOCK // 2] = octets[:whole].reshape(-1)
    if n % BLOCK:
        half = (n % BLOCK + 1) // 2
        payload[first + whole * BLOCK // 2 :] = codes[whole, :half] | (codes[whole, half : 2 * half] << np.uint8(4))
    return True


def int4_valid(payload: Bytes, n: int, limit: int) -> bool:
    blocks = -(-n // BLOCK)
    if blocks == 0:
        return True
    return bool(payload[: 2 * blocks].view("<u2").max() < limit and (n % 2 == 0 or payload[-1] >> 4 == INT4_ZERO))


def int4_decode(payload: Bytes, out: Floats) -> None:
    n = out.size
    blocks, whole = -(-n // BLOCK), n // BLOCK
    scales = _scales(payload, blocks)
    octets = payload[2 * blocks :]
    rows = octets[: whole * BLOCK // 2].reshape(whole, BLOCK // 2)
    shaped = out[: whole * BLOCK].reshape(whole, BLOCK)
    with np.errstate(all="ignore"):
        np.multiply(INT4_LEVELS[rows & 15], scales[:whole, None], out=shaped[:, : BLOCK // 2])
        np.multiply(INT4_LEVELS[rows >> 4], scales[:whole, None], out=shaped[:, BLOCK // 2 :])
        if n % BLOCK:
            rest = octets[whole * BLOCK // 2 :]
            codes = np.concatenate([rest & 15, rest >> 4])[: n % BLOCK]
            out[whole * BLOCK :] = INT4_LEVELS[codes] * scales[whole]


def int4_add(payload: Bytes, weight: Any, into: Floats) -> None:
    values = np.empty_like(into)
    int4_decode(payload, values)
    float32_add(values, weight, into)


def _record(k: int) -> tuple[int, int]:
    """Where the 2-bit codes of a stretch with k kept values begin, and where it ends."""
    codes = 2 + (3 * k + 1) // 2
    return codes, codes + (k + 3) // 4


def _stretches(n: int) -> list[tuple[slice, slice, int, int, int]]:
    """Runs of equal stretches: values, payload, how many, values in each, kept in each."""
    whole, rest = divmod(n, STRETCH)
    _, size = _record(STRETCH // BLOCK)
    found = []
    piece = 32  # keeps the temporaries small
    for first in range(0, whole, piece):
        last = min(first + piece, whole)
        spans = slice(first * STRETCH, last * STRETCH), slice(first * size, last * size)
        found.append((*spans, last - first, STRETCH, STRETCH // BLOCK))
    if rest:
        k = -(-rest // BLOCK)
        spans = slice(whole * STRETCH, n), slice(whole * size, whole * size + _record(k)[1])
        found.append((*spans, 1, rest, k))
    return found


def sparse_encode(values: Floats, payload: Bytes, limit: Any) -> bool:
    if largest(values) > limit:
        return False
    if 0 < values.size <= BLOCK:
        _encode_one(values, payload)
        return True
    for span, octets, count, m, k in _stretches(values.size):
        rows = values[span].reshape(count, m)
        code_at, size = _record(k)
        out = np.zeros((count, size), np.uint8)
        bits = rows.view(np.uint32) & MAGNITUDE
        # magnitude first, then the lower index: no two keys are equal
        keys = (bits.astype(np.uint64) << np.uint64(12)) | np.arange(STRETCH - 1, STRETCH - 1 - m, -1, dtype=np.uint64)
        top = np.sort(np.partition(keys, m - k, axis=1)[:, m - k :], axis=1)[:, ::-1]
        magnitudes = (top >> np.uint64(12)).astype(np.uint32).view(np.float32)
        places = np.sort(STRETCH - 1 - (top & np.uint64(STRETCH - 1)).astype(np.int64), axis=1)

        sums = np.add.accumulate(magnitudes.astype(np.float64), axis=1)
        total = sums[:, -1:]
        counts = np.arange(1, k + 1, dtype=np.float64)
        scores = sums * sums / counts
        rest = (total - sums)[:, :-1]
        scores[:, :-1] += rest * rest / (k - counts[:-1])
        split = scores.argmax(axis=1)
        above = np.take_along_axis(sums, split[:, None], axis=1)[:, 0]
        raw = (above / (split + 1.0)).astype(np.float32).view(np.uint32)
        upper = (raw + np.uint32(0x3FFFF) + ((raw >> np.uint32(19)) & np.uint32(1))) >> np.uint32(19)
        large = (upper << np.uint32(19)).view(np.float32)
        with np.errstate(all="ignore"):
            below = (total[:, 0] - above) / (k - (split + 1.0))
            ratio = np.rint(below * 16.0 / large.astype(np.float64))
        useful = (upper > 0) & (split + 1 < k)
        sixteenths = np.where(useful, np.minimum(ratio, 15.0), 0.0).astype(np.uint32)
        small = large * (sixteenths.astype(np.float32) * np.float32(0.0625))
        boundary = (large + small) * np.float32(0.5)

        word = (upper << np.uint32(4)) | sixteenths
        out[:, 0], out[:, 1] = word & np.uint32(0xFF), word >> np.uint32(8)
        even, odd = places[:, 0::2], places[:, 1::2]
        pairs = np.zeros((count, len(even[0]), 3), np.uint8)
        pairs[:, :, 0], pairs[:, :, 1] = even & 0xFF, even >> 8
        pairs[:, : odd.shape[1], 1] |= ((odd & 0xF) << 4).astype(np.uint8)
        pairs[:, : odd.shape[1], 2] = odd >> 4
        out[:, 2:code_at] = pairs.reshape(count, -1)[:, : code_at - 2]
        chosen = np.take_along_axis(bits, places, axis=1).view(np.float32) > boundary[:, None]
        signs = np.take_along_axis(rows.view(np.uint32), places, axis=1) >> np.uint32(31)
        codes = np.zeros((count, 4 * (size - code_at)), np.uint8)
        codes[:, :k] = chosen.astype(np.uint8) | (signs.astype(np.uint8) << 1)
        quads = codes.reshape(count, -1, 4)
        out[:, code_at:] = quads[:, :, 0] | quads[:, :, 1] << 2 | quads[:, :, 2] << 4 | quads[:, :, 3] << 6
        payload[octets] = out.reshape(-1)
    return True


def _encode_one(values: Floats, payload: Bytes) -> None:
    """What :func:`sparse_encode` comes to where one value is kept: without some sixty calls for next to nothing."""
    bits = values.view(np.uint32) & MAGNITUDE
    place = int(bits.argmax())  # of equal ones the first
    raw = int(bits[place])
    upper = (raw + 0x3FFFF + (raw >> 19 & 1)) >> 19
    half = np.uint32(upper << 19).view(np.float32) * np.float32(0.5)
    chosen = bool(bits[place].view(np.float32) > half)
    word, sign = upper << 4, int(values.view(np.uint32)[place]) >> 31
    payload[:] = (word & 0xFF, word >> 8, place & 0xFF, place >> 8, chosen | sign << 1)


def _places(records: Bytes, k: int) -> NDArray[np.int64]:
    """Indices in each record (one more than k where k is odd: the spare bits)."""
    code_at, _ = _record(k)
    triples = np.zeros((len(records), (k + 1) // 2 * 3), np.int64)
    triples[:, : code_at - 2] = records[:, 2:code_at]
    parts = triples.reshape(len(records), -1, 3)
    even = parts[:, :, 0] | (parts[:, :, 1] & 0xF) << 8
    odd = parts[:, :, 1] >> 4 | parts[:, :, 2] << 4
    return np.stack([even, odd], axis=2).reshape(len(records), -1)


def _codes(records: Bytes, k: int) -> Bytes:
    """Codes in each record, spare bits included."""
    octets = records[:, _record(k)[0] :, None]
    codes: Bytes = (octets >> np.arange(0, 8, 2, dtype=np.uint8)) & np.uint8(3)
    return codes.reshape(len(records), -1)


def sparse_valid(payload: Bytes, n: int, limit: int) -> bool:
    if 0 < n <= BLOCK:
        low, high, place, more, code = payload.tolist()
        return bool((low | high << 8) >> 4 <= limit and (place | more << 8) < n and code < 4)
    for _, octets, count, m, k in _stretches(n):
        records = payload[octets].reshape(count, -1)
        words = records[:, 0].astype(np.int64) | records[:, 1].astype(np.int64) << 8
        places, codes = _places(records, k), _codes(records, k)
        if (words >> 4).max() > limit or np.any(places[:, k:]) or np.any(codes[:, k:]):
            return False
        places = places[:, :k]
        if np.any(places[:, 1:] <= places[:, :-1]) or places[:, -1].max() >= m:
            return False
    return True


def _kept(payload: Bytes, n: int) -> tuple[NDArray[np.int64], Floats]:
    """Places of all kept values, and the values."""
    if 0 < n <= BLOCK:
        low, high, place, more, code = payload.tolist()
        word = low | high << 8
        one = np.uint32(word >> 4 << 19).view(np.float32)
        if not code & 1:
            one = one * (np.float32(word & 15) * np.float32(0.0625))
        return np.array([place | (more & 0xF) << 8]), np.array([-one if code & 2 else one], np.float32)
    places, values = [], []
    for span, octets, count, m, k in _stretches(n):
        records = payload[octets].reshape(count, -1)
        words = records[:, 0].astype(np.uint32) | records[:, 1].astype(np.uint32) << np.uint32(8)
        large = ((words >> np.uint32(4)) << np.uint32(19)).view(np.float32)
        small = large * ((words & np.uint32(15)).astype(np.float32) * np.float32(0.0625))
        codes = _codes(records, k)[:, :k]
        value = np.where(codes & 1, large[:, None], small[:, None])
        values.append(np.where(codes & 2, -value, value).reshape(-1))
        places.append((_places(records, k)[:, :k] + (span.start + m * np.arange(count)[:, None])).reshape(-1))
    return np.concatenate(places), np.concatenate(values)


def sparse_decode(payload: Bytes, out: Floats) -> None:
    places, values = _kept(payload, out.size)
    out[:] = 0
    out[places] = values


def sparse_add(payload: Bytes, weight: Any, into: Floats) -> None:
    places, values = _kept(payload, into.size)
    with np.errstate(all="ignore"):
        into[places] += values * weight


def _union_index(count: int, m: int) -> tuple[int, int]:
    """Bits of the index of so many values kept of m, and how many low ones each has apart; 0: a bit for each value."""
    bits, low = m, 0
    for width in range(1, 13):
        size = count * (width + 1) + ((m - 1) >> width)
        if size < bits:
            bits, low = size, width
    return bits, low


def union_encode(values: Floats, payload: Bytes, limit: Any) -> int:
    if largest(values) > limit:
        return -1
    n = values.size
    kept = np.flatnonzero(values.view(np.uint32) & MAGNITUDE)
    edges = np.searchsorted(kept, np.arange(0, n + STRETCH, STRETCH)).tolist()
    position = 0
    for stretch, start in enumerate(range(0, n, STRETCH)):
        m, places = min(STRETCH, n - start), kept[edges[stretch] : edges[stretch + 1]]
        count = len(places)
        payload[position : position + 2] = count & 255, count >> 8
        position += 2
        if count == 0:
            continue
        bits, low = _union_index(count, m)
        flags = np.zeros(bits, np.uint8)
        inside = places - start
        if low:
            flags[(inside >> low) + np.arange(count)] = 1
            flags[bits - count * low :] = ((inside[:, None] >> np.arange(low)) & 1).reshape(-1)
        else:
            flags[inside] = 1
        octets = (bits + 7) // 8
        payload[position : position + octets] = np.packbits(flags, bitorder="little")
        position += octets
        size = 2 * -(-count // BLOCK) + count
        int8_encode(values[places], payload[position : position + size], limit)
        position += size
    return position


def _union_places(octets: Bytes, count: int, m: int) -> NDArray[np.int64]:
    """Where the values kept lie, as the index says; nowhere when it does not name so many, or spare bits are set."""
    bits, low = _union_index(count, m)
    flags = np.unpackbits(octets, bitorder="little")
    places: NDArray[np.int64] = np.flatnonzero(flags[: bits - count * low])
    if len(places) != count or flags[bits:].any():
        return places[:0]
    if low:
        rest = flags[bits - count * low : bits].reshape(count, low).astype(np.int64)
        places = ((places - np.arange(count)) << low) | (rest << np.arange(low)).sum(axis=1)
    return places


def union_valid(payload: Bytes, n: int, limit: int, share: int) -> bool:
    position, end = 0, payload.size
    for start in range(0, n, STRETCH):
        m = min(STRETCH, n - start)
        if end - position < 2:
            return False
        count = int(payload[position]) | int(payload[position + 1]) << 8
        position += 2
        if count > min(m, share * -(-m // BLOCK)):
            return False
        if count == 0:
            continue
        octets = (_union_index(count, m)[0] + 7) // 8
        size = 2 * -(-count // BLOCK) + count
        if end - position < octets + size:
            return False
        places = _union_places(payload[position : position + octets], count, m)
        if len(places) != count or places[-1] >= m or np.any(places[1:] <= places[:-1]):
            return False
        position += octets
        if not int8_valid(payload[position : position + size], count, limit):
            return False
        position += size
    return position == end


def union_decode(payload: Bytes, out: Floats) -> None:
    position, n = 0, out.size
    out[:] = 0
    for start in range(0, n, STRETCH):
        m = min(STRETCH, n - start)
        count = int(payload[position]) | int(payload[position + 1]) << 8
        position += 2
        if count == 0:
            continue
        octets = (_union_index(count, m)[0] + 7) // 8
        size = 2 * -(-count // BLOCK) + count
        places = _union_places(payload[position : position + octets], count, m)
        position += octets
        kept = np.empty(count, np.float32)
        int8_decode(payload[position : position + size], kept)
        out[start + places] = kept
        position += size


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


def matrix_times(x: Floats, factor: Floats, rank: int, out: Floats) -> None:
    rows, columns = out.size // rank, factor.size // rank
    matrix, lines, sums = x.reshape(rows, columns), factor.reshape(columns, rank), np.zeros((rows, rank), np.float32)
    with np.errstate(all="ignore"):
        for j in range(columns):
            sums += matrix[:, j, None] * lines[j]
    out.reshape(rank, rows)[:] = sums.T


def times_matrix(factor: Floats, x: Floats, rank: int, out: Floats) -> None:
    rows, columns = factor.size // rank, out.size // rank
    weights, matrix, sums = factor.reshape(rank, rows), x.reshape(rows, columns), out.reshape(rank, columns)
    sums[:] = 0
    with np.errstate(all="ignore"):
        for i in range(rows):
            sums += weights[:, i, None] * matrix[i]


def outer_add(left: Floats, right: Floats, rank: int, out: Floats) -> None:
    rows, columns = left.size // rank, right.size // rank
    weights, lines, sums = left.reshape(rank, rows), right.reshape(rank, columns), out.reshape(rows, columns)
    with np.errstate(all="ignore"):
        for c in range(rank):
            sums += weights[c, :, None] * lines[c]


def orthonormal(vectors: Floats, spare: Floats, rank: int, out: Floats) -> None:
    length = out.size // rank
    basis = np.zeros((rank, length), np.float64)
    with np.errstate(all="ignore"):
        for c in range(rank):
            for source in (vectors, spare):
                line = source.reshape(rank, length)[c].astype(np.float64)
                before = _dot(line, line)
                for _ in range(2):
                    for other in basis[:c]:
                        line -= _dot(line, other) * other
                total = _dot(line, line)
                if total > before * LEAST_SHARE:
                    basis[c] = line / np.sqrt(total)
                    break
        out.reshape(rank, length)[:] = basis


def _dot(a: NDArray[np.float64], b: NDArray[np.float64]) -> Any:
    """The products added one after the other, in order."""
    return np.add.accumulate(a * b)[-1]
