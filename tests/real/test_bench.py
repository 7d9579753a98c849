"""A benchmark as it is called by hand, with next to nothing to measure: judged is what it prints, not how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real


def test_the_reduction_reports_rounds_that_are_right(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "bench.reduction", "--peers", "2", "--params", "300000", "--codec", "int8"]
    command += ["--no-hivemind", "--repeats", "1", "--json", str(file)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["system"]: row for row in json.loads(file.read_text())}
    assert list(rows) == ["libp2p", "streams", "atoll"]
    assert all(row["seconds"] > 0 and row["machine"] and row["date"] for row in rows.values())
    ours = rows["atoll"]
    assert ours["identical"] == "yes"
    assert 1 <= ours["bytes_ratio"] < 1.1
    assert 0 < ours["error"] < 1.1e-2
    assert "atoll" in done.stdout
