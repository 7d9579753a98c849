"""What a death costs those who live on: ``python -m tests.kills``.

In a simulated swarm the coordinator of a round, or one of its reducers, dies at a moment between the commit before that
round and the round's own. Printed is how long the next commit took from there: in the median and at most, against twice
the time that the same round takes when nobody dies, plus T, and against the protocol's bound. Moments are spread evenly
over each phase: the inner steps; from the first peer's freeze to the seal; from the seal to the commit.

A *crash* resets the connections, as a killed process does; *power* and *freeze* leave nothing but silence.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .simulated.island import SimulatedIsland
from .simulated.swarm import Swarm, manifest

INNER_STEPS = 20
STEP_TIME = 0.5
ROUND = 4
"""The round in which somebody dies; by then everybody has samples and has been measured."""
LIMIT = 300
"""Virtual seconds that the next commit may take."""
PHASES = "training", "entering", "averaging"
KINDS = "crash", "power", "freeze"
VICTIMS = "coordinator", "reducer"


@dataclass(frozen=True)
class Setting:
    """Of a swarm. latency: seconds one way. bandwidth: bytes per second, up and down. silence: T, seconds."""

    peers: int
    seed: int
    silence: float = 5.0
    latency: float = 0.025
    bandwidth: float = 100_000.0
    parameters: int = 65_536


@dataclass(frozen=True)
class Calm:
    """The round as it is when nobody dies: moments in virtual seconds."""

    before: float
    """The commit before it, at the first peer that has it."""
    freeze: float
    """The first peer stops for it."""
    seal: float
    commit: float
    coordinator: str
    members: tuple[str, ...]
    deadline: float
    """D, seconds."""

    @property
    def seconds(self) -> float:
        """What the round takes, without the inner steps."""
        return self.commit - self.freeze

    def span(self, phase: str) -> tuple[float, float]:
        return {
            "training": (self.before, self.freeze), "entering": (self.freeze, self.seal),
            "averaging": (self.seal, self.commit),
        }[phase]  # fmt: skip


@dataclass(frozen=True)
class Death:
    """One measured death."""

    peers: int
    phase: str
    kind: str
    victim: str
    at: float
    """Share of the phase that had gone by."""
    seconds: float
    """From the death to the next commit; the inner steps that were still to be done left out."""
    allowed: float
    """Twice the round's seconds in calm, plus T."""
    of_bound: float
    """Share of (v + 1)(D + 3T) that it took."""
    void: int


class _Watched:
    """A swarm whose freezes are noted."""

    def __init__(self, setting: Setting) -> None:
        run = manifest(
            parameters=setting.parameters, round={"inner_steps": INNER_STEPS, "silence": setting.silence},
            state={"chunk": 2048}, budget={"rounds": ROUND + 3},
        )  # fmt: skip
        self.swarm = Swarm(
            run, seed=setting.seed, latency=setting.latency, bandwidth=setting.bandwidth,
            steps={f"p{i}": STEP_TIME for i in range(setting.peers)},
        )  # fmt: skip
        self.names = [f"p{i}" for i in range(setting.peers)]
        self.freezes: list[float] = []
        for name in self.names:
            self.swarm.add(name)
        self.swarm.hooks.append(self._watch)
        self._watching: set[int] = set()

    def _watch(self, name: str, event: str, fields: dict[str, Any]) -> None:
        for life in self.swarm.lives[name]:
            if life.island is not None and id(life) not in self._watching:
                self._watching.add(id(life))
                self._note(life.island)

    def _note(self, island: SimulatedIsland) -> None:
        freeze = island.freeze

        async def noted(*args: Any, **named: Any) -> Any:
            self.freezes.append(self.swarm.network.loop.time())
            return await freeze(*args, **named)

        island.freeze = noted  # type: ignore[method-assign]

    def run(self, until: Callable[[], bool]) -> None:
        async def main() -> None:
            while not until():
                if self.swarm.network.loop.time() > LIMIT:
                    raise TimeoutError(f"no commit in {LIMIT} s")
                await asyncio.sleep(0.05)

        self.swarm.network.run(main())


