"""``atoll swarm``: prepare, start, show, finish.

The swarm itself never imports torch or hivemind: it starts processes, follows their event logs and writes results.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from atoll.protocol.errors import ManifestError, ResourceError, StateError
from atoll.protocol.manifest import Manifest
from atoll.protocol.statefolder import folder_error

from . import table
from .budget import Costs, Plan, plan_rounds
from .launch import LISTEN, Interrupted, relayed, start_bootstrap, start_node
from .ledger import Ledger
from .processes import PATIENCE, Child, Family, Interrupts, child_environment
from .report import build_report, summary, write_json
from .results import draw, export_checkpoint, write_sample

DEFAULT_MINUTES = 4.0
TICK = 0.25
"""Seconds between two looks at the event logs."""
LINE_EVERY = 5.0
"""Seconds between two progress lines where there is no terminal."""
MEASURE_SECONDS = 4.0
LAST_EVALUATION = 45.0
"""Seconds after the nodes' end in which the observer may finish its last evaluations and end by itself."""
LEAVE_PATIENCE = 60.0
"""Seconds after the last outer step in which nodes should have ended by themselves."""
INTERRUPTED = 130


@dataclass(frozen=True)
class SwarmOptions:
    nodes: int = 4
    manifest: Path | None = None
    rounds: int | None = None
    minutes: float | None = None
    """None: four minutes, or with a manifest as many rounds as it says."""
    report: Path | None = None
    out: Path | None = None
    seed: int | None = None
    device: str = "cpu"
    data: Path | None = None
    as_json: bool = False


@dataclass
class _Run:
    """What one swarm knows about itself."""

    options: SwarmOptions
    out: Path
    console: Console
    interrupts: Interrupts
    family: Family
    started: float
    cores: int
    ledger: Ledger = field(default_factory=Ledger)
    bars: dict[str, float] = field(default_factory=dict)
    announced: set[str] = field(default_factory=set)

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def elapsed(self) -> float:
        return time.monotonic() - self.started


def run_swarm(options: SwarmOptions, on_folder: Callable[[Path], None] = lambda folder: None) -> int:
    """Run a swarm to its end; returns the exit code. ``on_folder`` is told where everything goes."""
    started = time.monotonic()
    manifest = _template(options)
    out = _make_folder(options, manifest.name)
    on_folder(out)
    console = Console(stderr=options.as_json)
    with Interrupts() as interrupts, Family() as family:
        run = _Run(options, out, console, interrupts, family, started, _cores())
        try:
            return _run(run, manifest)
        except Interrupted:
            # Nothing has been trained yet: nothing to report.
            family.stop(list(family.children), interrupts)
            run.say("interrupted before the swarm had started")
            return INTERRUPTED
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            fault = folder_error(out, error)
            raise type(fault)(str(fault).replace("--state", "--out")) from error


