"""What a simulated swarm did with its time, and whether it kept its promises."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from atoll.protocol.commits import contributed
from atoll.protocol.messages import NO_DIGEST, Commit, hash_of

from .bound import Commit as Made
from .bound import Fault, Stall, stalls
from .faults import Chaos
from .swarm import Swarm

SAMPLE_EVERY = 1.0
"""Virtual seconds between two looks at what every peer is doing."""
RECOVERS = 7
"""Silences after a fault's end from which the bound counts its victims among those that can commit."""
TOGETHER = 2
"""Commits by which the heads of peers that hear each other may lie apart at any moment."""


@dataclass
class Accounts:
    """Watches a swarm under faults. Shares are of peer-seconds: the time of all peers together until ``end``."""

    swarm: Swarm
    chaos: Chaos | None
    inner: float
    """Seconds of the inner steps of a round and grace, for the slowest peer."""
    states: Counter[str] = field(default_factory=Counter)
    trained: int = 0
    """Samples of the time in which at least one peer trained."""
    in_round: int = 0
    """Samples in which nobody trained, and somebody was paused for a call or a round."""
    longest: int = 0
    """Most samples in a row in which nobody trained."""
    samples: int = 0
    voids: list[tuple[float, str]] = field(default_factory=list)
    seals: dict[str, float] = field(default_factory=dict)
    """Rosters sealed, and the deadline of each."""
    resyncs: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    """Units that were dropped in going over to another head, or because they had missed too many rounds."""

    def __post_init__(self) -> None:
        self.swarm.hooks.append(self._note)

    def _note(self, name: str, event: str, fields: dict[str, object]) -> None:
        now = self.swarm.network.loop.time()
        if event == "void":
            roster = str(fields["roster"])
            if not roster or all(roster != known for _, known in self.voids):
                self.voids.append((now, roster))
        elif event == "seal":
            self.seals[str(fields["roster"])] = float(str(fields["deadline"]))
        elif event == "resync":
            self.resyncs[name] += 1
            self.dropped += int(str(fields["lost_tokens"])) // 10
        elif event == "commit":
            self.dropped += int(str(fields.get("stale_tokens", 0))) // 10

    async def watch(self, end: float) -> None:
        """Look at every peer again and again until the virtual second ``end``."""
        loop = self.swarm.network.loop
        idle = 0
        while loop.time() < end:
            await asyncio.sleep(SAMPLE_EVERY)
            states = [self.state(name) for name in self.swarm.hosts]
            self.states.update(states)
            self.samples += 1
            if "training" in states:
                self.trained += 1
                idle = 0
                continue
            self.in_round += "averaging" in states or "entering" in states
            idle += 1
            self.longest = max(self.longest, idle)

    def state(self, name: str) -> str:
        """What a peer is doing."""
        life = self.swarm.life(name)
        island = life.island
        if not life.running:
            return "down"
        if island is None or life.peer.replica is None:
            return "joining"
        if island.hangs:
            return "hung"
        if island.standing:
            return "averaging" if life.peer.state == "averaging" else "entering"
        if island.progress().leased:
            return "training"
        return "joining" if life.peer.state == "joining" else "leaseless"

    # --- what came of it

    def committed_units(self, end: float) -> int:
        """Sample units averaged along the final chain until ``end``."""
        total = 0.0
        for commit in self.swarm.chain(self.swarm.best_head().id):
            body = commit.body
            commit_id = hash_of(body)
            if self.swarm.committed_at[commit_id] > end:
                break
            roster = self.swarm.commit_rosters[commit_id].hex()
            for member, share in zip(
                body.seal.members, contributed(body.seal, body.chunks, self.swarm.layout), strict=True
            ):
                brought = self.swarm.contributions.get((self.swarm.name_of(member.peer), roster))
                if brought is not None:
                    total += share * brought.count * self.swarm.share(body)
        return round(total)

    def averaged_after(self, end: float, trained: dict[str, list[range]]) -> int:
        """How many of these units, by peer, stand whole in the first average of that peer after ``end``."""
        total, left = 0, dict(trained)
        for commit in self.swarm.chain(self.swarm.best_head().id):
            if self.swarm.committed_at[hash_of(commit.body)] > end:
                for name, units in self.swarm.brought(commit):
                    averaged = {unit for span in units for unit in span}
                    total += sum(unit in averaged for span in left.pop(name, []) for unit in span)
        return total

    def gaps(self, end: float) -> list[tuple[float, float, float]]:
        """For each pair of consecutive commits: when, the seconds between them, and what is allowed.

        Allowed are the inner steps, and (v + 1)(D + 3T) + 2(W − 1)T from the last fault, or end of one, in between; v
        counts the rosters, and calls without a seal, that came to nothing since.
        """
        rules = self.swarm.manifest.round
        deadline = max(self.seals.values(), default=4 * rules.silence)
        times = [at for at in self.swarm.commit_times() if at <= end]
        strikes = self.chaos.log if self.chaos is not None else []
        changes = sorted([s.at for s in strikes] + [s.until for s in strikes])
        voids = sorted(at for at, _ in self.voids)
        found = []
        for before, after in pairwise(times):
            last = bisect_right(changes, after) - 1
            since = max(before, changes[last]) if last >= 0 else before
            count = bisect_right(voids, after) - bisect_right(voids, since)
            behind = 2 * (rules.in_flight - 1) * rules.silence
            allowed = since - before + self.inner + (count + 1) * (deadline + 3 * rules.silence) + behind
            found.append((before, after - before, allowed))
        return found

    def stalls(self, end: float) -> tuple[list[Stall], float]:
        """Groups of peers that no fault touched and that made no commit for longer than they may until ``end``, and
        the largest share of what was allowed that any wait took."""
        swarm, rules = self.swarm, self.swarm.manifest.round
        deadline = max(self.seals.values(), default=4 * rules.silence)
        voids = sorted(at for at, _ in self.voids)
        strikes = self.chaos.log if self.chaos is not None else []

        def allowed(begin: float, until: float) -> float:
            count = bisect_right(voids, until) - bisect_right(voids, begin)
            behind = 2 * (rules.in_flight - 1) * rules.silence
            return self.inner + (count + 1) * (deadline + 3 * rules.silence) + behind

        return stalls(
            [
                Made(swarm.committed_at[i], frozenset(swarm.name_of(m.peer) for m in commit.body.seal.members))
                for i, commit in swarm.commits.items()
            ],
            [Fault(s.at, s.until, frozenset(s.victims), s.kind == "split") for s in strikes],
            [name for name in swarm.hosts if name != "archive"],
            end=end, quorum=rules.quorum, recovers=RECOVERS * rules.silence, allowed=allowed,
            able=lambda group: len(group) == 1 or any(swarm.hosts[name].reachable for name in group),
        )  # fmt: skip

    def forks(self) -> list[list[Commit]]:
        """Commits that are not on the final chain, by the fork that they make."""
        chain = {hash_of(commit.body) for commit in self.swarm.chain(self.swarm.best_head().id)}
        branches: dict[bytes, list[Commit]] = {}
        root: dict[bytes, bytes] = {}
        for commit_id, commit in self.swarm.commits.items():
            if commit_id not in chain:
                parent = commit.body.parent
                root[commit_id] = root.get(parent, commit_id)
                branches.setdefault(root[commit_id], []).append(commit)
        return list(branches.values())

    def lost_leases(self) -> tuple[int, list[str]]:
        """Units of leases on the final chain that nobody will use any more, and complaints where more was lost than a
        lease for each death or change of head."""
        granted: Counter[str] = Counter()
        for commit in self.swarm.chain(self.swarm.best_head().id):
            if self.swarm.committed_at[hash_of(commit.body)] > self.swarm.leaving_since:
                break  # who leaves a round that the others still commit gets nothing of it
            for lease in commit.body.leases:
                granted[self.swarm.name_of(commit.body.seal.members[lease.member].peer)] += lease.span.count
        total, complaints = 0, []
        longest = self.swarm.manifest.round.max_lease
        for name, units in granted.items():
            lives = [life for life in self.swarm.lives[name] if life.island is not None]
            used = sum(len(span) for life in lives for span in life.island.used if life.island is not None)
            held = lives[-1].island.leased if lives[-1].island is not None and lives[-1].ended is None else 0
            lost = units - used - held
            # Units that were used on a fork's leases are in ``used`` and not in ``granted``: then this is too kind.
            cut = sum(life.island.cut for life in lives if life.island is not None)
            allowed = longest * (len(lives) - (held > 0) + self.resyncs[name]) + cut
            total += max(lost, 0)
            if lost > allowed:
                complaints.append(f"{name} lost leases of {lost} units in {len(lives)} lives, {allowed} at most")
        return total, complaints

    # --- promises

    def check_progress(self, end: float) -> list[str]:
        """Commits came within the bound, and none began at θ₀ again."""
        found = [
            f"{gap:.1f} s from the commit at {at:.1f} s to the next, {allowed:.1f} s at most"
            for at, gap, allowed in self.gaps(end) if gap > allowed
        ]  # fmt: skip
        found += [str(stall) for stall in self.stalls(end)[0]]
        starts = [
            self.swarm.committed_at[i] for i, commit in self.swarm.commits.items() if commit.body.parent == NO_DIGEST
        ]
        # Who cannot find the others at the very beginning may begin a chain of its own.
        if starts and max(starts) > min(starts) + 60:
            found.append(f"the run began again from θ₀ at {max(starts):.1f} s")
        return found

    def check_together(self, since: float) -> list[str]:
        """Every peer that no fault touched after ``since`` is on the chain of the best head, near its end."""
        chain = [NO_DIGEST, *(hash_of(commit.body) for commit in self.swarm.chain(self.swarm.best_head().id))]
        recent = set(chain[-1 - TOGETHER :])
        now = self.swarm.network.loop.time()
        found = []
        for name in self.swarm.hosts:
            life = self.swarm.life(name)
            if self.chaos is not None and self.chaos.touched(name, since):
                continue
            if not life.running:
                found.append(f"{name} does not run at {now:.1f} s")
            elif life.peer.head.id not in recent:
                where = chain.index(life.peer.head.id) if life.peer.head.id in chain else None
                place = "on another fork" if where is None else f"{len(chain) - 1 - where} commits behind"
                found.append(f"{name} is {place} at {now:.1f} s, {now - since:.0f} s after the last fault")
        return found

    def check_everyone_contributes(self, since: float) -> list[str]:
        """Every peer is in some commit after ``since``."""
        inside = {
            name
            for commit_id, commit in self.swarm.commits.items() if self.swarm.committed_at[commit_id] > since
            for name, units in self.swarm.brought(commit) if units
        }  # fmt: skip
        return [f"{name} contributed nothing after {since:.1f} s" for name in self.swarm.hosts if name not in inside]
