"""One hostile peer of four in the reduction, over libp2p with real daemons on 127.0.0.1.

The cases are those of the simulated network (tests/hostile.py). All run in one swarm, one after the other: each is
played in one round, which the others must complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.protocol.disk import MemoryDisk
from atoll.protocol.errors import AtollError, StreamClosed
from atoll.protocol.hivemind_transport import HivemindTransport
from atoll.protocol.identity import Signer, load_or_create_identity
from atoll.protocol.messages import Commit, hash_of
from atoll.protocol.messenger import PROTOCOL as CONTROL
from atoll.protocol.quota import PLACES
from atoll.protocol.records import RecordGate
from atoll.protocol.transport import Standing, Transport

from ..hostile import (
    CONSTANTS,
    HONEST,
    HOSTILE,
    MEMBER,
    REDUCER,
    Attack,
    Case,
    HostileRound,
    constant_where_it_is_told,
    overstate,
    verdict,
)
from ..simulated.swarm import Swarm, manifest
from ..straggler import Straggler

pytestmark = pytest.mark.real

SILENCE = 2.0
LIMIT = 60.0
"""Seconds for one case on a busy machine; most take less than one."""


class RealSwarm(Swarm):
    """Four peers in this process, each with a p2p daemon of its own; the islands are the simulation's."""

    def __init__(self, folder: Path) -> None:
        rules = {"quorum": 3, "silence": SILENCE, "inner_steps": 20}
        self.folder = folder
        super().__init__(
            manifest(budget={"rounds": 10_000}, round=rules), steps=dict.fromkeys([*HONEST, HOSTILE], 0.01)
        )
        self.attack = Attack("", folder / "unpickled", began=self._began)
        self.running: list[asyncio.Task[None]] = []

    def make_network(self) -> Any:
        """Of a simulated network the checks want the clock only."""
        return SimpleNamespace(loop=asyncio.get_running_loop())

    def signer(self, transport: Transport) -> Signer:
        return load_or_create_identity(self.folder / next(n for n, t in self.hosts.items() if t is transport))

    async def open(self) -> None:
        seeds: list[str] = []
        for name in [*HONEST, HOSTILE]:
            identity = self.folder / name
            transport = await HivemindTransport.create(
                identity_path=identity, run_id=self.manifest.run_id, seeds=seeds,
                validator=RecordGate(self.manifest.run_id, load_or_create_identity(identity)),
            )  # fmt: skip
            self.hosts[name] = transport  # type: ignore[assignment]
            seeds = seeds or [f"{transport.addresses()[0]}/p2p/{transport.peer_id}"]
        self.ids = {name: str(transport.peer_id) for name, transport in self.hosts.items()}
        self.attack.hostile = self.ids[HOSTILE]
        for name, transport in self.hosts.items():
            self.disks[name], self.lives[name] = MemoryDisk(), []
            life = self._life(name, transport, True)  # type: ignore[arg-type]
            self.running.append(asyncio.create_task(life.peer.run(), name=name))

    async def close(self) -> None:
        for name in self.lives:
            self.life(name).peer.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                await asyncio.gather(*self.running, return_exceptions=True)
        for transport in self.hosts.values():
            await transport.close()  # type: ignore[attr-defined]

    def _began(self, current: HostileRound) -> None:
        if current.case.act in CONSTANTS:
            constant_where_it_is_told(current, self.contributions[(HOSTILE, current.roster_id.hex())].x)

    async def until(self, what: str, condition: Callable[[], Any], seconds: float = LIMIT) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            ended = [task for task in self.running if task.done()]
            assert not ended, f"{what}: {[task.exception() for task in ended]}"
            assert time.monotonic() < deadline, f"{what}: {self.events[-20:]}"
            await asyncio.sleep(0.02)
        return value

    def of_roster(self, roster: str) -> Commit | None:
        """The commit of a roster, once all the honest have applied it and said their digest."""
        commit = next((c for c in self.commits.values() if hash_of(c.body.seal).hex() == roster), None)
        said = {
            n for _, n, f in self.named("digest") if commit is not None and f["commit"] == hash_of(commit.body).hex()
        }
        return commit if said.issuperset(HONEST) else None

    async def play(self, case: Case) -> None:
        attack = self.attack
        for name in self.lives:
            # Of the cases before. For strikes it would get no part for many commits; and on a fast machine the cases
            # of a minute are more than what is logged of one peer.
            self.life(name).peer._rounds._strikes.clear()
            self.life(name).peer._events.forget()
        attack.rosters, attack.rounds, attack.case = [], [], case
        first = len(self.events)
        await self.until("a round with the hostile peer", lambda: attack.rosters)
        roster = attack.rosters[0]
        voided = [f for _, n, f in self.named("void") if f["roster"] == roster and n in HONEST]
        commit = await self.until(f"the commit of roster {roster[:8]}, void: {voided}", lambda: self.of_roster(roster))

        def wrong() -> list[str]:
            seen = [(n, f) for _, n, kind, f in self.events[first:] if kind == "refused"]
            return verdict(case, attack, self.ids, seen, commit)

        # The commit may come before the news of what was wrong beside it.
        with contextlib.suppress(AssertionError):
            await self.until("its verdict", lambda: not wrong(), 3 * SILENCE)
        assert wrong() == []
        assert self.violations == []


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, RealSwarm]]:
    patch = pytest.MonkeyPatch()

    async def start() -> RealSwarm:
        swarm = RealSwarm(tmp_path_factory.mktemp("hostile"))
        patch.setattr("atoll.protocol.rounds.Round", swarm.attack.round)
        try:
            await swarm.open()
        except AtollError:
            await swarm.close()
            raise
        return swarm

    with asyncio.Runner() as runner:
        running = runner.run(start())
        try:
            yield runner, running
        finally:
            runner.run(running.close())
            patch.undo()


