"""Error feedback of every codec: residual and counters change with the commit and return with the abort, per chunk.

Three peers on one chain. Each round every peer trains, some rounds are void, and of each chunk a random set of peers
contributes; what a reducer does is done here by the specification (docs/protocol.md, "Averaged chunks").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.averaged import hash_chunk, pack, unpack
from atoll.protocol.codecs import MAX_MAGNITUDE, averages_codec, get_codec
from atoll.protocol.commits import START, Position, bitmap, make_body
from atoll.protocol.errors import NonFinite
from atoll.protocol.lowrank import Factors, LowRankLayout
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Body, ChunkEntry, Member, Seal, hash_of
from atoll.protocol.overlap import Merge, Overlap, move
from atoll.protocol.replica import Replica
from atoll.protocol.state import GlobalState

SIZE, CHUNK, PEERS = 700, 256, 3
LOSSY = ["float16", "int8", "int4", "sparse", "lowrank"]
SHAPES = {"layers": [[240], [20, 220], [220]], "columns": [15, 20, 10, 10]}
"""Of a model that is three chunks too where matrices travel as factors."""
MEAN_ERROR = {
    "float32": 2**-20, "float16": 2**-10, "int8": 0.51 / 127, "int4": 19.8 / 127, "lowrank": 19.8 / 127,
    "union": 0.51 / 127,
}  # fmt: skip
"""How far a decoded average may be from what was averaged, as a share of the largest magnitude near it."""


@dataclass
class Trainer:
    """One peer: its replica, θ, and what an exact accountant knows of it."""

    replica: Replica
    theta: np.ndarray
    trained: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    """The sum of all inner steps, in float64."""
    handed: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    """The sum of all that was decoded from its averaged contributions."""

    def train(self, rng: np.random.Generator, scale: float) -> None:
        step = (scale * rng.standard_normal(SIZE)).astype(np.float32)
        before = self.theta.copy()
        self.theta += step
        self.trained += self.theta.astype(np.float64) - before  # what float32 made of it

    def owed(self) -> np.ndarray:
        """What it has not handed over: Δ and residual."""
        residual = self.replica.residual
        delta = self.replica.params.astype(np.float64) - self.theta
        return delta if residual is None else delta + residual


class Group:
    def __init__(self, codec: str, beta: float) -> None:
        shapes, rank = (SHAPES, {"rank": 2}) if codec == "lowrank" else ({}, {})
        self.manifest = Manifest.make(
            "feedback", parameters=SIZE, theta0="0" * 64, state={"chunk": CHUNK, **shapes},
            codec={"name": codec, "error_feedback": beta, **rank},
            outer={"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5},
        )  # fmt: skip
        self.layout = self.manifest.layout
        start = GlobalState.fresh(self.layout, np.linspace(-1, 1, SIZE, dtype=np.float32))
        self.codec, self.averages = get_codec(codec), averages_codec(codec)
        self.position: Position = START
        self.peers = []
        for _ in range(PEERS):
            residual = None if self.codec.lossless or not beta else np.zeros(SIZE, np.float32)
            replica = Replica(self.manifest, self.layout, self.codec, start.copy(), residual=residual)
            self.peers.append(Trainer(replica, replica.params.copy()))

    def travelled(self, index: int, payload: bytes | bytearray | memoryview) -> np.ndarray:
        out = np.empty(self.layout.wire(0).size(index), np.float32)
        self.codec.decode(payload, len(out), out)
        return out

    def encoded(self, index: int, x: np.ndarray, me: int) -> bytes:
        if isinstance(self.layout, LowRankLayout):
            x = Factors(self.layout).project(index, x, self.peers[me].replica.state.momentum)
        return bytes(self.codec.encode(x))

    def decoded(self, index: int, payload: bytes | bytearray | memoryview, me: int) -> np.ndarray:
        """The elements of a chunk, at the head of that peer."""
        values = self.travelled(index, payload)
        if not isinstance(self.layout, LowRankLayout):
            return values
        out = np.empty(self.layout.size(index), np.float32)
        Factors(self.layout).expand(index, values, self.peers[me].replica.state.momentum, out)
        return out

    def average(self, index: int, inside: list[int], weights: list[int]) -> bytes:
        """A reducer's work, checked against the exact mean of what was decoded."""
        size = self.layout.wire(0).size(index)
        total, exact = np.zeros(size, np.float32), np.zeros(size)
        for i in inside:
            sent = self.peers[i].replica.encode(index, self.peers[i].theta)
            self.codec.accumulate(sent, float(weights[i]), total)
            exact += weights[i] * self.travelled(index, sent).astype(np.float64)
        weight = sum(weights[i] for i in inside)
        if not inside:
            return pack(index, bitmap([], PEERS), 0, b"")
        total /= np.float32(weight)
        payload = self.averages.encode(total)
        mean = np.empty_like(total)
        self.averages.decode(payload, len(mean), mean)
        exact /= weight
        allowed = MEAN_ERROR[self.averages.name] * np.abs(exact).max() + 1e-6
        assert np.abs(mean - exact).max() <= allowed, "the re-encoded mean keeps what the contributions brought"
        return pack(index, bitmap(inside, PEERS), weight, payload)

    def commit(self, masks: list[int], weights: list[int]) -> tuple[Body, list[bytes]]:
        members = [Member(f"p{i}", bytes(16), weights[i], 1, 0, 0.0, 0.0, True) for i in range(PEERS)]
        chunks = [
            self.average(index, [i for i in range(PEERS) if masks[index] >> i & 1], weights)
            for index in range(self.layout.count)
        ]
        head = self.position.head
        seal = Seal(self.manifest.run_id, head.round + 1, 0, head, "p0", bytes(16), members, [], False, 1.0)
        entries = [ChunkEntry(hash_chunk(chunk), unpack(chunk).contributors) for chunk in chunks]
        state = self.peers[0].replica.state.digest()
        return make_body(seal, hash_of(seal), self.position, state, entries, self.manifest, self.layout), chunks


