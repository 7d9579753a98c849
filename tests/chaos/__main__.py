"""A real swarm under fire: ``python -m tests.chaos --minutes 60 --every 13 --seed 1``.

Starts a bootstrap peer and nodes, the very processes that a volunteer runs, each in a network namespace of its own;
kills, stops, cuts and restarts them by a schedule drawn from the seed; and judges, from what the nodes wrote, whether
the promises of the design held. Exit code 1, and the command that repeats it, when one was broken. The schedule is the
same for one seed; what it meets is not, for processes keep no virtual time.

Namespaces need root; without them all live on 127.0.0.1, and every link is a relay in this process. Linux only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.node.run_defaults import new_manifest
from atoll.protocol.identity import Ed25519Signer
from atoll.protocol.manifest import Manifest

from ..real import leaks
from ..real.harness import OWNER, TooLate, place, text_folder, until
from . import judge
from .field import Field, Slot
from .hosts import Hosts, Unavailable
from .relay import Relays
from .schedule import KINDS, NAMED, SIGKILLS, schedule

MODEL = {"width": 64, "heads": 2, "kv_heads": 2, "ffn": 128, "layers": 2, "context": 64}
BEGIN = 240.0
"""Seconds within which all nodes must have contributed once."""
CALM = 120.0
"""Seconds without faults at the end, within which all must be back, at one head."""
TOLERANCE = 0.05
"""How much higher the loss may be than without faults, at the same number of tokens."""


def manifest_of(args: argparse.Namespace, data: Path) -> Manifest:
    manifest = new_manifest(
        "chaos", data=data, model=MODEL, inner={"batch": 4}, budget={"rounds": 10**6},
        round={
            "inner_steps": args.inner_steps, "silence": args.silence, "quorum": 2,
            "overlap": args.overlap,
        },
        state={"chunk": 16384, "checkpoint_every": 8},
    )  # fmt: skip
    return manifest.sign(OWNER)


def conduct(args: argparse.Namespace, folder: Path, manifest: Manifest, minutes: float, faults: bool) -> dict[str, Any]:
    """One swarm from start to end; what it came to."""
    began = time.time()

    def say(text: str) -> None:
        print(f"{time.time() - began:7.1f}  {text}", flush=True)

    try:
        network: Hosts | Relays = Relays(args.nodes + 2) if args.loopback else Hosts(args.nodes + 2)
        network.__enter__()
    except Unavailable as error:
        say(f"no namespaces ({error}): all on 127.0.0.1, with relays for links")
        network = Relays(args.nodes + 2)
        network.__enter__()
    try:
        with place(folder) as here:
            field = Field(here, network, manifest, args.nodes, args.core, say)
            field.start()
            return _conduct(args, field, minutes, faults)
    finally:
        network.__exit__()


def _conduct(args: argparse.Namespace, field: Field, minutes: float, faults: bool) -> dict[str, Any]:
    say, here = field.say, field.here

    def all_contribute() -> bool:
        field.look()
        return all(
            any(event["contributors"].get(slot.life.process.peer) for event in slot.life.process.all("commit"))
            for slot in field.slots
        )

    until("a commit with a contribution of every node", all_contribute, BEGIN,
          state=lambda: "\n".join(slot.life.process.story() for slot in field.slots))  # fmt: skip
    begin, seconds = time.time(), 60 * minutes
    say(f"all {args.nodes} nodes contribute; {minutes:g} minutes begin")
    coming = schedule(args.seed, seconds, args.every, args.back, args.faults) if faults else iter(())
    due, sampled, told = next(coming, None), 0.0, 0.0
    while (now := time.time()) < begin + seconds:
        field.look()
        while due is not None and now >= begin + due.at:
            field.strike(due, args.down)
            due = next(coming, None)
        if now > sampled + 5:
            field.sample()
            sampled = now
        if now > told + 15:
            told = now
            say(progress(field))
        time.sleep(0.1)
    end = time.time()

    def healed() -> bool:
        field.look()
        if not field.quiet():
            return False
        newest = max(slot.life.process.round for slot in field.slots)
        heads = {tuple(slot.life.process.digests().get(newest, ())) for slot in field.slots}
        return newest > marks[0] and len(heads) == 1 and () not in heads

    say("no more faults")
    marks = [max(slot.life.process.round for slot in field.slots)]
    try:
        until("one head that all have", healed, CALM)
    except TooLate:
        field.wrong(f"not all were back at one head {CALM:.0f} s after the last fault\n" + "\n".join(
            slot.life.process.story() for slot in field.slots))  # fmt: skip
    newcomer(field)
    field.sample()
    say("leaving")
    took = field.leave()
    say(f"all had left {took:.1f} s after Ctrl-C")
    left = leaks.gone(here.mark, leaks.Sockets({}), seconds=3)
    left += [f"temporary file {path.name}" for path in here.temporary.iterdir()]
    for item in left:
        field.wrong(f"left behind: {item}")
    field.sample()
    return verdict(args, field, begin, end, took)


def newcomer(field: Field) -> None:
    """One DHT, after all that: a node that knows the bootstrap peer alone finds the others and contributes."""
    slot = Slot("late", len(field.slots) + 1, field.here.folder / "late")
    field.slots.append(slot)
    field.start_node(slot)
    began = time.time()
    others = field.slots[:-1]

    def contributes() -> bool:
        field.look()
        events = slot.life.process.poll()
        peer = events[0]["peer"] if events else ""
        return any(
            event["contributors"].get(peer) for event in others[0].life.process.all("commit") if event["t"] > began
        )

    try:
        until("a contribution of a newcomer", contributes, CALM)
        field.say(f"a newcomer contributed {time.time() - began:.0f} s after its start")
    except TooLate:
        field.wrong(f"a newcomer had contributed nothing {CALM:.0f} s after its start\n{slot.life.process.story()}")


def progress(field: Field) -> str:
    running = [slot for slot in field.slots if slot.up]
    newest = max((slot.life.process.round for slot in running), default=0)
    states = " ".join(
        f"{slot.name}:{slot.busy or _state(slot)}" for slot in field.slots
    )  # fmt: skip
    return f"round {newest}, {len(field.strikes)} faults, {states}"


def _state(slot: Any) -> str:
    if not slot.up:
        return "down"
    last = slot.life.process.last("state")
    return str(last["state"]) if last else "starting"


def verdict(args: argparse.Namespace, field: Field, begin: float, end: float, leaving: float) -> dict[str, Any]:
    """Judge it."""
    lives = [life for slot in field.slots for life in slot.lives]
    wrong = list(field.violations)
    newest = max((event for life in lives for event in life.process.events if event["event"] == "digest"),
                 key=lambda event: (event["t"], event["round"]))  # fmt: skip
    result: dict[str, Any] = {
        "seed": args.seed, "nodes": args.nodes, "minutes": round((end - begin) / 60, 2), "every": args.every,
        "silence": args.silence, "inner_steps": args.inner_steps,
    }  # fmt: skip
    chain = judge.Chain([], [], [])
    try:
        chain = judge.read_chain(field.here.folder / "commits", bytes.fromhex(newest["commit"]))
    except ValueError as error:
        wrong.append(str(error))
    found, digests = judge.replay(
        field.manifest, chain, judge.first_params(field.manifest), Ed25519Signer.from_seed(bytes(32))
    )
    wrong += found
    wrong += judge.disagreements(lives, digests)
    found, ledger = judge.samples(field.manifest, chain, MODEL["context"])
    wrong += found
    wrong += judge.dead_contributors(field.slots, field.strikes)
    wrong += judge.back_to_nothing(field.slots)
    found, waits = judge.waits(field.slots, field.strikes, field.manifest.round.quorum)
    wrong += found
    found, rows = judge.memory([field.boot, *field.slots])
    wrong += found
    for life in [*lives, *field.boot.lives]:
        said = life.process.err.read_text(errors="replace")
        if "Traceback" in said or "defect" in said:
            wrong.append(f"{life.process.name} wrote: {said[-1500:]}")
    ids = {commit_id.hex() for commit_id in chain.ids}
    spent = judge.account(field.slots[: args.nodes], ids, begin, end, overlap=field.manifest.round.overlap > 0)
    steps = max((commit.body.outer_step for commit in chain.commits), default=0)
    leave = [seconds for _, _, seconds in field.left]
    events = [event for life in lives for event in life.process.events]
    result |= {
        "faults": len(field.strikes), "by_kind": dict(Counter(strike.kind for strike in field.strikes)),
        "skipped": field.skipped, "processes": len(lives) + len(field.boot.lives),
        "outer_steps": steps, "commits": len(chain.ids), "forked_commits": chain.forks,
        "rosters": len({event["roster"] for event in events if event["event"] == "seal"}),
        "void": len({event["roster"] for event in events if event["event"] == "void" and event["roster"]}),
        "resyncs": sum(event["event"] == "resync" for event in events),
        "refused": dict(Counter(event["reason"] for event in events if event["event"] == "refused").most_common(8)),
        "warnings": dict(Counter(
            _plain(event["message"]) for event in events if event["event"] == "warning").most_common(12)),
        "time": {key: round(value, 4) for key, value in asdict(spent).items() if isinstance(value, float)},
        "nobody_trained": spent.pauses,
        "seconds_to_next_commit": waits, "samples": ledger, "memory": rows,
        "seconds_to_leave": {"together": round(leaving, 2), "max": round(max(leave, default=0.0), 2),
                             "median": round(statistics.median(leave), 2) if leave else 0.0,
                             "asked_while": dict(Counter(f"{state}, {kind}" for kind, state, _ in field.left))},
        "curve": judge.losses(field.manifest, field.here.folder / "exports"),
        "violations": wrong,
    }  # fmt: skip
    return result


def _plain(message: str) -> str:
    """A warning without its figures, so that equal ones count together."""
    return "".join("#" if letter.isdigit() else letter for letter in message)[:90]


def describe(result: dict[str, Any]) -> str:
    spent, waits = result["time"], result["seconds_to_next_commit"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result["by_kind"].items()))
    kills = sum(result["by_kind"].get(kind, 0) for kind in SIGKILLS)
    lines = [
        f"{result['minutes']:g} minutes, {result['nodes']} nodes, {result['faults']} faults ({kinds or 'none'})"
        + (f"; a SIGKILL every {60 * result['minutes'] / kills:.0f} s" if kills else ""),
        f"goodput {spent['goodput']:.1%}, uptime {spent['uptime']:.1%}; lost {spent['lost']:.1%}, averaging "
        f"{spent['averaging']:.1%}, waiting {spent['waiting']:.1%}, joining {spent['joining']:.1%}, "
        f"down {spent['down']:.1%}",
        f"{result['outer_steps']} outer steps, {result['commits']} commits of {result['rosters']} rosters, "
        f"{result['void']} void, {result['forked_commits']} commits off the chain, {result['resyncs']} "
        f"re-synchronised, {result['processes']} processes",
        f"between commits: {waits['between_commits']}; from a fault to the next commit: {waits['all']}",
        f"samples: {result['samples']}; leaving: {result['seconds_to_leave']} s",
    ]
    if result["curve"]:
        lines.append(f"loss {result['curve'][-1][1]:.4f} after {result['curve'][-1][0]} tokens")
    for row in result["memory"]:
        lines.append(
            f"memory of {row['process']}: {row['after_start_mb']} → {row['at_end_mb']} MB in {row['minutes']} min"
        )
    for at, length, doing in sorted(result["nobody_trained"], key=lambda pause: -pause[1])[:8]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in doing.items())
        lines.append(f"nobody trained for {length:g} s, {at:g} s after the beginning: {kinds}")
    lines += [f"{count} × warning: {text}" for text, count in result["warnings"].items()]
    lines += [f"{count} × refused: {text}" for text, count in result["refused"].items()]
    lines += [f"VIOLATED: {what}" for what in result["violations"]] or ["no violations"]
    return "\n".join(lines)


def compare(result: dict[str, Any], baseline: dict[str, Any]) -> None:
    """The loss against that of the run without faults, at four numbers of tokens up to the largest that both have."""
    ends = [run["curve"][-1][0] for run in (result, baseline) if run["curve"]]
    if len(ends) < 2:
        result["violations"].append("no exported checkpoints to compare")
        return
    begin = max(run["curve"][0][0] for run in (result, baseline))
    result["loss"] = []
    for quarter in range(1, 5):
        tokens = begin + (min(ends) - begin) * quarter // 4
        mine, its = judge.at_tokens(result["curve"], tokens), judge.at_tokens(baseline["curve"], tokens)
        result["loss"].append({"tokens": tokens, "with_faults": mine, "without": its})
        if mine is None or its is None or mine > its * (1 + TOLERANCE):
            result["violations"].append(f"loss {mine} after {tokens} tokens, without faults {its}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between two faults [20]")
    parser.add_argument(
        "--back", type=float, default=10.0, help="mean seconds until who was killed is started again [10]"
    )
    parser.add_argument("--down", type=int, help="nodes that may be out at once [a minority]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--faults", type=lambda text: [kind for kind in text.split(",") if kind], default=list(KINDS),
        help=f"comma-separated kinds, empty for none: {','.join(KINDS)}; and, only when named: {','.join(NAMED)}",
    )  # fmt: skip
    parser.add_argument("--inner-steps", type=int, default=150, help="H [150]")
    parser.add_argument("--overlap", type=int, default=0, help="inner steps that are done with a round in flight [0]")
    parser.add_argument("--silence", type=float, default=3.0, help="T in seconds [3]")
    parser.add_argument("--core", type=int, help="keep all trainers to this one core")
    parser.add_argument("--loopback", action="store_true", help="no network namespaces: relays in user space")
    parser.add_argument("--baseline", type=float, default=0.0, metavar="MINUTES",
                        help="first run as long without faults, and compare the losses at equal tokens")  # fmt: skip
    parser.add_argument("--against", type=Path, metavar="FILE",
                        help="compare the losses with an earlier run without faults: its --json")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep state folders, logs and commits here")
    args = parser.parse_args(arguments)
    unknown = [kind for kind in args.faults if kind not in (*KINDS, *NAMED)]
    if unknown:
        parser.error(f"unknown kinds of fault: {', '.join(unknown)}; known: {', '.join((*KINDS, *NAMED))}")
    if args.nodes < 3:
        parser.error("three nodes at least: with two, a killed one stops the run, as it must")
    if args.down is None:
        args.down = (args.nodes - 1) // 2
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    args = parse(arguments)
    folder = args.keep if args.keep is not None else Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        manifest = manifest_of(args, text_folder(folder / "text"))
        baseline = None
        if args.baseline:
            baseline = conduct(args, folder / "baseline", manifest, args.baseline, False)
            print(describe(baseline), flush=True)
        result = conduct(args, folder / "chaos", manifest, args.minutes, True)
        if args.against is not None:
            baseline = json.loads(args.against.read_text())
        if baseline is not None:
            result["without_faults"] = {**baseline, "memory": [], "warnings": {}}
            result["violations"] += [f"without faults: {what}" for what in baseline["violations"]]
            compare(result, baseline)
        print(describe(result), flush=True)
        if "loss" in result:
            print(f"loss: {result['loss']}")
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
        if result["violations"]:
            print(f"again: python -m tests.chaos {' '.join(sys.argv[1:] if arguments is None else arguments)}")
        return 1 if result["violations"] else 0
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
