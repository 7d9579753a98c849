"""Who has not got all averages when the others commit gets them from the members afterwards."""

from __future__ import annotations

import asyncio

import pytest

from ..straggler import Straggler
from .swarm import Swarm, manifest

NAMES = ["p0", "p1", "p2"]
T = 2.0


@pytest.mark.parametrize("streams", [True, False])
def test_a_straggler_gets_its_averages_after_the_commit(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """streams: over the streams that its reducers keep open for T; else by hash, from whoever has committed."""
    swarm = Swarm(manifest(budget={"rounds": 3}), seed=3)
    for name in NAMES:
        swarm.add(name)

    async def main() -> None:
        straggler = Straggler({host.peer_id for host in swarm.hosts.values()}, monkeypatch)
        loop = swarm.network.loop

        def applied() -> dict[str, float]:
            return {
                name: at for at, name, fields in swarm.named("commit")
                if swarm.commit_rosters.get(bytes.fromhex(fields["id"])) == straggler.roster
            }  # fmt: skip

        while len(applied()) < 2:
            await asyncio.sleep(0.05)
        late = swarm.name_of(straggler.peer)
        assert late not in applied()
        assert straggler.held
        given = sum(swarm.life(name).peer.donor.bytes_given for name in NAMES)
        assert given == 0
        if streams:
            loop.call_later(0.25 * T, straggler.go_on.set)
        while len(applied()) < 3:
            await asyncio.sleep(0.05)
        waited = applied()[late] - min(applied().values())
        assert 0.25 * T <= waited <= T
        given = sum(swarm.life(name).peer.donor.bytes_given for name in NAMES)
        assert (given == 0) is streams
        straggler.go_on.set()
        while not all(swarm.life(name).done for name in NAMES):
            await asyncio.sleep(0.5)
        body = next(c.body for i, c in swarm.commits.items() if swarm.commit_rosters[i] == straggler.roster)
        # It is in the average, and stayed in its round: nothing was void, nothing was started anew.
        event = next(f for _, n, f in swarm.named("commit") if n == late and f["round"] == body.round)
        assert event["contributors"][straggler.peer] == 1.0

    swarm.network.run(main(), limit=120.0)
    assert swarm.violations == []
    assert swarm.named("void") == swarm.named("resync") == []
    assert swarm.named("refused") == []
    assert swarm.best_head().outer_step == 3
