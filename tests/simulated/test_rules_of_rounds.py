"""What rounds may go by besides tokens and steps, on the protocol itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from atoll.protocol.island import Snapshot

from .faults import Chaos
from .swarm import Swarm
from .test_swarm import build, run

STEP_TOKENS = 40
"""Of the simulated islands: four units of ten."""
SPEEDS = {"p2": 0.4, "p3": 0.05}
"""Seconds a step, where the others take 0.1."""


def outer_steps(swarm: Swarm) -> list[tuple[float, int, list[int]]]:
    """When each outer step of the final chain was first applied, its averaged tokens, and its members' steps."""
    chain = swarm.chain(swarm.best_head().id)
    found, before = [], 0
    for commit in chain:
        body = commit.body
        if body.chunks:
            at = swarm.committed_at[next(i for i, known in swarm.commits.items() if known is commit)]
            found.append((at, body.tokens - before, [member.steps for member in body.seal.members]))
        before = body.tokens
    return found


@pytest.mark.parametrize("rule", ["tokens", "tokens2/steps", "equal"])
def test_a_swarm_weighs_by_the_manifests_rule(rule: str) -> None:
    """Two of four train at a quarter of the others' pace. The swarm's judge computes every mean anew, by the rule."""
    swarm = build(4, seed=7, steps={"p2": 0.4, "p3": 0.4}, round={"weights": rule}, budget={"rounds": 6})
    run(swarm)
    chain = [commit.body for commit in swarm.chain(swarm.best_head().id) if commit.body.chunks]
    assert len(chain) == 6
    assert any(len({member.weight for member in body.seal.members if member.weight}) > 1 for body in chain)
    # Totals go by tokens, whatever the weights are.
    assert chain[-1].tokens == sum(member.weight for body in chain for member in body.seal.members)


@pytest.mark.parametrize("fragments", [1, 2])
def test_rounds_by_the_tokens_of_the_swarm(fragments: int) -> None:
    """A round holds what was asked for, and what was made while it was told and called; the slow bring what they
    have."""
    every = 4 * 20 * STEP_TOKENS
    rules = {"by": "tokens", "every": every, "grace": 0.0, "fragments": fragments}
    swarm = build(4, seed=3, steps=SPEEDS, round=rules, budget={"rounds": 8})
    run(swarm)
    rounds = outer_steps(swarm)
    assert len(rounds) == 8 * fragments + fragments - 1
    # All four make 42.5 steps a second, and a report may be 0.8 s old.
    late = 42.5 * STEP_TOKENS * 1.5
    for _, tokens, steps in rounds[2 * fragments : 8 * fragments]:
        assert every <= tokens * fragments <= every + late * fragments, tokens
        assert len(steps) == 4
        assert max(steps) > 4 * min(steps) > 0


@pytest.mark.parametrize("fragments", [1, 2])
def test_rounds_by_time(fragments: int) -> None:
    """One outer step every so many seconds, whatever was done until then."""
    every, silence = 6.0, 2.0
    rules = {"by": "time", "every": every, "grace": 0.0, "fragments": fragments}
    swarm = build(4, seed=3, steps=SPEEDS, round=rules, budget={"rounds": 8})
    run(swarm)
    rounds = outer_steps(swarm)
    assert len(rounds) == 8 * fragments + fragments - 1
    gaps = [later - sooner for (sooner, _, _), (later, _, _) in pairwise(rounds[: 8 * fragments])]
    assert all(every / fragments <= gap <= every / fragments + silence for gap in gaps), gaps
    for _, _, steps in rounds[2 * fragments : 8 * fragments]:
        assert len(steps) == 4
        assert max(steps) > 4 * min(steps) > 0


