"""The organiser's anchors on the simulated network: whose chain wins, and that no anchor stops a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from atoll.node.anchor import Found, find
from atoll.node.status import Snapshot
from atoll.protocol.address import RunAddress
from atoll.protocol.anchor import Anchor, seal_anchor
from atoll.protocol.anchoring import PROTOCOL, Bring, exchange
from atoll.protocol.identity import Ed25519Signer, FastSigner
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import GENESIS, Head, better, encode, hash_of, head_of
from atoll.protocol.records import Record
from atoll.protocol.simulation import SimTransport
from atoll.protocol.transport import PeerId

from .swarm import Swarm, manifest

OWNER = FastSigner(Ed25519Signer.from_seed(bytes(range(32))).peer_id)
LEFT, RIGHT = ["p0", "p1", "p2"], ["p3", "p4"]
"""Two sides of a partition; the left one is the heavier."""


def owned(**changes: Any) -> Manifest:
    """The small run, with an owner."""
    run = manifest(**changes)
    return Manifest.from_dict(run.model_dump(exclude={"signature"}) | {"owner": OWNER.peer_id})


def build(names: list[str], *, seed: int = 5, **changes: Any) -> Swarm:
    swarm = Swarm(owned(**changes), seed=seed)
    for name in names:
        swarm.add(name)
    return swarm


def sealed(swarm: Swarm, head: Head, number: int = 1, signer: FastSigner = OWNER) -> bytes:
    return seal_anchor(Anchor(swarm.manifest.run_id, number, head), signer)


def hand_over(swarm: Swarm, name: str, anchor: bytes) -> None:
    """As if somebody had brought it to that peer."""
    swarm.life(name).peer.guide.anchors.learn(anchor, PeerId("organiser"))


def hand_over_from_outside(swarm: Swarm, anchor: bytes, to: str) -> list[bytes]:
    """The organiser's own machine, which is no peer of the run, leaves an anchor with a peer; what it gets back."""
    answers: list[bytes] = []

    async def program(transport: SimTransport) -> None:
        answers.append(await exchange(transport, swarm.hosts[to].peer_id, anchor))

    swarm.network.host("organiser").run(program)
    return answers


async def until(swarm: Swarm, true: Callable[[], bool], seconds: float = 300.0) -> None:
    ends = swarm.network.loop.time() + seconds
    while not true():
        assert swarm.network.loop.time() < ends, f"not within {seconds:g} s: {swarm.heads()}"
        await asyncio.sleep(0.1)


def chain_of(swarm: Swarm, name: str) -> list[bytes]:
    """The commits up to a peer's head."""
    return [hash_of(commit.body) for commit in swarm.chain(swarm.life(name).peer.head.id)]


def held(swarm: Swarm, name: str) -> bool:
    """Whether a peer is there and knows the anchor to be behind its head."""
    if not swarm.lives[name]:
        return False
    peer = swarm.life(name).peer
    return peer.guide.holds(peer.head.id)


async def fork(swarm: Swarm, seconds: float = 25.0) -> tuple[Head, Callable[[], None]]:
    """Cut the sides apart until both have made commits; the right side's head, and what heals the cut."""
    await until(swarm, lambda: len(swarm.commits) >= 5)
    cut = swarm.network.cut(LEFT, RIGHT)
    await asyncio.sleep(seconds)
    left, right = swarm.life("p0").peer.head, swarm.life("p3").peer.head
    assert left.id not in chain_of(swarm, "p3")
    assert right.id not in chain_of(swarm, "p0")
    assert better(left, right), "without an anchor the left side would win"
    return right, cut.heal


