from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.layout import ChunkLayout


@given(st.integers(1, 5000), st.integers(1, 600))
def test_spans_tile_the_vector(parameters: int, chunk: int) -> None:
    layout = ChunkLayout(parameters, chunk)
    spans = [layout.span(i) for i in range(layout.count)]
    assert spans[0].start == 0
    assert spans[-1].stop == parameters
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    assert [layout.size(i) for i in range(layout.count)] == [s.stop - s.start for s in spans]
    assert all(s.stop - s.start == chunk for s in spans[:-1])


@pytest.mark.parametrize("i", [-1, 3])
def test_unknown_chunks_are_refused(i: int) -> None:
    layout = ChunkLayout(130, 64)
    with pytest.raises(IndexError):
        layout.span(i)
    with pytest.raises(IndexError):
        layout.size(i)


@pytest.mark.parametrize(("parameters", "chunk"), [(0, 1), (1, 0), (-1, 4)])
def test_empty_layouts_are_refused(parameters: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        ChunkLayout(parameters, chunk)