def apply(group: Group, me: int, body: Body, chunks: list[bytes], masks: list[int], later: np.ndarray | None) -> None:
    """Apply at one peer that has paused or gone on by carry, and compare each chunk with the rules. ``later``: what it
    trained since the freeze."""
    peer, layout = group.peers[me], group.layout
    replica, frozen = peer.replica, peer.theta
    local = frozen
    if later is not None:
        local = frozen + later
        peer.trained += local.astype(np.float64) - frozen
    old, unmoved = replica.params.copy(), local.copy()
    with checked(group, me, masks):
        share = replica.apply(body, hash_of(body), chunks, me=me, frozen=frozen, local=local).share
    mine = [index for index in range(layout.count) if masks[index] >> me & 1]
    assert share == sum(layout.size(index) for index in mine) / SIZE
    for index in range(layout.count):
        span = layout.span(index)
        new = replica.params[span]
        if index not in mine:
            np.testing.assert_array_equal(local[span], unmoved[span] + (new - old[span]))
        elif later is None:
            np.testing.assert_array_equal(local[span], new)
    peer.theta = local


@contextlib.contextmanager
def checked(group: Group, me: int, masks: list[int]) -> Iterator[None]:
    """Around a commit: where the peer is in the average, the residual is what the codec lost, elsewhere it stays."""
    peer, layout = group.peers[me], group.layout
    replica, frozen = peer.replica, peer.theta.copy()
    before = None if replica.residual is None else replica.residual.copy()
    x = [replica.contribution(index, frozen) for index in range(layout.count)]
    sent = [group.decoded(index, group.encoded(index, x[index], me), me) for index in range(layout.count)]
    yield
    for index in range(layout.count):
        span, mine = layout.span(index), bool(masks[index] >> me & 1)
        if mine:
            peer.handed[span] += sent[index]
        if replica.residual is not None:
            assert before is not None
            np.testing.assert_array_equal(replica.residual[span], x[index] - sent[index] if mine else before[span])


def fly(
    group: Group, me: int, rule: Overlap, later: np.ndarray, commit: tuple[Body, list[bytes], list[int]] | None
) -> None:
    """A round in flight at one peer, which trains on from where ``rule`` says; None: it ends without a commit."""
    peer = group.peers[me]
    replica, frozen = peer.replica, peer.theta.copy()
    theta = np.empty_like(frozen)
    replica.start(rule, frozen, theta)
    begun = theta.astype(np.float64)
    theta += later
    peer.trained += theta - begun
    if commit is None:
        residual = None if replica.residual is None else replica.residual.copy()
        runs = replica.abort(rule, frozen)
        if residual is not None:
            np.testing.assert_array_equal(replica.residual, residual)
    else:
        body, chunks, masks = commit
        with checked(group, me, masks):
            runs = replica.apply(body, hash_of(body), chunks, me=me, frozen=frozen, shift=frozen, rule=rule).runs
    for run in runs:
        move(theta[run.start : run.stop], run.keep, frozen[run.start : run.stop])
    peer.theta = theta


