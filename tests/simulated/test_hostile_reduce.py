"""One hostile peer of four in the reduction, on the simulated network: whatever it does on its streams, it is refused
within bounds and named, and the others complete that very round with the mean over the actual contributors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from atoll.protocol import reduce
from atoll.protocol.errors import StreamClosed
from atoll.protocol.messages import Commit, encode, hash_of
from atoll.protocol.reduce import PROTOCOL, Hello
from atoll.protocol.simulation import SimTransport
from atoll.protocol.transport import Stream

from ..hostile import (
    CONSTANTS,
    HONEST,
    HOSTILE,
    MEMBER,
    REDUCER,
    Attack,
    Case,
    HostileRound,
    as_many_stories_as_members,
    at_random,
    constant_where_it_is_told,
    overstate,
    seal_heavily,
    verdict,
)
from .swarm import Swarm, manifest, round_of

LIMIT = 120.0
"""Virtual seconds in which everything must have happened; without a hostile peer it takes 8."""


class Attacked(Swarm):
    """A swarm whose fourth peer plays a case in its next rounds with weights after the second commit."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, reduces: bool = True, **rules: Any) -> None:
        rules["round"] = {"quorum": 3, **rules.get("round", {})}
        super().__init__(manifest(budget={"rounds": 40}, **rules), seed=1)
        for name in [*HONEST, HOSTILE]:
            # Whom nobody reaches has no part.
            self.add(name, reachable=reduces or name != HOSTILE)
        self.ids = {name: str(host.peer_id) for name, host in self.hosts.items()}
        self.attack = Attack(self.ids[HOSTILE], tmp_path / "unpickled", began=self._began)
        monkeypatch.setattr("atoll.protocol.rounds.Round", self.attack.round)

    def _began(self, current: HostileRound) -> None:
        if current.case.act in CONSTANTS:
            brought = self.contributions[(HOSTILE, current.roster_id.hex())]
            constant_where_it_is_told(current, brought.x)

    def agree(self) -> bool:
        """Whether all the honest are at one head now."""
        return len({self.life(name).peer.head.id for name in HONEST}) == 1

    def of_roster(self, roster: str) -> Commit | None:
        return next((c for c in self.commits.values() if hash_of(c.body.seal).hex() == roster), None)

    def play(self, case: Case, *, rounds: int = 1) -> None:
        """Play a case in so many rounds, then go on for one more."""

        async def main() -> None:
            loop = self.network.loop
            while len(self.commits) < 2 and loop.time() < LIMIT:
                await asyncio.sleep(0.1)
            self.attack.case, self.attack.once = case, rounds == 1
            while len(self.attack.rosters) < rounds and loop.time() < LIMIT:
                await asyncio.sleep(0.1)
            self.attack.case = None
            while len(self.commits) < 4 and loop.time() < LIMIT:
                await asyncio.sleep(0.1)
            await asyncio.sleep(3 * self.manifest.round.silence)
            while not self.agree() and loop.time() < LIMIT:
                await asyncio.sleep(0.05)

        self.network.run(main())
        if case.act.__name__ == "noise":
            # Damage that decodes is what it brought, whatever it has trained.
            self.violations = [sentence for sentence in self.violations if "mean off" not in sentence]
        assert self.violations == []
        assert [self.life(name).error for name in HONEST] == [None] * 3
        assert self.agree(), {name: self.life(name).peer.head for name in HONEST}
        assert len(self.commits) >= 4


def completed_without(case: Case, swarm: Attacked) -> None:
    """Play the case, and see that the attacked roster commits and that the hostile peer is named as the case says."""
    swarm.play(case)
    commit = swarm.of_roster(swarm.attack.rosters[0])
    assert commit is not None, swarm.named("void")
    refused = [(name, fields) for _, name, fields in swarm.named("refused")]
    assert verdict(case, swarm.attack, swarm.ids, refused, commit) == []


