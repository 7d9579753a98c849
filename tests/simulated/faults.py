"""Seeded schedules of faults for a simulated swarm."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from .swarm import Life, Swarm

KINDS = (
    "crash", "power", "freeze", "cut", "one-way", "island", "slow", "clock", "old-disk", "corrupt-disk", "split",
)  # fmt: skip
"""crash: SIGKILL. power: the machine is gone without a word. freeze: SIGSTOP. cut: nothing between a peer and some
others. one-way: nothing from it to them. island: its trainer dies. slow: its links have a tenth to a fiftieth of their
bandwidth. clock: its wall clock jumps by minutes. old-disk: it crashes and comes back with what its disk held a while
ago. corrupt-disk: it crashes and comes back with flipped bits, shortened or missing files. split: nothing between two
halves of the swarm, for minutes."""
NAMED = ("hang",)
"""Kinds that strike only where they are named, so that a seed's other faults stay what they were. hang: a trainer makes
no step and answers nothing, until its peer notices and starts another."""
FAST = 1e6
"""Bytes per second of a link of unlimited bandwidth, for slowing it down."""
LASTING = frozenset({"slow", "clock", "island"})
"""Kinds that leave a peer in the swarm."""


@dataclass
class Strike:
    """One fault. ``until``: when it was undone; infinity while it lasts."""

    at: float
    kind: str
    victims: tuple[str, ...]
    until: float = float("inf")


@dataclass
class Chaos:
    """Injects faults into a swarm at random moments, and undoes each after a while.

    every: mean seconds between two faults while all are up. A fault is drawn among all peers, and passes when it meets
    one that is gone already: so each that is up fails at the same rate, however many there are.
    back: seconds after which a crashed peer returns, or a cut heals.
    split: the same for a split.
    At most ``down`` peers are gone at once, so that a quorum can remain, and at most one split lasts.
    """

    swarm: Swarm
    seed: int
    every: float = 8.0
    back: tuple[float, float] = (1.0, 15.0)
    down: int = 1
    kinds: tuple[str, ...] = ("crash", "power", "freeze", "cut", "one-way", "island")
    split: tuple[float, float] = (60.0, 300.0)
    log: list[Strike] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.swarm.chaos = self
        self.random = random.Random(f"chaos {self.seed}")
        self.gone: dict[str, Strike] = {}
        """Who cannot take part now, and why."""
        self.stopped = False
        self._undo: dict[int, Callable[[], object]] = {}
        self._copies: dict[str, dict[str, bytes]] = {}
        self._schedule()

    def stop(self) -> None:
        """No more faults, and none left."""
        self.stopped = True
        for number in list(self._undo):
            self._end(number)

    def touched(self, name: str, since: float) -> bool:
        """Whether a fault of that peer lasted beyond ``since``."""
        return any(name in strike.victims and strike.until > since for strike in self.log)

    def _schedule(self) -> None:
        loop = self.swarm.network.loop
        loop.kernel_at(loop.time() + self.random.expovariate(1 / self.every), self._strike)

    def _strike(self) -> None:
        if self.stopped:
            return
        self._schedule()
        kind = self.random.choice(self.kinds)
        if self.random.random() < 0.3:
            self._copy_disks()
        everyone = [name for name in self.swarm.hosts if name != "archive"]
        names = [name for name in everyone if name not in self.gone]
        if kind == "split":
            if len(names) < 4 or any(strike.kind == "split" for strike in self._lasting()):
                return
            side = self.random.sample(names, self.random.randint(2, len(names) - 2))
            rest = [name for name in self.swarm.hosts if name not in side]
            self._begin(kind, tuple(side), self.swarm.network.cut(side, rest).heal, self.split)
            return
        if len(names) < 2 or (kind not in LASTING and len(self.gone) >= self.down):
            return
        victim = self.random.choice(everyone)
        if victim in self.gone or not self.swarm.life(victim).running:
            return
        undo = self._do(kind, victim)
        if undo is not None:
            self._begin(kind, (victim,), undo, self.back if kind != "hang" else None)

    def _lasting(self) -> list[Strike]:
        return [self.log[number] for number in self._undo]

    def _begin(
        self, kind: str, victims: tuple[str, ...], undo: Callable[[], object], lasts: tuple[float, float] | None
    ) -> None:
        """lasts: seconds until it is undone, at least and at most; None where it ends by itself."""
        loop = self.swarm.network.loop
        strike = Strike(loop.time(), kind, victims)
        number = len(self.log)
        self.log.append(strike)
        self._undo[number] = undo
        if kind not in LASTING and kind != "split":
            self.gone[victims[0]] = strike
        if lasts is None:
            self._until_back(number, self.swarm.life(victims[0]))
        else:
            loop.kernel_at(loop.time() + self.random.uniform(*lasts), self._end, number)

    def _until_back(self, number: int, life: Life) -> None:
        """Until a trainer that hung has been started again, or its peer has died."""
        loop = self.swarm.network.loop
        if life.ended is None and life.island is not None and life.island.hangs:
            loop.kernel_at(loop.time() + 1.0, self._until_back, number, life)
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        undo = self._undo.pop(number, None)
        if undo is not None:
            strike = self.log[number]
            strike.until = self.swarm.network.loop.time()
            for victim in strike.victims:
                if self.gone.get(victim) is strike:
                    del self.gone[victim]
            undo()

    def _do(self, kind: str, victim: str) -> Callable[[], object] | None:
        """Strike; what undoes it, None when there was nothing to strike."""
        swarm, host = self.swarm, self.swarm.hosts[victim]
        match kind:
            case "crash" | "power" | "old-disk" | "corrupt-disk":
                swarm.crash(victim, power_cut=kind == "power" or self.random.random() < 0.3)
                if kind == "old-disk":
                    swarm.disks[victim].files = dict(self._copies.get(victim, {}))
                elif kind == "corrupt-disk":
                    self._corrupt(victim)
                return lambda: swarm.restart(victim)
            case "freeze":
                host.freeze()
                return host.thaw
            case "cut" | "one-way":
                others = [name for name in swarm.hosts if name != victim]
                chosen = self.random.sample(others, self.random.randint(1, len(others)))
                return swarm.network.cut(victim, chosen, one_way=kind == "one-way").heal
            case "island":
                island = swarm.life(victim).island
                if island is None:
                    return None
                island.fail_next = True
                return lambda: None
            case "hang":
                island = swarm.life(victim).island
                if island is None or swarm.life(victim).peer.replica is None:
                    return None
                island.hang()
                return lambda: None
            case "slow":
                upload, download, share = host.upload, host.download, self.random.uniform(10, 50)
                host.bandwidth(upload=min(upload, FAST) / share, download=min(download, FAST) / share)
                return lambda: host.bandwidth(upload=upload, download=download)
            case "clock":
                jump = self.random.choice([-1, 1]) * self.random.uniform(5, 600)
                host.clock_offset += jump

                def back() -> None:
                    host.clock_offset -= jump

                return back
        raise ValueError(f"unknown kind of fault {kind!r}")

    def _copy_disks(self) -> None:
        for name, disk in self.swarm.disks.items():
            if self.random.random() < 0.5:
                self._copies[name] = {file: bytes(data) for file, data in disk.files.items()}

    def _corrupt(self, victim: str) -> None:
        files = self.swarm.disks[victim].files
        for name in self.random.sample(sorted(files), min(self.random.randint(1, 4), len(files))):
            data = bytearray(files[name])
            match self.random.choice(["flip", "cut", "remove"]):
                case "flip" if data:
                    data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
                    files[name] = bytes(data)
                case "cut" if data:
                    files[name] = bytes(data[: self.random.randrange(len(data))])
                case _:
                    del files[name]
