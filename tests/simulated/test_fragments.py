"""Several fragments with rounds of their own, on the simulated network: exact, in turn, and a share of the traffic."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from atoll.protocol.commits import check_body, check_seal
from atoll.protocol.control import Call
from atoll.protocol.errors import PeerMisbehaved, RoundVoid
from atoll.protocol.messages import Commit, hash_of
from atoll.protocol.round import Round

from .faults import Chaos
from .island import SimulatedIsland
from .swarm import Swarm, manifest, start_params
from .test_overlap import ALL, PLAIN, island_of, trained
from .test_swarm import build, run

THREE = {"fragments": 3}


def three(**changes: Any) -> dict[str, Any]:
    """Sections of a manifest of three fragments with a round every 7 steps."""
    changes["round"] = {"inner_steps": 21, **THREE, **changes.get("round", {})}
    return changes


@pytest.mark.parametrize("packing", ["balanced", "strided"])
@pytest.mark.parametrize(
    ("merge", "tau"),
    [("carry", 0), ("carry", 3), ("carry", 7), ("eager", 3), ("eager", 7), ("delay", 3), ("delay", 7)],
)
@pytest.mark.parametrize("aborted", [0.0, 0.4])
def test_one_trainer_with_a_plain_outer_step_equals_local_training(
    monkeypatch: pytest.MonkeyPatch, merge: str, tau: int, aborted: float, packing: str
) -> None:
    """Outer lr 1, μ 0, float32, beside a peer that brings nothing, so that rounds take time; some rounds come to
    nothing after all is averaged. Once the run has wound up, the global parameters are those of plain training. (The
    delay trains from another point, so for it the steps must not depend on that.)"""
    if merge == "delay":
        monkeypatch.setattr(SimulatedIsland, "pull", 0.0)
    rules = {"quorum": 1, "overlap": tau, "merge": merge, "packing": packing, "silence": 1.0}
    sections = three(round=rules, budget={"rounds": 4}, **PLAIN)
    swarm = Swarm(manifest(**sections), latency=0.1, steps={"p1": 3000.0})
    finish, dice, drawn = Round.run, np.random.default_rng(tau), dict[bytes, bool]()

    async def draw(current: Round) -> Commit:
        weighed = any(member.weight for member in current.seal.members)
        lost = drawn.setdefault(current.roster_id, weighed and bool(dice.random() < aborted))
        if lost:
            # Both stay long enough for a round in flight, and sign nothing.
            current.around.obsolete = lambda: True
        return await finish(current)

    monkeypatch.setattr(Round, "run", draw)
    for name in ("p0", "p1"):
        swarm.add(name)
    run(swarm, limit=900)
    island, replica = island_of(swarm, "p0"), swarm.life("p0").peer.replica
    assert swarm.best_head().outer_step == 4 * 3 + 2
    assert bool(swarm.named("void")) == any(drawn.values()) == (aborted > 0)
    assert (island.in_flight > 0) == (tau > 0)
    assert island.count == island.batch * (len(trained_steps(island)))
    for theta in (island.local, replica.params):
        assert np.abs(theta - trained(island)).max() < 1e-6
    # Every token of the peer that trained stands in the run's total, and stands there once.
    assert abs(replica.position.tokens - 10 * island.count) <= len(swarm.commits)
    assert swarm.life("p0").peer.contributed == replica.position.tokens


def trained_steps(island: Any) -> list[int]:
    used = [unit for span in island.used for unit in span]
    return used[:: island.batch]


def test_fragments_take_turns_and_each_moves_in_its_own_rounds_alone() -> None:
    swarm = build(3, **three(budget={"rounds": 4}))
    before: dict[str, np.ndarray] = {}

    def look(name: str, event: str, fields: dict[str, Any]) -> None:
        if name != "p0" or event != "commit":
            return
        peer = swarm.life("p0").peer
        now, old = peer.replica.params.copy(), before.get("p0", start_params())
        part = swarm.layout.fragment(fields["fragment"])
        inside = np.zeros(len(now), bool)
        for span in map(part.span, range(part.count)):
            inside[span] = True
        assert (now[~inside] == old[~inside]).all()
        assert (now[inside] != old[inside]).any() == bool(fields["tokens"] > 0 and fields["outer_step"] > 0)
        before["p0"] = now

    swarm.hooks.append(look)
    run(swarm)
    chain = [commit.body for commit in swarm.chain(swarm.best_head().id)]
    averaged = [body for body in chain if body.chunks]
    assert [body.fragment for body in averaged] == [step % 3 for step in range(4 * 3 + 2)]
    assert [body.outer_step for body in averaged] == list(range(1, 4 * 3 + 3))
    parts = [swarm.layout.fragment(fragment).count for fragment in range(3)]
    assert [len(body.chunks) for body in averaged] == [parts[body.fragment] for body in averaged]
    assert len(set(swarm.heads().values())) == 1
    assert swarm.loss("p0") < 0.4 * float(np.mean((start_params() - 1.0) ** 2))


def test_a_fragment_has_a_round_every_h_steps_and_all_of_them_together_one_every_third() -> None:
    swarm = build(3, steps={}, **three(budget={"rounds": 5}))
    run(swarm)
    steps: dict[int, list[int]] = {fragment: [] for fragment in range(3)}
    regular = [c.body for c in swarm.chain(swarm.best_head().id) if c.body.chunks and c.body.outer_step <= 15]
    for body in regular:
        steps[body.fragment].append(max(member.steps for member in body.seal.members))
    for fragment, (first, *later) in steps.items():
        assert 7 * (fragment + 1) <= first <= 7 * (fragment + 1) + 3
        assert all(21 <= count <= 24 for count in later)
    # What is trained between two rounds, without the pause of each: a step takes 0.1 s.
    gaps = [b - a for a, b in pairwise(sorted(swarm.committed_at[hash_of(body)] for body in regular))]
    assert 0.7 <= min(gaps) <= max(gaps) < 2.1


@pytest.mark.parametrize("tau", [0, 7])
def test_the_peak_of_the_traffic_falls_by_the_number_of_fragments(tau: int) -> None:
    """The same model, the same inner steps, float32: bytes of the largest round, and of all together."""
    largest: dict[int, int] = {}
    total: dict[int, int] = {}
    for fragments in (1, 3):
        layers = {"layers": [[10_000] * 4] * 3} if fragments > 1 else {}
        sections = {
            "round": {"inner_steps": 21, "fragments": fragments, "overlap": tau}, "budget": {"rounds": 4},
            "codec": {"name": "float32"}, "state": {"chunk": 1024, **layers},
        }  # fmt: skip
        swarm = Swarm(manifest(parameters=120_000, **sections), latency=0.02)
        sent: list[int] = []

        def count(name: str, event: str, fields: dict[str, Any], swarm: Swarm = swarm, sent: list[int] = sent) -> None:
            if name == "p0" and event == "commit":
                sent.append(swarm.hosts["p0"].bytes_sent)

        swarm.hooks.append(count)
        for index in range(3):
            swarm.add(f"p{index}")
        run(swarm)
        largest[fragments] = max(b - a for a, b in pairwise([0, *sent]))
        total[fragments] = sent[-1]
    # A round's messages are the same for any size; with fragments of one size it falls by nearly three.
    assert largest[3] < largest[1] / 2.7
    # Not less is sent in all: a share of the model as often, and once more at the end.
    assert 1.0 < total[3] / total[1] < (4 + 2 / 3) / 4 * 1.1


@pytest.mark.parametrize("merge", ALL)
def test_every_rule_of_overlap(merge: str) -> None:
    swarm = build(3, **three(round={"overlap": 5, "merge": merge}, budget={"rounds": 5}))
    run(swarm)
    swarm.check_samples()
    assert swarm.violations == []
    assert len(set(swarm.heads().values())) == 1
    assert swarm.loss("p0") < 0.4 * float(np.mean((start_params() - 1.0) ** 2))
    lost = [fields["lost_tokens"] for _, _, fields in swarm.named("commit") if "lost_tokens" in fields]
    assert (sum(lost) > 0) == (merge == "overwrite")


def test_a_void_round_is_of_the_fragment_that_the_next_one_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = build(3, **three(budget={"rounds": 4}))
    finish, failed = Round.run, set()

    async def fail(current: Round) -> Commit:
        commit = await finish(current)
        if current.seal.round == 5:
            failed.add((current.seal.fragment, current.around.transport.peer_id))
            raise RoundVoid("as if the commit had not come")
        return commit

    monkeypatch.setattr(Round, "run", fail)
    run(swarm)
    assert len({fragment for fragment, _ in failed}) == 1
    assert len(failed) == 3
    # The votes were there, so the void round has committed in the end; what it averaged has left the parameters once.
    assert [c.body.round for c in swarm.chain(swarm.best_head().id)][:6] == [1, 2, 3, 4, 5, 6]


def test_a_peer_that_comes_back_replays_the_rounds_of_all_fragments() -> None:
    swarm = build(3, **three(budget={"rounds": 6}))

    def strike(name: str, event: str, fields: dict[str, Any]) -> None:
        if name == "p1" and event == "commit" and fields["outer_step"] == 8 and len(swarm.lives["p1"]) == 1:
            loop = swarm.network.loop
            loop.kernel_at(loop.time() + 0.3, swarm.restart, "p1")

    swarm.hooks.append(strike)
    run(swarm)
    swarm.check_samples()
    assert swarm.violations == []
    assert len(swarm.lives["p1"]) == 2
    resumed = [fields for _, name, fields in swarm.named("resumed") if name == "p1"]
    assert resumed[0]["outer_step"] >= 8
    late = [f for _, name, f in swarm.named("commit") if name == "p1" and f["outer_step"] > 14]
    assert any(fields["contributors"].get("sim-p1") == 1 for fields in late)
    assert len(set(swarm.heads().values())) == 1


def test_whoever_joins_takes_part_in_every_fragment() -> None:
    swarm = build(3, **three(round={"overlap": 5}, budget={"rounds": 8}))

    def join(name: str, event: str, fields: dict[str, Any]) -> None:
        if event == "commit" and fields["outer_step"] == 10 and "late" not in swarm.hosts:
            swarm.hosts["late"] = swarm.hosts["p0"]  # taken, until it is really added
            swarm.network.loop.kernel_at(swarm.network.loop.time(), swarm.add, "late")

    swarm.hooks.append(join)
    run(swarm, names=["p0", "p1", "p2"])
    found = {f["fragment"] for _, _, f in swarm.named("commit") if f["contributors"].get("sim-late", 0) > 0}
    assert found == {0, 1, 2}


def test_what_is_of_another_fragment_than_the_one_in_turn_is_refused() -> None:
    """A call, a seal, a body: numbers beyond the last fragment included."""
    swarm = build(2, **three(budget={"rounds": 3}))
    sent: list[int] = []

    def lie(name: str, event: str, fields: dict[str, Any]) -> None:
        if (name, event) == ("p0", "seal") and fields["round"] in (3, 4):
            peer = swarm.life("p0").peer
            fragment = (peer.fragment + 1) % 3 if fields["round"] == 3 else 2**62  # each ends the stream
            sent.append(fragment)
            call = Call(bytes(16), peer.head.round + 1, fragment, peer.head, False)
            peer.messenger.post(swarm.hosts["p1"].peer_id, call)

    swarm.hooks.append(lie)
    run(swarm)
    refused = [f["reason"] for _, name, f in swarm.named("refused") if name == "p1" and "a call for" in f["reason"]]
    assert [int(reason.split()[4]) for reason in refused] == sent
    assert len(sent) == 2

    rules, layout = swarm.manifest, swarm.layout
    commits = swarm.chain(swarm.best_head().id)
    body = next(commit.body for commit in commits if commit.body.chunks)
    for fragment in (body.fragment + 1, 3, 2**62):
        wrong = msgspec.structs.replace(body.seal, fragment=fragment)
        with pytest.raises(PeerMisbehaved, match=f"fragment {fragment} where {body.fragment} is due"):
            check_seal(wrong, rules, layout)
        with pytest.raises(PeerMisbehaved, match="is due"):
            check_body(msgspec.structs.replace(body, fragment=fragment, seal=wrong), rules, layout)
        with pytest.raises(PeerMisbehaved, match="does not fit its roster"):
            check_body(msgspec.structs.replace(body, fragment=fragment), rules, layout)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_all_may_be_lost_while_the_run_winds_up(left: int) -> None:
    """Peers that come back then have nothing to hand over, and no fragment has a round without anything: they train."""
    swarm = build(2, **three(budget={"rounds": 2}))

    def strike(name: str, event: str, fields: dict[str, Any]) -> None:
        if name == "p0" and event == "commit" and fields["outer_step"] == 6 and len(swarm.lives["p0"]) == 1:
            loop = swarm.network.loop
            for victim in ["p0", "p1"][: 2 - left % 2]:
                loop.kernel_at(loop.time() + 0.01 * left, swarm.restart, victim)

    swarm.hooks.append(strike)
    run(swarm, limit=600)
    assert swarm.best_head().outer_step == 2 * 3 + 2
    swarm.check_samples()
    assert swarm.violations == []


@pytest.mark.parametrize("seed", range(6))
def test_chaos(seed: int) -> None:
    merge = [*ALL, "carry"][seed]
    tau = [0, 2, 7][seed % 3] if merge == "carry" else 1 + seed
    packing = ["balanced", "strided"][seed % 2]
    sections = three(round={"overlap": tau, "merge": merge, "packing": packing}, budget={"rounds": 5})
    swarm = build(4 + seed % 3, seed=seed, **sections)
    swarm.add("archive", trains=False)
    chaos = Chaos(swarm, seed, every=4.0)
    run(swarm, limit=900)
    assert len(swarm.commits) >= 5 * 3 + 2
    assert chaos.log
    for lives in swarm.lives.values():
        island = lives[-1].island
        assert island is None or np.isfinite(island.local).all()
