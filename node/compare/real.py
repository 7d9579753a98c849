"""One run of a manifest with real nodes: processes of this machine that meet over loopback, as in ``atoll swarm``.

What is learned, when, and by whom is theirs; this only starts them, reads their event logs, and scores the checkpoints
that they write when they have ended.
"""

from __future__ import annotations

import os
import resource
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.node import checkpoint
from atoll.node.swarm.launch import Interrupted, relayed, start_bootstrap, start_node
from atoll.node.swarm.ledger import Event, Ledger
from atoll.node.swarm.processes import Child, Family, Interrupts, child_environment
from atoll.node.swarm.table import exit_text
from atoll.protocol.errors import ResourceError
from atoll.protocol.identity import load_or_create_identity
from atoll.protocol.manifest import Manifest

from .scenario import Scenario

POINTS = 8
"""Points of the curve, besides the end."""
SAMPLE = 8
"""The curve is scored on every eighth batch of the held-out text, the end on all of it."""
TICK = 0.25
"""Seconds between two looks at the event logs."""
LEAVE = 5.0
"""Seconds for the nodes to leave a run that has failed; less than whoever interrupts this process gives it."""
PATIENCE = 600.0
"""Seconds without a commit or an inner step of anybody after which the run is given up, or ten times what commits have
taken at most."""


@dataclass
class _Nodes:
    """The processes and what they have told."""

    family: Family
    interrupts: Interrupts
    folder: Path
    children: list[Child] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    step_times: dict[str, float] = field(default_factory=dict)
    trained: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Of each node's first and newest commit: when, and the seconds in inner steps until then."""
    codes: dict[str, int] = field(default_factory=dict)
    """Exit codes of those that have ended, all of whose events are known."""
    kept: dict[int, Path] = field(default_factory=dict)
    """Checkpoints by outer step; of each node's only the newest stay where they are."""

    def start(self, count: int) -> None:
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        env = child_environment(threads)
        address = start_bootstrap(self.family, self.folder, env, self.interrupts)
        more = ["--device", "cpu", "--threads", str(threads)]
        self.children = [start_node(self.family, self.folder, n, address, env, more) for n in range(count)]
        self.ledger = Ledger(child.name for child in self.children)

    def collect(self) -> None:
        for child in self.children:
            # The code first: what a process has written is complete when it has ended.
            code = child.code
            for event in child.events():
                self.ledger.add(child.name, event)
                self._note(child.name, event)
            if code is not None:
                self.codes[child.name] = code
                self.ledger.ended(child.name, code)

    def _note(self, name: str, event: Event) -> None:
        kind = event["event"]
        if kind == "progress" and event.get("step_time"):
            self.step_times[name] = event["step_time"]
        elif kind == "commit" and "trained" in event:
            self.trained[name] = [*self.trained.get(name, [])[:1], (event["t"], event["trained"])]
        elif kind == "checkpoint" and event["outer_step"] not in self.kept:
            kept = checkpoint.keep(Path(event["path"]), self.folder / "kept")
            if kept is not None:  # of a node that is far ahead of this reader they may be gone again
                self.kept[event["outer_step"]] = kept

    def watch(self, manifest: Manifest, on_progress: Callable[[int, int], None]) -> None:
        """Wait until all nodes have ended.

        Raises what a node fails with, as soon as it does (the others would go on without it, and that is another run),
        and :class:`ResourceError` when one leaves early, or when none makes an inner step or a commit for too long.
        """
        rules, outer_steps = manifest.round, manifest.outer_steps
        # Until a round by time is due, nodes may have no samples left.
        patience = PATIENCE + (rules.every if rules.by == "time" else 0)
        last = committed = time.monotonic()
        commits, steps, longest = 0, list[int](), 0.0
        while len(self.codes) < len(self.children):
            if self.interrupts.wait(TICK):
                raise Interrupted
            self.collect()
            self._check_ends(outer_steps)
            now = time.monotonic()
            made = [row.steps for row in self.ledger.rows.values()]
            if len(self.ledger.commits) != commits:
                longest = max(longest, now - committed) if commits else 0.0
                commits, committed = len(self.ledger.commits), now
                on_progress(min(self.ledger.outer_step, outer_steps), outer_steps)
            elif made == steps:
                if now - last > max(patience, 10 * longest):
                    raise ResourceError(
                        f"no commit and no inner step for {now - last:.0f} s, after {self.ledger.outer_step} of "
                        f"{outer_steps} outer steps"
                    )
                continue
            last, steps = now, made

    def _check_ends(self, outer_steps: int) -> None:
        for child in self.children:
            code = self.codes.get(child.name)
            if code is None or (code == 0 and self.ledger.outer_step >= outer_steps):
                continue
            words = child.last_words()
            message = (
                f"{child.name} ended ({exit_text(code)}) after {self.ledger.outer_step} of {outer_steps} outer steps"
                + (f": {words}" if words else "")
            )
            raise relayed(child, message)

    def utilisation(self) -> float | None:
        """The mean share of the time between first and last commit that trainers spent in inner steps."""
        shares = [
            (later[1] - first[1]) / (later[0] - first[0])
            for first, later in (found for found in self.trained.values() if len(found) == 2)
            if later[0] > first[0]
        ]
        return statistics.fmean(shares) if shares else None


