"""The rules of overlap, on one peer with a deterministic toy problem: no inner step lost, none counted twice."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.protocol.outer import outer_step
from atoll.protocol.overlap import Merge, Overlap, move

Floats = NDArray[np.float32]
N, H = 20_000, 12
TARGET = np.linspace(-1, 1, N, dtype=np.float32)


def gradient(theta: Floats, step: int) -> Floats:
    """It depends on θ and on the step: what is trained from another point, or twice, or not at all, shows."""
    phase = np.float32(0.5) * np.sin(np.arange(N, dtype=np.float32) + np.float32(step))
    return theta - TARGET + phase


def constant(theta: Floats, step: int) -> Floats:
    """It depends on the step alone, so that the sum of all steps does not depend on their order."""
    return np.float32(0.1) * gradient(np.zeros_like(theta), step)


@dataclass
class Toy:
    """One peer whose roster is itself, float32: m̄ = Δ. ``left_out``: elements that the commits do not average."""

    rule: Overlap
    tau: int
    grad: object = gradient
    lr: float = 1.0
    mu: float = 0.0
    left_out: slice = field(default_factory=lambda: slice(0, 0))

    def __post_init__(self) -> None:
        self.g = np.zeros(N, np.float32)
        self.b = np.zeros(N, np.float32)
        self.theta = self.g.copy()
        self.done = self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.theta -= np.float32(0.05) * self.grad(self.theta, self.done)  # type: ignore[operator]
            self.done += 1
            self.steps += 1

    def round(self, *, abort: bool = False, until: int = H) -> None:
        """Train until the counter stands at ``until``, freeze, train τ steps, and end the round."""
        self.train(max(until - self.steps, 0))
        frozen, snapshot, old = self.theta.copy(), self.steps, self.g.copy()
        self.old = old
        start = np.empty_like(frozen)
        self.rule.start(frozen, self.g, self.b, start)
        self.theta[:] = start
        self.train(self.tau)
        if abort:
            move(self.theta, self.rule.aborted(frozen, start, frozen), frozen)
            return
        mean = self.g - frozen
        outside = np.zeros(N, bool)
        outside[self.left_out] = True
        before = self.b.copy()
        outer_step(self.g, self.b, mean, self.lr, self.mu)
        self.g[outside], self.b[outside] = old[outside], before[outside]
        for inside in (True, False):
            span = outside != inside
            shift, theta = np.empty(int(span.sum()), np.float32), self.theta[span]
            if inside:
                keep = self.rule.committed(start[span], self.g[span], shift)
            else:
                keep = self.rule.left_out(frozen[span], start[span], old[span], self.g[span], shift)
            move(theta, keep, shift)
            self.theta[span] = theta
        self.steps = self.rule.remaining(self.steps, snapshot, 1 - float(outside.mean()))

    def flush(self) -> Floats:
        """The global parameters after all that is left has been handed over."""
        tau, self.tau = self.tau, 0
        self.round(until=0)
        self.tau = tau
        return self.g


def plain(steps: int, grad: object = gradient) -> Floats:
    theta = np.zeros(N, np.float32)
    for step in range(steps):
        theta -= np.float32(0.05) * grad(theta, step)  # type: ignore[operator]
    return theta


def overlap(merge: Merge, lr: float = 1.0, mu: float = 0.0) -> Overlap:
    return Overlap(merge, lr=lr, mu=mu)


@pytest.mark.parametrize("aborted", [0.0, 0.4])
@pytest.mark.parametrize("tau", [0, 1, H // 4, H])
@pytest.mark.parametrize("merge", [Merge.CARRY, Merge.EAGER])
def test_one_peer_with_a_plain_outer_step_equals_local_training(merge: Merge, tau: int, aborted: float) -> None:
    """Outer lr 1, μ 0, float32: the global parameters after the flush are those of plain training."""
    toy, dice = Toy(overlap(merge), tau), random.Random(tau)
    for _ in range(20):
        toy.round(abort=dice.random() < aborted)
    assert np.abs(toy.flush() - plain(toy.done)).max() < 1e-6
    assert np.abs(toy.theta - toy.g).max() < 1e-6


@pytest.mark.parametrize("tau", [1, H // 4, H])
def test_the_delay_counts_every_step_once_too(tau: int) -> None:
    """It trains from another point, so only with gradients that do not depend on it is the sum the same."""
    toy, dice = Toy(overlap(Merge.DELAY), tau, constant), random.Random(tau)
    for _ in range(20):
        toy.round(abort=dice.random() < 0.4)
    assert np.abs(toy.flush() - plain(toy.done, constant)).max() < 1e-6


@pytest.mark.parametrize("merge", [Merge.CARRY, Merge.EAGER, Merge.DELAY])
def test_what_a_commit_left_out_is_as_if_never_sent(merge: Merge) -> None:
    toy, dice = Toy(overlap(merge), 3, constant, left_out=slice(N // 4, N // 2)), random.Random(1)
    for _ in range(20):
        toy.round(abort=dice.random() < 0.4)
    expected = plain(toy.done, constant)
    assert np.abs(toy.g[toy.left_out]).max() == 0
    assert np.abs(toy.theta - expected).max() < 1e-5
    toy.left_out = slice(0, 0)
    assert np.abs(toy.flush() - expected).max() < 1e-5


@pytest.mark.parametrize(("merge", "kept"), [(Merge.OVERWRITE, 0.0), (Merge.MIX, 0.5)])
def test_overwrite_loses_the_steps_in_flight_and_mix_its_share_of_them(merge: Merge, kept: float) -> None:
    rounds, tau = 6, 4
    toy = Toy(overlap(merge), tau, lambda theta, step: np.full(N, -1, np.float32))
    for _ in range(rounds):
        toy.round()
    # Every commit but the first holds H steps that were made since the freeze before it, with overwrite since that
    # round's end: with mix the counter runs on over the steps of which only the share stayed.
    in_round = H if merge is Merge.OVERWRITE else H - (1 - kept) * tau
    assert np.allclose(toy.g, 0.05 * (H + (rounds - 1) * in_round), atol=1e-5)
    assert np.allclose(toy.theta, toy.g + 0.05 * kept * tau, atol=1e-5)
    assert toy.steps == (0 if merge is Merge.OVERWRITE else tau)
    assert toy.done == H + (rounds - 1) * (H if merge is Merge.OVERWRITE else H - tau) + rounds * tau


@pytest.mark.parametrize("merge", list(Merge))
def test_an_aborted_round_changes_nothing_but_the_point_that_training_went_on_from(merge: Merge) -> None:
    toy, other = Toy(overlap(merge), 3, constant), Toy(overlap(merge), 0, constant)
    toy.round(abort=True)
    other.train(toy.done)
    assert np.abs(toy.theta - other.theta).max() < 1e-6
    assert toy.steps == other.steps == H + 3


def test_the_preview_of_eager_is_the_outer_step_that_a_lone_peer_would_take() -> None:
    rng = np.random.default_rng(0)
    g, b, frozen = (rng.standard_normal(N).astype(np.float32) for _ in range(3))
    preview = overlap(Merge.EAGER, 0.7, 0.6).start(frozen, g, b, np.empty_like(g))
    outer_step(g, b, g - frozen, 0.7, 0.6)
    assert np.abs(preview - g).max() < 1e-5


@pytest.mark.parametrize("merge", list(Merge))
def test_results_may_replace_any_argument(merge: Merge) -> None:
    """The shift is written over what was frozen, so that a round in flight needs no more memory."""
    rng = np.random.default_rng(1)
    frozen, start, old, new = (rng.standard_normal(N).astype(np.float32) for _ in range(4))
    rule = overlap(merge, 0.7, 0.6)
    fresh = np.empty_like(frozen)
    for call in (
        lambda out, f, s: rule.committed(s, new, out),
        lambda out, f, s: rule.left_out(f, s, old, new, out),
        lambda out, f, s: rule.aborted(f, s, out),
        lambda out, f, s: rule.start(f, new, old, out),
    ):
        call(fresh, frozen, start)
        mine = frozen.copy()
        call(mine, mine, start)
        assert mine.tobytes() == fresh.tobytes()
        mine = start.copy()
        call(mine, frozen, mine)
        assert mine.tobytes() == fresh.tobytes()


def test_counters_after_a_commit() -> None:
    carry, overwrite = overlap(Merge.CARRY), overlap(Merge.OVERWRITE)
    assert carry.remaining(120, 100, 1.0) == 20
    assert carry.remaining(120, 100, 0.5) == 70
    assert carry.remaining(120, 100, 0.0) == 120
    assert overwrite.remaining(120, 100, 1.0) == 0
    assert overwrite.remaining(120, 100, 0.5) == 60


def test_steps_counted_twice_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tempting θ ← θ + (g_new − g_old) everywhere: what was handed over stays in θ, and is handed over again."""
    toy = Toy(overlap(Merge.CARRY), 3, constant)

    def twice(self: Overlap, start: Floats, new: Floats, out: Floats) -> float:
        np.subtract(new, toy.old, out=out)
        return 1.0

    monkeypatch.setattr(Overlap, "committed", twice)
    for _ in range(20):
        toy.round()
    assert np.abs(toy.flush() - plain(toy.done, constant)).max() > 1e-2
