"""What several rounds in flight save: ``python -m tests.flights``.

A simulated swarm whose model is cut into fragments, with one round in flight at a time (τ = H / P) and with several (up
to τ = H), on the same links. Printed are the share of the time in which one trainer stood still, how long its rounds
took and how far apart they were, how many it had in flight at most, and how full its uplink was; from the second round
of each fragment to the one before the last.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .simulated.swarm import Swarm, manifest

LIMIT = 600
"""Virtual seconds that a run may take."""


class InFlight:
    """The rounds that one peer has in flight, by its events."""

    def __init__(self, swarm: Swarm, name: str) -> None:
        self.most = 0
        self.seconds: list[float] = []
        """From the seal to the commit, of each round."""
        self.aloft: dict[str, float] = {}
        self._swarm, self._name = swarm, name
        swarm.hooks.append(self._note)

    def _note(self, name: str, event: str, fields: dict[str, Any]) -> None:
        if name != self._name:
            return
        now = self._swarm.network.loop.time()
        if event == "seal":
            self.aloft[fields["roster"]] = now
            self.most = max(self.most, len(self.aloft))
        elif event == "void":
            self.aloft.pop(fields["roster"], None)
        elif event == "commit":
            began = self.aloft.pop(self._swarm.commit_rosters[bytes.fromhex(fields["id"])].hex(), None)
            if began is not None:
                self.seconds.append(now - began)


@dataclass
class Measured:
    """One run, between its second and its last but one round of each fragment."""

    idle: float
    """Share of the time in which the trainer stood still."""
    seconds: float
    """Of a round, from its seal to its commit, the median."""
    between: float
    """Seconds from commit to commit, on average."""
    most: int
    """Rounds in flight at once."""
    link: float
    """Share of the uplink that was used; 0 where it has no limit."""


def measure(
    tau: int, *, fragments: int = 3, inner_steps: int = 21, peers: int = 3, rounds: int = 12, latency: float = 0.3,
    bandwidth: float = float("inf"), parameters: int = 1200, seed: int = 0,
) -> Measured:  # fmt: skip
    """Run a swarm whose inner steps take 0.1 s each. tau: the overlap. latency: seconds one way. bandwidth: bytes per
    second of each peer, up and down. parameters: of the model, a multiple of the fragments."""
    layers = [[parameters // fragments]] * fragments
    rules = {"inner_steps": inner_steps, "fragments": fragments, "overlap": tau}
    chunk = 1 << max(parameters // 64, 64).bit_length() - 1
    run = manifest(
        parameters=parameters, round=rules, state={"layers": layers, "chunk": chunk}, budget={"rounds": rounds},
        codec={"name": "float32"},
    )  # fmt: skip
    swarm = Swarm(run, seed=seed, latency=latency, bandwidth=bandwidth)
    flights = InFlight(swarm, "p0")
    for index in range(peers):
        swarm.add(f"p{index}")
    marks: list[tuple[float, float, int, int]] = []

    def mark(name: str, event: str, fields: dict[str, Any]) -> None:
        if (name, event) == ("p0", "commit") and fragments <= fields["outer_step"] <= (rounds - 1) * fragments:
            island = swarm.life("p0").island
            assert island is not None
            marks.append(
                (swarm.network.loop.time(), island.idle, swarm.hosts["p0"].bytes_sent, len(flights.seconds))
            )  # fmt: skip

    swarm.hooks.append(mark)

    async def wait() -> None:
        for _ in range(2 * LIMIT):
            await asyncio.sleep(0.5)
            if all(lives[-1].done or lives[-1].error for lives in swarm.lives.values()):
                return

    swarm.network.run(wait())
    assert swarm.violations == [], swarm.violations
    (began, before, sent, first), (ended, after, total, last) = marks[0], marks[-1]
    return Measured(
        idle=(after - before) / (ended - began), seconds=statistics.median(flights.seconds[first:last]),
        between=statistics.mean(b[0] - a[0] for a, b in pairwise(marks)), most=flights.most,
        link=(total - sent) / (ended - began) / bandwidth,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.flights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fragments", type=int, default=3)
    parser.add_argument("--inner-steps", type=int, default=21, help="of 0.1 s each")
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12, help="of each fragment")
    parser.add_argument("--latency", type=float, default=0.3, help="seconds one way")
    parser.add_argument("--bandwidth", type=float, default=float("inf"), help="bytes per second, up and down")
    parser.add_argument("--parameters", type=int, default=1200, help="of the model, a multiple of the fragments")
    args = parser.parse_args(arguments)
    print("| τ, steps | in flight | stood still | round, s | commit to commit, s | uplink used |")
    print("|---|---|---|---|---|---|")
    steps, count = args.inner_steps, args.fragments
    for tau in sorted({0, steps // count, *(steps * turn // count for turn in range(2, count + 1))}):
        found = measure(tau, **vars(args))
        link = f"{found.link:.0%}" if found.link else ""
        print(
            f"| {tau} | {found.most} | {found.idle:.1%} | {found.seconds:.2f} | {found.between:.2f} | {link} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
