"""Places for streams that others open: by standing, so that nobody keeps out a member of a round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

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
    for _ in range(PLACES[standing].each):
        assert quota.take(a) is standing
    assert quota.take(a) is None
    quota.give(a, standing)
    assert quota.take(a) is standing


@pytest.mark.parametrize("crowd", [Standing.STRANGER, Standing.UNKNOWN, Standing.KNOWN])
def test_a_crowd_takes_its_own_places_only(crowd: Standing) -> None:
    standings = {"m": Standing.MEMBER}
    quota = StreamQuota(lambda peer: standings.get(peer, crowd))
    taken = 0
    while quota.take(PeerId(f"c{taken}")) is not None:
        taken += 1
    assert taken == PLACES[crowd].all
    assert quota.take(PeerId("m")) is Standing.MEMBER
    for other in Standing:
        if other is not crowd:
            standings["x"] = other
            assert quota.take(PeerId("x")) is other


def test_a_stream_gives_back_the_place_it_took_whatever_its_peer_has_become() -> None:
    standing = Standing.UNKNOWN
    quota = StreamQuota(lambda peer: standing)
    a = PeerId("a")
    for _ in range(PLACES[Standing.UNKNOWN].all):
        taken = quota.take(a)
        assert taken is not None
        standing = Standing.MEMBER
        quota.give(a, taken)
        standing = Standing.UNKNOWN
    assert quota.take(a) is Standing.UNKNOWN


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
