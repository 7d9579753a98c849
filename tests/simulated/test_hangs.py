"""A trainer that hangs delays the others, where they need it for a quorum, by a bounded time and no more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atoll.node.trainer import FREEZE_STEPS, FREEZE_TIMEOUT
from atoll.node.watchdog import SLACK, STEPS

from .. import churn
from .accounts import Accounts
from .faults import KINDS, NAMED
from .island import START
from .swarm import Swarm, manifest

SILENCE, STEP, H = 2.0, 0.1, 20
NOTICED = SLACK + STEPS * STEP
"""Seconds until a hang is noticed by the steps that are not made; an order that is not answered takes less."""


@pytest.mark.parametrize("overlap", [0, 6])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_hang_of_one_of_two_holds_the_run_up_for_a_bounded_time(fragments: int, overlap: int) -> None:
    """Whatever the trainer was doing: training, frozen, at the limit of an overlap, or without samples."""
    assert NOTICED > FREEZE_TIMEOUT + FREEZE_STEPS * STEP
    for moment in range(5):
        rules = {"quorum": 2, "fragments": fragments, "overlap": overlap, "silence": SILENCE}
        swarm = Swarm(manifest(round=rules, budget={"rounds": 10**6}), seed=moment)
        swarm.add("p0")
        swarm.add("p1")
        struck: list[float] = []

        async def main(swarm: Swarm = swarm, moment: int = moment, struck: list[float] = struck) -> None:
            while len(swarm.commits) < 4:
                await asyncio.sleep(0.05)
            await asyncio.sleep(moment * 0.5)
            island = swarm.life("p1").island
            assert island is not None
            island.hang()
            struck.append(swarm.network.loop.time())
            await asyncio.sleep(90)
            assert not island.hangs
            while len(set(swarm.heads().values())) > 1:  # leases of a commit that one has yet to apply are not lost
                await asyncio.sleep(0.05)

        swarm.network.run(main())
        swarm.check_samples()
        assert swarm.violations == []
        deadline = max(fields["deadline"] for _, _, fields in swarm.named("seal"))
        voids = len({fields["roster"] for at, _, fields in swarm.named("void") if at > struck[0]})
        inner = H * STEP * 1.25
        back = NOTICED + START  # another child trains
        together = [
            at for at, name, fields in swarm.named("commit")
            if name == "p0" and at > struck[0] + overlap * STEP and all(fields["contributors"].values())
        ]  # fmt: skip
        bound = back + inner + (voids + 1) * (deadline + 3 * SILENCE)
        # One that was under way, and had all that it needs of this peer, may end first.
        waits = [b - a for a, b in zip([struck[0], *together], together, strict=False)]
        assert together
        assert max(waits) <= bound, (moment, waits[:5])
        print(f"fragments {fragments}, overlap {overlap}, {moment}: {max(waits):.1f} s of {bound:.1f}, {voids} void")
        lost, complaints = Accounts(swarm, None, inner).lost_leases()
        assert complaints == []
        assert lost <= 4, "no more than the step that was cut off"


def test_hangs_among_other_faults() -> None:
    def seeds(*more: str) -> int:
        return churn.main(["--rounds", "40", "--step-time", "0.5", *more])

    assert seeds("--peers", "2..5", "--seeds", "1..4", "--faults", "hang,crash", "--every", "40", "--back", "10") == 0
    assert seeds("--peers", "4", "--seed", "5", "--faults", ",".join((*KINDS, *NAMED)), "--every", "15") == 0


def test_what_nobody_names_does_not_happen() -> None:
    args: Any = churn.parse([])
    assert set(args.faults) == set(KINDS)
    assert not set(NAMED) & set(KINDS)
