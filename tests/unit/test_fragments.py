"""How tensors are packed into fragments and cut into chunks, and what a peer counts for each."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.errors import ManifestError
from atoll.protocol.fragments import Accounts, early, make_layout, pack
from atoll.protocol.island import Progress, Snapshot
from atoll.protocol.layout import ChunkLayout, Chunks, FragmentedLayout
from atoll.protocol.manifest import Manifest
from atoll.protocol.overlap import left
from atoll.protocol.state import GlobalState

SPECIFICATION = Path(__file__).parents[2] / "docs/protocol.md"
LAYERS = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=7), min_size=1, max_size=9)
PACKINGS = st.sampled_from(["balanced", "strided"])


def cut(layers: list[list[int]], fragments: int, packing: str, chunk: int = 64) -> ChunkLayout:
    fragments = min(fragments, len(layers) if packing == "strided" else sum(map(len, layers)))
    return make_layout(sum(map(sum, layers)), chunk, layers, fragments, packing)  # type: ignore[arg-type]


def owners(layout: ChunkLayout) -> np.ndarray:
    """The fragment of each element; -1 where it is in none, and an error where in two."""
    found = np.full(layout.parameters, -1)
    for fragment in range(layout.fragments):
        part = layout.fragment(fragment)
        for index in range(part.count):
            assert (found[part.span(index)] == -1).all()
            found[part.span(index)] = fragment
    return found


@given(LAYERS, st.integers(1, 12), PACKINGS, st.sampled_from([64, 128, 1024]))
def test_fragments_are_a_partition_into_whole_tensors(
    layers: list[list[int]], fragments: int, packing: str, chunk: int
) -> None:
    layout = cut(layers, fragments, packing, chunk)
    found = owners(layout)
    assert set(found) == set(range(layout.fragments)), "every element is in one, and none is empty"
    sizes = list(chain.from_iterable(layers))
    chosen = pack(layers, layout.fragments, packing)  # type: ignore[arg-type]
    assert found.tolist() == list(chain.from_iterable([f] * size for f, size in zip(chosen, sizes, strict=True)))
    assert [layout.fragment(f).parameters for f in range(layout.fragments)] == np.bincount(found).tolist()


@given(LAYERS, st.integers(1, 12), PACKINGS, st.sampled_from([64, 128, 1024]))
def test_chunks_lie_in_one_piece_and_in_one_fragment(
    layers: list[list[int]], fragments: int, packing: str, chunk: int
) -> None:
    layout = cut(layers, fragments, packing, chunk)
    spans = [layout.span(i) for i in range(layout.count)]
    assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])]
    assert spans[-1].stop == layout.parameters
    assert all(0 < layout.size(i) <= chunk for i in range(layout.count))
    places = []
    for fragment in range(layout.fragments):
        part = layout.fragment(fragment)
        for index in range(part.count):
            place = layout.place(fragment, index)
            assert part.span(index) == layout.span(place)
            assert part.size(index) == layout.size(place)
            places.append(place)
        assert places[-part.count :] == sorted(places[-part.count :])
    assert sorted(places) == list(range(layout.count))
    for fragment in range(layout.fragments):
        mine = owners(layout) == fragment
        marked = np.zeros(layout.parameters, bool)
        stretches = layout.fragment(fragment).stretches()
        for part in stretches:
            marked[part] = True
        assert (marked == mine).all()
        assert len(stretches) == int((mine & ~np.roll(mine, 1)).sum()) + (mine.all() or (mine[0] and mine[-1]))
    # No more chunks than whole ones, and one more for each stretch of one fragment.
    runs = 1 + int((np.diff(owners(layout)) != 0).sum())
    assert layout.count <= layout.parameters // chunk + runs


@given(LAYERS, st.integers(1, 12))
def test_balanced_packing_is_balanced(layers: list[list[int]], fragments: int) -> None:
    layout = cut(layers, fragments, "balanced")
    loads = [layout.fragment(f).parameters for f in range(layout.fragments)]
    assert max(loads) - min(loads) <= max(chain.from_iterable(layers))


@given(LAYERS, st.integers(1, 12))
def test_strided_packing_takes_every_pth_layer(layers: list[list[int]], fragments: int) -> None:
    fragments = min(fragments, len(layers))
    chosen = iter(pack(layers, fragments, "strided"))
    assert [[next(chosen) for _ in layer] for layer in layers] == [
        [number % fragments] * len(layer) for number, layer in enumerate(layers)
    ]


def test_known_packings() -> None:
    """As docs/protocol.md works it out."""
    layers = [[300], [40, 200], [60, 260], [140]]
    assert pack(layers, 3, "balanced") == [0, 0, 1, 2, 2, 1]
    assert pack(layers, 3, "strided") == [0, 1, 1, 2, 2, 0]
    layout = make_layout(1000, 128, layers, 3, "balanced")
    assert [layout.fragment(f).parameters for f in range(3)] == [340, 340, 320]
    assert [(s.start, s.stop) for s in map(layout.span, range(layout.count))] == [
        (0, 128), (128, 256), (256, 340), (340, 468), (468, 540), (540, 668), (668, 796), (796, 860), (860, 988),
        (988, 1000),
    ]  # fmt: skip
    assert [layout.place(1, i) for i in range(layout.fragment(1).count)] == [3, 4, 8, 9]
    digest = GlobalState.fresh(layout, np.zeros(1000, np.float32)).digest().hex()
    assert digest in SPECIFICATION.read_text()
    strided = make_layout(1000, 128, layers, 3, "strided")
    assert [strided.place(0, i) for i in range(strided.fragment(0).count)] == [0, 1, 2, 8, 9]


def test_one_fragment_is_the_layout_that_there_was() -> None:
    layout = make_layout(1000, 128, [[300], [700]], 1, "balanced")
    assert layout == ChunkLayout(1000, 128) == layout.fragment(0)
    assert (layout.fragments, layout.place(0, 5), layout.due(17)) == (1, 5, 0)
    with pytest.raises(IndexError):
        layout.fragment(1)


def test_the_state_of_a_cut_model_has_a_digest_of_its_own_and_rehashes_what_changed() -> None:
    layout = make_layout(1000, 128, [[300], [40, 200], [60, 260], [140]], 3, "strided")
    params = np.linspace(-1, 1, 1000, dtype=np.float32)
    state = GlobalState.fresh(layout, params.copy())
    assert state.digest() != GlobalState.fresh(ChunkLayout(1000, 128), params.copy()).digest()
    before = state.hashes()
    part = layout.fragment(1)
    for index in range(part.count):
        state.step(layout.place(1, index), np.ones(part.size(index), np.float32), lr=1.0, mu=0.0)
    stale = [i for i, known in enumerate(state._hashes) if known is None]
    assert stale == sorted(2 * layout.place(1, i) + j for i in range(part.count) for j in range(2))
    after = state.hashes()
    mine = {layout.place(1, i) for i in range(part.count)}
    assert [i for i in range(len(after)) if after[i] != before[i]] == stale
    assert all((np.abs(params - state.params)[layout.span(i)] > 0).all() == (i in mine) for i in range(layout.count))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pack([[3], [4]], 3, "balanced"), "fragments = 3 exceeds the 2 tensors"),
        (lambda: pack([[3, 1], [4]], 3, "strided"), "fragments = 3 exceeds the 2 layers"),
        (lambda: pack([[3, 0]], 1, "balanced"), "at least one element"),
        (lambda: make_layout(9, 4, [[3], [4]], 2, "balanced"), "do not make a model of 9"),
        (lambda: Chunks(4, 2, ((0, 3), (3, 4))), "do not make"),
        (lambda: FragmentedLayout(4, 4, ((0, 3), (3, 4)), ((0, 1), ())), "no fragment is empty"),
        (lambda: FragmentedLayout(4, 4, ((0, 3), (3, 4)), ((0,), (0,))), "in one fragment"),
        (lambda: FragmentedLayout(2, 4, ((0, 1), (3, 4)), ((0,), (1,))), "follow one another"),
    ],
)
def test_what_cannot_be_cut(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]


# --- counting


@given(st.integers(1, 64), st.integers(0, 63), st.data())
def test_first_contributions_are_spread_over_the_round(fragments: int, due: int, data: st.DataObject) -> None:
    steps = data.draw(st.integers(fragments, 500))
    due %= fragments
    turns = [steps - early((due + turn) % fragments, due, fragments, steps) for turn in range(fragments)]
    assert turns == [(turn + 1) * steps // fragments for turn in range(fragments)]
    assert turns[0] >= 1
    assert turns[-1] == steps


class Counted:
    """An island's counters beside a ledger of steps: for each fragment, which have been handed over."""

    def __init__(self, layout: ChunkLayout) -> None:
        self.layout = layout
        self.accounts = Accounts(layout, 24)
        self.steps = 0
        self.handed = [0] * layout.fragments
        self.done = 0

    @property
    def now(self) -> Snapshot:
        return Snapshot(self.steps, 10 * self.steps, 2 * self.steps, 0)

    def train(self, steps: int) -> None:
        self.steps += steps
        self.done += steps

    def commit(self, fragment: int, ahead: int, *, overwrite: bool) -> None:
        frozen, brought = self.now, self.done
        self.train(ahead)
        self.accounts.commit(fragment, 1.0, self.now, frozen, overwrite=overwrite)
        self.steps = left(self.steps, 1.0, frozen.steps)
        self.handed[fragment] = self.done if overwrite else brought

    def check(self) -> None:
        progress = Progress(self.steps, 10 * self.steps, 2 * self.steps)
        for fragment, handed in enumerate(self.handed):
            found = self.accounts.progress(progress, fragment)
            assert (found.steps, found.tokens, found.units) == tuple((self.done - handed) * k for k in (1, 10, 2))
            snapshot = self.accounts.snapshot(self.now, fragment)
            assert (snapshot.steps, snapshot.tokens) == (found.steps, found.tokens)
        shares = [self.layout.fragment(f).parameters / self.layout.parameters for f in range(len(self.handed))]
        unmerged = sum(10 * (self.done - handed) * share for handed, share in zip(self.handed, shares, strict=True))
        assert self.accounts.unmerged(progress) == round(unmerged)


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 3), st.booleans())))
def test_each_fragment_counts_the_steps_since_its_own_last_contribution(
    fragments: int, rounds: list[tuple[int, int, int, bool]]
) -> None:
    counted = Counted(make_layout(500, 64, [[100]] * 5, fragments, "strided"))
    for fragment, steps, ahead, overwrite in rounds:
        counted.train(steps)
        counted.check()
        counted.commit(fragment % fragments, ahead, overwrite=overwrite)
        counted.check()


