"""From finished runs to rows: which runs are still to be made, and what those that are there say."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .link import ROUND_TRIPS, STEP_TRIPS, Link, unpack_transfers, wall_times
from .statistics import Paired, paired
from .study import SWEEP_SEED, Job, Row, job

Find = Callable[[Job], Mapping[str, Any] | None]
"""The result of a job, if it has finished."""


@dataclass(frozen=True)
class Terms:
    """What holds for all rows."""

    tokens: int | None
    peers: int
    seeds: int
    """For rows that don't say."""
    max_seeds: int
    """Up to which seeds are added where the interval is too wide for the margin."""


@dataclass(frozen=True)
class Line:
    """What is known of one row."""

    row: Row
    results: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By seed."""
    planned: int = 0
    """Seeds asked for so far."""
    difference: Paired | None = None
    tried: Mapping[str, float | None] = field(default_factory=dict)
    """Loss of each point of the sweep; None: diverged."""

    @property
    def losses(self) -> dict[int, float]:
        return {seed: result["loss"] for seed, result in self.results.items() if result["loss"] is not None}

    @property
    def loss(self) -> float | None:
        return statistics.fmean(self.losses.values()) if self.losses else None

    @property
    def diverged(self) -> bool:
        return any(result["loss"] is None for result in self.results.values())

    @property
    def verdict(self) -> str:
        if self.row.margin is None or not self.results:
            return ""
        if self.diverged:
            return "not met"
        return self.difference.verdict(self.row.margin) if self.difference is not None else "undecided"

    def mean(self, key: str) -> float:
        return statistics.fmean(result[key] for result in self.results.values())


def settle(row: Row, terms: Terms, find: Find) -> tuple[Row | None, list[Job], dict[str, float | None]]:
    """The row with what its sweep chose (None while that is open), the sweep's missing runs, and what was tried."""
    tried: dict[str, float | None] = {}
    missing: list[Job] = []
    best: tuple[float, Row] | None = None
    for variant in row.variants():
        wanted = job(variant, SWEEP_SEED, terms.tokens, terms.peers)
        result = find(wanted)
        if result is None:
            missing.append(wanted)
            continue
        loss = result["loss"]
        tried[", ".join(f"{key} {value:g}" for key, value in variant.chosen.items())] = loss
        if loss is not None and (best is None or loss < best[0]):
            best = (loss, variant)
    if not row.sweep or row.chosen:
        return row, [], {}
    if missing:
        return None, missing, tried
    # all have diverged: as the row stands, which will show it
    return best[1] if best is not None else row, [], tried


def survey(rows: Sequence[Row], terms: Terms, find: Find) -> tuple[list[Line], list[Job]]:
    """A line for each row, and the runs that are to be made next; none when all is known."""
    settled = {row.name: settle(row, terms, find) for row in rows}
    jobs = [wanted for _, missing, _ in settled.values() for wanted in missing]
    seeds = {row.name: row.seeds or terms.seeds for row in rows}
    if not jobs:
        lines = _lines(rows, settled, seeds, terms, find)
        for row in rows:
            if _wants_more(row, lines, seeds, terms):
                seeds[row.name] += 1
        for row in rows:
            # a seed helps only where the reference has it too
            if row.against is not None:
                seeds[row.against] = max(seeds[row.against], seeds[row.name])
    known = set[str]()
    for row in rows:
        chosen = settled[row.name][0]
        if chosen is None:
            continue
        for seed in range(seeds[row.name]):
            wanted = job(chosen, seed, terms.tokens, terms.peers)
            if find(wanted) is None:
                jobs.append(wanted)
    unique = []
    for wanted in jobs:
        key = wanted.key("")
        if key not in known:
            known.add(key)
            unique.append(wanted)
    # seed by seed, so that whoever interrupts has whole columns
    unique.sort(key=lambda wanted: (wanted.seed != SWEEP_SEED, wanted.seed))
    return list(_lines(rows, settled, seeds, terms, find).values()), unique


