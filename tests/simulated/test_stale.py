"""Contributions that have missed rounds, on the protocol itself: shortened, discounted or dropped, never counted
twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from .faults import Chaos
from .swarm import Swarm
from .test_swarm import build, run

KEEP = {"stale": "keep"}
SHORTEN = {"stale": "shorten"}
DISCOUNT = {"stale": "discount"}
DROP = {"stale": "drop"}
DROP_LATER = {"stale": "drop", "max_age": 2}
RULES = [KEEP, SHORTEN, DISCOUNT, DROP, DROP_LATER]


class Ages:
    """Keeps, beside the peers' own account, how many rounds what each of them has has missed, and what was dropped."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.age: Counter[tuple[str, int]] = Counter()
        self.sealed: dict[tuple[str, str], int] = {}
        """By peer and roster: the age of what it brought."""
        self.dropped: Counter[str] = Counter()
        """Tokens, by peer; of fragments in their share of the model."""
        self._step: dict[str, int] = {}
        swarm.hooks.append(self._note)

    def _note(self, name: str, event: str, fields: dict[str, Any]) -> None:
        life = self.swarm.life(name)
        if event == "seal":
            self.sealed[name, fields["roster"]] = self.age[name, fields["fragment"]]
        elif event == "commit" and self._step.get(name, 0) < fields["outer_step"] < self.swarm.manifest.outer_steps:
            self._step[name] = fields["outer_step"]
            share = fields["contributors"].get(str(life.peer.transport.peer_id), 0.0)
            assert share in (0.0, 1.0), "no faults here that cut a contribution"
            key = name, fields["fragment"]
            self.dropped[name] += fields.get("stale_tokens", 0)
            island = life.island
            assert island is not None
            several = self.swarm.layout.fragments > 1
            has = island.count > life.handed[fields["fragment"]] if several else bool(island.pending)
            self.age[key] = self.age[key] + 1 if has and not share else 0
            assert not (fields.get("stale_tokens") and (has or share)), "what is dropped is gone, and was not averaged"


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("more", [{}, {"overlap": 8}, {"fragments": 2}, {"fragments": 2, "overlap": 6}], ids=str)
def test_every_step_is_averaged_once_or_dropped(rule: dict[str, Any], more: dict[str, int]) -> None:
    """Groups of two among five, so that everybody misses rounds: what was trained was averaged, or dropped and told,
    or is still there."""
    swarm = build(5, seed=9, round={**rule, **more, "max_group": 2}, budget={"rounds": 16}, codec={"name": "float32"})
    ages = Ages(swarm)
    run(swarm)
    chain = swarm.chain(swarm.best_head().id)
    if "fragments" not in more:
        chain.pop()  # after the last one nothing is taken out of the islands' counters any more
    averaged: Counter[str] = Counter()
    for commit in chain:
        for name, units in swarm.brought(commit):
            averaged[name] += 10 * sum(map(len, units)) * swarm.share(commit.body)
    for i in range(5):
        island = swarm.life(f"p{i}").island
        assert island is not None
        held = averaged[f"p{i}"] + ages.dropped[f"p{i}"] + 10 * swarm.pending(swarm.life(f"p{i}"))
        rounded = 2 * len(chain) if "fragments" in more else 0
        assert abs(10 * island.count - held) <= rounded, f"p{i}"
    assert (sum(ages.dropped.values()) > 0) == (rule["stale"] == "drop")
    oldest = max(ages.sealed.values())
    assert oldest <= rule.get("max_age", 0) if rule["stale"] == "drop" else oldest >= 1


def test_a_discount_follows_the_age() -> None:
    swarm = build(5, seed=9, round={**DISCOUNT, "max_group": 2}, budget={"rounds": 16}, codec={"name": "float32"})
    ages = Ages(swarm)
    run(swarm)
    seen: Counter[int] = Counter()
    for commit in swarm.chain(swarm.best_head().id):
        roster = swarm.commit_rosters[next(i for i, known in swarm.commits.items() if known is commit)].hex()
        for member in commit.body.seal.members:
            name = swarm.name_of(member.peer)
            if member.weight and commit.body.chunks:
                tokens, age = 10 * swarm.contributions[name, roster].count, ages.sealed[name, roster]
                assert member.weight == tokens // (1 + age)
                seen[age] += 1
    assert seen[0] > 3
    assert sum(count for age, count in seen.items() if age) > 3


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_who_was_frozen_comes_with_what_the_rule_leaves(rule: dict[str, Any]) -> None:
    """A peer stands still for three rounds, in the middle of its steps, and catches up commit by commit."""
    swarm = build(4, seed=6, round=dict(rule), budget={"rounds": 12}, codec={"name": "float32"})
    loop, struck = swarm.network.loop, []

    def strike(name: str, event: str, fields: dict[str, Any]) -> None:
        if not struck and name == "p3" and event == "digest" and fields["outer_step"] == 4:
            struck.append(loop.time())
            loop.kernel_at(loop.time() + 1.5, swarm.hosts["p3"].freeze)
            loop.kernel_at(loop.time() + 11.0, swarm.hosts["p3"].thaw)

    swarm.hooks.append(strike)
    run(swarm)
    assert struck
    dropped = [fields["stale_tokens"] for _, name, fields in swarm.named("commit") if fields.get("stale_tokens")]
    assert bool(dropped) == (rule["stale"] == "drop")
    mine = str(swarm.hosts["p3"].peer_id)
    first = next(
        (commit, member) for commit in swarm.chain(swarm.best_head().id) if commit.body.outer_step > 5
        for member in commit.body.seal.members if member.peer == mine and member.weight
    )  # fmt: skip
    roster = next(r for i, r in swarm.commit_rosters.items() if swarm.commits[i] is first[0]).hex()
    tokens = 10 * swarm.contributions["p3", roster].count
    if rule["stale"] == "discount":
        assert first[1].weight < tokens / 2
    else:
        assert first[1].weight == tokens


@pytest.mark.parametrize("rule", [SHORTEN, DISCOUNT, DROP, DROP_LATER], ids=str)
@pytest.mark.parametrize("more", [{}, {"overlap": 8}, {"fragments": 3}], ids=str)
def test_under_faults_nothing_counts_twice(rule: dict[str, Any], more: dict[str, int]) -> None:
    """Crashes, freezes, cuts and dead trainers: the swarm's judge follows every sample."""
    swarm = build(6, seed=21, round={**rule, **more, "max_group": 4}, budget={"rounds": 20})
    chaos = Chaos(swarm, 21, every=2.5, back=(1.0, 8.0), down=2)
    run(swarm, limit=900)
    assert chaos.log
