"""Parts follow the links as their peers measure them: a whole swarm on links of unequal rate."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from atoll.protocol.messages import Body
from atoll.protocol.rates import Rates

from . import island
from .swarm import Swarm, manifest

PARAMETERS = 1_150_000
"""With ``int8`` 1.17 MB: enough for a round to tell something of a link."""
SIZE = PARAMETERS * (1 + 2 / 128)
FAST, SLOW = 2e6, 5e5
"""Bytes per second, in the proportion of 40 and 10 Mbit/s."""


class Links(Swarm):
    """A swarm whose inner phase takes 20 s."""

    def __init__(self, links: Mapping[str, float], rounds: int, *, claims: float = 0.0) -> None:
        rules = {"state": {"chunk": 16384, "checkpoint_every": 50}, "budget": {"rounds": rounds}}
        super().__init__(manifest(parameters=PARAMETERS, **rules), seed=1, steps=dict.fromkeys(links, 1.0))
        for name, rate in links.items():
            self.add(name, upload=rate, download=rate)
        self.claims = claims

    def play(self, limit: float = 1000.0) -> None:
        async def main() -> None:
            await asyncio.sleep(0.001)
            if self.claims:
                self.life("p0").peer._core.rates = Liar(self.claims)
            while not all(lives[-1].done for lives in self.lives.values()) and self.network.loop.time() < limit:
                await asyncio.sleep(0.5)

        self.network.run(main())
        assert self.violations == []
        assert self.named("void") == []
        assert len(self.rounds()) == self.manifest.budget.rounds

    def rounds(self) -> list[tuple[Body, float]]:
        """The bodies of all rounds that averaged something, and the seconds that each took from seal to commit."""
        seconds = {fields["id"]: fields["seconds"] for _, name, fields in self.named("commit") if name == "p1"}
        bodies = [commit.body for commit in self.chain(self.best_head().id) if commit.body.chunks]
        return [(body, seconds[self.ids[body.round]]) for body in bodies]

    @property
    def ids(self) -> dict[int, str]:
        return {fields["round"]: fields["id"] for _, _, fields in self.named("commit")}

    def parts(self, body: Body) -> dict[str, float]:
        """By peer, the share of the fragment that it reduces."""
        shares = dict.fromkeys(self.hosts, 0.0)
        for part in body.seal.parts:
            shares[self.name_of(body.seal.members[part.reducer].peer)] += part.count / self.layout.count
        return shares


class Liar(Rates):
    """States another rate than it has, whatever it measures."""

    def __init__(self, claim: float) -> None:
        super().__init__(0.0)
        self._claim = claim

    @property
    def upload(self) -> float:
        return self._claim

    @property
    def download(self) -> float:
        return self._claim


@pytest.fixture(autouse=True)
def _cheap_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of noise for a million parameters would take a gigabyte."""
    monkeypatch.setattr(island, "noise", lambda unit, parameters: np.float32(1e-3) * np.float32(unit % 7 - 3))


def equal_parts(members: int, slowest: float) -> float:
    """Ideal seconds of a round with equal parts."""
    return 2 * (members - 1) / members * SIZE / slowest


def test_parts_follow_unequal_links_and_rounds_get_shorter() -> None:
    swarm = Links({"p0": FAST, "p1": SLOW, "p2": SLOW}, rounds=5)
    swarm.play()
    rounds = swarm.rounds()
    first, seconds = rounds[0]
    assert list(swarm.parts(first).values()) == pytest.approx([1 / 3] * 3, abs=0.02)
    assert seconds >= equal_parts(3, SLOW)
    for body, later in rounds[2:]:
        # The fast one reduces (nearly) everything: a quarter less for the slow ones to carry.
        assert swarm.parts(body)["p0"] > 0.9
        assert later < 0.85 * seconds
        assert later < 0.9 * equal_parts(3, SLOW)
    # All have measured, once each, and none is far off: the fast one as far as two partners can tell.
    probes = {name: fields for _, name, fields in swarm.named("probe")}
    assert len(probes) == len(swarm.named("probe")) == 3
    assert probes["p0"]["upload"] == pytest.approx(2 * SLOW, rel=0.1)
    for name in ("p1", "p2"):
        assert probes[name]["upload"] == pytest.approx(SLOW, rel=0.1)
        assert probes[name]["download"] == pytest.approx(SLOW, rel=0.1)
    # D has room for four times what a round takes, and four times T.
    for body, took in rounds:
        assert body.seal.deadline >= 4 * 2.0 + 1.5 * took
        assert body.seal.deadline <= 4 * 2.0 + 4 * 2 * took
    assert swarm.named("reassign") == []
    assert swarm.named("refused") == []