def test_the_lighter_chain_wins_with_the_anchor_when_a_partition_heals() -> None:
    swarm = build(LEFT + RIGHT, budget={"rounds": 60})

    async def main() -> Head:
        right, heal = await fork(swarm)
        hand_over(swarm, "p3", sealed(swarm, right))
        heal()
        await until(swarm, lambda: all(right.id in chain_of(swarm, name) for name in LEFT + RIGHT), 120)
        height = swarm.life("p0").peer.head.height
        await until(swarm, lambda: all(swarm.life(name).peer.head.height >= height + 3 for name in LEFT + RIGHT), 60)
        return right

    right = swarm.network.run(main())
    assert swarm.violations == []
    assert all(held(swarm, name) for name in LEFT + RIGHT)
    assert all(right.id in chain_of(swarm, name) for name in LEFT + RIGHT)
    assert {name for _, name, _ in swarm.named("resync")} == set(LEFT)
    # Each peer says once that it knows the anchor without it, and once that it has it.
    for name in LEFT:
        assert [fields["held"] for _, who, fields in swarm.named("anchor") if who == name] == [False, True]
    for name in RIGHT:
        assert [fields["held"] for _, who, fields in swarm.named("anchor") if who == name] == [True]


def test_a_chain_that_all_have_left_is_taken_up_again_from_their_disks() -> None:
    """The partition has healed, and all are on the heavier chain, when the organiser anchors the other one."""
    swarm = build(LEFT + RIGHT, budget={"rounds": 60}, state={"checkpoint_every": 50})

    async def main() -> Head:
        right, heal = await fork(swarm)
        heal()
        await until(swarm, lambda: all(right.id not in chain_of(swarm, name) for name in LEFT + RIGHT), 120)
        await until(swarm, lambda: len(set(swarm.heads().values())) == 1, 60)
        hand_over(swarm, "p0", sealed(swarm, right))
        await until(swarm, lambda: all(right.id in chain_of(swarm, name) for name in LEFT + RIGHT), 60)
        height = swarm.life("p0").peer.head.height
        await until(swarm, lambda: all(swarm.life(name).peer.head.height >= height + 3 for name in LEFT + RIGHT), 60)
        return right

    right = swarm.network.run(main())
    assert swarm.violations == []
    assert all(held(swarm, name) and right.id in chain_of(swarm, name) for name in LEFT + RIGHT)


def trace(seed: int) -> list[Any]:
    swarm = build(LEFT + RIGHT, seed=seed, budget={"rounds": 60})

    async def main() -> None:
        right, heal = await fork(swarm)
        hand_over_from_outside(swarm, sealed(swarm, right), "p4")
        await asyncio.sleep(1.0)
        heal()
        await asyncio.sleep(40)

    swarm.network.run(main())
    assert all(held(swarm, name) for name in LEFT + RIGHT)
    return [swarm.heads(), swarm.events]


def test_the_same_seed_gives_the_same_run() -> None:
    assert trace(3) == trace(3)


def test_an_anchor_is_spread_while_the_dht_is_away() -> None:
    """Records do not arrive: whoever learns an anchor passes it on over streams."""
    swarm = build(LEFT + RIGHT, budget={"rounds": 60})

    async def main() -> list[bytes]:
        await until(swarm, lambda: len(swarm.commits) >= 5)
        for life in swarm.lives.values():
            life[-1].peer.directory._take = lambda *_: None  # type: ignore[method-assign]
        anchor = sealed(swarm, swarm.life("p0").peer.head)
        answers = hand_over_from_outside(swarm, anchor, "p1")
        await until(swarm, lambda: all(held(swarm, name) for name in LEFT + RIGHT), 10)
        assert answers == [anchor]
        return answers

    swarm.network.run(main())
    assert swarm.violations == []


