"""A small run for tests: a manifest, its signers, and commits with real chunks, votes and states."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from atoll.protocol.averaged import hash_chunk, pack
from atoll.protocol.codecs import get_codec
from atoll.protocol.commits import START, Position, bitmap, make_body, position_of
from atoll.protocol.deadline import deadline_seconds
from atoll.protocol.identity import FastSigner
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import ChunkEntry, Commit, Member, Seal, Vote, hash_of, vote_bytes
from atoll.protocol.parts import split_parts
from atoll.protocol.replica import Replica
from atoll.protocol.state import GlobalState
from atoll.protocol.transport import PeerId

PARAMETERS, CHUNK = 600, 256


def theta0(layout: ChunkLayout, value: float = 0.5) -> GlobalState:
    return GlobalState.fresh(layout, np.full(layout.parameters, value, np.float32))


@dataclass
class Run:
    """Makes commits, one on top of another, and keeps the state after each."""

    seed: int = 0
    manifest: Manifest = field(init=False)
    layout: ChunkLayout = field(init=False)
    states: dict[bytes, GlobalState] = field(default_factory=dict)
    positions: dict[bytes, Position] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = ChunkLayout(PARAMETERS, CHUNK)
        start = theta0(self.layout)
        self.manifest = Manifest.make(
            f"test-{self.seed}",
            parameters=PARAMETERS,
            theta0=start.digest().hex(),
            state={"chunk": CHUNK},
            round={"inner_steps": 4, "silence": 2.0},
        )
        self.codec = get_codec(self.manifest.codec.name)
        self.signers = [FastSigner(PeerId(f"peer-{i}")) for i in range(3)]
        self.verifier = self.signers[0]
        self.states[START.head.id] = start
        self.positions[START.head.id] = START

    @property
    def run_id(self) -> bytes:
        return self.manifest.run_id

    def commit(
        self, parent: Position = START, *, salt: int = 0, weight: int = 10
    ) -> tuple[Commit, list[bytes], Position]:
        """A commit on ``parent`` with random chunks (``salt`` makes another one), its chunks, and where it leads."""
        state = self.states[parent.head.id]
        rng = np.random.default_rng([self.seed, parent.head.height, salt])
        members = [Member(str(s.peer_id), bytes(16), weight, 4, 3, 0.0, 0.0, True) for s in self.signers]
        count = self.layout.count if weight else 0
        due = deadline_seconds(members, self.layout, self.manifest.codec.name, self.manifest.round.silence)
        seal = Seal(
            self.run_id, parent.head.round + 1 + salt, 0, parent.head, members[0].peer, bytes(16), members,
            split_parts([(True, 0.0, 0.0)] * 3, count) if weight else [], False, due,
        )  # fmt: skip
        everyone = bitmap(range(3), 3)
        chunks = []
        for i in range(count):
            mean = rng.standard_normal(self.layout.size(i)).astype(np.float32)
            chunks.append(pack(i, everyone, 3 * weight, self.codec.encode(mean)))
        entries = [ChunkEntry(hash_chunk(chunk), everyone) for chunk in chunks]
        body = make_body(seal, hash_of(seal), parent, state.digest(), entries, self.manifest, self.layout)
        commit_id = hash_of(body)
        votes = [Vote(i, s.sign(vote_bytes(commit_id))) for i, s in enumerate(self.signers[:2])]
        replica = Replica(self.manifest, self.layout, self.codec, state.copy(), parent)
        replica.apply(body, commit_id, chunks)
        position = position_of(body, commit_id)
        self.states[commit_id], self.positions[commit_id] = replica.state, position
        return Commit(body, votes), chunks, position

    def chain(
        self, length: int, parent: Position = START, *, salt: int = 0
    ) -> list[tuple[Commit, list[bytes], Position]]:
        made = []
        for _ in range(length):
            made.append(self.commit(parent, salt=salt))
            parent = made[-1][2]
        return made
