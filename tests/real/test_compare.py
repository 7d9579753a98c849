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

from . import leaks
from .harness import until

pytestmark = pytest.mark.real

SMALL = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32, "context": 32}


def compare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atoll", "compare", "a.toml", "b.toml", "--out", "out", "--seeds", "1", "--no-aa"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=280, check=False)


def write_manifests(folder: Path) -> None:
    """a.toml and b.toml, alike but for the codec."""
    text = folder / "text"
    text.mkdir()
    for number in range(24):
        (text / f"{number}.txt").write_text("a reef around a lagoon, " * 40 + str(number))
    for name, codec in (("a", "float32"), ("b", "int4")):
        manifest = new_manifest("x", data=text, model=SMALL, inner_steps=5, batch=2, codec=codec, rounds=4)
        (folder / f"{name}.toml").write_text(manifest.to_toml())


def test_two_manifests_side_by_side(tmp_path: Path) -> None:
    write_manifests(tmp_path)
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


def test_two_manifests_by_real_nodes(tmp_path: Path) -> None:
    write_manifests(tmp_path)
    refused = tmp_path / "study.toml"
    refused.write_text('[[row]]\nname = "x"\nscenario.deaths = [[0, 0.5, 1]]\n')
    command = [sys.executable, "-m", "atoll", "compare", "a.toml", "--study", "study.toml", "--real"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 3
    assert "real nodes know no deaths (nobody ends the processes)" in said.stderr

    whole = compare(tmp_path, "--real", "--peers", "2", "--json")
    assert whole.returncode == 0, whole.stderr
    a, b = json.loads(whole.stdout)["rows"]
    assert (a["name"], a["rounds"], b["name"], b["rounds"]) == ("a", 4, "b", 4)
    for row in (a, b):
        assert row["curve"]["loss"][-1] < row["curve"]["loss"][0]
        assert row["wall_seconds"] == row["curve"]["seconds"][-1] > row["curve"]["seconds"][0]
        assert row["tokens"] >= 4 * 5 * 2 * 32, "a quorum of two brings at least one node's steps"
        assert 0 < row["utilisation"][0] < 1
        assert row["scenario"]["real"]
    assert b["bytes"] < a["bytes"]
    assert not list((tmp_path / "out" / "work").iterdir())
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    again = compare(tmp_path, "--real", "--peers", "2")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before


def test_ctrl_c_ends_real_nodes(tmp_path: Path) -> None:
    write_manifests(tmp_path)
    command = [sys.executable, "-m", "atoll", "compare", "a.toml", "--out", "out", "--real", "-n", "2", "--no-aa"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    below: dict[int, str] = {}
    try:
        until("a node that trains", lambda: list(tmp_path.glob("out/work/*/node-0/store")), 60)
        below = leaks.below(process.pid)
        assert sum("atoll node" in command for command in below.values()) == 2
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=40)
        assert process.returncode == 130
        assert "goes on" in rest
        until("the end of all processes", lambda: not any(map(leaks.alive, below)), 5)
    finally:
        process.kill()
        process.wait()
