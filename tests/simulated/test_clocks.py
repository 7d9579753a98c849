"""A peer whose wall clock is wrong: it joins all the same, and says what is wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atoll.protocol.clock import TOLERANCE, correction
from atoll.protocol.disk import MemoryDisk
from atoll.protocol.messages import encode
from atoll.protocol.simulation import SimTransport

from .swarm import Swarm, manifest

NAMES = ["p0", "p1", "p2"]


def build(seed: int = 2, **changes: Any) -> Swarm:
    swarm = Swarm(manifest(budget={"rounds": 1000}, **changes), seed=seed)
    for name in NAMES:
        swarm.add(name)
    return swarm


def add_with_clock(swarm: Swarm, name: str, offset: float) -> None:
    swarm.hosts[name] = swarm.network.host(name, clock_offset=offset)
    swarm.disks[name], swarm.lives[name] = MemoryDisk(), []
    swarm.start(name)


def contributions(swarm: Swarm, name: str) -> int:
    """Commits that ``p0`` has applied with something of that peer in them."""
    return sum(f["contributors"].get(f"sim-{name}", 0) > 0 for _, who, f in swarm.named("commit") if who == "p0")


async def until_it_contributes(swarm: Swarm, name: str, limit: float) -> float:
    """Seconds until it has contributed once more."""
    began, before = swarm.network.loop.time(), contributions(swarm, name)
    while contributions(swarm, name) == before:
        assert swarm.network.loop.time() < began + limit, f"{name} did not contribute within {limit:g} s"
        await asyncio.sleep(0.1)
    return swarm.network.loop.time() - began


def warnings(swarm: Swarm, name: str) -> list[str]:
    return [f["message"] for _, who, f in swarm.named("warning") if who == name and "clock" in f["message"]]


@pytest.mark.parametrize("offset", [-600.0, -120.0, -60.0, -30.0, -15.0, 15.0, 30.0, 60.0, 120.0, 600.0, 1e9])
def test_a_fresh_joiner_with_a_wrong_clock_takes_part(offset: float) -> None:
    """Without asking for the time one that is off by a minute or more never did."""
    swarm = build()

    async def main() -> float:
        while len(swarm.commits) < 4:
            await asyncio.sleep(0.1)
        add_with_clock(swarm, "late", offset)
        return await until_it_contributes(swarm, "late", 20)

    took = swarm.network.run(main())
    assert swarm.violations == []
    print(f"{offset:+g} s: first contribution after {took:.1f} s")
    if abs(offset) >= 60:
        side = "behind" if offset < 0 else "ahead of"
        assert len(warnings(swarm, "late")) == 1
        assert f"{abs(offset):.0f} s {side} those of 3 peers" in warnings(swarm, "late")[0]
    assert not [name for name in NAMES if warnings(swarm, name)]


def test_a_clock_that_is_set_later_is_believed_again() -> None:
    swarm = build()

    async def main() -> None:
        add_with_clock(swarm, "late", 300.0)
        await until_it_contributes(swarm, "late", 30)
        swarm.hosts["late"].clock_offset = 0.0
        while swarm.life("late").peer.clock.applied:
            await asyncio.sleep(1)
        await asyncio.sleep(60)
        await until_it_contributes(swarm, "late", 20)

    swarm.network.run(main())
    assert swarm.violations == []
    assert len(warnings(swarm, "late")) == 2
    assert warnings(swarm, "late")[1].endswith("agrees with those of others again; going by it")
    transport = swarm.life("late").peer.transport
    assert abs(transport.wall() - swarm.life("p0").peer.transport.wall()) < 1


def test_one_wrong_clock_among_those_asked_is_outvoted_and_nonsense_is_not_counted() -> None:
    """Two of the three that are asked are right; of the others one is a day off, one answers with what is no time."""
    swarm = build()

    async def nonsense(transport: SimTransport) -> None:
        async def handle(stream: Any) -> None:
            await stream.receive(64)
            await stream.send(encode(["clock", "noon"]))

        await transport.serve("clock/1", handle)
        await asyncio.Event().wait()

    async def main() -> float:
        while len(swarm.commits) < 4:
            await asyncio.sleep(0.1)
        swarm.network.host("nonsense").run(nonsense)
        swarm.hosts["p2"].clock_offset = 86_400.0
        add_with_clock(swarm, "late", -120.0)
        await until_it_contributes(swarm, "late", 30)
        return swarm.life("late").peer.clock.applied

    assert swarm.network.run(main()) == pytest.approx(120, abs=1)


def test_whose_clock_is_right_asks_nobody() -> None:
    swarm = build()
    asked: list[str] = []

    async def main() -> None:
        for name in NAMES:
            transport = swarm.life(name).peer.transport
            contacts = transport.contacts
            transport.contacts = lambda name=name, contacts=contacts: asked.append(name) or contacts()  # type: ignore[method-assign,misc,func-returns-value]
        await asyncio.sleep(120)

    swarm.network.run(main())
    assert asked == []
    assert len(swarm.commits) > 20


def test_small_differences_are_left_alone() -> None:
    assert correction([TOLERANCE]) == correction([-TOLERANCE, 0.0, 100.0]) == 0.0
    assert correction([7.0, -1000.0, 8.0]) == 7.0
    assert correction([60.0, 62.0]) == 61.0
