"""A newcomer is shown that the anchor is behind a head, and what it does not believe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from atoll.protocol.anchor import Anchor, seal_anchor
from atoll.protocol.anchoring import Guide
from atoll.protocol.disk import MemoryDisk
from atoll.protocol.fetch import Fetcher, Plan
from atoll.protocol.identity import Ed25519Signer, FastSigner
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import GENESIS, Body, decode, encode, hash_of
from atoll.protocol.simulation import SimNetwork, SimTransport
from atoll.protocol.store import Store
from atoll.protocol.transfer import Bodies, Donor, GetLineage, Request, Response
from atoll.protocol.transport import PeerId

from .test_transfer import CHAIN, POSITIONS, RUN, TIP

OWNER = FastSigner(Ed25519Signer.from_seed(bytes(32)).peer_id)
ANCHORED = POSITIONS[1].head
Twist = Callable[[Request, Response], Response]


class _Owned:
    """The run's manifest with an owner, under the same run id: its commits are made already."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.owner = OWNER.peer_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manifest, name)


MANIFEST: Any = _Owned(RUN.manifest)


def sealed(anchor: Anchor) -> bytes:
    return seal_anchor(anchor, OWNER)


def donor_store(anchor: Anchor) -> Store:
    """Twelve commits of which the last few are in the log; the anchor came when the second was made."""
    store = Store(MemoryDisk(), RUN.run_id, RUN.layout)
    for commit, chunks, position in CHAIN:
        store.append(commit, chunks)
        if position.head.height == 2:
            store.lineage.adopt(anchor, sealed(anchor))
        if position.head.height % 4 == 0:
            store.save_checkpoint(position, RUN.states[position.head.id])
    assert min(entry.head.height for entry in store.log.entries()) > 4
    return store


class Twisting(Donor):
    """Answers as it should, but for what ``twist`` makes of it."""

    def __init__(self, transport: SimTransport, store: Store, twist: Twist) -> None:
        super().__init__(transport, store)
        self._twist = twist

    async def _respond(self, request: Request) -> Response:
        return self._twist(request, await super()._respond(request))


def as_it_is(request: Request, response: Response) -> Response:
    return response


def join(twist: Twist = as_it_is, anchor: Anchor | None = None) -> tuple[Plan | None, list[str]]:
    """What a newcomer that knows the anchor plans when the only donor claims to have it; what was reported."""
    anchor = anchor or Anchor(RUN.run_id, 1, ANCHORED)
    store, reports = donor_store(anchor), []
    network = SimNetwork(seed=1)

    async def serve(transport: SimTransport) -> None:
        await Twisting(transport, store, twist).start()

    async def ask(transport: SimTransport) -> Plan | None:
        here = Store(MemoryDisk(), RUN.run_id, RUN.layout)
        guide = Guide(
            transport, RUN.verifier, MANIFEST, here, events=lambda *_, **__: None, others=list, changed=lambda: None,
            found=lambda head: None, publish=lambda: None, refused=lambda *_: None,
        )  # fmt: skip
        fetcher = Fetcher(
            transport, RUN.manifest, RUN.layout, RUN.verifier, guide=guide,
            report=lambda peer, reason, fault: reports.append(reason),
        )  # fmt: skip
        try:
            return await fetcher.plan([PeerId("sim-donor")], GENESIS, here.restorable())
        except Exception as error:
            reports.append(str(error))
            return None

    async def main() -> Plan | None:
        await network.host("donor").run(serve)
        plan: Plan | None = await network.host("late").run(ask)
        return plan

    return network.run(main()), reports


def test_a_newcomer_is_shown_it() -> None:
    plan, reports = join()
    assert plan is not None
    assert (plan.head, plan.anchored) == (TIP, ANCHORED.id)
    shown = sorted(decode(data, Body).height for data in plan.lineage)
    assert shown == list(range(ANCHORED.height + 1, plan.base.height + 1))
    assert reports == []


def rewritten(change: Callable[[Body], Body]) -> Twist:
    def twist(request: Request, response: Response) -> Response:
        if not isinstance(response, Bodies):
            return response
        return Bodies([encode(change(decode(data, Body))) for data in response.bodies])

    return twist


def less(request: Request, response: Response) -> Response:
    """One body a page, so that each costs a request."""
    return Bodies(response.bodies[:1]) if isinstance(response, Bodies) else response


def other_order(request: Request, response: Response) -> Response:
    return Bodies(response.bodies[::-1]) if isinstance(response, Bodies) else response


def loose(request: Request, response: Response) -> Response:
    """The same body in another form of MessagePack."""
    return (
        Bodies([b"\xdc\x00\x0d" + data[1:] for data in response.bodies]) if isinstance(response, Bodies) else response
    )


@pytest.mark.parametrize(
    "twist", [rewritten(lambda body: msgspec.structs.replace(body, weight=body.weight + 1)), other_order, loose]
)
def test_bodies_that_are_not_those_asked_for_are_held_against_the_donor(twist: Twist) -> None:
    plan, reports = join(twist)
    assert plan is None
    assert any("body" in reason or "malformed" in reason for reason in reports), reports


def test_pages_without_end_are_not_followed() -> None:
    asked = []

    def twist(request: Request, response: Response) -> Response:
        asked.extend([request] if isinstance(request, GetLineage) else [])
        return less(request, response)

    plan, reports = join(twist)
    assert len(asked) == 1
    # Nothing is wrong with the chain: it is taken as one without.
    assert plan is not None
    assert (plan.head, plan.anchored) == (TIP, b"")
    assert reports == []


@pytest.mark.parametrize("field", ["weight", "round", "outer_step"])
def test_what_stands_on_the_anchored_commit_must_stand_on_what_the_owner_signed(field: str) -> None:
    """Else a body of anybody's could say that the anchored chain weighed what it likes."""
    head = msgspec.structs.replace(ANCHORED, **{field: getattr(ANCHORED, field) + 1})
    plan, _ = join(anchor=Anchor(RUN.run_id, 1, head))
    assert plan is not None
    assert plan.anchored == b""


def test_the_chain_of_the_test_is_what_it_seems() -> None:
    assert [hash_of(commit.body) for commit, _, _ in CHAIN] == [position.head.id for position in POSITIONS]