def _lines(
    rows: Sequence[Row],
    settled: Mapping[str, tuple[Row | None, list[Job], dict[str, float | None]]],
    seeds: Mapping[str, int],
    terms: Terms,
    find: Find,
) -> dict[str, Line]:
    lines: dict[str, Line] = {}
    for row in rows:
        chosen, _, tried = settled[row.name]
        results = {}
        if chosen is not None:
            for seed in range(max(seeds[row.name], terms.max_seeds)):
                result = find(job(chosen, seed, terms.tokens, terms.peers))
                if result is not None:
                    results[seed] = result
        lines[row.name] = Line(chosen or row, results, seeds[row.name], None, tried)
    for name, line in lines.items():
        if line.row.against is not None:
            difference = paired(line.losses, lines[line.row.against].losses)
            lines[name] = Line(line.row, line.results, line.planned, difference, line.tried)
    return lines


def _wants_more(row: Row, lines: Mapping[str, Line], seeds: Mapping[str, int], terms: Terms) -> bool:
    line = lines[row.name]
    if row.against is None or row.margin is None or line.diverged or seeds[row.name] >= terms.max_seeds:
        return False
    enough = len(line.results) >= seeds[row.name] and len(lines[row.against].results) >= seeds[row.name]
    return enough and (line.difference is None or not line.difference.sharp(row.margin))


def step_seconds(lines: Sequence[Line], given: float | None) -> dict[str, float]:
    """Seconds of one tick, by row: what its scenario says, ``given``, or the median CPU time of an inner step in all
    runs of that model and inner optimizer. (In data-parallel training every machine takes its own part of the batch.)
    Of real rows the time that inner steps took."""
    samples: dict[str, list[float]] = {}
    for line in lines:
        if line.row.scenario.method != "data-parallel" and not line.row.scenario.real:
            samples.setdefault(_kind(line), []).extend(r["step_seconds"] for r in _whole(line))
    found = {}
    for line in lines:
        said = line.row.scenario.step_time or given
        if line.row.scenario.real and _whole(line):
            found[line.row.name] = statistics.median(r["step_seconds"] for r in _whole(line))
        elif said is not None:
            found[line.row.name] = said
        elif samples.get(_kind(line)):
            found[line.row.name] = statistics.median(samples[_kind(line)])
        elif whole := _whole(line):
            share = line.row.scenario.peers if line.row.scenario.method == "data-parallel" else 1
            found[line.row.name] = statistics.median(r["step_seconds"] for r in whole) / share
    return found


def curve(line: Line, seconds: float | None, link: Link) -> dict[str, list[float]]:
    """Means over the seeds of ``loss``, ``tokens``, ``bytes`` and ``seconds`` (of real runs as measured, else on the
    link), at the points that all of them have: real nodes may be ahead of who keeps their checkpoints."""
    trips = STEP_TRIPS if line.row.scenario.method == "data-parallel" else ROUND_TRIPS
    curves = list[dict[int, Mapping[str, Any]]]()
    for result in _whole(line):
        points = [dict(point) for point in result["curve"]]
        if seconds is not None and not line.row.scenario.real:
            ticks = [point["tick"] for point in points]
            times = wall_times(ticks, unpack_transfers(result["transfers"]), seconds, link, trips)
            for point, at in zip(points, times, strict=True):
                point["seconds"] = at
        curves.append({point.get("outer_step", index): point for index, point in enumerate(points)})
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    return {
        key: [statistics.fmean(points[at][key] for points in curves) for at in shared if key in curves[0][at]]
        for key in ("loss", "tokens", "bytes", "seconds")
    }


def _kind(line: Line) -> str:
    return repr((dict(line.row.manifest.model), dict(line.row.manifest.inner)))


def _whole(line: Line) -> list[Mapping[str, Any]]:
    return [result for result in line.results.values() if result["loss"] is not None]