@pytest.mark.parametrize("height", [2, 1000])
def test_an_anchor_for_a_commit_that_nobody_has_stops_nobody(height: int) -> None:
    """One that would stand below the present head, and one that would stand far above it."""
    swarm = build(LEFT, budget={"rounds": 12})

    async def main() -> None:
        await until(swarm, lambda: len(swarm.commits) >= 4)
        hand_over(swarm, "p0", sealed(swarm, Head(b"\7" * 32, height, 10**9, height, height)))
        await until(swarm, lambda: all(swarm.life(name).done for name in LEFT), 100)

    swarm.network.run(main())
    assert swarm.violations == []
    assert len(swarm.commits) == 13
    assert [fields["held"] for _, _, fields in swarm.named("anchor")] == [False] * 3
    assert swarm.named("resync") == []
    assert max(b - a for a, b in zip(swarm.commit_times(), swarm.commit_times()[1:], strict=False)) < 5


def test_a_later_anchor_replaces_one_for_a_commit_that_nobody_has() -> None:
    swarm = build(LEFT, budget={"rounds": 20})

    async def main() -> None:
        await until(swarm, lambda: len(swarm.commits) >= 4)
        hand_over(swarm, "p0", sealed(swarm, Head(b"\7" * 32, 3, 1, 3, 3), 4))
        await asyncio.sleep(5)
        hand_over(swarm, "p1", sealed(swarm, swarm.life("p1").peer.head, 5))
        hand_over(swarm, "p2", sealed(swarm, Head(b"\6" * 32, 3, 1, 3, 3), 3))
        await until(swarm, lambda: all(held(swarm, name) for name in LEFT), 30)

    swarm.network.run(main())
    assert swarm.violations == []
    assert {swarm.life(name).peer.guide.newest.number for name in LEFT} == {5}  # type: ignore[union-attr]


def test_a_joiner_from_nothing_takes_the_chain_with_the_anchor_at_once() -> None:
    swarm = build(LEFT + RIGHT, budget={"rounds": 100})

    async def main() -> Head:
        right, _ = await fork(swarm)
        hand_over(swarm, "p3", sealed(swarm, right))
        await asyncio.sleep(12)
        swarm.add("late")
        await until(swarm, lambda: held(swarm, "late"), 60)
        return right

    right = swarm.network.run(main())
    assert swarm.violations == []
    assert right.id in chain_of(swarm, "late")
    assert better(swarm.life("p0").peer.head, swarm.life("late").peer.head)
    left = [fields["left"] for _, name, fields in swarm.named("resync") if name == "late"]
    assert left == ["00" * 32], "it was never on the other chain"


def test_an_old_disk_with_the_heavier_fork_does_not_bring_it_back() -> None:
    """A peer of the heavier side is down while the anchor is made. It comes back, goes over, and is down once more:
    its log then holds both forks, and what it remembers as the best head must not be the heavier one."""
    swarm = build(LEFT + RIGHT, budget={"rounds": 100}, state={"checkpoint_every": 50})

    async def main() -> None:
        right, heal = await fork(swarm)
        swarm.crash("p0")
        hand_over(swarm, "p3", sealed(swarm, right))
        heal()
        await until(swarm, lambda: all(held(swarm, name) for name in [*LEFT[1:], *RIGHT]), 120)
        swarm.restart("p0")
        await until(swarm, lambda: held(swarm, "p0"), 60)
        swarm.crash("p0")
        swarm.restart("p0")
        await asyncio.sleep(1.0)
        assert held(swarm, "p0"), "what the disk knows is enough"
        before = sum(name == "p0" for _, name, _ in swarm.named("commit"))
        await until(swarm, lambda: sum(name == "p0" for _, name, _ in swarm.named("commit")) > before + 3, 60)

    swarm.network.run(main())
    assert swarm.violations == []
    joined = [f for _, name, f in swarm.named("commit") if name == "p1" and f["contributors"].get("sim-p0", 0) > 0]
    assert joined[-1]["outer_step"] >= swarm.life("p1").peer.head.outer_step - 5