def calm(setting: Setting) -> Calm:
    """The swarm of that setting when nobody dies."""
    watched = _Watched(setting)
    swarm = watched.swarm
    seal: list[tuple[float, dict[str, Any]]] = []

    def hook(name: str, event: str, fields: dict[str, Any]) -> None:
        if event == "seal" and fields["round"] == ROUND and not seal:
            seal.append((swarm.network.loop.time(), fields))

    swarm.hooks.append(hook)
    watched.run(lambda: len(swarm.committed_at) >= ROUND)
    before, commit = sorted(swarm.committed_at.values())[ROUND - 2 : ROUND]
    sealed_at, fields = seal[0]
    coordinator = str(fields["coordinator"])
    return Calm(
        before, min(at for at in watched.freezes if at > before), sealed_at, commit, swarm.name_of(coordinator),
        tuple(swarm.name_of(member) for member in fields["members"] if member != coordinator),
        float(fields["deadline"]),
    )  # fmt: skip


def death(setting: Setting, quiet: Calm, phase: str, kind: str, victim: str, at: float) -> Death:
    """The same swarm, in which ``victim`` dies when the share ``at`` of ``phase`` has gone by."""
    watched = _Watched(setting)
    swarm, loop = watched.swarm, watched.swarm.network.loop
    begins, ends = quiet.span(phase)
    moment = begins + at * (ends - begins)
    target = quiet.coordinator if victim == "coordinator" else quiet.members[setting.seed % len(quiet.members)]

    def strike() -> None:
        if kind == "freeze":
            swarm.hosts[target].freeze()
        else:
            swarm.crash(target, power_cut=kind == "power")

    loop.kernel_at(moment, strike)
    later: list[float] = []

    def next_commit() -> bool:
        # A commit of leases alone brings nobody on.
        later[:] = [when for commit, when in swarm.committed_at.items() if when > moment and weighs(commit)]
        return bool(later)

    def weighs(commit: bytes) -> bool:
        return any(member.weight for member in swarm.commits[commit].body.seal.members)

    watched.run(next_commit)
    if swarm.violations:
        raise AssertionError("; ".join(swarm.violations))
    void = len({fields["roster"] for when, _, fields in swarm.named("void") if when > moment and fields["roster"]})
    # Nothing is late before the inner steps are done.
    seconds = min(later) - max(moment, min(quiet.freeze, quiet.before + INNER_STEPS * STEP_TIME))
    bound = (void + 1) * (quiet.deadline + 3 * setting.silence)
    return Death(
        setting.peers, phase, kind, victim, at, seconds, 2 * quiet.seconds + setting.silence, seconds / bound, void
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code: 1 when a median is above what is allowed or a bound was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, nargs="+", default=[3, 4, 8])
    parser.add_argument("--moments", type=int, default=5, help="in each phase")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--silence", type=float, default=5.0, help="T, seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every death here too, as a list of rows")
    args = parser.parse_args(arguments)
    deaths: list[Death] = []
    wrong = False
    print("| peers | who | how | when | median, s | longest, s | 2 × round + T, s | of the bound | void |")
    print("|---|---|---|---|---|---|---|---|---|")
    for peers, victim, kind, phase in itertools.product(args.peers, VICTIMS, KINDS, PHASES):
        found = []
        for seed in range(args.seeds):
            setting = Setting(peers, seed, args.silence)
            quiet = calm(setting)
            for number in range(args.moments):
                found.append(death(setting, quiet, phase, kind, victim, (number + 0.5) / args.moments))
        deaths += found
        seconds = [one.seconds for one in found]
        allowed = statistics.median(one.allowed for one in found)
        share = max(one.of_bound for one in found)
        wrong |= share > 1 or statistics.median(seconds) > allowed
        print(
            f"| {peers} | {victim} | {kind} | {phase} | {statistics.median(seconds):.1f} | {max(seconds):.1f} | "
            f"{allowed:.1f} | {share:.0%} | {sum(one.void for one in found)} |",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in deaths], indent=1) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
