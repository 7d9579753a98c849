"""Which commit ``atoll anchor`` signs for, and what it refuses to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.node.anchor import Found, bring, find
from atoll.node.status import Snapshot
from atoll.protocol.address import RunAddress
from atoll.protocol.anchor import Anchor, seal_anchor
from atoll.protocol.anchoring import Anchors
from atoll.protocol.errors import NetworkError, UsageError
from atoll.protocol.identity import Ed25519Signer, FastSigner
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import GENESIS, Head
from atoll.protocol.records import Record
from atoll.protocol.simulation import SimNetwork, SimTransport
from atoll.protocol.transfer import Donor
from atoll.protocol.transport import PeerId

from .test_transfer import CHAIN, POSITIONS, RUN, TIP, filled

SEED = Ed25519Signer.from_seed(bytes(32)).peer_id
BEFORE = POSITIONS[-2].head


def record(peer: str, head: Head, *, reachable: bool = True) -> Record:
    return Record(
        run=RUN.run_id, peer=peer, issued=1.0, expires=61.0, addresses=(), state="training", head=head,
        reachable=reachable,
    )  # fmt: skip


def snapshot(*records: Record) -> Snapshot:
    return Snapshot(RunAddress(RUN.run_id, [f"/ip4/127.0.0.1/tcp/9/p2p/{SEED}"]), records, 0)


def search(
    commit: str | None,
    heads: dict[str, Head],
    *,
    serving: bool = True,
    away: str = "",
    manifest: Manifest = RUN.manifest,
) -> Found:  # fmt: skip
    """Look for a commit in a run whose peers are at these heads and have the log up to them, as far as they are of the
    run; only who is ``serving`` answers, and of those not who is ``away``."""
    network = SimNetwork(seed=1)
    heights = {position.head: position.head.height for position in POSITIONS}

    async def donor(transport: SimTransport, head: Head) -> None:
        store = filled(heights.get(head, 0))
        if head not in heights and head != GENESIS:
            store.best = lambda: head  # type: ignore[method-assign]
        await Donor(transport, store).start()
        await asyncio.Event().wait()

    async def ask(transport: SimTransport) -> Found:
        records = [record(str(network.hosts[name].peer_id), head) for name, head in heads.items()]
        return await find(transport, manifest, FastSigner(PeerId("owner")), snapshot(*records), commit, 5.0)

    async def main() -> Found:
        for name, head in heads.items():
            host = network.host(name)
            if serving and name != away:
                host.run(lambda transport, head=head: donor(transport, head))
        await asyncio.sleep(0.1)
        found: Found = await network.host("organiser").run(ask)
        return found

    found: Found = network.run(main())
    return found


def test_the_head_that_most_have_is_the_default() -> None:
    assert search(None, {"a": BEFORE, "b": BEFORE, "c": TIP}) == Found(BEFORE, 2, 3)
    assert search(None, {"a": BEFORE, "b": TIP}) == Found(TIP, 1, 2), "of two as frequent the better"


def test_a_claim_of_weight_alone_is_not_the_default() -> None:
    heavy = Head(b"\1" * 32, 99, 2**60, 99, 99)
    assert search(None, {"a": TIP, "b": TIP, "liar": heavy}) == Found(TIP, 2, 3)
    # Where it stands alone it is not signed for: nobody has such a log.
    with pytest.raises(NetworkError, match="no peer gave its log"):
        search(None, {"liar": heavy})


@pytest.mark.parametrize("digits", [32, 64])
def test_a_commit_is_found_by_the_beginning_of_its_id(digits: int) -> None:
    for position in POSITIONS[4:]:
        assert search(position.head.id.hex()[:digits], {"a": TIP, "b": TIP}).head == position.head


def test_a_commit_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="not in the logs of 2 peers"):
        search("0" * 16, {"a": TIP, "b": TIP})
    with pytest.raises(UsageError, match="not in the logs"):
        search(POSITIONS[0].head.id.hex()[:16], {"a": TIP})  # it has left the log


def test_another_peer_is_asked_when_one_does_not_answer() -> None:
    assert search(None, {"away": TIP, "b": TIP}, away="away") == Found(TIP, 1, 1)


def test_nothing_is_committed_yet() -> None:
    with pytest.raises(UsageError, match="nothing has been committed yet"):
        search(None, {"a": GENESIS})
    with pytest.raises(NetworkError, match="no peer says what head it has"):
        search(None, {})
    with pytest.raises(NetworkError, match="no peer says what head it has"):
        search(None, {"a": TIP}, serving=False)


def test_where_only_listed_peers_are_admitted_their_records_must_do() -> None:
    # The ids of simulated peers are none that a manifest could list.
    listed: Any = SimpleNamespace(admits=lambda peer: peer in ("sim-a", "sim-b"))
    assert search(None, {"a": TIP, "b": TIP}, serving=False, manifest=listed) == Found(TIP, 2, 2)
    # Whoever is not listed has no voice.
    strangers = {"x": BEFORE, "y": BEFORE}
    assert search(None, {"a": TIP, **strangers}, serving=False, manifest=listed) == Found(TIP, 1, 1)
    with pytest.raises(UsageError, match="head of none of the run's peers"):
        search(BEFORE.id.hex()[:12], {"a": TIP, **strangers}, serving=False, manifest=listed)


def test_it_is_brought_to_all_who_take_it() -> None:
    owner = FastSigner(PeerId(SEED))
    manifest = Manifest.from_dict(RUN.manifest.model_dump(exclude={"signature"}) | {"owner": SEED})
    sealed = seal_anchor(Anchor(manifest.run_id, 5, CHAIN[-1][2].head), owner)
    newer = seal_anchor(Anchor(manifest.run_id, 6, CHAIN[-1][2].head), owner)
    network = SimNetwork(seed=1)
    told: list[str] = []

    def serve(known: bytes) -> Callable[[SimTransport], Any]:
        async def program(transport: SimTransport) -> None:
            anchors = Anchors(
                transport, owner, manifest, adopted=lambda *_: told.append(transport.host.name), refused=lambda *_: None
            )
            assert not known or anchors.restore(known)
            await anchors.start()
            await asyncio.Event().wait()

        return program

    async def main() -> int:
        hosts = [network.host("a"), network.host("b"), network.host("knows better"), network.host("away")]
        for host, known in zip(hosts[:3], (b"", sealed, newer), strict=True):
            host.run(serve(known))
        await asyncio.sleep(0.1)
        peers = [host.peer_id for host in hosts]
        given: int = await network.host("organiser").run(lambda transport: bring(transport, sealed, peers, 3.0))
        return given

    assert network.run(main()) == 2
    assert told == ["a"]
