"""What each codec says that it loses at most, against what it loses."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.protocol.codecs import CODECS

from .test_codecs import ALL, SPECIAL, Floats, decoded, get_codec

AMPLITUDES = [1e-7, 1e-6, 1e-5, 1e-3, 1.0, 1e3, 1e6]
SHARES = {
    "float32": (0.0, 0.0), "int8": (0.0055, 0.0065), "int4": (0.090, 0.095), "lowrank": (0.090, 0.095),
    "sparse": (0.92, 0.96), "union": (0.0055, 0.0065),
}  # fmt: skip
"""What is lost of normally distributed values, as a share of their norm: at any amplitude the same."""


def lost(name: str, values: Floats) -> np.ndarray:
    back = decoded(get_codec(name), get_codec(name).encode(values), values.size)
    return np.abs(back.astype(np.float64) - values)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("vector", SPECIAL)
def test_no_value_is_off_by_more_than_the_codec_says(name: str, vector: str) -> None:
    values = SPECIAL[vector]
    assert lost(name, values).max() <= get_codec(name).error(float(np.abs(values).max()))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("amplitude", AMPLITUDES)
def test_at_any_amplitude(name: str, amplitude: float) -> None:
    values = (amplitude * np.random.default_rng(1).standard_normal(16 * 4096)).astype(np.float32)
    error = lost(name, values)
    assert error.max() <= get_codec(name).error(float(np.abs(values).max()))
    if name != "float16":
        # The bound is a share of the largest value, whatever that is; half precision has a floor and a ceiling.
        assert get_codec(name).error(amplitude) == pytest.approx(amplitude * get_codec(name).error(1.0))
        low, high = SHARES[name]
        assert low <= np.linalg.norm(error) / np.linalg.norm(values.astype(np.float64)) <= high


def test_the_bounds_are_those_of_the_specification() -> None:
    """docs/wire/codecs.md."""
    bounds = {name: codec.error(1.0) for name, codec in CODECS.items()}
    assert ALL["union"].error(1.0) == bounds["int8"]
    assert bounds == pytest.approx(
        {"float32": 0, "float16": 2**-11, "int8": 0.504 / 127, "int4": 19.7 / 127, "sparse": 1, "lowrank": 19.7 / 127}
    )
    assert CODECS["float16"].error(1e-7) == 2**-25
    assert CODECS["float16"].error(1e6) == 1e6 - 65504
