"""Matrices as factors in a swarm: everybody decodes the same, whatever comes and goes, and what is wrong is refused."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from atoll.protocol import calling
from atoll.protocol.messages import Seal

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


def adaptive(**changes: Any) -> dict[str, Any]:
    """A run whose noise is small beside the way to its target, which is a matrix of few directions: the rank falls."""
    shapes = {"layers": [[600], [400]], "columns": [20, 20]}
    return {
        "codec": {"name": "lowrank", "rank": 5, "window": 3, "kept": 0.9},
        "state": {"chunk": 1024, **shapes},
        "budget": {"rounds": 14},
        **changes,
    }


def ranks(swarm: Swarm) -> list[tuple[int, int]]:
    """Outer step and rank of the rounds of the best chain that averaged something."""
    chain = [commit.body for commit in swarm.chain(swarm.best_head().id)]
    return [(body.outer_step, body.seal.rank) for body in chain if body.chunks]


@pytest.mark.parametrize("fragments", [1, 2])
def test_the_rank_follows_the_momentum_and_stands_in_the_commits(fragments: int) -> None:
    swarm = build(3, **adaptive(round={"fragments": fragments}))
    run(swarm)
    assert swarm.named("refused") == swarm.named("void") == []
    found = ranks(swarm)
    assert len(found) == 14 * fragments + fragments - 1
    assert all(rank == 5 for step, rank in found if step <= 3 * fragments), "the manifest's, until the first window"
    assert min(rank for _, rank in found) < 5
    told = [fields["rank"] for _, name, fields in swarm.named("seal") if name == "p0"]
    assert set(told) == {rank for _, rank in found}
    for (_, before), (step, rank) in pairwise(found):
        assert rank == before or (step - 1) % (3 * fragments) == 0, "it changes after a window alone"
    assert len({swarm.life(f"p{i}").peer.replica.params.tobytes() for i in range(3)}) == 1


def test_a_joiner_and_a_restarted_peer_know_the_rank_in_force() -> None:
    swarm = build(3, **adaptive(budget={"rounds": 30}))

    async def reached(step: int) -> None:
        while swarm.best_head().outer_step < step and swarm.network.loop.time() < 900:
            await asyncio.sleep(0.2)

    async def main() -> None:
        await reached(8)
        swarm.add("late")
        await reached(16)
        swarm.crash("late")
        await asyncio.sleep(3.0)
        swarm.restart("late")
        # all of them at once, so that nobody is told
        await reached(21)
        for name in ("p0", "p1", "p2", "late"):
            swarm.crash(name)
        await asyncio.sleep(3.0)
        for name in ("p0", "p1", "p2", "late"):
            swarm.restart(name)
        await reached(30)
        await asyncio.sleep(10.0)

    swarm.network.run(main())
    assert swarm.violations == []
    assert swarm.named("refused") == []
    assert swarm.best_head().outer_step == 30
    assert len({swarm.life(name).peer.replica.params.tobytes() for name in ("p0", "p1", "p2", "late")}) == 1
    contributed = [f["outer_step"] for _, _, f in swarm.named("commit") if f["contributors"].get("sim-late", 0) > 0]
    assert min(contributed) < 16
    assert max(contributed) > 24


def test_rounds_become_shorter_as_the_rank_falls() -> None:
    swarm = build(3, steps={}, **adaptive(round={"inner_steps": 40, "least_steps": 10}))
    run(swarm)
    manifest = swarm.manifest
    chain = [commit.body for commit in swarm.chain(swarm.best_head().id) if commit.body.chunks]
    for body in chain:
        due = manifest.inner_steps(body.seal.rank)
        done = max(member.steps for member in body.seal.members)
        assert due <= done <= due + 3
    assert min(manifest.inner_steps(body.seal.rank) for body in chain) < 40


def test_a_seal_with_another_rank_than_the_one_in_force_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that says another is held to be hostile, and the others go on without it."""
    swarm = build(3, **adaptive())
    honest = calling.make_seal

    def lie(*args: Any, **named: Any) -> Seal:
        if named["coordinator"] == "sim-p0":
            named["rank"] = max(named["rank"] - 1, 1)
        return honest(*args, **named)

    monkeypatch.setattr("atoll.protocol.coordinating.make_seal", lie)
    swarm.ignored.add("p0")
    run(swarm, names=["p1", "p2"], limit=900)
    blamed = [fields for _, name, fields in swarm.named("refused") if name != "p0"]
    assert blamed
    assert {(fields["peer"], fields["fault"]) for fields in blamed} == {("sim-p0", "hostile")}
    assert any("in force" in fields["reason"] for fields in blamed)
