"""``sparse`` on the device where the values are: the bytes of :mod:`atoll.protocol.codecs.sparse`, as
:mod:`.codecs_torch` makes those of the other codecs (docs/wire/codecs.md).

What makes it come out alike everywhere: the kept values are the largest of 64-bit keys of which no two are equal, so it
does not matter how a device finds them; the sums behind the two magnitudes are added one after the other, for all
stretches at once, since a device adds up in any order; all else is integers and single float32 or float64 operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.protocol.codecs.sparse import KEPT, STRETCH

PER_KEPT = STRETCH // KEPT
"""Values that compete for one to be kept."""


def encode(rows: Tensor) -> Tensor:
    """Chunks float32 [count, n], contiguous, as payloads uint8 [count, size]. Rubbish, but no failure, where a value is
    not finite."""
    return torch.cat([_records(part).view(len(rows), -1) for part in _stretches(rows)], dim=1)


def decode(payload: Tensor, n: int) -> Tensor:
    """What :func:`encode` made of ``n`` values a chunk: float32 [count, n]. Nothing is checked."""
    count, whole, rest = len(payload), *divmod(n, STRETCH)
    at, parts = whole * _size(STRETCH), []
    if whole:
        parts.append(_values(payload[:, :at].reshape(count * whole, -1), STRETCH).view(count, -1))
    if rest:
        parts.append(_values(payload[:, at:], rest))
    return torch.cat(parts, dim=1)


def payload_size(n: int) -> int:
    """Bytes of a payload of ``n`` values."""
    whole, rest = divmod(n, STRETCH)
    return whole * _size(STRETCH) + (_size(rest) if rest else 0)


def _kept(m: int) -> int:
    return -(-m // PER_KEPT)


def _size(m: int) -> int:
    """Bytes of the record of a stretch of m values."""
    return 2 + (3 * _kept(m) + 1) // 2 + (_kept(m) + 3) // 4


def _stretches(rows: Tensor) -> list[Tensor]:
    """All whole stretches of all chunks, float32 [number, 4096], and what is left of each chunk."""
    whole = rows.shape[1] // STRETCH * STRETCH
    parts = [rows[:, :whole].reshape(-1, STRETCH), rows[:, whole:]]
    return [part for part in parts if part.numel()]


def _records(values: Tensor) -> Tensor:
    """The records of stretches [number, m], uint8 [number, size]."""
    number, m = values.shape
    device, k = values.device, _kept(m)
    bits = values.contiguous().view(torch.int32)
    # Magnitude first, then the lower index.
    keys = (bits & 0x7FFFFFFF).to(torch.int64) << 12
    keys |= torch.arange(STRETCH - 1, STRETCH - 1 - m, -1, device=device)
    top = keys.topk(k, dim=1, sorted=True).values
    places = (STRETCH - 1 - (top & (STRETCH - 1))).sort(dim=1).values
    falling = (top >> 12).to(torch.int32).view(torch.float32).to(torch.float64)

    sums = torch.empty_like(falling)
    total = torch.zeros(number, dtype=torch.float64, device=device)
    for c in range(k):
        total = total + falling[:, c]
        sums[:, c] = total
    counts = torch.arange(1, k + 1, dtype=torch.float64, device=device)
    scores = sums * sums / counts
    rest = total[:, None] - sums
    # With all in the large group nothing is added, whatever 0 / 0 may be.
    scores[:, : k - 1] += (rest * rest)[:, : k - 1] / (k - counts)[: k - 1]
    split = torch.arange(k, device=device).expand(number, k)
    split = torch.where(scores == scores.amax(dim=1, keepdim=True), split, k).amin(dim=1)
    split = split.clamp(max=k - 1)[:, None]  # there is none where a value is not finite
    above, large_ones = sums.gather(1, split)[:, 0], counts[split[:, 0]]

    raw = (above / large_ones).to(torch.float32).view(torch.int32)
    upper = (raw + 0x3FFFF + ((raw >> 19) & 1)) >> 19
    large = (upper << 19).view(torch.float32)
    ratio = ((total - above) / (k - large_ones) * 16.0 / large.to(torch.float64)).round()
    useful = (upper > 0) & (large_ones < k)
    sixteenths = torch.where(useful, ratio.clamp(max=15.0), torch.zeros_like(ratio)).to(torch.int32)
    small = large * (sixteenths.to(torch.float32) * 0.0625)
    boundary = (large + small) * 0.5

    word = ((upper << 4) | sixteenths)[:, None]
    chosen = bits.gather(1, places)
    codes = ((chosen & 0x7FFFFFFF).view(torch.float32) > boundary[:, None]).to(torch.int32) | (chosen < 0).int() << 1
    even, odd = _padded(places.to(torch.int32), 2).view(number, -1, 2).unbind(2)
    indices = torch.stack([even & 0xFF, even >> 8 | (odd & 0xF) << 4, odd >> 4], dim=2).view(number, -1)
    quads = _padded(codes, 4).view(number, -1, 4) << torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=device)
    parts = [word & 0xFF, word >> 8, indices[:, : (3 * k + 1) // 2], quads.sum(dim=2, dtype=torch.int32)]
    return torch.cat(parts, dim=1).to(torch.uint8)


def _values(records: Tensor, m: int) -> Tensor:
    """The stretches [number, m] of records."""
    number, k, device = len(records), _kept(m), records.device
    octets = records.to(torch.int32)
    word, code_at = octets[:, 0] | octets[:, 1] << 8, 2 + (3 * k + 1) // 2
    large = (word >> 4 << 19).view(torch.float32)
    small = large * ((word & 15).to(torch.float32) * 0.0625)
    first, middle, last = _padded(octets[:, 2:code_at], 3).view(number, -1, 3).unbind(2)
    places = torch.stack([first | (middle & 0xF) << 8, middle >> 4 | last << 4], dim=2).view(number, -1)[:, :k]
    codes = octets[:, code_at:, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=device) & 3
    codes = codes.view(number, -1)[:, :k]
    kept = torch.where((codes & 1).bool(), large[:, None], small[:, None])
    kept = torch.where((codes & 2).bool(), -kept, kept)
    return torch.zeros(number, m, device=device).scatter_(1, places.to(torch.int64), kept)


def _padded(values: Tensor, times: int) -> Tensor:
    """With zeros up to a whole number of so many columns."""
    missing = -values.shape[1] % times
    return torch.nn.functional.pad(values, (0, missing)) if missing else values
