"""θ₀: the parameters a run begins with, the same bits on every machine, from a generator of our own.

Random words are splitmix64 (Steele, Lea, Flood 2014) used as a counter-based generator: integer arithmetic modulo
2⁶⁴, so any element can be computed by itself. A normal variate is the centred sum of eight uniform 16-bit integers,
an exact integer, times one float32 factor: no logarithm, no cosine, one rounding. Its tails end at 4.9 standard
deviations, and its excess kurtosis is −0.15. Specification and test vectors: docs/wire/codecs.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .kernels import subnormals_on, table

Floats = NDArray[np.float32]
Init = Literal["normal", "zeros", "ones"]

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
UNIT = np.float32(float.fromhex("0x1.3988e2p-16"))
"""1 / sqrt(8 · (2³² − 1) / 12), rounded to float32: it makes the sum of eight 16-bit integers of unit variance."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model. ``std`` is the standard deviation of ``normal``, rounded to float32."""

    name: str
    shape: tuple[int, ...]
    init: Init
    std: float = 0.0

    def __post_init__(self) -> None:
        if self.init not in get_args(Init):
            raise ValueError(f"{self.name}: unknown init {self.init!r}; choose one of {', '.join(get_args(Init))}")
        if any(side < 1 for side in self.shape):
            raise ValueError(f"{self.name}: every side of a shape is at least 1, found {self.shape}")
        if not 0 <= self.std < 2.0**64:
            raise ValueError(f"{self.name}: the standard deviation is finite and not negative, found {self.std}")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def elements(specs: Sequence[TensorSpec]) -> int:
    """Length of the flattened model."""
    return sum(spec.size for spec in specs)


def mix(z: int) -> int:
    """The finaliser of splitmix64."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def fill(run_seed: int, index: int, spec: TensorSpec, out: Floats, start: int = 0) -> None:
    """Elements ``start … start + out.size - 1`` of tensor number ``index`` of the model, flattened, into ``out``.

    ``run_seed`` is from 0 to 2⁶⁴ − 1 (:class:`ValueError` otherwise). Each tensor has a stream of its own, keyed by
    its index, so tensors and their pieces can be made in any order.
    """
    if not 0 <= run_seed <= MASK:
        raise ValueError(f"a seed lies between 0 and 2^64 - 1, found {run_seed}")
    if start < 0 or start + out.size > spec.size:
        raise ValueError(f"{spec.name} has {spec.size} elements, asked for {start} … {start + out.size - 1}")
    if spec.init == "zeros":
        out[:] = 0
    elif spec.init == "ones":
        out[:] = 1
    elif out.size:
        subnormals_on()
        key = mix((mix((run_seed + GOLDEN) & MASK) + (index + 1) * GOLDEN) & MASK)
        first = (key + (2 * start + 1) * GOLDEN) & MASK
        table().theta0_normal(out, np.uint64(first), np.float32(spec.std) * UNIT)


def theta0(run_seed: int, specs: Sequence[TensorSpec], out: Floats | None = None) -> Floats:
    """The flattened model at the start of a run: float32[N], tensors one after the other in the order of ``specs``.

    Writes into ``out`` (float32[N], contiguous) when given, and returns it. The manifest's ``theta0`` is the digest of
    the state that :meth:`.state.GlobalState.fresh` makes of it.
    """
    total = elements(specs)
    if out is None:
        out = np.empty(total, np.float32)
    elif out.dtype != np.float32 or out.shape != (total,) or not out.flags.c_contiguous:
        raise ValueError(f"expected a contiguous float32 vector of {total}, found {out.dtype} of shape {out.shape}")
    start = 0
    for index, spec in enumerate(specs):
        fill(run_seed, index, spec, out[start : start + spec.size])
        start += spec.size
    return out