def test_newcomers_are_shown_an_anchor_that_has_left_the_log_by_those_who_were_shown_it() -> None:
    swarm = build(LEFT, budget={"rounds": 300}, state={"checkpoint_every": 2})

    async def main() -> None:
        await until(swarm, lambda: len(swarm.commits) >= 4)
        anchored = swarm.life("p0").peer.head
        hand_over(swarm, "p0", sealed(swarm, anchored))
        await until(swarm, lambda: swarm.life("p0").peer.head.height > anchored.height + 20)
        log = swarm.life("p0").peer.store.log
        assert min(entry.head.height for entry in log.entries()) > anchored.height + 5
        for name in ("late", "later"):
            swarm.add(name)
        await until(swarm, lambda: held(swarm, "late") and held(swarm, "later"), 60)
        for name in LEFT:
            swarm.crash(name)
        # The first are gone: the disk of one of the newcomers must do, after a restart.
        swarm.restart("late")
        swarm.add("last")
        await until(swarm, lambda: held(swarm, "last"), 60)

    swarm.network.run(main())
    assert swarm.violations == []
    assert {name for _, name, fields in swarm.named("anchor") if fields["held"]} >= {"late", "later", "last"}
    assert not [fields for _, _, fields in swarm.named("refused") if fields["fault"] == "hostile"]


def test_an_anchor_older_than_anybodys_log_is_said_and_changes_nothing() -> None:
    swarm = build(LEFT, budget={"rounds": 40}, state={"checkpoint_every": 2})

    async def main() -> None:
        await until(swarm, lambda: swarm.life("p0").peer.head.height >= 3)
        old = swarm.life("p0").peer.head
        await until(swarm, lambda: swarm.life("p0").peer.head.height >= 20)
        hand_over(swarm, "p0", sealed(swarm, old))
        swarm.add("late")
        await until(swarm, lambda: all(swarm.life(name).done for name in LEFT), 200)

    swarm.network.run(main())
    assert swarm.violations == []
    assert len(swarm.commits) == 41
    assert not any(fields["held"] for _, _, fields in swarm.named("anchor"))
    assert [f for _, _, f in swarm.named("commit") if f["contributors"].get("sim-late", 0) > 0], (
        "it joined all the same"
    )


def test_an_anchor_that_only_some_can_place_is_shown_to_the_others() -> None:
    """A peer whose log does not reach down to the anchor holds the chain, and does not know it."""
    swarm = build(LEFT, budget={"rounds": 60}, state={"checkpoint_every": 4})

    async def main() -> None:
        await until(swarm, lambda: swarm.life("p0").peer.head.height >= 10)
        anchored = swarm.life("p0").peer.head
        await until(swarm, lambda: swarm.life("p0").peer.head.height > anchored.height + 2)
        store = swarm.life("p1").peer.store
        store.log.prune(swarm.life("p1").peer.head.height)
        hand_over(swarm, "p0", sealed(swarm, anchored))
        hand_over(swarm, "p1", sealed(swarm, anchored))
        assert not held(swarm, "p1")
        await until(swarm, lambda: held(swarm, "p1"), 60)

    swarm.network.run(main())
    assert swarm.violations == []
    assert swarm.named("resync") == []


def test_who_claims_the_anchor_and_does_not_have_it_costs_next_to_nothing() -> None:
    """The run's owner has anchored a commit that nobody has; a liar says that it does, in its record and in sync/1."""
    swarm = build([*LEFT, "liar"], budget={"rounds": 20})
    swarm.ignored.add("liar")

    async def main() -> None:
        await until(swarm, lambda: len(swarm.commits) >= 4)
        lineage = swarm.life("liar").peer.store.lineage
        lineage.holds = lambda commit_id: True  # type: ignore[method-assign]
        hand_over(swarm, "liar", sealed(swarm, Head(b"\7" * 32, 2, 1, 2, 2)))
        await until(swarm, lambda: all(swarm.life(name).done for name in LEFT), 200)

    swarm.network.run(main())
    assert swarm.violations == []
    assert len(swarm.commits) >= 21
    assert not any(fields["held"] for _, name, fields in swarm.named("anchor") if name in LEFT)
    assert swarm.named("resync") == []


