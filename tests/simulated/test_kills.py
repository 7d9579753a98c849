"""Who dies in a round costs the others T, and once more the round."""

from __future__ import annotations

import functools

import pytest

from .. import kills
from ..kills import Calm, Setting


@functools.cache
def _calm(setting: Setting) -> Calm:
    return kills.calm(setting)


@pytest.mark.parametrize("at", [0.2, 0.6])
@pytest.mark.parametrize("phase", kills.PHASES)
@pytest.mark.parametrize("kind", kills.KINDS)
@pytest.mark.parametrize("victim", kills.VICTIMS)
def test_the_next_commit_comes_within_twice_the_round_and_t(victim: str, kind: str, phase: str, at: float) -> None:
    """Whatever waits for the dead waits from its last word on, one after another or not: the call for its answer, the
    member for the seal, the leader for its averages, and who averages its part anew for its contribution."""
    setting = Setting(4, seed=1)
    found = kills.death(setting, _calm(setting), phase, kind, victim, at)
    print(f"{found.seconds:.1f} s, {found.allowed:.1f} s allowed, {found.of_bound:.0%} of the bound")
    assert found.seconds <= found.allowed
