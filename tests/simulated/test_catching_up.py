"""Who is behind comes back while the run goes on, and founds nothing of its own meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atoll.protocol.disk import MemoryDisk
from atoll.protocol.messages import NO_DIGEST
from atoll.protocol.store import HEAD_FILE
from atoll.protocol.timing import MEETING

from .swarm import Swarm, manifest
from .test_swarm import build

SILENCE = 2.0


def start(swarm: Swarm, names: list[str]) -> None:
    for name in names:
        swarm.add(name)


def founded(swarm: Swarm) -> list[float]:
    """When chains began at θ₀."""
    return sorted(
        swarm.committed_at[commit_id] for commit_id, commit in swarm.commits.items() if commit.body.parent == NO_DIGEST
    )


def lone(swarm: Swarm, name: str, since: float) -> list[dict[str, Any]]:
    """Commits that a peer made alone."""
    return [fields for at, who, fields in swarm.named("commit") if who == name and at > since and fields["lone"]]


def contributions(swarm: Swarm, name: str, since: float) -> list[float]:
    """When it applied averages with a part of its own."""
    return [
        at for at, who, fields in swarm.named("commit")
        if who == name and at > since and fields["contributors"].get(f"sim-{name}", 0) > 0
    ]  # fmt: skip


def test_who_fell_behind_comes_back_though_some_of_the_others_never_answer_it() -> None:
    """Behind NAT like two others, which it cannot reach, in rounds of 1.25 T by time. It waited 2T for their answer,
    and then went to what had been the head before that: it was behind for ever (seed 6046 of tests.churn)."""
    silence, every = 8.0, 10.0
    rules = {"by": "time", "every": every, "grace": 0.0, "silence": silence}
    swarm = Swarm(manifest(round=rules, budget={"rounds": 10**6}), seed=6046)
    for name in ("p0", "p1", "p2"):
        swarm.add(name, reachable=False)
    start(swarm, ["p3", "p4", "p5"])

    async def main() -> None:
        await asyncio.sleep(50)
        swarm.hosts["p1"].freeze()
        await asyncio.sleep(60)
        swarm.hosts["p1"].thaw()
        await asyncio.sleep(6 * every)

    swarm.network.run(main())
    swarm.check_samples()
    assert swarm.violations == []
    back = contributions(swarm, "p1", 110.0)
    assert back, "it never took part again"
    print(f"contributed {back[0] - 110:.1f} s after it came back")
    assert back[0] < 110 + 4 * every  # the others are found anew, and it needs samples first
    assert len(back) >= 3


def lose_and_restart(swarm: Swarm, name: str, plan_takes: float, *, head: bytes | None = None) -> None:
    """A peer comes back with an empty disk (or a head file alone), and whatever way it looks for takes so long."""
    swarm.crash(name)
    swarm.disks[name] = MemoryDisk()
    if head is not None:
        swarm.disks[name].files[HEAD_FILE] = bytearray(head)
    swarm.restart(name)

    def patch() -> None:
        fetcher = swarm.life(name).peer.fetcher
        plan = fetcher.plan

        async def late(*args: Any) -> Any:
            await asyncio.sleep(plan_takes)
            return await plan(*args)

        fetcher.plan = late  # type: ignore[method-assign]

    swarm.network.loop.kernel_at(swarm.network.loop.time() + 0.01, patch)


def test_alone_it_founds_no_chain_while_it_looks_for_the_way_to_the_others() -> None:
    """The first donor died, and it looked for 4T; after 3T without another it began from θ₀, in a run of quorum 1 (seed
    6045 of tests.churn)."""
    swarm = build(3, seed=5, round={"quorum": 1}, budget={"rounds": 10**6})

    async def main() -> None:
        await asyncio.sleep(20)
        lose_and_restart(swarm, "p1", 5 * SILENCE)
        await asyncio.sleep(30)

    swarm.network.run(main())
    swarm.check_samples()
    assert swarm.violations == []
    assert len(founded(swarm)) == 1
    assert lone(swarm, "p1", 20.0) == []
    assert contributions(swarm, "p1", 20.0)


def test_a_claim_alone_keeps_nobody_from_going_on() -> None:
    """Whoever claims a head, and lets it look for the way for ever: after 7T, and what it takes the others to hear of
    it, it goes on alone."""
    swarm = build(3, seed=5, round={"quorum": 1}, budget={"rounds": 10**6})

    async def main() -> None:
        await asyncio.sleep(20)
        lose_and_restart(swarm, "p1", 1e6)
        await asyncio.sleep(25 + MEETING)

    swarm.network.run(main())
    assert len(founded(swarm)) == 2
    assert 7 * SILENCE + MEETING <= founded(swarm)[1] - 20 < 8.5 * SILENCE + MEETING


@pytest.mark.parametrize("wiped", [["p1"], ["p1", "p2"]])
def test_who_can_reach_nobody_that_has_the_run_does_not_begin_it_again(wiped: list[str]) -> None:
    """Cut off from the others, with one that is behind NAT and slow: to who came back with an empty disk that seemed
    not to answer, and after 3T it began at θ₀, in a run of quorum 1 (seed 23372 of tests.churn). What is behind NAT
    dials it now when it reads of it. Two that came back together began at once."""
    rules = {"silence": SILENCE, "inner_steps": 100, "quorum": len(wiped)}
    swarm = Swarm(manifest(round=rules, budget={"rounds": 10**6}), seed=23372, steps={"p0": 1.0})
    swarm.add("p0", reachable=False)
    start(swarm, [f"p{n}" for n in range(1, 8)])

    async def main() -> None:
        await asyncio.sleep(60)
        assert all(swarm.life(name).peer.head.height > 2 for name in swarm.hosts)
        few = ["p0", *wiped]
        swarm.network.cut(few, [name for name in swarm.hosts if name not in few])
        await asyncio.sleep(10)
        for name in wiped:
            swarm.crash(name)
            swarm.disks[name] = MemoryDisk()
        await asyncio.sleep(10)
        for name in wiped:
            swarm.restart(name)
        await asyncio.sleep(80)

    swarm.network.run(main())
    swarm.check_samples()
    assert swarm.violations == []
    assert len(founded(swarm)) == 1
    for name in wiped:
        back = contributions(swarm, name, 80.0)
        assert back
        assert back[0] < 80 + 7 * SILENCE + MEETING + 20


@pytest.mark.parametrize("twice", [False, True])
def test_who_remembers_only_that_there_was_a_head_founds_no_chain_either(twice: bool) -> None:
    """The file with the head is damaged, and the state is gone."""
    swarm = build(3, seed=5, round={"quorum": 1}, budget={"rounds": 10**6})

    async def main() -> None:
        await asyncio.sleep(20)
        cut = swarm.network.cut("p1", ["p0", "p2"])
        lose_and_restart(swarm, "p1", 0.0, head=b"damaged")
        await asyncio.sleep(10)
        if twice:
            swarm.restart("p1")
        await asyncio.sleep(40)
        assert swarm.life("p1").peer.head.height == 0
        cut.heal()
        await asyncio.sleep(30)

    swarm.network.run(main())
    swarm.check_samples()
    assert swarm.violations == []
    assert len(founded(swarm)) == 1
    assert contributions(swarm, "p1", 70.0)


def test_where_all_have_lost_the_state_they_say_what_is_to_be_done_and_it_helps() -> None:
    """All disks keep is which head there was."""
    swarm = build(3, seed=5, budget={"rounds": 10**6})
    events: list[tuple[str, str, dict[str, Any]]] = []

    def restart(keep: bool) -> None:
        for name in ("p0", "p1", "p2"):
            head = bytes(swarm.disks[name].files[HEAD_FILE])
            swarm.crash(name)
            swarm.disks[name] = MemoryDisk()
            if keep:
                swarm.disks[name].files[HEAD_FILE] = bytearray(head)
        for name in ("p0", "p1", "p2"):
            swarm.restart(name)

    async def main() -> None:
        await asyncio.sleep(20)
        swarm.hooks.append(lambda name, event, fields: events.append((name, event, fields)))
        restart(keep=True)
        await asyncio.sleep(60)
        assert {swarm.life(name).peer.head.height for name in ("p0", "p1", "p2")} == {0}
        restart(keep=False)
        await asyncio.sleep(30)
        assert all(swarm.life(name).peer.head.height > 2 for name in ("p0", "p1", "p2"))

    swarm.network.run(main())
    waiting = {name: fields["reason"] for name, event, fields in events if event == "state" and "reason" in fields}
    assert all("which this disk has lost" in waiting[name] for name in ("p0", "p1", "p2"))
    told = [(name, f["message"]) for name, event, f in events if event == "warning" and "store/" in f["message"]]
    assert sorted(name for name, _ in told) == ["p0", "p1", "p2"]
    assert all("the 2 peers that this one hears" in message for _, message in told), told


def test_who_has_gone_over_to_the_others_makes_no_commit_alone_before_it_has_met_them() -> None:
    """It had been alone for long when it came to their head, they had just left that, and there it went on as before:
    alone, at once (seed 5024 of tests.churn)."""
    swarm = build(4, seed=11, round={"quorum": 1}, budget={"rounds": 10**6})
    late: list[float] = []

    async def main() -> None:
        await asyncio.sleep(20)
        cut = swarm.network.cut("p1", ["p0", "p2", "p3"])
        await asyncio.sleep(30)
        fetcher = swarm.life("p1").peer.fetcher
        plan = fetcher.plan

        async def stale(*args: Any) -> Any:
            found = await plan(*args)
            if len(late) < 3 and found is not None:
                late.append(swarm.network.loop.time())
                await asyncio.sleep(2 * SILENCE)
            return found

        fetcher.plan = stale  # type: ignore[method-assign]
        cut.heal()
        await asyncio.sleep(60)

    swarm.network.run(main())
    swarm.check_samples()
    assert swarm.violations == []
    assert lone(swarm, "p1", 20.0), "it was alone"
    assert len(late) == 3
    went = [at for at, name, _ in swarm.named("resync") if name == "p1"]
    assert lone(swarm, "p1", went[0]) == []
    assert contributions(swarm, "p1", went[0])
