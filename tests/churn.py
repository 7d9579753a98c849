"""A simulated swarm under churn: ``python -m tests.churn --peers 64 --hours 6 --seed 1``.

Runs the very protocol code on the virtual clock while peers crash, freeze, lose their links or their disks and come
back, checks the design's invariants, and says what the churn cost. Exit code 1, and the command that replays it, when
one is violated.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atoll.protocol.lowrank import largest_rank
from atoll.protocol.overlap import Merge

from .simulated.accounts import SAMPLE_EVERY, Accounts
from .simulated.faults import KINDS, NAMED, Chaos
from .simulated.swarm import Swarm, manifest

PARAMETERS, CHUNK = 128, 64
STEP_TOKENS = 40
"""Of the simulated islands."""
CALM = 6
"""Rounds without faults at the end, within which all must be together again and have contributed."""


@dataclass
class Result:
    """What one seed came to. Shares are of peer-seconds: the time of all peers together, from start to end."""

    seed: int
    peers: int
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)
    """What ``--vary`` drew, and all else that shapes the run."""
    faults: dict[str, int] = field(default_factory=dict)
    goodput: float = 0.0
    """Time whose inner steps were averaged in a commit of the final chain, be it the first one after the time."""
    loss: dict[str, float] = field(default_factory=dict)
    """Where the rest went. down: crashed, without power, frozen. hung: its trainer hung, or was started again for
    that; only where it did. joining, leaseless: up, without samples. entering:
    paused for a call, averaging: for a round. forked: averaged on a fork that was left. dropped: trained, and dropped
    in going over to another head. crashed: trained, and gone with a process. pending: trained, and in no average, the
    first of the calm at the end included."""
    uptime: float = 0.0
    """Share of the time in which at least one peer trained."""
    in_round: float = 0.0
    """The same in which nobody did, and somebody was paused for a call or a round."""
    longest_pause: float = 0.0
    """The longest time for which nobody trained, seconds."""
    commits: int = 0
    lone: int = 0
    """Commits of a roster of one."""
    outer_steps: int = 0
    rosters: int = 0
    void: int = 0
    unsealed: int = 0
    """Times that a member gave up waiting for a seal."""
    resyncs: int = 0
    forks: list[int] = field(default_factory=list)
    """Commits of each fork that was left."""
    commit_seconds: dict[str, float] = field(default_factory=dict)
    """Time from one commit to the next: p50, p90, p99, max."""
    of_bound: float = 0.0
    """The largest share of what (v+1)(D+3T) and the inner steps allow that such a time took."""
    lost_units: int = 0
    """Sample units trained on and not averaged."""
    lost_leases: int = 0
    """Sample units leased and never trained on."""
    cpu_seconds: float = 0.0
    trace: str = ""
    violations: list[str] = field(default_factory=list)
    replay: str = ""


def draw(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The settings of a seed: as given, or with ``--vary`` drawn from it."""
    settings = {
        "peers": args.peers[0] + seed % (args.peers[1] - args.peers[0] + 1), "quorum": args.quorum,
        "silence": args.silence, "latency": args.latency, "inner_steps": args.inner_steps, "step_time": args.step_time,
        "uneven": 1.0, "grace": 0.25, "jitter": 0.0, "hidden": 0, "bandwidth": args.bandwidth, "every": args.every,
        "back": args.back, "codec": "int8", "overlap": args.overlap, "merge": args.merge,
        "fragments": args.fragments, "keep": args.keep, "by": "steps", "weights": "tokens", "average": "mean",
        "stale": "keep",
    }  # fmt: skip
    length = args.inner_steps * args.step_time
    if args.vary:
        rng = random.Random(f"settings {seed}")
        settings |= {
            "quorum": rng.randint(1, settings["peers"] // 2), "silence": rng.choice([2.0, 5.0, 5.0, 5.0, 8.0]),
            "codec": rng.choice(["float32", "float32", "int8", "sparse"]),
            "latency": rng.choice([0.005, 0.03, 0.1]), "uneven": rng.choice([1.0, 1.5, 4.0]),
            "grace": rng.choice([0.0, 0.25, 0.5]), "jitter": rng.choice([0.0, 0.5, 1.0]),
            "hidden": rng.choice([0, 0, settings["peers"] // 3]),
            "every": rng.choice([1.0, 3.0, 10.0]) * length, "back": rng.choice([0.2, 1.0, 3.0]) * length,
        }  # fmt: skip
        if random.Random(f"codec {seed}").random() < 0.15:
            settings["codec"] = "lowrank"  # drawn by itself, so that the other settings of a seed are what they were
        if args.keep is None:
            settings["keep"] = rng.choice([0.0, 0.1, 0.3]) * length
        if args.overlap:
            settings["overlap"] = rng.randint(0, args.overlap)
            settings["merge"] = args.merge if settings["overlap"] else "carry"
        rules = random.Random(f"rules {seed}")
        settings |= {
            "by": rules.choice(["steps", "steps", "tokens", "time"]),
            "weights": rules.choice(["tokens", "tokens", "tokens2/steps", "equal"]),
            "average": rules.choice(["mean", "mean", "radial"]), "stale": rules.choice(["keep", "keep", "drop"]),
        }  # fmt: skip
        if settings["codec"] in ("sparse", "lowrank"):
            settings["average"] = "mean"  # what the judge knows of is what was to be sent, and the norm is another
        if several_in_flight(settings):
            settings["by"] = "steps"  # the others are refused
    if settings["every"] is None:
        settings["every"] = 20 * length / settings["peers"]
    if settings["keep"] is None:
        settings["keep"] = length / 4
    if settings["back"] is None:
        settings["back"] = 2 * length
    return settings


def several_in_flight(settings: dict[str, Any]) -> bool:
    """Whether rounds of several fragments may be in flight at once."""
    return bool(settings["overlap"] * settings["fragments"] > settings["inner_steps"])


def build(settings: dict[str, Any], max_group: int, seed: int) -> Swarm:
    steps, peers = settings["inner_steps"], settings["peers"]
    rules = {
        "inner_steps": steps, "quorum": min(settings["quorum"], peers), "max_group": max_group,
        "silence": settings["silence"], "first_lease": 8 * steps, "max_lease": 32 * steps, "weight_cap": 10**6,
        "grace": settings["grace"] if settings["by"] == "steps" else 0.0, "overlap": settings["overlap"],
        "merge": settings["merge"], "fragments": settings["fragments"], "by": settings["by"],
        "weights": settings["weights"], "average": settings["average"], "stale": settings["stale"],
    }  # fmt: skip
    if settings["by"] == "time":
        rules["every"] = max(steps * settings["step_time"], 1.0)
    elif settings["by"] == "tokens":
        # What a quarter of the peers makes in a round: half of them may be gone, and some without samples.
        rules["every"] = max(peers // 4, 1) * steps * STEP_TOKENS
        rules["every"] = max(rules["every"], rules["quorum"] * settings["fragments"])
    count = settings["fragments"]
    several = max(count, 3 if settings["average"] == "radial" else 1)
    codec: dict[str, Any] = {"name": settings["codec"]}
    factors = settings["codec"] == "lowrank"
    tensors = [[PARAMETERS * (i + 1) // several - PARAMETERS * i // several] for i in range(several)]
    state: dict[str, Any] = {"chunk": CHUNK, **({"layers": tensors} if several > 1 or factors else {})}
    if factors:
        # as square as can be, in one chunk, so that there are ranks to estimate
        widths = [min((n for n in range(1, m + 1) if m % n == 0), key=lambda n, m=m: n + m // n) for (m,) in tensors]
        state |= {"columns": widths, "chunk": 2 * CHUNK}
        codec["rank"] = largest_rank([(size // width, width) for (size,), width in zip(tensors, widths, strict=True)])
        if seed % 2 and not several_in_flight(settings):
            codec |= {"window": 3, "kept": 0.8}
    run = manifest(
        parameters=PARAMETERS, round=rules, state=state, codec=codec, budget={"rounds": 10**6},
    )  # fmt: skip
    swarm = Swarm(
        run, seed=seed, latency=settings["latency"], jitter=settings["jitter"], bandwidth=settings["bandwidth"],
        log=False, keep_every=settings["keep"],
    )  # fmt: skip
    rng = random.Random(f"speeds {seed}")
    for index in range(peers):
        name = f"p{index}"
        swarm.steps = {**swarm.steps, name: settings["step_time"] * rng.uniform(1, settings["uneven"])}
        swarm.add(name, reachable=index >= settings["hidden"])
    return swarm


def simulate(args: argparse.Namespace, seed: int) -> Result:
    """One seed, from start to end."""
    began = time.process_time()
    settings = draw(args, seed)
    peers, length = settings["peers"], settings["inner_steps"] * settings["step_time"]
    swarm = build(settings, max(args.max_group, 1), seed)
    seconds = args.rounds * length if args.rounds else args.hours * 3600
    chaos = None
    if args.faults:
        chaos = Chaos(
            swarm, seed, every=settings["every"], back=(settings["back"] * 0.5, settings["back"] * 1.5),
            down=max(peers // 2, 1), kinds=tuple(args.faults), split=(3 * length, 15 * length),
        )  # fmt: skip
    inner = length * max(settings["uneven"], 1.0) * (1 + settings["grace"])
    accounts = Accounts(swarm, chaos, inner)
    quiet = CALM * inner + 5 * (7 * settings["silence"])
    used = 0
    pending = 0
    trained: dict[str, list[range]] = {}

    async def main() -> None:
        nonlocal used, pending, trained
        await accounts.watch(seconds)
        islands = [life.island for lives in swarm.lives.values() for life in lives if life.island is not None]
        used = sum(len(span) for island in islands for span in island.used)
        pending = round(sum(swarm.pending(lives[-1]) for lives in swarm.lives.values() if lives[-1].ended is None))
        if settings["fragments"] == 1:
            trained = {
                name: list(lives[-1].island.pending) for name, lives in swarm.lives.items()
                if lives[-1].ended is None and lives[-1].island is not None
            }  # fmt: skip
        if chaos is not None:
            chaos.stop()
        swarm.violations += await calm(accounts, seconds, inner, quiet)
        swarm.violations += await swarm.shut_down(20 * settings["silence"])

    result = Result(seed, peers, seconds, settings)
    try:
        swarm.network.run(main())
    except Exception as error:
        swarm.violations.append(f"the run ended with {type(error).__name__}: {error}")
    swarm.check_samples()
    swarm.violations += accounts.check_progress(seconds)
    after = accounts.averaged_after(seconds, trained)
    conclude(result, accounts, seconds, used, pending - after, after)
    result.violations = swarm.violations
    result.trace = swarm.network.trace.hexdigest()
    result.cpu_seconds = round(time.process_time() - began, 2)
    return result


async def calm(accounts: Accounts, since: float, look: float, limit: float) -> list[str]:
    """Wait until all are together and have contributed since then, twice in a row, ``look`` virtual seconds apart; at
    most ``limit`` seconds. Returns what is missing then, as sentences."""
    loop = asyncio.get_running_loop()
    ends, good = loop.time() + limit, 0
    while True:
        await asyncio.sleep(min(look, max(ends - loop.time(), 0)))
        missing = accounts.check_together(since + 1) + accounts.check_everyone_contributes(since)
        good = 0 if missing else good + 1
        if good == 2 or loop.time() >= ends:
            return missing


def conclude(result: Result, accounts: Accounts, seconds: float, used: int, pending: int, after: int) -> None:
    """Fill in the figures. Units trained on in the time: all; those that nobody ever averaged; those that the first
    commit after it averages, since a time that ends in the middle of a round has lost nothing by that."""
    swarm, states = accounts.swarm, accounts.states
    looks = max(states.total(), 1)
    units = accounts.committed_units(seconds) + after
    for strike in accounts.chaos.log if accounts.chaos is not None else []:
        result.faults[strike.kind] = result.faults.get(strike.kind, 0) + 1
    result.lost_units = used - units - pending
    training = states["training"] / looks
    share = training / max(used, 1)  # of the time, for each unit trained on
    result.goodput = round(units * share, 4)
    forks = accounts.forks()
    left = sum(
        len(piece) * swarm.share(commit.body)
        for fork in forks for commit in fork for _, units in swarm.brought(commit) for piece in units
    )  # fmt: skip
    forked = min(result.lost_units, round(left))
    dropped = min(accounts.dropped, result.lost_units - forked)
    result.loss = {kind: states[kind] / looks for kind in ("down", "joining", "leaseless", "entering", "averaging")}
    if states["hung"]:
        result.loss["hung"] = states["hung"] / looks
    result.loss |= {
        "forked": forked * share, "dropped": dropped * share,
        "crashed": (result.lost_units - forked - dropped) * share, "pending": pending * share,
    }  # fmt: skip
    result.loss = {kind: round(value, 4) for kind, value in result.loss.items()}
    result.uptime = round(accounts.trained / max(accounts.samples, 1), 4)
    result.in_round = round(accounts.in_round / max(accounts.samples, 1), 4)
    result.longest_pause = accounts.longest * SAMPLE_EVERY
    result.commits = len(swarm.commits)
    result.lone = sum(len(commit.body.seal.members) == 1 for commit in swarm.commits.values())
    result.outer_steps = max((commit.body.outer_step for commit in swarm.commits.values()), default=0)
    result.rosters = len(accounts.seals)
    result.void = sum(bool(roster) for _, roster in accounts.voids)
    result.unsealed = len(accounts.voids) - result.void
    result.resyncs = accounts.resyncs.total()
    result.forks = [len(fork) for fork in forks]
    gaps = accounts.gaps(seconds)
    times = sorted(gap for _, gap, _ in gaps)
    if times:
        for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            result.commit_seconds[name] = round(times[min(int(part * len(times)), len(times) - 1)], 3)
        result.of_bound = round(max(*(gap / allowed for _, gap, allowed in gaps), accounts.stalls(seconds)[1]), 3)
    result.lost_leases, complaints = accounts.lost_leases()
    swarm.violations += complaints


def describe(result: Result) -> str:
    waits = ", ".join(f"{name} {value:g} s" for name, value in result.commit_seconds.items())
    loss = ", ".join(f"{kind} {value:.1%}" for kind, value in result.loss.items())
    return (
        f"seed {result.seed}, {result.peers} peers: goodput {result.goodput:.1%} ({loss}), uptime {result.uptime:.1%}, "
        f"all paused for a round {result.in_round:.1%}, for {result.longest_pause:g} s at most; "
        f"{sum(result.faults.values())} faults, {result.outer_steps} outer steps, {result.commits} commits "
        f"({result.lone} lone) of {result.rosters} rosters, {result.void} void, {result.unsealed} without a seal; "
        f"{len(result.forks)} forks of {sum(result.forks)} commits, {result.resyncs} re-synchronised; "
        f"{result.lost_units} units and {result.lost_leases} leased ones lost; "
        f"between commits {waits}, {result.of_bound:.0%} of the bound; {result.cpu_seconds:g} s of CPU"
    )


def span(text: str) -> tuple[int, int]:
    """``A..B`` or ``A``, as numbers."""
    first, _, last = text.partition("..")
    low, high = int(first), int(last or first)
    if low > high:
        raise ValueError(text)
    return low, high


def numbers(text: str) -> list[int]:
    """``A..B,C,…`` as numbers."""
    return [seed for part in text.split(",") for low, high in [span(part)] for seed in range(low, high + 1)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.churn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=span, default=(8, 8), metavar="N|A..B", help="by seed in turn, when a range")
    parser.add_argument("--hours", type=float, default=0.5, help="virtual hours")
    parser.add_argument("--rounds", type=int, help="instead of hours: so many times the inner steps of a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=numbers, metavar="A..B,C", help="many seeds, instead of --seed")
    parser.add_argument(
        "--faults", type=lambda text: [kind for kind in text.split(",") if kind], default=list(KINDS),
        help=f"comma-separated kinds, empty for none: {','.join(KINDS)}; and, only when named: {','.join(NAMED)}",
    )  # fmt: skip
    parser.add_argument(
        "--every", type=float, help="mean seconds between two faults [default: one in 20 rounds for each peer]"
    )
    parser.add_argument("--back", type=float, help="mean seconds until a fault is undone [default: two rounds]")
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument(
        "--overlap", type=int, default=0, help="inner steps made while a round is in flight; with --vary up to so many"
    )
    parser.add_argument("--merge", choices=[str(rule) for rule in Merge], default="carry", help="what becomes of them")
    parser.add_argument("--fragments", type=int, default=1, help="that the model is cut into")
    parser.add_argument("--step-time", type=float, default=1.0, help="virtual seconds of an inner step")
    parser.add_argument(
        "--keep", type=float,
        help="seconds between two savings of uncommitted inner steps, 0 for never [default: a quarter of a round's]",
    )  # fmt: skip
    parser.add_argument("--quorum", type=int, default=2)
    parser.add_argument("--max-group", type=int, default=64)
    parser.add_argument("--silence", type=float, default=5.0, help="T, seconds")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds one way")
    parser.add_argument(
        "--bandwidth", type=float, default=float("inf"), help="bytes per second, up and down, of each peer"
    )
    parser.add_argument(
        "--vary", action="store_true", help="draw quorum, T, latency, speeds, NAT and the faults' pace from the seed"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write the results here, a line a seed; with --seeds, those that are there already are not run again",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    unknown = [kind for kind in args.faults if kind not in (*KINDS, *NAMED)]
    if unknown:
        parser.error(f"unknown kinds of fault: {', '.join(unknown)}; known: {', '.join((*KINDS, *NAMED))}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds; returns the exit code."""
    args = parse(arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    seeds = args.seeds or [args.seed]
    rows: list[dict[str, Any]] = []
    if args.json is not None:
        if args.seeds and args.json.exists():
            wanted = {replay(given, seed) for seed in seeds}
            lines = (json.loads(line) for line in args.json.read_text().splitlines())
            rows = [row for row in lines if row["replay"] in wanted]
            print(f"{len(rows)} of {len(seeds)} seeds are in {args.json} already", flush=True)
        else:
            args.json.write_text("")
    done = {row["seed"] for row in rows}
    for seed in seeds:
        if seed in done:
            continue
        result = simulate(args, seed)
        result.replay = replay(given, seed)
        rows.append(asdict(result))
        print(describe(result), flush=True)
        for violation in result.violations[:10]:
            print(f"  VIOLATED: {violation}")
        if result.violations:
            print(f"  replay: {result.replay}", flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(plain(asdict(result)), allow_nan=False) + "\n")
    bad = [row["seed"] for row in rows if row["violations"]]
    if len(rows) > 1:
        mean = sum(row["goodput"] for row in rows) / len(rows)
        cpu = sum(row["cpu_seconds"] for row in rows) / len(rows)
        print(f"{len(rows)} seeds, mean goodput {mean:.1%}, {cpu:.2f} s of CPU each, {len(bad)} with violations {bad}")
    return 1 if bad else 0


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it: there is no infinity, so what has no limit is null."""
    limits = {key: None if value == float("inf") else value for key, value in row["settings"].items()}
    return {**row, "settings": limits}


def replay(given: list[str], seed: int) -> str:
    """The command that runs one seed again."""
    own, kept, skip = ("--seed", "--seeds", "--json"), [], False
    for word in given:
        if skip or word in own:
            skip = not skip
        elif not word.startswith(tuple(f"{name}=" for name in own)):
            kept.append(word)
    return " ".join(["python -m tests.churn", *kept, "--seed", str(seed)])


if __name__ == "__main__":
    # A seed makes few cycles and many objects that live to its end: looking through them again and again costs 5 %.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    sys.exit(main())
