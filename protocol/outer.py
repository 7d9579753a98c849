"""The outer step: the one kernel that turns an averaged pseudo-gradient into the next global parameters.

Every peer and the archive run it on the same inputs and must get the same bits, on any CPU: float32 throughout,
one rounding an operation in the order written in :func:`outer_step`, no fused operations, subnormals kept.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError
from .kernels import frozen, subnormals_on, table

Floats = NDArray[np.float32]
KINDS = ("nesterov", "delayed-nesterov", "sgd")


def outer_step(
    params: Floats, momentum: Floats, mean: Floats, lr: float, mu: float, kind: str = "nesterov", *,
    phase: int = 0, period: int = 1,
) -> None:  # fmt: skip
    """One outer step on one chunk, in place (DiLoCo, arXiv:2311.08105; pseudo-gradients are θ_global − θ_local).

    With lr, μ and w = 1/period rounded to float32 and ``[·]`` one rounding to float32, per element::

        nesterov:          b ← [[μ·b] + m]      g ← [g − [lr·[m + [μ·b]]]]      (with the new b)
        sgd:               g ← [g − [lr·m]]                                     (b stays as it is)
        delayed-nesterov:  p = [w·m];  in phase 0 first b ← [μ·b];  b ← [b + p]
                           g ← [g − [lr·p]];  in the last phase instead g ← [g − [lr·[p + [μ·b]]]]

    Delayed Nesterov (arXiv:2401.09135, algorithm 3 with c = 0) is for outer steps that each hold the work of few peers:
    every step moves by a share of it, and the momentum, taken over ``period`` steps, moves once a period. One vector
    holds it and the sum of the period. phase: this step's place in its period, 0 … period − 1. A period of 1 is
    ``nesterov``, bit for bit.

    params g, momentum b, mean m: float32 vectors of one length, contiguous, not overlapping. Raises
    :class:`ValueError` for other arrays or phases, :class:`ConfigError` for an unknown kind or constants that are not
    finite.
    """
    check_outer(lr, mu, kind)
    for array in (params, momentum, mean):
        flags = array.flags
        if array.dtype != np.float32 or array.ndim != 1 or not (flags.c_contiguous and flags.aligned):
            raise ValueError(f"expected contiguous float32 vectors, found {array.dtype} of shape {array.shape}")
        if array.size != params.size:
            raise ValueError(f"expected vectors of one length, found {params.size} and {array.size}")
    if not (params.flags.writeable and momentum.flags.writeable):
        raise ValueError("expected writable parameters and momentum")
    if not 0 <= phase < period:
        raise ValueError(f"expected a phase from 0 to {period - 1}, found {phase}")
    subnormals_on()
    kernels = table()
    if kind == "nesterov":
        kernels.outer_nesterov(params, momentum, frozen(mean), np.float32(lr), np.float32(mu))
    elif kind == "sgd":
        kernels.outer_sgd(params, frozen(mean), np.float32(lr))
    else:
        share, first, last = np.float32(1 / period), phase == 0, phase == period - 1
        kernels.outer_delayed(params, momentum, frozen(mean), np.float32(lr), np.float32(mu), share, first, last)


def check_outer(lr: float, mu: float, kind: str) -> None:
    """Raises :class:`ConfigError` unless these are constants of an outer optimizer."""
    if kind not in KINDS:
        raise ConfigError(f"unknown outer optimizer {kind!r}; choose one of {', '.join(KINDS)}")
    if not (math.isfinite(lr) and math.isfinite(mu)):
        raise ConfigError(f"the outer learning rate and momentum must be finite, found {lr} and {mu}")
