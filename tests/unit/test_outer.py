from __future__ import annotations

import functools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from numpy.typing import NDArray

from atoll.protocol import kernels
from atoll.protocol.errors import ConfigError
from atoll.protocol.outer import outer_step

Floats = NDArray[np.float32]


@functools.cache
def compiled() -> kernels.Kernels:
    return kernels.compile_kernels(cache=True)


@pytest.fixture(params=["numpy", "numba"])
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with kernels.using(kernels.NUMPY if request.param == "numpy" else compiled()):
        yield


def rounded(exact: Fraction) -> Fraction:
    """To float32, half to even, subnormals kept; in integers alone."""
    if exact == 0:
        return exact
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return round(exact / step) * step


def by_the_book(
    g: float, b: float, m: float, lr: float, mu: float, kind: str, phase: int = 0, period: int = 1
) -> tuple[float, float]:
    G, B, M, L, U = (Fraction(float(np.float32(x))) for x in (g, b, m, lr, mu))
    if kind == "delayed-nesterov":
        share = Fraction(float(np.float32(1 / period)))
        M = rounded(share * M)
        B = rounded((rounded(U * B) if phase == 0 else B) + M)
        if phase == period - 1:
            M = rounded(M + rounded(U * B))
    if kind == "nesterov":
        B = rounded(rounded(U * B) + M)
        M = rounded(M + rounded(U * B))
    return float(rounded(G - rounded(L * M))), float(B)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("kind", ["nesterov", "sgd"])
@pytest.mark.parametrize(("lr", "mu"), [(0.7, 0.6), (1.0, 0.0), (0.3, 0.9)])
def test_matches_exact_arithmetic_rounded_at_every_operation(kind: str, lr: float, mu: float) -> None:
    n = 1000
    params, momentum, mean = kernels.probe(n, 1), kernels.probe(n, 2), kernels.probe(n, 3)
    expected = [by_the_book(*map(float, row), lr, mu, kind) for row in zip(params, momentum, mean, strict=True)]
    outer_step(params, momentum, mean, lr, mu, kind)
    assert [(float(g), float(b)) for g, b in zip(params, momentum, strict=True)] == expected


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("phase", "period"), [(0, 1), (0, 3), (1, 3), (2, 3), (0, 2), (1, 2)])
def test_delayed_nesterov_matches_exact_arithmetic(phase: int, period: int) -> None:
    params, momentum, mean = kernels.probe(300, 1), kernels.probe(300, 2), kernels.probe(300, 3)
    rows = list(zip(params, momentum, mean, strict=True))
    expected = [by_the_book(*map(float, row), 0.7, 0.6, "delayed-nesterov", phase, period) for row in rows]
    outer_step(params, momentum, mean, 0.7, 0.6, "delayed-nesterov", phase=phase, period=period)
    assert [(float(g), float(b)) for g, b in zip(params, momentum, strict=True)] == expected


@pytest.mark.usefixtures("_kernels")
def test_delayed_nesterov_of_period_one_is_nesterov() -> None:
    found = []
    for kind in ("nesterov", "delayed-nesterov"):
        params, momentum = kernels.probe(300, 1), kernels.probe(300, 2)
        outer_step(params, momentum, kernels.probe(300, 3), 0.7, 0.6, kind)
        found.append(params.tobytes() + momentum.tobytes())
    assert found[0] == found[1]


@pytest.mark.usefixtures("_kernels")
def test_vectors_of_delayed_nesterov() -> None:
    """Those of docs/wire/codecs.md."""

    def floats(words: str) -> Floats:
        return np.array([int(word, 16) for word in words.split()], np.uint32).view(np.float32)

    params, momentum = floats("3f800000 bf000000 3649539c"), floats("3dcccccd 3e4ccccd b58637bd")
    mean = floats("3dcccccd be4ccccd 33d6bf95")
    for phase, (g, b) in enumerate(
        [
            ("3f7a06d4 bee81b4e 3647c2bf", "3dbf258c 3d5a740e b5181d0a"),
            ("3f740da8 bed0369c 364631e2", "3e01b4e8 bc5a7410 b50f2a64"),
            ("3f5ce077 bea71de6 3652b8cb", "3e23d70a bda3d70b b50637be"),
        ]
    ):
        outer_step(params, momentum, mean, 0.7, 0.6, "delayed-nesterov", phase=phase, period=3)
        assert params.tobytes() == floats(g).tobytes()
        assert momentum.tobytes() == floats(b).tobytes()


