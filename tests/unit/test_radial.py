"""Norms and directions: the published formula, the same bits everywhere, and what is refused or bounded.

Contributions go through the protocol's own steps: the sender's norms, the reducer's sums, averaged chunks, the replica.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.averaged import check, hash_chunk, pack, size_limit, unpack
from atoll.protocol.codecs import averages_codec, get_codec
from atoll.protocol.commits import START, bitmap, make_body
from atoll.protocol.errors import ManifestError, PeerMisbehaved
from atoll.protocol.fragments import make_layout
from atoll.protocol.kernels import probe
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Body, ChunkEntry, Member, Seal, hash_of
from atoll.protocol.radial import BLOCK, Directions, Norms, Radial, bounded, outsized, read, scales, squares
from atoll.protocol.replica import Replica
from atoll.protocol.state import GlobalState

from ..simulated.merged import expected

SPECIFICATION = Path(__file__).parents[2] / "docs/wire/codecs.md"
SIZE, CHUNK = 700, 128
LAYERS = ((100,), (60, 230), (10, 200), (40, 60))
WEIGHTS = (400, 100, 300)


def merging(codec: str = "float32", **changes: Any) -> Manifest:
    rules = {"average": "radial", "quorum": 1, "weight_cap": 1000, **changes.pop("round", {})}
    state = {"chunk": CHUNK, "layers": LAYERS, "embeddings": (0, 6), **changes.pop("state", {})}
    layout = make_layout(SIZE, CHUNK, LAYERS, rules.get("fragments", 1), "balanced")
    digest = GlobalState.fresh(layout, np.zeros(SIZE, np.float32)).digest().hex()
    outer = {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0}
    return Manifest.make(
        "radial", parameters=SIZE, theta0=digest, round=rules, state=state, outer=outer,
        codec={"name": codec, "error_feedback": 1.0}, **changes,
    )  # fmt: skip


def contributions(seed: int = 0, count: int = len(WEIGHTS)) -> list[np.ndarray]:
    """Vectors of unlike lengths, tensor by tensor."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        x = rng.standard_normal(SIZE).astype(np.float32)
        scale = np.repeat(10.0 ** rng.uniform(-1, 0, 7), [size for layer in LAYERS for size in layer])
        found.append((x * scale * (1 + 3 * i)).astype(np.float32))
    return found


