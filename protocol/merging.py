"""How contributions become an average, by the manifest: how much each weighs, and whether directions are averaged.

What a member states in its roster, tokens and inner steps, is what totals, leases and forks go by. The weight in the
average follows from it, so that every peer that sees a roster knows the weights, and no message holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from .radial import Part, Radial

Weights = Literal["tokens", "tokens2/steps", "equal"]


class Stated(Protocol):
    """What a member says of its contribution: tokens (``weight``, 0: none) and inner steps in it."""

    @property
    def weight(self) -> int: ...

    @property
    def steps(self) -> int: ...


@dataclass(frozen=True)
class Merging:
    """Weights by rule.

    ``tokens``: the tokens. ``equal``: 1. ``tokens2/steps``: tokens · tokens / steps (Decoupled DiLoCo,
    arXiv 2604.21428), by which of two contributions of as many tokens the one of fewer and larger steps counts more.

    cap: tokens that a contribution counts for at most, ``round.weight_cap``. inner_steps: H. A statement of tokens is
    at most the cap; one of steps is bounded by it, too, for who states none would weigh everything: a step counts for
    cap / H tokens at most.

    radial: where the tensors lie that are merged by norms and directions; None: all by the weighted mean. fragment:
    the one whose chunks are meant.
    """

    weights: Weights
    cap: int
    inner_steps: int
    radial: Radial | None = None
    fragment: int = 0

    def of(self, fragment: int) -> Merging:
        """The same, for the chunks of that fragment."""
        return self if fragment == self.fragment else replace(self, fragment=fragment)

    @property
    def part(self) -> Part | None:
        """The tensors of the fragment, if they are merged by norms and directions."""
        return Part(self.radial, self.fragment) if self.radial is not None else None

    def pieces(self, index: int) -> int | None:
        """In how many pieces such tensors lie in a chunk; None without norms."""
        return len(self.radial.pieces(self.fragment, index)) if self.radial is not None else None

    @property
    def most_norms(self) -> int:
        """Norms of one contribution to any chunk, at most."""
        return self.radial.most if self.radial is not None else 0

    def weight(self, member: Stated) -> int:
        """The weight of a member's contribution, at least 1 where it has any tokens, else 0."""
        tokens = member.weight
        if not tokens:
            return 0
        if self.weights == "equal":
            return 1
        if self.weights == "tokens":
            return tokens
        least = -(-tokens * self.inner_steps // self.cap)
        return max(tokens * tokens // max(member.steps, least), 1)

    def total(self, members: Sequence[Stated], inside: Sequence[int]) -> int:
        """The sum of the weights of those members, by number."""
        return sum(self.weight(members[i]) for i in inside)
