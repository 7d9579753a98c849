"""What the event logs of a swarm add up to: ledger, report, budget, plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.swarm.budget import Costs, plan_rounds
from atoll.node.swarm.ledger import Ledger
from atoll.node.swarm.report import build_report, percentile, summary, write_json

PEERS = {"node-0": "12D3KooWaaaaaa", "node-1": "12D3KooWbbbbbb"}
HAND = "12D3KooWcccccc"


def swarm_events(rounds: int = 3, by_hand_from: int = 3) -> list[tuple[str, dict[str, Any]]]:
    """What two nodes and an observer log over some rounds; a third peer, started by hand, joins late."""
    events: list[tuple[str, dict[str, Any]]] = []
    for source, peer in PEERS.items():
        events.append((source, {"t": 0.0, "event": "start", "peer": peer, "name": source, "pid": 1}))
        events.append((source, {"t": 0.5, "event": "state", "peer": peer, "state": "training"}))
    for number in range(1, rounds + 1):
        t = number * 10.0
        members = [*PEERS.values(), *([HAND] if number >= by_hand_from else [])]
        for source, peer in PEERS.items():
            base = {"t": t, "peer": peer, "round": number, "outer_step": number}
            events.append(
                (
                    source,
                    base
                    | {
                        "event": "progress",
                        "state": "averaging",
                        "steps": number * 50,
                        "tokens": number * 1000,
                        "loss": 4.0 - number / 2,
                        "tokens_per_s": 500.0,
                        "bytes_sent": number * 100,
                        "bytes_received": number * 90,
                    },
                )
            )
            events.append(
                (
                    source,
                    base
                    | {
                        "event": "commit",
                        "id": f"c{number}",
                        "members": members,
                        "contributors": dict.fromkeys(members, 1.0),
                        "tokens": number * 2000,
                        "weight": number * 2000,
                        "seconds": 1.0 + number,
                        "bytes_sent": 100,
                        "lone": False,
                    },
                )
            )
            events.append((source, base | {"event": "digest", "commit": f"c{number}", "digest": f"d{number}"}))
        events.append(
            (
                "observer",
                {
                    "t": t + 1,
                    "event": "evaluation",
                    "peer": "12D3KooWo",
                    "round": number,
                    "outer_step": number,
                    "tokens": number * 2000,
                    "bytes": 0,
                    "val_loss": 3.0 - number / 4,
                },
            )
        )
    return events


def ledger_of(events: list[tuple[str, dict[str, Any]]]) -> Ledger:
    ledger = Ledger([*PEERS, "observer"])
    for source, event in events:
        ledger.add(source, event)
    return ledger


def report_of(ledger: Ledger, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "run_id": "ab" * 32,
        "nodes": 2,
        "seconds": 61.5,
        "exit_codes": {"node-0": 0, "node-1": -9},
        "bars": {"bigram": 2.5},
        "planned_rounds": 3,
    }
    return build_report(ledger, **(arguments | changes))


def test_report_has_the_fields_that_scripts_rely_on() -> None:
    report = report_of(ledger_of(swarm_events()))
    assert report["run_id"] == "ab" * 32
    assert report["nodes"] == 2
    assert report["rounds"] == 3
    assert report["tokens"] == 6000
    assert report["val_loss"] == [[1, 2.75], [2, 2.5], [3, 2.25]]
    assert report["digests_equal"] is True
    assert report["digests_compared"] == [[1, 2], [2, 2], [3, 2]]
    assert report["bytes_sent_per_node"] == {"node-0": 300, "node-1": 300}
    assert report["seconds"] == 61.5
    assert report["rosters"][0] == [1, list(PEERS.values())]
    assert report["rosters"][2] == [3, [*PEERS.values(), HAND]]
    assert report["exit_codes"] == {"node-0": 0, "node-1": -9}
    assert report["ngram"] == {"bigram": 2.5}
    assert report["bytes_per_round"] == [[1, 200], [2, 200], [3, 200]]
    assert report["seconds_per_round"] == {"p10": 2.2, "p50": 3.0, "p90": 3.8, "p100": 4.0}
    assert report["seconds_between_commits"]["p50"] == 10.0
    assert report["outside_peers"] == [HAND]
    assert [point["bytes"] for point in report["curve"]] == [200, 400, 600]
    assert report["final_digest"] == "d3"
    json.dumps(report, allow_nan=False)


def test_one_differing_digest_anywhere_is_found() -> None:
    events = swarm_events()
    index = next(i for i, (s, e) in enumerate(events) if s == "node-1" and e["event"] == "digest" and e["round"] == 2)
    events[index] = (events[index][0], events[index][1] | {"digest": "other"})
    report = report_of(ledger_of(events))
    assert report["digests_equal"] is False
    assert report["unequal_rounds"] == [2]
    assert any("NO" in line and "after rounds 2)" in line for line in summary(report))


def test_a_digest_corrected_later_still_counts_as_unequal() -> None:
    ledger = ledger_of(swarm_events())
    ledger.add("node-0", {"event": "digest", "round": 3, "digest": "wrong"})
    ledger.add("node-0", {"event": "digest", "round": 3, "digest": "d3"})
    assert not ledger.digests_equal()


def test_no_digests_are_not_equal_digests() -> None:
    report = report_of(ledger_of([event for event in swarm_events() if event[1]["event"] != "digest"]))
    assert report["digests_equal"] is False
    assert report["digests_compared"] == []
    assert report["final_digest"] is None


def test_report_of_a_swarm_that_never_started() -> None:
    report = report_of(Ledger(["node-0"]), interrupted=True, exit_codes={"node-0": None})
    assert report["rounds"] == 0
    assert report["val_loss"] == []
    assert report["final_val_loss"] is None
    assert report["seconds_per_round"]["p50"] is None
    assert summary(report)


def test_counters_add_up_over_restarts() -> None:
    ledger = ledger_of(swarm_events())
    ledger.add("node-0", {"event": "start", "t": 50.0, "peer": PEERS["node-0"]})
    ledger.add("node-0", {"event": "progress", "t": 51.0, "bytes_sent": 7, "tokens": 5})
    report = report_of(ledger)
    assert report["bytes_sent_per_node"]["node-0"] == 307
    assert report["tokens_per_node"]["node-0"] == 3005


def test_a_fork_is_reported_and_the_larger_roster_kept() -> None:
    ledger = ledger_of(swarm_events())
    ledger.add("node-0", {"event": "commit", "round": 2, "id": "lone", "members": [PEERS["node-0"]], "lone": True})
    assert report_of(ledger)["forks"] == {"2": ["c2", "lone"]}
    assert ledger.commits[2].id == "c2"


def test_one_void_roster_counts_once_however_many_log_it() -> None:
    ledger = Ledger()
    for source in PEERS:
        ledger.add(source, {"event": "void", "round": 4, "roster": "r1", "reason": "silence"})
    ledger.add("node-0", {"event": "void", "round": 4, "roster": "r2", "reason": "split"})
    assert report_of(ledger)["void_rosters"] == [[4, "silence"], [4, "split"]]


def test_bytes_of_a_round_follow_from_the_counters_when_the_commit_does_not_say() -> None:
    events = swarm_events()
    for _, event in events:
        if event["event"] == "commit":
            del event["bytes_sent"]
    assert report_of(ledger_of(events))["bytes_per_round"] == [[1, 200], [2, 200], [3, 200]]


def test_the_later_evaluation_of_a_round_wins() -> None:
    ledger = ledger_of(swarm_events())
    ledger.add("observer", {"event": "evaluation", "round": 1, "val_loss": 9.0, "t": 99.0})
    assert ledger.curve()[0].val_loss == 9.0


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)
KINDS = ["start", "state", "progress", "commit", "digest", "evaluation", "void", "refused", "warning", "exit", "new"]
FIELDS = [
    "t",
    "peer",
    "round",
    "outer_step",
    "id",
    "members",
    "contributors",
    "tokens",
    "digest",
    "val_loss",
    "code",
    "state",
]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FIELDS), JUNK)), max_size=12))
def test_malformed_events_never_break_the_report(events: list[tuple[str, dict[str, Any]]]) -> None:
    ledger = Ledger()
    for kind, fields in events:
        ledger.add("node-0", fields | {"event": kind})
    report = report_of(ledger)
    json.dumps(report, allow_nan=False)
    assert summary(report)


def test_percentile() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.9) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 1.0) == 2.0


def test_write_json_leaves_no_partial_file(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "report.json", {"a": 1})
    assert json.loads((tmp_path / "new" / "report.json").read_text()) == {"a": 1}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]


def test_plot_is_a_png(tmp_path: Path) -> None:
    from atoll.node.swarm.plot import plot_loss

    plot_loss(ledger_of(swarm_events()).curve(), {"bigram": 2.5}, "demo", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    plot_loss([], {}, "nothing", tmp_path / "empty.png")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["empty.png", "loss.png"]


COSTS = Costs(step=0.03, evaluation=1.0)


def test_budget_ends_in_time_and_uses_the_time() -> None:
    plan = plan_rounds(COSTS, nodes=4, cores=2, inner_steps=50, seconds=240, spent=10)
    assert plan.total + 10 < 240
    assert plan.rounds * plan.per_round > 0.8 * (240 - 10 - plan.start - plan.finish)


def test_budget_with_a_core_for_everyone_follows_the_slowest_chain() -> None:
    few = plan_rounds(COSTS, nodes=1, cores=16, inner_steps=50, seconds=240)
    many = plan_rounds(COSTS, nodes=8, cores=16, inner_steps=50, seconds=240)
    assert few.rounds == many.rounds
    assert few.per_round == pytest.approx(50 * 0.03 + COSTS.round_cpu + COSTS.round_wait)


def test_budget_never_plans_less_than_one_round() -> None:
    assert plan_rounds(COSTS, nodes=64, cores=1, inner_steps=500, seconds=1).rounds == 1
    with pytest.raises(ValueError, match="at least 1"):
        plan_rounds(COSTS, nodes=0, cores=1, inner_steps=1, seconds=1)


@given(
    step=st.floats(1e-4, 10),
    nodes=st.integers(1, 64),
    cores=st.integers(1, 64),
    inner=st.integers(1, 1000),
    seconds=st.floats(30, 10_000),
)
def test_budget_is_monotonic(step: float, nodes: int, cores: int, inner: int, seconds: float) -> None:
    def rounds(**change: Any) -> int:
        values: dict[str, Any] = {
            "step": step,
            "nodes": nodes,
            "cores": cores,
            "inner": inner,
            "seconds": seconds,
        } | change
        costs = Costs(step=values["step"], evaluation=1.0)
        return plan_rounds(
            costs,
            nodes=values["nodes"],
            cores=values["cores"],
            inner_steps=values["inner"],
            seconds=values["seconds"],
        ).rounds

    here = rounds()
    assert rounds(seconds=seconds * 2) >= here
    assert rounds(nodes=nodes + 1) <= here
    assert rounds(cores=cores + 1) >= here
    assert rounds(step=step * 2) <= here
