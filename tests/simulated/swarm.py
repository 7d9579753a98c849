"""A whole swarm on the simulated network, and the checks that the design calls invariants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.protocol.commits import contributed, members_in
from atoll.protocol.control import Call
from atoll.protocol.disk import MemoryDisk
from atoll.protocol.fragments import make_layout
from atoll.protocol.identity import FastSigner, Signer
from atoll.protocol.island import Snapshot
from atoll.protocol.lowrank import Factors, LowRankLayout
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import GENESIS, NO_DIGEST, Body, Commit, Head, Member, better, hash_of
from atoll.protocol.peer import Peer
from atoll.protocol.round import Round
from atoll.protocol.simloop import DEAD
from atoll.protocol.simulation import SimHost, SimNetwork, SimTransport
from atoll.protocol.state import GlobalState
from atoll.protocol.store import Store
from atoll.protocol.transport import Transport

from .island import SimulatedIsland
from .ledger import Ledger
from .merged import expected

if TYPE_CHECKING:
    from .faults import Chaos

PARAMETERS, CHUNK = 1000, 128
LAYERS = [[300], [40, 200], [60, 260], [140]]
"""Of a model of 1000 parameters that is cut into fragments."""
COLUMNS = [15, 40, 10, 60, 10, 10]
"""Of each of these tensors, where matrices travel as factors."""
CODEC_ERRORS = {"float32": 0.0, "float16": 0.002, "int8": 0.02, "int4": 0.35, "sparse": 1.5, "lowrank": 0.4}
"""How far a mean may be off, as a share of its largest element: twice through the codec, and what sparse leaves out."""
VOTE = b"atoll vote 1\0"


def start_params(parameters: int | None = None) -> np.ndarray:
    return np.linspace(-1, 1, PARAMETERS if parameters is None else parameters, dtype=np.float32)


def manifest(*, parameters: int | None = None, **changes: Any) -> Manifest:
    """A small run: H = 20 steps of 4 units, T = 2 s, a checkpoint every 5 commits."""
    parameters = PARAMETERS if parameters is None else parameters
    sections: dict[str, dict[str, Any]] = {
        "round": {
            "inner_steps": 20, "quorum": 2, "max_group": 16, "silence": 2.0, "grace": 0.25, "weight_cap": 10_000,
            "first_lease": 160, "max_lease": 640,
        },
        "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.6},
        "codec": {"name": "int8", "error_feedback": 1.0},
        "state": {"chunk": CHUNK, "checkpoint_every": 5},
        "budget": {"rounds": 10},
    }  # fmt: skip
    for section, values in changes.items():
        sections.setdefault(section, {}).update(values)
    rules, state, codec = sections["round"], sections["state"], sections["codec"]
    fragments, packing = rules.get("fragments", 1), rules.get("packing", "balanced")
    if codec["name"] == "lowrank":
        codec.setdefault("rank", 2)
        state.setdefault("columns", COLUMNS)
    if fragments > 1 or codec["name"] == "lowrank" or rules.get("average") == "radial":
        state.setdefault("layers", LAYERS)
    layout = make_layout(
        parameters, state["chunk"], state.get("layers", []), fragments, packing, state.get("columns", []),
        codec.get("rank", 0),
    )  # fmt: skip
    digest = GlobalState.fresh(layout, start_params(parameters)).digest().hex()
    return Manifest.make("simulated", parameters=parameters, theta0=digest, **sections)


@dataclass
class Contribution:
    """What a peer brought into a roster, taken down when it was sealed."""

    x: np.ndarray
    """As it travels, in the chunks of the fragment's wire."""
    units: tuple[range, ...]

    @property
    def count(self) -> int:
        return sum(map(len, self.units))


@dataclass
class Life:
    """One incarnation of a peer."""

    peer: Peer
    island: SimulatedIsland | None
    host: SimHost
    error: BaseException | None = None
    done: bool = False
    ended: float | None = None
    """When it was killed."""
    handed: list[int] = field(default_factory=list)
    """Of several fragments: sample units that each has handed over, or lost, of those that were ever used, in order."""
    frozen: tuple[np.ndarray, tuple[range, ...], int] | None = None
    """Of several fragments: θ, the units that count, and the units used until then, when it last entered a call."""
    entered: dict[str, int] = field(default_factory=dict)
    """By roster: units used until it was frozen for it."""
    partial: dict[int, int] = field(default_factory=dict)
    """By fragment: commits with a part of a contribution since it was last handed over whole. What is left of each
    counter is rounded then, for all fragments, and of a unit are ten tokens."""
    rounded: dict[str, int] = field(default_factory=dict)
    """By roster: how many of them there had been when it was frozen; what came later is rounded still."""

    @property
    def running(self) -> bool:
        """Whether its process is there, and not frozen."""
        return self.ended is None and not self.done and self.error is None and self.host.running


