"""Sample units map one to one to windows of text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.data.units import Units, permute


@given(st.integers(1, 5000), st.integers(0, 2**63 - 1), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_permute_is_one_to_one(size: int, seed: int, epoch: int) -> None:
    out = permute(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(out), np.arange(size))


@given(st.integers(20, 20_000), st.integers(8, 64), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_no_window_repeats_within_an_epoch_and_none_overlaps(length: int, context: int, seed: int) -> None:
    if length < context + 1:
        length = context + 1
    units = Units(length, context, seed)
    for epoch in range(3):
        starts = units.starts(np.arange(epoch * units.windows, (epoch + 1) * units.windows))
        assert starts.min() >= 0
        assert starts.max() + context + 1 <= length
        assert (np.diff(np.sort(starts)) == context).all()


def test_neighbours_lie_apart_and_epochs_differ() -> None:
    units = Units(1_000_000, 64, 0)
    starts = units.starts(np.arange(3 * units.windows))
    assert np.abs(np.diff(starts)).mean() > 100_000
    first, second = starts[: units.windows], starts[units.windows : 2 * units.windows]
    assert not np.array_equal(first, second)
    assert len({int(s) % 64 for s in (starts[0], starts[units.windows], starts[2 * units.windows])}) > 1


def test_the_mapping_is_part_of_the_run() -> None:
    """Peers of one run must agree on it, whatever their version of numpy: known answers."""
    assert Units(100_000, 64, 7).starts(np.array([0, 1, 2, 1561, 5000])).tolist() == KNOWN


KNOWN = [85176, 49144, 96184, 67914, 74395]


def test_a_batch_holds_the_windows() -> None:
    text = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    units = Units(len(text), 10, 3)
    batch = units.batch(text, np.array([5, 0]))
    assert batch.shape == (2, 11)
    assert batch.dtype == np.int64
    start = int(units.starts(np.array([5]))[0])
    assert batch[0].tolist() == text[start : start + 11].tolist()


def test_huge_units_are_fine() -> None:
    units = Units(1000, 10, 0)
    assert 0 <= int(units.starts(np.array([2**62]))[0]) <= 989


@pytest.mark.parametrize("length", [11, 12, 20, 21])
def test_the_shortest_texts_have_a_window(length: int) -> None:
    units = Units(length, 10, 0)
    assert units.windows >= 1
    assert (units.starts(np.arange(20)) + 11 <= length).all()