@pytest.mark.parametrize("case", MEMBER, ids=lambda case: case.name)
def test_a_hostile_member(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completed_without(case, Attacked(tmp_path, monkeypatch))


@pytest.mark.parametrize("case", REDUCER, ids=lambda case: case.name)
def test_a_hostile_reducer(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completed_without(case, Attacked(tmp_path, monkeypatch))


def test_a_reducer_that_tells_everyone_another_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can know who lies, so that roster ends void; both suspects are named, and those who saw it give this
    reducer no part on that base: the next rosters commit."""
    swarm = Attacked(tmp_path, monkeypatch)
    case = Case(as_many_stories_as_members, "one of the two lies")
    swarm.play(case, rounds=2)
    suspects = {
        fields["peer"]
        for _, name, fields in swarm.named("refused")
        if name in HONEST and "one of the" in fields["reason"]
    }
    assert swarm.ids[HOSTILE] in suspects
    void = {fields["roster"] for _, name, fields in swarm.named("void") if name in HONEST}
    assert swarm.attack.rosters[0] in void
    assert len(swarm.commits) >= 4


def test_a_reducer_that_stands_still_in_every_round_soon_has_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each coordinator has seen it fail, and gives it nothing to reduce for 4, 8, 16 commits."""
    swarm = Attacked(tmp_path, monkeypatch)

    async def main() -> None:
        swarm.attack.case, swarm.attack.once = next(case for case in REDUCER if "stall" in case.name), False
        while len(swarm.commits) < 16 and swarm.network.loop.time() < LIMIT:
            await asyncio.sleep(0.1)

    swarm.network.run(main())
    assert swarm.violations == []
    seals = [commit.body.seal for commit in swarm.commits.values() if commit.body.chunks]
    assert len(seals) >= 14
    given = [any(seal.members[p.reducer].peer == swarm.ids[HOSTILE] for p in seal.parts) for seal in seals]
    led = [seal.coordinator == swarm.ids[HOSTILE] for seal in seals]
    assert given[0]
    assert sum(g for g, own in zip(given, led, strict=True) if not own) <= len(HONEST) + 1
    assert all(any(member.peer == swarm.ids[HOSTILE] for member in seal.members) for seal in seals)


@pytest.mark.parametrize("as_member", [True, False], ids=["member", "reducer"])
@pytest.mark.parametrize("seed", range(4))
def test_noise_on_the_streams_of_a_round(
    seed: int, as_member: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it sends, nothing breaks, and no honest peer is held to be hostile."""
    swarm = Attacked(tmp_path, monkeypatch)
    swarm.play(at_random(seed, as_member=as_member), rounds=3)
    assert len(swarm.attack.rosters) == 3
    assert len(swarm.commits) >= 4
    blamed = [
        fields for _, name, fields in swarm.named("refused")
        if name in HONEST and fields["peer"] != swarm.ids[HOSTILE] and "one of the two" not in fields["reason"]
    ]  # fmt: skip
    assert [fields for fields in blamed if fields["fault"] == "hostile"] == []


def test_a_weight_a_hundred_times_the_honest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the manifest's cap it is not taken into the roster, and said why; the others go on without it."""
    swarm = Attacked(tmp_path, monkeypatch)

    async def main() -> None:
        while len(swarm.commits) < 2 and swarm.network.loop.time() < LIMIT:
            await asyncio.sleep(0.1)
        overstate(swarm.life(HOSTILE).peer, 100)
        while len(swarm.commits) < 6 and swarm.network.loop.time() < LIMIT:
            await asyncio.sleep(0.1)

    swarm.network.run(main())
    assert swarm.violations == []
    cap = swarm.manifest.round.weight_cap
    weights = [m.weight for c in swarm.commits.values() for m in c.body.seal.members if m.peer == swarm.ids[HOSTILE]]
    assert max(weights) <= cap
    refused = [(name, fields) for _, name, fields in swarm.named("refused") if name in HONEST]
    assert {fields["peer"] for _, fields in refused} == {swarm.ids[HOSTILE]}
    # Whoever coordinates refuses the entry; when that is the hostile peer, everyone refuses its seal.
    assert all(f"allowed are {cap}" in f["reason"] or f"above the cap {cap}" in f["reason"] for _, f in refused)
    assert len(swarm.commits) >= 6


def test_a_coordinator_that_seals_itself_too_heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seal is signed, so it is its own; the members refuse it and the next in order calls, without a long wait."""
    swarm = Attacked(tmp_path, monkeypatch)

    async def main() -> None:
        while len(swarm.commits) < 2 and swarm.network.loop.time() < LIMIT:
            await asyncio.sleep(0.1)
        seal_heavily(swarm.life(HOSTILE).peer, 100, monkeypatch)
        blamed: list[Any] = []
        while not blamed and swarm.network.loop.time() < LIMIT:
            await asyncio.sleep(0.1)
            blamed = [f for _, name, f in swarm.named("refused") if name in HONEST]
        began, count = swarm.network.loop.time(), len(swarm.commits)
        assert {f["peer"] for f in blamed} == {swarm.ids[HOSTILE]}
        assert "above the cap" in blamed[0]["reason"]
        while len(swarm.commits) == count and swarm.network.loop.time() < LIMIT:
            await asyncio.sleep(0.1)
        # Grace and quorum hold already: a call and a round of three, as of any other.
        assert swarm.network.loop.time() - began < 2 * swarm.manifest.round.silence

    swarm.network.run(main())
    assert swarm.violations == []


@pytest.mark.parametrize("codec", ["float16", "int8", "int4", "sparse", "lowrank"])
def test_a_void_round_gives_everything_back(codec: str) -> None:
    """Everybody is cut off from everybody in a round: it ends void. Residuals are as before the freeze, no sample is
    lost, and the next commit brings what the void one would have brought, and what was trained since."""
    swarm = Swarm(manifest(budget={"rounds": 40}, round={"quorum": 3}, codec={"name": codec}), seed=1)
    for name in HONEST:
        swarm.add(name)
    void: dict[str, str] = {}
    residuals: dict[tuple[str, str], bytes] = {}
    cut: list[Any] = []

    def hook(name: str, event: str, fields: dict[str, Any]) -> None:
        residual = swarm.life(name).peer.replica.residual
        if event == "seal" and len(swarm.commits) == 3:
            assert residual is not None
            residuals[(name, fields["roster"])] = residual.tobytes()
            if len(residuals) == 3 and not cut:
                cut.extend(swarm.network.isolate(other) for other in HONEST)
        if event == "void" and fields["roster"]:
            void[name] = fields["roster"]
            assert residual is not None
            assert residual.tobytes() == residuals[(name, fields["roster"])]

    swarm.hooks.append(hook)

    async def main() -> None:
        while len(void) < 3 and swarm.network.loop.time() < LIMIT:
            await asyncio.sleep(0.1)
        swarm.network.heal()
        while len(swarm.commits) < 5 and swarm.network.loop.time() < LIMIT:
            await asyncio.sleep(0.1)

    swarm.network.run(main())
    assert swarm.violations == []
    assert len(set(void.values())) == 1
    assert any(residual.strip(b"\0") for residual in residuals.values())
    after = next(commit for commit in swarm.commits.values() if len(swarm.chain(hash_of(commit.body))) == 4)
    roster = hash_of(after.body.seal).hex()
    for member in after.body.seal.members:
        name = next(name for name, host in swarm.hosts.items() if host.peer_id == member.peer)
        before, now = (
            [unit for span in swarm.contributions[(name, which)].units for unit in span]
            for which in (void[name], roster)
        )
        assert now[: len(before)] == before
        assert member.weight == 10 * len(now)


def test_an_outsider_with_the_roster_of_a_round_in_progress() -> None:
    """It knows the seal, and is not in it: refused at once, by whoever is in that round and whoever is not yet."""
    swarm = Swarm(manifest(budget={"rounds": 6}, round={"quorum": 3}), seed=1)
    for name in HONEST:
        swarm.add(name)
    outsider = swarm.network.host("outsider")

    async def intrude(transport: SimTransport, hello: Hello) -> None:
        for name in HONEST:
            stream = await transport.open(swarm.hosts[name].peer_id, PROTOCOL, timeout=5.0)
            await stream.send(encode(hello))
            with pytest.raises(StreamClosed):
                await stream.receive()
            await stream.close()

    intruding: list[asyncio.Task[None]] = []

    async def main() -> None:
        while not all(swarm.life(name).done for name in HONEST) and swarm.network.loop.time() < LIMIT:
            current = round_of(swarm.life("p0").peer)
            if current is not None and current.seal.parts and not intruding:
                part = current.seal.parts[0]
                hello = Hello(current.seal, current.signature, part.first, part.count, part.first)
                intruding.append(outsider.run(lambda transport, hello=hello: intrude(transport, hello)))
            await asyncio.sleep(0.01)

    swarm.network.run(main())
    assert [task.exception() for task in intruding] == [None]
    assert swarm.violations == []
    refused = [(name, fields["peer"], fields["fault"]) for _, name, fields in swarm.named("refused")]
    assert sorted(refused) == [(name, "sim-outsider", "hostile") for name in HONEST]


@pytest.mark.parametrize("role", ["member", "reducer"])
def test_who_brings_each_chunk_at_the_last_moment(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is silent for T, and yet the round would be over before the part is: it is done without that peer in time
    for the others, on links where the transfer takes four times T."""
    rate = 30e3
    rules = {"budget": {"rounds": 1}, "state": {"chunk": 1024}}
    swarm = Swarm(manifest(parameters=3 * 60 * 1024, **rules), seed=1, bandwidth=rate)
    for name in HONEST:
        swarm.add(name)
    slow = swarm.hosts["p2"].peer_id
    exchange, accept = reduce.exchange, reduce.Reducer.accept

    def delay(stream: Stream, kind: int) -> None:
        send, sent = stream.send, [0]

        async def late(*parts: bytes | bytearray | memoryview) -> None:
            if bytes(parts[0])[:1] == bytes([kind]):
                sent[0] += 1
                await asyncio.sleep(0.8 * 2.0 * (sent[0] > 1))
            await send(*parts)

        stream.send = late  # type: ignore[method-assign]

    async def contribute(stream: Stream, *args: Any, transport: SimTransport, **more: Any) -> None:
        if role == "member" and transport.peer_id == slow:
            delay(stream, reduce.CONTRIBUTION)
        await exchange(stream, *args, transport=transport, **more)

    async def average(self: reduce.Reducer, member: int, stream: Stream, *args: Any) -> None:
        if role == "reducer" and self._transport.peer_id == slow:
            delay(stream, reduce.AVERAGE)
        await accept(self, member, stream, *args)

    monkeypatch.setattr("atoll.protocol.round.exchange", contribute)
    monkeypatch.setattr(reduce.Reducer, "accept", average)

    async def main() -> None:
        await asyncio.sleep(0.001)
        for name in HONEST:
            swarm.life(name).peer.rates.probed(rate, rate, 0.0)
        while not all(swarm.life(name).done for name in HONEST) and swarm.network.loop.time() < LIMIT:
            await asyncio.sleep(0.5)

    swarm.network.run(main())
    assert swarm.violations == []
    assert swarm.named("void") == []
    assert len(swarm.commits) == 2
    seconds = swarm.commit_times()[1] - swarm.commit_times()[0]
    assert seconds < 20.0, "twice to three times the transfer, of the 40 until the deadline"
    named = {(fields["peer"], fields["fault"]) for _, _, fields in swarm.named("refused")}
    assert named == {(slow, "slow")}
