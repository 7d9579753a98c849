"""A simulated swarm under churn: ``python -m tests.churn --peers 64 --hours 6 --seed 1``.

Runs the very protocol code on the virtual clock while peers crash, freeze, lose their links and come back, checks the
design's invariants, and says what the churn cost. Exit code 1, and the command that replays it, when one is violated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll.protocol.commits import contributed
from atoll.protocol.messages import hash_of

from .simulated.faults import KINDS, Chaos
from .simulated.swarm import Swarm, manifest

SAMPLE_EVERY = 1.0
"""Virtual seconds between two looks at what every peer is doing."""


@dataclass
class Result:
    """What one seed came to. Shares are of peer-seconds: the time of all peers together, from start to end."""

    seed: int
    peers: int
    seconds: float
    faults: int = 0
    goodput: float = 0.0
    """Time whose inner steps were averaged in a commit of the final chain."""
    uptime: float = 0.0
    """Share of the time in which at least one peer trained."""
    down: float = 0.0
    """Crashed, without power, or frozen."""
    averaging: float = 0.0
    """Paused for a round."""
    idle: float = 0.0
    """Up, without samples: joining, or waiting for a lease."""
    lost: float = 0.0
    """Trained, and not in the final chain: lost in a crash or on a fork, or left out; what was still under way too."""
    commits: int = 0
    outer_steps: int = 0
    rosters: int = 0
    void: int = 0
    resyncs: int = 0
    commit_seconds: dict[str, float] = field(default_factory=dict)
    """Time from one commit to the next: p50, p90, p99, max."""
    lost_units: int = 0
    """Sample units trained on and not averaged."""
    cpu_seconds: float = 0.0
    trace: str = ""
    violations: list[str] = field(default_factory=list)


def build(args: argparse.Namespace, seed: int) -> Swarm:
    silence, steps = args.silence, args.inner_steps
    rules = {
        "inner_steps": steps, "quorum": min(args.quorum, args.peers), "max_group": args.max_group,
        "silence": silence, "first_lease": 8 * steps, "max_lease": 32 * steps, "weight_cap": 10**6,
    }  # fmt: skip
    swarm = Swarm(manifest(round=rules, budget={"rounds": 10**6}), seed=seed, latency=args.latency)
    for index in range(args.peers):
        name = f"p{index}"
        swarm.steps = {**swarm.steps, name: args.step_time}
        swarm.add(name)
    return swarm


def simulate(args: argparse.Namespace, seed: int) -> Result:
    """One seed, from start to end."""
    began = time.process_time()
    swarm = build(args, seed)
    seconds = args.hours * 3600
    chaos = None
    if args.faults:
        chaos = Chaos(
            swarm, seed, every=args.every or 600.0, back=(args.back * 0.5, args.back * 1.5),
            down=max(args.peers // 2, 1), kinds=tuple(args.faults),
        )  # fmt: skip
    seen: Counter[str] = Counter()
    up = 0

    async def main() -> None:
        nonlocal up
        while swarm.network.loop.time() < seconds:
            await asyncio.sleep(SAMPLE_EVERY)
            states = [state(swarm, name) for name in swarm.hosts]
            seen.update(states)
            up += "training" in states

    result = Result(seed, args.peers, seconds)
    try:
        swarm.network.run(main())
    except Exception as error:
        swarm.violations.append(f"the run ended with {type(error).__name__}: {error}")
    swarm.check_samples()
    samples = max(seen.total(), 1)
    result.down, result.averaging, result.idle = (seen[kind] / samples for kind in ("down", "averaging", "idle"))
    result.uptime = up / max(seconds / SAMPLE_EVERY, 1)
    units = committed_units(swarm)
    result.goodput = units / 4 * args.step_time / (args.peers * seconds)
    result.lost = max(seen["training"] / samples - result.goodput, 0.0)
    used = sum(len(life.island.used) for lives in swarm.lives.values() for life in lives if life.island is not None)
    result.lost_units = used - units
    result.faults = len(chaos.log) if chaos is not None else 0
    result.commits = len(swarm.commits)
    result.outer_steps = max((commit.body.outer_step for commit in swarm.commits.values()), default=0)
    result.rosters = len({fields["roster"] for _, _, fields in swarm.named("seal")})
    result.void = len({fields["roster"] for _, _, fields in swarm.named("void") if fields["roster"]})
    result.resyncs = len(swarm.named("resync"))
    times = swarm.commit_times()
    gaps = sorted(b - a for a, b in pairwise(times))
    if gaps:
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            result.commit_seconds[name] = round(gaps[min(int(share * len(gaps)), len(gaps) - 1)], 3)
    result.violations = swarm.violations
    result.trace = swarm.network.trace.hexdigest()
    result.cpu_seconds = round(time.process_time() - began, 2)
    return result


def state(swarm: Swarm, name: str) -> str:
    """What a peer is doing: down, averaging, idle or training."""
    host = swarm.hosts[name]
    if host.dead or host.frozen:
        return "down"
    island = swarm.life(name).island
    if island is None or (not island.frozen and island.progress().leased == 0):
        return "idle"
    if island.frozen:
        return "averaging" if swarm.life(name).peer.state == "averaging" else "idle"
    return "training"


def committed_units(swarm: Swarm) -> int:
    """Sample units averaged along the chain of the best head."""
    heads = [lives[-1].peer.head for lives in swarm.lives.values()]
    best = max(heads, key=lambda head: (head.weight, head.height))
    names = {str(host.peer_id): name for name, host in swarm.hosts.items()}
    total = 0.0
    for commit in swarm.chain(best.id):
        body = commit.body
        for member, share in zip(body.seal.members, contributed(body.seal, body.chunks, swarm.layout), strict=True):
            brought = swarm.contributions.get((names[member.peer], hash_of(body.seal).hex()))
            if brought is not None:
                total += share * len(brought.units)
    return round(total)


def describe(result: Result) -> str:
    waits = ", ".join(f"{name} {value:g} s" for name, value in result.commit_seconds.items())
    return (
        f"seed {result.seed}: goodput {result.goodput:.1%}, uptime {result.uptime:.1%} "
        f"(down {result.down:.1%}, idle {result.idle:.1%}, averaging {result.averaging:.1%}, lost {result.lost:.1%}); "
        f"{result.faults} faults, {result.outer_steps} outer steps, {result.commits} commits of {result.rosters} "
        f"rosters, {result.void} void, {result.resyncs} re-synchronised; between commits {waits}; "
        f"{result.cpu_seconds:g} s of CPU"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.churn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--hours", type=float, default=0.1, help="virtual hours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from --seed on")
    parser.add_argument(
        "--faults", type=lambda text: [kind for kind in text.split(",") if kind], default=list(KINDS),
        help=f"comma-separated kinds, empty for none: {','.join(KINDS)}",
    )  # fmt: skip
    parser.add_argument("--every", type=float, help="mean seconds between two faults [default: 600]")
    parser.add_argument("--back", type=float, default=60.0, help="mean seconds until a fault is undone")
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--step-time", type=float, default=1.0, help="virtual seconds of an inner step")
    parser.add_argument("--quorum", type=int, default=2)
    parser.add_argument("--max-group", type=int, default=16)
    parser.add_argument("--silence", type=float, default=5.0, help="T, seconds")
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    args = parser.parse_args(arguments)
    unknown = [kind for kind in args.faults if kind not in KINDS]
    if unknown:
        parser.error(f"unknown kinds of fault: {', '.join(unknown)}; known: {', '.join(KINDS)}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds; returns the exit code."""
    args = parse(arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    results: list[Result] = []
    for seed in range(args.seed, args.seed + args.seeds):
        result = simulate(args, seed)
        results.append(result)
        print(describe(result), flush=True)
        if result.violations:
            for violation in result.violations[:10]:
                print(f"  VIOLATED: {violation}")
            print(f"  replay: python -m tests.churn {replay(given, seed)}")
    bad = [result.seed for result in results if result.violations]
    if len(results) > 1:
        mean = sum(result.goodput for result in results) / len(results)
        print(f"{len(results)} seeds, mean goodput {mean:.1%}, {len(bad)} with violations")
    if args.json is not None:
        rows: list[dict[str, Any]] = [asdict(result) for result in results]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if bad else 0


def replay(given: list[str], seed: int) -> str:
    """The arguments again, for one seed."""
    kept, skip = [], False
    for word in given:
        if skip or word in ("--seed", "--seeds", "--json"):
            skip = not skip and word in ("--seed", "--seeds", "--json")
            continue
        if not word.startswith(("--seed=", "--seeds=", "--json=")):
            kept.append(word)
    return " ".join([*kept, "--seed", str(seed)])


if __name__ == "__main__":
    sys.exit(main())
