"""Whose claims are doubted, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from atoll.protocol.heads import Heads
from atoll.protocol.messages import Head
from atoll.protocol.putoff import PutOff
from atoll.protocol.transport import PeerId

PEER = PeerId("somebody")


def test_who_is_let_off_is_put_off_for_longer_the_next_time_all_the_same() -> None:
    now = [0.0]
    put = PutOff(lambda: now[0], 2.0, 100.0)
    put.add(PEER)
    put.lift(PEER)
    assert PEER not in put
    put.add(PEER)
    now[0] = 3.9
    assert PEER in put
    now[0] = 4.1
    assert PEER not in put
    put.lift(PeerId("nobody"))


def heads() -> Heads:
    core: Any = SimpleNamespace(
        transport=SimpleNamespace(now=lambda: 0.0), store=None, silence=1.0, flights=None,
        guide=SimpleNamespace(worth=lambda peer, head, own: True), head=Head(bytes(32), 0, 0, 0, 0),
        agenda=SimpleNamespace(wake=SimpleNamespace(set=lambda: None), reached=None),
        directory=SimpleNamespace(known={PEER: None}),
    )  # fmt: skip
    return Heads(core)


def test_who_did_not_answer_gets_one_more_chance_when_it_speaks_until_it_has_answered() -> None:
    found, claim = heads(), Head(bytes([1]) * 32, 9, 9, 9, 9)
    for chance in (True, False, False):
        found.learn(PEER, claim)
        found.disbelieve(PEER, mute=True)
        found.spoke(PEER)
        assert (PEER not in found.doubts) == chance
        found.doubts.lift(PEER)  # time goes by
    found.answered(PEER)
    found.disbelieve(PEER, mute=True)
    found.spoke(PEER)
    assert PEER not in found.doubts


def test_who_answers_and_cannot_show_its_head_stays_in_doubt_whatever_it_says() -> None:
    found = heads()
    found.disbelieve(PEER)
    found.spoke(PEER)
    assert PEER in found.doubts
