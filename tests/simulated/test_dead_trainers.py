"""What the others see of a trainer that dies: nothing but a smaller roster, whoever's it is."""

from __future__ import annotations

from typing import Any

import pytest

from .swarm import Swarm
from .test_swarm import SILENCE, build, run

STEP = 0.1


@pytest.mark.parametrize("overlap", [0, 5])
@pytest.mark.parametrize("leads", [True, False])
def test_a_trainer_dies_as_its_peer_calls(leads: bool, overlap: int) -> None:
    """Where it is the coordinator's, another calls at once. Found with real processes: a swarm of eight stood for three
    times T, until all had used up their samples."""
    swarm = build(4, seed=5, round={"grace": 0.0, "overlap": overlap}, budget={"rounds": 8})
    struck: list[str] = []

    def strike(name: str, event: str, fields: dict[str, Any]) -> None:
        if event == "digest" and fields["outer_step"] == 3 and not struck and leader(swarm) is not None:
            order = swarm.life(name).peer._succession.ordered()
            victim = swarm.name_of(order[0] if leads else order[-1])
            island = swarm.life(victim).island
            assert island is not None
            island.fail_next = True
            struck.append(victim)

    swarm.hooks.append(strike)
    run(swarm)
    assert any("did not freeze" in fields["message"] for _, name, fields in swarm.named("warning") if name in struck)
    times = {fields["outer_step"]: at for at, _, fields in reversed(swarm.named("commit"))}
    rounds = [times[step + 1] - times[step] for step in range(2, 6)]
    assert rounds[1] < rounds[0] + SILENCE / 2, rounds
    assert swarm.named("void") == []


def leader(swarm: Swarm) -> str | None:
    """Who is to call next, once all are at one head and agree."""
    first = {lives[-1].peer._succession.ordered()[0] for lives in swarm.lives.values()}
    heads = {lives[-1].peer.head for lives in swarm.lives.values()}
    return swarm.name_of(next(iter(first))) if len(first) == len(heads) == 1 else None
