"""Matrices as factors: what travels, what it is decoded to, and that all peers decode the same."""

from __future__ import annotations

import functools
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol import kernels
from atoll.protocol.codecs import MAX_MAGNITUDE, averages_codec, get_codec
from atoll.protocol.commits import START, Position, check_body, check_child, check_seal, make_body, position_of
from atoll.protocol.deadline import deadline_seconds
from atoll.protocol.errors import ManifestError, PeerMisbehaved
from atoll.protocol.fragments import make_layout
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.lowrank import (
    Factors,
    LowRankLayout,
    Piece,
    cut,
    directions,
    estimate,
    expand,
    gains,
    largest_rank,
    project,
    segments,
)
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Body, Head, Limit, Member, Seal, decode, encode, hash_of
from atoll.protocol.replica import Replica
from atoll.protocol.state import GlobalState

ROOT = Path(__file__).parents[2]
KINDS = ["normal", "zeros", "constant", "lonely", "subnormal", "smallest", "huge", "low rank", "probe", "rows of zeros"]


@functools.cache
def compiled() -> kernels.Kernels:
    return kernels.compile_kernels(cache=True)


def made(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    size = rows * columns
    values: Any = {
        "normal": lambda: 1e-3 * rng.standard_normal(size),
        "zeros": lambda: np.zeros(size),
        "constant": lambda: np.full(size, -0.1),
        "lonely": lambda: np.where(np.arange(size) == size // 2, -3.0, 0.0),
        "subnormal": lambda: 1e-40 * rng.standard_normal(size),
        "smallest": lambda: np.full(size, 1e-45),
        "huge": lambda: np.full(size, MAX_MAGNITUDE),
        "low rank": lambda: (rng.standard_normal((rows, 2)) @ rng.standard_normal((2, columns))).reshape(-1),
        "probe": lambda: kernels.probe(size, seed),
        "rows of zeros": lambda: (rng.standard_normal((rows, columns)) * (np.arange(rows) % 3 == 0)[:, None]).reshape(
            -1
        ),
    }[kind]()
    return np.clip(values, -MAX_MAGNITUDE, MAX_MAGNITUDE).astype(np.float32)


@given(
    st.integers(4, 70), st.integers(4, 70), st.integers(1, 6), st.sampled_from(KINDS), st.sampled_from(KINDS),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_any_matrix_at_any_momentum(rows: int, columns: int, rank: int, kind: str, past: str, seed: int) -> None:
    """The same bits from both implementations; directions are orthonormal; and what is not sent is never more than what
    there was, nor is it after the codec."""
    parts = segments((Piece(0, rows, columns, seed % 1000),), rank)
    x, momentum = made(kind, rows, columns, seed), made(past, rows, columns, seed + 1)
    codec = get_codec("lowrank")
    found = []
    for implementation in (kernels.NUMPY, compiled()):
        with kernels.using(implementation):
            both = directions(parts, momentum)
            values = project(parts, both, x)
            payload = bytes(codec.encode(values))
            sent, out = np.empty_like(values), np.empty_like(x)
            codec.decode(payload, len(values), sent)
            expand(parts, both, sent, out)
            exact = np.empty_like(x)
            expand(parts, both, values, exact)
            lines = [a.tobytes() for pair in both if pair is not None for a in pair]
            found.append((lines, values.tobytes(), payload, out.tobytes()))
    assert found[0] == found[1]
    assert np.isfinite(out).all()
    if parts[0].rank:
        assert both[0] is not None
        for vectors in (a.reshape(rank, -1).astype(np.float64) for a in both[0]):
            np.testing.assert_allclose(vectors @ vectors.T, np.eye(rank), atol=1e-6)
    else:
        assert (exact == x).all()
    # relative to the length of x, which subnormals have only to their last bit
    before = float(np.sqrt(np.sum(x.astype(np.float64) ** 2)))
    least = 1e-44 * rank * rows * columns
    for back in (exact, out):
        assert float(np.sqrt(np.sum((x.astype(np.float64) - back) ** 2))) <= before * (1 + 1e-5) + least


@given(st.integers(4, 60), st.integers(4, 60), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_it_is_the_part_in_the_rows_of_q_or_in_the_columns_of_u(rows: int, columns: int, rank: int, seed: int) -> None:
    """By numpy's own linear algebra, in float64; so it is linear, and the mean of what travels is what travels of the
    mean."""
    parts = segments((Piece(0, rows, columns, 0),), rank)
    xs = [made("normal", rows, columns, seed + i) for i in range(3)]
    both = directions(parts, made("normal", rows, columns, seed + 9))
    values = [project(parts, both, x) for x in xs]
    mean = np.mean(np.array(values, np.float64), axis=0).astype(np.float32)
    out = np.empty_like(xs[0])
    expand(parts, both, mean, out)
    x = np.mean(np.array(xs, np.float64), axis=0).reshape(rows, columns)
    if both[0] is not None:
        u, q = (a.reshape(rank, -1).astype(np.float64) for a in both[0])
        rest = (np.eye(rows) - u.T @ u) @ x @ (np.eye(columns) - q.T @ q)
        x = x - rest
    np.testing.assert_allclose(out.reshape(rows, columns), x, atol=2e-8)


def test_directions_are_those_in_which_the_momentum_lies() -> None:
    rng = np.random.default_rng(5)
    left, right = np.linalg.qr(rng.standard_normal((90, 3)))[0], np.linalg.qr(rng.standard_normal((50, 3)))[0]
    momentum = (left * [3.0, 2.0, 1.0]) @ right.T + 1e-3 * rng.standard_normal((90, 50))
    parts = segments((Piece(0, 90, 50, 0),), 3)
    both = directions(parts, momentum.astype(np.float32).reshape(-1))[0]
    assert both is not None
    for vectors, true in zip(both, (left, right), strict=True):
        angles = np.linalg.svd(vectors.reshape(3, -1) @ true)[1]
        assert angles.min() > 0.999


def test_a_momentum_of_fewer_directions_is_filled_up_at_random() -> None:
    momentum = made("low rank", 40, 30, 1)  # of rank 2
    parts = segments((Piece(0, 40, 30, 0),), 5)
    both = directions(parts, momentum)[0]
    assert both is not None
    for vectors in (a.reshape(5, -1) for a in both):
        np.testing.assert_allclose(vectors @ vectors.T, np.eye(5), atol=1e-6)
    other = directions(segments((Piece(0, 40, 30, 1),), 5), momentum)[0]
    assert other is not None
    # The first two are the momentum's, the rest this piece's own.
    overlap = np.linalg.svd(both[0].reshape(5, -1) @ other[0].reshape(5, -1).T)[1]
    assert overlap[1] > 0.999 > overlap[2]


def test_vectors_of_the_specification() -> None:
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:4]]
        for line in (ROOT / "docs/wire/codecs.md").read_text().split("`lowrank`, r = 1, piece 0")[1].splitlines()
        if line.startswith("| ")
    }
    i, j = np.arange(8)[:, None], np.arange(8)
    x = (((5 * i + 3 * j) % 11 - 5) / 16).astype(np.float32).reshape(-1)
    past = (((3 * i + 5 * j) % 7 - 3) / 8).astype(np.float32).reshape(-1)
    parts = segments((Piece(0, 8, 8, 0),), 1)
    codec = get_codec("lowrank")
    for column, momentum in enumerate((past, np.zeros(64, np.float32))):
        both = directions(parts, momentum)
        values = project(parts, both, x)
        payload = bytes(codec.encode(values))
        sent, out = np.empty_like(values), np.empty_like(x)
        codec.decode(payload, len(values), sent)
        expand(parts, both, sent, out)
        assert both[0] is not None
        found = {"U": both[0][0], "Q": both[0][1], "A": values[:8], "C": values[64:], "decoded, row 0": out[:8]}
        for name, bits in (found | {"row 7": out[56:]}).items():
            assert " ".join(f"{word:08x}" for word in bits.view(np.uint32)) == rows[name][column].strip("`"), name
        told = rows["payload"][column].replace("24 × `77`", "77" * 24).replace("`", "").replace(" ", "")
        assert payload.hex() == told


def test_sizes() -> None:
    """4.25 bits a value and as many of them as the factors have, each beginning a block."""
    pieces = (Piece(0, 96, 96, 0), Piece(9216, 1, 96, 1), Piece(9312, 100, 96, 2), Piece(18912, 6, 8, 3))
    parts = segments(pieces, 4)
    assert [(p.rank, p.left, p.right, p.end) for p in parts] == [
        (4, 0, 384, 768), (0, 768, 864, 864), (4, 896, 1344, 1728), (0, 1728, 1776, 1776),
    ]  # fmt: skip
    assert get_codec("lowrank").encoded_size(1776) == 2 * 28 + 888
    assert averages_codec("lowrank").name == "lowrank"


@given(st.integers(1, 400), st.integers(1, 400))
def test_the_largest_rank_is_the_last_that_gains(rows: int, columns: int) -> None:
    most = largest_rank([(rows, columns)])
    assert [rank for rank in range(402) if gains(rows, columns, rank)] == list(range(1, most + 1))
    assert largest_rank([(1, 9), (rows, columns)]) == most
    assert largest_rank([]) == 0


tensors = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 90)), min_size=1, max_size=9)