@pytest.mark.parametrize(
    "rule", [{"by": "tokens", "every": 3200}, {"by": "time", "every": 5.0}], ids=["tokens", "time"]
)
@pytest.mark.parametrize("fault", ["crash", "freeze"])
def test_nobody_waits_for_a_dead_coordinator(rule: dict[str, object], fault: str) -> None:
    """Whoever leads dies in the middle of training, again and again: the others' rounds come within the bound."""
    swarm = build(5, seed=11, round={**rule, "grace": 0.0}, budget={"rounds": 12})
    loop, silence = swarm.network.loop, 2.0
    struck: list[str] = []

    def strike(name: str, event: str, fields: dict[str, object]) -> None:
        head = swarm.life(name).peer.head
        if event != "digest" or head.outer_step not in (3, 6, 9) or len(struck) >= head.outer_step // 3:
            return
        first = swarm.name_of(swarm.life(name).peer._succession.ordered()[0])
        struck.append(first)
        if fault == "crash":
            loop.kernel_at(loop.time() + 1.0, swarm.crash, first)
            loop.kernel_at(loop.time() + 15.0, swarm.restart, first)
        else:
            loop.kernel_at(loop.time() + 1.0, swarm.hosts[first].freeze)
            loop.kernel_at(loop.time() + 15.0, swarm.hosts[first].thaw)

    swarm.hooks.append(strike)
    run(swarm)
    assert len(struck) == 3
    rounds = outer_steps(swarm)
    gaps = [later - sooner for (sooner, _, _), (later, _, _) in pairwise(rounds)]
    # 5 peers make 10 x 5 x 40 tokens a second, four of them 1600.
    due = 5.0 if rule["by"] == "time" else 3200 / 1200
    assert max(gaps) < due + 4 * silence + 3 * silence, gaps


def test_rounds_by_tokens_when_all_samples_are_used_up() -> None:
    """The swarm cannot make as many tokens as a round asks for, since nobody is leased so much: rounds come all the
    same, when nobody can go on."""
    rules = {"by": "tokens", "every": 40_000, "grace": 0.0, "first_lease": 80, "max_lease": 80, "weight_cap": 20_000}
    swarm = build(3, seed=2, round=rules, budget={"rounds": 5})
    run(swarm)
    assert len(outer_steps(swarm)) == 5


@pytest.mark.parametrize("by", ["tokens", "time"])
def test_a_liar_makes_no_more_rounds_than_the_cap_allows(by: str) -> None:
    """Reports are claims: one peer that states a thousand times its tokens counts for weight_cap in the sum, and for
    nothing in the time."""
    every, cap = (9_000 if by == "tokens" else 6.0), 4_000
    rules = {"by": by, "every": every, "grace": 0.0, "weight_cap": cap, "first_lease": 400, "max_lease": 1600}
    swarm = build(4, seed=5, round=rules, budget={"rounds": 6})

    def lie(name: str, event: str, fields: dict[str, object]) -> None:
        peer = swarm.life("p1").peer if swarm.lives["p1"] else None
        if peer is not None and not getattr(peer, "lies", False):
            honest = peer._reports.own
            peer.lies = True  # type: ignore[attr-defined]
            peer._reports.own = lambda: msgspec.structs.replace(honest(), tokens=10**9)  # type: ignore[method-assign]

    swarm.hooks.append(lie)
    run(swarm)
    rounds = outer_steps(swarm)
    if by == "tokens":
        assert all(tokens >= every - cap for _, tokens, _ in rounds), rounds
    else:
        assert all(later - sooner >= every for (sooner, _, _), (later, _, _) in pairwise(rounds))


RADIAL: dict[str, dict[str, object]] = {"round": {"average": "radial"}, "state": {"embeddings": [0, 5]}}


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("codec", ["float32", "int8", "int4"])
def test_a_swarm_merges_norms_and_directions(codec: str, fragments: int) -> None:
    """The judge computes each mean anew from what was brought, norms and directions apart."""
    rules = {**RADIAL["round"], "fragments": fragments}
    swarm = build(
        4, seed=1, steps={"p2": 0.4, "p3": 0.3}, round=rules, state=dict(RADIAL["state"]), codec={"name": codec},
        budget={"rounds": 6},
    )  # fmt: skip
    swarm.add("archive", trains=False)
    swarm.network.loop.kernel_at(7.0, swarm.add, "late")
    run(swarm)
    assert len(outer_steps(swarm)) == 6 * fragments + fragments - 1
    assert len({swarm.life(f"p{i}").peer.replica.params.tobytes() for i in range(4)}) == 1
    told = {name: {f["commit"]: f["digest"] for _, n, f in swarm.named("digest") if n == name} for name in swarm.hosts}
    assert len(told["archive"]) > 6 * fragments
    assert len(told["late"]) > 1, "it has come to a state of the chain by log and checkpoint"


