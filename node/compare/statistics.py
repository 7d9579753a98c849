"""What paired differences allow one to say: mean, 95 % interval, and a verdict against a margin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["met", "not met", "undecided"]


@dataclass(frozen=True)
class Paired:
    """Differences between two rows at the same seeds, each in percent of the reference's loss."""

    seeds: int
    mean: float
    half_width: float
    """Of the two-sided 95 % interval (Student's t); infinite with fewer than two seeds."""

    @property
    def upper(self) -> float:
        return self.mean + self.half_width

    @property
    def lower(self) -> float:
        return self.mean - self.half_width

    def verdict(self, margin: float) -> Verdict:
        """``met``: the whole interval lies below ``margin`` (percent); ``not met``: all of it lies above."""
        if self.upper < margin:
            return "met"
        return "not met" if self.lower > margin else "undecided"

    def sharp(self, margin: float) -> bool:
        """Whether the interval is narrow enough for ``margin``: its half-width is below half of it. Further seeds are
        asked for until then, whatever the verdict is meanwhile: stopping at a pleasant one would bias it."""
        return self.half_width < abs(margin) / 2


def paired(losses: Mapping[int, float], reference: Mapping[int, float]) -> Paired | None:
    """Compare by seed; None when no seed is in both, or a loss is not finite."""
    common = sorted(losses.keys() & reference.keys())
    differences = [100.0 * (losses[seed] - reference[seed]) / reference[seed] for seed in common]
    if not differences or not all(math.isfinite(difference) for difference in differences):
        return None
    return interval(differences)


def interval(values: Sequence[float]) -> Paired:
    """Mean and 95 % interval of at least one value, taken as independent and normal."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Paired(n, mean, math.inf)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return Paired(n, mean, t_quantile(0.975, n - 1) * deviation / math.sqrt(n))


def t_quantile(share: float, freedom: int) -> float:
    """The value that Student's t with ``freedom`` ≥ 1 degrees of freedom exceeds with probability 1 − ``share``.

    ``share`` from 0.5 up to below 1. By bisection on :func:`t_cdf`, exact to 1e-12 or so.
    """
    if not (0.5 <= share < 1.0 and freedom >= 1):
        raise ValueError(f"expected a share in [0.5, 1) and at least one degree of freedom, found {share}, {freedom}")
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < share:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def t_cdf(value: float, freedom: int) -> float:
    """P(T ≤ value) for value ≥ 0, by the finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3–4)."""
    angle = math.atan(value / math.sqrt(freedom))
    cosine = math.cos(angle)
    term = math.sin(angle) * (cosine if freedom % 2 else 1.0)
    total = 0.0
    for k in range(freedom % 2, freedom - 1, 2):
        # odd: cos, 2/3·cos³, 2·4/(3·5)·cos⁵ …; even: 1, 1/2·cos², 1·3/(2·4)·cos⁴ …
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    inside = 2 / math.pi * (angle + total) if freedom % 2 else total
    return (1.0 + inside) / 2