@contextlib.contextmanager
def little_memory(case: Case) -> Iterator[None]:
    """All four peers live in this process: what Python allocates while 512 MiB come at three of them is counted."""
    if "huge" not in case.name:
        yield
        return
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", MEMBER, ids=lambda case: case.name)
def test_a_hostile_member(swarm: tuple[asyncio.Runner, RealSwarm], case: Case) -> None:
    with little_memory(case):
        swarm[0].run(swarm[1].play(case))


@pytest.mark.parametrize("case", REDUCER, ids=lambda case: case.name)
def test_a_hostile_reducer(swarm: tuple[asyncio.Runner, RealSwarm], case: Case) -> None:
    with little_memory(case):
        swarm[0].run(swarm[1].play(case))


def test_who_is_unknown_takes_a_few_places_only(swarm: tuple[asyncio.Runner, RealSwarm], tmp_path: Path) -> None:
    """More streams than it has places for: the rest is closed unread, and the rounds go on."""
    places = PLACES[Standing.UNKNOWN].each

    async def play(swarm: RealSwarm) -> None:
        target: Any = swarm.hosts[HONEST[0]]
        outsider = await HivemindTransport.create(
            identity_path=tmp_path / "outsider", run_id=swarm.manifest.run_id, seeds=[],
            validator=RecordGate(swarm.manifest.run_id, load_or_create_identity(tmp_path / "outsider")),
        )  # fmt: skip
        try:
            outsider.learn(target.peer_id, target.addresses())
            streams = [await outsider.open(target.peer_id, CONTROL, timeout=10) for _ in range(places + 5)]
            reading = [asyncio.create_task(stream.receive()) for stream in streams]
            await swarm.until("the rest is closed", lambda: sum(task.done() for task in reading) >= 5)
            count = len(swarm.commits)
            await swarm.until("two commits", lambda: len(swarm.commits) > count + 1)
            assert sum(task.done() for task in reading) == 5
            for task in reading:
                task.cancel()
            ends = await asyncio.gather(*reading, return_exceptions=True)
            assert sum(isinstance(end, StreamClosed) for end in ends) == 5
            for stream in streams:
                await stream.close()
            await swarm.until("their places are free again", lambda: outsider.peer_id not in target._quota._held)
        finally:
            await outsider.close()

    swarm[0].run(play(swarm[1]))


