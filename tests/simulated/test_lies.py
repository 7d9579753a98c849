"""One admitted peer of four tells lies; the other three go on, agree, and end the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import pytest

from atoll.protocol.averaged import hash_chunk
from atoll.protocol.commits import bitmap, make_body
from atoll.protocol.control import Ballot, Call, Committed, Heard, Reassign, Release, Report, Voided
from atoll.protocol.deadline import deadline_seconds
from atoll.protocol.messages import ChunkEntry, Commit, Head, Member, Part, Seal, Vote, encode, hash_of, vote_bytes
from atoll.protocol.peer import Peer
from atoll.protocol.transfer import PROTOCOL as SYNC
from atoll.protocol.transfer import Wait
from atoll.protocol.transport import PeerId, Stream

from .swarm import Swarm, manifest, round_of

HONEST = ["p0", "p1", "p2"]
OTHERS = [PeerId(f"sim-{name}") for name in HONEST]
Lie = Callable[[Swarm, Peer], Any]
LIMIT = 120.0
"""Virtual seconds for 12 rounds; without a liar they take 28."""


async def lie_about_rounds(swarm: Swarm, peer: Peer) -> None:
    for _ in range(40):
        peer.messenger.post_all(OTHERS, Report(peer.head, 0, 0, 0, False, 0.0, 0.0, 2**63 - 1))
        peer.messenger.post_all(OTHERS, Heard(peer.head, 2**63 - 1))
        await asyncio.sleep(0.1)


async def claim_a_better_head(swarm: Swarm, peer: Peer) -> None:
    claimed = Head(b"\1" * 32, 99, 2**62, 99, 99)
    for _ in range(100):
        peer.messenger.post_all(OTHERS, Report(claimed, 0, 0, 0, False, 0.0, 0.0, 0))
        await asyncio.sleep(0.2)


async def be_slow_beyond_reason(swarm: Swarm, peer: Peer) -> None:
    peer._entering.called = lambda *_: None  # type: ignore[method-assign]
    for step_time in (float("inf"), 3600.0):
        for _ in range(20):
            peer.messenger.post_all(OTHERS, Report(peer.head, 0, 0, 100, False, 0.0, step_time, 0))
            await asyncio.sleep(0.2)


async def enter_with(swarm: Swarm, peer: Peer, **fields: Any) -> None:
    enter = peer._training.enter

    async def lying(call: Call) -> Any:
        member, snapshot = await enter(call)
        return msgspec.structs.replace(member, **fields), snapshot

    peer._training.enter = lying  # type: ignore[method-assign]


async def enter_with_endless_bandwidth(swarm: Swarm, peer: Peer) -> None:
    await enter_with(swarm, peer, upload=float("inf"), download=float("inf"))


async def enter_with_no_bandwidth(swarm: Swarm, peer: Peer) -> None:
    await enter_with(swarm, peer, upload=5e-324, download=1e-9)


async def enter_with_a_hundred_times_the_weight(swarm: Swarm, peer: Peer) -> None:
    await enter_with(swarm, peer, weight=1_000_000)


async def want_all_samples(swarm: Swarm, peer: Peer) -> None:
    await enter_with(swarm, peer, want=2**62)


def own_commit(peer: Peer, salt: int, *, state: bytes | None = None, junk: bytes | None = None) -> Commit:
    """A commit of this peer alone on its head: valid in itself, false in what it says."""
    position, me = peer.replica.position, peer.transport.peer_id
    member = Member(me, bytes(16), 100 if junk is not None else 0, 1, salt, 0.0, 0.0, True)
    count = peer.layout.count
    rules = peer.manifest
    deadline = deadline_seconds([member], peer.layout, rules.codec.name, rules.round.silence)
    parts = [Part(0, 0, count)] if junk is not None else []
    seal = Seal(
        rules.run_id, position.head.round + 1, 0, position.head, me, bytes(16), [member], parts, False, deadline
    )
    chunks = [ChunkEntry(hash_chunk(junk), bitmap([0], 1))] * count if junk is not None else []
    body = make_body(seal, hash_of(seal), position, state or bytes(32), chunks, rules, peer.layout)
    return Commit(body, [Vote(0, peer.signer.sign(vote_bytes(hash_of(body))))])


async def commit_garbage(swarm: Swarm, peer: Peer) -> None:
    junk = b"no averaged chunk"
    recent = peer._flights.recent
    peer.donor._recent = lambda digest: junk if digest == hash_chunk(junk) else recent(digest)
    digest = await peer.replica.digest(peer.transport)
    peer.messenger.post_all(OTHERS, Committed(own_commit(peer, 1, state=digest, junk=junk)))


async def commit_false_states(swarm: Swarm, peer: Peer) -> None:
    for number in range(8):
        peer.messenger.post_all(OTHERS, Committed(own_commit(peer, number + 1)))
        await asyncio.sleep(1.0)


async def meddle_with_rounds(swarm: Swarm, peer: Peer) -> None:
    """Reassign everything, propose a wrong bitmap, release and void others, whenever a round is sealed."""

    def hook(name: str, event: str, fields: dict[str, Any]) -> None:
        if name != "p3" or event != "seal":
            return
        roster, count = bytes.fromhex(fields["roster"]), peer.layout.count
        every = [Part(0, index, 1) for index in range(count)]
        peer.messenger.post_all(OTHERS, Reassign(roster, 2**63 - 1, every))
        peer.messenger.post_all(OTHERS, Reassign(roster, 1, [*every, *every]))
        peer.messenger.post_all(OTHERS, Voided(b"\7" * 32, "nonsense"))
        peer.messenger.post_all(OTHERS, Release(bytes(16)))
        current = round_of(peer)
        for limbo in current.proposals.values() if current is not None else []:
            chunks = [ChunkEntry(entry.hash, bytes(1)) for entry in limbo.body.chunks]
            forged = msgspec.structs.replace(limbo.body, chunks=chunks)
            peer.messenger.post_all(OTHERS, Ballot(roster, forged, []))

    swarm.hooks.append(hook)


async def enter_leases_with_weight(swarm: Swarm, peer: Peer) -> None:
    """A call for leases alone freezes nobody: a weight in it would make an outer step of one peer's numbers."""
    await enter_with(swarm, peer, weight=500)
    await say_that_there_are_no_samples(swarm, peer)