def _run(run: _Run, manifest: Manifest) -> int:
    options = run.options
    run.say(f"atoll swarm: {options.nodes} nodes on {run.cores} cores, everything goes to {run.out}")
    manifest, plan = _plan(run, manifest)
    threads = max(1, run.cores // options.nodes)
    env = child_environment(threads)
    address = start_bootstrap(run.family, run.out, env, run.interrupts)
    run.say(f"run {manifest.run_id.hex()[:12]}: {_rounds(manifest, manifest.budget.rounds)}")
    run.say(f"address: {address}")
    _start_nodes(run, env, address, threads)
    header = table.Header(
        title=f"atoll swarm · {manifest.name}",
        address=address,
        rounds=manifest.outer_steps,
        started=run.started,
        deadline=run.started + plan.total,
        bars=run.bars,
        join=_join(run, _short_path),
    )
    if not run.console.is_terminal:  # where it is, the live view says so, in the paths of this folder
        run.say(f"join by hand, in another terminal: {_join(run, Path.absolute)}")
    interrupted = _watch(run, header, manifest, plan)
    if interrupted:
        run.say("stopping …")
    began = time.monotonic()
    if interrupted:
        run.family.stop(list(run.family.children), run.interrupts, patience=PATIENCE)
    else:
        run.family.stop(list(run.family.children), run.interrupts, number=signal.SIGTERM)
    _collect(run)
    codes = run.family.exit_codes()
    run.family.kill()
    hurry = interrupted and time.monotonic() - began > PATIENCE / 2
    return _finish(run, manifest, codes, interrupted=interrupted, hurry=hurry)


# ---------------------------------------------------------------------- before


def _template(options: SwarmOptions) -> Manifest:
    """The manifest to start from, unsigned, with a group that this many nodes can form."""
    if options.manifest is not None:
        manifest = Manifest.load(options.manifest)
        if manifest.round.quorum > options.nodes:
            raise ManifestError(
                f"{options.manifest}: quorum = {manifest.round.quorum} exceeds --nodes {options.nodes}; "
                "start more nodes, or lower the quorum"
            )
        return manifest
    from atoll.node.run_defaults import new_manifest

    manifest = new_manifest(data=options.data.absolute() if options.data is not None else "stdlib")
    quorum = min(manifest.round.quorum, options.nodes)
    # Room for a few nodes started by hand.
    return manifest.replace(round={"quorum": quorum, "max_group": max(manifest.round.max_group, options.nodes + 4)})


def _make_folder(options: SwarmOptions, name: str) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    out = options.out if options.out is not None else Path("runs") / f"{name}-{stamp}"
    try:
        if options.out is None and out.exists():  # another swarm was started within this second
            out = out.with_name(f"{out.name}-{os.getpid()}")
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise StateError(f"{out} is not empty; choose another folder with --out, or remove it")
        probe = out / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        fault = folder_error(out, error)
        raise type(fault)(str(fault).replace("--state", "--out")) from error
    return out.resolve()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _plan(run: _Run, manifest: Manifest) -> tuple[Manifest, Plan]:
    """Measure, choose the number of rounds, sign, and write ``manifest.toml`` and the owner's key."""
    from atoll.protocol.identity import load_or_create_identity

    from ..config import to_toml

    options = run.options
    draft = run.out / "draft.toml"
    draft.write_text(to_toml(manifest))
    fixed = options.rounds
    if fixed is None and options.manifest is not None and options.minutes is None:
        fixed = manifest.budget.rounds
    seconds = (options.minutes or DEFAULT_MINUTES) * 60
    run.say(f"measuring the speed of inner steps for {MEASURE_SECONDS:.0f} seconds …")
    costs = _measure(run, draft)
    plan = plan_rounds(
        costs,
        nodes=options.nodes,
        cores=run.cores,
        inner_steps=manifest.round.inner_steps,
        fragments=manifest.round.fragments,
        seconds=seconds,
        spent=run.elapsed(),
    )
    if fixed is not None:
        plan = Plan(fixed, plan.start, plan.per_round, plan.finish)
    run.say(
        f"an inner step takes {costs.step * 1000:.1f} ms; {plan.rounds} round{'' if plan.rounds == 1 else 's'} of "
        f"about {plan.per_round:.1f} s should end {table.human_time(run.elapsed() + plan.total)} after the start"
    )
    owner = load_or_create_identity(run.out / "owner.key")
    manifest = manifest.replace(budget={"rounds": plan.rounds}).sign(owner)
    (run.out / "manifest.toml").write_text(to_toml(manifest))
    draft.unlink()
    return manifest, plan


def _measure(run: _Run, draft: Path) -> Costs:
    options = run.options
    env = child_environment(1)
    helpers: list[Child] = []
    on_cpu = options.device == "cpu"
    for index in range(min(options.nodes, run.cores) if on_cpu else 1):
        arguments = ["atoll.node.swarm.measure", str(draft), "--seconds", str(MEASURE_SECONDS)]
        arguments += ["--device", options.device, *(["--evaluate"] if index == 0 else [])]
        if options.data is not None:
            arguments += ["--data", str(options.data.absolute())]
        helpers.append(run.family.start(f"measure-{index}", run.out / "measure" / str(index), arguments, env))
    while any(helper.code is None for helper in helpers):
        if run.interrupts.wait(0.05):
            raise Interrupted
    steps: list[float] = []
    evaluation, imports = 0.0, 0.0
    for helper in helpers:
        run.family.children.pop(helper.name)
        if helper.code != 0:
            raise relayed(helper)
        found = json.loads(helper.output.read_text().splitlines()[-1])
        steps.append(found["step"])
        evaluation, imports = max(evaluation, found.get("evaluation", 0.0)), max(imports, found["imports"])
        run.bars.update(found.get("ngram", {}))
    # The observer may be some evaluations behind when the last round ends.
    finish = 12.0 + 2 * evaluation
    return Costs(step=max(steps), evaluation=evaluation, node_start=imports + 3.0, finish=finish)


def _start_nodes(run: _Run, env: dict[str, str], address: str, threads: int) -> None:
    options = run.options
    common = ["--data", str(options.data.absolute())] if options.data is not None else []
    common += ["--device", options.device]

    def seed(index: int) -> list[str]:
        return [] if options.seed is None else ["--seed", str(options.seed + index)]

    for index in range(options.nodes):
        start_node(run.family, run.out, index, address, env, ["--threads", str(threads), *common, *seed(index)])
    arguments = ["atoll", "observe", address, "--state", str(run.out / "observer"), "--threads", "1", *LISTEN]
    arguments += ["--log", "plain", *common, *seed(options.nodes)]
    run.family.start("observer", run.out / "observer", arguments, env)
    run.ledger = Ledger(run.family.children)


# ---------------------------------------------------------------------- during


def _watch(run: _Run, header: table.Header, manifest: Manifest, plan: Plan) -> bool:
    """Show the swarm until its nodes have ended; True when it was interrupted."""
    live = Live(console=run.console, auto_refresh=False, transient=False) if run.console.is_terminal else None
    nodes = [child for name, child in run.family.children.items() if name.startswith("node-")]
    patience = max(90.0, 6 * plan.per_round)
    last_line = last_commit = time.monotonic()
    seen_rounds, warned = -1, False
    ended: float | None = None
    full: float | None = None
    with live if live is not None else contextlib.nullcontext():
        while True:
            interrupted = run.interrupts.wait(TICK)
            _collect(run)
            now = time.monotonic()
            if header.trained_since is None and any(row.state == "training" for row in run.ledger.rows.values()):
                header = _begun(header, now)
            if len(run.ledger.commits) != seen_rounds:
                seen_rounds, last_commit, warned = len(run.ledger.commits), now, False
            _tell_deaths(run, live)
            if live is not None:
                live.update(table.render(run.ledger, header, now), refresh=True)
            elif now - last_line >= LINE_EVERY:
                last_line = now
                run.say(table.line(run.ledger, header, now))
            if interrupted:
                return True
            if not warned and now - last_commit > patience and ended is None:
                warned = True
                run.say(f"no commit for {now - last_commit:.0f} s; the nodes' output is in {run.out}/node-*/output.log")
            if all(child.code is not None for child in nodes):
                ended = ended or now
                observer = run.family.children["observer"]
                if observer.code is not None or not run.ledger.commits or now - ended > LAST_EVALUATION:
                    return False
            elif run.ledger.outer_step >= manifest.outer_steps:
                full = full or now
                if now - full > LEAVE_PATIENCE:
                    run.say(
                        f"the run is complete, but some nodes do not end within {LEAVE_PATIENCE:.0f} s; ending them"
                    )
                    run.family.stop([c.name for c in nodes], run.interrupts, number=signal.SIGTERM)


def _short_path(path: Path) -> str:
    """``path`` as it is typed here: relative when it lies below the current folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _join(run: _Run, path: Callable[[Path], Path | str]) -> str:
    """The command that adds a node by hand. path: how paths are written."""
    program = Path(sys.argv[0])
    words = [path(program)] if program.name == "atoll" else [sys.executable, "-m", "atoll"]
    words += ["node", f"@{path(run.out / 'address')}"]
    if run.options.data is not None:
        words += ["--data", path(run.options.data)]
    return shlex.join(map(str, words))


def _rounds(manifest: Manifest, number: int) -> str:
    rules = manifest.round
    of = f" in {rules.fragments} fragments" if rules.fragments > 1 else ""
    return f"{number} round{'' if number == 1 else 's'} of {rules.inner_steps} steps{of}"


def _begun(header: table.Header, now: float) -> table.Header:
    from dataclasses import replace

    return replace(header, trained_since=now)


def _collect(run: _Run) -> None:
    for name, child in run.family.children.items():
        # The code first: what a process has written is complete when it has ended.
        code = child.code
        for event in child.events():
            run.ledger.add(name, event)
        if code is not None:
            run.ledger.ended(name, code)


def _tell_deaths(run: _Run, live: Live | None) -> None:
    for name, child in run.family.children.items():
        if child.code and name not in run.announced:
            run.announced.add(name)
            words = child.last_words() if child.code > 0 else ""
            run.say(f"{name} ended: {table.exit_text(child.code)}{': ' + words if words else ''}; the run goes on")


# ---------------------------------------------------------------------- after


def _finish(run: _Run, manifest: Manifest, codes: dict[str, int | None], *, interrupted: bool, hurry: bool) -> int:
    options, ledger = run.options, run.ledger
    files: dict[str, str] = {"manifest": "manifest.toml"}
    curve = ledger.curve()
    done = ledger.outer_step // manifest.round.fragments
    title = f"{manifest.name}: {options.nodes} nodes, {_rounds(manifest, done)}"
    if not hurry and draw(curve, run.bars, title, run.out / "loss.png"):
        files["plot"] = "loss.png"
    if not interrupted and ledger.commits:
        checkpoint = export_checkpoint(run.out, manifest)
        if checkpoint is not None:
            files["checkpoint"] = str(checkpoint.relative_to(run.out))
            sample = write_sample(run.family, run.interrupts, checkpoint, run.out, options.device)
            if sample is not None:
                files["sample"] = str(sample.relative_to(run.out))
    report = build_report(
        ledger,
        run_id=manifest.run_id.hex(),
        nodes=options.nodes,
        seconds=run.elapsed(),
        exit_codes=codes,
        bars=run.bars,
        planned_rounds=manifest.outer_steps,
        files=files,
        interrupted=interrupted,
    )
    report["machine"] = {"cores": run.cores, "device": options.device}
    _write_report(run, report)
    for text in summary(report):
        run.say(text)
    for what, file in files.items():
        run.say(f"{what}: {run.out / file}")
    if options.as_json:
        print(json.dumps(report), flush=True)
    return _verdict(run, report, interrupted)


def _write_report(run: _Run, report: dict[str, Any]) -> None:
    for path in (run.out / "report.json", run.options.report):
        if path is not None:
            try:
                write_json(path, report)
            except OSError as error:
                raise ResourceError(f"the report could not be written to {path}: {error.strerror}") from None
            run.say(f"report: {path}")


def _verdict(run: _Run, report: dict[str, Any], interrupted: bool) -> int:
    """0 when the run is complete and every digest equal, whoever died on the way."""
    if interrupted:
        return INTERRUPTED
    if not report["rounds"]:
        failed = [run.family.children[name] for name, code in report["exit_codes"].items() if code]
        if failed:
            raise relayed(failed[0])
        print("atoll: error: the swarm ended without a single round", file=sys.stderr)
        return 1
    if not report["digests_equal"]:
        print("atoll: error: the nodes' state digests were not equal; see digests in report.json", file=sys.stderr)
        return 1
    if report["rounds"] < report["planned_rounds"]:
        print(
            f"atoll: error: the swarm ended after {report['rounds']} of {report['planned_rounds']} outer steps",
            file=sys.stderr,
        )
        return 1
    return 0
