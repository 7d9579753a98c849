"""Runs jobs as processes, so many at a time, and shows how far they are."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from atoll.node.swarm.launch import relayed
from atoll.node.swarm.processes import Child, Family, Interrupts, child_environment
from atoll.node.swarm.table import exit_text, human_time

from .results import Results, code_version, commit
from .study import Job

TICK = 0.25
LINE_EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""


@dataclass
class _Running:
    job: Job
    child: Child
    started: float
    share: float = 0.0
    seen: int = 0
    """Bytes of its output that have been read."""
    result: dict[str, Any] | None = None


def _take(queue: list[Job], running: Sequence[Job]) -> Job | None:
    """Take out what is to be started next beside these; None: they have to end first. Real nodes share the cores
    already, so such a run is alone; simulated ones of the same seed do not wait for it."""
    if not queue or any(job.row.scenario.real for job in running):
        return None
    if not running or not queue[0].row.scenario.real:
        return queue.pop(0)
    for index, job in enumerate(queue):
        if job.seed == queue[0].seed and not job.row.scenario.real:
            return queue.pop(index)
    return None


@dataclass
class Runner:
    """Runs what is asked of it; what has finished is in ``results`` at once, whatever happens then."""

    results: Results
    folder: Path
    parallel: int
    console: Console
    interrupts: Interrupts
    family: Family
    deadline: float
    """On the monotonic clock: no run is started after it."""
    begun: float = field(default_factory=time.monotonic)
    tokens: float = 0.0
    """Tokens of the runs that were finished here."""
    count: int = 0

    def run(self, jobs: Sequence[Job], later: Callable[[], float] = lambda: 0.0) -> bool:
        """Run these; False when interrupted, or when the time is over before all have been started.

        later: tokens that will be asked for after these jobs, for the estimate of the time left.
        Raises the error that a run ended with; the others are stopped then.
        """
        queue, running = list(jobs), list[_Running]()
        live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None
        last_line = time.monotonic()
        with live if live is not None else contextlib.nullcontext():
            while queue or running:
                while len(running) < self.parallel and time.monotonic() < self.deadline:
                    if (job := _take(queue, [each.job for each in running])) is None:
                        break
                    running.append(self._start(job))
                if not running:
                    return False
                interrupted = self.interrupts.wait(TICK)
                for each in list(running):
                    if self._follow(each):
                        running.remove(each)
                if interrupted:
                    self.family.stop([each.child.name for each in running], self.interrupts)
                    return False
                text = self._line(queue, running, later())
                if live is not None:
                    live.update(Text(text), refresh=True)
                elif time.monotonic() - last_line > LINE_EVERY:
                    last_line = time.monotonic()
                    self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        return True

    def _start(self, job: Job) -> _Running:
        name = job.key(code_version(job.row.scenario.real))
        folder = self.folder / "work" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps(job.describe()))
        arguments = ["atoll.node.compare.worker", str(folder / "job.json")]
        return _Running(job, self.family.start(name, folder, arguments, child_environment(1)), time.monotonic())

    def _follow(self, run: _Running) -> bool:
        """Read what it has printed; True when it has ended."""
        code = run.child.code
        with run.child.output.open("rb") as file:
            file.seek(run.seen)
            lines = file.read().split(b"\n")
        run.seen += sum(len(line) + 1 for line in lines[:-1])
        for line in lines[:-1]:
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict) and "done" in said:
                    run.share = said["done"] / said["of"]
                elif isinstance(said, dict) and said.keys() & {"result", "diverged"}:
                    run.result = said
        if code is None:
            return False
        self.family.children.pop(run.child.name)
        run.child.tail.close()
        if run.result is None:
            words = run.child.last_words() or f"it ended without a word ({exit_text(code)})"
            message = f"the run {run.job.row.name!r} at seed {run.job.seed} failed: {words}"
            raise relayed(run.child, message)
        self._keep(run)
        return True

    def _keep(self, run: _Running) -> None:
        job, code = run.job, code_version(run.job.row.scenario.real)
        said = run.result or {}
        described = job.describe()
        self.results.add(
            {
                "key": job.key(code),
                "subject": job.key(""),
                "row": job.row.name,
                "seed": job.seed,
                "code": code,
                "commit": commit(),
                "scenario": described["scenario"],
                "manifest": described["manifest"],
                "wall_seconds": round(time.monotonic() - run.started, 2),
                "diverged": said.get("diverged"),
                **(said.get("result") or {"loss": None}),
            }
        )
        shutil.rmtree(run.child.folder, ignore_errors=True)
        self.tokens += job.tokens
        self.count += 1
        loss = self.results.found[job.key(code)]["loss"]
        text = f"{loss:.4f}" if loss is not None else "diverged"
        took = human_time(time.monotonic() - run.started)
        self.console.print(f"{job.row.name}, seed {job.seed}: {text} ({took})", markup=False, highlight=False)

    def _line(self, queue: Sequence[Job], running: Sequence[_Running], later: float) -> str:
        done = self.tokens + sum(each.share * each.job.tokens for each in running)
        left = sum(job.tokens for job in queue) + later + sum((1 - r.share) * r.job.tokens for r in running)
        now = ", ".join(f"{r.job.row.name} at seed {r.job.seed} {r.share:.0%}" for r in running)
        text = f"{len(queue)} runs waiting; {now}"
        elapsed = time.monotonic() - self.begun
        if done > 0 and elapsed > 5:
            text += f"; {human_time(left * elapsed / done)} left"
        return text
