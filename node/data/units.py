"""From sample units to windows of text.

A lease grants unit numbers 0, 1, 2, … of the run. Every ``windows`` units are one epoch; within it a keyed
permutation maps units to disjoint windows one to one, so no window repeats anywhere in the swarm before the epoch
ends, and neighbours in a lease lie far apart in the text. Each epoch shifts the grid of windows, so that sequences
begin elsewhere. The mapping is a pure function of (seed, bytes, context): all peers agree on it.
"""

from __future__ import annotations

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

ROUNDS = 6


class Units:
    """Windows of ``context`` + 1 bytes over ``length`` bytes of training text."""

    def __init__(self, length: int, context: int, seed: int) -> None:
        self.context, self.seed = context, seed
        # a window needs one byte more than its context, and an epoch's shift takes up to context - 1
        self.windows = max((length - context) // context, 1)
        self.shifts = min(max(length - self.windows * context, 1), context)

    def starts(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """First byte of the window of each unit."""
        epochs, within = np.divmod(units, self.windows)
        out = np.empty_like(units)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            shift = int(_keys(self.seed, int(epoch), 1, b"shift")[0]) % self.shifts
            out[chosen] = permute(within[chosen], self.windows, self.seed, int(epoch)) * self.context + shift
        return out

    def batch(self, text: NDArray[np.uint8], units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens int64 [len(units), context + 1] of the units' windows."""
        return text[self.starts(units)[:, None] + np.arange(self.context + 1)].astype(np.int64)


def permute(values: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """An exact permutation of 0 … size - 1, applied to ``values``.

    A balanced Feistel network over the next even power of two (its rounds are bijective whatever the round
    function), walked along its cycles until the value is below ``size``; fewer than four walks on average.
    """
    half = max((max(size - 1, 1).bit_length() + 1) // 2, 1)
    mask = np.uint64((1 << half) - 1)
    keys = _keys(seed, epoch, ROUNDS, b"units")

    def once(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> np.uint64(half), x & mask
        for key in keys:
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << np.uint64(half)) | right

    out = once(values.astype(np.uint64))
    while (outside := out >= np.uint64(size)).any():
        out[outside] = once(out[outside])
    return out.astype(np.int64)


def _keys(seed: int, epoch: int, count: int, purpose: bytes) -> NDArray[np.uint64]:
    material = blake3(b"atoll " + purpose + seed.to_bytes(8, "little") + epoch.to_bytes(8, "little"))
    return np.frombuffer(material.digest(length=8 * count), dtype="<u8").astype(np.uint64)
