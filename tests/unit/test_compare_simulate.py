"""Simulated peers: every inner step counts once, whatever the rule and whatever goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.node.compare.link import unpack_transfers
from atoll.node.compare.scenario import Scenario
from atoll.node.compare.simulate import DataParallel, Simulation, round_ticks, simulate
from atoll.node.run_defaults import new_manifest
from atoll.protocol.manifest import Manifest

MODEL = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32, "context": 32}
STEPS, ROUNDS = 6, 4


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six small files of words."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(5)
    words = ["atoll", "ring", "island", "sea", "reef", "tide", "palm", "sand"]
    for number in range(24):
        (folder / f"{number}.txt").write_text(" ".join(random.choice(words, 200)))
    return str(folder)


def manifest(text: str, **sections: Any) -> Manifest:
    round_ = {"inner_steps": STEPS, "quorum": 1, **sections.pop("round", {})}
    inner = {"batch": 2, "warmup": 0.0, "final_lr": 1.0, **sections.pop("inner", {})}
    return new_manifest(
        "compare", data=text, model=MODEL, inner=inner, round=round_, rounds=ROUNDS,
        codec=sections.pop("codec", "float32"), state={"chunk": 1024}, **sections,
    )  # fmt: skip


def final(manifest: Manifest, scenario: Scenario, seed: int = 0) -> NDArray[np.float32]:
    kind = DataParallel if scenario.method == "data-parallel" else Simulation
    simulation = kind(manifest, scenario, seed, lambda done, total: None)
    simulation.run()
    return simulation.params


LONE = {"outer": {"lr": 1.0, "momentum": 0.0}}
OVERLAPS: list[dict[str, Any]] = [
    {},
    {"overlap": 1},
    {"overlap": 2},
    {"overlap": STEPS},
    {"overlap": 2, "merge": "eager"},
    {"overlap": STEPS, "merge": "eager"},
]


@pytest.fixture(scope="module")
def plain(text: str) -> NDArray[np.float32]:
    """Plain training: the data-parallel baseline of one peer."""
    return final(manifest(text, **LONE), Scenario(method="data-parallel", peers=1))


@pytest.mark.parametrize(("void", "fragments"), [(0.0, 1), (0.4, 1), (0.4, 3)])
@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
def test_one_peer_at_rate_one_is_plain_training(
    text: str, plain: NDArray[np.float32], overlap: dict[str, Any], void: float, fragments: int
) -> None:
    found = final(manifest(text, **LONE, round=overlap), Scenario(peers=1, void=void, fragments=fragments), seed=3)
    # the parameters are of the order of one; what is counted twice or not at all shows as 1e-2 and more
    assert np.abs(found - plain).max() < 1e-6


@pytest.mark.parametrize("packing", ["balanced", "strided"])
@pytest.mark.parametrize("overlap", [{}, {"overlap": 1}, {"overlap": 2, "merge": "eager"}], ids=str)
def test_one_peer_with_the_manifest_s_fragments_is_plain_training(
    text: str, plain: NDArray[np.float32], overlap: dict[str, Any], packing: str
) -> None:
    rules = {**overlap, "fragments": 3, "packing": packing}
    found = final(manifest(text, **LONE, round=rules), Scenario(peers=1, void=0.4), seed=3)
    assert np.abs(found - plain).max() < 1e-6


@pytest.mark.parametrize("stale", ["shorten", "discount", "drop"])
def test_a_void_round_makes_nothing_old(text: str, plain: NDArray[np.float32], stale: str) -> None:
    """Only commits do; and of one peer none misses anything."""
    found = final(manifest(text, **LONE, round={"stale": stale}), Scenario(peers=1, void=0.4), seed=3)
    assert np.abs(found - plain).max() < 1e-6


def test_what_missed_a_round_is_dropped_where_the_manifest_says_so(text: str) -> None:
    """Groups of one of two: each round misses the other's steps."""
    alone = {"quorum": 1, "max_group": 1}
    kept = simulate(manifest(text, round=alone), Scenario(peers=2), 0, lambda *_: None)
    dropping = Simulation(manifest(text, round={**alone, "stale": "drop"}), Scenario(peers=2), 0, lambda *_: None)
    dropping.run()
    assert (kept["commits"], dropping.commits) == (4, 2)
    assert all(peer.tokens == [0] for peer in dropping.peers)


