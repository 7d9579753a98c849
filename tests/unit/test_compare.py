"""What ``atoll compare`` makes of manifests, studies and finished runs; no run is made here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import atoll
from atoll.node.compare import report as reports
from atoll.node.compare.analysis import Terms, curve, survey
from atoll.node.compare.command import CompareOptions, chosen, read
from atoll.node.compare.link import Link, Transfer, pack_transfers, unpack_transfers, wall_times
from atoll.node.compare.lowrank import LowRank, gains, largest_rank
from atoll.node.compare.results import REAL_SOURCES, Results
from atoll.node.compare.scenario import Scenario
from atoll.node.compare.simulate import round_ticks
from atoll.node.compare.statistics import interval, paired, t_quantile
from atoll.node.compare.study import SWEEP_SEED, Job, Row, Study, aa_row, baseline_row, changed, job, read_study
from atoll.node.run_defaults import new_manifest
from atoll.protocol.errors import ConfigError, ManifestError, StateError, UsageError
from atoll.protocol.manifest import Manifest
from atoll.protocol.theta0 import TensorSpec

Floats = NDArray[np.float32]
RECORDED = Path(__file__).parents[2] / "docs/learning/results.jsonl"
SMALL = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32, "context": 32}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("text")
    for number in range(24):
        (folder / f"{number}.txt").write_text("a reef around a lagoon " * 20 + str(number))
    return new_manifest("small", data=folder, model=SMALL, inner_steps=10, batch=2, codec="int8", rounds=5)


# ---------------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227)]
)
def test_quantiles_of_student_s_t_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(expected, rel=2e-6)


def test_quantiles_invert_the_density() -> None:
    # an independent way: integrate the density numerically
    for freedom in (3, 8):
        edge = t_quantile(0.95, freedom)
        x = np.linspace(0, edge, 200_001)
        scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
        y = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        assert float(np.sum((y[1:] + y[:-1]) / 2) * (x[1] - x[0])) == pytest.approx(0.45, abs=1e-8)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(7)
    inside = 0
    for _ in range(2000):
        found = interval(list(random.normal(3.0, 2.0, 4)))
        inside += found.lower < 3.0 < found.upper
    assert 0.935 < inside / 2000 < 0.965


def test_verdicts() -> None:
    found = paired({0: 1.010, 1: 1.012, 2: 1.011, 9: 5.0}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert found is not None
    assert found.seeds == 3
    assert found.mean == pytest.approx(1.1)
    assert found.half_width == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-4)
    assert (found.verdict(2.0), found.verdict(0.5), found.verdict(1.1)) == ("met", "not met", "undecided")
    assert found.sharp(1.0)
    assert not found.sharp(0.4)
    one = paired({0: 1.0}, {0: 2.0})
    assert one is not None
    assert one.verdict(1.0) == "undecided"  # one seed decides nothing, however good it looks
    assert paired({0: 1.0}, {1: 1.0}) is None


# ---------------------------------------------------------------------- links


def test_a_round_without_overlap_stops_training_for_its_transfer() -> None:
    link = Link.parse("8mbit, 50ms")
    transfers = [Transfer(10, 0, 2_000_000), Transfer(20, 0, 2_000_000)]
    assert wall_times([5, 10, 15, 20], transfers, 0.1, link, 1) == pytest.approx([0.5, 3.1, 3.6, 6.2])


def test_a_transfer_hides_behind_the_steps_of_its_overlap() -> None:
    link = Link.parse("8mbit,0ms")
    assert wall_times([10, 12, 20], [Transfer(10, 5, 400_000)], 0.1, link, 1) == pytest.approx([1.0, 1.2, 2.0])
    # 1.0 s of transfer behind 0.5 s of steps: what is left over stops training at the end of the overlap
    assert wall_times([10, 14, 15, 20], [Transfer(10, 5, 1_000_000)], 0.1, link, 1) == pytest.approx(
        [1.0, 1.4, 2.0, 2.5]
    )
    # the run is over when the last transfer is
    assert wall_times([10], [Transfer(10, 5, 1_000_000)], 0.1, link, 1) == pytest.approx([2.0])


def test_transfers_share_the_link() -> None:
    found = wall_times([20], [Transfer(10, 10, 1_000_000), Transfer(11, 9, 1_000_000)], 0.1, Link.parse("8mbit,0ms"), 0)
    assert found == pytest.approx([3.0])


@given(st.lists(st.builds(Transfer, st.integers(0, 50), st.integers(0, 2), st.integers(0, 2))))
def test_packed_transfers_are_the_same(transfers: list[Transfer]) -> None:
    ordered = sorted(transfers)
    assert unpack_transfers(pack_transfers(ordered)) == ordered


def test_even_transfers_take_one_entry() -> None:
    assert pack_transfers([Transfer(30 * k, 2, 99) for k in range(1, 100)]) == [[30, 2, 99, 99, 30]]


@pytest.mark.parametrize("text", ["20", "20mbit", "fast,1ms", "0mbit,1ms", "1.2.3mbit,1ms"])
def test_links_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="20mbit,50ms"):
        Link.parse(text)


# ---------------------------------------------------------------------- scenarios and studies


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"speeds": [1, 2]}, "names 2 peers"),
        ({"deaths": [[7, 0.1, 0.2]]}, "no peer 7"),
        ({"deaths": [[0, 0.5, 0.2]]}, "begins < ends"),
        ({"method": "data-parallel", "lost": 0.5}, "knows no lost"),
        ({"lossy": 0.5}, "did you mean 'lost'"),
        ({"rank": 2, "fragments": 3}, "does not go with rank"),
        ({"lost": 1.0}, "less than 1"),
        ({"real": True, "speeds": [1, 1, 1, 2]}, "real nodes know no speeds .the nodes of one machine"),
        ({"real": True, "lost": 0.5, "fragments": 3}, "no lost .*, fragments .set manifest.round.fragments"),
        ({"real": True, "method": "data-parallel"}, "no real"),
        ({"again": 1}, "set data_seed instead"),
        ({"step_time": 0}, "step_time: expected more than 0"),
    ],
)
def test_circumstances_that_contradict_each_other_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scenario.of(table, "row 'x'")


def test_a_study_is_read(manifest: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(
        "tokens = 5000\nseeds = 2\nmargin = 1.5\n"
        "[scenario]\npeers = 3\n"
        '[[row]]\nname = "a"\n'
        '[[row]]\nname = "b"\nmanifest = {codec = {name = "int4"}, round = {inner_steps = 20}}\n'
        "scenario = {lost = 0.5}\n"
        '[row.sweep]\n"outer.lr" = [0.5, 1.0]\n"scenario.rate" = [1, 2, 4]\n'
        '[[row]]\nname = "c"\nagainst = "b"\nmargin = 3\nscenario = {method = "data-parallel"}\n'
    )
    study = read_study(path, manifest, {"peers": 4})
    a, b, c = study.rows
    assert (study.tokens, study.seeds) == (5000, 2)
    assert (a.against, a.margin, b.against, b.margin, c.against, c.margin) == (None, None, "a", 1.5, "b", 3)
    assert a.scenario.peers == b.scenario.peers == c.scenario.peers == 3
    assert (b.manifest.codec.name, b.manifest.round.inner_steps) == ("int4", 20)
    # what follows from the inner steps has followed
    assert b.manifest.round.weight_cap == 2 * a.manifest.round.weight_cap
    points = [(v.manifest.outer.lr, v.scenario.rate) for v in b.variants()]
    assert points == [(0.5, 1), (0.5, 2), (0.5, 4), (1.0, 1), (1.0, 2), (1.0, 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one"),
        ("[[rows]]\n", "did you mean 'row'"),
        ('[[row]]\nname = "a"\n[[row]]\nname = "a"\n', "two rows"),
        ('[[row]]\nname = "a"\nagainst = "z"\n', "no row 'z'"),
        ('[[row]]\nname = "a"\nmanifest = {outer = {lr = -1}}\n', "outer.lr"),
        ('[[row]]\nname = "a"\nscenario = {peers = 1}\n', "quorum"),
        ('[[row]]\nname = "a"\nscenario = {fragments = 60}\n', "at most 3"),
        ('[[row]]\nname = "a"\nscenario = {rank = 60}\n', "at most 7"),
        ('[manifest.round]\nfragments = 3\n[[row]]\nname = "a"\nscenario = {rank = 1}\n', "go with scenario.rank"),
        (
            '[manifest.round]\naverage = "radial"\n[[row]]\nname = "a"\nscenario = {rank = 2}\n',
            "manifest.round.average does not go with scenario.rank",
        ),
        (
            '[manifest.round]\nfragments = 3\n[[row]]\nname = "a"\nscenario = {fragments = 2}\n',
            "go with scenario.fragments",
        ),
        ('[manifest.round]\nby = "time"\nevery = 60\ngrace = 0.0\n[[row]]\nname = "a"\n', "say it with --step-time"),
        (
            '[manifest.round]\nby = "time"\nevery = 60\ngrace = 0.0\n[scenario]\nstep_time = 1\nfragments = 2\n'
            '[[row]]\nname = "a"\n',
            "set manifest.round.fragments",
        ),
        (
            '[manifest.round]\nby = "tokens"\nevery = 600\ngrace = 0.0\n[scenario]\nidle = true\n[[row]]\nname = "a"\n',
            "waits for no steps",
        ),
        ('[[row]]\nname = "a"\n[row.sweep]\nlr = [1]\n', "table.key"),
        ('[[row]]\nname = "a"\n[row.sweep]\n"outer.speed" = [1]\n', "speed"),
        ('[[row]]\nname = "a"\nmargin = 0\n', "margin"),
        ("= 3", "not a TOML file"),
    ],
)
def test_studies_that_cannot_be_are_refused_by_name(
    manifest: Manifest, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "study.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_study(path, manifest, {"peers": 4})
    assert str(path) in str(error.value)


@pytest.mark.skipif(not RECORDED.exists(), reason="the documents are not beside the tests")
@pytest.mark.parametrize(
    ("row", "rules"), [("int8", {}), ("carry, τ = 1", {}), ("speeds 1:1:2:4, equal weights", {"weights": "equal"})]
)
def test_results_of_before_are_found(row: str, rules: dict[str, Any]) -> None:
    """A field that a manifest did not have then changes no key where it has its usual value; weights and averages,
    which were circumstances, are looked for as such."""
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    record = next(r for r in reversed(lines) if r["row"] == row and "period" in r["manifest"]["outer"])
    told = record["manifest"] | {"name": "recorded", "access": {"admit": "open", "peers": []}}
    then = Manifest.from_dict(told | {"round": told["round"] | rules})
    scenario = {k: v for k, v in record["scenario"].items() if k not in ("weights", "average")}
    job = Job(Row(row, then, Scenario.of(scenario, row)), record["seed"], then)
    assert job.key("") == record["subject"]


def test_what_was_set_by_hand_stays(manifest: Manifest) -> None:
    by_hand = manifest.replace(round={"weight_cap": 12345})
    assert changed(by_hand, {"round": {"inner_steps": 20}}).round.weight_cap == 12345
    assert changed(manifest, {"round": {"inner_steps": 20}}).round.weight_cap == 2 * manifest.round.weight_cap
    sparse = changed(manifest, {"codec": {"name": "sparse"}})
    assert (sparse.codec.version, changed(sparse, {"codec": {"name": "int4"}}).codec.version) == (2, 1)


def test_seeds_change_the_start_and_the_text(manifest: Manifest) -> None:
    row = Row("a", manifest, Scenario())
    zero, one = job(row, 0, None, 4), job(row, 1, None, 4)
    assert zero.manifest.state.theta0 == manifest.state.theta0 != one.manifest.state.theta0
    assert zero.manifest.budget.rounds == 5
    other = job(aa_row(row), 0, None, 4)
    assert other.manifest.state.theta0 == zero.manifest.state.theta0
    assert len({each.key("code") for each in (zero, one, other)} | {zero.key("other code")}) == 4
    # names, signatures and what only a network knows are no part of what is trained
    same = manifest.replace(name="other", round={"silence": 9.0, "max_lease": 999, "max_group": 4})
    assert job(Row("b", same, Scenario()), 0, None, 4).key("") == zero.key("")
    for change in ({"outer": {"lr": 0.5}}, {"round": {"max_group": 3}}, {"round": {"overlap": 2}}):
        assert job(Row("b", manifest.replace(**change), Scenario()), 0, None, 4).key("") != zero.key("")


def test_budgets(manifest: Manifest) -> None:
    def rounds(tokens: int, **scenario: Any) -> tuple[int, int]:
        found = job(Row("a", manifest, Scenario.of(scenario, "")), 0, tokens, 4)
        return found.manifest.budget.rounds, found.tokens

    step = 2 * 32
    whole = 4 * 10 * step
    assert rounds(8 * whole, peers=4) == (8, 8 * whole)
    assert rounds(8 * whole, peers=2) == (16, 8 * whole)
    assert rounds(8 * whole, peers=2, budget="time") == (8, 4 * whole)
    # a quorum of two: rounds end when the second fastest is ready
    assert round_ticks(Scenario(speeds=(1, 1, 2, 4)), manifest.round, 256) == 5
    assert rounds(8 * whole, speeds=[1, 1, 2, 4], budget="time") == (16, 16 * whole)
    assert rounds(8 * whole, speeds=[1, 1, 2, 4]) == (8, 8 * whole)
    assert rounds(8 * whole, method="data-parallel") == (8, 8 * whole)
    with pytest.raises(UsageError, match="less than one round"):
        rounds(100)
    # groups of two of four peers: twice the rounds
    small = manifest.replace(round={"max_group": 2})
    found = job(Row("a", small, Scenario()), 0, 8 * whole, 4)
    assert (found.manifest.budget.rounds, found.tokens) == (16, 8 * whole)


# ---------------------------------------------------------------------- what is run, and what it says


def results_of(losses: Mapping[tuple[str, int], float | None]) -> Any:
    """Answers for jobs by row name (with the swept rate, if any) and seed; they take part as finished."""
    asked: list[tuple[str, int]] = []

    def find(wanted: Job) -> Mapping[str, Any] | None:
        rate = wanted.row.chosen.get("scenario.rate")
        name = (wanted.row.name if rate is None else f"{wanted.row.name}@{rate:g}", wanted.seed)
        asked.append(name)
        if name not in losses:
            return None
        return {
            "loss": losses[name], "tokens": 10, "bytes": 20, "commits": 2, "voids": 0, "lost": 0, "commit": "c",
            "code": "d", "step_seconds": 0.01, "cpu_seconds": 1.0, "transfers": [[5, 0, 1000, 1, 0]],
            "curve": [{"tick": 5, "tokens": 10, "bytes": 20, "loss": losses[name]}],
        }  # fmt: skip

    return find


def names(jobs: list[Job]) -> list[tuple[str, int]]:
    return [(wanted.row.name, wanted.seed) for wanted in jobs]


def test_sweeps_come_first_and_the_best_point_is_used(manifest: Manifest) -> None:
    rows = [Row("a", manifest, Scenario()), Row("b", manifest, Scenario(), "a", 1.0, sweep={"scenario.rate": (1, 2)})]
    terms = Terms(None, 4, 2, 0)
    _, jobs = survey(rows, terms, results_of({}))
    assert names(jobs)[:2] == [("b", SWEEP_SEED), ("b", SWEEP_SEED)]
    assert ("a", 0) in names(jobs)
    assert ("b", 0) not in names(jobs)
    done: dict[tuple[str, int], float | None] = {("b@1", SWEEP_SEED): 2.0, ("b@2", SWEEP_SEED): 1.9}
    _, jobs = survey(rows, terms, results_of(done))
    assert names(jobs) == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert all(wanted.row.chosen == {"scenario.rate": 2} for wanted in jobs if wanted.row.name == "b")
    done[("b@2", SWEEP_SEED)] = None
    _, jobs = survey(rows, terms, results_of(done))
    assert all(wanted.row.chosen == {"scenario.rate": 1} for wanted in jobs if wanted.row.name == "b")


def test_seeds_are_added_until_the_interval_is_narrow_or_the_budget_spent(manifest: Manifest) -> None:
    rows = [Row("a", manifest, Scenario()), Row("b", manifest.replace(outer={"lr": 0.5}), Scenario(), "a", 1.0)]
    done: dict[tuple[str, int], float | None] = {("a", 0): 2.0, ("a", 1): 2.0, ("b", 0): 2.0, ("b", 1): 2.05}
    _, jobs = survey(rows, Terms(None, 4, 2, 0), results_of(done))
    assert jobs == []
    _, jobs = survey(rows, Terms(None, 4, 2, 4), results_of(done))
    assert names(jobs) == [("a", 2), ("b", 2)]
    done[("b", 1)] = 2.001
    done |= {("a", 2): 2.0, ("b", 2): 2.0}
    lines, jobs = survey(rows, Terms(None, 4, 2, 4), results_of(done))
    assert jobs == []
    assert lines[1].verdict == "met"


def test_a_diverged_run_is_no_success(manifest: Manifest) -> None:
    rows = [Row("a", manifest, Scenario()), Row("b", manifest.replace(outer={"lr": 0.5}), Scenario(), "a", 1.0)]
    lines, jobs = survey(rows, Terms(None, 4, 1, 5), results_of({("a", 0): 2.0, ("b", 0): None}))
    assert jobs == []
    assert lines[1].verdict == "not met"
    text = reports.markdown(reports.build(lines, Link.parse("20mbit,50ms"), None))
    assert "diverged" in text


def test_tables_say_what_is_known(manifest: Manifest, tmp_path: Path) -> None:
    rows = chosen(
        Study((Row("a", manifest, Scenario()), Row("b", manifest.replace(outer={"lr": 0.5}), Scenario(), "a", 1.0))),
        CompareOptions(baseline=True, rates=(1.0,)),
    )
    assert [row.name for row in rows] == ["a", "data-parallel", "a (A/A)", "b"]
    done: dict[tuple[str, int], float | None] = {}
    for seed in range(3):
        done |= {("a", seed): 2.0, ("data-parallel", seed): 1.9, ("a (A/A)", seed): 2.0 + 0.01 * seed}
    done |= {("b", 0): 2.1, ("b", 1): 2.11}
    lines, jobs = survey(rows, Terms(None, 4, 3, 0), results_of(done))
    assert names(jobs) == [("b", 2)]
    report = reports.build(lines, Link.parse("20mbit,50ms"), None)
    reports.write(report, tmp_path)
    table = (tmp_path / "compare.md").read_text()
    assert "| b | 2 of 3 | 10 | 2 | 2.1050 | a | +5.25 % ± 3.18 | 1 % | not met |" in table
    assert "| a (A/A) | 3 | 10 | 2 | 2.0100 | a | +0.50 % ± 1.24 |" in table
    entry = json.loads((tmp_path / "compare.json").read_text())["rows"][0]
    assert entry["wall_seconds"] == pytest.approx(5 * 0.01 + 1000 / 2.5e6 + 5 * 0.1)


def test_the_baseline_is_swept_and_has_no_circumstances(manifest: Manifest) -> None:
    row = baseline_row(Row("a", manifest, Scenario(lost=0.5, speeds=(1, 1, 2, 4))), (0.5, 1.0), None, 4)
    assert row.scenario.lost == 0
    assert len(row.variants()) == 2


@pytest.mark.parametrize("tokens", [None, 40_000])
@pytest.mark.parametrize(
    ("rules", "circumstances"),
    [
        ({}, {}),
        ({}, {"speeds": (1, 2, 2, 4)}),
        ({"by": "tokens", "every": 7 * 256, "grace": 0.0}, {}),
        ({"by": "tokens", "every": 7 * 256, "grace": 0.0}, {"real": True}),
        ({"by": "tokens", "every": 7 * 256, "grace": 0.0}, {"budget": "time", "speeds": (1, 1, 2, 2)}),
        ({"by": "time", "every": 13, "grace": 0.0, "overlap": 2}, {"step_time": 1.0}),
        ({"by": "time", "every": 3, "grace": 0.0}, {"step_time": 1.5}),
    ],
)
def test_the_baseline_has_the_tokens_of_its_reference(
    manifest: Manifest, rules: dict[str, Any], circumstances: dict[str, Any], tokens: int | None
) -> None:
    row = Row("a", changed(manifest, {"round": rules}), Scenario(**circumstances))
    theirs = job(row, 0, tokens, 4)
    own = job(baseline_row(row, (1.0,), tokens, 4), 0, tokens, 4)
    if row.scenario.budget == "time":
        assert own.ticks == theirs.ticks
    else:  # a step of everybody is not divided
        assert abs(own.tokens - theirs.tokens) < 256


def test_no_baseline_for_real_nodes_whose_rounds_go_by_time(manifest: Manifest) -> None:
    row = Row("a", changed(manifest, {"round": {"by": "time", "every": 60, "grace": 0.0}}), Scenario(real=True))
    with pytest.raises(UsageError, match="known when it is over"):
        baseline_row(row, (1.0,), 40_000, 4)


def test_real_nodes_and_simulated_peers_in_one_study(manifest: Manifest, tmp_path: Path) -> None:
    simulated, real = Scenario(), Scenario(real=True)
    rows = [Row("a", manifest, simulated), Row("a, real", manifest, real, "a"), aa_row(Row("a, real", manifest, real))]
    assert rows[2].scenario.again == 1
    keys = [job(row, 0, None, 4).key("") for row in rows]
    assert len(set(keys)) == 3
    # Silence means something to them, and a checkpoint more or less does not.
    other = manifest.replace(state={"checkpoint_every": 3})
    assert job(Row("b", other, real), 0, None, 4).key("") == keys[1]
    assert job(Row("b", other.replace(round={"silence": 9.0}), real), 0, None, 4).key("") != keys[1]
    lines, _ = survey(rows, Terms(None, 4, 1, 0), results_of({("a", 0): 2.0, ("a, real", 0): 2.1}))
    for line in lines[1:2]:
        for result in line.results.values():
            result["curve"][0]["seconds"], result["utilisation"] = 7.0, 0.9  # type: ignore[index]
    report = reports.build(lines, Link.parse("20mbit,50ms"), 0.5)
    assert [entry.get("wall_seconds") for entry in report["rows"]] == [pytest.approx(5 * 0.5 + 0.5004), 7.0, None]
    assert report["rows"][1]["utilisation"] == [0.9]
    assert "by real nodes: a, real, a, real (A/A);" in reports.notes(report)


def test_curves_of_real_nodes_are_averaged_where_all_seeds_have_them(manifest: Manifest) -> None:
    def find(wanted: Job) -> dict[str, Any]:
        steps = (1, 2, 3, 5) if wanted.seed == 0 else (1, 3, 5)
        points = [{"outer_step": s, "seconds": s + wanted.seed, "tokens": s, "bytes": s, "loss": 9 - s} for s in steps]
        return {"loss": 4.0, "step_seconds": 1.0, "curve": points}

    lines, _ = survey([Row("a", manifest, Scenario(real=True))], Terms(None, 4, 2, 0), find)
    found = curve(lines[0], None, Link.parse("20mbit,50ms"))
    expected = {"loss": [8, 6, 4], "tokens": [1, 3, 5], "bytes": [1, 3, 5], "seconds": [1.5, 3.5, 5.5]}
    assert found == expected


def test_real_nodes_for_all_rows_that_do_not_say_otherwise(manifest: Manifest, tmp_path: Path) -> None:
    path, study = tmp_path / "m.toml", tmp_path / "study.toml"
    path.write_text(manifest.to_toml())
    found = chosen(read(CompareOptions(manifests=(path,), real=True)), CompareOptions(baseline=True))
    assert [row.scenario.real for row in found] == [True, False, True], "data-parallel training is simulated"
    study.write_text('[[row]]\nname = "a"\n[[row]]\nname = "b"\nscenario.real = false\nscenario.lost = 0.5\n')
    found = list(read(CompareOptions(manifests=(path,), study=study, real=True)).rows)
    assert [row.scenario.real for row in found] == [True, False]
    study.write_text('[[row]]\nname = "a"\n[[row]]\nname = "b"\nscenario.lost = 0.5\n')
    with pytest.raises(ConfigError, match="row 'b': real nodes know no lost"):
        read(CompareOptions(manifests=(path,), study=study, real=True))


def test_command_lines_that_make_no_sense_are_refused(manifest: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(manifest.to_toml())
    with pytest.raises(UsageError, match="one or more manifests"):
        read(CompareOptions())
    with pytest.raises(ManifestError, match="no manifest at"):
        read(CompareOptions(manifests=(tmp_path / "none.toml",)))
    study = read(CompareOptions(manifests=(path,), margin=2.0))
    assert [row.name for row in study.rows] == ["m"]
    with pytest.raises(UsageError, match="matches no row"):
        chosen(study, CompareOptions(only="zzz"))
    with pytest.raises(ConfigError, match="two rows"):
        read(CompareOptions(manifests=(path, path)))


def test_chosen_rows_come_with_all_that_they_are_compared_with(manifest: Manifest) -> None:
    rows = tuple(Row(name, manifest, Scenario(), against) for name, against in (("a", None), ("b", "a"), ("c", "b")))
    rows += (Row("d", manifest, Scenario(), "a"),)
    assert [row.name for row in chosen(Study(rows), CompareOptions(only="c"))] == ["a", "b", "c"]


# ---------------------------------------------------------------------- finished runs


def test_what_runs_real_nodes_is_part_of_their_key() -> None:
    """All that the run's process imports of the package is hashed, but for what only shows something."""
    script = "import sys, atoll.node.compare.real, atoll.node.evaluate, atoll.node.trainer\n"
    script += "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('atoll.') and m.__file__))"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    root = Path(atoll.__file__).parent.resolve()
    shown = ("compare/__init__.py", "compare/scenario.py", "swarm/__init__.py", "swarm/table.py", "atoll/__init__.py")
    hashed = {path.resolve() for pattern in REAL_SOURCES for path in root.glob(pattern)}
    imported = {Path(name).resolve() for name in said.stdout.split()}
    assert not [path for path in imported - hashed if not path.as_posix().endswith(shown)]