class WatchedSigner(FastSigner):
    """Tells what a peer signs for."""

    def __init__(self, transport: Transport, told: Callable[[bytes], None]) -> None:
        super().__init__(transport.peer_id)
        self._told = told

    def sign(self, message: bytes) -> bytes:
        if message.startswith(VOTE):
            self._told(message[len(VOTE) :])
        return super().sign(message)


def round_of(peer: Peer) -> Round | None:
    """The first round that a peer has in flight."""
    return next((flight.round for flight in peer._flights), None)


@dataclass
class Swarm:
    """Peers on one network. ``violations`` collects every broken invariant as a sentence.

    log: whether ``events`` keeps everything that peers report.
    """

    manifest: Manifest
    seed: int = 0
    latency: float = 0.02
    steps: Mapping[str, float] = field(default_factory=dict)
    """Seconds per inner step by peer name; 0.1 for the others."""
    jitter: float = 0.0
    bandwidth: float = float("inf")
    """Bytes per second of each peer, up and down."""
    log: bool = True
    keep_every: float = 0.0
    """Seconds between two savings of what a peer has trained since the last commit; 0: never."""

    def __post_init__(self) -> None:
        self.network = self.make_network()
        self.layout = self.manifest.layout
        self.disks: dict[str, MemoryDisk] = {}
        self.lives: dict[str, list[Life]] = {}
        self.hosts: dict[str, SimHost] = {}
        self.events: list[tuple[float, str, str, dict[str, Any]]] = []
        self.violations: list[str] = []
        self.commits: dict[bytes, Commit] = {}
        self.committed_at: dict[bytes, float] = {}
        """When each commit was first applied by anyone."""
        self.commit_rosters: dict[bytes, bytes] = {}
        self.best = GENESIS
        """The best head that any peer has applied."""
        self.digests: dict[str, set[str]] = {}
        self.rosters: dict[str, set[bytes]] = {}
        self.contributions: dict[tuple[str, str], Contribution] = {}
        self.signed: dict[tuple[str, bytes], bytes] = {}
        """By peer and roster: the commit that it signed."""
        self.ignored: set[str] = set()
        """Peers whose own view proves nothing, since they are made to lie."""
        self.leaving_since = float("inf")
        """When all were told to leave."""
        self.hooks: list[Callable[[str, str, dict[str, Any]], None]] = []
        self.chaos: Chaos | None = None
        """What strikes it, if anything."""
        self._names: dict[str, str] = {}

    # --- peers

    def add(self, name: str, *, trains: bool = True, **host: Any) -> SimHost:
        """A peer that starts now."""
        self.hosts[name] = self.network.host(name, **host)
        self.disks[name] = MemoryDisk()
        self.lives[name] = []
        self.start(name, trains=trains)
        return self.hosts[name]

    def start(self, name: str, *, trains: bool = True) -> None:
        """Start a peer's process; after a crash, on the disk that the last one left."""

        async def program(transport: SimTransport) -> None:
            life = self._life(name, transport, trains)
            try:
                await life.peer.run()
                life.done = True
            except Exception as error:
                if transport.process.state == DEAD:
                    return  # the loop is only clearing away what a killed process left
                life.error = error
                self.violations.append(f"{name} failed: {type(error).__name__}: {error}")

        self.hosts[name].run(program)

    def make_network(self) -> SimNetwork:
        return SimNetwork(
            seed=self.seed, latency=self.latency, jitter=self.jitter, upload=self.bandwidth, download=self.bandwidth
        )

    def island_for(self, name: str) -> SimulatedIsland:
        """What a peer trains with."""
        return SimulatedIsland(
            self.layout.parameters, step_time=self.steps.get(name, 0.1), overlap=self.manifest.round.overlap > 0,
            several=self.manifest.round.in_flight > 1,
        )  # fmt: skip

    def residual_of(self, life: Life) -> np.ndarray | None:
        """A peer's residual, wherever it is kept."""
        return life.peer.replica.residual

    def theta_of(self, life: Life) -> np.ndarray:
        """The parameters that a peer was last frozen with, shortened where the rules say so."""
        assert life.island is not None
        return life.island.local.copy() if life.peer._training.rewritten else life.island.brought[0]

    def signer(self, transport: Transport) -> Signer:
        """Cheap signatures: on this network nobody forges."""
        name = self.name_of(transport.peer_id)
        return WatchedSigner(transport, lambda commit: self._signs(name, commit))

    def _life(self, name: str, transport: Transport, trains: bool) -> Life:
        island = self.island_for(name) if trains else None
        store = Store(
            self.disks[name],
            self.manifest.run_id,
            self.layout,
            warn=lambda m: self._event(name, "warning", {"message": m}),
        )

        def events(event: str, /, **fields: Any) -> None:
            self._event(name, event, fields)

        peer = Peer(
            transport=transport, signer=self.signer(transport),
            manifest=self.manifest, store=store, theta0=lambda: start_params(self.layout.parameters), events=events,
            island=island, name=name, linger=20.0 if trains else float("inf"), keep_every=self.keep_every,
            reachable=getattr(self.hosts[name], "reachable", True),
        )  # fmt: skip
        life = Life(peer, island, self.hosts[name], handed=[0] * self.layout.fragments)
        self.lives[name].append(life)
        if island is not None and self.layout.fragments > 1:
            forget = peer._training.accounts.clear

            def clear(due: int) -> None:
                life.handed = [island.count] * self.layout.fragments
                forget(due)

            enter = peer._training.enter

            async def note(call: Call) -> tuple[Member, Snapshot]:
                entered = await enter(call)
                # Until the seal other fragments may move, or all be lost; what was frozen is brought all the same.
                theta, count = self.theta_of(life), island.brought_count
                life.frozen = theta, island.units(life.handed[call.fragment], count), count
                return entered

            peer._training.accounts.clear = clear  # type: ignore[method-assign]
            peer._training.enter = note  # type: ignore[method-assign]
        return life

    def crash(self, name: str, *, power_cut: bool = False) -> None:
        host = self.hosts[name]
        if not host.dead:
            host.crash(power_cut=power_cut)
            if self.lives[name]:
                self.lives[name][-1].ended = self.network.loop.time()

    def restart(self, name: str) -> None:
        self.crash(name)
        self.hosts[name].restart()
        self.start(name)

    def life(self, name: str) -> Life:
        return self.lives[name][-1]

    async def shut_down(self, seconds: float) -> list[str]:
        """Ask every living peer to leave; what of each is still running after so long, as sentences."""
        running = {name: lives[-1] for name, lives in self.lives.items() if lives and lives[-1].running}
        self.leaving_since = self.network.loop.time()
        for life in running.values():
            life.peer.stop()
        ends = self.network.loop.time() + seconds
        while not all(life.done for life in running.values()) and self.network.loop.time() < ends:
            await asyncio.sleep(0.5)
        left = [f"{name} had not left {seconds:g} s after it was told to" for name, x in running.items() if not x.done]
        for life in running.values():
            await life.peer.transport.close()
        await asyncio.sleep(2 * self.manifest.round.silence)
        for name, life in running.items():
            tasks = self.network.loop.tasks_of(self.hosts[name].transport.process)
            if life.done and tasks:
                left.append(f"{name} left {len(tasks)} tasks running: {', '.join(t.get_name() for t in tasks[:4])}")
        return left

    # --- checks

    def _signs(self, name: str, commit_id: bytes) -> None:
        if name in self.ignored:
            return
        flights = list(self.life(name).peer._flights)
        signed = [flight.round for flight in flights if len(flights) == 1 or flight.round.signed == commit_id]
        if not signed:
            self.violations.append(f"{name} signed outside of a round")
            return
        current = signed[0]
        # One round at a time for each place of the chain.
        if len({flight.place for flight in flights}) < len(flights):
            self.violations.append(f"{name} has two rounds in flight for one place")
        first = self.signed.setdefault((name, current.roster_id), commit_id)
        if first != commit_id:
            self.violations.append(f"round {current.seal.round}: {name} signed two bodies for one roster")

    def _event(self, name: str, event: str, fields: dict[str, Any]) -> None:
        if self.log:
            self.events.append((self.network.loop.time(), name, event, fields))
        if event == "seal":
            self._sealed(name, fields)
        elif event == "digest" and name not in self.ignored:
            seen = self.digests.setdefault(fields["commit"], set())
            seen.add(fields["digest"])
            if len(seen) > 1:
                self.violations.append(f"round {fields['round']}: different digests at one head: {sorted(seen)}")
        elif event == "commit" and name not in self.ignored:
            self._committed(name, fields)
            if self.layout.fragments > 1:
                self._hand_over(name, fields)
        for hook in list(self.hooks):
            hook(name, event, fields)

    def _sealed(self, name: str, fields: dict[str, Any]) -> None:
        life = self.life(name)
        if life.island is None:
            return
        replica = life.peer.replica
        theta, units = self.theta_of(life), life.island.brought[1]
        if life.frozen is not None:
            theta, units, life.entered[fields["roster"]] = life.frozen
            life.rounded[fields["roster"]] = life.partial.get(fields["fragment"], 0)
        x = replica.params - theta
        residual = self.residual_of(life)
        if residual is not None:
            x = x + residual
        if isinstance(self.layout, LowRankLayout):
            factors, fragment = Factors(self.layout), fields["fragment"]
            places = [self.layout.place(fragment, i) for i in range(self.layout.fragment(fragment).count)]
            x = np.concatenate(
                [
                    factors.project(place, x[self.layout.span(place)], replica.state.momentum, replica.rank)
                    for place in places
                ]
            )
        self.contributions[(name, fields["roster"])] = Contribution(x, units)

    def _hand_over(self, name: str, fields: dict[str, Any]) -> None:
        """Keep account of what each fragment of a peer has handed over, beside the peer's own."""
        life, fragment = self.life(name), fields["fragment"]
        if life.island is not None and fields.get("stale_tokens"):
            life.handed[fragment] = life.island.count
            return
        share = fields["contributors"].get(str(life.peer.transport.peer_id), 0.0)
        roster = self.commit_rosters[bytes.fromhex(fields["id"])].hex()
        if life.island is None or not share or roster not in life.entered:
            return
        upto = max(life.entered[roster], life.handed[fragment])
        if self.manifest.round.merge == "overwrite" and "stopped" in fields:
            upto = life.island.count
        # A trainer that died of this very commit has lost what it had made since, for all fragments.
        life.handed[fragment] += max(round((upto - life.handed[fragment]) * share), 0)
        if share == 1:
            life.partial[fragment] = max(life.partial.get(fragment, 0) - life.rounded[roster], 0)
        else:
            for number in range(self.layout.fragments):
                life.partial[number] = life.partial.get(number, 0) + 1

    def _committed(self, name: str, fields: dict[str, Any]) -> None:
        commit_id = bytes.fromhex(fields["id"])
        if commit_id in self.commits:
            return
        stored = self.life(name).peer.store.commit(commit_id)
        assert stored is not None
        self.commits[commit_id] = stored
        self.committed_at[commit_id] = self.network.loop.time()
        body = stored.body
        roster = hash_of(body.seal)
        self.commit_rosters[commit_id] = roster
        head = Head(commit_id, body.height, body.weight, body.round, body.outer_step)
        if better(head, self.best):
            self.best = head
        known = self.rosters.setdefault(roster.hex(), set())
        known.add(commit_id)
        if len(known) > 1:
            self.violations.append(f"round {body.round}: one roster, two commits")
        if body.chunks:
            self._check_mean(name, stored, roster)

    def _check_mean(self, name: str, commit: Commit, roster: bytes) -> None:
        """The averages that were applied are the weighted means of what exactly the contributors brought, and their
        weights are what those had trained on."""
        body = commit.body
        peer = self.life(name).peer
        chunks = peer.store.chunks(hash_of(body))
        means = peer.replica.means(body, chunks)
        brought = [self.contributions.get((self.name_of(m.peer), roster.hex())) for m in body.seal.members]
        for member, what in zip(body.seal.members, brought, strict=True):
            if what is not None and not body.seal.leases and self.name_of(member.peer) not in self.ignored:
                tokens = 10 * what.count
                if self.manifest.round.stale == "discount" and member.weight:
                    # By an age that only its peer knows: one round, or another whole number of them.
                    tokens = min((tokens // n for n in range(1, 100)), key=lambda t: abs(t - member.weight))
                tokens = min(tokens, self.manifest.round.weight_cap)
                rounded = 10 * self.life(self.name_of(member.peer)).partial.get(body.fragment, 0)
                if member.weight and abs(member.weight - tokens) > rounded:
                    self.violations.append(f"round {body.round}: weight {member.weight} for {tokens} tokens")
        for entry in body.chunks:
            for i in members_in(entry.contributors, len(body.seal.members)):
                if brought[i] is None:
                    who = body.seal.members[i].peer
                    self.violations.append(f"round {body.round}: {who} contributed to a roster it never saw")
                    return
        # Twice through the codec: once each contribution, once the mean.
        share = CODEC_ERRORS[self.manifest.codec.name] / 2
        wanted = expected(body, self.manifest, [what.x if what is not None else None for what in brought])
        for index, (mean, (merged, magnitude)) in enumerate(zip(means, wanted, strict=True)):
            if mean is None:
                continue
            allowed = share * magnitude + 1e-5
            error = np.abs(mean - merged)
            if (error > allowed).any():
                worst = int(np.argmax(error / allowed))
                self.violations.append(
                    f"round {body.round} chunk {index}: mean off by {error[worst]:.2e}, allowed {allowed[worst]:.2e}"
                )

    def name_of(self, peer: str) -> str:
        """The host's name of a peer id."""
        if peer not in self._names:
            self._names = {str(host.peer_id): name for name, host in self.hosts.items()}
        return self._names[peer]

    def chain(self, head: bytes) -> list[Commit]:
        """The commits up to a head, oldest first, as far as any peer has logged them."""
        chain = []
        while head != NO_DIGEST and head in self.commits:
            chain.append(self.commits[head])
            head = self.commits[head].body.parent
        return chain[::-1]

    def best_head(self) -> Head:
        """The best head that a peer has now."""
        heads = [lives[-1].peer.head for lives in self.lives.values() if lives and lives[-1].peer.replica is not None]
        best = GENESIS
        for head in heads:
            best = head if better(head, best) else best
        return best

    def check_samples(self) -> None:
        """No sample twice in one fragment along the chain that ends in the best head; leases do not overlap either."""
        leased, averaged = Ledger(), [Ledger() for _ in range(self.layout.fragments)]
        for commit in self.chain(self.best_head().id):
            body = commit.body
            used = averaged[body.fragment]
            for lease in body.leases:
                if leased.add(range(lease.span.start, lease.span.start + lease.span.count), body.round) is not None:
                    self.violations.append(f"round {body.round}: a sample unit was leased twice")
            for name, units in self.brought(commit):
                for span in units:
                    before = used.add(span, body.round)
                    if before is not None:
                        self.violations.append(
                            f"units of {span} were averaged in round {before} and, by {name}, in round {body.round}"
                        )

    def brought(self, commit: Commit) -> list[tuple[str, tuple[range, ...]]]:
        """Whose contributions stand whole in a commit, and the units in them."""
        body = commit.body
        roster = self.commit_rosters[hash_of(body)].hex()
        found = []
        for member, share in zip(body.seal.members, contributed(body.seal, body.chunks, self.layout), strict=True):
            what = self.contributions.get((self.name_of(member.peer), roster))
            if share == 1 and what is not None:
                found.append((self.name_of(member.peer), what.units))
        return found

    def share(self, body: Body) -> float:
        """The share of the model that a commit's fragment is."""
        return self.layout.fragment(body.fragment).parameters / self.layout.parameters

    def pending(self, life: Life) -> float:
        """Units that a peer has trained on and not handed over, of fragments each in its share of the model."""
        if life.island is None:
            return 0.0
        if self.layout.fragments == 1:
            return sum(map(len, life.island.pending))
        sizes = [self.layout.fragment(fragment).parameters for fragment in range(self.layout.fragments)]
        left = [life.island.count - handed for handed in life.handed]
        return sum(size * units for size, units in zip(sizes, left, strict=True)) / self.layout.parameters

    def heads(self) -> dict[str, str]:
        """Head ids of the peers that are up."""
        return {name: lives[-1].peer.head.id.hex() for name, lives in self.lives.items() if lives[-1].error is None}

    def loss(self, name: str) -> float:
        """Mean squared distance of a peer's global parameters to the target."""
        return float(np.mean((self.life(name).peer.replica.params - 1.0) ** 2))

    def named(self, event: str) -> list[tuple[float, str, dict[str, Any]]]:
        """All events of one kind: (time, peer, fields)."""
        return [(at, name, fields) for at, name, kind, fields in self.events if kind == event]

    def commit_times(self) -> list[float]:
        """When each commit was first applied by anyone."""
        return sorted(self.committed_at.values())
