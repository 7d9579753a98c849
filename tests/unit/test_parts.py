"""Parts by the links that members state: all reducers are done together, and a false statement has its bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.deadline import SLOWEST
from atoll.protocol.parts import TOP, shares, split_parts

MBIT = 125e3
RATES = st.lists(st.floats(1e3, 1e9), min_size=1, max_size=32)


def times(given: list[float], rates: list[float], members: int) -> list[float]:
    """Of each reducer, for a fragment of one byte."""
    return [(1 + (members - 2) * share) / rate for share, rate in zip(given, rates, strict=True)]


@given(RATES, st.integers(0, 8))
def test_no_other_shares_are_faster(rates: list[float], others: int) -> None:
    members = len(rates) + others
    found = shares(rates, members)
    assert sum(found) == pytest.approx(1)
    assert min(found) >= 0
    taking = times(found, rates, members)
    longest = max(t for t, share in zip(taking, found, strict=True) if share)
    # Optimal: all that have a share end together, and for the others even nothing would end later.
    for taken, share in zip(taking, found, strict=True):
        if members <= 2:
            continue
        if share > 1e-9:
            assert taken == pytest.approx(longest, rel=1e-6)
        else:
            assert taken >= longest * (1 - 1e-6)
    equal = max(times([1 / len(rates)] * len(rates), rates, members))
    assert max(taking) <= equal * (1 + 1e-6)


@given(st.lists(st.floats(SLOWEST, 1e9), min_size=3, max_size=32), st.integers(1, 500), st.data())
def test_parts_cover_the_chunks_and_follow_the_shares(rates: list[float], chunks: int, data: st.DataObject) -> None:
    reachable = data.draw(st.lists(st.booleans(), min_size=len(rates), max_size=len(rates)))
    parts = split_parts([(r, rate, rate) for r, rate in zip(reachable, rates, strict=True)], chunks)
    assert [part.first for part in parts] == [sum(p.count for p in parts[:i]) for i in range(len(parts))]
    assert sum(part.count for part in parts) == chunks
    assert all(part.count > 0 for part in parts)
    able = [i for i, r in enumerate(reachable) if r] or [0]
    assert {part.reducer for part in parts} <= set(able)
    ranked = sorted(rates[i] for i in able)
    top = TOP * ranked[len(ranked) // 2]
    wanted = dict(zip(able, shares([min(rates[i], top) for i in able], len(rates)), strict=True))
    counts = {part.reducer: part.count for part in parts}
    for i in able:
        assert abs(counts.get(i, 0) - wanted[i] * chunks) <= 1


def test_a_fast_link_among_slow_ones() -> None:
    """40, 10 and 10 Mbit/s: the fast one reduces everything, and the slow ones carry the fragment once each way."""
    assert [(p.reducer, p.count) for p in split_parts([(True, r * MBIT, r * MBIT) for r in (40, 10, 10)], 60)] == [
        (0, 60)
    ]
    # With more slow ones it is bounded at twice the median: (1 + 3 s) / 2 = 1 + 3 (1 - s) / 4.
    parts = split_parts([(True, r * MBIT, r * MBIT) for r in (40, 10, 10, 10, 10)], 1000)
    counts = [part.count for part in parts]
    assert counts[0] == pytest.approx(1000 * 5 / 9, abs=1)
    assert counts[1:] == pytest.approx([1000 / 9] * 4, abs=1)


def test_equal_unknown_and_one_way_links() -> None:
    assert [p.count for p in split_parts([(True, 1e6, 1e6)] * 4, 40)] == [10] * 4
    assert [p.count for p in split_parts([(True, 0.0, 0.0)] * 4, 40)] == [10] * 4
    assert [p.count for p in split_parts([(True, 1e6, 1e6), (True, 0.0, 1e9), (True, 1e6, 1e6)], 30)] == [10] * 3
    # The slower direction counts.
    parts = split_parts([(True, 1e9, 1e6), (True, 1e6, 1e9), (True, 1e6, 1e6)], 30)
    assert [p.count for p in parts] == [10] * 3
    assert [(p.reducer, p.count) for p in split_parts([(False, 1e6, 1e6)] * 3, 30)] == [(0, 30)]


@given(st.integers(3, 32), st.floats(1e6, 1e15))
def test_a_false_statement_costs_twice_the_time_of_equal_parts(members: int, claim: float) -> None:
    """One of many equal links claims more than it has."""
    chunks = 10_000
    parts = split_parts([(True, claim if i == 0 else 1e6, 1e15) for i in range(members)], chunks)
    liar = next((part.count for part in parts if part.reducer == 0), 0) / chunks
    equal = 2 * (members - 1) / members
    assert 1 + (members - 2) * liar <= TOP * equal + 1e-3 * members


STATED = st.floats(0, 1e15) | st.sampled_from([0.0, 5e-324, 1e-300, 1e15])


@given(st.lists(st.tuples(st.booleans(), STATED, STATED), min_size=1, max_size=32), st.integers(1, 500))
def test_whatever_members_state_there_are_parts(members: list[tuple[bool, float, float]], chunks: int) -> None:
    parts = split_parts(members, chunks)
    assert sum(part.count for part in parts) == chunks
    assert all(part.count > 0 for part in parts)
