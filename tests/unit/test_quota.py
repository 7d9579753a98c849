"""Places for streams that others open: by standing, so that nobody keeps out a member of a round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.errors import PeerUnreachable
from atoll.protocol.quota import PLACES, StreamQuota
from atoll.protocol.simulation import SimNetwork, SimTransport
from atoll.protocol.transport import PeerId, Standing, Stream


def of(**standings: Standing) -> Callable[[PeerId], Standing]:
    return lambda peer: standings.get(peer, Standing.UNKNOWN)


@pytest.mark.parametrize("standing", list(Standing))
def test_a_peer_has_its_places_and_no_more(standing: Standing) -> None:
    quota = StreamQuota(of(a=standing))
    a = PeerId("a")
    assert [quota.take(a) for _ in range(PLACES[standing].each)] == [True] * PLACES[standing].each
    assert not quota.take(a)
    quota.give(a)
    assert quota.take(a)
    assert not quota.take(a)


@pytest.mark.parametrize("crowd", [Standing.STRANGER, Standing.UNKNOWN, Standing.KNOWN])
def test_a_crowd_takes_its_own_places_only(crowd: Standing) -> None:
    standings = {"m": Standing.MEMBER}
    quota = StreamQuota(lambda peer: standings.get(peer, crowd))
    taken = 0
    while quota.take(PeerId(f"c{taken}")):
        taken += 1
    assert taken == PLACES[crowd].all
    assert quota.take(PeerId("m"))
    for other in Standing:
        if other is not crowd:
            standings["x"] = other
            assert quota.take(PeerId("x"))
            quota.give(PeerId("x"))


def test_who_has_become_known_leaves_its_place_to_others_unknown() -> None:
    standings: dict[str, Standing] = {}
    quota = StreamQuota(lambda peer: standings.get(peer, Standing.UNKNOWN))
    places = PLACES[Standing.UNKNOWN].all
    assert all(quota.take(PeerId(f"p{i}")) for i in range(places))
    assert not quota.take(PeerId("late"))
    standings["p7"] = Standing.KNOWN
    assert quota.take(PeerId("late"))
    assert not quota.take(PeerId("later"))
    quota.give(PeerId("p7"))  # it is counted among the known, so no place of the unknown is free
    assert not quota.take(PeerId("later"))
    quota.give(PeerId("late"))
    assert quota.take(PeerId("later"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=200))
def test_what_is_given_back_is_free_again(steps: list[tuple[int, int]]) -> None:
    """Whatever peers become meanwhile, nothing is counted for ever."""
    standings = dict.fromkeys(map(str, range(4)), Standing.UNKNOWN)
    quota = StreamQuota(lambda peer: standings[peer])
    held: list[PeerId] = []
    for number, action in steps:
        peer = PeerId(str(number))
        match action:
            case 0 if quota.take(peer):
                held.append(peer)
            case 1 if peer in held:
                held.remove(peer)
                quota.give(peer)
            case 2:
                standings[peer] = list(Standing)[(list(Standing).index(standings[peer]) + 1) % len(Standing)]
    for peer in held:
        quota.give(peer)
    assert not quota._held
    assert not quota._counted
    assert not any(quota._total.values())


def test_the_transport_asks_before_it_calls_a_handler() -> None:
    network = SimNetwork(seed=1)
    called: list[PeerId] = []

    async def handler(stream: Stream) -> None:
        called.append(stream.peer)
        await stream.receive()

    async def main() -> None:
        server = network.host("server")
        await server.transport.serve("x", handler)
        server.transport.guard(lambda peer: Standing.MEMBER if peer == "sim-m" else Standing.STRANGER)
        hold: list[Stream] = []

        async def fill(transport: SimTransport) -> int:
            for count in range(100):
                try:
                    hold.append(await transport.open(server.peer_id, "x", timeout=5))
                except PeerUnreachable as error:
                    assert "no more streams" in str(error)  # noqa: PT017
                    return count
            return 100

        each, places = PLACES[Standing.STRANGER].each, PLACES[Standing.STRANGER].all
        strangers = [network.host(f"s{i}") for i in range(places // each + 1)]
        assert [await host.run(fill) for host in strangers] == [each] * (places // each) + [0]
        assert await network.host("m").run(fill) == PLACES[Standing.MEMBER].each
        assert "sim-m" in called
        assert len(called) == places + PLACES[Standing.MEMBER].each
        for stream in hold[:each]:
            await stream.close()
        await asyncio.sleep(1)
        assert await strangers[-1].run(fill) == each

    network.run(main())
