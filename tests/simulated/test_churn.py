"""The command ``python -m tests.churn`` itself: what it prints, writes, skips, and ends with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .. import churn
from .accounts import Accounts

SHORT = ["--peers", "3..4", "--rounds", "4", "--step-time", "0.5", "--every", "8", "--back", "4"]


def test_a_line_a_seed_and_those_that_are_there_are_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "seeds.jsonl"
    assert churn.main([*SHORT, "--seeds", "1..2", "--json", str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["seed"] for row in rows] == [1, 2]
    assert [row["peers"] for row in rows] == [4, 3]
    assert all(row["violations"] == [] and row["commits"] > 2 and len(row["trace"]) == 64 for row in rows)
    for row in rows:
        assert abs(row["goodput"] + sum(row["loss"].values()) - 1) < 0.02
    ran: list[int] = []
    simulate = churn.simulate
    monkeypatch.setattr(churn, "simulate", lambda args, seed: ran.append(seed) or simulate(args, seed))
    assert churn.main([*SHORT, "--seeds", "1..3", "--json", str(file)]) == 0
    assert ran == [3]
    assert "2 of 3 seeds are in" in capsys.readouterr().out


def test_a_broken_promise_ends_with_1_and_the_command_that_replays_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accounts, "check_together", lambda self, since: ["p0 is on another fork"])
    file = tmp_path / "seed.json"
    assert churn.main([*SHORT, "--seed", "1", "--faults", "crash", "--json", str(file)]) == 1
    assert json.loads(file.read_text())["violations"] == ["p0 is on another fork"]
    assert f"replay: python -m tests.churn {' '.join(SHORT)} --faults crash --seed 1" in capsys.readouterr().out


def test_an_unknown_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        churn.main(["--faults", "crash,flood"])
    assert end.value.code == 2
    assert "unknown kinds of fault: flood" in capsys.readouterr().err
