"""Rounds of several fragments in flight at once, on the simulated network: exact, in order, and nobody idles."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from atoll.protocol.commits import Position, check_body, check_child, check_seal, make_body, parent_of, position_of
from atoll.protocol.control import Call
from atoll.protocol.deadline import deadline_seconds
from atoll.protocol.errors import PeerMisbehaved, RoundVoid
from atoll.protocol.identity import FastSigner
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Body, Commit, Head, Member, Seal, Vote, hash_of, vote_bytes
from atoll.protocol.peer import Peer
from atoll.protocol.places import place_of
from atoll.protocol.round import Round
from atoll.protocol.transport import PeerId

from ..flights import InFlight, measure
from .faults import Chaos
from .island import SimulatedIsland
from .swarm import Swarm, manifest, start_params
from .test_fragments import trained_steps
from .test_overlap import ALL, PLAIN, island_of, trained
from .test_swarm import build, run


def several(**changes: Any) -> dict[str, Any]:
    """Sections of a manifest of three fragments with a round every 7 steps, each for up to 21."""
    changes["round"] = {"inner_steps": 21, "fragments": 3, "overlap": 21, **changes.get("round", {})}
    return changes


@pytest.mark.parametrize(("merge", "tau"), [("carry", 14), ("carry", 21), ("eager", 14), ("delay", 14)])
@pytest.mark.parametrize("aborted", [0.0, 0.4])
def test_one_trainer_with_a_plain_outer_step_equals_local_training(
    monkeypatch: pytest.MonkeyPatch, merge: str, tau: int, aborted: float
) -> None:
    """As with one round in flight, on a network on which a round takes longer than it is to the next."""
    if merge == "delay":
        monkeypatch.setattr(SimulatedIsland, "pull", 0.0)
    rules = {"quorum": 1, "overlap": tau, "merge": merge, "silence": 2.0}
    swarm = Swarm(manifest(**several(round=rules, budget={"rounds": 5}, **PLAIN)), latency=0.25, steps={"p1": 3000.0})
    finish, dice, drawn = Round.run, np.random.default_rng(tau), dict[bytes, bool]()

    async def draw(current: Round) -> Commit:
        weighed = any(member.weight for member in current.seal.members)
        lost = drawn.setdefault(current.roster_id, weighed and bool(dice.random() < aborted))
        if lost:
            current.around.obsolete = lambda: True
        return await finish(current)

    monkeypatch.setattr(Round, "run", draw)
    flights = InFlight(swarm, "p0")
    for name in ("p0", "p1"):
        swarm.add(name)
    run(swarm, limit=900)
    island, replica = island_of(swarm, "p0"), swarm.life("p0").peer.replica
    assert swarm.best_head().outer_step == 5 * 3 + 2
    assert bool(swarm.named("void")) == any(drawn.values()) == (aborted > 0)
    assert flights.most == -(-tau * 3 // 21)
    assert island.count == island.batch * len(trained_steps(island))
    for theta in (island.local, replica.params):
        assert np.abs(theta - trained(island)).max() < 1e-6
    assert abs(replica.position.tokens - 10 * island.count) <= len(swarm.commits)
    assert swarm.life("p0").peer.contributed == replica.position.tokens


def test_rounds_overlap_and_commits_keep_their_order() -> None:
    swarm = Swarm(manifest(**several(budget={"rounds": 6})), latency=0.25)
    flights = [InFlight(swarm, f"p{index}") for index in range(3)]
    for index in range(3):
        swarm.add(f"p{index}")
    run(swarm)
    assert all(watched.most >= 2 for watched in flights)
    chain = [commit.body for commit in swarm.chain(swarm.best_head().id)]
    averaged = [body for body in chain if body.chunks]
    assert [body.fragment for body in averaged] == [step % 3 for step in range(6 * 3 + 2)]
    assert [body.outer_step for body in averaged] == list(range(1, 6 * 3 + 3))
    # Some were sealed before the commit that they stand on was there.
    assert any(body.seal.base.id != body.parent for body in averaged)
    assert all(body.outer_step == place_of(body.seal, swarm.layout) + 1 for body in averaged)
    assert len(set(swarm.heads().values())) == 1
    assert all(len(found) == 1 for found in swarm.digests.values())
    assert swarm.loss("p0") < 0.4 * float(np.mean((start_params() - 1.0) ** 2))


def test_nobody_idles_while_a_round_takes_longer_than_it_is_to_the_next() -> None:
    """Seven steps of 0.1 s from round to round, messages of 0.15 s one way: a round takes ten or eleven steps, and
    three more from its freeze to its seal. On links without a limit, and on links that are filled to a good part."""
    for link in ({"latency": 0.15}, {"latency": 0.08, "bandwidth": 600e3, "parameters": 120_000}):
        one, several_of_them = measure(7, **link), measure(21, **link)
        assert one.most == 1 < several_of_them.most
        assert 0.7 < one.seconds < 1.5 > several_of_them.seconds
        assert one.idle > 0.2
        assert several_of_them.idle < 0.01
        assert several_of_them.between < 0.65 * one.between
        assert several_of_them.link <= 1


@pytest.mark.parametrize("merge", ALL)
def test_every_rule_of_overlap(merge: str) -> None:
    sections = several(round={"overlap": 20, "merge": merge}, budget={"rounds": 8})
    swarm = Swarm(manifest(**sections), latency=0.15)
    flights = InFlight(swarm, "p0")
    for index in range(3):
        swarm.add(f"p{index}")
    run(swarm)
    assert flights.most >= 2
    swarm.check_samples()
    assert swarm.violations == []
    assert len(set(swarm.heads().values())) == 1
    assert swarm.loss("p0") < 0.5 * float(np.mean((start_params() - 1.0) ** 2))


def test_who_was_void_comes_again_before_those_that_were_in_flight_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round for one place comes to nothing while the next is in flight: that waits, and nothing of it is lost."""
    swarm = Swarm(manifest(**several(budget={"rounds": 6})), latency=0.25)
    finish, failed = Round.run, dict[str, int]()

    async def fail(current: Round) -> Commit:
        weighed = any(member.weight for member in current.seal.members)
        if weighed and current.place == 6 and (not failed or failed.get("round") == current.seal.round):
            failed["round"] = current.seal.round
            current.around.obsolete = lambda: True

            async def later() -> None:
                await asyncio.sleep(3.0)
                current.outcome.set_exception(RoundVoid("as if the votes had split"))

            current._spawn(later())
        return await finish(current)

    monkeypatch.setattr(Round, "run", fail)
    for index in range(3):
        swarm.add(f"p{index}")
    run(swarm)
    averaged = [commit.body for commit in swarm.chain(swarm.best_head().id) if commit.body.chunks]
    assert [body.outer_step for body in averaged] == list(range(1, 6 * 3 + 3))
    again, behind = averaged[6], averaged[7]
    assert again.seal.round > failed["round"]
    assert behind.seal.round < again.seal.round, "it was in flight all the time"
    assert {fields["round"] for _, _, fields in swarm.named("void")} == {failed["round"]}


