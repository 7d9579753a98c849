"""Matrices as factors in a swarm: everybody decodes the same, whatever comes and goes, and what is wrong is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from .island import SimulatedIsland
from .swarm import Swarm, manifest, start_params
from .test_overlap import trained
from .test_swarm import build, run


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize(("merge", "tau"), [("carry", 0), ("carry", 5), ("eager", 5)])
def test_all_hold_the_same_and_it_learns(fragments: int, merge: str, tau: int) -> None:
    rules = {"fragments": fragments, "overlap": tau, "merge": merge}
    swarm = build(3, codec={"name": "lowrank"}, round=rules, budget={"rounds": 12})
    run(swarm)
    assert swarm.named("void") == swarm.named("refused") == []
    finals = {swarm.life(f"p{i}").peer.replica.params.tobytes() for i in range(3)}
    assert len(finals) == 1
    replica = swarm.life("p0").peer.replica
    assert np.abs(replica.residual).max() > 0
    assert swarm.loss("p0") < 0.4 * float(np.mean((start_params() - 1.0) ** 2))


def test_a_round_sends_what_the_factors_take() -> None:
    sent: dict[str, int] = {}
    for codec in ("int4", "lowrank"):
        shapes = {"layers": [[120_000]], "columns": [300]} if codec == "lowrank" else {}
        sections = {"codec": {"name": codec}, "state": {"chunk": 1 << 17, **shapes}, "budget": {"rounds": 3}}
        swarm = Swarm(manifest(parameters=120_000, **sections), latency=0.02)
        for i in range(3):
            swarm.add(f"p{i}")
        run(swarm)
        peer = swarm.life("p0").peer
        last = peer.store.chunks(peer.head.id)
        sent[codec] = sum(map(len, last))
    # 2 · (400 + 300) values, and 120,000, of 4.25 bits
    assert sent["lowrank"] < 850 < 60_000 < sent["int4"]


def test_a_joiner_finds_the_directions_in_the_state() -> None:
    """From a checkpoint and from the log, and again after a restart from its own disk."""
    swarm = build(3, codec={"name": "lowrank"}, budget={"rounds": 30})

    async def reached(step: int) -> None:
        while swarm.best_head().outer_step < step and swarm.network.loop.time() < 600:
            await asyncio.sleep(0.2)

    async def main() -> None:
        await reached(8)
        swarm.add("late")
        await reached(16)
        swarm.crash("late")
        await asyncio.sleep(3.0)
        swarm.restart("late")
        await reached(30)
        await asyncio.sleep(10.0)

    swarm.network.run(main())
    assert swarm.violations == []
    names = ["p0", "p1", "p2", "late"]
    assert len({swarm.life(name).peer.replica.params.tobytes() for name in names}) == 1
    contributed = [f["outer_step"] for _, _, f in swarm.named("commit") if f["contributors"].get("sim-late", 0) > 0]
    assert min(contributed) < 16
    assert max(contributed) > 22


def test_what_was_sent_and_what_was_not_is_all_that_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer, outer lr 1, μ 0: what the residual holds is all that the global parameters lack, though of a matrix
    most of what was trained has not been sent. (An average's own codec is int8, and what that loses is lost.)"""
    monkeypatch.setattr(SimulatedIsland, "pull", 0.0)
    shapes: dict[str, Any] = {"layers": [[120, 880]], "columns": [12, 880]}
    swarm = build(
        1, codec={"name": "lowrank", "rank": 2}, state={"chunk": 1024, **shapes}, round={"quorum": 1},
        outer={"optimizer": "nesterov", "lr": 1.0, "momentum": 0.0}, budget={"rounds": 6},
    )  # fmt: skip
    run(swarm)
    replica, island = swarm.life("p0").peer.replica, swarm.life("p0").island
    assert island is not None
    assert replica.residual is not None
    plain, matrix = trained(island), slice(0, 120)
    held = float(np.abs(replica.residual[matrix]).max())
    assert held > 5e-3
    assert np.abs(replica.params - plain)[matrix].max() > 0.9 * held
    np.testing.assert_allclose(replica.params - replica.residual, plain, atol=0.1 * held)
