"""Low-rank contributions with factors that all peers share (PowerSGD, arXiv 1905.13727, as DiLoCoX uses it,
arXiv 2506.21263): an experiment of ``atoll compare``, not part of the wire protocol.

A round takes two averages. With M_i the matrix of peer i and Q the shared right factor of the round before: the mean of
M_i·Q, orthonormalised, is P; the mean of M_iᵀ·P is the next Q; and what everyone applies is P·Qᵀ. A peer's own part
is P·Pᵀ·M_i as its packed factor gives it, so it knows exactly what was taken, and error feedback stays its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.protocol.theta0 import TensorSpec

Floats = NDArray[np.float32]
Pack = Callable[[Floats], tuple[Floats, int]]
"""What a codec makes of a vector: the decoded values, and the bytes that crossed the network."""


@dataclass(frozen=True)
class Reduced:
    """One matrix of a round."""

    parts: list[Floats]
    """What each contributor sent, decoded to the whole matrix: its residual is what it had minus this."""
    mean: Floats
    """The weighted mean of the parts, as everybody decodes it."""
    sent: int
    """Bytes of one contribution: both factors."""
    received: int
    """Bytes of the averages: both factors."""


class LowRank:
    """The shared right factors of a run, one a matrix; warm-started from round to round.

    specs: the tensors of the model in flat order. rank: columns of each factor. seed: of the first right factors.
    """

    def __init__(self, specs: Sequence[TensorSpec], rank: int, seed: int) -> None:
        self.rank = rank
        random = np.random.default_rng(seed)
        self.factors: dict[str, Floats] = {}
        for spec in specs:
            if gains(spec.shape, rank):
                self.factors[spec.name] = random.standard_normal((spec.shape[1], rank)).astype(np.float32)

    def reduce(
        self, name: str, matrices: Sequence[Floats], weights: Sequence[float], pack: Pack, back: Pack
    ) -> Reduced:
        """Average matrices float32 [rows, columns] of one shape, one a contributor, and advance the right factor.

        weights: one a contributor, their sum above 0. pack: the codec of contributions; back: that of averages.
        """
        shares = [np.float32(weight / sum(weights)) for weight in weights]
        right = self.factors[name]
        sent, left, received = _average([m @ right for m in matrices], shares, pack, back)
        basis = orthonormal(left)
        packed = [_packed(m.T @ basis, pack) for m in matrices]
        mean, back_bytes = _packed(_mean([values for values, _ in packed], shares), back)
        # a column that has come to nothing would stay nothing
        empty = ~np.any(mean, axis=0)
        self.factors[name] = np.where(empty, right, mean)
        parts = [basis @ values.T for values, _ in packed]
        return Reduced(parts, basis @ mean.T, sent + packed[0][1], received + back_bytes)


def gains(shape: Sequence[int], rank: int) -> bool:
    """Whether two factors of that rank are at most half as large as the matrix. Vectors never gain."""
    return len(shape) == 2 and 2 * rank * (shape[0] + shape[1]) <= shape[0] * shape[1] and rank < min(shape)


def largest_rank(specs: Sequence[TensorSpec]) -> int:
    """The highest rank at which some tensor still gains; 0 when none ever does."""
    rank = 0
    while any(gains(spec.shape, rank + 1) for spec in specs):
        rank += 1
    return rank


def orthonormal(matrix: Floats) -> Floats:
    """An orthonormal basis [rows, rank] of the columns, by QR in float64."""
    return np.linalg.qr(matrix.astype(np.float64))[0].astype(np.float32)


def _average(
    factors: Sequence[Floats], shares: Sequence[np.float32], pack: Pack, back: Pack
) -> tuple[int, Floats, int]:
    packed = [_packed(factor, pack) for factor in factors]
    mean, received = _packed(_mean([values for values, _ in packed], shares), back)
    return packed[0][1], mean, received


def _mean(values: Sequence[Floats], shares: Sequence[np.float32]) -> Floats:
    total = np.zeros_like(values[0])
    for share, value in zip(shares, values, strict=True):
        total += share * value
    return total


def _packed(matrix: Floats, pack: Pack) -> tuple[Floats, int]:
    # by columns: values of one column are of one size, and share the codec's scales
    values, size = pack(np.ascontiguousarray(matrix.T).ravel())
    return np.ascontiguousarray(values.reshape(matrix.T.shape).T), size
