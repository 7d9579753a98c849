"""Contributions that have missed rounds: what they count for, or whether they are dropped.

A peer that no commit averaged goes on with what it has: its Δ moves along with the global parameters, so it stays a
difference from the newest of them, but the older of its steps were made from parameters that others have long left.
Decoupled DiLoCo drops what comes late for a merged round (arXiv 2604.21428); asynchronous federated learning discounts
it by its age (arXiv 1903.03934, where the share is (1 + age) to a negative power).

It also grows: after k rounds Δ is k rounds long and weighs k times as many tokens, so that where each contribution is
left out with probability p, the mean over those that arrive is E[k²] / E[k] = (1 + p) / (1 - p) rounds long, and the
outer step too long by that factor. Normalised averaging (FedNova, arXiv 2007.07481) divides each Δ by its steps and
gives the mean a length of its own. ``shorten`` does so only for who is late, before it contributes, in the local
parameters: so nothing of it crosses the network, and where all are late alike, after a void round, it changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rule = Literal["keep", "shorten", "discount", "drop"]
HALF = 0.5
"""A commit that averages less of a contribution than this has missed it."""


@dataclass(frozen=True)
class Stale:
    """The rule of one run. *Age*: rounds of the fragment that a contribution has missed, 0 of a fresh one.

    keep: it counts in full. shorten: it weighs what it holds, but when it is frozen for a round its Δ becomes no longer
    than that of one round. discount: its tokens and steps over 1 + age. drop: it is dropped as soon as it is older than
    ``max_age``. inner_steps: H, the manifest's; where it follows the rank, who asks for a
    share puts what is in force.
    """

    rule: Rule = "keep"
    max_age: int = 0
    inner_steps: int = 1

    def stated(self, tokens: int, steps: int, age: int) -> tuple[int, int]:
        """Tokens and steps that a peer states of a contribution of that age; some where it has some."""
        if self.rule != "discount" or not age:
            return tokens, steps
        return max(tokens // (1 + age), min(tokens, 1)), max(steps // (1 + age), min(steps, 1))

    def drops(self, age: int) -> bool:
        """Whether what has come to that age is dropped."""
        return self.rule == "drop" and age > self.max_age

    def share(self, age: int, length: int, since: int) -> float:
        """The share of its Δ that a contribution of that age is shortened to, 1 where it is not.

        length: of Δ, in inner steps, those by which it has been shortened before not counted. since: the inner steps
        since the last commit of its fragment, which are more than H after void rounds: then others are longer, too.
        """
        if self.rule != "shorten" or not age:
            return 1.0
        return min(max(self.inner_steps, since) / max(length, 1), 1.0)


def shorten(theta: NDArray[np.float32], params: NDArray[np.float32], share: float) -> None:
    """θ ← g + share · (θ - g), in place: of Δ = g - θ that share is left. One rounding an operation."""
    theta -= params
    theta *= np.float32(share)
    theta += params
