"""``atoll compare`` as a researcher calls it: runs in processes of their own, and goes on where it was interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.node.run_defaults import new_manifest

pytestmark = pytest.mark.real

SMALL = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32, "context": 32}


def compare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atoll", "compare", "a.toml", "b.toml", "--out", "out", "--seeds", "1", "--no-aa"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_two_manifests_side_by_side(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(24):
        (text / f"{number}.txt").write_text("a reef around a lagoon, " * 40 + str(number))
    for name, codec in (("a", "float32"), ("b", "int4")):
        manifest = new_manifest("x", data=text, model=SMALL, inner_steps=5, batch=2, codec=codec, rounds=4)
        (tmp_path / f"{name}.toml").write_text(manifest.to_toml())
    nothing = compare(tmp_path, "--minutes", "0")
    assert (nothing.returncode, nothing.stderr) == (0, "")
    assert "nothing has finished yet" in nothing.stdout

    whole = compare(tmp_path, "--json", "--margin", "50")
    assert whole.returncode == 0, whole.stderr
    rows = json.loads(whole.stdout)["rows"]
    assert [row["name"] for row in rows] == ["a", "b"]
    assert rows[1]["verdict"] == "undecided"  # one seed
    assert abs(rows[1]["difference_percent"]) < 20
    assert rows[1]["bytes"] < rows[0]["bytes"] / 6
    assert (tmp_path / "out" / "compare.png").stat().st_size > 10_000
    assert not list((tmp_path / "out" / "work").iterdir())

    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    again = compare(tmp_path, "--margin", "50")
    assert again.returncode == 0, again.stderr
    assert "undecided" in again.stdout
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before


def test_ctrl_c_ends_it_and_its_children(tmp_path: Path) -> None:
    manifest = new_manifest("x", model=SMALL, inner_steps=50, codec="float32", rounds=10_000)
    (tmp_path / "a.toml").write_text(manifest.to_toml())
    command = [sys.executable, "-m", "atoll", "compare", "a.toml", "--out", "out", "--no-aa", "--seeds", "1", "-j", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ.copy())
    try:
        assert process.stdout is not None
        assert "1 runs" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "goes on" in rest
    finally:
        process.kill()
        process.wait()
