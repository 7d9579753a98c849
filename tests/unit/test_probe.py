"""Measuring a link alone, over simulated links: what is found, who is refused, and what a hostile partner costs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import probe
from atoll.protocol.errors import Fault, StreamClosed
from atoll.protocol.probe import (
    ACK,
    ASK,
    ASKS,
    AT_ONCE,
    BUSY,
    BYTES,
    DATA,
    EACH,
    END,
    LARGEST,
    LIMIT,
    READY,
    REFILL,
    STALL,
    Meter,
    Prober,
    Quota,
)
from atoll.protocol.rates import Rates
from atoll.protocol.simulation import SimNetwork, SimTransport
from atoll.protocol.transport import PeerId, Stream

MBIT = 125e3
Handler = Callable[[Stream], Awaitable[None]]


class Always(Rates):
    """Whose link is to be measured whatever rounds say."""

    def due_in(self, now: float) -> float:
        return max(self._due - now, 0.0)


class World:
    """Hosts "me" and partners, each with a prober, or with what it serves in place of one."""

    def __init__(
        self, links: Mapping[str, float | tuple[float, float]], latency: float = 0.02, **serves: Handler
    ) -> None:
        self.network = SimNetwork(seed=1, latency=latency)
        self.probers: dict[str, Prober] = {}
        self.rooms = dict.fromkeys(links, 60.0)
        self.refused: list[tuple[str, str, str, Fault]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.serves = serves
        for name, link in links.items():
            up, down = link if isinstance(link, tuple) else (link, link)
            self.network.host(name, upload=up, download=down)

    def prober(self, name: str, transport: SimTransport) -> Prober:
        others = [host.peer_id for other, host in self.network.hosts.items() if other != name]

        def events(event: str, /, **fields: Any) -> None:
            self.events.append((event, fields))

        self.probers[name] = Prober(
            transport, Always(transport.now()), room=lambda: self.rooms[name], partners=lambda: others,
            known=lambda peer: peer != "sim-stranger",
            refused=lambda peer, reason, fault: self.refused.append((name, peer, reason, fault)), events=events,
        )  # fmt: skip
        return self.probers[name]

    def run(self, program: Callable[[], Awaitable[None]], limit: float = 300.0) -> None:
        """Start everybody, then do ``program`` on "me"."""

        async def serve(transport: SimTransport, name: str) -> None:
            if name in self.serves:
                await transport.serve(probe.PROTOCOL, self.serves[name])
            else:
                await self.prober(name, transport).start()

        async def main() -> None:
            for name, host in self.network.hosts.items():
                await host.run(lambda transport, name=name: serve(transport, name))
            await self.network.hosts["me"].run(lambda transport: program())

        self.network.run(main(), limit=limit)

    def measure(self, *, lenient: bool = True) -> tuple[float, float, float]:
        """What one probe finds: upload and download in Mbit/s, and the seconds it took."""
        began = ended = 0.0

        async def program() -> None:
            nonlocal began, ended
            began = self.network.loop.time()
            await self.probers["me"].measure(lenient=lenient)
            ended = self.network.loop.time()

        self.run(program)
        rates = self.probers["me"].rates
        return rates.upload / MBIT, rates.download / MBIT, ended - began


@pytest.mark.parametrize("latency", [0.001, 0.02, 0.15])
@pytest.mark.parametrize(
    ("links", "up", "down"),
    [
        ({"me": 10 * MBIT, "a": 10 * MBIT, "b": 10 * MBIT}, 10, 10),
        ({"me": 20 * MBIT, "a": 10 * MBIT, "b": 10 * MBIT}, 20, 20),
        ({"me": (5 * MBIT, 40 * MBIT), "a": 50 * MBIT, "b": 50 * MBIT, "c": 50 * MBIT}, 5, 40),
        ({"me": 1 * MBIT, "a": 50 * MBIT, "b": 50 * MBIT, "c": 50 * MBIT}, 1, 1),
        ({"me": 0.2 * MBIT, "a": 50 * MBIT}, 0.2, 0.2),
    ],
)
def test_a_link_is_measured_with_several_partners(
    links: dict[str, Any], up: float, down: float, latency: float
) -> None:
    world = World(links, latency)
    found = world.measure()
    # Where the way back and forth is long, connections find their rate late: it is a lower bound.
    least = 0.85 if latency < 0.1 else 0.3
    assert least * up <= found[0] <= 1.1 * up
    assert least * down <= found[1] <= 1.1 * down
    assert found[2] < (3.2 if latency < 0.1 else 7.0)
    assert world.refused == []
    assert [event for event, _ in world.events] == ["probe"]
    sent = world.network.hosts["me"].bytes_sent
    assert sent <= 3 * (BYTES + BYTES // 1000) + 100


def test_a_fast_link_ends_by_bytes_and_not_by_time() -> None:
    links = {"me": 1000 * MBIT, "a": 1000 * MBIT, "b": 1000 * MBIT, "c": 1000 * MBIT}
    up, down, seconds = World(links, latency=0.0005).measure()
    assert up > 500
    assert down > 500
    assert seconds < 0.2


def test_nobody_is_disturbed_in_or_before_a_round() -> None:
    world = World({"me": MBIT, "a": MBIT, "b": MBIT})
    world.rooms["a"] = probe.ROOM_TO_ANSWER - 0.1

    async def program() -> None:
        with pytest.raises(probe._Busy):
            await world.probers["me"].measure(lenient=False)
        assert world.network.hosts["me"].bytes_sent < 10
        await world.probers["me"].measure(lenient=True)

    world.run(program)
    assert [fields["partners"] for _, fields in world.events] == [["sim-b"]]
    assert world.refused == []


@pytest.mark.parametrize("whose", ["me", "a"])
def test_a_round_that_begins_ends_the_probe(whose: str) -> None:
    world = World({"me": MBIT, "a": MBIT, "b": MBIT})

    async def program() -> None:
        loop = world.network.loop
        loop.call_later(0.3, lambda: world.rooms.update({whose: 0.0}))
        began = loop.time()
        await world.probers["me"].measure(lenient=True)
        if whose == "me":
            assert loop.time() - began < 0.3 + 2 * probe.LOOK
            assert world.probers["me"].rates.due_in(world.probers["me"]._transport.now()) == 0, "it is made up for"

    world.run(program)
    assert world.refused == []
    assert len(world.events) == (whose == "a"), "then with the one who is left"


def test_two_that_probe_each_other_meet_later() -> None:
    world = World({"me": MBIT, "a": MBIT, "b": MBIT})

    async def program() -> None:
        for name in ("a", "b"):
            prober = world.probers[name]
            world.network.hosts[name].run(lambda transport, prober=prober: prober.run())
        work = asyncio.get_running_loop().create_task(world.probers["me"].run())
        while len(world.events) < 3:  # noqa: ASYNC110 - on a virtual clock
            await asyncio.sleep(0.5)
        work.cancel()

    world.run(program, limit=200.0)
    for prober in world.probers.values():
        assert prober.rates.upload == pytest.approx(MBIT, rel=0.15)
    assert all(len(fields["partners"]) == 2 for _, fields in world.events)


async def silent(stream: Stream) -> None:
    await asyncio.Event().wait()


async def ready_and_silent(stream: Stream) -> None:
    await stream.receive()
    await stream.send(bytes([READY]))
    await asyncio.Event().wait()


async def acknowledges_what_was_not_sent(stream: Stream) -> None:
    await stream.receive()
    await stream.send(bytes([READY]))
    while True:
        await stream.send(bytes([ACK]))


async def endless(stream: Stream) -> None:
    await stream.receive()
    await stream.send(bytes([READY]))
    while (await stream.receive())[0] != END:
        await stream.send(bytes([ACK]))
    while True:
        await stream.send(bytes([DATA]) + bytes(LARGEST - 1))


async def garbage(stream: Stream) -> None:
    await stream.receive()
    await stream.send(b"\xff" * 100)


async def huge(stream: Stream) -> None:
    await stream.receive()
    await stream.send(bytes(1 << 20))


async def trickles(stream: Stream) -> None:
    await stream.receive()
    await stream.send(bytes([READY]))
    while True:
        await stream.receive()
        await asyncio.sleep(0.9 * STALL)
        await stream.send(bytes([ACK]))


@pytest.mark.parametrize(
    ("partner", "fault"),
    [
        (silent, Fault.SLOW),
        (ready_and_silent, Fault.SLOW),
        (acknowledges_what_was_not_sent, Fault.SLOW),
        (endless, Fault.HOSTILE),
        (garbage, Fault.HOSTILE),
        (huge, Fault.HOSTILE),
        (trickles, Fault.SLOW),
    ],
)
def test_a_hostile_partner_is_bounded(partner: Handler, fault: Fault) -> None:
    world = World({"me": 10 * MBIT, "good": 10 * MBIT, "bad": 10 * MBIT}, bad=partner)
    _, _, seconds = world.measure()
    assert seconds <= LIMIT + 0.1
    assert [(who, peer, why) for who, peer, _, why in world.refused] == [("me", "sim-bad", fault)]
    assert world.events[0][1]["partners"][0] == "sim-good"
    hosts = world.network.hosts
    assert hosts["me"].bytes_sent <= 2 * (BYTES + BYTES // 1000) + 1000
    assert hosts["me"].bytes_received <= 2 * (BYTES + BYTES // 1000) + LARGEST + 4000


async def _hostile_asker(
    world: World, act: Callable[[Stream], Awaitable[None]], times: int, answers: list[bytes]
) -> None:
    """Opens probes to "good" one after another, from "me", each for a few seconds."""
    transport = world.network.hosts["me"].transport
    for _ in range(times):
        stream = await transport.open(world.network.hosts["good"].peer_id, probe.PROTOCOL, timeout=5.0)
        try:
            async with asyncio.timeout(STALL + 1.0):
                await stream.send(bytes([ASK]))
                answers.append(await stream.receive())
                await act(stream)
                while True:
                    await stream.receive()
        except (StreamClosed, TimeoutError):
            pass
        finally:
            await stream.close()


async def _floods(stream: Stream) -> None:
    while True:
        await stream.send(bytes([DATA]) + bytes(LARGEST - 1))


async def _small(stream: Stream) -> None:
    while True:
        await stream.send(bytes([DATA]))


async def _takes_and_stays(stream: Stream) -> None:
    await stream.send(bytes([END]))
    for _ in range(10_000):
        await stream.receive()


async def _says_nothing(stream: Stream) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("act", [_floods, _small, _takes_and_stays, _says_nothing])
def test_a_hostile_asker_costs_its_quota(act: Callable[[Stream], Awaitable[None]]) -> None:
    """Once a minute at most, and then no more than the bounds of one probe."""
    world = World({"me": 100 * MBIT, "good": 10 * MBIT})
    answers: list[bytes] = []
    world.run(lambda: _hostile_asker(world, act, 10, answers), limit=600.0)
    assert answers.count(bytes([READY])) == 1
    assert answers.count(bytes([BUSY])) == 9
    good = world.network.hosts["good"]
    assert good.bytes_sent <= 2 * (BYTES + BYTES // 1000) + 2000
    assert all(fault in (Fault.HOSTILE, Fault.SLOW) for *_, fault in world.refused)
    assert not world.probers["good"]._occupied


def test_asking_without_probing_has_an_end() -> None:
    world = World({"me": MBIT, "good": MBIT})

    async def leave(stream: Stream) -> None:
        raise StreamClosed("enough")

    answers: list[bytes] = []
    world.run(lambda: _hostile_asker(world, leave, ASKS + 5, answers))
    assert answers == [bytes([READY])] * ASKS + [bytes([BUSY])] * 5
    assert world.refused == []


def test_a_stranger_gets_no_answer() -> None:
    world = World({"me": MBIT, "stranger": MBIT})

    async def program() -> None:
        transport = world.network.hosts["stranger"].transport
        stream = await transport.open(world.network.hosts["me"].peer_id, probe.PROTOCOL, timeout=5.0)
        with pytest.raises(StreamClosed):
            await stream.receive()

    async def main() -> None:
        await world.network.hosts["stranger"].run(lambda transport: program())

    world.run(main)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 30), st.booleans()), max_size=60))
def test_the_quota(asks: list[tuple[str, float, bool]]) -> None:
    quota, now, taken = Quota(0.0), 0.0, []
    for name, pause, begins in asks:
        now += pause
        if quota.ask(PeerId(name), now) and begins:
            quota.take(PeerId(name), now)
            taken.append((now, name))
    for at, name in taken:
        window = [(t, n) for t, n in taken if at <= t < at + EACH]
        assert sum(n == name for _, n in window) == 1
        assert len(window) <= AT_ONCE + math.ceil(EACH / REFILL)


def test_the_meter() -> None:
    meter = Meter()
    assert meter.rate() == 0
    for i in range(30):
        meter.add(1 + i / 10, 1000)
    assert meter.rate() == pytest.approx(1e4)
    # A slow beginning does not count, nor does it matter whether pieces come one by one or two at once.
    bunches = Meter()
    bunches.add(0.0, 1)
    for i in range(30):
        bunches.add(5 + i // 2 / 5, 1000)
    assert bunches.rate() == pytest.approx(1e4, rel=0.02)
    still = Meter()
    for _ in range(9):
        still.add(7.0, 1000)
    assert still.rate() == 0
