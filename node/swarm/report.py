"""The JSON report of a swarm, and its summary for people."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.node.console import human_bytes
from atoll.protocol.disk import replace_file

from .ledger import Ledger
from .table import exit_text, human_count, human_time


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that ``share`` (0 … 1) of ``values`` do not exceed, interpolated; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{share}": _rounded(percentile(values, share / 100)) for share in (10, 50, 90, 100)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def build_report(
    ledger: Ledger,
    *,
    run_id: str,
    nodes: int,
    seconds: float,
    exit_codes: Mapping[str, int | None],
    bars: Mapping[str, float],
    planned_rounds: int,
    files: Mapping[str, str] | None = None,
    interrupted: bool = False,
) -> dict[str, Any]:
    """Everything that is known of a swarm when it has ended.

    ``rounds`` counts outer steps; ``rosters`` and ``val_loss`` go by round number. ``digests_equal`` is true when at
    every round all digests that the nodes logged themselves are equal, and false when there were none to compare.
    """
    commits = [ledger.commits[number] for number in sorted(ledger.commits)]
    stepping = [commit for commit in commits if commit.outer_step > 0 and commit.tokens > 0]
    durations = [max(commit.seconds.values()) for commit in stepping if commit.seconds]
    gaps = [later.seen - earlier.seen for earlier, later in itertools.pairwise(stepping)]
    by_round = ledger.bytes_by_round()
    curve = ledger.curve()
    node_rows = {name: row for name, row in ledger.rows.items() if name.startswith("node")}
    return {
        "run_id": run_id,
        "nodes": nodes,
        "rounds": ledger.outer_step,
        "planned_rounds": planned_rounds,
        "interrupted": interrupted,
        "tokens": ledger.tokens,
        "seconds": round(seconds, 2),
        "val_loss": [[point.round, point.val_loss] for point in curve],
        "final_val_loss": curve[-1].val_loss if curve else None,
        "ngram": dict(bars),
        "curve": [
            {
                "round": point.round,
                "outer_step": point.outer_step,
                "tokens": point.tokens,
                "bytes": point.bytes,
                "val_loss": point.val_loss,
            }
            for point in curve
        ],
        "digests_equal": ledger.digests_equal(),
        "digests_compared": [[number, len(logged)] for number, logged in sorted(ledger.digests.items())],
        "unequal_rounds": ledger.unequal_rounds(),
        "final_digest": ledger.digests[max(ledger.digests)][-1][1] if ledger.digests else None,
        "bytes_sent_per_node": {name: row.sent.total for name, row in node_rows.items()},
        "bytes_received_per_node": {name: row.received.total for name, row in node_rows.items()},
        "bytes_per_round": [[number, count] for number, count in by_round.items()],
        "seconds_per_round": percentiles(durations),
        "seconds_between_commits": percentiles(gaps),
        "rosters": [[commit.round, commit.members] for commit in commits],
        "peers": {name: row.peer for name, row in ledger.rows.items() if row.peer},
        "outside_peers": sorted(ledger.outside()),
        "lone_commits": [commit.round for commit in commits if commit.lone],
        "void_rosters": [[number, reason] for number, reason in ledger.voids],
        "forks": {str(number): sorted(ids) for number, ids in ledger.forks.items()},
        "tokens_per_node": {name: row.tokens.total for name, row in node_rows.items()},
        "exit_codes": dict(exit_codes),
        "files": dict(files or {}),
    }


def write_json(path: Path, value: Any) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")


def summary(report: Mapping[str, Any]) -> list[str]:
    """The report in a few plain lines."""
    bars = ", ".join(f"{name} {value:.2f}" for name, value in report["ngram"].items())
    loss = report["final_val_loss"]
    first = report["val_loss"][0][1] if report["val_loss"] else None
    pace, traffic = report["seconds_per_round"]["p50"], [count for _, count in report["bytes_per_round"] if count]
    plural = "" if report["rounds"] == 1 else "s"
    lines = [
        f"{report['rounds']} outer step{plural} by {report['nodes']} nodes in {human_time(report['seconds'])}, "
        f"{human_count(report['tokens'])} tokens" + (" (interrupted)" if report["interrupted"] else ""),
        f"held-out loss {first:.3f} -> {loss:.3f} nats per byte" + (f"   (tables: {bars})" if bars else "")
        if loss is not None and first is not None
        else "held-out loss: none was measured",
        f"state digests equal at every round: {'yes' if report['digests_equal'] else 'NO'}"
        + (
            f" (they differ after rounds {', '.join(map(str, report['unequal_rounds']))})"
            if report["unequal_rounds"]
            else ""
        )
        + ("" if report["digests_compared"] else " (none was logged)"),
    ]
    between = (report["seconds_between_commits"] or {}).get("p50")
    if pace is not None:
        lines.append(
            (f"a round took {between:.1f} s (median), " if between is not None else "")
            + f"{pace:.1f} s of it averaging"
            + (f"; all nodes together sent {human_bytes(sum(traffic) / len(traffic))} a round" if traffic else "")
        )
    if report["void_rosters"]:
        lines.append(f"rosters that went void: {len(report['void_rosters'])}")
    expected = (0, None, 130) if report["interrupted"] else (0, None)
    bad = {name: code for name, code in report["exit_codes"].items() if code not in expected}
    if bad:
        lines.append("ended badly: " + ", ".join(f"{name} ({exit_text(code)})" for name, code in bad.items()))
    return lines