def run_real(
    manifest: Manifest, scenario: Scenario, folder: Path, on_progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Run it to its end, in ``folder``, and score it; as :func:`.simulate.simulate` answers.

    Raises :class:`Interrupted`, :class:`ResourceError` when the nodes do not finish the run, and what one of them or
    the bootstrap peer fails with.
    """
    rates = {name: float(manifest.inner[name]) * scenario.rate for name in ("lr", "adamw_lr")}
    every = max(manifest.outer_steps // POINTS, 1)
    manifest = manifest.replace(inner=rates, state={"checkpoint_every": every})
    manifest = manifest.sign(load_or_create_identity(folder / "owner.key"))
    (folder / "manifest.toml").write_text(manifest.to_toml())
    with Interrupts() as interrupts, Family() as family:
        nodes = _Nodes(family, interrupts, folder)
        try:
            nodes.start(scenario.peers)
            nodes.watch(manifest, on_progress)
        except BaseException:
            # Whoever is killed leaves the sockets of its daemon behind.
            family.stop(list(family.children), interrupts, number=signal.SIGTERM, patience=LEAVE)
            raise
    _check(nodes, manifest.outer_steps)
    return _result(nodes, manifest)


def _check(nodes: _Nodes, outer_steps: int) -> None:
    ledger = nodes.ledger
    if outer_steps not in nodes.kept:
        raise ResourceError(f"the last checkpoint, of outer step {outer_steps}, could not be kept: is there room?")
    if not ledger.digests_equal():
        raise RuntimeError(f"the nodes' state digests differ after rounds {ledger.unequal_rounds()}")


def _result(nodes: _Nodes, manifest: Manifest) -> dict[str, Any]:
    from atoll.node.evaluate import Evaluator
    from atoll.node.run_defaults import Tables

    ledger, tables = nodes.ledger, Tables.of(manifest.model_dump())
    evaluator = Evaluator(tables.model, tables.data)
    commits = [commit for _, commit in sorted(ledger.commits.items())]
    by_step = {commit.outer_step: commit for commit in reversed(commits)}
    sent = ledger.bytes_by_round()
    curve: list[dict[str, Any]] = []
    for step, path in sorted(nodes.kept.items()):
        found, commit = checkpoint.load(path), by_step[step]
        curve.append(
            {
                "outer_step": step,
                "seconds": commit.seen - commits[0].seen,
                "tokens": commit.tokens,
                "bytes": sum(size for number, size in sent.items() if number <= commit.round),
                "loss": evaluator.loss(found.params, every=SAMPLE),
            }
        )
    last = checkpoint.load(nodes.kept[manifest.outer_steps])
    stepping = [commit for commit in commits if commit.outer_step and commit.tokens]
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "loss": evaluator.loss(last.params),
        "tokens": ledger.tokens,
        "steps": ledger.tokens // (tables.inner.batch * tables.model.context),
        "commits": ledger.outer_step,
        "voids": len(ledger.voids),
        "lost": sum(share < 1 for commit in stepping for share in commit.contributors.values()),
        "bytes": sum(sent.values()),
        "curve": curve,
        "step_seconds": statistics.median(nodes.step_times.values()) if nodes.step_times else 0.0,
        "utilisation": nodes.utilisation(),
        "cpu_seconds": sum(each.ru_utime + each.ru_stime for each in used),
        "digest": last.metadata.digest[:16],
    }