class Group:
    """Peers that have brought x, by the manifest; ``masks``: by chunk, who is inside."""

    def __init__(
        self, manifest: Manifest, x: Sequence[np.ndarray], masks: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.manifest, self.x = manifest, x
        self.codec = get_codec(manifest.codec.name)
        self.layout = manifest.layout
        start = GlobalState.fresh(self.layout, np.zeros(SIZE, np.float32))
        self.replicas = [Replica(manifest, self.layout, self.codec, start.copy()) for _ in x]
        part = self.layout.fragment(0)
        self.inside = [list(range(len(x)))] * part.count if masks is None else masks
        members = [Member(f"p{i}", bytes(16), WEIGHTS[i], 10 + i, 0, 0.0, 0.0, True) for i in range(len(x))]
        self.seal = Seal(manifest.run_id, 1, 0, START.head, "p0", bytes(16), members, [], False, 20.0)

    def commit(self) -> tuple[Body, list[bytes]]:
        """As a single reducer averages all chunks."""
        part, rule = self.layout.fragment(0), self.manifest.merging
        assert rule.part is not None
        directions = Directions(rule.part, self.codec)
        send = [replica.sender(-x) for replica, x in zip(self.replicas, self.x, strict=True)]
        members, chunks = self.seal.members, []
        for index, inside in enumerate(self.inside):
            total = np.zeros(part.size(index), np.float32)
            for i in inside:
                directions.add(i, index, send[i](index), float(rule.weight(members[i])), total)
            weight, norms = rule.total(members, inside), directions.norms(index, inside)
            payload: bytes | bytearray | memoryview = b""
            if inside:
                total /= np.float32(weight)
                payload = averages_codec(self.codec.name).encode(total)
            chunks.append(pack(index, bitmap(inside, len(members)), weight, payload, norms))
        entries = [
            ChunkEntry(hash_chunk(data), unpack(data, rule.pieces(index)).contributors)
            for index, data in enumerate(chunks)
        ]
        state = self.replicas[0].state.digest()
        return make_body(self.seal, hash_of(self.seal), START, state, entries, self.manifest, self.layout), chunks

    def merged(self) -> np.ndarray:
        """The mean that everybody steps by, one element a model parameter; NaN where there is none."""
        body, chunks = self.commit()
        out = np.full(SIZE, np.nan, np.float32)
        for index, mean in enumerate(self.replicas[0].means(body, chunks)):
            if mean is not None:
                out[self.layout.fragment(0).span(index)] = mean
        return out


# ---------------------------------------------------------------------------- sums of squares


def in_order(values: np.ndarray) -> float:
    """As docs/wire/codecs.md says it, one number at a time."""
    total = 0.0
    for start in range(0, len(values), 65536):
        s = [float(v) * float(v) for v in values[start : start + 65536]]
        while len(s) > 1:
            half = -(-len(s) // 2)
            s = [s[i] + s[i + half] if i + half < len(s) else s[i] for i in range(half)]
        total = total + s[0]
    return total


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000, 4097, BLOCK, BLOCK + 1, 2 * BLOCK + 77])
def test_squares_are_summed_in_the_order_of_the_specification(size: int) -> None:
    values = probe(size, 7)
    assert squares(values) == in_order(values)
    assert squares(values) == pytest.approx(math.fsum(float(v) ** 2 for v in values), rel=1e-12)


