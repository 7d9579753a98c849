"""What has missed rounds: ages, and what they make of what a peer states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.fragments import Accounts, make_layout
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.manifest import Manifest
from atoll.protocol.stale import Stale


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


@given(st.integers(0, 2**53), st.integers(0, 10**9), st.integers(0, 1000))
def test_a_discount_only_takes(tokens: int, steps: int, age: int) -> None:
    less, fewer = Stale("discount").stated(tokens, steps, age)
    assert (less > 0) == (tokens > 0)
    assert tokens // (1 + age) <= less <= tokens
    assert fewer <= steps
    assert Stale("discount").stated(tokens, steps, age + 1)[0] <= less


def test_ages_are_of_each_fragment() -> None:
    accounts = Accounts(make_layout(1000, 128, [[300], [700]], 2, "balanced"), 20)
    assert [accounts.grow_old(0, True) for _ in range(3)] == [1, 2, 3]
    assert (accounts.age(0), accounts.age(1)) == (3, 0)
    assert accounts.grow_old(0, False) == 0
    accounts.grow_old(1, True)
    accounts.clear(0)
    assert accounts.age(1) == 0
    assert Accounts(ChunkLayout(10, 5), 20).age(0) == 0


@pytest.mark.parametrize("rule", ["keep", "discount", "drop"])
def test_the_usual_rule_is_not_written(rule: str) -> None:
    plain = Manifest.make("old", parameters=1000, theta0="00" * 32)
    ruled = plain.replace(round={"stale": rule, "max_age": 2 if rule == "drop" else 0})
    assert (ruled.run_id == plain.run_id) == (rule == "keep")
    assert (b"stale" in ruled.canonical()) == (rule != "keep")
    assert (b"max_age" in ruled.canonical()) == (rule == "drop")
    assert Manifest.from_toml(ruled.to_toml()) == ruled