def test_an_own_network_that_goes_down_is_held_against_nobody(swarm: tuple[asyncio.Runner, RealSwarm]) -> None:
    """The p2p daemon of one dies in the middle of a round: it comes back, and the others are not blamed for it."""

    async def play(swarm: RealSwarm) -> None:
        victim = HONEST[0]
        transport: Any = swarm.hosts[victim]
        first, before = len(swarm.events), transport.daemon_pid

        def since(event: str) -> list[tuple[str, dict[str, Any]]]:
            return [(n, f) for _, n, kind, f in swarm.events[first:] if kind == event]

        await swarm.until("a round", lambda: any(n == victim for n, _ in since("seal")))
        os.kill(before, signal.SIGKILL)
        await swarm.until("another daemon", lambda: transport.daemon_pid not in (None, before))
        seals = len(since("seal"))
        await swarm.until("a round with it", lambda: any(n == victim for n, _ in since("seal")[seals:]))
        count = len(swarm.commits)
        await swarm.until("its commit", lambda: len(swarm.commits) > count)
        assert [fields for name, fields in since("refused") if name == victim] == []
        assert all(fields["fault"] != "hostile" for _, fields in since("refused"))
        assert swarm.violations == []

    swarm[0].run(play(swarm[1]))


@pytest.mark.parametrize("streams", [True, False])
def test_a_straggler_gets_its_averages_after_the_commit(
    swarm: tuple[asyncio.Runner, RealSwarm], streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its reducers, who keep their streams open for T; else by hash, from whoever has committed."""

    async def play(swarm: RealSwarm) -> None:
        first = len(swarm.events)
        straggler = Straggler({transport.peer_id for n, transport in swarm.hosts.items() if n in HONEST}, monkeypatch)

        def applied() -> list[str]:
            return [
                n for _, n, kind, f in swarm.events[first:]
                if kind == "commit" and swarm.commit_rosters.get(bytes.fromhex(f["id"])) == straggler.roster
            ]  # fmt: skip

        try:
            await swarm.until("the commit of others", lambda: len(applied()) >= 2 and straggler.held)
            late = next(n for n, transport in swarm.hosts.items() if transport.peer_id == straggler.peer)
            given = sum(swarm.life(n).peer.donor.bytes_given for n in swarm.lives)
            assert late not in applied()
            if streams:
                straggler.go_on.set()
            await swarm.until("its own commit", lambda: late in applied())
            more = sum(swarm.life(n).peer.donor.bytes_given for n in swarm.lives) - given
            assert (more == 0) is streams
        finally:
            straggler.go_on.set()
        assert swarm.violations == []

    swarm[0].run(play(swarm[1]))


def test_a_weight_a_hundred_times_the_honest_one(swarm: tuple[asyncio.Runner, RealSwarm]) -> None:
    async def play(swarm: RealSwarm) -> None:
        first, cap = len(swarm.events), swarm.manifest.round.weight_cap
        stop = overstate(swarm.life(HOSTILE).peer, 100)

        def named() -> list[dict[str, Any]]:
            return [f for _, n, kind, f in swarm.events[first:] if kind == "refused" and n in HONEST]

        try:
            await swarm.until("it is refused", named)
            count = len(swarm.commits)
            await swarm.until("the others go on", lambda: len(swarm.commits) > count)
        finally:
            stop()
        assert {fields["peer"] for fields in named()} == {swarm.ids[HOSTILE]}
        # As a member it is not taken in; should it coordinate meanwhile, its seal is refused.
        assert re.search(f"allowed are {cap}|above the cap {cap}", named()[0]["reason"])
        assert swarm.violations == []

    swarm[0].run(play(swarm[1]))