SHARES = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))


@given(
    st.integers(2, 5),
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 90), st.integers(0, 30), SHARES, st.booleans(), st.booleans())
    ),
)
def test_any_share_of_a_contribution(fragments: int, rounds: list[tuple[int, int, int, float, bool, bool]]) -> None:
    """What one fragment hands over changes nothing about the others; of its own the share goes."""
    accounts, steps = Accounts(make_layout(500, 64, [[100]] * 5, fragments, "strided"), 24), 0
    for fragment, trained, ahead, share, paused, overwrite in rounds:
        fragment %= fragments
        steps += trained
        frozen = Snapshot(steps, 10 * steps, 2 * steps, 0)
        steps += 0 if paused else ahead
        now = Progress(steps, 10 * steps, 2 * steps)
        before = [accounts.progress(now, number) for number in range(fragments)]
        brought = accounts.snapshot(frozen, fragment)
        of = None if paused else frozen
        accounts.commit(fragment, share, Snapshot(now.steps, now.tokens, now.units, 0), of, overwrite=overwrite)
        counts = [left(getattr(now, n), share, getattr(of, n) if of else None) for n in ("steps", "tokens", "units")]
        after = [accounts.progress(Progress(*counts), number) for number in range(fragments)]
        assert [a for n, a in enumerate(after) if n != fragment] == [b for n, b in enumerate(before) if n != fragment]
        for name in ("steps", "tokens", "units"):
            whole, at_freeze = getattr(before[fragment], name), getattr(brought, name)
            expected = left(whole, share, None if paused or overwrite else at_freeze)
            assert getattr(after[fragment], name) == expected >= 0
        steps = counts[0]
        # What the island counts is rounded by itself; from here on, three counters that go together.
        accounts._more = [type(more)(more.steps, 10 * more.steps, 2 * more.steps) for more in accounts._more]


