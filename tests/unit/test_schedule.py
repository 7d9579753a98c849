"""When a round is due, by steps, tokens or time: what a peer reports of itself, and what follows from all reports."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

from atoll.protocol.manifest import Manifest
from atoll.protocol.schedule import By, Schedule


class Told(NamedTuple):
    steps: int = 10
    tokens: int = 100
    leased: int = 50
    ready: bool = False
    eta: float = 0.0
    step_time: float = 2.0


def schedule(by: By, every: float = 0, *, quorum: int = 2, fragments: int = 1) -> Schedule:
    return Schedule(by, every, quorum, fragments, cap=1000, regular=10 * fragments)


def wait(rule: Schedule, trainers: list[Told], *, outer_step: int = 5, elapsed: float = 0.0) -> float:
    return rule.wait(trainers, outer_step=outer_step, elapsed=elapsed)


def own(rule: Schedule, done: Told, *, wanting: int = 10, outer_step: int = 5, **more: Any) -> tuple[bool, float]:
    return rule.own(done, wanting, **{"outer_step": outer_step, "elapsed": 0.0, "peers": 4, **more})


def test_by_steps_a_quorum_decides() -> None:
    rule = schedule("steps")
    ready, late, later = Told(ready=True), Told(eta=7.0), Told(eta=90.0)
    assert wait(rule, [ready, later, ready]) == 0
    assert wait(rule, [later, ready, late]) == 7
    assert wait(rule, [ready]) == 0, "who is alone waits for nobody"
    assert wait(rule, [ready, Told(eta=0.0)]) == math.inf
    assert own(rule, Told(), wanting=10) == (False, 20.0)
    assert own(rule, Told(), wanting=0) == (True, 0.0)
    assert own(rule, Told(leased=0), wanting=10) == (True, 0.0)


def test_by_tokens_the_sum_decides() -> None:
    rule = schedule("tokens", 400)
    assert wait(rule, [Told(tokens=100)] * 4) == 0
    # Five tokens a second each, and 100 missing.
    assert wait(rule, [Told(tokens=100)] * 3) == pytest.approx(100 / 15)
    fast, slow = Told(steps=40, tokens=390, step_time=0.5), Told(steps=1, tokens=10)
    assert wait(rule, [fast, slow]) == 0, "whoever made them"
    assert wait(rule, [fast, Told(steps=0, tokens=0, eta=3.0)]) == 3, "but a quorum has something to hand over"
    assert wait(rule, [Told(tokens=500), Told(steps=0, tokens=0, eta=3.0)]) == 3
    assert wait(rule, [Told(tokens=100, leased=0)] * 2) == 0, "nobody can go on"
    assert wait(rule, [Told(tokens=100, leased=0), Told(tokens=100)]) == pytest.approx(200 / 5)


def test_by_tokens_one_peer_counts_for_a_bounded_number() -> None:
    rule = schedule("tokens", 2500)
    liar = Told(tokens=2**62)
    assert wait(rule, [liar, Told(tokens=100)]) > 0
    assert wait(rule, [Told(tokens=1000)] * 2) == 0, "nobody's tokens would count for more"


def test_by_tokens_a_peer_is_ready_with_its_equal_share() -> None:
    rule = schedule("tokens", 400)
    assert own(rule, Told(tokens=100), peers=4) == (True, 0.0)
    assert own(rule, Told(tokens=100), peers=2) == (False, pytest.approx(20.0))
    assert own(rule, Told(tokens=100, leased=0), peers=2) == (True, 0.0)
    assert own(rule, Told(steps=0, tokens=0)) == (False, 2.0)


def test_by_time() -> None:
    rule = schedule("time", 60)
    trainers = [Told(), Told(steps=3, tokens=30)]
    assert wait(rule, trainers, elapsed=45.0) == 15
    assert wait(rule, trainers, elapsed=60.0) == 0, "a slow peer comes with what it has"
    assert wait(rule, [Told(), Told(steps=0, tokens=0, eta=4.0)], elapsed=70.0) == 4
    # A coordinator that has come later than the others goes by their clocks.
    assert wait(rule, [Told(ready=True)] * 2, elapsed=5.0) == 0
    assert own(rule, Told(), elapsed=45.0) == (False, 15.0)
    assert own(rule, Told(), elapsed=60.0) == (True, 0.0)
    assert own(rule, Told(leased=0), elapsed=45.0) == (False, 15.0), "no samples, and yet it is not time"
    assert own(rule, Told(tokens=0), elapsed=60.0) == (False, 2.0)


@pytest.mark.parametrize("by", ["tokens", "time"])
def test_fragments_take_turns_within_the_round(by: By) -> None:
    rule = schedule(by, 400, fragments=4)
    assert [rule.tokens(step) for step in range(6)] == [100, 200, 300, 400, 400, 400]
    assert rule.seconds == 100


@pytest.mark.parametrize("by", ["steps", "tokens", "time"])
def test_where_the_run_winds_up_nobody_waits_for_more(by: By) -> None:
    rule = schedule(by, 0 if by == "steps" else 400, fragments=3)
    assert own(rule, Told(tokens=1), outer_step=30) == (True, 0.0)
    assert not own(rule, Told(tokens=0), outer_step=30)[0]
    assert wait(rule, [Told(ready=True)] * 2, outer_step=30) == 0


def test_the_usual_rule_is_not_written() -> None:
    plain = Manifest.make("due", parameters=1000, theta0="00" * 32)
    ruled = plain.replace(round={"by": "time", "every": 600, "grace": 0})
    assert Manifest.from_toml(ruled.to_toml()) == ruled
    assert b'"by":"time"' in ruled.canonical()
    assert b'"every":600' in ruled.canonical()
    assert plain.replace(round={"by": "steps", "every": 0}).run_id == plain.run_id
    assert b'"every"' not in plain.canonical()
    assert ruled.schedule == Schedule("time", 600, 2, 1, ruled.round.weight_cap, 60)