def test_squares_have_known_bits() -> None:
    found = squares(probe(3 * BLOCK // 2, 3) * np.float32(2.0**-20)).hex()
    assert found == "0x1.a39af6e1da562p+92"
    assert found in SPECIFICATION.read_text(encoding="utf-8")
    assert squares(np.full(3, 1e-45, np.float32)) == 3 * 2.0**-298, "subnormal numbers count"


# ---------------------------------------------------------------------------- where tensors lie


@given(
    st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(1, 6),
    st.sampled_from([64, 128]), st.data(),
)  # fmt: skip
def test_pieces_are_the_tensors(layers: list[list[int]], fragments: int, chunk: int, data: st.DataObject) -> None:
    sizes = [size for layer in layers for size in layer]
    plain = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    layout = make_layout(sum(sizes), chunk, layers, min(fragments, len(sizes)), "balanced")
    radial = Radial(layout, layers, sorted(plain))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    seen = np.full(sum(sizes), -1)
    where: dict[int, list[int]] = {}
    for fragment in range(layout.fragments):
        part = layout.fragment(fragment)
        for index in range(part.count):
            pieces = radial.pieces(fragment, index)
            assert len(pieces) <= radial.most
            for piece in pieces:
                seen[part.span(index)][piece.place] = piece.tensor
                where.setdefault(piece.tensor, []).append(index)
        for tensor in {t for t in where if where[t] and layout.fragments == 1}:
            assert list(radial.chunks(fragment, tensor)) == where[tensor]
    assert (seen == np.where(np.isin(owner, list(plain)), -1, owner)).all()


# ---------------------------------------------------------------------------- the formula


@pytest.mark.parametrize("weights", ["tokens", "tokens2/steps", "equal"])
def test_the_mean_of_norms_times_the_mean_direction(weights: str) -> None:
    x = contributions()
    manifest = merging(round={"weights": weights})
    found = Group(manifest, x).merged()
    w = np.array([manifest.merging.weight(Member("", b"", t, 10 + i, 0, 0, 0, True)) for i, t in enumerate(WEIGHTS)])
    w = w / w.sum()
    at = 0
    for tensor, size in enumerate(size for layer in LAYERS for size in layer):
        vectors = [v[at : at + size].astype(np.float64) for v in x]
        mean = sum(share * v for share, v in zip(w, vectors, strict=True))
        norms = [float(np.linalg.norm(v)) for v in vectors]
        direction = sum(share * v / n for share, v, n in zip(w, vectors, norms, strict=True))
        length = sum(share * n for share, n in zip(w, norms, strict=True))
        wanted = mean if tensor in (0, 6) else length * direction / np.linalg.norm(direction)
        assert np.allclose(found[at : at + size], wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max()), tensor
        at += size


@pytest.mark.parametrize("codec", ["float32", "float16", "int8", "int4"])
@given(seed=st.integers(0, 2**31), data=st.data())
@settings(max_examples=25, deadline=None)
def test_whoever_is_left_out_of_a_chunk(codec: str, seed: int, data: st.DataObject) -> None:
    """Any contributors of any chunk: what everybody computes is what the documents' formulas give."""
    masks = [data.draw(st.lists(st.integers(0, 2), unique=True).map(sorted)) for _ in range(-(-SIZE // CHUNK))]
    manifest, x = merging(codec), contributions(seed)
    group = Group(manifest, x, masks)
    codec_of = get_codec(codec)
    sent = []
    for vector in x:
        out = np.empty_like(vector)
        for index in range(manifest.layout.count):
            span = manifest.layout.span(index)
            codec_of.decode(codec_of.encode(vector[span]), span.stop - span.start, out[span])
        sent.append(out)
    body, chunks = group.commit()
    share = {"float32": 2**-20, "float16": 2**-10, "int8": 0.51 / 127, "int4": 19.8 / 127}[codec]
    means = group.replicas[0].means(body, chunks)
    for mean, (wanted, magnitude) in zip(means, expected(body, manifest, list(sent)), strict=True):
        if mean is not None:
            assert (np.abs(mean - wanted) <= share * magnitude + 1e-7 + 1e-6 * np.abs(wanted)).all()
    assert all((mean is None) == (not mask) for mean, mask in zip(means, masks, strict=True))


def test_one_peer_at_rate_one_is_plain_training() -> None:
    (x,) = contributions(3, 1)
    group = Group(merging(), [x])
    body, chunks = group.commit()
    for replica in group.replicas:
        replica.apply(body, hash_of(body), chunks)
        assert np.abs(replica.params + x).max() < 1e-6 * np.abs(x).max()


def test_a_tensor_of_zeros_has_no_direction() -> None:
    """It counts in the mean of the norms; where all are zero, nothing moves."""
    x = contributions(5, 2)
    x[1][160:390] = 0  # tensor 2
    x[0][390:400] = x[1][390:400] = 0  # tensor 3
    found = Group(merging(), x).merged()
    wanted = x[0][160:390] * (WEIGHTS[0] / (WEIGHTS[0] + WEIGHTS[1]))
    assert np.allclose(found[160:390], wanted, rtol=1e-5)
    assert not found[390:400].any()


def test_what_cancels_is_not_blown_up() -> None:
    """Opposite directions leave next to nothing: at most 64 times that, and not the mean of the norms."""
    x = contributions(6, 1)[0]
    almost = -x
    almost[160:390] *= np.float32(0.999)
    manifest = merging(round={"weights": "equal"})
    found = Group(manifest, [x, almost]).merged()
    assert np.linalg.norm(found[160:390]) < 1e-4 * np.linalg.norm(x[160:390])
    assert not Group(manifest, [x, -x]).merged()[100:640].any()


def test_a_norm_counts_for_a_hundred_others_at_most() -> None:
    assert bounded([1.0, 250.0, 2.0]) == [1.0, 200.0, 2.0]
    assert bounded([3.0]) == [3.0]
    assert bounded([3.0, 0.0]) == [3.0, 0.0]
    x = contributions(7, 2)
    x[1] *= np.float32(1e6)
    found = Group(merging(round={"weights": "equal"}), x).merged()
    length = np.linalg.norm(found[160:390]) / np.linalg.norm(x[0][160:390])
    assert length == pytest.approx((1 + 100) / 2, rel=1e-3)


def test_the_example_of_the_specification() -> None:
    manifest = Manifest.make(
        "example", parameters=8, theta0="00" * 32, round={"average": "radial", "quorum": 1},
        state={"chunk": 64, "layers": ((3,), (5,)), "embeddings": (0,)},
        codec={"name": "float32", "error_feedback": 0.0},
    )  # fmt: skip
    vectors = "".join(SPECIFICATION.read_text(encoding="utf-8").replace("`", "").split())
    x = [
        np.array([1, 2, 3, 0.5, -0.25, 0.125, 0, 2], np.float32), np.array([-1, 1, 0, 4, 1, 0, -2, 8], np.float32),
    ]  # fmt: skip
    members = [Member(f"p{i}", bytes(16), tokens, 1, 0, 0.0, 0.0, True) for i, tokens in enumerate((200, 100))]
    codec, rule = get_codec("float32"), manifest.merging
    replica = Replica(manifest, manifest.layout, codec, GlobalState.fresh(manifest.layout, np.zeros(8, np.float32)))
    assert rule.part is not None
    directions, total = Directions(rule.part, codec), np.zeros(8, np.float32)
    for i, vector in enumerate(x):
        sent = bytes(replica.sender(-vector)(0))
        assert sent.hex() in vectors
        directions.add(i, 0, sent, float(rule.weight(members[i])), total)
    total /= np.float32(300)
    chunk = pack(0, bitmap([0, 1], 2), 300, codec.encode(total), directions.norms(0, [0, 1]))
    assert chunk.hex() in vectors
    seal = Seal(manifest.run_id, 1, 0, START.head, "p0", bytes(16), members, [], False, 20.0)
    entries = [ChunkEntry(hash_chunk(chunk), unpack(chunk, 1).contributors)]
    body = make_body(seal, hash_of(seal), START, bytes(32), entries, manifest, manifest.layout)
    (mean,) = replica.means(body, [chunk])
    assert mean is not None
    assert "".join(f"{bits:08x}" for bits in mean.view(np.uint32)) in vectors


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf, -1.0, -0.0, 2.0**-101, 2.0**85])
def test_a_norm_that_no_tensor_has_is_refused(norm: float) -> None:
    with pytest.raises(PeerMisbehaved, match="a norm of"):
        read(np.array([1.0, norm], "<f4").tobytes())


def stated(manifest: Manifest, x: np.ndarray, factor: float) -> list[bytes]:
    """A contribution whose norms are stated that many times too large."""
    replica = Replica(manifest, manifest.layout, get_codec("float32"), GlobalState.fresh(manifest.layout, 0 * x))
    send, found = replica.sender(-x), []
    for index in range(manifest.layout.count):
        pieces, data = manifest.merging.pieces(index) or 0, send(index)
        norms = np.frombuffer(data[: 4 * pieces], "<f4") * np.float32(factor)
        found.append(norms.astype("<f4").tobytes() + bytes(data[4 * pieces :]))
    return found


@pytest.mark.parametrize(("factor", "words"), [(0.9, "longer"), (1.1, "shorter"), (0.0, "longer")])
def test_a_reducer_sees_whether_the_norms_are_true(factor: float, words: str) -> None:
    """Too small would let the direction outweigh all others; too large, the length."""
    manifest, (x,) = merging(), contributions(8, 1)
    part = manifest.merging.part
    assert part is not None
    directions = Directions(part, get_codec("float32"))

    def bring() -> None:
        for index, data in enumerate(stated(manifest, x, factor)):
            directions.add(1, index, data, 1.0, np.zeros(manifest.layout.size(index), np.float32))

    with pytest.raises(PeerMisbehaved, match=words):
        bring()


@pytest.mark.parametrize("codec", ["float32", "int8", "sparse"])
@given(st.integers(0, 5), st.integers(0, 600), st.binary(max_size=8), st.integers(-9, 9))
@settings(max_examples=100, deadline=None)
def test_a_damaged_contribution_is_refused_or_bounded(
    codec: str, index: int, at: int, damage: bytes, longer: int
) -> None:
    """Whatever comes: refused, with nothing added, or a direction of length 1 at most for each tensor."""
    manifest, (x,) = merging(codec), contributions(10, 1)
    replica = Replica(manifest, manifest.layout, get_codec(codec), GlobalState.fresh(manifest.layout, 0 * x))
    data = bytearray(replica.sender(-x)(index))
    data[at % len(data) : at % len(data) + len(damage)] = damage
    data = data[: len(data) + longer] if longer < 0 else data + bytes(longer)
    part, into = manifest.merging.part, np.zeros(manifest.layout.size(index), np.float32)
    assert part is not None
    try:
        Directions(part, get_codec(codec)).add(0, index, bytes(data), 2.0**53, into)
    except PeerMisbehaved:
        assert not into.any()
    for piece in part.pieces(index):
        assert np.sqrt(squares(into[piece.place])) <= 2.0**53 * 1.01


def test_of_half_a_tensor_a_reducer_sees_half() -> None:
    """Tensor 2 lies in chunks 1 to 3; who reduces chunk 2 alone refuses what is longer than the whole may be."""
    manifest, (x,) = merging(), contributions(9, 1)
    part = manifest.merging.part
    assert part is not None
    assert list(part.chunks(2)) == [1, 2, 3]
    into = np.zeros(manifest.layout.size(2), np.float32)
    Directions(part, get_codec("float32")).add(0, 2, stated(manifest, x, 5.0)[2], 1.0, into)
    with pytest.raises(PeerMisbehaved, match="longer"):
        Directions(part, get_codec("float32")).add(0, 2, stated(manifest, x, 0.3)[2], 1.0, into)


@given(st.integers(0, 2**31), st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_damaged_chunk_is_refused_or_decodes(seed: int, at: int, byte: int) -> None:
    group = Group(merging("int8"), contributions(seed))
    body, chunks = group.commit()
    index = seed % len(chunks)
    data = bytearray(chunks[index])
    data[at % len(data)] = byte
    rule = group.manifest.merging
    assert len(data) <= size_limit(group.codec, CHUNK, len(body.seal.members), rule)
    try:
        found = check(bytes(data), index, body.seal.members, group.codec, group.layout.size(index), rule)
    except PeerMisbehaved:
        return
    assert np.isfinite(found.norms).all()
    entries = [ChunkEntry(hash_chunk(c), e.contributors) for c, e in zip(chunks, body.chunks, strict=True)]
    chunks[index] = bytes(data)
    entries[index] = ChunkEntry(hash_chunk(chunks[index]), found.contributors)
    changed = make_body(group.seal, hash_of(group.seal), START, body.state, entries, group.manifest, group.layout)
    group.replicas[0].apply(changed, hash_of(changed), chunks)
    assert np.isfinite(group.replicas[0].params).all()


def test_chunks_of_a_run_without_norms_are_another_version() -> None:
    group = Group(merging(), contributions())
    _, chunks = group.commit()
    assert chunks[0][0] == 2
    with pytest.raises(PeerMisbehaved, match="version 2"):
        unpack(chunks[0])
    with pytest.raises(PeerMisbehaved, match="version 1"):
        unpack(pack(0, b"\x01", 5, b"payload"), 1)
    with pytest.raises(PeerMisbehaved):
        unpack(chunks[0][:20], 3)


def test_nobody_contributed_to_any_chunk() -> None:
    part = merging().merging.part
    assert part is not None
    assert scales(part, [None] * 6) == [()] * 6


def test_norms_are_computed_once_a_chunk() -> None:
    part = merging().merging.part
    assert part is not None
    asked: list[int] = []
    layout, x = merging().layout, contributions()[0]

    def sent(index: int) -> np.ndarray:
        asked.append(index)
        return x[layout.span(index)]

    norms = Norms(part, sent, CHUNK)
    found = [np.frombuffer(norms.of(index), "<f4") for index in range(layout.count)]
    assert sorted(asked) == list(range(layout.count - 1)), "the last is an embedding"
    by_tensor: dict[int, set[float]] = {}
    for index, values in enumerate(found):
        for piece, norm in zip(part.pieces(index), values, strict=True):
            by_tensor.setdefault(piece.tensor, set()).add(float(norm))
    assert sorted(by_tensor) == [1, 2, 3, 4, 5]
    assert all(len(stated) == 1 for stated in by_tensor.values()), "one norm a tensor, in each of its chunks"


# ---------------------------------------------------------------------------- the manifest


@pytest.mark.parametrize(
    ("round_", "state", "words"),
    [
        ({"average": "median"}, {}, "expected 'mean' or 'radial'"),
        ({"average": "mean"}, {"layers": ()}, 'state.embeddings with round.average = "mean" does nothing'),
        ({"average": "mean"}, {"embeddings": ()}, "state.layers with round.fragments = 1 does nothing"),
        ({}, {"layers": ()}, "needs state.layers"),
        ({}, {"embeddings": (7,)}, "expected numbers of tensors from 0 to 6, found 7"),
        ({}, {"embeddings": (3, 3)}, "found 3 after 3"),
        ({}, {"embeddings": tuple(range(7))}, 'set round.average to "mean"'),
        ({}, {"embeddings": (-1,)}, "at least 0"),
    ],
)
def test_manifests_that_contradict_themselves_are_refused(
    round_: dict[str, Any], state: dict[str, Any], words: str
) -> None:
    with pytest.raises(ManifestError, match=words):
        merging(round=round_, state=state)


def test_norms_of_a_chunk_are_bounded() -> None:
    """A chunk of ten thousand tensors and 256 members would be ten megabytes of norms."""
    layers = (tuple([4] * 4096),) * 4
    size = sum(map(sum, layers))
    with pytest.raises(ManifestError, match="the most is 63"):
        Manifest.make(
            "norms", parameters=size, theta0="00" * 32, round={"average": "radial", "max_group": 256},
            state={"chunk": 1 << 14, "layers": layers},
        )  # fmt: skip


def test_the_mean_is_not_written() -> None:
    plain = Manifest.make("mean", parameters=SIZE, theta0="00" * 32)
    assert plain.replace(round={"average": "mean"}).run_id == plain.run_id
    assert all(word not in plain.to_toml() for word in ("average", "embeddings", "layers"))
    ruled = merging()
    assert Manifest.from_toml(ruled.to_toml()) == ruled
    assert b'"average":"radial"' in ruled.canonical()
    assert b'"embeddings":[0,6],"layers":[[100],[60,230],[10,200],[40,60]]' in ruled.canonical()
    assert b"fragments" not in ruled.canonical()
    assert len({merging(state={"embeddings": e}).run_id for e in itertools.combinations(range(3), 2)}) == 3


@pytest.mark.parametrize(
    ("norms", "steps", "found"),
    [
        ([1.0, 2.0, 150.0], [10, 10, 10], {}),
        ([1.0, 2.0, 500.0], [10, 10, 10], {2: 250.0}),
        ([1.0, 2.0, 500.0], [1, 1, 400], {}),  # it has trained for longer
        ([1.0, 2.0, 500.0], [1, 1, 2], {2: 250.0}),
        ([0.0, 0.0, 500.0], [10, 10, 10], {}),
        ([500.0], [10], {}),
        ([1.0, 500.0], [10, 10], {}),  # of two nobody can say which is wrong
        ([500.0, 500.0, 1.0], [10, 10, 10], {}),
    ],
)
def test_whose_norm_is_out_of_all_proportion(norms: list[float], steps: list[int], found: dict[int, float]) -> None:
    assert outsized(norms, steps) == found
