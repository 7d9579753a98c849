"""One hostile peer of four in the reduction, on the simulated network: whatever it does on its streams, it is refused
within bounds and named, and the others complete that very round with the mean over the actual contributors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.protocol.messages import Commit, hash_of

from ..hostile import (
    HONEST,
    HOSTILE,
    MEMBER,
    REDUCER,
    Attack,
    Case,
    HostileRound,
    as_many_stories_as_members,
    constant,
    constant_where_it_is_sent,
    verdict,
)
from .swarm import Swarm, manifest

LIMIT = 120.0
"""Virtual seconds in which everything must have happened; without a hostile peer it takes 8."""


class Attacked(Swarm):
    """A swarm whose fourth peer plays a case in its next rounds with weights after the second commit."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int = 1) -> None:
        super().__init__(manifest(budget={"rounds": 40}, round={"quorum": 3}), seed=seed)
        for name in [*HONEST, HOSTILE]:
            self.add(name)
        self.ids = {name: str(host.peer_id) for name, host in self.hosts.items()}
        self.attack = Attack(self.ids[HOSTILE], tmp_path / "unpickled", began=self._began)
        monkeypatch.setattr("atoll.protocol.peer.Round", self.attack.round)

    def _began(self, current: HostileRound) -> None:
        if current.case.act is constant:
            brought = self.contributions[(HOSTILE, current.roster_id.hex())]
            constant_where_it_is_sent(current, brought.x)

    def of_roster(self, roster: str) -> Commit | None:
        return next((c for c in self.commits.values() if hash_of(c.body.seal).hex() == roster), None)

    def play(self, case: Case, *, rounds: int = 1) -> None:
        """Play a case in so many rounds, then go on for one more."""

        async def main() -> None:
            loop = self.network.loop
            while len(self.commits) < 2 and loop.time() < LIMIT:
                await asyncio.sleep(0.1)
            self.attack.case, self.attack.once = case, rounds == 1
            while len(self.attack.rosters) < rounds and loop.time() < LIMIT:
                await asyncio.sleep(0.1)
            self.attack.case = None
            while len(self.commits) < 4 and loop.time() < LIMIT:
                await asyncio.sleep(0.1)
            await asyncio.sleep(3 * self.manifest.round.silence)

        self.network.run(main())
        assert self.violations == []
        assert [self.life(name).error for name in HONEST] == [None] * 3
        assert len({self.life(name).peer.head.id for name in HONEST}) == 1 or len(self.commits) >= 4


@pytest.mark.parametrize("case", MEMBER, ids=lambda case: case.name)
def test_a_hostile_member(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Attacked(tmp_path, monkeypatch)
    swarm.play(case)
    commit = swarm.of_roster(swarm.attack.rosters[0])
    assert commit is not None, swarm.named("void")
    refused = [(name, fields) for _, name, fields in swarm.named("refused")]
    assert verdict(case, swarm.attack, swarm.ids, refused, commit, as_member=True) == []


@pytest.mark.parametrize("case", REDUCER, ids=lambda case: case.name)
def test_a_hostile_reducer(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Attacked(tmp_path, monkeypatch)
    swarm.play(case)
    commit = swarm.of_roster(swarm.attack.rosters[0])
    assert commit is not None, swarm.named("void")
    refused = [(name, fields) for _, name, fields in swarm.named("refused")]
    assert verdict(case, swarm.attack, swarm.ids, refused, commit, as_member=False) == []


def test_a_reducer_that_tells_everyone_another_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can know who lies, so that roster ends void; both suspects are named, and those who saw it give this
    reducer no part on that base: the next rosters commit."""
    swarm = Attacked(tmp_path, monkeypatch)
    case = Case(as_many_stories_as_members, "one of the two lies")
    swarm.play(case, rounds=2)
    suspects = {
        fields["peer"]
        for _, name, fields in swarm.named("refused")
        if name in HONEST and "one of the" in fields["reason"]
    }
    assert swarm.ids[HOSTILE] in suspects
    void = {fields["roster"] for _, name, fields in swarm.named("void") if name in HONEST}
    assert swarm.attack.rosters[0] in void
    assert len(swarm.commits) >= 4