def test_finished_runs_survive_and_half_a_line_does_not(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add({"key": "a", "loss": 1.0})
    with results.path.open("a") as file:
        file.write('{"key": "b", "lo')
    again = Results(tmp_path)
    assert again.get("a") == {"key": "a", "loss": 1.0}
    assert again.get("b") is None
    again.add({"key": "c", "loss": 2.0})
    with pytest.raises(StateError, match="line 2"):
        Results(tmp_path)


# ---------------------------------------------------------------------- low rank


def exact(values: Floats) -> tuple[Floats, int]:
    return values.copy(), 4 * values.size


def rough(values: Floats) -> tuple[Floats, int]:
    """A codec that errs: multiples of 1/8 of the largest."""
    step = np.float32(max(float(np.abs(values).max()) / 8, 1e-30))
    return (np.round(values / step) * step).astype(np.float32), values.size


SPECS = [TensorSpec("w", (24, 16), "normal", 1.0), TensorSpec("gain", (16,), "ones")]


def test_low_rank_finds_a_matrix_of_that_rank() -> None:
    random = np.random.default_rng(1)
    low = LowRank(SPECS, 2, 0)
    matrix = (random.standard_normal((24, 2)) @ random.standard_normal((2, 16))).astype(np.float32)
    found = low.reduce("w", [matrix, 3 * matrix], [3, 1], exact, exact)
    assert np.allclose(found.mean, 1.5 * matrix, atol=1e-4)
    assert (found.sent, found.received) == (4 * 2 * (24 + 16), 4 * 2 * (24 + 16))


def test_error_feedback_over_low_rank_loses_nothing() -> None:
    """What was applied and what the peers still hold is what they have put in, whatever the codec does to the
    factors; and the shared factors come to hold the main directions."""
    random = np.random.default_rng(2)
    low, applied, given = LowRank(SPECS, 2, 0), np.zeros((24, 16)), np.zeros((24, 16))
    residuals = [np.zeros((24, 16), np.float32) for _ in range(3)]
    direction = random.standard_normal((24, 2)) @ random.standard_normal((2, 16))
    for _ in range(30):
        fresh = [(direction + 0.1 * random.standard_normal((24, 16))).astype(np.float32) for _ in residuals]
        given += sum(fresh) / 3
        x = [f + e for f, e in zip(fresh, residuals, strict=True)]
        found = low.reduce("w", x, [1, 1, 1], rough, exact)
        applied += found.mean
        residuals = [a - part for a, part in zip(x, found.parts, strict=True)]
    held = sum(residuals) / 3
    assert np.allclose(applied + held, given, atol=1e-3)
    assert np.linalg.norm(held) < 0.2 * np.linalg.norm(given)


def test_only_matrices_that_gain_are_factored() -> None:
    assert set(LowRank(SPECS, 2, 0).factors) == {"w"}
    assert not gains((16,), 1)
    assert not gains((24, 16), 8)
    assert largest_rank(SPECS) == 4
