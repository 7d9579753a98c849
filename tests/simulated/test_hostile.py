"""One hostile peer among four: the honest three, a quorum, finish, whatever it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from atoll.protocol.averaged import hash_chunk
from atoll.protocol.calling import Calling
from atoll.protocol.commits import bitmap, make_body
from atoll.protocol.control import Ballot, Committed, Control, Enter, Heard, Reassign, Report, Sealed
from atoll.protocol.messages import (
    GENESIS,
    Body,
    ChunkEntry,
    Commit,
    Head,
    Member,
    Part,
    Seal,
    Vote,
    hash_of,
    vote_bytes,
)
from atoll.protocol.peer import Peer
from atoll.protocol.round import Round
from atoll.protocol.transport import PeerId

from .swarm import Swarm, manifest, round_of

HONEST = ["p0", "p1", "p2"]
OTHERS = [PeerId(f"sim-{name}") for name in HONEST]
Attack = Callable[[Swarm, Peer], None]


def _rewrite(peer: Peer, change: Callable[[Control], list[Control]]) -> None:
    """What this peer's messenger sends goes through ``change`` first."""
    post, post_all = peer.messenger.post, peer.messenger.post_all

    def one(to: PeerId, message: Control) -> None:
        for changed in change(message):
            post(to, changed)

    def many(to: Any, message: Control) -> None:
        to = list(to)
        for changed in change(message):
            post_all(to, changed)

    peer.messenger.post, peer.messenger.post_all = one, many  # type: ignore[method-assign]


def huge_round(swarm: Swarm, peer: Peer) -> None:
    def change(message: Control) -> list[Control]:
        return [msgspec.structs.replace(message, round=2**63 - 1) if isinstance(message, Report | Heard) else message]

    _rewrite(peer, change)


def invented_head(swarm: Swarm, peer: Peer) -> None:
    claim = Head(b"\1" * 32, 99, 2**62, 99, 9)

    def change(message: Control) -> list[Control]:
        return [msgspec.structs.replace(message, head=claim) if isinstance(message, Report | Heard) else message]

    _rewrite(peer, change)


def endless_step(swarm: Swarm, peer: Peer) -> None:
    peer._entering.called = lambda *_: None  # type: ignore[method-assign]

    def change(message: Control) -> list[Control]:
        slow = {"step_time": 1e300, "ready": False, "eta": 0.0, "leased": 1}
        return [msgspec.structs.replace(message, **slow) if isinstance(message, Report) else message]

    _rewrite(peer, change)


def _entering(**fields: Any) -> Attack:
    def attack(swarm: Swarm, peer: Peer) -> None:
        def change(message: Control) -> list[Control]:
            if isinstance(message, Enter):
                return [msgspec.structs.replace(message, member=msgspec.structs.replace(message.member, **fields))]
            return [message]

        _rewrite(peer, change)

    return attack


def _lone_commit(*, garbage: bool) -> Attack:
    def attack(swarm: Swarm, peer: Peer) -> None:
        asyncio.get_running_loop().create_task(_send_lone_commits(peer, garbage))

    return attack


async def _send_lone_commits(peer: Peer, garbage: bool) -> None:
    junk = b"x"
    recent = peer.donor._recent
    peer.donor._recent = lambda digest: junk if digest == hash_chunk(junk) else recent(digest)
    for want in range(6):
        position, count = peer.replica.position, peer.layout.count
        me = Member(peer.transport.peer_id, bytes(16), 100 if garbage else 0, 1, want, 0.0, 0.0, True)
        parts = [Part(0, 0, count)] if garbage else []
        seal = Seal(
            peer.manifest.run_id, position.head.round + 1, 0, position.head, me.peer, bytes(16), [me], parts, False, 8.0
        )
        chunks = [ChunkEntry(hash_chunk(junk), bitmap([0], 1))] * count if garbage else []
        state = await peer.replica.digest(peer.transport) if garbage else bytes(32)
        body = make_body(seal, hash_of(seal), position, state, chunks, peer.manifest, peer.layout)
        vote = Vote(0, peer.signer.sign(vote_bytes(hash_of(body))))
        peer.messenger.post_all(OTHERS, Committed(Commit(body, [vote])))
        await asyncio.sleep(2)


def ballot_before_the_seal(swarm: Swarm, peer: Peer) -> None:
    """As a coordinator: a ballot with another roster's body comes first."""
    logged = peer.store.commit(peer.head.id)
    assert logged is not None

    def change(message: Control) -> list[Control]:
        if isinstance(message, Sealed):
            return [Ballot(hash_of(message.seal), logged.body, []), message]
        return [message]

    _rewrite(peer, change)


def _in_its_rounds(monkeypatch: pytest.MonkeyPatch, act: Callable[[Peer, Round], None]) -> Attack:
    def attack(swarm: Swarm, peer: Peer) -> None:
        run = Round.run

        async def hostile(current: Round) -> Commit:
            if current.around.transport is peer.transport:
                act(peer, current)
            return await run(current)

        monkeypatch.setattr(Round, "run", hostile)

    return attack


def _reassigns(peer: Peer, current: Round) -> None:
    takes = Reassign(current.roster_id, 2**40, [Part(current.me, 0, len(current.chunks))])
    if current.chunks:
        peer.messenger.post_all(OTHERS, takes)