def test_a_contribution_a_thousand_times_as_long_as_the_others_is_known_by_its_peer() -> None:
    """Its training has diverged, or it wants to decide how far the model moves. It counts as a hundred times."""
    swarm = build(4, seed=1, round=RADIAL["round"], state=dict(RADIAL["state"]), budget={"rounds": 4})

    async def strike() -> None:
        life = swarm.life("p3")
        assert life.island is not None
        freeze, island, replica = life.island.freeze, life.island, life.peer.replica

        async def longer() -> Snapshot:
            island._advance()
            island.local[:] = replica.params + np.float32(1000) * (island.local - replica.params)
            return await freeze()

        island.freeze = longer  # type: ignore[method-assign]

    def look(name: str, event: str, fields: dict[str, Any]) -> None:
        if (name, event) == ("p3", "digest") and fields["outer_step"] == 2:
            asyncio.get_running_loop().create_task(strike())

    swarm.hooks.append(look)
    run(swarm)
    named = {
        (name, f["peer"], f["fault"]) for _, name, f in swarm.named("refused") if "norm of a tensor" in f["reason"]
    }
    assert named == {(f"p{i}", "sim-p3", "hostile") for i in range(3)}
    assert any("own contribution" in f["message"] for _, name, f in swarm.named("warning") if name == "p3")
    assert all(f["fault"] == "hostile" and f["peer"] == "sim-p3" for _, _, f in swarm.named("refused"))


@pytest.mark.parametrize("seed", range(4))
def test_norms_and_directions_under_faults(seed: int) -> None:
    """Slow links, crashes of reducers, frozen peers: all that come through stay at one state, and the judge computes
    each mean anew."""
    rules = {**RADIAL["round"], "silence": 1.0, "max_group": 6}
    swarm = build(6, seed=seed, round=rules, state=dict(RADIAL["state"]), budget={"rounds": 14})
    kinds = ("crash", "freeze", "slow", "cut")
    chaos = Chaos(swarm, seed, every=1.5, back=(1.0, 5.0), down=2, kinds=kinds, split=(3.0, 6.0))

    async def main() -> None:
        # Who is down when the others leave finds nobody to tell it the end: two may be.
        while sum(swarm.life(name).done for name in swarm.lives) < 4:
            assert swarm.network.loop.time() < 900, swarm.heads()
            await asyncio.sleep(0.5)

    swarm.network.run(main())
    swarm.check_samples()
    assert swarm.violations == []
    assert chaos.log
    assert len(outer_steps(swarm)) == 14


@pytest.mark.parametrize("factor", [1e-3, float("nan"), -1.0, 1e30])
def test_who_states_false_norms_is_left_out(factor: float) -> None:
    """It is named, and the round goes on without it."""
    swarm = build(4, seed=4, round=dict(RADIAL["round"]), state={"embeddings": [5]}, budget={"rounds": 5})
    liar = str(swarm.hosts["p3"].peer_id)

    def lie(name: str, event: str, fields: dict[str, object]) -> None:
        replica = swarm.life("p3").peer.replica if swarm.lives["p3"] else None
        if replica is None or hasattr(replica, "lies"):
            return
        honest, part = replica.sender, swarm.manifest.merging

        def sender(theta: np.ndarray, fragment: int = 0) -> Callable[[int], bytes]:
            send = honest(theta, fragment)

            def false(index: int) -> bytes:
                data, count = bytes(send(index)), 4 * (part.pieces(index) or 0)
                norms = np.frombuffer(data[:count], "<f4") * np.float32(factor)
                return norms.astype("<f4").tobytes() + data[count:]

            return false

        replica.lies = True  # type: ignore[attr-defined]
        replica.sender = sender  # type: ignore[method-assign]

    swarm.hooks.append(lie)
    run(swarm)
    hostile = {
        name for _, name, fields in swarm.named("refused") if (fields["peer"], fields["fault"]) == (liar, "hostile")
    }  # fmt: skip
    assert hostile == {"p0", "p1", "p2"}, "by whoever reduces a part"
    named = {fields["peer"] for _, name, fields in swarm.named("refused") if name != "p3"}
    assert named == {liar}
    assert len(outer_steps(swarm)) == 5
