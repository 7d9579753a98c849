"""The live table and the plain lines."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from atoll.node.console import human_bytes
from atoll.node.swarm.command import SwarmOptions, _join, _Run, _short_path
from atoll.node.swarm.ledger import Ledger
from atoll.node.swarm.table import Header, exit_text, human_count, human_time, line, remaining, render

HEADER = Header(
    title="demo",
    address="atoll:" + "ab" * 32 + "@/ip4/127.0.0.1/tcp/4000/p2p/12D3KooWboot",
    rounds=10,
    started=0.0,
    deadline=240.0,
    bars={"unigram": 3.26, "bigram": 2.5},
    trained_since=20.0,
)


def filled() -> Ledger:
    ledger = Ledger(["bootstrap", "node-0", "node-1", "observer"])
    one: dict[str, Any] = {"peer": "12D3KooWaaaaaa", "t": 1.0}
    ledger.add("node-0", one | {"event": "start", "name": "node-0"})
    ledger.add(
        "node-0",
        one
        | {
            "event": "progress",
            "state": "training",
            "round": 3,
            "outer_step": 2,
            "steps": 150,
            "tokens": 9000,
            "loss": 2.3456,
            "tokens_per_s": 1234.0,
            "bytes_sent": 1_500_000,
            "bytes_received": 900,
        },
    )
    members = ["12D3KooWaaaaaa", "12D3KooWzzzzzz"]
    commit = {"event": "commit", "round": 3, "outer_step": 2, "id": "c", "members": members, "tokens": 18000}
    ledger.add("node-0", one | commit)
    ledger.add("node-0", one | {"event": "digest", "round": 3, "digest": "0123456789abcdef"})
    ledger.add("observer", {"event": "evaluation", "round": 3, "val_loss": 2.111, "t": 2.0})
    ledger.ended("node-1", -9)
    return ledger


def shown(ledger: Ledger, width: int = 110, **console: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=width, **console).print(render(ledger, HEADER, 60.0))
    return out.getvalue()


def test_table_shows_what_the_issue_asks_for() -> None:
    text = shown(filled())
    for word in ("training", "150", "2.346", "1.2k", "1.5 MB", "900 B", "01234567", "2.111", "bigram", "…aaaaaa"):
        assert word in text, word
    assert "outer step 2/10" in text
    assert "SIGKILL" in text
    assert HEADER.address in text.replace("\n", "")
    assert "swarm, outer step" in text
    head, row = (next(line for line in text.splitlines() if word in line) for word in ("tokens/s", "…aaaaaa"))
    assert "outer step" in head
    assert row.split()[3] == "2", "of the run, and not the number of the round"


def test_a_short_way_to_join_replaces_the_long_address() -> None:
    out = io.StringIO()
    header = replace(HEADER, join="atoll node @runs/x/address")
    Console(file=out, width=110).print(render(filled(), header, 60.0))
    assert "atoll node @runs/x/address" in out.getvalue()
    assert HEADER.address not in out.getvalue().replace("\n", "")


def test_a_peer_started_by_hand_appears_from_the_rosters() -> None:
    text = shown(filled())
    assert "by hand" in text
    assert "…zzzzzz" in text


def test_no_colours_without_a_terminal_and_with_no_color(monkeypatch: Any) -> None:
    assert "\x1b" not in shown(filled())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in shown(filled(), force_terminal=True)


def test_an_empty_ledger_can_be_shown() -> None:
    assert "node-0" in shown(Ledger(["node-0"]))
    assert "val loss -" in line(Ledger(), HEADER, 1.0)


def test_plain_line() -> None:
    text = line(filled(), HEADER, 60.0)
    assert "\n" not in text
    for word in ("[1:00]", "outer step 2/10", "nodes 1+1", "val loss 2.111", "1.2k tokens/s", "sent 1.5 MB"):
        assert word in text, word


def test_remaining_time_follows_the_pace() -> None:
    assert remaining(filled(), HEADER, 60.0) == (60.0 - 20.0) / 2 * 8
    assert remaining(Ledger(), HEADER, 60.0) is None


def test_human_units() -> None:
    assert [human_bytes(n) for n in (0, 999, 1000, 2.5e6, 3e9, 4e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "2.5 MB",
        "3.0 GB",
        "4.0 TB",
    ]
    assert [human_count(n) for n in (7, 1500, 2e6)] == ["7", "1.5k", "2.0M"]
    assert [human_time(n) for n in (-1, 59.9, 187, 3725)] == ["0:00", "0:59", "3:07", "1:02:05"]
    assert [exit_text(n) for n in (3, -9, -250)] == ["exit 3", "SIGKILL", "signal 250"]


def test_without_a_terminal_the_command_that_joins_is_told_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another terminal may be in another folder, and the text may lie anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bin/atoll", "swarm"])
    run = _Run.__new__(_Run)
    run.out, run.options = tmp_path / "my runs", SwarmOptions(data=Path("text"))
    whole = _join(run, Path.absolute)
    assert whole == f"{tmp_path}/bin/atoll node '@{tmp_path}/my runs/address' --data {tmp_path}/text"
    assert _join(run, _short_path) == "bin/atoll node '@my runs/address' --data text"
    monkeypatch.setattr(sys, "argv", ["/somewhere/__main__.py", "swarm"])
    run.options = SwarmOptions()
    assert _join(run, _short_path) == f"{sys.executable} -m atoll node '@my runs/address'"
