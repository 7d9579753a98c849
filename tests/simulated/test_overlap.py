"""Rounds in flight while peers train, on the simulated network: exact, whatever becomes of the round."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from atoll.protocol.errors import RoundVoid
from atoll.protocol.messages import Commit
from atoll.protocol.round import Round

from .faults import Chaos
from .island import SimulatedIsland, noise
from .swarm import Swarm, manifest, start_params
from .test_swarm import build, run

PLAIN = {"outer": {"lr": 1.0, "momentum": 0.0}, "codec": {"name": "float32"}}
ALL = ["carry", "mix", "overwrite", "eager", "delay"]


def trained(island: SimulatedIsland) -> np.ndarray:
    """What plain training on the samples that the island has used gives."""
    theta = start_params().astype(np.float64)
    used = [unit for span in island.used for unit in span]
    for unit in used[:: island.batch]:
        theta += island.pull * (island.target - theta)
        theta += noise(unit, len(theta))
    return theta


def island_of(swarm: Swarm, name: str) -> SimulatedIsland:
    island = swarm.life(name).island
    assert island is not None
    return island


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize(("merge", "tau"), [("carry", 5), ("carry", 20), ("eager", 5)])
def test_one_trainer_with_a_plain_outer_step_equals_local_training(merge: str, tau: int, aborts: bool) -> None:
    """Beside a peer that brings nothing, so that rounds take time; cut off in every other one of them, in part."""
    rules = {"quorum": 1, "overlap": tau, "merge": merge}
    swarm = Swarm(manifest(round=rules, budget={"rounds": 8}, **PLAIN), latency=0.2, steps={"p1": 3000.0})
    seals: list[str] = []

    def cut(name: str, event: str, fields: dict[str, Any]) -> None:
        if aborts and event == "seal" and len(fields["members"]) == 2 and fields["roster"] not in seals:
            seals.append(fields["roster"])
            if len(seals) % 2 == 0:
                loop, link = swarm.network.loop, swarm.network.cut(["p0"], ["p1"])
                loop.kernel_at(loop.time() + 5.0, link.heal)

    swarm.hooks.append(cut)
    for name in ("p0", "p1"):
        swarm.add(name)
    run(swarm)
    island = island_of(swarm, "p0")
    assert island.in_flight >= (2 if aborts else 7) * min(tau, 8), "a cut-off peer also goes through rounds alone"
    assert bool(swarm.named("void")) == aborts
    # In the last round nothing runs ahead, so that all steps are in the global parameters.
    for theta in (island.local, swarm.life("p0").peer.replica.params):
        assert np.abs(theta - trained(island)).max() < 1e-5


@pytest.mark.parametrize("merge", ALL)
def test_training_goes_on_while_rounds_are_in_flight(merge: str) -> None:
    seconds: dict[int, float] = {}
    for tau in (0, 10):
        rules = {"overlap": tau, "merge": merge if tau else "carry"}
        swarm = Swarm(manifest(round=rules, budget={"rounds": 8}), latency=0.1)
        for index in range(3):
            swarm.add(f"p{index}")
        run(swarm)
        assert len(set(swarm.heads().values())) == 1
        assert swarm.loss("p0") < 0.4 * float(np.mean((start_params() - 1.0) ** 2))
        seconds[tau] = swarm.commit_times()[-1]
        stopped = [fields["stopped"] for _, _, fields in swarm.named("commit") if "stopped" in fields]
        assert (len(stopped) >= 3 * 6) == (tau > 0)
        assert sum(stopped) < 2.0, "and without overlap 0.9 s in every round of each peer"
        lost = [fields["lost_tokens"] for _, _, fields in swarm.named("commit") if "lost_tokens" in fields]
        assert (sum(lost) > 3 * 6 * 10) == (tau > 0 and merge == "overwrite")
    if merge != "overwrite":
        # Some 0.9 s of each 2.9 s were waiting.
        assert seconds[10] < 0.85 * seconds[0]


def test_a_peer_waits_once_it_is_as_far_ahead_as_it_may_be() -> None:
    swarm = Swarm(manifest(round={"overlap": 2}, budget={"rounds": 5}), latency=0.2)
    swarm.add("p0")
    swarm.add("p1")
    run(swarm)
    island = island_of(swarm, "p0")
    in_flight = [f["round"] for _, name, f in swarm.named("seal") if name == "p0" and "stopped" in f]
    assert island.in_flight == 2 * (len(in_flight) - 1), "all but the one without samples"
    stopped = [fields["stopped"] for _, name, fields in swarm.named("commit") if name == "p0" and "stopped" in fields]
    assert min(stopped[1:]) > 0.5


@pytest.mark.parametrize("merge", ["carry", "eager"])
@pytest.mark.parametrize("victim", ["coordinator", "member"])
def test_a_death_in_flight_makes_the_others_wait_no_longer_than_without_overlap(victim: str, merge: str) -> None:
    swarm = build(4, seed=3, round={"overlap": 8, "merge": merge}, budget={"rounds": 9})
    struck: list[str] = []

    def strike(name: str, event: str, fields: dict[str, Any]) -> None:
        if event == "seal" and fields["round"] >= 4 and not struck:
            others = [m.removeprefix("sim-") for m in fields["members"] if m != fields["coordinator"]]
            struck.append(fields["coordinator"].removeprefix("sim-") if victim == "coordinator" else others[0])
            loop = swarm.network.loop
            loop.kernel_at(loop.time() + 0.05, swarm.crash, struck[0])

    swarm.hooks.append(strike)

    async def main() -> None:
        while not struck:
            await asyncio.sleep(0.05)
        while not all(swarm.life(n).done for n in swarm.hosts if n != struck[0]) and swarm.network.loop.time() < 300:
            await asyncio.sleep(0.5)
        assert all(swarm.life(n).done for n in swarm.hosts if n != struck[0])

    swarm.network.run(main())
    swarm.check_samples()
    assert swarm.violations == []
    times = swarm.commit_times()
    voids = len({fields["roster"] for _, _, fields in swarm.named("void")})
    deadline = max(fields["deadline"] for _, _, fields in swarm.named("seal"))
    assert max(b - a for a, b in pairwise(times)) <= (voids + 1) * (deadline + 6.0) + 3.0


@pytest.mark.parametrize("merge", ["carry", "delay"])
def test_an_island_that_dies_while_its_parameters_move_goes_on_from_the_global_ones(merge: str) -> None:
    swarm = build(3, round={"overlap": 5, "merge": merge}, budget={"rounds": 8})

    def die(name: str, event: str, fields: dict[str, Any]) -> None:
        if name == "p1" and event == "seal" and fields["round"] == 4:
            island_of(swarm, "p1").fail_next = True

    swarm.hooks.append(die)
    run(swarm)
    assert any("are lost" in fields["message"] for _, name, fields in swarm.named("warning") if name == "p1")
    assert np.isfinite(island_of(swarm, "p1").local).all()
    late = [f for _, name, f in swarm.named("commit") if name == "p1" and f["round"] > 6]
    assert late
    assert all(fields["contributors"].get("sim-p1") == 1 for fields in late)


def test_a_void_round_that_commits_after_all_when_its_progress_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """p1 misses the commit, and its island dies while the void round is undone: what was frozen is no longer in its
    parameters, and must not be taken out of them when the commit comes."""
    swarm = build(3, round={"overlap": 5, "merge": "delay"}, budget={"rounds": 8})
    finish, missed = Round.run, []

    async def miss(current: Round) -> Commit:
        commit = await finish(current)
        if current.around.transport.peer_id == "sim-p1" and current.seal.round == 4:
            missed.append(current)
            island_of(swarm, "p1").fail_next = True
            raise RoundVoid("as if the commit had not come")
        return commit

    def compare(name: str, event: str, fields: dict[str, Any]) -> None:
        if (name, event) == ("p1", "commit") and fields["round"] == 4:
            assert fields["contributors"]["sim-p1"] == 1
            off.append(float(np.abs(island_of(swarm, "p1").local - swarm.life("p1").peer.replica.params).max()))

    off: list[float] = []
    monkeypatch.setattr(Round, "run", miss)
    swarm.hooks.append(compare)
    run(swarm)
    assert len(missed) == 1
    assert off == [0.0]


def test_a_joiner_takes_part_in_a_run_with_overlap() -> None:
    swarm = build(3, round={"overlap": 10, "merge": "eager"}, budget={"rounds": 16})

    def join(name: str, event: str, fields: dict[str, Any]) -> None:
        if event == "commit" and fields["outer_step"] == 7 and "late" not in swarm.hosts:
            swarm.hosts["late"] = swarm.hosts["p0"]  # taken, until it is really added
            swarm.network.loop.kernel_at(swarm.network.loop.time(), swarm.add, "late")

    swarm.hooks.append(join)
    run(swarm, names=["p0", "p1", "p2"])
    assert [f for _, _, f in swarm.named("commit") if f["contributors"].get("sim-late", 0) > 0]


@pytest.mark.parametrize(("seed", "merge"), list(enumerate([*ALL, "carry"])))
def test_chaos(seed: int, merge: str) -> None:
    swarm = build(4 + seed % 3, seed=seed, round={"overlap": 2 + 4 * (seed % 4), "merge": merge}, budget={"rounds": 10})
    swarm.add("archive", trains=False)
    chaos = Chaos(swarm, seed, every=4.0)
    run(swarm, limit=900)
    assert len(swarm.commits) >= 11
    assert chaos.log
    for lives in swarm.lives.values():
        island = lives[-1].island
        assert island is None or np.isfinite(island.local).all()
