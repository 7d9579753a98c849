"""What a peer states of its link, from rounds, probes and transfers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.deadline import ASSUMED
from atoll.protocol.messages import GENESIS, Member, Part, Seal
from atoll.protocol.rates import (
    ABOVE_ROUNDS,
    BELOW_PROBE,
    EARLY,
    MEASURABLE,
    RENEW,
    RETRY,
    Account,
    Rates,
    ideal_seconds,
)

MB = 10**6


def member(name: str, rate: float, down: float | None = None, weight: int = 1) -> Member:
    return Member(name, bytes(16), weight, 1, 0, rate, rate if down is None else down, True)


def seal(members: list[Member], parts: list[int]) -> Seal:
    """parts: chunks that each member reduces."""
    made = [Part(i, sum(parts[:i]), count) for i, count in enumerate(parts) if count]
    return Seal(bytes(32), 1, 0, GENESIS, members[0].peer, bytes(16), members, made, False, 60.0)


def account(
    rates: list[float], seconds: float, rate: float, *, parts: list[int] | None = None, whole: bool = True, me: int = 0
) -> Account:
    """A round in which member ``me`` moved ``rate`` × ``seconds`` bytes each way; a chunk is 1 MB."""
    members = [member(f"p{i}", stated) for i, stated in enumerate(rates)]
    size = round(rate * seconds)
    return Account(seal(members, parts or [10] * len(rates)), me, MB, MB, seconds, size, size, whole)


def test_ideal_times_by_hand() -> None:
    members = [member("a", 10e6), member("b", 5e6, 20e6), member("c", 0.0), member("d", 10e6, weight=0)]
    found = ideal_seconds(Account(seal(members, [10, 20, 0, 0]), 0, MB, 2 * MB, 1.0, 0, 0, True))
    # a sends 20 contributions and its 10 averages to three, and receives 20 averages and two contributions to 10.
    assert found[0] == pytest.approx(((20 + 3 * 10 * 2) / 10, (20 * 2 + 2 * 10) / 10))
    assert found[1] == pytest.approx(((10 + 3 * 20 * 2) / 5, (10 * 2 + 2 * 20) / 20))
    # c reduces nothing, and counts as the slowest of the others; d only receives.
    assert found[2] == pytest.approx((30 / 5, 60 / 5))
    assert found[3] == pytest.approx((0, 60 / 10))


def test_who_states_next_to_nothing_explains_no_delay() -> None:
    members = [member("a", 1e6), member("b", 5e-324), member("c", 1e6)]
    found = ideal_seconds(Account(seal(members, [10, 10, 10]), 0, MB, MB, 1.0, 0, 0, True))
    assert found[1] == pytest.approx((40e6 / 16e3,) * 2)


def test_what_a_round_reached_is_a_lower_bound() -> None:
    rates = Rates(0.0)
    assert (rates.upload, rates.download) == (0, 0)
    rates.round(account([0, 0, 0], 10.0, 2e6), 100.0)
    assert (rates.upload, rates.download) == (2e6, 2e6)
    # It is no slower for having waited for a slower one …
    rates.round(account([4e6, 1e6, 1e6], 10.0, 1e6), 200.0)
    assert rates.upload == 2e6
    # … and faster where it was faster.
    rates.round(account([4e6, 1e6, 1e6], 10.0, 3e6), 300.0)
    assert rates.upload == 3e6


def test_the_slowest_follows_what_it_reached() -> None:
    rates = Rates(0.0)
    rates.round(account([0, 0, 0], 10.0, 4e6), 100.0)
    before = rates.upload
    for at in range(2, 9):
        rates.round(account([rates.upload, 8e6, 8e6], 15.0, 1e6), 100.0 * at)
        assert rates.upload <= before
        before = rates.upload
    assert rates.upload == pytest.approx(1e6, rel=0.1)


def test_only_the_direction_that_bounds_follows() -> None:
    members = [member("a", 1e6, 10e6), member("b", 10e6), member("c", 10e6)]
    rates = Rates(0.0)
    rates.probed(1e6, 10e6, 0.0)
    rates.round(Account(seal(members, [10, 10, 10]), 0, MB, MB, 45.0, 40 * MB, 40 * MB, True), 100.0)
    assert rates.upload == pytest.approx((1e6 + 40e6 / 45) / 2)
    assert rates.download == pytest.approx(ABOVE_ROUNDS * 40e6 / 45), "bounded by what rounds reach, and else as probed"


def test_a_probe_lifts_above_the_rounds_but_not_far() -> None:
    rates = Rates(0.0)
    rates.round(account([0, 0, 0], 10.0, 1e6), 100.0)
    rates.probed(3e6, 100e6, 110.0)
    assert (rates.upload, rates.download) == (3e6, ABOVE_ROUNDS * 1e6)


def test_a_lower_probe_takes_half_at_most() -> None:
    rates = Rates(0.0)
    rates.probed(16e6, 16e6, 0.0)
    rates.probed(1.0, 12e6, 10.0)
    assert (rates.upload, rates.download) == (8e6, 12e6)
    rates.round(account([8e6, 8e6, 8e6], 10.0, 9e6), 100.0)
    rates.probed(1.0, 1.0, 110.0)
    assert (rates.upload, rates.download) == (9e6, 9e6), "the last round has reached that"


def test_rounds_alone_do_not_take_it_far_below_the_probe() -> None:
    """Who stalls all others must not stretch D, by which it is judged, with each round anew."""
    rates = Rates(0.0)
    rates.probed(8e6, 8e6, 0.0)
    for at in range(1, 20):
        rates.round(account([rates.upload] * 3, 10.0, 0.6e6), 100.0 * at)
    assert rates.upload == pytest.approx(8e6 * BELOW_PROBE)
    for at in range(20, 40):
        rates.round(account([rates.upload] * 3, 20.0, 0.2e6), 100.0 * at)
    assert rates.upload == pytest.approx(ABOVE_ROUNDS * 0.2e6), "but D stays long enough for what rounds reach"


def test_who_did_not_get_everything_in_time() -> None:
    rates = Rates(0.0)
    rates.round(account([8e6, 8e6, 8e6], 6.0, 1e6, whole=False), 100.0)
    assert rates.upload == 0, "it ended early: that says nothing"
    rates.round(account([8e6, 8e6, 8e6], 20.0, 1e6, whole=False), 200.0)
    assert rates.upload == 1e6
    rates.probed(4e6, 4e6, 210.0)
    rates.round(account([4e6, 1e6, 1e6], 90.0, 1e6, whole=False), 300.0)
    assert rates.upload == 2.5e6, "also when the roster has slower ones: D was of no use as it was"


def test_small_rounds_say_nothing() -> None:
    rates = Rates(0.0)
    rates.round(account([0, 0, 0], 1.0, MEASURABLE - 1), 10.0)
    assert rates.upload == 0
    assert math.isinf(rates.due_in(10.0))


def test_a_transfer_of_state() -> None:
    rates = Rates(0.0)
    total = 100 * MB
    for second in range(11):
        rates.transferred(total // 10 * second, total, float(second))
    assert (rates.upload, rates.download) == (0, 1e7)
    # Donors that are slower than an unknown link say nothing, nor does a transfer that has just begun.
    slow = Rates(0.0)
    slow.transferred(0, total, 0.0)
    slow.transferred(total, total, 2 * total / ASSUMED)
    slow.transferred(total, total, 1000.0)
    slow.transferred(1, 7, 1001.0)
    slow.transferred(7, 7, 1001.0)
    assert slow.download == 0


def test_when_a_probe_is_worth_it() -> None:
    rates = Rates(0.0)
    assert math.isinf(rates.due_in(0.0)), "nobody knows yet how long rounds take"
    rates.round(account([0, 0, 0], 1.9, 9e6), 60.0)
    assert math.isinf(rates.due_in(60.0)), "too short a round"
    rates.round(account([0, 0, 0], 10.0, 9e6), 60.0 + 1000.0)
    assert math.isinf(rates.due_in(1060.0)), "a hundredth of the time"
    rates.round(account([0, 0], 10.0, 9e6), 1160.0)
    assert math.isinf(rates.due_in(1160.0)), "with two all parts are alike"
    rates.round(account([9e6, 9e6, 9e6], 10.0, 4e6), 1260.0)
    assert rates.due_in(1260.0) == 0
    rates.probed(9e6, 9e6, 1270.0)
    assert rates.due_in(1270.0) == RENEW


def test_a_probe_comes_early_when_something_is_wrong_and_rarer_while_it_stays_so() -> None:
    rates, now, pauses = Rates(0.0), 100.0, []
    for _ in range(7):
        rates.round(account([9e6, 9e6, 9e6], 80.0, 2e6), now)
        pause = rates.due_in(now)
        pauses.append(pause)
        now += pause
        rates.probed(9e6, 9e6, now)
    assert pauses == [0, *(min(EARLY * 2**k, RENEW) for k in range(6))]
    rates.round(account([2e6, 2e6, 2e6], 20.0, 2e6), now)
    rates.round(account([9e6, 9e6, 9e6], 80.0, 2e6), now)
    assert rates.due_in(now) == EARLY


def test_nobody_to_measure_with() -> None:
    rates, pauses = Rates(0.0), []
    rates.round(account([0, 0, 0], 10.0, 4e6), 100.0)
    for _ in range(7):
        rates.not_probed(100.0)
        pauses.append(rates.due_in(100.0))
    assert pauses == [min(RETRY * 2**k, RENEW) for k in range(7)]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("probe"), st.floats(1e3, 1e9)),
        st.tuples(st.just("round"), st.floats(2e5, 1e8), st.floats(2, 200), st.booleans(), st.booleans()),
        st.tuples(st.just("transfer"), st.floats(1e3, 1e9)),
    ),
    max_size=40,
)


@given(EVENTS)
def test_a_statement_is_never_far_from_what_was_measured(events: list[tuple[object, ...]]) -> None:
    rates, now, largest, reached, counted = Rates(0.0), 0.0, 0.0, [], False
    for event in events:
        now += 1000.0
        match event:
            case ("probe", float(rate)):
                rates.probed(rate, rate, now)
                largest = max(largest, rate)
            case ("round", float(rate), float(seconds), bool(alike), bool(whole)):
                others = rates.upload if alike else 1e5
                rates.round(account([rates.upload, others, others], seconds, rate, whole=whole), now)
                largest = max(largest, rate * 1.001)
                reached.append(rate)
                counted |= whole and rate * seconds > MEASURABLE + 1
            case ("transfer", float(rate)):
                rates.transferred(0, 10 * MB, now)
                rates.transferred(10 * MB, 10 * MB, now + 10 * MB / rate)
                largest = max(largest, rate)
        assert 0 <= rates.upload <= largest
        assert 0 <= rates.download <= largest * 1.001
        if counted:
            assert rates.upload <= ABOVE_ROUNDS * max(reached) * 1.001
