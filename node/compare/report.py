"""The comparison as a table on the terminal, as markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from atoll.node.console import human_bytes
from atoll.node.swarm.table import human_count, human_time
from atoll.protocol.disk import replace_file

from .analysis import Line, curve, step_seconds
from .link import Link

COLUMNS = (
    "row",
    "seeds",
    "tokens",
    "rounds",
    "loss",
    "against",
    "difference",
    "margin",
    "verdict",
    "sent",
    "wall time",
)


def build(lines: Sequence[Line], link: Link, given_step: float | None) -> dict[str, Any]:
    """Everything that is known, as plain values."""
    steps = step_seconds(lines, given_step)
    rows = []
    for line in lines:
        row, difference = line.row, line.difference
        seconds = steps.get(row.name)
        entry: dict[str, Any] = {
            "name": row.name,
            "seeds": sorted(line.results),
            "planned_seeds": line.planned,
            "losses": {str(seed): result["loss"] for seed, result in sorted(line.results.items())},
            "loss": line.loss,
            "diverged": line.diverged,
            "against": row.against,
            "difference_percent": difference and difference.mean,
            "half_width_percent": difference.half_width if difference and difference.seeds > 1 else None,
            "paired_seeds": difference.seeds if difference else 0,
            "margin_percent": row.margin,
            "verdict": line.verdict,
            "chosen": dict(row.chosen),
            "tried": dict(line.tried),
            "scenario": row.scenario.model_dump(),
            "commits": sorted({result["commit"] for result in line.results.values()}),
            "code": sorted({result["code"] for result in line.results.values()}),
        }
        whole = [result for result in line.results.values() if result["loss"] is not None]
        if whole:
            means = curve(line, seconds, link)
            entry |= {key: line.mean(key) for key in ("tokens", "bytes", "commits", "voids", "lost")} | {
                "rounds": line.mean("commits"),
                "commits": entry["commits"],
                "step_seconds": seconds,
                "wall_seconds": means["seconds"][-1] if means["seconds"] else None,
                "curve": means,
                "cpu_seconds": line.mean("cpu_seconds"),
            }
            if row.scenario.real:
                entry["utilisation"] = [result["utilisation"] for result in whole]
        rows.append(entry)
    return {"link": str(link), "rows": rows}


def cells(entry: Mapping[str, Any]) -> list[str]:
    """One row of the table as text, in the order of :data:`COLUMNS`."""
    difference, half = entry["difference_percent"], entry["half_width_percent"]
    change = "" if difference is None else f"{difference:+.2f} %" + (f" ± {half:.2f}" if half is not None else "")
    wall = entry.get("wall_seconds")
    done, planned = len(entry["seeds"]), entry["planned_seeds"]
    loss = f"{entry['loss']:.4f}" if entry["loss"] is not None else ""
    if entry["diverged"]:
        loss += " diverged"
    name = entry["name"]
    if entry["chosen"]:
        name += " (" + ", ".join(f"{key.partition('.')[2]} {value:g}" for key, value in entry["chosen"].items()) + ")"
    return [
        name,
        str(done) if done >= planned else f"{done} of {planned}",
        human_count(entry["tokens"]) if "tokens" in entry else "",
        f"{entry['rounds']:.0f}" if "rounds" in entry else "",
        loss.strip(),
        entry["against"] or "",
        change,
        f"{entry['margin_percent']:g} %" if entry["margin_percent"] is not None else "",
        entry["verdict"],
        human_bytes(entry["bytes"]) if "bytes" in entry else "",
        human_time(wall) if wall is not None else "",
    ]


_NOTES = (
    "Loss: nats per byte of the global parameters on the whole held-out text, after the rounds in flight were flushed; "
    "the mean over seeds. Difference: to the row named, seed by seed, with the half-width of the 95 % interval of "
    "its mean (Student's t), from two seeds on. Met: the whole interval lies below the margin. Sent: contributions and "
    "averages of all peers (data-parallel: float32 all-reduces). Wall time: simulated on {link}."
)
_REAL = (
    " Run by real nodes: {rows}; there the loss is that of the last outer step, sent is all that nodes sent one "
    "another, and wall time what it took here, on loopback, from the first commit on."
)


def notes(report: Mapping[str, Any]) -> str:
    """What the columns mean."""
    real = [entry["name"] for entry in report["rows"] if entry["scenario"]["real"]]
    return _NOTES.format(link=report["link"]) + (_REAL.format(rows=", ".join(real)) if real else "")


NARROW = ("row", "seeds", "loss", "difference", "verdict", "wall time")
"""The columns that fit where there are fewer than :data:`WIDE`."""
WIDE = 130


def render(report: Mapping[str, Any], width: int) -> Table:
    """For a terminal of so many columns."""
    table = Table(row_styles=["", "dim"])
    shown = [index for index, column in enumerate(COLUMNS) if width >= WIDE or column in NARROW]
    for index in shown:
        left = COLUMNS[index] in ("row", "against", "verdict")
        table.add_column(COLUMNS[index], justify="left" if left else "right", no_wrap=index > 0)
    for entry in report["rows"]:
        texts = cells(entry)
        table.add_row(*(texts[index] for index in shown))
    return table


def markdown(report: Mapping[str, Any]) -> str:
    lines = ["| " + " | ".join((*COLUMNS, "commit")) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for entry in report["rows"]:
        lines.append("| " + " | ".join([*cells(entry), " ".join(entry["commits"])]) + " |")
    sweeps = [
        f"- {entry['name']}: " + "; ".join(f"{k}: {'diverged' if v is None else f'{v:.4f}'}" for k, v in tried.items())
        for entry in report["rows"]
        if (tried := entry["tried"])
    ]
    text = "\n".join([*lines, "", notes(report), ""])
    return text + ("\nSweeps, on a seed of their own:\n\n" + "\n".join(sweeps) + "\n" if sweeps else "")


def write(report: Mapping[str, Any], folder: Path) -> None:
    """``compare.json`` and ``compare.md`` in ``folder``, each whole or not at all."""
    replace_file(folder / "compare.json", json.dumps(report, indent=1, allow_nan=False).encode() + b"\n")
    replace_file(folder / "compare.md", markdown(report).encode())
