"""A trainer that hangs in a run of two that needs both: its node notices by itself, and the run goes on."""

from __future__ import annotations

import os
import signal
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.node.events import Event
from atoll.node.watchdog import LOOK

from . import leaks
from .harness import Process, Swarm, disagreements, place, small_manifest, text_folder, until

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc"),
]

LEAVE = 10.0
"""Seconds within which a process must have ended after SIGTERM."""


def together(a: Process, b: Process, since: float) -> list[Event]:
    """Commits after ``since`` with something of both."""
    peers = {a.peer, b.peer}
    return [
        event for event in a.all("commit")
        if event["t"] > since and all(event["contributors"].get(peer, 0) > 0 for peer in peers)
    ]  # fmt: skip


def test_a_stopped_trainer_is_started_again_and_both_commit(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        manifest = small_manifest(
            text_folder(tmp_path / "text"), budget={"rounds": 100_000}, round={"quorum": 2, "fragments": 2}
        )
        swarm = Swarm(here, manifest)
        a, b = swarm.start("a"), swarm.start("b")
        for process in (a, b):
            process.wait_for("commit", 240)
        a.wait("five commits of both", lambda: len(together(a, b, 0.0)) >= 5, 120)
        times = [event["t"] for event in together(a, b, 0.0)]
        phase = statistics.median(after - before for before, after in pairwise(times))

        # In the middle of its inner steps, so that no order of a round is what ends it.
        a.next("commit", 60)
        b.wait("inner steps", lambda: (b.last("progress") or {}).get("state") == "training")
        stopped = b.trainer()
        os.kill(stopped, signal.SIGSTOP)
        ended = b.wait("the end of the trainer that hangs", lambda: b.all("ended"), 300)[0]
        assert ended["hung"], b.story()
        assert (ended["lost_steps"], ended["lost_tokens"]) == (0, 0), "its parameters are in shared memory"
        assert ended["lost_units"] in (0, 2), "the samples of a step that was cut off"
        assert any("hang" in event["message"] or "did not answer" in event["message"] for event in b.all("warning"))
        again = b.wait("another trainer", lambda: [e for e in b.all("trainer") if e["t"] > ended["t"]], 180)[0]
        assert again["pid"] != stopped
        began = ended["t"] - ended["silent"]
        commit = a.wait("a commit of both", lambda: together(a, b, again["t"]), 60)[0]
        noticed, restart, took = ended["t"] - began, again["t"] - ended["t"], commit["t"] - began
        voids = sum(began < event["t"] <= commit["t"] for event in a.all("void"))
        bound = ended["limit"] + 3 * LOOK + restart + 3 * phase + (voids + 1) * max(e["bound"] for e in a.all("seal"))
        print(
            f"noticed after {noticed:.1f} s of {ended['limit']:.1f} + {3 * LOOK:.0f}, started again in {restart:.1f}, "
            f"next commit of both after {took:.1f} of {bound:.1f} s; a round of {phase:.1f} s, {voids} void rosters"
        )
        assert noticed <= ended["limit"] + 3 * LOOK, b.story()
        assert took <= bound, swarm.story()

        # Nothing is left of it, and the run goes on.
        until("the end of the stopped process", lambda: not leaks.alive(stopped), 3)
        a.wait("more commits of both", lambda: len(together(a, b, commit["t"])) >= 3, 60)
        assert disagreements([a, b]) == []
        for node in (a, b):
            node.signal(signal.SIGTERM)
        assert [node.ended(LEAVE) for node in (a, b)] == [0, 0], swarm.story()
        swarm.bootstrap.signal(signal.SIGTERM)
        assert swarm.bootstrap.ended(LEAVE) == 0
        assert leaks.gone(here.mark, leaks.Sockets({}), seconds=2) == []
        assert list(here.temporary.iterdir()) == []