def test_equal_links_stay_equal() -> None:
    swarm = Links({"p0": SLOW, "p1": SLOW, "p2": SLOW, "p3": SLOW}, rounds=4)
    swarm.play()
    rounds = swarm.rounds()
    for body, seconds in rounds:
        assert list(swarm.parts(body).values()) == pytest.approx([1 / 4] * 4, abs=0.04)
        assert seconds < 1.2 * equal_parts(4, SLOW)
    assert len(swarm.named("probe")) == 4


def test_fast_links_are_not_measured() -> None:
    """Where rounds are short beside the inner steps a probe would change nothing."""
    swarm = Links({"p0": 20 * FAST, "p1": 20 * FAST, "p2": 5 * FAST}, rounds=3)
    swarm.play()
    assert swarm.named("probe") == []


def test_who_claims_more_than_it_has_costs_no_more_than_the_bound() -> None:
    """Twice the time of equal parts, since nobody counts as more than twice the median; and no round is void."""
    swarm = Links({"p0": SLOW, "p1": SLOW, "p2": SLOW, "p3": SLOW}, rounds=5, claims=1e15)
    swarm.play()
    rounds = swarm.rounds()
    longest = max(seconds for _, seconds in rounds)
    assert max(swarm.parts(body)["p0"] for body, _ in rounds) > 0.5, "or it was no lie"
    assert longest > 1.3 * equal_parts(4, SLOW), "or it cost nothing"
    assert longest < 1.15 * 2 * equal_parts(4, SLOW)
    # The others go on stating their own links, so D stays what it was.
    for body, _ in rounds:
        honest = [m for m in body.seal.members if swarm.name_of(m.peer) != "p0" and m.upload]
        assert all(SLOW / 3 < member.upload < 1.2 * SLOW for member in honest)
        assert body.seal.deadline < 8 + 4 * 3 * equal_parts(4, SLOW)


def test_who_claims_less_than_it_has_stretches_the_deadline_and_nothing_else() -> None:
    swarm = Links({"p0": SLOW, "p1": SLOW, "p2": SLOW}, rounds=4, claims=1.0)
    swarm.play()
    for body, seconds in swarm.rounds():
        # The others carry its share.
        assert seconds < 1.15 * (1 + 1 / 2) * SIZE / SLOW
        assert body.seal.deadline <= 8 + 4 * equal_parts(3, 16e3) * 1.02


@pytest.mark.parametrize("whose", ["p0", "p1"])
def test_a_link_that_shrinks_is_followed(whose: str) -> None:
    """To a quarter, the fast one or a slow one, after three rounds: parts and statements are right again from the
    fourth round after that on."""
    swarm = Links({"p0": FAST, "p1": SLOW, "p2": SLOW}, rounds=8)
    link = swarm.hosts[whose].upload / 4

    def shrink(name: str, event: str, fields: dict[str, Any]) -> None:
        if event == "commit" and fields["outer_step"] == 3:
            swarm.hosts[whose].bandwidth(upload=link, download=link)

    swarm.hooks.append(shrink)
    swarm.play(limit=2000.0)
    # Who was overstated then is only found by probes; the others' statements fall with it until then, and D is enough.
    for body, seconds in swarm.rounds()[6:]:
        stated = {swarm.name_of(member.peer): member.upload for member in body.seal.members}
        if whose == "p0":
            # Three equal links, now.
            assert list(stated.values()) == pytest.approx([SLOW] * 3, rel=0.15)
            assert list(swarm.parts(body).values()) == pytest.approx([1 / 3] * 3, abs=0.1)
            assert seconds < 1.25 * equal_parts(3, SLOW)
        else:
            assert stated[whose] < 1.1 * link
            assert swarm.parts(body)[whose] == 0
            assert seconds < 1.15 * SIZE / link
    assert swarm.named("reassign") == []