@pytest.mark.parametrize("more", [{}, {"overlap": 2}, {"fragments": 3}], ids=str)
def test_nothing_is_shortened_where_nobody_is_late(text: str, more: dict[str, int]) -> None:
    found = [
        final(manifest(text, round={"stale": stale, **more}), Scenario(peers=3, void=0.4), seed=3).tobytes()
        for stale in ("keep", "shorten")
    ]
    assert found[0] == found[1]


def test_what_is_late_is_shortened_where_the_manifest_says_so(text: str) -> None:
    """Half of the contributions are lost, and no round is void: the longest Δ that is brought holds a round's steps."""

    def longest(stale: str) -> int:
        rules = manifest(text, round={"stale": stale, "quorum": 6})
        run = Simulation(rules, Scenario(peers=6, lost=0.5), 4, lambda *_: None)
        found, contribution = [], run._contribution

        def brought(peer: Any, *args: Any) -> Any:
            frozen = contribution(peer, *args)
            found.append(frozen.steps - peer.short[0])
            return frozen

        run._contribution = brought  # type: ignore[method-assign]
        run.run()
        assert run.voids == 0
        return max(found)

    assert longest("shorten") == STEPS
    assert longest("keep") >= 3 * STEPS


def test_fragments_divide_the_peak_of_the_traffic(text: str) -> None:
    """Bytes of one reduction, and of all: as many, and what winding up adds."""
    peaks, totals, ticks = {}, {}, {}
    for fragments in (1, 3):
        result = simulate(manifest(text, round={"fragments": fragments}), Scenario(peers=2), 0, lambda *_: None)
        transfers = unpack_transfers(result["transfers"])
        peaks[fragments] = max(transfer.size for transfer in transfers)
        totals[fragments], ticks[fragments] = result["bytes"], result["ticks"]
    largest = max(manifest(text, round={"fragments": 3}).layout.fragment(f).parameters for f in range(3))
    share = largest / manifest(text).state.parameters
    assert peaks[3] / peaks[1] == pytest.approx(share, rel=0.01)
    assert share < 0.42
    assert 1 <= totals[3] / totals[1] < (ROUNDS + 1) / ROUNDS
    assert ticks[3] == ticks[1]


@pytest.mark.parametrize("overlap", [{"overlap": 2, "merge": "overwrite"}, {"overlap": 2, "merge": "mix"}], ids=str)
def test_rules_that_lose_steps_differ(text: str, plain: NDArray[np.float32], overlap: dict[str, Any]) -> None:
    found = final(manifest(text, **LONE, round=overlap), Scenario(peers=1))
    assert np.abs(found - plain).max() > 1e-3


def test_the_outer_optimizers_are_the_protocol_s(text: str) -> None:
    """Delayed Nesterov of period 1 is Nesterov, plain SGD is Nesterov without momentum, and a longer period differs."""

    def run(**outer: Any) -> bytes:
        return final(manifest(text, outer={"lr": 0.7, **outer}), Scenario(peers=2)).tobytes()

    assert run(optimizer="sgd", momentum=0.0) == run(momentum=0.0)
    assert run(optimizer="delayed-nesterov") == run(momentum=0.6)
    assert run(optimizer="delayed-nesterov", period=2) != run(momentum=0.6)


def test_groups_hold_those_with_the_most_tokens(text: str) -> None:
    result = simulate(manifest(text, round={"max_group": 1}), Scenario(peers=2), 0, lambda done, total: None)
    # one after the other; a reduction of one crosses no network
    assert (result["commits"], result["bytes"]) == (ROUNDS, 0)
    assert result["ticks"] == STEPS * ROUNDS / 2


def test_a_contribution_that_was_lost_is_in_the_next(text: str, plain: NDArray[np.float32]) -> None:
    """With one peer a lost contribution is a round that ends without a commit; dropping it instead loses its steps."""
    kept = final(manifest(text, **LONE), Scenario(peers=1, lost=0.5), seed=1)
    assert np.abs(kept - plain).max() < 1e-6
    # of two peers, one is left out now and then: what it did must not vanish
    two = manifest(text, outer={"lr": 1.0, "momentum": 0.0})
    runs = {rule: final(two, Scenario(peers=2, lost=0.5, left_out=rule), seed=1) for rule in ("keep", "drop")}
    assert np.abs(runs["keep"] - runs["drop"]).max() > 1e-3


