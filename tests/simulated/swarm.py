"""A whole swarm on the simulated network, and the checks that the design calls invariants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.protocol.commits import contributed, members_in
from atoll.protocol.disk import MemoryDisk
from atoll.protocol.identity import FastSigner, Signer
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import NO_DIGEST, Commit, hash_of
from atoll.protocol.peer import Peer
from atoll.protocol.simloop import DEAD
from atoll.protocol.simulation import SimHost, SimNetwork, SimTransport
from atoll.protocol.state import GlobalState
from atoll.protocol.store import Store
from atoll.protocol.transport import Transport

from .island import SimulatedIsland

PARAMETERS, CHUNK = 1000, 128
CODEC_ERRORS = {"float32": 0.0, "float16": 0.002, "int8": 0.02, "int4": 0.35, "sparse": 1.5}
"""How far a mean may be off, as a share of its largest element: twice through the codec, and what sparse leaves out."""


def start_params() -> np.ndarray:
    return np.linspace(-1, 1, PARAMETERS, dtype=np.float32)


def manifest(**changes: Any) -> Manifest:
    """A small run: H = 20 steps of 4 units, T = 2 s, a checkpoint every 5 commits."""
    layout = ChunkLayout(PARAMETERS, CHUNK)
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
    digest = GlobalState.fresh(layout, start_params()).digest().hex()
    return Manifest.make("simulated", parameters=PARAMETERS, theta0=digest, **sections)


@dataclass
class Contribution:
    """What a peer brought into a roster, taken down when it was sealed."""

    x: np.ndarray
    units: tuple[int, ...]


@dataclass
class Life:
    """One incarnation of a peer."""

    peer: Peer
    island: SimulatedIsland | None
    error: BaseException | None = None
    done: bool = False


@dataclass
class Swarm:
    """Peers on one network. ``violations`` collects every broken invariant as a sentence."""

    manifest: Manifest
    seed: int = 0
    latency: float = 0.02
    steps: Mapping[str, float] = field(default_factory=dict)
    """Seconds per inner step by peer name; 0.1 for the others."""

    def __post_init__(self) -> None:
        self.network = self.make_network()
        self.layout = ChunkLayout(PARAMETERS, CHUNK)
        self.disks: dict[str, MemoryDisk] = {}
        self.lives: dict[str, list[Life]] = {}
        self.hosts: dict[str, SimHost] = {}
        self.events: list[tuple[float, str, str, dict[str, Any]]] = []
        self.violations: list[str] = []
        self.commits: dict[bytes, Commit] = {}
        self.digests: dict[str, set[str]] = {}
        self.rosters: dict[str, set[bytes]] = {}
        self.contributions: dict[tuple[str, str], Contribution] = {}
        self.ignored: set[str] = set()
        """Peers whose own view proves nothing, since they are made to lie."""
        self.hooks: list[Callable[[str, str, dict[str, Any]], None]] = []

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
        return SimNetwork(seed=self.seed, latency=self.latency)

    def signer(self, transport: Transport) -> Signer:
        """Cheap signatures: on this network nobody forges."""
        return FastSigner(transport.peer_id)

    def _life(self, name: str, transport: Transport, trains: bool) -> Life:
        island = SimulatedIsland(PARAMETERS, step_time=self.steps.get(name, 0.1)) if trains else None
        store = Store(
            self.disks[name],
            self.manifest.run_id,
            self.layout,
            warn=lambda m: self._event(name, "warning", {"message": m}),
        )

        def events(event: str, /, **fields: Any) -> None:
            self._event(name, event, fields)

        peer = Peer(
            transport=transport, signer=self.signer(transport), manifest=self.manifest, store=store,
            theta0=start_params, events=events, island=island, name=name, linger=20.0 if trains else float("inf"),
        )  # fmt: skip
        life = Life(peer, island)
        self.lives[name].append(life)
        return life

    def crash(self, name: str, *, power_cut: bool = False) -> None:
        self.hosts[name].crash(power_cut=power_cut)

    def restart(self, name: str) -> None:
        self.hosts[name].restart()
        self.start(name)

    def life(self, name: str) -> Life:
        return self.lives[name][-1]

    # --- checks

    def _event(self, name: str, event: str, fields: dict[str, Any]) -> None:
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
        for hook in list(self.hooks):
            hook(name, event, fields)

    def _sealed(self, name: str, fields: dict[str, Any]) -> None:
        life = self.life(name)
        if life.island is None:
            return
        replica = life.peer.replica
        x = replica.params - life.island.local
        if replica.residual is not None:
            x = x + replica.residual
        self.contributions[(name, fields["roster"])] = Contribution(x.copy(), tuple(life.island.pending))

    def _committed(self, name: str, fields: dict[str, Any]) -> None:
        commit_id = bytes.fromhex(fields["id"])
        if commit_id in self.commits:
            return
        stored = self.life(name).peer.store.commit(commit_id)
        assert stored is not None
        self.commits[commit_id] = stored
        body = stored.body
        roster = hash_of(body.seal)
        known = self.rosters.setdefault(roster.hex(), set())
        known.add(commit_id)
        if len(known) > 1:
            self.violations.append(f"round {body.round}: one roster, two commits")
        if body.chunks:
            self._check_mean(name, stored, roster)

    def _check_mean(self, name: str, commit: Commit, roster: bytes) -> None:
        """The averages that were applied are the weighted means of what exactly the contributors brought."""
        body = commit.body
        peer = self.life(name).peer
        chunks = peer.store.chunks(hash_of(body))
        means = peer.replica.means(body, chunks)
        names = {str(host.peer_id): host_name for host_name, host in self.hosts.items()}
        for index, (entry, mean) in enumerate(zip(body.chunks, means, strict=True)):
            inside = members_in(entry.contributors, len(body.seal.members))
            if not inside:
                continue
            span = self.layout.span(index)
            total, weight = np.zeros(self.layout.size(index), np.float64), 0
            for i in inside:
                member = body.seal.members[i]
                brought = self.contributions.get((names[member.peer], roster.hex()))
                if brought is None:
                    self.violations.append(f"round {body.round}: {member.peer} contributed to a roster it never saw")
                    return
                total += member.weight * brought.x[span].astype(np.float64)
                weight += member.weight
            assert mean is not None
            expected = total / weight
            # Twice through the codec: once each contribution, once the mean.
            share = CODEC_ERRORS[self.manifest.codec.name]
            allowed = share * float(np.abs(expected).max() + 1e-9)
            error = float(np.abs(mean - expected).max())
            if error > allowed + 1e-5:
                self.violations.append(
                    f"round {body.round} chunk {index}: mean off by {error:.2e}, allowed {allowed:.2e}"
                )

    def chain(self, head: bytes) -> list[Commit]:
        """The commits up to a head, oldest first, as far as any peer has logged them."""
        chain = []
        while head != NO_DIGEST and head in self.commits:
            chain.append(self.commits[head])
            head = self.commits[head].body.parent
        return chain[::-1]

    def check_samples(self) -> None:
        """No sample twice along the chain that ends in the best head; leases do not overlap either."""
        best = max((life[-1].peer.head for life in self.lives.values() if life[-1].peer.replica is not None),
                   key=lambda h: (h.weight, h.height))  # fmt: skip
        leased: set[int] = set()
        used: dict[int, int] = {}
        names = {str(host.peer_id): host_name for host_name, host in self.hosts.items()}
        for commit in self.chain(best.id):
            body = commit.body
            for lease in body.leases:
                units = range(lease.span.start, lease.span.start + lease.span.count)
                if leased.intersection(units):
                    self.violations.append(f"round {body.round}: a sample unit was leased twice")
                leased.update(units)
            shares = contributed(body.seal, body.chunks, self.layout)
            for member, share in zip(body.seal.members, shares, strict=True):
                brought = self.contributions.get((names[member.peer], hash_of(body.seal).hex()))
                if share < 1 or brought is None:
                    continue
                for unit in brought.units:
                    if unit in used:
                        self.violations.append(
                            f"unit {unit} was averaged in round {used[unit]} and in round {body.round}"
                        )
                    used[unit] = body.round

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
        first: dict[str, float] = {}
        for at, _, fields in self.named("commit"):
            first.setdefault(fields["id"], at)
        return sorted(first.values())