def test_what_an_island_had_learnt_when_it_died_counts_for_no_fragment() -> None:
    """With overwrite the steps since the freeze are lost to one fragment; if the device dies then, to all."""
    accounts = Accounts(make_layout(500, 64, [[100]] * 5, 2, "strided"), 24)
    accounts.commit(0, 1.0, Snapshot(17, 170, 34, 0), Snapshot(12, 120, 24, 0), overwrite=True)
    alive = Progress(5, 50, 10)
    assert [accounts.progress(alive, f).steps for f in (0, 1)] == [0, 17]
    dead = Progress(0, 0, 0)
    assert [accounts.progress(dead, f).steps for f in (0, 1)] == [0, 12]


@given(st.floats(0, 1), st.integers(0, 1000), st.integers(0, 1000))
def test_with_one_fragment_the_island_counts_alone(share: float, steps: int, ahead: int) -> None:
    accounts = Accounts(ChunkLayout(500, 64), 24)
    frozen, now = Snapshot(steps, 7 * steps, steps, 0), Snapshot(steps + ahead, 7 * (steps + ahead), steps + ahead, 0)
    for of in (None, frozen):
        accounts.commit(0, share, now, of)
        assert accounts.progress(Progress(3, 4, 5), 0) == Progress(3, 4, 5)
        assert accounts.wanting(3, 0) == 21


