"""Doing without somebody for a while."""

from __future__ import annotations

from atoll.protocol.putoff import PutOff
from atoll.protocol.transport import PeerId

A, B = PeerId("a"), PeerId("b")


def test_each_time_lasts_twice_as_long_up_to_the_most() -> None:
    now = [0.0]
    away = PutOff(lambda: now[0], 8.0, 20.0)
    lasted = []
    for _ in range(4):
        began = now[0]
        away.add(A)
        while A in away:
            now[0] += 1.0
        lasted.append(now[0] - began)
    assert lasted == [8.0, 16.0, 20.0, 20.0]


def test_only_who_is_away_now_is_named_and_a_pardon_begins_anew() -> None:
    now = [0.0]
    away = PutOff(lambda: now[0], 8.0, 64.0)
    away.add(A)
    now[0] = 5.0
    away.add(B)
    assert away.members() == [A, B]
    now[0] = 8.0
    assert away.members() == [B]
    away.add(B)
    away.discard(B)
    assert B not in away
    away.add(B)
    now[0] = 16.0
    assert B not in away, "pardoned, it is away for the first while again"
    away.add(A)
    away.clear()
    assert away.members() == []
