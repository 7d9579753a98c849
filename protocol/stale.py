"""Contributions that have missed rounds: what they count for, or whether they are dropped.

A peer that no commit averaged goes on with what it has: its Δ moves along with the global parameters, so it stays a
difference from the newest of them, but the older of its steps were made from parameters that others have long left.
Decoupled DiLoCo drops what comes late for a merged round (arXiv 2604.21428); asynchronous federated learning discounts
it by its age (arXiv 1903.03934, where the share is (1 + age) to a negative power).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal["keep", "discount", "drop"]
HALF = 0.5
"""A commit that averages less of a contribution than this has missed it."""


@dataclass(frozen=True)
class Stale:
    """The rule of one run. *Age*: rounds of the fragment that a contribution has missed, 0 of a fresh one.

    keep: it counts in full. discount: its tokens and steps over 1 + age. drop: it is dropped as soon as it is older
    than ``max_age``.
    """

    rule: Rule = "keep"
    max_age: int = 0

    def stated(self, tokens: int, steps: int, age: int) -> tuple[int, int]:
        """Tokens and steps that a peer states of a contribution of that age; some where it has some."""
        if self.rule != "discount" or not age:
            return tokens, steps
        return max(tokens // (1 + age), min(tokens, 1)), max(steps // (1 + age), min(steps, 1))

    def drops(self, age: int) -> bool:
        """Whether what has come to that age is dropped."""
        return self.rule == "drop" and age > self.max_age