def test_runs_repeat_to_the_bit_and_seeds_matter_only_where_something_is_drawn(text: str) -> None:
    found = manifest(text, codec="int4")
    scenario = Scenario(peers=3, lost=0.3, speeds=(1, 1, 2), deaths=((1, 0.3, 0.6),))
    first, second, other = (final(found, scenario, seed) for seed in (4, 4, 5))
    assert first.tobytes() == second.tobytes()
    assert first.tobytes() != other.tobytes()
    calm = Scenario(peers=3)
    assert final(found, calm, 4).tobytes() == final(found, calm, 5).tobytes()


def test_results_count_what_happened(text: str) -> None:
    found = manifest(text, codec="int8")
    size = found.state.parameters
    result = simulate(found, Scenario(peers=4), 0, lambda done, total: None)
    assert result["tokens"] == 4 * STEPS * ROUNDS * 2 * 32
    assert (result["commits"], result["lost"], result["voids"]) == (ROUNDS, 0, 0)
    assert result["bytes"] == pytest.approx(ROUNDS * 3 * 2 * size * (1 + 2 / 64), rel=1e-3)
    ticks = [transfer.begin for transfer in unpack_transfers(result["transfers"])]
    assert ticks == [STEPS * (k + 1) for k in range(ROUNDS)]
    assert result["curve"][-1]["tick"] == STEPS * ROUNDS
    assert result["loss"] < result["curve"][0]["loss"]
    assert result["curve"][-1]["loss"] == pytest.approx(result["loss"], rel=0.2)


def test_the_dead_are_missed_and_return_with_the_global_parameters(text: str) -> None:
    whole, dead = (
        simulate(manifest(text), Scenario(peers=2, deaths=deaths), 0, lambda done, total: None)
        for deaths in ((), ((1, 0.25, 0.75),))
    )
    assert dead["tokens"] == whole["tokens"] * 3 / 4
    assert dead["commits"] == whole["commits"]


def test_a_contribution_dies_with_its_peer(text: str) -> None:
    """Of a peer that dies while its round is in flight, and is back before it ends, nothing is applied twice."""
    short = ((0, 7 / 24, 8 / 24),)  # one tick, the second after the round's freeze
    found = simulate(manifest(text, round={"overlap": 4}), Scenario(peers=1, deaths=short), 0, lambda done, total: None)
    assert (found["voids"], found["tokens"]) == (1, (STEPS * ROUNDS - 1) * 2 * 32)


def test_nobody_waits_for_the_slow_unless_told_to(text: str) -> None:
    uneven = {"peers": 2, "speeds": (1.0, 3.0)}
    assert round_ticks(Scenario(**uneven), manifest(text).round, 64) == 2
    free = simulate(manifest(text), Scenario(**uneven), 0, lambda done, total: None)
    # two ticks a round: two steps of the slow one, six of the fast one
    assert free["tokens"] == ROUNDS * (2 + 6) * 2 * 32
    waiting = manifest(text, round={"quorum": 2})
    result = simulate(waiting, Scenario(**uneven, idle=True), 0, lambda done, total: None)
    assert result["tokens"] == ROUNDS * 2 * STEPS * 2 * 32


def test_experiments_learn(text: str) -> None:
    result = simulate(manifest(text, codec="int8"), Scenario(peers=2, rank=2), 0, lambda done, total: None)
    assert result["loss"] < result["curve"][0]["loss"] - 0.3


@pytest.mark.parametrize("fragments", [1, 2])
def test_norms_and_directions_learn(text: str, fragments: int) -> None:
    rules = {"average": "radial", "fragments": fragments}
    result = simulate(manifest(text, codec="int8", round=rules), Scenario(peers=2), 0, lambda done, total: None)
    assert result["loss"] < result["curve"][0]["loss"] - 0.3


def test_norms_and_directions_of_one_peer_are_plain_training(text: str, plain: NDArray[np.float32]) -> None:
    lone = final(manifest(text, **LONE, round={"average": "radial"}), Scenario(peers=1))
    assert np.abs(lone - plain).max() < 1e-6


def test_weights_are_the_manifests(text: str) -> None:
    """Peers of unlike speeds bring unlike tokens: by another rule the average is another one. All bring as many tokens
    a step, so that their square over the steps says no more than they do."""
    uneven = Scenario(peers=2, speeds=(1.0, 3.0))
    by = {w: final(manifest(text, round={"weights": w}), uneven) for w in ("tokens", "tokens2/steps", "equal")}
    assert not np.array_equal(by["tokens"], by["equal"])
    assert np.abs(by["tokens"] - by["tokens2/steps"]).max() < 1e-4 < np.abs(by["tokens"] - by["equal"]).max()


