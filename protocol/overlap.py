"""Overlap: what training goes on from while a round is in flight, and how the commit changes what it has become.

Pure arithmetic on float32 vectors of one span (a chunk, a fragment). With g the global parameters, b the outer
momentum, θ the local parameters, the progress that has not been handed over is Δ = g − θ, and a round takes it in
three steps:

CONTRIBUTE. ``frozen`` ← θ is what the round averages (as g − frozen). Training goes on from θ̃, :meth:`Overlap.start`.

COMMIT, g_old → g_new, some inner steps later. Where the own contribution is in the average::

    carry, delay, eager:  θ ← θ + (g_new − θ̃)
    mix:                  θ ← (1 − α)·g_new + α·θ
    overwrite:            θ ← g_new

Where it is not, it is as if it had never been sent: θ ← θ + (frozen − θ̃) + (g_new − g_old), whatever the rule.

ABORT: θ ← θ + (frozen − θ̃).

All of them are ``θ ← keep·θ + shift`` with a number ``keep`` and a vector ``shift`` that do not depend on θ
(:meth:`Overlap.committed`, :meth:`Overlap.left_out`, :meth:`Overlap.aborted`, then :func:`move`): so the shift is
computed while training goes on, and only the last pass over θ stops it.

Sources: carry is Decoupled DiLoCo's (arXiv 2604.21428), mix and overwrite Streaming DiLoCo's (arXiv 2501.18512), eager
arXiv 2502.12996, the delay of one round DiLoCoX's (arXiv 2506.21263).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
STRETCH = 1 << 13
"""Elements worked on at once where a second term needs memory: small enough to be had without asking the kernel."""


class Merge(StrEnum):
    """What becomes of the inner steps that were made while the round was in flight."""

    CARRY = "carry"
    """They stay, on top of the new global parameters. Exact: every inner step counts once."""
    MIX = "mix"
    """The share α of the way from the global parameters to the local ones stays; the rest of those steps is lost."""
    OVERWRITE = "overwrite"
    """They are lost."""
    EAGER = "eager"
    """As carry, but training goes on from a preview of the outer step, taken with the own progress alone. Exact."""
    DELAY = "delay"
    """As carry, but training goes on from the old global parameters, without the own progress of the round."""


@dataclass(frozen=True)
class Overlap:
    """A rule with its constants. Vectors are float32 and of one length; ``out`` may be any of a method's arguments.

    lr, mu: the outer learning rate η and momentum μ (0 for plain SGD), for the preview of eager. alpha: α of mix.
    """

    merge: Merge = Merge.CARRY
    lr: float = 0.0
    mu: float = 0.0
    alpha: float = 0.5

    @property
    def departs(self) -> bool:
        """Whether θ̃ is another point than ``frozen``."""
        return self.merge in (Merge.EAGER, Merge.DELAY)

    def start(self, frozen: Floats, params: Floats, momentum: Floats, out: Floats) -> Floats:
        """θ̃, from the parameters g and the momentum b that the round is based on. The same bits every time."""
        if self.merge is Merge.EAGER:
            lead, drag = np.float32(self.lr * (1 + self.mu)), np.float32(self.lr * self.mu * self.mu)
            for part in _stretches(len(out)):
                step = lead * (params[part] - frozen[part])
                if drag:
                    step += drag * momentum[part]
                np.subtract(params[part], step, out=out[part])
        else:
            out[:] = params if self.merge is Merge.DELAY else frozen
        return out

    def committed(self, start: Floats, new: Floats, out: Floats) -> float:
        """The commit where the own contribution is in the average: ``shift`` into ``out``, and ``keep``."""
        match self.merge:
            case Merge.OVERWRITE:
                out[:] = new
                return 0.0
            case Merge.MIX:
                np.multiply(new, np.float32(1 - self.alpha), out=out)
                return self.alpha
            case _:
                np.subtract(new, start, out=out)
                return 1.0

    def left_out(self, frozen: Floats, start: Floats, old: Floats, new: Floats, out: Floats) -> float:
        """The commit where the own contribution is not in the average: ``shift`` into ``out``, and ``keep``."""
        for part in _stretches(len(out)):
            moved = new[part] - old[part]
            if self.departs:
                moved += frozen[part] - start[part]
            out[part] = moved
        return 1.0

    def aborted(self, frozen: Floats, start: Floats, out: Floats) -> float:
        """The round ended without a commit: ``shift`` into ``out``, and ``keep``. Zero unless the rule departs."""
        np.subtract(frozen, start, out=out)
        return 1.0

    def remaining(self, now: int, snapshot: int, share: float) -> int:
        """What is left of a counter after a commit, see :func:`left`. With overwrite the steps since ``frozen`` was
        taken are lost as well, in the same share, and must not count either."""
        return left(now, share, None if self.merge is Merge.OVERWRITE else snapshot)


def left(now: int, share: float, snapshot: int | None = None) -> int:
    """What is left of a counter (steps, tokens, sample units) when a share of it has been handed over.

    now: its value; share: of the parameters in which the own contribution was averaged, 0 … 1; snapshot: the value
    that the share is of, when it is not ``now`` but that of the freeze: what was done since then stays. An aborted
    round changes no counter.
    """
    return round(now * (1 - share)) if snapshot is None else max(now - round(snapshot * share), 0)


def move(theta: Floats, keep: float, shift: Floats) -> None:
    """θ ← keep·θ + shift, in place; with keep 0 or 1 without rounding more than need be."""
    if keep == 0:
        theta[:] = shift
        return
    if keep != 1:
        theta *= np.float32(keep)
    theta += shift


def _stretches(length: int) -> Iterator[slice]:
    for start in range(0, length, STRETCH):
        yield slice(start, start + STRETCH)
