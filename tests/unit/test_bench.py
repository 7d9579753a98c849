"""What the benchmarks share: rows that are taken up again, and rows that say why there are no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bench import _common, codecs, link


def test_a_row_is_taken_up_when_it_was_measured_so_and_here() -> None:
    settings = {"peers": 4, "chunk": 4096}
    row = settings | {"seconds": 1.0} | _common.stamp()
    assert {"commit", "machine", "date", "load"} < set(row)
    assert _common.same(row, settings)
    assert not _common.same(row, settings | {"chunk": 8192})
    assert not _common.same(row, settings | {"repeats": 3}), "a row of before that was said"
    assert not _common.same(row | {"commit": "0000000"}, settings)
    assert not _common.same(row | {"machine": "another"}, settings)


def test_an_implementation_that_fails_leaves_its_rows_and_a_note() -> None:
    def rows(error: Exception) -> Iterator[dict[str, Any]]:
        yield {"codec": "int8"}
        raise error

    for error, said in (
        (RuntimeError("no library for CUDA 13.9\nand how to build one"), "RuntimeError: no library for CUDA 13.9"),
        (ModuleNotFoundError("gone", name="bitsandbytes"), "bitsandbytes is not installed"),
        (AttributeError("no such kernel"), "AttributeError: no such kernel"),
    ):
        first, note = codecs.noted("bitsandbytes", lambda error=error: rows(error))  # type: ignore[misc]
        assert first == {"codec": "int8"}
        assert (note["implementation"], note["note"]) == ("bitsandbytes", said)


def test_a_round_of_a_trainer_that_encodes_is_measured_with_every_codec_that_it_has() -> None:
    rows = list(codecs.round_rows(["int8", "sparse", "lowrank", "float32"], 2 * codecs.CHUNK, 0.0, "cpu"))
    assert [row["codec"] for row in rows] == ["int8", "sparse", "float32"]
    assert all(row["round out"] > 0 and row["commit"] > 0 for row in rows)
    assert {row["shared memory"] for row in rows} == {"pageable"}


@pytest.mark.parametrize(("encoded", "most"), [((100, 100), 150), ((4, 100), 0.75 * 4 + 0.75 * 100)])
def test_the_ideal_time_counts_averages_in_the_codec_they_travel_in(encoded: tuple[int, int], most: float) -> None:
    answers = [{"began": 0.0, "whole": 1.0, "committed": 1.0, "cpu": 0, "daemon_cpu": 0,
                "parts": [(index, 8) for index in range(4)]}]  # fmt: skip
    row = link._row(answers, [8e-6] * 4, encoded, 3 * sum(encoded), [0] * 4)
    assert row["ideal"] == pytest.approx(most)
    assert row["bytes_ratio"] == 1.0


def test_more_of_the_averages_travel_from_whoever_has_the_larger_part() -> None:
    answers = [{"began": 0.0, "whole": 1.0, "committed": 1.0, "cpu": 0, "daemon_cpu": 0, "parts": [(0, 4), (1, 2)]}]
    row = link._row(answers, [8e-6] * 3, (4, 100), 1, [0] * 3)
    up = 4 / 3 + 2 * 2 / 3 * 100
    assert row["ideal"] == pytest.approx(up)