def test_rounds_by_the_tokens_of_all(text: str) -> None:
    """Six steps of both together make a round, whoever made them: of speeds 1 and 3 those are two ticks, with five
    to eight steps; a round of one fragment of two the same tokens, half as often."""
    by = {"by": "tokens", "every": 6 * 64, "grace": 0.0}
    uneven = Scenario(peers=2, speeds=(1.0, 3.0))
    assert round_ticks(uneven, manifest(text, round=by).round, 64) == 2
    result = simulate(manifest(text, round=by), uneven, 0, lambda done, total: None)
    assert (result["commits"], result["tokens"]) == (ROUNDS, ROUNDS * 8 * 64)
    halves = {**by, "fragments": 2}
    result = simulate(manifest(text, round=halves), uneven, 0, lambda done, total: None)
    assert result["commits"] == 2 * ROUNDS + 1


def test_rounds_by_time(text: str) -> None:
    """Two seconds after each outer step, whatever has been done in them: of half a second a step four ticks, and of a
    fragment of two, half as often; with an overlap the time counts from where the round is over."""
    rules = {"by": "time", "every": 2, "grace": 0.0}
    uneven = Scenario(peers=2, speeds=(0.5, 1.0), step_time=0.5)

    def run(**more: Any) -> dict[str, Any]:
        return simulate(manifest(text, round=rules | more), uneven, 0, lambda done, total: None)

    assert round_ticks(uneven, manifest(text, round=rules).round, 64) == 4
    plain = run()
    assert (plain["ticks"], plain["commits"]) == (4 * ROUNDS, ROUNDS)
    assert plain["tokens"] == ROUNDS * (2 + 4) * 64, "the slow one brings what it has"
    assert [each.begin for each in unpack_transfers(plain["transfers"])] == [4, 8, 12, 16]
    overlapped = run(overlap=2)
    assert [each.begin for each in unpack_transfers(overlapped["transfers"])][:3] == [4, 10, 16]
    halves = run(fragments=2)
    assert halves["ticks"] == 4 * ROUNDS
    assert [each.begin for each in unpack_transfers(halves["transfers"])][:4] == [2, 4, 6, 8]
    slower = Scenario(peers=2, step_time=0.7)
    assert round_ticks(slower, manifest(text, round=rules).round, 64) == 3, "the step under way is done"
    nobody = Scenario(peers=2, speeds=(0.1, 0.1), step_time=0.5)
    assert round_ticks(nobody, manifest(text, round=rules).round, 64) == 10, "somebody has something"


def test_low_rank_sends_less(text: str) -> None:
    whole, factored = (
        simulate(manifest(text, codec="int8"), Scenario(peers=2, rank=rank), 0, lambda done, total: None)["bytes"]
        for rank in (0, 1)
    )
    assert factored < 0.5 * whole


def test_data_parallel_is_one_optimizer_on_all_batches(text: str) -> None:
    two = final(manifest(text, inner={"batch": 2}), Scenario(method="data-parallel", peers=2))
    one = final(manifest(text, inner={"batch": 4}), Scenario(method="data-parallel", peers=1))
    assert np.abs(two - one).max() < 1e-5


@pytest.mark.parametrize("fragments", [1, 3])
def test_the_codec_of_factors_is_the_protocol_s(text: str, fragments: int) -> None:
    """A run of the manifest's own ``lowrank`` sends and receives its few values, and keeps what it does not send."""
    found = {}
    for codec in ("int4", "lowrank"):
        section = {"name": "lowrank", "rank": 1} if codec == "lowrank" else {"name": codec}
        run = new_manifest(
            "compare", data=text, model=MODEL, inner={"batch": 2}, codec=codec, rounds=ROUNDS,
            round={"inner_steps": STEPS, "quorum": 1, "fragments": fragments},
        )  # fmt: skip
        run = run.replace(codec=section)
        simulation = Simulation(run, Scenario(peers=2), 0, lambda done, total: None)
        found[codec] = simulation.run()["bytes"]
        residuals = [float(np.abs(peer.residual).max()) for peer in simulation.peers]
        assert min(residuals) > 0
    assert found["lowrank"] < 0.5 * found["int4"]
