"""Cases that the field's users reported and that need a whole swarm and a virtual clock (docs/field-cases.md)."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from . import swarm as small
from .swarm import Swarm, manifest


def run(swarm: Swarm, seconds: float) -> None:
    """So many virtual seconds; fails the test when an invariant was broken."""

    async def main() -> None:
        await asyncio.sleep(seconds)

    swarm.network.run(main())
    swarm.check_samples()
    assert swarm.violations == []


@pytest.mark.parametrize("quorum", [1, 2])
@pytest.mark.parametrize("moment", [0.05, 1.0])
def test_the_version_never_goes_back_to_0_when_the_donor_dies(moment: float, quorum: int) -> None:
    """Two peers; B comes back with an empty disk; A dies while B is catching up, and returns."""
    swarm = Swarm(manifest(budget={"rounds": 10**6}, round={"quorum": quorum}))
    swarm.add("a")
    swarm.add("b")
    loop = swarm.network.loop
    known: list[dict[str, Any]] = []

    def strike() -> None:
        known.append(swarm.named("commit")[-1][2])
        swarm.crash("b")
        swarm.disks["b"] = small.MemoryDisk()
        swarm.restart("b")
        loop.kernel_at(loop.time() + moment, swarm.crash, "a")
        loop.kernel_at(loop.time() + moment + 40, swarm.restart, "a")

    loop.kernel_at(30.0, strike)
    run(swarm, 150.0)
    (before,) = known
    assert before["outer_step"] >= 5
    heads = set(swarm.heads().values())
    assert len(heads) == 1
    chain = [commit.body for commit in swarm.chain(bytes.fromhex(heads.pop()))]
    assert before["id"] in {small.hash_of(body).hex() for body in chain}, "what had been committed is still there"
    assert chain[-1].outer_step > before["outer_step"] + 5, "and the run goes on"
    # A, which had it all, never was below it; nor was B, once it had caught up.
    for name in "ab":
        again = [fields["round"] for at, who, fields in swarm.named("digest") if who == name and at > 100]
        assert min(again) >= before["round"]
        assert all(first <= second for first, second in pairwise(again))


def test_a_joiner_takes_part_though_the_state_takes_ten_rounds_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 3 s, and a link over which the state alone takes 30 s, while commits go on that half fill it."""
    parameters, chunk = 24_000, 4096
    monkeypatch.setattr(small, "PARAMETERS", parameters)
    monkeypatch.setattr(small, "CHUNK", chunk)
    rules = {"inner_steps": 34, "first_lease": 272, "max_lease": 1088}
    swarm = Swarm(manifest(round=rules, codec={"name": "int4"}, budget={"rounds": 10**6}))
    for name in ("p0", "p1"):
        swarm.add(name)
    loop = swarm.network.loop
    rate = 8 * parameters / 30
    loop.kernel_at(60.0, lambda: swarm.add("late", download=rate, upload=rate))
    run(swarm, 270.0)
    commits = [fields for _, name, fields in swarm.named("commit") if name == "p0"]
    times = [at for at, name, _ in swarm.named("commit") if name == "p0" and at < 60]
    period = (times[-1] - times[3]) / (len(times) - 4)
    assert period < 4
    joined = [fields["round"] for fields in commits if fields["contributors"].get("sim-late", 0) > 0]
    began = max(fields["round"] for at, _, fields in swarm.named("commit") if at < 60)
    assert joined, "it never took part"
    print(f"period {period:.1f} s, took part {joined[0] - began} rounds after its start")
    # Following alone takes more than half of that link, so the gap closes by about a half with every turn.
    assert joined[0] - began <= 60


def test_who_fetches_the_state_holds_up_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is six times what a peer sends in a round, and the links of the three that have it are full for most of
    a round: no round takes more than a fifth longer by that."""
    monkeypatch.setattr(small, "PARAMETERS", 1_000_000)
    monkeypatch.setattr(small, "CHUNK", 32_768)
    swarm = Swarm(manifest(budget={"rounds": 10**6}), bandwidth=1_250_000)
    for name in ("p0", "p1", "p2"):
        swarm.add(name)
    swarm.network.loop.kernel_at(70.7, lambda: swarm.add("guest", trains=False, download=1e9))
    run(swarm, 120.0)
    rounds = [(at, fields["seconds"]) for at, name, fields in swarm.named("commit") if name == "p0"]
    came = [at for at, name, _ in swarm.named("resync") if name == "guest"]
    assert came, "it does get it"
    alone, beside = (max(s for at, s in rounds if a < at < b) for a, b in ((40, 70.7), (70.7, came[0])))
    print(f"at most {alone:.2f} s, beside a joiner {beside:.2f} s for {came[0] - 70.7:.1f} s")
    assert alone > 1.3, "the link is what bounds it"
    assert beside <= 1.2 * alone


def test_speeds_of_one_to_four_and_starts_twenty_minutes_apart() -> None:
    swarm = Swarm(manifest(budget={"rounds": 10**6}, round={"quorum": 1}), steps={"slow": 0.4, "fast": 0.1})
    swarm.add("slow")
    loop = swarm.network.loop
    loop.kernel_at(1200.0, swarm.add, "fast")
    run(swarm, 1300.0)
    assert len(set(swarm.heads().values())) == 1
    first, second = (swarm.life(name).peer.replica for name in ("slow", "fast"))
    assert first.params.tobytes() == second.params.tobytes()
    commits = [(at, fields) for at, name, fields in swarm.named("commit") if name == "slow"]
    alone = [fields for at, fields in commits if at < 1200]
    assert len(alone) > 100
    assert all(fields["lone"] and fields["weight"] == 0 for fields in alone), "whoever is alone says so"
    together = [fields for at, fields in commits if at > 1220]
    assert together
    assert not any(fields["lone"] for fields in together)
    for peer in ("sim-slow", "sim-fast"):
        assert sum(fields["contributors"].get(peer, 0) > 0 for fields in together) >= 3
