"""What a trainer's time goes into, as nodes tell it, and as ``bench.utilisation`` compares it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from bench import utilisation

from atoll.node.daemon import UseOfTime
from atoll.protocol.errors import ManifestError
from atoll.protocol.peer import Peer


def test_a_trainers_account_is_closed_when_the_run_is_over() -> None:
    fields = {"trained": 8.0, "held": 1.0, "waited": 1.0, "rate": 1.0}
    peer = SimpleNamespace(finished=False, progress=SimpleNamespace(fields=fields))
    use = UseOfTime()
    assert use.of(cast(Peer, peer)) == {"trained": 8.0, "held": 1.0, "waited": 1.0}
    peer.finished, fields["held"] = True, 2.0
    assert use.of(cast(Peer, peer))["held"] == 2.0
    fields["held"] = 99.0
    assert use.of(cast(Peer, peer))["held"] == 2.0, "nothing keeps it from steps that nobody wants"
    peer.finished = False  # on another chain there may be more to do
    assert use.of(cast(Peer, peer))["held"] == 99.0
    peer.finished = True
    assert use.of(cast(Peer, peer))["held"] == 99.0


def test_only_rows_of_the_same_options_are_taken_up_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[tuple[str, float, str]] = []

    def measure(setting: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        folder.mkdir()
        measured.append((setting, options.mbit, folder.name))
        known = {"trained": 0.5, "loss": options.mbit, "curve": [[0, 0, 5.0], [9, 9, options.mbit]]}
        return utilisation.asked(setting, options) | known

    monkeypatch.setattr(utilisation, "measure", measure)

    def run(*more: str) -> str:
        command = ["utilisation", "--json", f"{tmp_path}/rows.json", "--folder", f"{tmp_path}/nodes", *more]
        monkeypatch.setattr(sys, "argv", command)
        assert utilisation.main() == 0
        return capsys.readouterr().out

    run("--settings", "plain", "--mbit", "3")
    assert measured == [("plain", 3.0, "plain")]
    said = run("--settings", "overlapped", "--mbit", "4")
    assert measured[1:] == [("overlapped", 4.0, "overlapped")]
    assert "plain" not in said, "of another link"
    said = run("--mbit", "4")
    assert measured[2:] == [("plain", 4.0, "plain-2")], "a second use of the folder"
    assert "loss 4.0000 plain, 4.0000 overlapped" in said
    run("--mbit", "4", "--overlap", "6")
    assert measured[3:] == [("overlapped", 4.0, "overlapped-2")], "an overlap is nothing to plain"
    run("--mbit", "4", "--preset", "60m", "--settings", "plain")
    assert len(measured) == 5


def test_what_cannot_be_run_is_said_with_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["utilisation", "--preset", "11m", "--folder", str(tmp_path)])
    assert utilisation.main() == ManifestError.exit_code
    assert "there is no '11m'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