def test_a_void_round_that_commits_after_all_beside_another_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Swarm(manifest(**several(budget={"rounds": 6})), latency=0.25)
    finish, failed = Round.run, set[str]()

    async def miss(current: Round) -> Commit:
        commit = await finish(current)
        if current.place == 7:
            failed.add(str(current.around.transport.peer_id))
            raise RoundVoid("as if the commit had not come")
        return commit

    monkeypatch.setattr(Round, "run", miss)
    for index in range(3):
        swarm.add(f"p{index}")
    run(swarm)
    assert len(failed) == 3
    voids = {fields["roster"] for _, _, fields in swarm.named("void")}
    late = [c for c in swarm.chain(swarm.best_head().id) if swarm.commit_rosters[hash_of(c.body)].hex() in voids]
    assert [commit.body.outer_step for commit in late] == [8]
    swarm.check_samples()
    assert swarm.violations == []


@pytest.mark.parametrize("merge", ["carry", "delay"])
def test_an_island_that_dies_while_its_parameters_move_begins_anew_under_rounds_in_flight(merge: str) -> None:
    swarm = Swarm(manifest(**several(round={"merge": merge}, budget={"rounds": 6})), latency=0.25)
    flights = InFlight(swarm, "p1")
    aloft: list[int] = []

    def die(name: str, event: str, fields: dict[str, Any]) -> None:
        if name == "p1" and event == "seal" and len(flights.aloft) >= 2 and not aloft:
            aloft.append(len(flights.aloft))
            island_of(swarm, "p1").fail_next = True

    swarm.hooks.append(die)
    for index in range(3):
        swarm.add(f"p{index}")
    run(swarm)
    assert aloft
    assert any("are lost" in f["message"] or "did not freeze" in f["message"] for _, _, f in swarm.named("warning"))
    assert np.isfinite(island_of(swarm, "p1").local).all()
    late = [f for _, name, f in swarm.named("commit") if name == "p1" and f["outer_step"] > 12]
    assert any(fields["contributors"].get("sim-p1") == 1 for fields in late)
    swarm.check_samples()
    assert swarm.violations == []


