"""Seeded schedules of crashes, freezes, cuts and restarts for a simulated swarm."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from .swarm import Swarm

KINDS = ("crash", "power", "freeze", "cut", "one-way", "island")


@dataclass
class Chaos:
    """Injects faults into a swarm at random moments, and undoes each after a while.

    every: mean seconds between two faults. back: seconds after which a crashed peer returns, or a cut heals.
    At most ``down`` peers are gone at once, so that a quorum can remain.
    """

    swarm: Swarm
    seed: int
    every: float = 8.0
    back: tuple[float, float] = (1.0, 15.0)
    down: int = 1
    kinds: tuple[str, ...] = KINDS

    def __post_init__(self) -> None:
        self.random = random.Random(f"chaos {self.seed}")
        self.gone: set[str] = set()
        self.log: list[tuple[float, str, str]] = []
        self.stopped = False
        self._schedule()

    def _schedule(self) -> None:
        loop = self.swarm.network.loop
        loop.kernel_at(loop.time() + self.random.expovariate(1 / self.every), self._strike)

    def _strike(self) -> None:
        if self.stopped:
            return
        self._schedule()
        kind = self.random.choice(self.kinds)
        names = [name for name in self.swarm.hosts if name not in self.gone and name != "archive"]
        if len(self.gone) >= self.down or len(names) < 2:
            return
        victim = self.random.choice(names)
        if self.swarm.life(victim).done:
            return
        loop, host = self.swarm.network.loop, self.swarm.hosts[victim]
        self.log.append((loop.time(), kind, victim))
        self.gone.add(victim)
        cut: Any = None
        match kind:
            case "crash" | "power":
                self.swarm.crash(victim, power_cut=kind == "power")
            case "freeze":
                host.freeze()
            case "cut" | "one-way":
                others = [name for name in self.swarm.hosts if name != victim]
                size = self.random.randint(1, len(others))
                other = self.random.sample(others, size)
                cut = self.swarm.network.cut(victim, other, one_way=kind == "one-way")
            case "island":
                island = self.swarm.life(victim).island
                if island is not None:
                    island.fail_next = True
        loop.kernel_at(loop.time() + self.random.uniform(*self.back), self._undo, kind, victim, cut)

    def _undo(self, kind: str, victim: str, cut: Any) -> None:
        self.gone.discard(victim)
        match kind:
            case "crash" | "power":
                self.swarm.restart(victim)
            case "freeze":
                self.swarm.hosts[victim].thaw()
            case "cut" | "one-way":
                cut.heal()
