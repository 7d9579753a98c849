"""A node on a machine whose wall clock is minutes ahead joins a run of real processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from .harness import Swarm, place, small_manifest, text_folder

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc"),
]

AHEAD = 180
CLOCK = f"""
import time

right = time.time
time.time = lambda: right() + {AHEAD}
"""


def test_a_node_whose_clock_is_ahead_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK)
    with place(tmp_path) as here:
        swarm = Swarm(here, small_manifest(text_folder(tmp_path / "text"), budget={"rounds": 100_000}))
        a = swarm.start("a")
        swarm.start("b")
        a.wait_for("commit")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "clock"), os.environ.get("PYTHONPATH", "")]))
        late = swarm.start("late")
        late.wait_for("start")
        warning = late.wait("a word on its clock", lambda: [e for e in late.all("warning") if "clock" in e["message"]])
        assert f"{AHEAD} s ahead of" in warning[0]["message"]

        def contributed() -> bool:
            return any(event["contributors"].get(late.peer, 0) > 0 for event in a.all("commit"))

        a.wait("a commit with a contribution of the late one", contributed, 60)