@given(tensors, st.sampled_from([64, 128, 1024]), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_chunks_begin_and_end_with_rows(shapes: list[tuple[int, int]], chunk: int, fragments: int, rank: int) -> None:
    fragments = min(fragments, len(shapes))
    sizes, columns = [m * n for m, n in shapes], [n for _, n in shapes]
    layout = make_layout(sum(sizes), chunk, [[size] for size in sizes], fragments, "balanced", columns, rank)
    assert isinstance(layout, LowRankLayout)
    assert [layout.span(i).start for i in range(layout.count)][1:] == [
        layout.span(i).stop for i in range(layout.count)
    ][:-1]
    edges = np.cumsum([0, *sizes])
    numbers = []
    for place, pieces in enumerate(layout.pieces):
        span = layout.span(place)
        assert span.stop - span.start <= chunk
        assert [p.at for p in pieces] == [0, *np.cumsum([p.size for p in pieces])[:-1]]
        assert sum(p.size for p in pieces) == span.stop - span.start
        for piece in pieces:
            numbers.append(piece.number)
            start = span.start + piece.at
            tensor = int(np.searchsorted(edges, start, side="right")) - 1
            whole = columns[tensor]
            assert start + piece.size <= edges[tensor + 1], "a piece lies in one tensor"
            if whole <= chunk:
                assert piece.columns == whole
                assert (start - edges[tensor]) % whole == 0
            else:
                assert piece.rows == 1
    assert numbers == list(range(len(numbers)))
    for fragment in range(fragments):
        wire, part = layout.wire(fragment), layout.fragment(fragment)
        assert wire.count == part.count
        for i in range(wire.count):
            parts = segments(layout.pieces[layout.place(fragment, i)], rank)
            assert wire.size(i) == parts[-1].end
            assert all(p.left % 64 == 0 and (not p.rank or p.right % 64 == 0) for p in parts)
            assert all(a.end <= b.left for a, b in pairwise(parts))


def test_large_tensors_are_cut_by_rows() -> None:
    assert list(cut([300, 20, 220, 700], [15, 20, 10, 700], 256)) == [
        [(255, 15)], [(45, 15)], [(20, 20), (220, 10)], [(256, 256)], [(256, 256)], [(188, 188)],
    ]  # fmt: skip


def test_other_codecs_have_the_layout_that_they_had() -> None:
    assert make_layout(1000, 128, [[300], [700]], 1, "balanced") == ChunkLayout(1000, 128)
    assert ChunkLayout(1000, 128).wire(0) == ChunkLayout(1000, 128)


# --- in a replica

SHAPES = {"layers": [[240], [20, 220], [220]], "columns": [15, 20, 10, 10]}


def replica(**changes: Any) -> Replica:
    manifest = run(**changes)
    params = np.linspace(-1, 1, 700, dtype=np.float32)
    state = GlobalState.fresh(manifest.layout, params)
    state.momentum[:] = np.random.default_rng(0).standard_normal(700)
    return Replica(manifest, manifest.layout, get_codec("lowrank"), state, residual=np.zeros(700, np.float32))


def run(**changes: Any) -> Manifest:
    sections = {
        "codec": {"name": "lowrank", "rank": 2, **changes.pop("codec", {})},
        "state": {"chunk": 256, **SHAPES, **changes.pop("state", {})},
    }
    return Manifest.make("factors", parameters=700, theta0="0" * 64, **sections, **changes)


def test_values_beyond_the_bound_become_the_bound() -> None:
    mine = replica()
    theta = np.full(700, -MAX_MAGNITUDE, np.float32)
    for index in range(3):
        payload = mine.encode(index, theta)
        get_codec("lowrank").validate(payload, mine.layout.wire(0).size(index))
        mine._unpacked(get_codec("lowrank"), 0, index, 0, payload, out := np.empty(mine.layout.size(index), np.float32))
        assert np.isfinite(out).all()


def test_what_no_encoder_writes_is_refused() -> None:
    mine = replica()
    codec = get_codec("lowrank")
    good = bytes(mine.encode(0, mine.params * np.float32(0.9)))
    size = mine.layout.wire(0).size(0)
    codec.validate(good, size)
    for bad in (good[:-1], good + b"\0", b"\xff\xff" + good[2:], b""):
        with pytest.raises(PeerMisbehaved):
            codec.validate(bad, size)


def test_directions_are_forgotten_with_the_momentum() -> None:
    mine = replica()
    theta = mine.params * np.float32(0.9)
    first = bytes(mine.encode(0, theta))
    assert bytes(mine.encode(0, theta)) == first
    other = mine.state.copy()
    other.momentum[:] = np.random.default_rng(1).standard_normal(700)
    mine.adopt(other, mine.position)
    assert bytes(mine.encode(0, theta)) != first


def test_the_filling_is_not_looked_at() -> None:
    layout = run().layout
    assert isinstance(layout, LowRankLayout)
    momentum, rng = np.random.default_rng(2).standard_normal(700).astype(np.float32), np.random.default_rng(3)
    factors = Factors(layout)
    values = factors.project(1, rng.standard_normal(240).astype(np.float32), momentum)
    plain, filled = np.empty(240, np.float32), np.empty(240, np.float32)
    factors.expand(1, values, momentum, plain)
    used = np.zeros(len(values), bool)
    for part in segments(layout.pieces[1], 2):
        used[part.left : part.left + (part.rank * part.piece.rows if part.rank else part.piece.size)] = True
        used[part.right : part.end] = True
    assert not values[~used].any()
    assert (~used).any()
    values[~used] = 7
    factors.expand(1, values, momentum, filled)
    assert filled.tobytes() == plain.tobytes()


# --- manifests


def test_a_manifest_says_it_in_fields_that_others_do_not_have() -> None:
    manifest = run()
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    assert '"rank":2' in manifest.canonical().decode()
    assert manifest.layout.wire(0) == manifest.layout.wire(0, 2)
    plain = Manifest.make("x", parameters=700, theta0="0" * 64, state={"chunk": 256})
    assert not any(word in plain.canonical().decode() for word in ("rank", "columns", "layers"))
    assert not any(line.startswith(("rank", "columns")) for line in plain.to_toml().splitlines())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codec": {"rank": 4}}, "rank = 4 makes no matrix .* 16 rows and 15 columns; the most is 3"),
        ({"codec": {"rank": 0}}, "needs a rank; set rank to 1 or more"),
        ({"codec": {"error_feedback": 0.0}}, "error_feedback = 0 would throw all but a few .* set error_feedback to 1"),
        ({"codec": {"name": "int4"}}, 'rank = 2 with name = "int4" does nothing; leave it out'),
        ({"codec": {"name": "int4", "rank": 0}}, 'state.columns with codec.name = "int4" does nothing'),
        ({"outer": {"optimizer": "sgd", "momentum": 0.0}}, 'in the outer momentum, .*optimizer = "nesterov"'),
        ({"round": {"average": "radial"}}, 'takes norms; use round.average = "mean"'),
        ({"state": {"columns": []}}, "needs state.layers and state.columns"),
        ({"state": {"layers": [], "columns": []}}, "needs state.layers and state.columns"),
        ({"state": {"columns": [15, 20]}}, "columns of 2 tensors, and layers have 4"),
        ({"state": {"columns": [15, 20, 9, 10]}}, "9 columns do not divide a tensor of 220 elements"),
        ({"state": {"columns": [240, 20, 220, 220]}}, 'no matrix of the model.* use larger chunks, or codec'),
        ({"round": {"packing": "strided"}}, 'packing = "strided" with round.fragments = 1'),
    ],
)  # fmt: skip
def test_contradictions_are_refused(changes: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        run(**changes)


@pytest.mark.parametrize("outer", [{"momentum": 0.0}, {"optimizer": "delayed-nesterov", "period": 2}])
def test_outer_optimizers_with_a_momentum_go_with_it(outer: dict[str, object]) -> None:
    assert run(outer=outer).codec.rank == 2


# --- a rank that is estimated anew

WINDOW = {"window": 4, "kept": 0.9}


def wide(**changes: Any) -> Manifest:
    """A run of one matrix of 64 by 64, in one chunk."""
    sections = {
        "codec": {"name": "lowrank", "rank": 8, **WINDOW, **changes.pop("codec", {})},
        "state": {"chunk": 4096, "layers": [[4096]], "columns": [64], **changes.pop("state", {})},
        "round": {"inner_steps": 40, **changes.pop("round", {})},
    }
    return Manifest.make("wide", parameters=4096, theta0="0" * 64, **sections, **changes)


def spectrum(values: list[float], seed: int = 0) -> np.ndarray:
    """A matrix of 64 by 64 with these singular values, as float32 [4096]."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((64, len(values))))[0] for _ in range(2))
    return np.ascontiguousarray((left * values) @ right.T, np.float32).reshape(-1)


@pytest.mark.parametrize(
    ("values", "kept", "rank"),
    [
        ([1.0], 0.9, 1),
        ([3.0, 3.0, 3.0], 0.9, 3),
        ([3.0, 3.0, 3.0], 0.6, 2),
        ([10.0, 1.0, 1.0, 1.0], 0.9, 1),
        ([10.0, 1.0, 1.0, 1.0], 0.985, 3),
        ([1.0] * 30, 0.9, 8),
        ([], 0.9, 8),
    ],
)
def test_the_estimate_is_the_rank_that_holds_the_share(values: list[float], kept: float, rank: int) -> None:
    layout = wide().layout
    assert isinstance(layout, LowRankLayout)
    assert estimate(layout, spectrum(values) if values else np.zeros(4096, np.float32), kept) == rank


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=12), st.floats(0.05, 0.99), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_estimate_is_the_same_everywhere_and_rises_with_the_share(
    values: list[float], kept: float, seed: int
) -> None:
    layout, momentum = wide().layout, spectrum(values, seed)
    assert isinstance(layout, LowRankLayout)
    found = []
    for implementation in (kernels.NUMPY, compiled()):
        with kernels.using(implementation):
            found.append([estimate(layout, momentum, share) for share in (kept / 2, kept)])
    assert found[0] == found[1]
    less, more = found[0]
    assert 1 <= less <= more <= 8
    # By numpy's own singular values, with what the power iterations leave between two that are close.
    energy = np.cumsum(np.sort(np.linalg.svd(momentum.reshape(64, 64).astype(np.float64))[1] ** 2)[::-1])
    least = int(np.searchsorted(energy, kept * energy[-1] * (1 - 1e-6))) + 1
    assert more >= min(least, 8)


def test_directions_of_a_lower_rank_are_the_first_ones() -> None:
    """So what the estimate says of a rank holds when it is in force."""
    momentum = spectrum([5.0, 4.0, 3.0, 2.0, 1.0])
    pieces = (Piece(0, 64, 64, 7),)
    high, low = (directions(segments(pieces, rank), momentum)[0] for rank in (8, 3))
    assert high is not None
    assert low is not None
    for a, b in zip(high, low, strict=True):
        assert a[: len(b)].tobytes() == b.tobytes()


def test_inner_steps_fall_with_the_rank() -> None:
    manifest = wide(round={"least_steps": 12})
    assert [manifest.inner_steps(rank) for rank in (0, 8, 7, 4, 3, 2, 1)] == [40, 40, 35, 20, 15, 12, 12]
    assert [wide().inner_steps(rank) for rank in (0, 8, 1)] == [40, 40, 40]


def seal_of(manifest: Manifest, base: Head, rank: int) -> Seal:
    members = [Member("p0", bytes(16), 0, 0, 4, 0.0, 0.0, True), Member("p1", bytes(16), 0, 0, 4, 0.0, 0.0, True)]
    due = deadline_seconds(members, manifest.layout.wire(0, rank), "lowrank", manifest.round.silence)
    return Seal(
        manifest.run_id, base.round + 1, 0, base, "p0", bytes(16), members, [], False, Limit(due, rank) if rank else due
    )


def test_the_rank_stands_in_the_seal_and_changes_after_a_window_alone() -> None:
    manifest = wide()
    layout = manifest.layout

    def follow(steps: int, before: int, rank: int) -> None:
        parent = Position(Head(bytes(32), steps + 1, 0, steps + 1, steps), 0, 0, before)
        seal = seal_of(manifest, parent.head, rank)
        body = make_body(seal, hash_of(seal), parent, bytes(32), [], manifest, layout)
        assert decode(encode(body), Body) == body
        check_body(body, manifest, layout)
        check_child(body, parent, manifest, layout)
        assert position_of(body, hash_of(body)).rank == rank

    follow(5, 6, 6)
    follow(8, 6, 3)
    follow(5, 0, 3)  # whoever begins with a checkpoint does not know what was before
    with pytest.raises(PeerMisbehaved, match="rank 3 after 6, and no estimate between"):
        follow(5, 6, 3)
    for rank in (0, 9):
        with pytest.raises(PeerMisbehaved, match=f"a rank of {rank} where the manifest allows none such"):
            follow(8, 6, rank)
    fixed = wide(codec={"window": 0, "kept": 0.0})
    check_seal(seal_of(fixed, START.head, 0), fixed, fixed.layout)
    with pytest.raises(PeerMisbehaved, match="a rank of 4 where the manifest allows none such"):
        check_seal(seal_of(fixed, START.head, 4), fixed, fixed.layout)


def test_a_seal_without_a_rank_is_what_it_was() -> None:
    fixed = wide(codec={"window": 0, "kept": 0.0})
    data = encode(seal_of(fixed, START.head, 0))
    assert data[-9] == 0xCB  # D, a float64
    assert decode(data, Seal).rank == 0
    assert decode(data, Seal).deadline == seal_of(fixed, START.head, 0).limit


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codec": {"kept": 0.0}}, "window = 4 needs kept, .* set kept to 0.9"),
        ({"codec": {"window": 0}}, "kept = 0.9 without window does nothing; .* set window to 10"),
        ({"codec": {"kept": 1.0}}, "kept"),
        ({"codec": {"name": "int4", "rank": 0}}, 'window = 4 with name = "int4"'),
        ({"round": {"least_steps": 41}}, "least_steps = 41 exceeds inner_steps = 40; the most is 40"),
        ({"round": {"least_steps": 9, "overlap": 10}}, "least_steps = 9 leaves .* the least is 10"),
        ({"round": {"least_steps": 9}, "codec": {"window": 0, "kept": 0.0}}, "least_steps = 9 without codec.window"),
    ],
)  # fmt: skip
def test_contradictions_of_estimates_are_refused(changes: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        wide(**changes)


def test_manifests_without_estimates_are_what_they_were() -> None:
    text = run().canonical().decode()
    assert not any(word in text for word in ("window", "kept", "least_steps"))
    manifest = wide(round={"least_steps": 12})
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    assert all(word in manifest.canonical().decode() for word in ("window", "kept", "least_steps"))