def test_delayed_nesterov_is_the_paper_s() -> None:
    """Algorithm 3 of arXiv 2401.09135 with its two buffers, in float64; c = 0."""
    random = np.random.default_rng(0)
    lr, mu, n = 0.5, 0.9, 4
    g, m, delta = np.zeros(20), np.zeros(20), np.zeros(20)
    params, momentum = np.zeros(20, np.float32), np.zeros(20, np.float32)
    for t in range(3 * n):
        push = random.standard_normal(20)
        delta += push
        if (t + 1) % n == 0:
            m = mu * m + delta / n
            g -= lr * (mu * m + push / n)
            delta[:] = 0
        else:
            g -= lr * push / n
        outer_step(params, momentum, push.astype(np.float32), lr, mu, "delayed-nesterov", phase=t % n, period=n)
    assert np.allclose(params, g, atol=1e-5)
    assert np.allclose(momentum, m, atol=1e-5)


vectors = nps.arrays(np.float32, 70, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


@given(
    vectors,
    vectors,
    vectors,
    st.floats(0, 2),
    st.floats(0, 1),
    st.sampled_from(["nesterov", "delayed-nesterov", "sgd"]),
)
@settings(max_examples=100, deadline=None)
def test_both_implementations_give_the_same_bits(
    params: Floats, momentum: Floats, mean: Floats, lr: float, mu: float, kind: str
) -> None:
    found = []
    for implementation in (kernels.NUMPY, compiled()):
        with kernels.using(implementation):
            g, b, m = params.copy(), momentum.copy(), mean.copy()
            outer_step(g, b, m, lr, mu, kind)
            assert m.tobytes() == mean.tobytes()
            good = ~(np.isnan(g) | np.isnan(b))  # which NaN comes out of inf - inf is not specified
            found.append((good.tobytes(), g[good].tobytes(), b[good].tobytes()))
    assert found[0] == found[1]


@pytest.mark.usefixtures("_kernels")
def test_subnormals_survive() -> None:
    params, momentum = np.zeros(100, np.float32), np.zeros(100, np.float32)
    mean = np.full(100, 1e-40, np.float32)
    outer_step(params, momentum, mean, 0.5, 0.5)
    assert momentum.tolist() == mean.tolist()
    assert (params < 0).all()


@pytest.mark.usefixtures("_kernels")
def test_plain_averaging_at_rate_one() -> None:
    params, mean = kernels.probe(65, 1), kernels.probe(65, 2)
    momentum = np.zeros(65, np.float32)
    expected = params - mean
    outer_step(params, momentum, mean, 1.0, 0.0)
    assert params.tobytes() == expected.tobytes()
    assert momentum.tobytes() == (mean + np.float32(0)).tobytes()


def test_wrong_calls_are_refused() -> None:
    a = np.zeros(4, np.float32)
    frozen = kernels.frozen(np.zeros(4, np.float32))
    with pytest.raises(ConfigError, match="adam"):
        outer_step(a, a.copy(), a.copy(), 0.1, 0.1, "adam")
    with pytest.raises(ConfigError, match="finite"):
        outer_step(a, a.copy(), a.copy(), float("nan"), 0.1)
    for wrong in (np.zeros(5, np.float32), np.zeros(4), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]):
        with pytest.raises(ValueError, match="expected"):
            outer_step(a, a.copy(), wrong, 0.1, 0.1)
    with pytest.raises(ValueError, match="phase"):
        outer_step(a, a.copy(), a.copy(), 0.1, 0.1, "delayed-nesterov", phase=2, period=2)
    with pytest.raises(ValueError, match="writable"):
        outer_step(frozen, a.copy(), a.copy(), 0.1, 0.1)
    outer_step(a, a.copy(), frozen, 0.1, 0.1)