async def say_that_there_are_no_samples(swarm: Swarm, peer: Peer) -> None:
    report = peer._reports.own
    peer._reports.own = lambda: msgspec.structs.replace(  # type: ignore[method-assign]
        report(), leased=0, tokens=0, steps=0, ready=False, eta=0.0
    )


async def flood_with_bodies(swarm: Swarm, peer: Peer) -> None:
    """Eight bodies that are sound in themselves, right after every seal."""

    def hook(name: str, event: str, fields: dict[str, Any]) -> None:
        current = round_of(peer)
        if name != "p3" or event != "seal" or current is None or not current.seal.parts:
            return
        entries = [ChunkEntry(bytes([number]) * 32, bytes(1)) for number in range(8)]
        for entry in entries:
            chunks = [entry] * peer.layout.count
            body = make_body(
                current.seal, current.roster_id, peer.replica.position, bytes(32), chunks, peer.manifest, peer.layout
            )
            peer.messenger.post_all(OTHERS, Ballot(current.roster_id, body, []))

    def later(name: str, event: str, fields: dict[str, Any]) -> None:
        # The round object exists once the event's caller has gone on.
        asyncio.get_running_loop().call_soon(hook, name, event, fields)

    swarm.hooks.append(later)


async def claim_heads_and_let_wait(swarm: Swarm, peer: Peer) -> None:
    """Claims the best head, and answers every question about it with "wait"."""
    claimed = Head(b"\1" * 32, 99, 2**62, 99, 99)
    report = peer._reports.own
    peer._reports.own = lambda: msgspec.structs.replace(report(), head=claimed)  # type: ignore[method-assign]

    async def wait_for_ever(stream: Stream) -> None:
        while True:
            await stream.send(encode(Wait()))
            await asyncio.sleep(1.0)

    await peer.transport.serve(SYNC, wait_for_ever)