@pytest.mark.parametrize("victim", ["coordinator", "member"])
def test_a_death_with_rounds_in_flight_holds_the_others_up_no_longer_than_one_round(victim: str) -> None:
    swarm = Swarm(manifest(**several(budget={"rounds": 6})), latency=0.15, seed=3)
    struck: list[str] = []

    def strike(name: str, event: str, fields: dict[str, Any]) -> None:
        if event == "seal" and fields["round"] >= 8 and not struck:
            others = [m.removeprefix("sim-") for m in fields["members"] if m != fields["coordinator"]]
            struck.append(fields["coordinator"].removeprefix("sim-") if victim == "coordinator" else others[0])
            loop = swarm.network.loop
            loop.kernel_at(loop.time() + 0.05, swarm.crash, struck[0])

    swarm.hooks.append(strike)
    for index in range(4):
        swarm.add(f"p{index}")

    async def main() -> None:
        while not struck:
            await asyncio.sleep(0.05)
        while not all(swarm.life(n).done for n in swarm.hosts if n != struck[0]) and swarm.network.loop.time() < 300:
            await asyncio.sleep(0.5)
        assert all(swarm.life(n).done for n in swarm.hosts if n != struck[0])

    swarm.network.run(main())
    swarm.check_samples()
    assert swarm.violations == []
    voids = len({fields["roster"] for _, _, fields in swarm.named("void")})
    deadline = max(fields["deadline"] for _, _, fields in swarm.named("seal"))
    times = swarm.commit_times()
    assert max(b - a for a, b in pairwise(times)) <= (voids + 1) * (deadline + 6.0) + 3.0


def test_whoever_joins_or_comes_back_takes_part_in_every_fragment() -> None:
    swarm = Swarm(manifest(**several(budget={"rounds": 9})), latency=0.15)

    def join(name: str, event: str, fields: dict[str, Any]) -> None:
        loop = swarm.network.loop
        if event == "commit" and fields["outer_step"] == 10 and "late" not in swarm.hosts:
            swarm.hosts["late"] = swarm.hosts["p0"]  # taken, until it is really added
            loop.kernel_at(loop.time(), swarm.add, "late")
        if (name, event) == ("p1", "commit") and fields["outer_step"] == 8 and len(swarm.lives["p1"]) == 1:
            loop.kernel_at(loop.time() + 0.3, swarm.restart, "p1")

    swarm.hooks.append(join)
    for index in range(3):
        swarm.add(f"p{index}")
    run(swarm, names=["p0", "p1", "p2"])
    for late in ("late", "p1"):
        found = {
            f["fragment"] for _, _, f in swarm.named("commit")
            if f["outer_step"] > 12 and f["contributors"].get(f"sim-{late}", 0) > 0
        }  # fmt: skip
        assert found == {0, 1, 2}
    swarm.check_samples()
    assert swarm.violations == []
    assert len(set(swarm.heads().values())) == 1


def check_both(body: Body, parent: Position, rules: Manifest, layout: ChunkLayout) -> None:
    check_body(body, rules, layout)
    check_child(body, parent, rules, layout)


