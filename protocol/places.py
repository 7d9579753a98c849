"""Places in the chain: which outer step a round is for, and how many rounds may be in flight at once.

Fragments take turns from outer step to outer step, so the fragment of a round and its base say which outer step it is
meant to be. Where the overlap is longer than it is from one round to the next (τ > H / P), rounds for the outer steps
that follow may be called, sealed and reduced while earlier ones are in flight; each is signed when its turn has come.
Pure functions: every peer must come to the same answer (docs/protocol.md, "Several rounds in flight").
"""

from __future__ import annotations

from .layout import ChunkLayout
from .manifest import Manifest
from .messages import Head, Seal


def place(base: Head, fragment: int, layout: ChunkLayout) -> int:
    """The outer step of the head that a round's commit has to stand on: the first from its base on with which it is
    that fragment's turn."""
    return base.outer_step + (fragment - base.outer_step) % layout.fragments


def place_of(seal: Seal, layout: ChunkLayout) -> int:
    """The place of a sealed roster."""
    return place(seal.base, seal.fragment, layout)


def reach(outer_step: int, manifest: Manifest) -> int:
    """How many places, counted from a head with so many outer steps, may have rounds in flight, that head's own
    included. From the last regular round on (and in the rounds in which a run winds up) nothing runs ahead, so there
    is one round at a time."""
    return max(min(manifest.round.in_flight, manifest.regular_steps - 1 - outer_step), 1)