async def claim_heads_in_all_it_says_and_take_no_part(swarm: Swarm, peer: Peer) -> None:
    claimed = Head(b"\1" * 32, 99, 2**62, 99, 99)
    send, send_all = peer.messenger.post, peer.messenger.post_all

    def lie(message: Any) -> Any:
        return msgspec.structs.replace(message, head=claimed) if isinstance(message, Report | Heard) else message

    peer.messenger.post = lambda to, message: send(to, lie(message))  # type: ignore[method-assign]
    peer.messenger.post_all = lambda to, message: send_all(to, lie(message))  # type: ignore[method-assign]
    await take_no_part(swarm, peer)
    await claim_heads_and_let_wait(swarm, peer)


async def take_no_part(swarm: Swarm, peer: Peer) -> None:
    """It lives, reports that it is ready, and neither calls nor answers a call."""
    peer._timing.due = lambda: None  # type: ignore[method-assign]
    peer._entering.called = lambda *_: None  # type: ignore[method-assign]


LIES = [
    enter_leases_with_weight,
    say_that_there_are_no_samples,
    flood_with_bodies,
    claim_heads_and_let_wait,
    lie_about_rounds,
    claim_a_better_head,
    be_slow_beyond_reason,
    enter_with_endless_bandwidth,
    enter_with_no_bandwidth,
    enter_with_a_hundred_times_the_weight,
    want_all_samples,
    commit_garbage,
    commit_false_states,
    meddle_with_rounds,
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_the_others_go_on(lie: Lie) -> None:
    """With quorum 1 the liar's commits of its own are valid in themselves, so that the deeper checks are reached."""
    swarm = Swarm(manifest(budget={"rounds": 12}, round={"quorum": 1}), seed=1)
    for name in [*HONEST, "p3"]:
        swarm.add(name)
    swarm.ignored.add("p3")

    async def main() -> None:
        while len(swarm.commits) < 4:
            await asyncio.sleep(0.1)
        await lie(swarm, swarm.life("p3").peer)
        while not all(swarm.life(name).done for name in HONEST) and swarm.network.loop.time() < LIMIT:
            await asyncio.sleep(0.5)

    swarm.network.run(main())
    assert [swarm.life(name).error for name in HONEST] == [None] * 3
    assert all(swarm.life(name).done for name in HONEST), {n: swarm.life(n).peer.head for n in HONEST}
    assert len({swarm.life(name).peer.head for name in HONEST}) == 1
    assert swarm.violations == []


@lru_cache(maxsize=1)
def commits_without_a_liar() -> int:
    return commits_of_short_rounds(None)


def commits_of_short_rounds(lie: Lie | None) -> int:
    """Commits of four peers in 40 s, with rounds of a quarter of T, so that every wait shows; p3 tells the lie."""
    swarm = Swarm(manifest(budget={"rounds": 1000}, round={"quorum": 1, "inner_steps": 5}), seed=1)
    for name in [*HONEST, "p3"]:
        swarm.add(name)
    swarm.ignored.add("p3")

    async def main() -> int:
        while len(swarm.commits) < 4:
            await asyncio.sleep(0.1)
        if lie is not None:
            await lie(swarm, swarm.life("p3").peer)
        await asyncio.sleep(20)
        before = len(swarm.commits)
        await asyncio.sleep(40)
        return len(swarm.commits) - before

    count = swarm.network.run(main())
    assert swarm.violations == []
    return count


@pytest.mark.parametrize(("lie", "share"), [(claim_heads_in_all_it_says_and_take_no_part, 0.8), (take_no_part, 0.45)])
def test_a_peer_that_does_not_do_its_part_costs_less_and_less(lie: Lie, share: float) -> None:
    """It stands first in a quarter of the rounds. Waiting for it costs T, or 3T and grace, and twice as long passes
    each time before it is waited for again."""
    assert commits_of_short_rounds(lie) >= share * commits_without_a_liar()
