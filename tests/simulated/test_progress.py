"""Inner steps that no commit has averaged yet, saved to the disk: what a crash leaves of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .swarm import Swarm, manifest

H, STEP = 200, 0.1
KEEP = 2.0


def build(keep_every: float = KEEP) -> Swarm:
    """Three peers with rounds of 20 s."""
    rules = {"inner_steps": H, "first_lease": 8 * H, "max_lease": 32 * H, "grace": 0.0, "weight_cap": 10**6}
    swarm = Swarm(manifest(round=rules, budget={"rounds": 8}), keep_every=keep_every)
    for name in ("p0", "p1", "p2"):
        swarm.add(name)
    return swarm


def to_the_end(swarm: Swarm) -> None:
    async def main() -> None:
        async with asyncio.timeout(600):
            while not all(lives[-1].done for lives in swarm.lives.values()):
                await asyncio.sleep(0.5)

    swarm.network.run(main())
    swarm.check_samples()
    assert swarm.violations == []


def crash_after(swarm: Swarm, event: str, step: int, delay: float, back: float, *, power_cut: bool = False) -> None:
    """Kill p1 so many seconds after it reports the event at that outer step, and start it again after ``back`` more."""
    loop, struck = swarm.network.loop, False

    def look(name: str, reported: str, fields: dict[str, Any]) -> None:
        nonlocal struck
        at = swarm.life("p1").peer.head.outer_step
        if not struck and (name, reported, at) == ("p1", event, step):
            struck = True
            loop.kernel_at(loop.time() + delay, lambda: swarm.crash("p1", power_cut=power_cut))
            loop.kernel_at(loop.time() + delay + back, swarm.restart, "p1")

    swarm.hooks.append(look)


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("back", [1.0, 25.0])
def test_a_crash_costs_what_was_not_saved(power_cut: bool, back: float) -> None:
    """Back within the round, or in the middle of the next: what was saved stands in the next commit, once."""
    swarm = build()
    crash_after(swarm, "digest", 3, 15.0, back, power_cut=power_cut)
    to_the_end(swarm)
    assert [name for _, name, _ in swarm.named("restored")] == ["p1"]
    first, second = swarm.lives["p1"]
    before = {unit for span in first.island.used for unit in span}  # type: ignore[union-attr]
    again = {unit for span in second.island.used for unit in span}  # type: ignore[union-attr]
    averaged = [
        {unit for span in units for unit in span}
        for commit in swarm.chain(swarm.best_head().id) for name, units in swarm.brought(commit) if name == "p1"
    ]  # fmt: skip
    late = next(units for units in averaged if units & again)
    kept = len(late & before - again)
    # 15 s of training, of which the last KEEP may be missing.
    assert (15.0 - KEEP) / STEP * 4 - 8 <= kept <= 15.0 / STEP * 4
    # It trained on at once, with the samples that it had.
    assert before & again
    assert swarm.life("p1").island.revoked == 0  # type: ignore[union-attr]


def test_an_orderly_end_keeps_everything() -> None:
    """Told to leave in the middle of a round, and started again: no step is lost."""
    swarm = build(keep_every=100.0)

    async def main() -> None:
        while swarm.life("p1").peer.head.outer_step < 3:
            await asyncio.sleep(0.1)
        await asyncio.sleep(15.0)
        swarm.life("p1").peer.stop()
        while not swarm.life("p1").done:
            await asyncio.sleep(0.01)
        swarm.restart("p1")
        async with asyncio.timeout(600):
            while not all(lives[-1].done for lives in swarm.lives.values()):
                await asyncio.sleep(0.5)

    swarm.network.run(main())
    swarm.check_samples()
    assert swarm.violations == []
    islands = [life.island for life in swarm.lives["p1"]]
    used = sum(len(span) for island in islands for span in island.used)  # type: ignore[union-attr]
    averaged = [
        len(span) for commit in swarm.chain(swarm.best_head().id)
        for name, units in swarm.brought(commit) if name == "p1" for span in units
    ]  # fmt: skip
    assert sum(averaged) == used


def test_nothing_is_saved_unless_that_is_wanted() -> None:
    swarm = build(keep_every=0.0)
    crash_after(swarm, "digest", 3, 15.0, 1.0)
    to_the_end(swarm)
    assert swarm.named("restored") == []
    assert all("progress.safetensors" not in disk.files for disk in swarm.disks.values())


def test_what_an_earlier_life_handed_over_does_not_count_again() -> None:
    """Killed after its chunks had been averaged and before it logged the commit, a peer finds its saved steps at the
    head that it knows; the commit that it then fetches names them as averaged."""
    dropped = 0
    for delay in (0.02, 0.05, 0.08, 0.11, 0.14, 0.17):
        swarm = build(keep_every=12.0)  # the samples of 8 s were still leased when it was saved, and are averaged too
        crash_after(swarm, "seal", 3, delay, 0.3)
        to_the_end(swarm)
        told = [fields["message"] for _, name, fields in swarm.named("warning") if name == "p1"]
        dropped += "the inner steps that were saved have been averaged; they are dropped" in told
    assert dropped >= 2


def test_saved_steps_that_cannot_be_read_cost_nothing_more() -> None:
    swarm = build()
    loop = swarm.network.loop

    def spoil() -> None:
        data = bytearray(swarm.disks["p1"].files["progress.safetensors"])
        data[-1] ^= 1
        swarm.disks["p1"].files["progress.safetensors"] = bytes(data)

    def look(name: str, event: str, fields: dict[str, Any]) -> None:
        if (name, event) == ("p1", "digest") and fields["outer_step"] == 3 and len(swarm.lives["p1"]) == 1:
            loop.kernel_at(loop.time() + 15.5, spoil)

    swarm.hooks.append(look)
    crash_after(swarm, "digest", 3, 15.0, 1.0)
    to_the_end(swarm)
    assert swarm.named("restored") == []
