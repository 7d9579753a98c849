"""Several rounds in flight: places in the chain, and what each was frozen with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.control import Report
from atoll.protocol.deadline import deadline_seconds
from atoll.protocol.flights import Answer, Brought, Flight, Flights
from atoll.protocol.fragments import Accounts
from atoll.protocol.island import Progress, Snapshot
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import GENESIS, Head, Member
from atoll.protocol.overlap import left
from atoll.protocol.places import place, reach
from atoll.protocol.transport import PeerId

LAYERS = [[300], [40, 200], [60, 260], [140]]


def made(fragments: int = 3, overlap: int = 20, inner_steps: int = 20, rounds: int = 10, **rules: Any) -> Manifest:
    state = {"chunk": 128, "layers": LAYERS} if fragments > 1 else {"chunk": 128}
    round_ = {"inner_steps": inner_steps, "fragments": fragments, "overlap": overlap, **rules}
    return Manifest.make("x", parameters=1000, theta0="0" * 64, round=round_, state=state, budget={"rounds": rounds})


def head(outer_step: int, height: int | None = None) -> Head:
    height = outer_step if height is None else height
    return Head(bytes([height % 256]) * 32, height, height, height, outer_step)


@pytest.mark.parametrize(
    ("fragments", "inner_steps", "overlap", "width"),
    [
        (1, 20, 0, 1), (1, 20, 20, 1), (3, 20, 0, 1), (3, 20, 6, 1), (3, 20, 7, 2), (3, 20, 13, 2), (3, 20, 14, 3),
        (3, 20, 20, 3), (4, 20, 5, 1), (4, 20, 6, 2), (4, 20, 20, 4), (6, 6, 6, 6),
    ],
)  # fmt: skip
def test_as_many_rounds_as_begin_within_the_overlap(fragments: int, inner_steps: int, overlap: int, width: int) -> None:
    assert made(fragments, overlap, inner_steps).round.in_flight == width


@given(st.integers(0, 40), st.integers(0, 2))
def test_the_place_of_a_round_is_the_next_turn_of_its_fragment(outer_step: int, fragment: int) -> None:
    rules = made()
    at = place(head(outer_step), fragment, rules.layout)
    assert outer_step <= at < outer_step + 3
    assert rules.layout.due(at) == fragment


def test_from_the_last_regular_round_on_there_is_one_at_a_time() -> None:
    rules = made(rounds=4)
    assert [reach(outer_step, rules) for outer_step in range(14)] == [3] * 9 + [2, 1, 1, 1, 1]
    assert {reach(outer_step, made(overlap=6, rounds=4)) for outer_step in range(14)} == {1}


def test_the_deadline_allows_for_links_that_are_shared() -> None:
    member = Member("p", bytes(16), 1, 1, 1, 1e5, 1e5, True)
    part = made().layout.fragment(0)
    one, three = (deadline_seconds([member, member], part, "int8", 5.0, width) for width in (1, 3))
    assert one == deadline_seconds([member, member], part, "int8", 5.0)
    assert three - 20.0 == pytest.approx(3 * (one - 20.0))


class FakeRound:
    """As much of a round as flights look at."""

    def __init__(
        self,
        at: int,
        number: int = 1,
        peers: tuple[str, ...] = ("me",),
        *,
        started: float = 0.0,
        deadline: float = 30.0,
    ) -> None:
        self.place, self.roster_id, self.peers, self.me = at, bytes([at]) * 32, list(peers), 0
        self.seal = SimpleNamespace(
            round=number, coordinator="me", members=[SimpleNamespace(want=5)], deadline=deadline
        )  # fmt: skip
        self.carried, self.reducing, self.started = (10 * at, at), True, started
        self.ends = started + deadline


def flying(flights: Flights, at: int, steps: int = 0, **more: Any) -> Flight:
    brought = Brought(Snapshot(steps, 10 * steps, 2 * steps, 0), (steps, 10 * steps, 2 * steps))
    flight = Flight(cast(Any, FakeRound(at, **more)), brought, 0.0, ahead=True, paused=False)
    flights.add(flight)
    return flight


def test_places_are_taken_and_given_back() -> None:
    rules = made()
    flights, now = Flights(rules, rules.layout), head(4)
    assert flights.next(now) == 4
    first, second = flying(flights, 4), flying(flights, 5)
    assert flights.next(now) == 6
    third = flying(flights, 6)
    assert flights.next(now) is None
    assert flights.next(head(5)) == 7
    assert (flights.at(5), flights.of(bytes([6]) * 32)) == (second, third)
    flights.remove(first)
    assert flights.next(now) == 4, "a void round is called again before all others"
    assert flights.lost(head(6)) == [second]
    assert flights.wanted() == 10
    assert flights.carried() == (150, 15)


def test_a_round_lasts_until_those_before_it_are_over() -> None:
    rules = made()
    flights = Flights(rules, rules.layout)
    assert flights.patience(4, 5.0) == float("-inf")
    flying(flights, 5, started=10.0, deadline=30.0)
    flying(flights, 6, started=11.0, deadline=20.0)
    assert flights.patience(7, 5.0) == 10.0 + 30.0 + 2 * 10.0
    assert flights.patience(6, 5.0) == 10.0 + 30.0 + 10.0
    # What is called again for an earlier place waits for none behind it.
    assert flights.patience(4, 5.0) == float("-inf")


@pytest.mark.parametrize(("fragments", "overlap", "width"), [(2, 20, 2), (3, 20, 3), (6, 20, 6)])
@pytest.mark.parametrize("deadline", [30.0, 20.0])
def test_ends_do_not_drift_while_rounds_follow_one_another_without_a_pause(
    fragments: int, overlap: int, width: int, deadline: float
) -> None:
    """A launch every 3 s, with T = 5 s, before the last one in flight is over."""
    rules, silence, pause = made(fragments, overlap), 5.0, 3.0
    flights = Flights(rules, rules.layout)
    assert flights.width == width
    longest = deadline + 2 * (width - 1) * silence
    for at in range(200):
        now, before = pause * at, list(flights)
        until = flights.patience(at, silence)
        flight = flying(flights, at, started=now, deadline=deadline)
        flight.round.ends = max(flight.round.ends, until)
        assert flight.round.ends - now <= longest
        for other in before:
            # Enough for the whole row: each before it may be over at the last moment only.
            assert flight.round.ends >= now + deadline
            assert flight.round.ends >= other.round.started + deadline + 2 * silence * (at - other.place)
        if len(flights) == width:
            flights.remove(next(iter(flights)))
        assert len(flights) > 0


def test_a_commit_is_ahead_while_its_round_may_be_in_flight() -> None:
    rules, now = made(), head(4, 9)
    found = [
        height
        for height in range(30)
        if Flights(rules, rules.layout).ahead(cast(Any, SimpleNamespace(height=height)), now)
    ]
    assert found == [11, 12]
    one = made(overlap=6)
    assert not Flights(one, one.layout).ahead(cast(Any, SimpleNamespace(height=11)), now)


def test_with_one_round_at_a_time_its_place_is_the_heads() -> None:
    rules = made(overlap=6)
    flights = Flights(rules, rules.layout)
    flying(flights, 4)
    assert flights.next(head(4)) == 4
    assert not flights.several
    assert not flights.knows(head(3), head(4))


def test_calls_on_a_head_that_was_or_will_be() -> None:
    rules = made()
    flights = Flights(rules, rules.layout)
    for outer_step in range(3, 8):
        flights.pass_head(head(outer_step))
    now = head(7)
    flying(flights, 8)
    assert flights.answer(now, 7 % 3, now) is Answer.ENTER
    assert flights.answer(now, 8 % 3, now) is Answer.BUSY
    assert flights.answer(head(6), 7 % 3, now) is Answer.ENTER
    assert flights.answer(head(5), 5 % 3, now) is Answer.REFUSE, "that place is another commit's"
    assert flights.answer(head(4), 4 % 3, now) is Answer.REFUSE, "too long ago"
    assert flights.answer(head(9), 0, now) is Answer.WAIT
    assert flights.answer(Head(bytes(32), 7, 1, 7, 7), 0, now) is Answer.REFUSE
    flights.leave(head(3, 20))
    assert flights.answer(head(6), 0, head(3, 20)) is Answer.REFUSE


def test_readiness_is_said_of_the_round_that_its_sender_knows() -> None:
    rules = made()
    flights = Flights(rules, rules.layout)
    flying(flights, 4, number=9, peers=("me", "other"))
    stale = Report(GENESIS, 20, 100, 5, True, 0.0, 0.5, 8)
    read = flights.read(PeerId("other"), stale)
    assert (read.ready, read.eta) == (False, pytest.approx(20 / 3 * 0.5))
    assert flights.read(PeerId("third"), stale) == stale
    newer = Report(GENESIS, 20, 100, 5, True, 0.0, 0.5, 9)
    assert flights.read(PeerId("other"), newer) == newer


class Island:
    """An island's counters beside a ledger of steps: what each fragment has handed over, and what is frozen of it."""

    def __init__(self, fragments: int) -> None:
        rules = made(fragments)
        self.accounts = Accounts(rules.layout, 20)
        self.steps = self.done = 0
        self.handed = [0] * fragments
        self.aloft: dict[int, tuple[Brought, int]] = {}

    def snapshot(self) -> Snapshot:
        return Snapshot(self.steps, 10 * self.steps, 2 * self.steps, 0)

    def freeze(self, fragment: int) -> None:
        now = self.snapshot()
        self.aloft[fragment] = Brought(now, self.accounts.total(now, fragment)), self.done

    def commit(self, fragment: int) -> None:
        brought, upto = self.aloft.pop(fragment)
        now, of = self.snapshot(), brought.of
        self.accounts.commit(fragment, 1.0, now, of, total=brought.total)
        self.steps = left(self.steps, 1.0, of.steps)
        for other, _ in self.aloft.values():
            other.lower(now, 1.0, of)
        self.handed[fragment] = upto

    def check(self) -> None:
        progress = Progress(self.steps, 10 * self.steps, 2 * self.steps)
        for fragment, handed in enumerate(self.handed):
            found = self.accounts.progress(progress, fragment)
            assert (found.steps, found.tokens, found.units) == tuple((self.done - handed) * k for k in (1, 10, 2))
        for brought, upto in self.aloft.values():
            # How far training is ahead of a freeze: what the limit is counted from.
            assert self.steps - brought.steps == self.done - upto


EVENTS = st.one_of(
    st.tuples(st.just("train"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["freeze", "commit", "void"]), st.integers(0, 2)),
)


@given(st.lists(EVENTS, max_size=40))
def test_each_contribution_counts_what_was_done_until_its_own_freeze(events: list[tuple[str, int]]) -> None:
    """Whatever is frozen and committed in between, in any order."""
    island = Island(3)
    for kind, number in events:
        if kind == "train":
            island.steps += number
            island.done += number
        elif kind == "freeze" and number not in island.aloft:
            island.freeze(number)
        elif kind == "commit" and number in island.aloft:
            island.commit(number)
        elif kind == "void":
            island.aloft.pop(number, None)
        island.check()


def test_training_runs_ahead_of_the_oldest_freeze() -> None:
    rules = made()
    flights = Flights(rules, rules.layout)
    assert flights.until() is None
    old, new = flying(flights, 4, steps=7), flying(flights, 5, steps=13)
    assert flights.until() == 27
    old.landing = True
    assert flights.until() == 33
    new.brought.lower(Snapshot(20, 200, 40, 0), 1.0, Snapshot(7, 70, 14, 0))
    assert flights.until() == 26, "the counters have been lowered by what was handed over"
    new.grounded = True
    assert flights.until() is None