def forged(swarm: Swarm, head: Head) -> list[bytes]:
    good = sealed(swarm, head, 7)
    other_run = seal_anchor(Anchor(bytes(32), 7, head), OWNER)
    stranger = sealed(swarm, head, 7, FastSigner(PeerId("stranger")))
    return [stranger, other_run, good[:-1], good[:40] + b"\0" + good[41:], b"\xff" * 100]


def test_what_the_owner_did_not_sign_is_refused_and_named() -> None:
    swarm = build(LEFT, budget={"rounds": 20})

    async def main() -> None:
        await until(swarm, lambda: len(swarm.commits) >= 4)
        head = swarm.life("p0").peer.head
        forgeries = forged(swarm, head)
        for forgery in forgeries:
            hand_over(swarm, "p0", forgery)
            assert swarm.life("p0").peer.guide.newest is None
        # One over the wire, and one too long to be an anchor.
        answers = hand_over_from_outside(swarm, forgeries[0], "p1")
        await until(swarm, lambda: answers == [b""], 10)

        async def too_long(transport: SimTransport) -> None:
            stream = await transport.open(swarm.hosts["p2"].peer_id, PROTOCOL, timeout=5)
            await stream.send(encode(msgspec.structs.replace(Bring(b""), sealed=b"x" * 300)))

        swarm.network.host("other").run(too_long)
        await until(swarm, lambda: any(name == "p2" for _, name, _ in swarm.named("refused")), 10)

    swarm.network.run(main())
    assert swarm.violations == []
    assert {name for _, name, _ in swarm.named("refused")} == {"p0", "p1", "p2"}
    assert swarm.named("anchor") == []


def test_a_restart_remembers_the_anchor() -> None:
    swarm = build(LEFT, budget={"rounds": 40})

    async def main() -> None:
        await until(swarm, lambda: len(swarm.commits) >= 4)
        head = head_of(swarm.commits[swarm.life("p0").peer.head.id].body, swarm.life("p0").peer.head.id)
        hand_over(swarm, "p0", sealed(swarm, head, 9))
        await asyncio.sleep(5)
        swarm.crash("p0", power_cut=True)
        swarm.crash("p1")
        swarm.crash("p2")
        swarm.restart("p0")
        await asyncio.sleep(1)
        newest = swarm.life("p0").peer.guide.newest
        assert newest is not None
        assert (newest.number, newest.head) == (9, head)
        assert held(swarm, "p0")

    swarm.network.run(main())
    assert swarm.violations == []


def test_the_command_finds_the_head_of_a_run_of_several_fragments() -> None:
    swarm = build(LEFT, budget={"rounds": 60}, round={"fragments": 3})
    found: list[Found] = []

    async def program(transport: SimTransport) -> None:
        records = [
            Record(
                run=swarm.manifest.run_id, peer=str(swarm.hosts[name].peer_id), issued=1, expires=61, addresses=(),
                state="training", head=GENESIS, reachable=True,
            )
            for name in LEFT
        ]  # fmt: skip
        address = RunAddress(swarm.manifest.run_id, [f"/ip4/127.0.0.1/tcp/9/p2p/{OWNER.peer_id}"])
        found.append(await find(transport, swarm.manifest, OWNER, Snapshot(address, tuple(records), 0), None, 5.0))

    async def main() -> None:
        await until(swarm, lambda: len(swarm.commits) >= 8)
        swarm.network.host("organiser").run(program)
        await until(swarm, lambda: bool(found), 10)
        hand_over(swarm, "p0", sealed(swarm, found[0].head))
        await until(swarm, lambda: all(held(swarm, name) for name in LEFT), 20)

    swarm.network.run(main())
    assert swarm.violations == []
    assert found[0].head.id in chain_of(swarm, "p0")