# --- the manifest


def made(**changes: dict[str, object]) -> Manifest:
    round_ = {"inner_steps": 20, "fragments": 3, **changes.pop("round", {})}
    state = {"chunk": 128, "layers": [[300], [40, 200], [60, 260], [140]], **changes.pop("state", {})}
    return Manifest.make("x", parameters=1000, theta0="0" * 64, round=round_, state=state, **changes)


def test_a_manifest_says_how_the_model_is_cut() -> None:
    manifest = made(budget={"rounds": 7})
    assert manifest.layout == make_layout(1000, 128, manifest.state.layers, 3, "balanced")
    assert manifest.outer_steps == 7 * 3 + 2
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    assert made(round={"packing": "strided"}, budget={"rounds": 7}).run_id != manifest.run_id
    assert "fragments" in manifest.canonical().decode()


def test_a_manifest_without_fragments_is_what_it_was() -> None:
    plain = made(round={"fragments": 1}, state={"layers": []})
    assert plain.layout == ChunkLayout(1000, 128)
    assert plain.outer_steps == plain.budget.rounds
    assert not any(word in plain.canonical().decode() for word in ("fragments", "packing", "layers"))
    # Nor are they in the file, which is what a peer that does not know them is served.
    names = [line.split(" ")[0] for line in plain.to_toml().splitlines()]
    assert not {"fragments", "packing", "layers"} & {*names}
    explicit = plain.to_toml().replace("[round]", '[round]\nfragments = 1\npacking = "balanced"')
    assert Manifest.from_toml(explicit) == plain == Manifest.from_toml(plain.to_toml())
    assert Manifest.from_toml(explicit).run_id == plain.run_id


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"round": {"fragments": 7}}, "exceeds the 6 tensors of the model .* the most is 6"),
        ({"round": {"fragments": 5, "packing": "strided"}}, "exceeds the 4 layers of the model .* the most is 4"),
        ({"round": {"inner_steps": 2}}, "fragments = 3 exceeds inner_steps = 2.* the most is 2"),
        ({"round": {"overlap": 21}}, "overlap = 21 exceeds inner_steps = 20: .* the longest is 20"),
        ({"round": {"overlap": 20, "max_lease": 39}}, "max_lease = 39 is below inner_steps . overlap = 40"),
        ({"round": {"overlap": 7, "by": "time", "every": 9, "grace": 0.0}}, "several .* at once.* the longest is 6"),
        ({"round": {"fragments": 1}}, "state.layers with round.fragments = 1 does nothing"),
        ({"round": {"fragments": 1, "packing": "strided"}, "state": {"layers": []}}, 'packing = "strided" with'),
        ({"state": {"layers": []}}, "needs state.layers"),
        ({"state": {"layers": [[300], [40]]}}, "layers of 340 elements together, and parameters = 1000"),
        ({"state": {"layers": [[300], []]}}, "layers"),
        ({"round": {"fragments": 0}}, "fragments"),
        ({"round": {"packing": "tight"}}, "packing"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        made(**changes)
