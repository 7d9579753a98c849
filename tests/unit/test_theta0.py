from __future__ import annotations

import functools
import struct
from fractions import Fraction

import numpy as np
import pytest

from atoll.protocol import kernels
from atoll.protocol.digest import blake3_digest
from atoll.protocol.theta0 import TensorSpec, elements, fill, theta0

MASK = 2**64 - 1
SPECS = (
    TensorSpec("embedding", (256, 16), "normal", 0.02),
    TensorSpec("norm", (16,), "ones"),
    TensorSpec("bias", (7,), "zeros"),
    TensorSpec("matrix", (3, 5, 7), "normal", 1e-39),
)


def single(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def by_the_book(seed: int, index: int, element: int, std: float) -> float:
    """docs/wire/codecs.md in plain Python integers; one rounding at each multiplication."""
    golden = 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        return z ^ z >> 31

    key = mix((mix((seed + golden) & MASK) + (index + 1) * golden) & MASK)
    total = 0
    for word in (2 * element, 2 * element + 1):
        bits = mix((key + (word + 1) * golden) & MASK)
        total += sum(bits >> shift & 0xFFFF for shift in (0, 16, 32, 48))
    unit = single((8 * (2**32 - 1) / 12) ** -0.5)
    factor = single(single(std) * unit)
    return single((total - 4 * 65535) * factor)  # the double product of two floats is exact: one rounding


@functools.cache
def backend(name: str) -> kernels.Kernels:
    return kernels.NUMPY if name == "numpy" else kernels.compile_kernels(cache=True)


@pytest.mark.parametrize("name", ["numpy", "numba"])
@pytest.mark.parametrize("seed", [0, 1, 20240229, MASK])
def test_matches_the_specification(name: str, seed: int) -> None:
    with kernels.using(backend(name)):
        vector = theta0(seed, SPECS)
    assert vector.dtype == np.float32
    start = 0
    for index, spec in enumerate(SPECS):
        piece = vector[start : start + spec.size]
        start += spec.size
        if spec.init == "normal":
            for element in (0, 1, 2, spec.size // 2, spec.size - 1):
                assert float(piece[element]) == by_the_book(seed, index, element, spec.std)
        else:
            assert set(piece.tolist()) == {1.0 if spec.init == "ones" else 0.0}


def test_known_answer() -> None:
    digest = blake3_digest(theta0(20240229, SPECS).astype("<f4").tobytes())
    assert digest.hex() == "5a9edd26a46b467d5dae489f683e52893b390db443bc558ea0ddf3dd77efd75c"


def test_any_piece_can_be_made_by_itself() -> None:
    spec = SPECS[0]
    whole = np.empty(spec.size, np.float32)
    fill(7, 0, spec, whole)
    for start, stop in ((0, 1), (1, 2), (17, 900), (spec.size - 1, spec.size), (5, 5)):
        piece = np.empty(stop - start, np.float32)
        fill(7, 0, spec, piece, start)
        assert piece.tobytes() == whole[start:stop].tobytes()


def test_writes_into_given_memory() -> None:
    out = np.full(elements(SPECS), np.nan, np.float32)
    assert theta0(1, SPECS, out) is out
    assert out.tobytes() == theta0(1, SPECS).tobytes()
    with pytest.raises(ValueError, match="vector of"):
        theta0(1, SPECS, out[1:])


def test_looks_normal_and_streams_differ() -> None:
    specs = [TensorSpec(name, (1 << 17,), "normal", 0.5) for name in ("a", "b")]
    a, b = theta0(3, specs).reshape(2, -1).astype(np.float64) / 0.5
    for x in (a, b):
        assert abs(x.mean()) < 0.01
        assert abs(x.std() - 1) < 0.01
        assert abs((x**3).mean()) < 0.03
        assert abs((x**4).mean() - 2.85) < 0.06  # the sum of eight uniforms: 3 - 6/5/8
        assert abs((x[1:] * x[:-1]).mean()) < 0.01
    assert abs((a * b).mean()) < 0.01
    other = theta0(4, specs).reshape(2, -1)[0].astype(np.float64) / 0.5
    assert abs((a * other).mean()) < 0.01


def test_unit_is_the_inverse_of_the_sums_deviation() -> None:
    from atoll.protocol.theta0 import UNIT

    variance = Fraction(8 * (2**32 - 1), 12)
    assert abs(Fraction(float(UNIT)) ** 2 * variance - 1) < Fraction(1, 2**22)


def test_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="unknown init"):
        TensorSpec("x", (1,), "uniform")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape"):
        TensorSpec("x", (1, 0), "zeros")
    with pytest.raises(ValueError, match="deviation"):
        TensorSpec("x", (1,), "normal", float("nan"))
    with pytest.raises(ValueError, match="seed"):
        theta0(-1, SPECS)
    with pytest.raises(ValueError, match="elements"):
        fill(0, 0, SPECS[1], np.empty(17, np.float32))