rounds = st.lists(
    st.tuples(
        st.sampled_from(["commit", "overlap", "void", "eager", "delay", "void eager", "void delay"]),
        st.lists(st.integers(0, 2**PEERS - 1), min_size=3, max_size=3),
        st.lists(st.integers(1, 5000), min_size=PEERS, max_size=PEERS),
        st.integers(-4, 1),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("codec", ["float32", *LOSSY])
@settings(max_examples=20, deadline=None)
@given(rounds, st.integers(0, 2**32 - 1))
def test_nothing_is_lost_and_nothing_counts_twice(
    codec: str, plan: list[tuple[str, list[int], list[int], int]], seed: int
) -> None:
    """β = 1: what was handed over, the residual and the Δ that is left are all that was ever trained."""
    rng = np.random.default_rng(seed)
    group = Group(codec, 1.0)
    for kind, masks, weights, exponent in plan:
        for peer in group.peers:
            peer.train(rng, 10.0**exponent)
        body, chunks = group.commit(masks, weights)
        if kind.split()[-1] in ("eager", "delay"):
            rule = Overlap(Merge(kind.split()[-1]), lr=0.5, mu=0.5)
            for me in range(PEERS):
                later = (0.1 * rng.standard_normal(SIZE)).astype(np.float32)
                fly(group, me, rule, later, None if kind.startswith("void") else (body, chunks, masks))
            group.position = group.peers[0].replica.position
            continue
        if kind == "void":
            # The contributions went out; nobody applies, and what would go out now is the same to the last bit.
            for peer in group.peers:
                residual = None if peer.replica.residual is None else peer.replica.residual.copy()
                first = [bytes(peer.replica.encode(i, peer.theta)) for i in range(group.layout.count)]
                again = [bytes(peer.replica.encode(i, peer.theta)) for i in range(group.layout.count)]
                assert first == again
                if residual is not None:
                    np.testing.assert_array_equal(peer.replica.residual, residual)
            continue
        for me in range(PEERS):
            on = (0.1 * rng.standard_normal(SIZE)).astype(np.float32) if kind == "overlap" else None
            apply(group, me, body, chunks, masks, on)
        group.position = group.peers[0].replica.position
    assert len({peer.replica.state.digest() for peer in group.peers}) == 1
    for peer in group.peers:
        scale = np.abs(peer.trained).max() + np.abs(peer.replica.params).max() + np.abs(peer.handed).max() + 1
        np.testing.assert_allclose(peer.handed + peer.owed(), -peer.trained, atol=2e-5 * scale)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_residual_fades_by_beta_and_only_with_a_commit(codec: str) -> None:
    rng = np.random.default_rng(3)
    group = Group(codec, 0.5)
    peer = group.peers[0]
    for each in group.peers:
        each.train(rng, 0.1)
    body, chunks = group.commit([7, 7, 7], [10, 10, 10])
    for me in range(PEERS):
        apply(group, me, body, chunks, [7, 7, 7], None)
    group.position = peer.replica.position
    residual = peer.replica.residual
    assert residual is not None
    assert np.abs(residual).max() > 0
    # No training since: x is the faded residual alone. Void rounds fade nothing further.
    for _ in range(2):
        x = np.concatenate([peer.replica.contribution(i, peer.theta) for i in range(group.layout.count)])
        np.testing.assert_array_equal(x, np.float32(0.5) * residual)
        group.commit([7, 7, 7], [10, 10, 10])
    # Chunk 0 is averaged without this peer: its residual there stays whole.
    kept = residual[group.layout.span(0)].copy()
    masks = [6, 7, 7]
    body, chunks = group.commit(masks, [10, 10, 10])
    apply(group, 0, body, chunks, masks, None)
    np.testing.assert_array_equal(residual[group.layout.span(0)], kept)


@pytest.mark.parametrize("codec", ["float32", *LOSSY])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.0 * MAX_MAGNITUDE])
def test_what_has_diverged_is_not_sent(codec: str, value: float) -> None:
    peer = Group(codec, 1.0).peers[0]
    assert peer.replica.sendable(peer.theta)
    peer.theta[13] = value
    assert not peer.replica.sendable(peer.theta)
    with pytest.raises(NonFinite):
        peer.replica.encode(0, peer.theta)
    peer.replica.encode(1, peer.theta)


@pytest.mark.parametrize("codec", LOSSY)
def test_another_head_voids_the_residual(codec: str) -> None:
    group = Group(codec, 1.0)
    replica = group.peers[0].replica
    assert replica.residual is not None
    replica.residual[:] = 1
    replica.adopt(replica.state.copy(), START)
    assert not replica.residual.any()