def test_what_is_out_of_place_is_refused() -> None:
    """Calls, seals and bodies for a place that is not to be had, or with a parent that cannot be theirs."""
    sections = several(round={"overlap": 14}, budget={"rounds": 4})
    swarm = Swarm(manifest(**sections), latency=0.25)
    sent: list[int] = []

    def lie(name: str, event: str, fields: dict[str, Any]) -> None:
        if (name, event) == ("p0", "commit") and fields["outer_step"] in (4, 5):
            peer = swarm.life("p0").peer
            fragment = (peer.head.outer_step + 2) % 3 if not sent else 2**62
            sent.append(fragment)
            call = Call(bytes(16), peer.head.round + 1, fragment, peer.head, False)
            peer.messenger.post(swarm.hosts["p1"].peer_id, call)

    swarm.hooks.append(lie)
    for index in range(2):
        swarm.add(f"p{index}")
    run(swarm)
    assert len(sent) == 2
    refused = [f["reason"] for _, name, f in swarm.named("refused") if name == "p1" and "a call for" in f["reason"]]
    assert len(refused) >= 1

    rules, layout = swarm.manifest, swarm.layout
    commits = swarm.chain(swarm.best_head().id)
    ahead = next(i for i, c in enumerate(commits) if c.body.chunks and c.body.seal.base.id != c.body.parent)
    body, parent = commits[ahead].body, position_of(commits[ahead - 1].body, hash_of(commits[ahead - 1].body))
    check_child(body, parent, rules, layout)
    assert parent_of(body, rules, layout) == parent.head
    due = body.seal.base.outer_step % 3
    for fragment in ((due + 2) % 3, 3, 2**62):
        wrong = msgspec.structs.replace(body.seal, fragment=fragment)
        with pytest.raises(PeerMisbehaved, match=f"fragment {fragment} where {due} is due, or one of 1 after it"):
            check_seal(wrong, rules, layout)
    with pytest.raises(PeerMisbehaved, match="is due"):
        check_seal(msgspec.structs.replace(body.seal, leases=True), rules, layout)
    for change in (
        {"height": body.height + 1}, {"height": body.seal.base.height + 1}, {"outer_step": body.outer_step + 1},
        {"parent": body.seal.base.id}, {"weight": 0}, {"round": body.round + 1},
    ):  # fmt: skip
        with pytest.raises(PeerMisbehaved):
            check_both(msgspec.structs.replace(body, **change), parent, rules, layout)
    # From the last regular round on there is one at a time.
    last = msgspec.structs.replace(body.seal.base, outer_step=rules.regular_steps - 2)
    wrong = msgspec.structs.replace(body.seal, base=last, fragment=(rules.regular_steps - 1) % 3)
    with pytest.raises(PeerMisbehaved, match="is due"):
        check_seal(wrong, rules, layout)


@pytest.mark.parametrize("left", [0, 1])
def test_all_may_be_lost_while_the_run_winds_up(left: int) -> None:
    swarm = build(2, **several(budget={"rounds": 3}))

    def strike(name: str, event: str, fields: dict[str, Any]) -> None:
        if name == "p0" and event == "commit" and fields["outer_step"] == 9 and len(swarm.lives["p0"]) == 1:
            loop = swarm.network.loop
            for victim in ["p0", "p1"][: 2 - left % 2]:
                loop.kernel_at(loop.time() + 0.01 * left, swarm.restart, victim)

    swarm.hooks.append(strike)
    run(swarm, limit=600)
    assert swarm.best_head().outer_step == 3 * 3 + 2
    swarm.check_samples()
    assert swarm.violations == []


@pytest.mark.parametrize("seed", range(6))
def test_chaos(seed: int) -> None:
    merge = [*ALL, "carry"][seed]
    sections = several(round={"overlap": [21, 14, 20][seed % 3], "merge": merge}, budget={"rounds": 6})
    if merge == "overwrite":
        sections["round"]["overlap"] = 20
    swarm = Swarm(manifest(**sections), seed=seed, latency=[0.02, 0.15][seed % 2])
    for index in range(4 + seed % 3):
        swarm.add(f"p{index}")
    swarm.add("archive", trains=False)
    chaos = Chaos(swarm, seed, every=4.0)
    run(swarm, limit=900)
    assert len(swarm.commits) >= 6 * 3 + 2
    assert chaos.log
    for lives in swarm.lives.values():
        island = lives[-1].island
        assert island is None or np.isfinite(island.local).all()