def _false_contributors(peer: Peer, current: Round) -> None:
    hold = current._hold

    def holding(index: int, data: bytes) -> None:
        hold(index, data)
        if None in current.chunks:
            return
        entries = [ChunkEntry(digest, bitmap([], len(current.peers))) for digest in current.chunks if digest]
        around = current.around

        async def propose() -> None:
            state = await around.replica.digest(around.transport)
            body = make_body(
                current.seal, current.roster_id, around.replica.position, state, entries, peer.manifest, peer.layout
            )
            peer.messenger.post_all(OTHERS, Ballot(current.roster_id, body, []))

        current._spawn(propose())

    current._hold = holding  # type: ignore[method-assign]


def forged_seal(swarm: Swarm, peer: Peer) -> None:
    """Called like everyone, it sends the others a seal under another's name."""
    called = peer._entering.called

    def forge(coordinator: PeerId, call: Any) -> None:
        me = Member(coordinator, bytes(16), 0, 0, 0, 0.0, 0.0, True)
        seal = Seal(peer.manifest.run_id, call.round, 0, call.base, coordinator, call.call, [me], [], False, 8.0)
        for delay in np.arange(0.01, 0.1, 0.01):
            asyncio.get_running_loop().call_later(
                float(delay), peer.messenger.post_all, OTHERS, Sealed(seal, bytes(32))
            )
        called(coordinator, call)

    peer._entering.called = forge  # type: ignore[method-assign]


ATTACKS: dict[str, Any] = {
    "a huge round": huge_round,
    "an invented head": invented_head,
    "an endless step": endless_step,
    "an infinite rate": _entering(upload=float("inf"), download=float("inf")),
    "a rate of nothing": _entering(upload=1e-9, download=1e-9),
    "a lone commit of garbage": _lone_commit(garbage=True),
    "a lone commit on a false state": _lone_commit(garbage=False),
    "a ballot before the seal": ballot_before_the_seal,
    "a forged seal": forged_seal,
    "reassignment": _reassigns,
    "false contributors": _false_contributors,
}


@pytest.mark.parametrize("name", list(ATTACKS))
def test_one_hostile_peer_stops_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = ATTACKS[name]
    if name in ("reassignment", "false contributors"):
        attack = _in_its_rounds(monkeypatch, attack)
    swarm = Swarm(manifest(budget={"rounds": 14}, round={"quorum": 3}), seed=1)
    for index in range(4):
        swarm.add(f"p{index}")

    async def main() -> None:
        while len(swarm.commits) < 4:
            await asyncio.sleep(0.1)
        attack(swarm, swarm.life("p3").peer)
        while not all(swarm.life(n).done for n in HONEST) and swarm.network.loop.time() < 100:
            if any(swarm.life(n).error is not None for n in HONEST):
                break
            await asyncio.sleep(0.5)

    swarm.network.run(main())
    assert {n: swarm.life(n).error for n in HONEST} == dict.fromkeys(HONEST)
    assert all(swarm.life(n).done for n in HONEST), (swarm.network.loop.time(), swarm.named("void")[-1:])
    deadline = max(fields["deadline"] for _, _, fields in swarm.named("seal"))
    assert deadline < 60


def test_a_leader_that_cuts_the_fragment_into_ever_more_parts() -> None:
    """Each part is a task and a stream to whomever the leader names."""
    swarm = Swarm(manifest(budget={"rounds": 4}))
    swarm.add("p0")
    swarm.add("p1")
    most = [0]

    async def main() -> None:
        sent = False
        while not all(swarm.life(name).done for name in ("p0", "p1")) and swarm.network.loop.time() < 200:
            current = round_of(swarm.life("p1").peer)
            if current is not None and current.seal.parts:
                most[0] = max(most[0], len(current._work))
                leader = swarm.life(swarm.name_of(current.seal.coordinator)).peer
                if not sent and leader.transport.peer_id != swarm.hosts["p1"].peer_id:
                    sent = True
                    count = leader.layout.count
                    windows = [(at, size) for size in range(count - 1, 0, -1) for at in range(count - size + 1)]
                    for generation, (at, size) in enumerate(windows, 1):
                        message = Reassign(current.roster_id, generation, [Part(current.me, at, size)])
                        leader.messenger.post(swarm.hosts["p1"].peer_id, message)
            await asyncio.sleep(0.01)
        assert sent

    swarm.network.run(main())
    assert all(swarm.life(name).done for name in ("p0", "p1"))
    assert swarm.violations == []
    assert 2 < most[0] <= 16
    assert any("in work" in fields["reason"] for _, name, fields in swarm.named("refused") if name == "p1")


def test_a_peer_enters_a_call_once() -> None:
    """What it shows with its entry is kept until the call ends; it must not grow with every further entry."""
    calling = Calling(bytes(16), 1, GENESIS, {OTHERS[0]})
    member = Member(OTHERS[0], bytes(16), 0, 0, 0, 0.0, 0.0, True)
    seal = Seal(bytes(32), 1, 0, GENESIS, OTHERS[0], bytes(16), [member], [], True, 8.0)
    body = Body(bytes(32), 1, 0, 1, 0, bytes(32), bytes(32), seal, [], [], 0, 0, 0)
    for steps in range(100):
        entry = Enter(bytes(16), msgspec.structs.replace(member, steps=steps), [Ballot(bytes(32), body, [])])
        calling.enter(OTHERS[0], entry)
    assert calling.entered == {OTHERS[0]: member}
    assert len(calling.seen) == 1
