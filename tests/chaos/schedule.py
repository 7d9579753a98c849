"""What happens to whom and when: drawn from the seed before anything starts, whatever the run does meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KILLS = ("kill", "wipe", "old", "trainer", "p2pd", "bootstrap", "ctrl-c", "term")
"""A process is killed, or asked to leave: by SIGINT to its whole group, as a terminal does, or by SIGTERM. wipe and
old: the node returns with an empty folder, under a new identity; or with the folder as it was at an earlier start."""
STOPS = ("stop", "stop-daemon")
"""SIGSTOP of a node, with and without its p2p daemon, then SIGCONT."""
LINKS = ("cut", "deaf", "dumb", "slow")
"""A link is down, drops what comes in, drops what goes out, or is narrow."""
KINDS = (*KILLS, *STOPS, *LINKS)
NAMED = ("stop-trainer",)
"""Only where it is named, so that a seed's other faults stay what they were: SIGSTOP of a trainer alone, for good; its
node has to notice, and to start another."""
OUT = ("kill", "wipe", "old", "ctrl-c", "term", *STOPS, "cut", "deaf", "dumb")
"""Those that take a node out of the run for a while."""
AWAY = ("kill", "wipe", "old", "ctrl-c", "term", "bootstrap")
"""Those after which somebody must be started again."""
LEAVING = {"ctrl-c": 130, "term": 0}
"""Those that ask, with the exit code that is the answer."""
SIGKILLS = tuple(kind for kind in KILLS if kind not in LEAVING)
_WEIGHTS = {
    "kill": 3.0,
    "trainer": 3.0,
    "p2pd": 3.0,
    "stop": 1.5,
    "cut": 1.5,
    "deaf": 0.5,
    "dumb": 0.5,
    "ctrl-c": 0.7,
    "term": 0.7,
}


@dataclass(frozen=True)
class Fault:
    """at: seconds after the start. lasts: seconds until it is undone. who: 0 … 1, which of the possible victims."""

    at: float
    kind: str
    who: float
    lasts: float
    mbit: float


def schedule(seed: int, seconds: float, every: float, back: float, kinds: Sequence[str] = KINDS) -> Iterator[Fault]:
    """Faults, ``every`` seconds between two on average; who was killed returns after ``back`` seconds on average."""
    draw = random.Random(f"chaos {seed}")
    at = 0.0
    while kinds:
        at += draw.expovariate(1 / every)
        kind = draw.choices(list(kinds), [_WEIGHTS.get(kind, 1.0) for kind in kinds])[0]
        lasts = draw.uniform(0.3, 1.7) * back if kind in AWAY else draw.uniform(2.0, 20.0)
        fault = Fault(at, kind, draw.random(), 2 * lasts if kind == "slow" else lasts, draw.choice((1.0, 5.0, 20.0)))
        if at > seconds:
            return
        yield fault
