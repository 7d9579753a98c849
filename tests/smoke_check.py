"""Check the report of ``atoll swarm``: ``python tests/smoke_check.py REPORT [--nodes N] [--rounds N]``.

Ends with 1 and the reasons when the run was not what it should be, so that a script needs no more than the exit code.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def faults(report: Mapping[str, Any], nodes: int, rounds: int) -> list[str]:
    """What is wrong with a report of a run of ``nodes`` nodes over ``rounds`` outer steps, in words."""
    found = []
    needed = ("run_id", "nodes", "rounds", "tokens", "val_loss", "digests_equal", "bytes_sent_per_node", "seconds")
    missing = [key for key in (*needed, "rosters", "exit_codes") if key not in report]
    if missing:
        return [f"the report lacks {', '.join(missing)}"]
    run_id = report["run_id"]
    if not (isinstance(run_id, str) and len(run_id) == 64 and set(run_id) <= set("0123456789abcdef")):
        found.append(f"run_id is not 64 hexadecimal digits: {run_id!r}")
    if report["nodes"] != nodes:
        found.append(f"nodes is {report['nodes']}, expected {nodes}")
    if report["rounds"] != rounds:
        found.append(f"rounds is {report['rounds']}, expected {rounds}")
    if report["digests_equal"] is not True:
        found.append("the nodes did not hold the same state at every round (digests_equal is not true)")
    if not report["tokens"] > 0 or not report["seconds"] > 0:
        found.append(f"tokens {report['tokens']} and seconds {report['seconds']} must be positive")

    losses = [loss for _, loss in report["val_loss"]]
    if len(losses) < 2 or not all(isinstance(loss, int | float) and math.isfinite(loss) for loss in losses):
        found.append(f"val_loss is not a curve: {report['val_loss']}")
    elif not losses[-1] < losses[0]:
        found.append(f"the validation loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")

    sent = report["bytes_sent_per_node"]
    if len(sent) != nodes or not all(count > 0 for count in sent.values()):
        found.append(f"not every one of {nodes} nodes sent something: {sent}")
    if not report["rosters"] or max(len(peers) for _, peers in report["rosters"]) < min(2, nodes):
        found.append(f"no round had two members: {report['rosters']}")
    codes = report["exit_codes"]
    if len(codes) < nodes or any(code != 0 for code in codes.values()):
        found.append(f"not every process ended with 0: {codes}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the report of `atoll swarm`.")
    parser.add_argument("report", type=Path)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    report = json.loads(options.report.read_text(encoding="utf-8"))
    found = faults(report, options.nodes, options.rounds)
    for fault in found:
        print(f"{options.report}: {fault}", file=sys.stderr)
    if not found:
        first, last = report["val_loss"][0][1], report["val_loss"][-1][1]
        size = f"{report['nodes']} nodes, {report['rounds']} rounds"
        print(f"{size} in {report['seconds']:.0f} s: loss {first:.3f} to {last:.3f}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