def test_a_member_that_never_votes_holds_the_next_place_up_no_longer_than_one_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many rounds have followed one another without a pause before, each sealed less than 2T after the last."""
    swarm = Swarm(manifest(**several(budget={"rounds": 24})), latency=0.25)
    finish, mute = Round.run, set[str]()
    flights = InFlight(swarm, "p0")

    async def keep_silent(current: Round) -> Commit:
        if str(current.around.transport.peer_id) == "sim-p1" and current.place >= 50 and not swarm.named("void"):
            mute.add(current.roster_id.hex())
            current.around.obsolete = lambda: True  # it goes on pinging
        return await finish(current)

    monkeypatch.setattr(Round, "run", keep_silent)
    for name in ("p0", "p1"):
        swarm.add(name)
    run(swarm, limit=900)
    rules = swarm.manifest.round
    sealed = [(at, fields) for at, name, fields in swarm.named("seal") if name == "p0"]
    deadline = max(fields["deadline"] for _, fields in sealed)
    longest = deadline + 2 * (rules.in_flight - 1) * rules.silence
    assert flights.most == rules.in_flight == 3
    row = [at for at, fields in sealed if fields["roster"] not in mute][3:40]
    assert max(b - a for a, b in pairwise(row)) < 2 * rules.silence
    began = {fields["roster"]: at for at, fields in sealed}
    voids = {fields["roster"]: at for at, name, fields in swarm.named("void") if name == "p0"}
    assert mute & set(voids)
    assert set(voids) <= mute
    assert all(at - began[roster] <= longest + 0.5 for roster, at in voids.items())
    assert all(fields["bound"] <= longest + 3 * rules.silence for _, fields in sealed)
    gaps = [b - a for a, b in pairwise(swarm.commit_times())]
    assert max(gaps) <= (len(voids) + 1) * (deadline + 3 * rules.silence) + longest - deadline
    assert max(gaps) <= longest + deadline + 6 * rules.silence
    assert swarm.best_head().outer_step == 24 * 3 + 2


def test_what_one_identity_makes_up_does_not_push_out_commits_that_are_ahead() -> None:
    """Above the head it signs commits of its own, of any height, and several of each."""
    swarm = Swarm(manifest(**several(round={"quorum": 1}, budget={"rounds": 6})), latency=0.15)
    seen: list[tuple[list[int], bool, bool]] = []

    def invent(victim: Peer, signer: str, height: int, salt: int) -> Commit:
        """Sound in itself, for the place of the present head, on a parent that nobody has."""
        head, me, rules, layout = victim.head, PeerId(f"sim-{signer}"), victim.manifest, victim.layout
        member = Member(me, bytes(16), 0, 0, salt, 0.0, 0.0, True)
        fragment = layout.due(head.outer_step)
        base = msgspec.structs.replace(head, id=bytes([salt]) * 32)
        deadline = deadline_seconds([member], layout.fragment(fragment), rules.codec.name, rules.round.silence, 3)
        seal = Seal(rules.run_id, head.round + 1, fragment, base, me, bytes(16), [member], [], False, deadline)
        parent = Head(bytes([salt, height % 256]) * 16, height - 1, head.weight, height - 1, head.outer_step)
        position = msgspec.structs.replace(victim.replica.position, head=parent)
        body = make_body(seal, hash_of(seal), position, bytes(32), [], rules, layout)
        return Commit(body, [Vote(0, FastSigner(me).sign(vote_bytes(hash_of(body))))])

    def lie(name: str, event: str, fields: dict[str, Any]) -> None:
        if (name, event) != ("p1", "commit") or fields["outer_step"] != 9:
            return
        victim = swarm.life("p1").peer
        head, liar = victim.head, PeerId("sim-p0")
        real = invent(victim, "p0", head.height + 2, 200)
        honest = invent(victim, "p2", head.height + 2, 201)
        for commit in (real, honest):
            victim._incoming.offer(liar, commit)
        for salt in range(1, 9):
            for height in (2, 3, 4, 5, 40, 1000):
                victim._incoming.offer(liar, invent(victim, "p0", head.height + height, salt))
        kept = [commit.body for _, commit in victim._incoming.commits if commit.body.parent != head.id]
        heights = sorted(body.height - head.height for body in kept if body.seal.coordinator == liar)
        seen.append((heights, real.body in kept, honest.body in kept))

    swarm.hooks.append(lie)
    for index in range(3):
        swarm.add(f"p{index}")
    run(swarm, limit=900)
    # Heights above the head: no more than rounds may be in flight.
    assert seen == [([2, 3], True, True)]
    assert swarm.best_head().outer_step == 6 * 3 + 2
