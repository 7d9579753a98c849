"""``atoll compare``: run what is missing, show what is known."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from atoll.node.swarm.processes import Family, Interrupts
from atoll.protocol.errors import StateLocked, UsageError
from atoll.protocol.manifest import Manifest
from atoll.protocol.statefolder import folder_error

from . import report as reports
from .analysis import Terms, survey
from .link import Link
from .plot import plot
from .results import Results, code_version
from .runner import Runner
from .scenario import Scenario
from .study import Job, Row, Study, aa_row, baseline_row, check_rows, read_study

INTERRUPTED = 130
DEFAULT_LINK = Link(20e6 / 8, 0.05)


@dataclass(frozen=True)
class CompareOptions:
    manifests: tuple[Path, ...] = ()
    study: Path | None = None
    seeds: int | None = None
    max_seeds: int | None = None
    tokens: int | None = None
    peers: int = 4
    out: Path = Path("runs/compare")
    real: bool = False
    """Whether real nodes run what rows do not say otherwise."""
    baseline: bool = False
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Factors on the learning rates that the baseline's sweep tries."""
    margin: float | None = None
    aa: bool = True
    link: Link = DEFAULT_LINK
    step_time: float | None = None
    jobs: int | None = None
    minutes: float | None = None
    only: str | None = None
    any_code: bool = False
    run: bool = True
    as_json: bool = False


def run_compare(options: CompareOptions) -> int:
    """Returns the exit code: 0 when everything asked for is there, 130 when interrupted."""
    study = read(options)
    rows = chosen(study, options)
    seeds = options.seeds or study.seeds or 3
    terms = Terms(options.tokens or study.tokens, options.peers, seeds, options.max_seeds or 0)
    console = Console(stderr=options.as_json)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fault = folder_error(options.out, error)
        raise type(fault)(str(fault).replace("--state", "--out")) from error
    with _alone(options.out):
        results = Results(options.out)
        complete = not options.run or _run_all(rows, terms, results, options, console)
        lines, missing = survey(rows, terms, _finder(results, options))
        if not any(line.results for line in lines):
            console.print("nothing has finished yet; the same command goes on", highlight=False)
            return 0 if complete else INTERRUPTED
        report = reports.build(lines, options.link, options.step_time)
        reports.write(report, options.out)
        plot(report, options.out / "compare.png")
    if options.as_json:
        print(json.dumps(report, allow_nan=False), flush=True)
    else:
        console.print(reports.render(report, console.width))
        console.print(reports.notes(report), highlight=False)
    console.print(f"table, figures and plot: {options.out}/compare.md, .json, .png", highlight=False, soft_wrap=True)
    if missing:
        console.print(f"{len(missing)} runs are missing; the same command goes on", highlight=False)
    return 0 if complete else INTERRUPTED


def _run_all(rows: list[Row], terms: Terms, results: Results, options: CompareOptions, console: Console) -> bool:
    """Run until nothing is missing; False when interrupted."""
    find = _finder(results, options)
    deadline = time.monotonic() + 60 * options.minutes if options.minutes is not None else math.inf
    parallel = options.jobs or len(os.sched_getaffinity(0))
    how = f"{parallel} at a time" + (", those with real nodes alone" if any(row.scenario.real for row in rows) else "")
    with Interrupts() as interrupts, Family() as family:
        runner = Runner(results, options.out, parallel, console, interrupts, family, deadline)
        while jobs := survey(rows, terms, find)[1]:
            console.print(
                f"{len(jobs)} runs, {sum(job.tokens for job in jobs) / 1e6:.1f}M tokens, {how}",
                highlight=False,
            )
            if not runner.run(jobs):
                return not interrupts.count
    return True


def _finder(results: Results, options: CompareOptions) -> Any:
    by_subject = {record["subject"]: record for record in results.found.values()} if options.any_code else {}

    def find(job: Job) -> Mapping[str, Any] | None:
        return results.get(job.key(code_version(job.row.scenario.real))) or by_subject.get(job.key(""))

    return find


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two commands would run everything twice."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StateLocked(
                f"another `atoll compare` works in {folder}; wait for it, or choose another --out"
            ) from None
        yield


def read(options: CompareOptions) -> Study:
    """The rows that the command line asks for. Raises :class:`UsageError`, or :class:`ConfigError`."""
    if not options.manifests and options.study is None:
        raise UsageError("give one or more manifests, or --study FILE with the rows to compare")
    scenario: dict[str, Any] = {"peers": options.peers}
    if options.step_time is not None:
        scenario["step_time"] = options.step_time
    if options.real:
        scenario["real"] = True
    manifests = [(path, Manifest.load(path)) for path in options.manifests]
    if options.study is not None:
        if len(manifests) > 1:
            raise UsageError("with --study give at most one manifest: the one that its rows change")
        study = read_study(options.study, manifests[0][1] if manifests else None, scenario)
    else:
        names = [path.stem for path, _ in manifests]
        rows = [
            Row(
                name,
                manifest,
                Scenario.of(scenario, str(path)),
                names[0] if number else None,
                options.margin if number else None,
            )
            for number, (name, (path, manifest)) in enumerate(zip(names, manifests, strict=True))
        ]
        check_rows(rows)
        study = Study(tuple(rows))
    if options.margin is not None:
        study = replace(study, rows=tuple(replace(r, margin=r.margin or options.margin) for r in study.rows))
    return study


def chosen(study: Study, options: CompareOptions) -> list[Row]:
    """The rows to run, with baseline and A/A row."""
    import re

    rows = list(study.rows)
    first = rows[0]
    if options.aa:
        rows.insert(1, aa_row(first))
    if options.baseline:
        rows.insert(1, baseline_row(first, options.rates, options.tokens or study.tokens, options.peers))
    if options.only is None:
        return rows
    try:
        wanted = {row.name for row in rows if re.search(options.only, row.name)}
    except re.error as error:
        raise UsageError(f"--only: {options.only!r} is no regular expression: {error}") from None
    if not wanted:
        raise UsageError(f"--only {options.only!r} matches no row; there are {', '.join(row.name for row in rows)}")
    # what they are compared with may be compared itself
    while more := {row.against for row in rows if row.name in wanted and row.against is not None} - wanted:
        wanted |= more
    return [row for row in rows if row.name in wanted]
