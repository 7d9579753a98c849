"""What has missed rounds: ages, and what they make of what a peer states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.fragments import Accounts, make_layout
from atoll.protocol.island import Snapshot
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.manifest import Manifest
from atoll.protocol.stale import Stale, shorten
from atoll.protocol.training import Training


def test_rules() -> None:
    assert Stale().stated(900, 90, 5) == (900, 90)
    assert not Stale().drops(1000)
    discount = Stale("discount")
    assert [discount.stated(900, 90, age) for age in (0, 1, 2, 8)] == [(900, 90), (450, 45), (300, 30), (100, 10)]
    assert discount.stated(3, 1, 9) == (1, 1), "who has something brings something"
    assert discount.stated(0, 0, 9) == (0, 0)
    assert not discount.drops(1000)
    assert [Stale("drop", 2).drops(age) for age in range(5)] == [False, False, False, True, True]
    assert [Stale("drop").drops(age) for age in range(2)] == [False, True]
    assert Stale("drop", 3).stated(900, 90, 3) == (900, 90)
    shortening = Stale("shorten", inner_steps=30)
    assert [shortening.share(age, 60, 30) for age in (0, 1, 2, 9)] == [1, 0.5, 0.5, 0.5]
    assert [shortening.share(1, length, 30) for length in (0, 7, 30, 40, 300)] == [1, 1, 1, 0.75, 0.1]
    assert shortening.share(1, 90, 60) == 60 / 90, "after a void round others are longer, too"
    assert shortening.stated(900, 90, 3) == (900, 90)
    assert not shortening.drops(1000)
    assert [Stale(rule, inner_steps=30).share(9, 90, 30) for rule in ("keep", "discount", "drop")] == [1, 1, 1]


@given(st.integers(0, 2**53), st.integers(0, 10**9), st.integers(0, 1000))
def test_a_discount_only_takes(tokens: int, steps: int, age: int) -> None:
    less, fewer = Stale("discount").stated(tokens, steps, age)
    assert (less > 0) == (tokens > 0)
    assert tokens // (1 + age) <= less <= tokens
    assert fewer <= steps
    assert Stale("discount").stated(tokens, steps, age + 1)[0] <= less


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 100))
def test_what_is_late_is_never_longer_than_a_round(made: list[int], inner_steps: int) -> None:
    """Steps between commits that all miss it: Δ, whose steps are all of length 1, and what the accounts say of it."""
    rule, accounts = Stale("shorten", inner_steps=inner_steps), Accounts(ChunkLayout(1, 1), inner_steps)
    delta, steps = 0.0, 0
    for age, more in enumerate(made):
        delta, steps = delta + more, steps + more
        length, since = accounts.length(steps, 0)
        assert since == more
        share = rule.share(age, length, since)
        delta *= share
        accounts.shorten(steps, 0, share)
        assert accounts.length(steps, 0)[0] <= (max(inner_steps, more) if age else more)
        assert abs(accounts.length(steps, 0)[0] - delta) <= 1
        accounts.commit(0, 0.0, Snapshot(steps, 10 * steps, steps, 0), None)
    accounts.commit(0, 1.0, Snapshot(steps, 10 * steps, steps, 0), None)
    assert accounts.length(7, 0) == (7, 7)


@given(st.floats(0, 1))
def test_what_is_shortened_moves_straight_to_the_global_parameters(share: float) -> None:
    theta, params = np.random.default_rng(1).standard_normal((2, 999)).astype(np.float32)
    wanted, before = params.astype(np.float64) + share * (theta.astype(np.float64) - params), params.copy()
    shorten(theta, params, share)
    assert np.abs(theta - wanted).max() < 1e-5
    assert params.tobytes() == before.tobytes()


def test_ages_are_of_each_fragment() -> None:
    accounts = Accounts(make_layout(1000, 128, [[300], [700]], 2, "balanced"), 20)
    assert [accounts.grow_old(0, True) for _ in range(3)] == [1, 2, 3]
    assert (accounts.age(0), accounts.age(1)) == (3, 0)
    assert accounts.grow_old(0, False) == 0
    accounts.grow_old(1, True)
    accounts.clear(0)
    assert accounts.age(1) == 0
    assert Accounts(ChunkLayout(10, 5), 20).age(0) == 0


@pytest.mark.parametrize("rule", ["keep", "shorten", "discount", "drop"])
def test_the_usual_rule_is_not_written(rule: str) -> None:
    plain = Manifest.make("old", parameters=1000, theta0="00" * 32)
    ruled = plain.replace(round={"stale": rule, "max_age": 2 if rule == "drop" else 0})
    assert (ruled.run_id == plain.run_id) == (rule == "keep")
    assert (b"stale" in ruled.canonical()) == (rule != "keep")
    assert (b"max_age" in ruled.canonical()) == (rule == "drop")
    assert Manifest.from_toml(ruled.to_toml()) == ruled


def test_what_is_late_is_shortened_to_the_round_length_in_force_and_not_while_a_void_roster_may_still_count() -> None:
    """Where H falls with the rank, the manifest's is too long; and what was frozen for a roster that may turn out
    committed after all will leave θ whole."""
    accounts = Accounts(ChunkLayout(1, 1), 100)
    accounts.inner_steps = 25
    accounts.commit(0, 0.0, Snapshot(75, 750, 75, 0), None)
    accounts.grow_old(0, True)
    void = SimpleNamespace(theta=None, round=SimpleNamespace(seal=SimpleNamespace(fragment=0)))
    core = SimpleNamespace(flights=SimpleNamespace(limbo=[void]))
    manifest = SimpleNamespace(stale=Stale("shorten", inner_steps=100))
    training: Any = SimpleNamespace(_core=core, _manifest=manifest, accounts=accounts)
    assert Training._share(training, 100, 0) == 0.25
    void.theta = object()
    assert Training._share(training, 100, 0) == 1.0
    void.round.seal.fragment = 1
    assert Training._share(training, 100, 0) == 0.25
