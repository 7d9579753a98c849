"""A node's events in words, and the table of a run's peers."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from atoll.node.console import PROGRESS_EVERY, ConsoleEcho, describe, describe_progress, describe_use
from atoll.node.options import LogStyle
from atoll.node.status import Snapshot, render
from atoll.protocol.address import RunAddress
from atoll.protocol.anchor import Anchor
from atoll.protocol.identity import Ed25519Signer
from atoll.protocol.messages import GENESIS, Head
from atoll.protocol.records import Record

PEER = Ed25519Signer.from_seed(bytes(32)).peer_id
OTHER = Ed25519Signer.from_seed(bytes([1] * 32)).peer_id
KINDS = [
    "start",
    "state",
    "seal",
    "void",
    "commit",
    "anchor",
    "evaluation",
    "refused",
    "warning",
    "exit",
    "resync",
    "new kind",
    "looking",
    "unreached",
    "resumed",
]


@pytest.mark.parametrize("kind", KINDS)
def test_events_with_missing_fields_can_be_described(kind: str) -> None:
    text = describe({"event": kind})
    assert text is None or "\n" not in text
    assert describe_progress({"event": "progress", "loss": None})
    assert describe_use({"event": "progress", "trained": None, "held": 1, "waited": 0}) == ""
    assert describe_use({"event": "progress", "trained": 0.0, "held": 0.0, "waited": 0.0}) == ""


def test_what_a_trainers_time_went_into() -> None:
    text = describe_use({"event": "progress", "trained": 60.0, "held": 30.0, "waited": 10.0})
    assert text == "of 100 s 60 % inner steps, 30 % kept by rounds, 10 % without samples"


def test_a_lone_commit_is_said_to_be_one() -> None:
    event = {"event": "commit", "round": 3, "outer_step": 2, "members": [PEER], "seconds": 0.5, "lone": True}
    assert "alone" in str(describe(event))
    assert "alone" not in str(describe(event | {"lone": False}))


def test_what_going_over_to_another_chain_has_cost() -> None:
    event = {
        "event": "resync",
        "round": 9,
        "outer_step": 7,
        "lost_commits": 2,
        "lost_averaged": 5120,
        "lost_tokens": 300,
    }
    assert describe(event) == (
        "outer step 7: went over to the others' chain; lost: 2 commits that the others do not have, with 5,120 tokens "
        "of this node's and 300 tokens that this node had not brought yet"
    )
    assert "2 or more commits" in str(describe(event | {"lost_more": True}))
    plain = {"event": "resync", "round": 9, "outer_step": 7}
    assert describe(plain, 24) == "outer step 7/24: went over to the others' head"
    assert describe(plain | {"left_round": 0}, 24) == "outer step 7/24: fetched the state of the others"


def test_a_commit_that_was_caught_up_with_is_not_told_as_the_nodes_own() -> None:
    event = {"event": "commit", "round": 3, "outer_step": 2, "members": [PEER, OTHER], "seconds": 0.5, "averaged": True}
    own = str(describe(event | {"took_part": True}, 24))
    assert own == "round 3: committed outer step 2/24 with 2 members in 0.5 s"
    assert describe(event) == own.replace("/24", ""), "logs of older nodes"
    late = str(describe(event | {"took_part": False}, 24))
    assert late == "round 3: caught up with outer step 2/24, averaged by 2 members without this node"


def test_a_round_of_samples_alone_is_no_outer_step() -> None:
    event = {"event": "commit", "round": 1, "outer_step": 0, "members": [PEER, OTHER], "averaged": False}
    assert describe(event) == "round 1: hands out samples to 2 members, no outer step"
    later = event | {"round": 9, "outer_step": 7, "members": [PEER], "took_part": False}
    assert describe(later, 24) == "round 9: hands out samples to 1 member, no outer step (caught up)"


def test_what_is_in_the_way_of_the_run_in_words() -> None:
    looking = {"event": "looking", "run": "ab" * 32, "at": ["/ip4/127.0.0.1/tcp/9/p2p/" + PEER]}
    assert describe(looking) == f"looking for run ababababab at /ip4/127.0.0.1/tcp/9/p2p/{PEER}"
    reasons = {f"peer {i}": f"/ip4/127.0.0.1/tcp/{i}: connection refused" for i in range(6)}
    text = str(describe({"event": "unreached", "reasons": reasons}))
    assert "/ip4/127.0.0.1/tcp/0: connection refused; " in text
    assert text.endswith("and 2 more")
    assert describe({"event": "unreached", "reasons": {}}) == "a peer of the run answers"


def test_progress_tells_how_many_outer_steps_the_run_has() -> None:
    out = io.StringIO()
    echo = ConsoleEcho(LogStyle.plain, console=Console(file=out, width=200))
    echo({"event": "start", "peer": PEER, "rounds": 24})
    echo({"event": "progress", "state": "training", "outer_step": 3})
    assert "training: outer step 3/24" in out.getvalue()


def test_plain_style_prints_progress_now_and_then() -> None:
    out, now = io.StringIO(), [0.0]
    echo = ConsoleEcho(LogStyle.plain, console=Console(file=out, width=200), clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        echo({"event": "progress", "state": "training", "steps": second})
    echo({"event": "warning", "message": "the disk [bold]is[/] slow"})
    echo.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 25 // PROGRESS_EVERY + 2
    assert "the disk [bold]is[/] slow" in lines[-1]


def test_json_style_prints_the_events_and_quiet_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    event: dict[str, Any] = {"t": 1.0, "event": "state", "peer": "p", "state": "training"}
    ConsoleEcho(LogStyle.json)(event)
    ConsoleEcho(LogStyle.quiet)(event)
    assert json.loads(capsys.readouterr().out) == event


def snapshot() -> Snapshot:
    ahead = Head(bytes([7] * 32), 5, 9000, 6, 4)
    common: dict[str, Any] = {"run": bytes(32), "issued": 100.0, "expires": 160.0, "addresses": ()}
    records = (
        Record(peer=PEER, state="training", head=ahead, step_time=0.05, tokens=4500, name="reef", **common),
        Record(peer=OTHER, state="serving", head=GENESIS, name="bootstrap", **common),
    )
    return Snapshot(RunAddress(bytes(32), [f"/ip4/127.0.0.1/tcp/9/p2p/{OTHER}"]), records, 1)


def test_status_shows_the_best_head_and_who_has_it() -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(render(snapshot(), 103.0))
    text = out.getvalue()
    for word in (
        "1 nodes, 1 of them training",
        "07070707",
        "outer step 4",
        "reef",
        "50 ms",
        "4,500",
        "3 s ago",
        "serving",
    ):
        assert word in text, word


def test_status_shows_the_anchor_and_who_says_to_have_it() -> None:
    shown = snapshot()
    anchor = Anchor(bytes(32), 17, shown.best)
    records = [msgspec.structs.replace(shown.records[0], anchor=b"sealed", anchored=True), *shown.records[1:]]
    # One that holds an older anchor does not count.
    records.append(msgspec.structs.replace(shown.records[0], anchor=b"older", anchored=True))
    anchored = Snapshot(shown.address, tuple(records), 0, anchor, b"sealed")
    out = io.StringIO()
    Console(file=out, width=160).print(render(anchored, 103.0))
    assert "anchor: commit 070707070707, outer step 4 (round 6), in the chains of 1 of 2" in out.getvalue()
    found = json.loads(json.dumps(anchored.to_json(103.0)))
    assert found["anchor"] == {"number": 17, "head": found["best"]}
    assert [peer["anchored"] for peer in found["peers"]] == [True, False, False]


@pytest.mark.parametrize(("held", "words"), [(True, "is in this peer's chain"), (False, "is not in this peer's chain")])
def test_an_anchor_in_words(held: bool, words: str) -> None:
    event = {"event": "anchor", "number": 17, "commit": "ab" * 32, "round": 6, "height": 5, "held": held}
    assert words in str(describe(event))


def test_status_as_json() -> None:
    found = json.loads(json.dumps(snapshot().to_json(103.0)))
    assert found["best"]["outer_step"] == 4
    assert found["anchor"] is None
    assert [peer["behind"] for peer in found["peers"]] == [0, 5]
    assert found["refused"] == 1
    assert found["peers"][0]["age"] == 3.0
