from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from numpy.typing import NDArray
from pydantic import ValidationError

from atoll.protocol import kernels, kernels_numba
from atoll.protocol.codecs import AVERAGES, CODECS, MAX_MAGNITUDE, MAX_WEIGHT, Codec, averages_codec
from atoll.protocol.codecs import get_codec as named
from atoll.protocol.errors import ConfigError, NonFinite, PeerMisbehaved
from atoll.protocol.manifest import CodecSection

Floats = NDArray[np.float32]
ALL = {**CODECS, **AVERAGES}
NAMES = list(ALL)
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 1000, 4096, 4097, 3 * 4096 + 130)


@functools.cache
def compiled() -> kernels.Kernels:
    return kernels.compile_kernels(cache=True)


@pytest.fixture(params=["numpy", "numba"])
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with kernels.using(kernels.NUMPY if request.param == "numpy" else compiled()):
        yield


@pytest.fixture(params=NAMES)
def codec(request: pytest.FixtureRequest) -> Codec:
    return get_codec(request.param)


def get_codec(name: str) -> Codec:
    """Those of averages as well."""
    return ALL[name]


def single(value: float) -> float:
    return float(np.float32(value))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**64), max_value=2.0**64)
vectors = nps.arrays(
    np.float32,
    st.integers(1, 200),
    elements=st.one_of(finite, st.floats(-1, 1, width=32), st.floats(-(2.0**-120), 2.0**-120, width=32)),
    fill=st.sampled_from([0.0, -0.0, 1e-40, 1.0, 3e-6]),
)


def special() -> dict[str, Floats]:
    """Vectors that have broken quantizers before."""
    found: dict[str, Floats] = {}
    for n in LENGTHS:
        rng = np.random.default_rng(n)
        found[f"normal{n}"] = rng.standard_normal(n).astype(np.float32) * np.float32(1e-3)
        found[f"zeros{n}"] = np.zeros(n, np.float32)
        found[f"constant{n}"] = np.full(n, -0.1, np.float32)
        found[f"subnormal{n}"] = (rng.standard_normal(n) * 1e-40).astype(np.float32)
        found[f"smallest{n}"] = np.full(n, 1e-45, np.float32)
        found[f"huge{n}"] = np.full(n, MAX_MAGNITUDE, np.float32)
        found[f"outlier{n}"] = np.where(np.arange(n) % 64 == 5, 1e6, rng.standard_normal(n)).astype(np.float32)
        found[f"probe{n}"] = kernels.probe(n)
        found[f"lonely{n}"] = np.where(np.arange(n) == n // 2, np.float32(-3), np.float32(0))
        found[f"tied{n}"] = (rng.integers(-2, 3, n) / 4).astype(np.float32)
    found["negative zero"] = np.full(70, -0.0, np.float32)
    found["halves"] = (np.arange(-127, 128) / 2).astype(np.float32)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    found["every half"] = np.concatenate([halves, -halves])
    found["between halves"] = ((halves[1:].astype(np.float64) + halves[:-1]) / 2).astype(np.float32)
    found["just off"] = np.nextafter(found["between halves"], np.float32(0))
    found["just above"] = np.nextafter(found["between halves"], np.float32(1e9))
    found["around the largest half"] = np.array([65503, 65504, 65519.99, 65520, 65536, 1e9, -7e4], np.float32)
    return found


SPECIAL = special()


def decoded(codec: Codec, payload: bytes | bytearray | memoryview, n: int) -> Floats:
    out = np.full(n, np.nan, np.float32)
    codec.decode(payload, n, out)
    return out


def check_error(codec: Codec, values: Floats, back: Floats) -> None:
    exact, got = values.astype(np.float64), back.astype(np.float64)
    error = np.abs(exact - got)
    if codec.lossless:
        assert back.tobytes() == values.tobytes()
    elif codec.name == "float16":
        inside = np.abs(exact) <= 65504
        assert (error <= np.maximum(2.0**-25, np.abs(exact) * 2.0**-11))[inside].all()
        assert (np.abs(got) == 65504)[~inside].all()
        assert (np.sign(got) == np.sign(exact))[~inside].all()
    elif codec.name == "sparse":
        check_sparse_error(exact, got)
    elif codec.name == "union":
        check_union_error(exact, got)
    else:
        # half of the widest gap between levels
        widest = {"int8": 0.5, "int4": 19.5, "lowrank": 19.5}[codec.name]
        for start in range(0, values.size, 64):
            worst = np.abs(exact[start : start + 64]).max()
            # the scale is the largest magnitude over 127, rounded up by at most 2^-7 of itself
            bound = worst / 127 * widest * (1 + 2.0**-7) + 2.0**-133 * widest
            assert error[start : start + 64].max() <= bound * (1 + 1e-6)


def check_sparse_error(exact: NDArray[np.float64], got: NDArray[np.float64]) -> None:
    """One magnitude in 64 is kept, the largest; signs are right; sending never makes the residual larger."""
    for start in range(0, exact.size, 4096):
        x, y = exact[start : start + 4096], got[start : start + 4096]
        kept = -(-x.size // 64)
        (sent,) = np.nonzero(y)
        assert len(sent) <= kept
        assert len(set(np.abs(y[sent]))) <= 2
        # a zero may share the smaller magnitude with values that are not zero
        assert ((np.sign(x[sent]) == np.sign(y[sent])) | (x[sent] == 0)).all()
        if len(sent):
            assert np.abs(x[sent]).min() >= np.sort(np.abs(x))[-kept]
        assert np.sum((x - y) ** 2) <= np.sum(x**2)


def check_union_error(exact: NDArray[np.float64], got: NDArray[np.float64]) -> None:
    """What is zero stays so; the rest is rounded as by ``int8``, in blocks of its own."""
    assert not got[exact == 0].any()
    for start in range(0, exact.size, 4096):
        x, y = exact[start : start + 4096], got[start : start + 4096]
        x, y = x[x != 0], y[x != 0]
        for first in range(0, x.size, 64):
            block = x[first : first + 64]
            bound = (np.abs(block).max() / 127 * (1 + 2.0**-7) + 2.0**-133) / 2
            assert np.abs(block - y[first : first + 64]).max() <= bound * (1 + 1e-6)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", SPECIAL)
def test_round_trip_of_special_vectors(codec: Codec, name: str) -> None:
    values = SPECIAL[name]
    before = values.tobytes()
    payload = codec.encode(values)
    assert values.tobytes() == before
    if codec.fixed:
        assert len(payload) == codec.encoded_size(values.size)
    assert len(payload) <= codec.encoded_size(values.size)
    check_error(codec, values, decoded(codec, payload, values.size))


@pytest.mark.parametrize("name", SPECIAL)
def test_both_implementations_write_and_read_the_same_bytes(codec: Codec, name: str) -> None:
    compare(codec, SPECIAL[name], 123.456)


def compare(codec: Codec, values: Floats, weight: float) -> None:
    found = []
    for implementation in (kernels.NUMPY, compiled()):
        with kernels.using(implementation):
            payload = codec.encode(values)
            into = values[::-1].copy()
            codec.accumulate(payload, weight, into)
            found.append((bytes(payload), decoded(codec, payload, values.size).tobytes(), into.tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NAMES)
@given(values=vectors, weight=st.floats(0, MAX_WEIGHT))
@settings(max_examples=80, deadline=None)
@example(values=np.array([65520], np.float32), weight=1.0)
@example(values=np.array([2, 7] + 128 * [0], np.float32), weight=1.0)
def test_any_vector(name: str, values: Floats, weight: float) -> None:
    codec = get_codec(name)
    compare(codec, values, weight)
    payload = codec.encode(values)
    back = decoded(codec, payload, values.size)
    check_error(codec, values, back)
    into = np.arange(values.size, dtype=np.float32)
    expected = into + np.float32(weight) * back
    codec.accumulate(payload, weight, into)
    assert into.tobytes() == expected.tobytes()
    assert np.isfinite(into).all()


@given(
    n=st.one_of(st.integers(4000, 4300), st.integers(1, 20000)),
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["normal", "heavy", "few values", "mostly zero", "probe", "rising"]),
)
@settings(max_examples=60, deadline=None)
def test_any_stretches(n: int, seed: int, kind: str) -> None:
    """Long vectors, which the generator of vectors above does not make."""
    for name in ("sparse", "int4", "int8", "union"):
        compare(get_codec(name), long_vector(kind, n, seed), 2.5)


def long_vector(kind: str, n: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    values = {
        "normal": lambda: rng.standard_normal(n),
        "heavy": lambda: rng.standard_cauchy(n),
        "few values": lambda: rng.integers(-3, 4, n) / 8,
        "mostly zero": lambda: rng.standard_normal(n) * (rng.random(n) < 0.005),
        "probe": lambda: kernels.probe(n, seed),
        "rising": lambda: np.arange(n),
    }[kind]()
    return np.asarray(values, np.float32)


@given(values=vectors, data=st.data())
@settings(max_examples=80, deadline=None)
@pytest.mark.parametrize("name", ["sparse", "union"])
def test_any_damage_to_a_sparse_payload_is_read_or_refused_alike(
    name: str, values: Floats, data: st.DataObject
) -> None:
    """Random bytes are hardly ever valid indices; a payload with one damaged byte often is."""
    codec = get_codec(name)
    payload = bytearray(codec.encode(values))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    found: list[bytes | None] = []
    for implementation in (kernels.NUMPY, compiled()):
        with kernels.using(implementation):
            into = np.ones(values.size, np.float32)
            try:
                codec.accumulate(payload, 3.0, into)
            except PeerMisbehaved:
                assert (into == 1).all()
                found.append(None)
            else:
                assert np.isfinite(into).all()
                found.append(into.tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), n=st.integers(1, 200))
@settings(max_examples=80, deadline=None)
def test_any_bytes_are_read_or_refused_alike(name: str, data: st.DataObject, n: int) -> None:
    codec = get_codec(name)
    most = codec.encoded_size(n)
    payload = data.draw(st.binary(min_size=most if codec.fixed else 0, max_size=most))
    found: list[bytes | None] = []
    for implementation in (kernels.NUMPY, compiled()):
        with kernels.using(implementation):
            into = np.ones(n, np.float32)
            try:
                codec.accumulate(payload, 3.0, into)
            except PeerMisbehaved:
                assert (into == 1).all()
                found.append(None)
            else:
                assert np.isfinite(into).all()
                found.append(into.tobytes())
    assert found[0] == found[1]


@pytest.mark.usefixtures("_kernels")
def test_int8_by_the_book() -> None:
    """Scale and levels against exact rational arithmetic."""
    values = np.concatenate([kernels.probe(64 * 40 + 9, 3), SPECIAL["normal1000"], SPECIAL["subnormal129"]])
    payload = bytes(get_codec("int8").encode(values))
    n, blocks = values.size, -(-values.size // 64)
    assert len(payload) == n + 2 * blocks
    for block in range(blocks):
        part = [Fraction(float(v)) for v in values[block * 64 : block * 64 + 64]]
        worst = max(abs(v) for v in part)
        quotient = np.float32(float(worst)) / np.float32(127)
        (bits,) = struct.unpack_from("<H", payload, 2 * block)
        scale = Fraction(struct.unpack("<f", struct.pack("<I", bits << 16))[0])
        below = Fraction(struct.unpack("<f", struct.pack("<I", max(bits - 1, 0) << 16))[0])
        assert scale >= Fraction(float(quotient))
        assert below < Fraction(float(quotient)) or bits == 0
        for i, value in enumerate(part):
            level = struct.unpack_from("b", payload, 2 * blocks + block * 64 + i)[0]
            if scale == 0:
                assert level == 0
                continue
            ratio = value / scale
            if abs(ratio - math.floor(ratio) - Fraction(1, 2)) > Fraction(1, 2**16):  # else float32 division decides
                assert level == round(ratio)
            assert abs(level - ratio) <= Fraction(1, 2) + Fraction(1, 2**16)


NF4 = (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("length", [64 * 40, 64 * 40 + 9, 64 * 40 + 10])
def test_int4_by_the_book(length: int) -> None:
    values = np.concatenate([kernels.probe(length - 1000, 3), SPECIAL["normal1000"]])
    payload = bytes(get_codec("int4").encode(values))
    blocks = -(-length // 64)
    assert len(payload) == 2 * blocks + -(-length // 2)
    # the scales are those of int8
    assert payload[: 2 * blocks] == bytes(get_codec("int8").encode(values))[: 2 * blocks]
    for block in range(blocks):
        part = values[block * 64 : block * 64 + 64]
        (bits,) = struct.unpack_from("<H", payload, 2 * block)
        scale = np.float32(struct.unpack("<f", struct.pack("<I", bits << 16))[0]) if bits else np.float32(1)
        half = -(-len(part) // 2)
        octets = payload[2 * blocks + 32 * block : 2 * blocks + 32 * block + half]
        codes = [octet & 15 for octet in octets] + [octet >> 4 for octet in octets]
        for i, value in enumerate(part):
            ratio = Fraction(float(np.float32(value / scale)))
            assert NF4[codes[i]] == min(NF4, key=lambda level: (abs(level - ratio), abs(level)))
        assert codes[len(part) :] in ([], [7])


def sparse_by_the_book(values: Floats) -> bytes:
    """The specification, read aloud."""

    def bits_of(value: float) -> int:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])

    found = bytearray()
    for start in range(0, values.size, 4096):
        x = [float(v) for v in values[start : start + 4096]]
        k = -(-len(x) // 64)
        kept = sorted(sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))[:k])
        order = sorted((abs(x[i]) for i in kept), reverse=True)
        sums, total = [], 0.0
        for magnitude in order:
            total += magnitude
            sums.append(total)
        scores = []
        for c in range(1, k + 1):
            score = sums[c - 1] * sums[c - 1] / c
            if c < k:
                score += (total - sums[c - 1]) * (total - sums[c - 1]) / (k - c)
            scores.append(score)
        c = scores.index(max(scores)) + 1
        raw = bits_of(sums[c - 1] / c)
        upper = (raw + 0x3FFFF + (raw >> 19 & 1)) >> 19
        large = struct.unpack("<f", struct.pack("<I", upper << 19))[0]
        sixteenths = 0
        if upper and c < k:
            sixteenths = min(round((total - sums[c - 1]) / (k - c) * 16 / large), 15)
        boundary = (large + large * sixteenths / 16) / 2
        found += struct.pack("<H", upper << 4 | sixteenths)
        indices = sum(i << 12 * place for place, i in enumerate(kept))
        found += indices.to_bytes(-(-12 * k // 8), "little")
        codes = sum((bits_of(x[i]) >> 31 << 1 | (abs(x[i]) > boundary)) << 2 * place for place, i in enumerate(kept))
        found += codes.to_bytes(-(-2 * k // 8), "little")
    return bytes(found)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", SPECIAL)
def test_sparse_by_the_book(name: str) -> None:
    values = SPECIAL[name]
    assert bytes(get_codec("sparse").encode(values)) == sparse_by_the_book(values)


def test_sparse_is_small() -> None:
    codec = get_codec("sparse")
    assert codec.encoded_size(4096) == 114
    assert 4 * 4096 / codec.encoded_size(4096) >= 143
    assert 4 * (1 << 20) / codec.encoded_size(1 << 20) >= 143
    for n in range(1, 4097):
        kept = -(-n // 64)
        assert codec.encoded_size(4096 + n) == 114 + 2 + -(-12 * kept // 8) + -(-2 * kept // 8)


@pytest.mark.usefixtures("_kernels")
def test_zeros_that_sparse_had_to_keep_stay_zeros() -> None:
    values = np.zeros(4096, np.float32)
    values[[5, 4000]] = 3, -0.5
    back = decoded(get_codec("sparse"), get_codec("sparse").encode(values), 4096)
    assert back[5] == 3
    assert np.count_nonzero(back) <= 2


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("distribution", ["normal", "t3"])
def test_errors_are_those_of_the_documents(distribution: str) -> None:
    """docs/decisions-codecs.md."""
    rng = np.random.default_rng(1)
    n = 4096 * 32
    values = (rng.standard_normal(n) if distribution == "normal" else rng.standard_t(3, n)).astype(np.float32)
    for name, expected in {"int8": (0.0060, 0.011), "int4": (0.0923, 0.124)}.items():
        back = decoded(get_codec(name), get_codec(name).encode(values), n)
        relative = np.linalg.norm(back - values) / np.linalg.norm(values)
        assert relative == pytest.approx(expected[distribution == "t3"], rel=0.1)


def union_by_the_book(values: Floats) -> bytes:
    """The specification, read aloud."""
    found = bytearray()
    for start in range(0, values.size, 4096):
        x = values[start : start + 4096]
        m, kept = len(x), [i for i in range(len(x)) if x[i] != 0]
        c = len(kept)
        found += struct.pack("<H", c)
        if not c:
            continue
        size, b = min((c * b + c + (m - 1) // 2**b, b) for b in range(1, 13))
        if size < m:
            code = sum(1 << i // 2**b + place for place, i in enumerate(kept))
            code |= sum((i % 2**b) << b * place for place, i in enumerate(kept)) << c + (m - 1) // 2**b
        else:
            size, code = m, sum(1 << i for i in kept)
        found += code.to_bytes(-(-size // 8), "little") + get_codec("int8").encode(x[kept])
    return bytes(found)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", SPECIAL)
def test_union_by_the_book(name: str) -> None:
    values = SPECIAL[name]
    for every in (1, 2, 3, 16, 64, 1000):
        some = np.where(np.arange(values.size) % every == every // 2, values, np.float32(0))
        payload = bytes(get_codec("union").encode(some))
        assert payload == union_by_the_book(some)
        check_error(get_codec("union"), some, decoded(get_codec("union"), payload, some.size))


def averaged(rng: np.random.Generator, n: int, contributions: int) -> Floats:
    """The mean of so many sparse contributions."""
    sparse, total = get_codec("sparse"), np.zeros(n, np.float32)
    for _ in range(contributions):
        sparse.accumulate(sparse.encode(rng.standard_normal(n).astype(np.float32)), 1.0, total)
    total /= np.float32(contributions)
    return total


@given(
    n=st.one_of(st.integers(1, 300), st.integers(4000, 4300), st.integers(1, 20000)),
    contributions=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_averages_of_sparse_contributions_have_a_size_that_is_known_beforehand(
    n: int, contributions: int, seed: int
) -> None:
    codec, values = averages_codec("sparse"), averaged(np.random.default_rng(seed), n, contributions)
    payload = codec.encode(values)
    assert bytes(payload) == union_by_the_book(values)
    assert len(payload) <= codec.average_size(n, contributions) <= codec.encoded_size(n)
    codec.validate(payload, n, contributions)
    compare(codec, values, 2.5)
    check_error(codec, values, decoded(codec, payload, n))
    # D is computed as if a contribution took as long as an average
    assert get_codec("sparse").encoded_size(n) <= codec.average_size(n, 1)


def test_averages_of_sparse_contributions_are_small() -> None:
    """The figures of docs/wire/codecs.md."""
    codec = averages_codec("sparse")
    assert [codec.average_size(4096, count) for count in (1, 2, 4, 8)] == [132, 246, 458, 850]
    assert codec.average_size(4096, 64) == codec.average_size(4096, 256) == codec.encoded_size(4096) == 4738
    sizes = [codec.average_size(n, count) for count in (0, 1, 5, 64) for n in range(1, 9000)]
    assert all(size > 0 for size in sizes)
    for count in (1, 2, 5, 30, 64):
        grows = [codec.average_size(n, count) for n in range(1, 9000)]
        assert grows == sorted(grows)
    for n in (1, 63, 64, 65, 100, 1000, 4096, 5000):
        grows = [codec.average_size(n, count) for count in range(1, 70)]
        assert grows == sorted(grows)


@pytest.mark.usefixtures("_kernels")
def test_an_average_holds_no_more_than_its_contributors_can_have_brought() -> None:
    codec, values = averages_codec("sparse"), np.zeros(4096, np.float32)
    values[:128] = 1
    payload = codec.encode(values)
    for count in (2, 3, 256):
        codec.validate(payload, 4096, count)
    with pytest.raises(PeerMisbehaved):
        codec.validate(payload, 4096, 1)
    # beside a stretch that keeps less than it may, so that the length alone does not tell
    both = codec.encode(np.concatenate([values, np.zeros(4096, np.float32)]))
    assert len(both) <= codec.average_size(8192, 1)
    with pytest.raises(PeerMisbehaved):
        codec.validate(both, 8192, 1)


@given(
    n=st.one_of(st.integers(1, 200), st.integers(4090, 4200)),
    share=st.integers(1, 64),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_no_bytes_make_the_reader_of_averages_look_beyond_their_end(n: int, share: int, data: st.DataObject) -> None:
    """The compiled loops check no bounds. Here they run as Python, where every index is checked."""
    codec = averages_codec("sparse")
    if data.draw(st.booleans()):
        payload = bytearray(data.draw(st.binary(max_size=300)))
    else:
        seed, density = data.draw(st.integers(0, 2**32)), data.draw(st.sampled_from([0.003, 0.02, 0.1, 0.6, 1.0]))
        rng = np.random.default_rng(seed)
        values = (rng.standard_normal(n) * (rng.random(n) < density)).astype(np.float32)
        payload = bytearray(codec.encode(values))
        for _ in range(data.draw(st.integers(0, 3))):
            # mostly counts and indices, which come first
            at = data.draw(st.one_of(st.integers(0, min(len(payload), 12) - 1), st.integers(0, len(payload) - 1)))
            payload[at] = data.draw(st.integers(0, 255))
        payload = payload[: data.draw(st.integers(0, len(payload)))] if data.draw(st.booleans()) else payload
        payload += data.draw(st.binary(max_size=3))
    octets = kernels.frozen(np.frombuffer(bytes(payload), np.uint8))
    good = kernels_numba.union_valid(octets, n, 0x5C80, share)
    assert kernels.NUMPY.union_valid(octets, n, 0x5C80, share) == good
    assert compiled().union_valid(octets, n, 0x5C80, share) == good
    if good:
        found = [np.full(n, np.nan, np.float32) for _ in range(3)]
        kernels_numba.union_decode(octets, found[0])
        kernels.NUMPY.union_decode(octets, found[1])
        compiled().union_decode(octets, found[2])
        assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
        assert np.isfinite(found[0]).all()


def test_averages_of_sparse_contributions_travel_in_a_codec_that_keeps_them() -> None:
    assert averages_codec("sparse").name == "union"
    for name in ("float32", "float16", "int8", "int4"):
        assert averages_codec(name).name == name
    with pytest.raises(ConfigError, match="sparse"):
        averages_codec("dense")


def test_a_manifest_takes_these_codecs_and_refuses_sparse_without_error_feedback() -> None:
    for name, codec in CODECS.items():
        rank = 1 if name == "lowrank" else 0
        section = CodecSection(name=name, version=codec.version, rank=rank, error_feedback=1.0)  # type: ignore[arg-type]
        assert section.name == name
    with pytest.raises(ValidationError, match="error_feedback = 0"):
        CodecSection(name="sparse", version=2, error_feedback=0.0)


@pytest.mark.usefixtures("_kernels")
def test_vectors_of_the_specification() -> None:
    """Those of docs/wire/codecs.md."""

    def encoded(name: str, *values: float) -> str:
        return bytes(get_codec(name).encode(np.array(values, np.float32))).hex()

    long = [1.0, -1.0, 0.5, 0.00390625, -0.00390625, 0.01171875, *[0.0] * 58, 3e-6, -1e-6]
    assert encoded("int8", *long) == "023ccb32" + "7e823f000001" + "00" * 58 + "7fd6"
    assert encoded("int8", 127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5) == "803f" + "7f00020200fefe7e"
    assert encoded("int8", 1e-38, -5e-39, 1e-40) == "0100" + "6dca01"
    assert encoded("int8", 1e-45, 0) == "0000" + "0000"
    assert encoded("int8", 2.0**64, 1e-40) == "025c" + "7e00"
    assert encoded("int4", 127, 5, 15, -6, -6.1, 25.5, -107.5, 109.5) == "803f" + "6f9718e7"
    assert encoded("int4", 1, -1, 0.5, 2.0**-8, 0) == "023c" + "7f70" + "7c"
    assert encoded("int4", 1e-45, 0) == "0000" + "77"
    assert encoded("sparse", 0.5, -2, 1) == "0080" + "0100" + "03"
    assert encoded("sparse", 1, *[0.25] * 63, 8, *[0.25] * 64, -1) == "0282" + "0000048100" + "24"
    assert encoded("sparse", *[1] * 128) == "0f7f" + "001000" + "05"
    assert encoded("sparse", 0) == "0000" + "0000" + "00"
    assert encoded("union", 0, 127, 0, 0, -2.5, 0.5, 0, 0) == "0300" + "32" + "803f" + "7ffe00"
    assert encoded("union", *[0] * 5, 1, *[0] * 93, -0.5) == "0200" + "b10c" + "023c" + "7ec1"
    assert encoded("union", 0, -0.0, 0) == "0000"
    assert encoded("union", *[0] * 4096, 1e-45) == "0000" + "0100" + "01" + "0000" + "00"
    tiny = 2.0**-24
    found = encoded("float16", 65504, 65520, 1e9, -7e4, tiny, tiny / 2, 3 * tiny / 2, -1e-9, 1e-6, 3e-6)
    assert found == "ff7bff7bff7bfffb010000000200008011003200"
    assert encoded("float32", 1.0, -1.0, 3e-6) == "0000803f000080bf9c534936"


@pytest.mark.usefixtures("_kernels")
def test_int8_rounds_half_to_even() -> None:
    values = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5], np.float32)  # scale 1
    levels = np.frombuffer(get_codec("int8").encode(values), np.int8)[2:]
    assert levels.tolist() == [127, 0, 2, 2, 0, -2, -2, 126, -126]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("amplitude", [1e-30, 1e-7, 1e-3, 1.0, 1e6, 1e15])
def test_int8_is_as_accurate_at_any_amplitude(amplitude: float) -> None:
    values = np.random.default_rng(1).standard_normal(64 * 512).astype(np.float32) * np.float32(amplitude)
    codec = get_codec("int8")
    back = decoded(codec, codec.encode(values), values.size)
    relative = np.linalg.norm((back - values).astype(np.float64)) / np.linalg.norm(values.astype(np.float64))
    assert 0.0045 < relative < 0.0065


@pytest.mark.usefixtures("_kernels")
def test_float16_by_the_book() -> None:
    codec = get_codec("float16")
    for name in ("every half", "between halves", "just off", "just above"):
        values = SPECIAL[name]
        expected = b"".join(struct.pack("<e", max(-65504.0, min(65504.0, float(v)))) for v in values)
        assert bytes(codec.encode(values)) == expected
        assert decoded(codec, expected, values.size).tolist() == [x for (x,) in struct.iter_unpack("<e", expected)]
    assert bytes(codec.encode(SPECIAL["around the largest half"])) == bytes.fromhex("ff7bff7bff7bff7bff7bff7bfffb")


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.9e19, -3.4e38])
@pytest.mark.parametrize("n", [1, 64, 65, 200])
def test_numbers_of_a_diverged_training_are_not_sent(codec: Codec, bad: float, n: int) -> None:
    for place in {0, n // 2, n - 1}:
        values = np.ones(n, np.float32)
        values[place] = bad
        with pytest.raises(NonFinite, match="diverged"):
            codec.encode(values)


def poison() -> list[tuple[str, bytes]]:
    """Payloads of 65 values that no encoder writes."""
    found = []
    good = bytes(get_codec("float32").encode(np.ones(65, np.float32)))
    for bad in (math.nan, math.inf, -math.inf, 1.9e19):
        for place in (0, 64):
            found.append(("float32", good[: 4 * place] + struct.pack("<f", bad) + good[4 * place + 4 :]))
    good = bytes(get_codec("float16").encode(np.ones(65, np.float32)))
    for bits in (0x7C00, 0xFC00, 0x7C01, 0xFFFF):
        for place in (0, 64):
            found.append(("float16", good[: 2 * place] + struct.pack("<H", bits) + good[2 * place + 2 :]))
    good = bytes(get_codec("int8").encode(np.ones(65, np.float32)))
    for bits in (0x7F80, 0x7FC0, 0xFF80, 0x8000, 0xBC02, 0x5C80, 0x7F7F):
        for block in (0, 1):
            found.append(("int8", good[: 2 * block] + struct.pack("<H", bits) + good[2 * block + 2 :]))
    for place in (0, 63, 64):
        found.append(("int8", good[: 4 + place] + b"\x80" + good[5 + place :]))
    good = bytes(get_codec("int4").encode(np.ones(65, np.float32)))
    for bits in (0x7F80, 0x7FC0, 0xFF80, 0x8000, 0xBC02, 0x5C80, 0x7F7F):
        for block in (0, 1):
            found.append(("int4", good[: 2 * block] + struct.pack("<H", bits) + good[2 * block + 2 :]))
    found.append(("int4", good[:-1] + bytes([good[-1] & 0x0F])))
    # 65 values: two magnitudes, indices of 12 bits 0 and 1, codes
    word, codes = "0f7f", "05"
    # twice 0; 1 before 0; twice 1; 65, 66 and 4095 with 65 values
    for indices in ("000000", "010000", "011000", "001004", "002004", "00f0ff"):
        found.append(("sparse", bytes.fromhex(word + indices + codes)))
    for large in ("10bf", "00c0", "00ff", "ffff"):
        found.append(("sparse", bytes.fromhex(large + "001000" + codes)))
    found.append(("sparse", bytes.fromhex(word + "001000" + "15")))
    # 65 values of which 33 are kept: the count, a bit for each value, a scale, levels
    flags = "ff" * 4 + "00" * 4 + "01"
    full = "2100" + flags + "803f" + "01" * 33
    get_codec("union").validate(bytes.fromhex(full), 65)
    for wrong in (
        "4200" + full[4:], "2000" + full[4:], "2200" + full[4:], "ffff" + full[4:],  # another count
        full.replace(flags, "ff" * 4 + "00" * 4 + "02"), full.replace(flags, "ff" * 4 + "00" * 4 + "03"),  # spare bits
        full.replace(flags, "ff" * 4 + "00" * 5), full.replace(flags, "ff" * 4 + "01" * 5),  # one less, four more
        full.replace("803f", "805c"), full.replace("803f", "c07f"), full.replace("803f", "80ff"),
        full.replace("803f", "0080"), full[:-2] + "80", full + "00", full[:-2], full[:4], "00", "",
    ):  # fmt: skip
        found.append(("union", bytes.fromhex(wrong)))

    # two of 65: four low bits of each apart, behind six with the high ones
    def two(code: int) -> bytes:
        return b"\x02\0" + code.to_bytes(2, "little") + bytes.fromhex("803f" + "0102")

    get_codec("union").validate(two(0b100001 | 5 << 6 | 0 << 10), 65)  # 5 and 64
    get_codec("union").validate(two(0b000011 | 5 << 6 | 6 << 10), 65)
    for high, first, second in (
        (0b000011, 5, 5), (0b000011, 5, 4), (0b100001, 5, 1),  # twice, falling, 65
        (0b000001, 0, 1), (0b000111, 0, 1), (0b100011, 0, 1), (0, 0, 1),  # one, three, none
    ):  # fmt: skip
        found.append(("union", two(high | first << 6 | second << 10)))
    for spare in (14, 15):
        found.append(("union", two(0b100001 | 5 << 6 | 1 << spare)))
    return found


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("name", "payload"), poison())
def test_poison_is_refused_before_anything_is_written(name: str, payload: bytes) -> None:
    codec = get_codec(name)
    into = np.full(65, 7, np.float32)
    for call in (
        lambda: codec.validate(payload, 65),
        lambda: codec.decode(payload, 65, into),
        lambda: codec.accumulate(payload, 2.0, into),
    ):
        with pytest.raises(PeerMisbehaved):
            call()
    assert (into == 7).all()


@pytest.mark.usefixtures("_kernels")
def test_payloads_of_another_length_are_refused(codec: Codec) -> None:
    payload = bytes(codec.encode(np.ones(65, np.float32)))
    into = np.zeros(65, np.float32)
    for wrong in (b"", payload[:-1], payload + b"\0"):
        with pytest.raises(PeerMisbehaved, match="bytes"):
            codec.decode(wrong, 65, into)
        with pytest.raises(PeerMisbehaved, match="bytes"):
            codec.accumulate(wrong, 1.0, into)
    assert not into.any()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_payloads_may_begin_anywhere(codec: Codec, offset: int) -> None:
    values = SPECIAL["probe1000"]
    size = codec.encoded_size(1000)
    buffer = bytearray(b"\xaa" * (size + 8))
    written = codec.encode(values, memoryview(buffer)[offset:])
    assert isinstance(written, memoryview)
    payload = bytes(codec.encode(values))
    if codec.fixed:
        assert written.nbytes == size
    size = len(payload)
    assert bytes(written) == payload
    assert bytes(buffer) == b"\xaa" * offset + payload + b"\xaa" * (len(buffer) - offset - size)
    back = decoded(codec, memoryview(buffer)[offset : offset + size], 1000)
    assert back.tobytes() == decoded(codec, payload, 1000).tobytes()
    sums = [np.ones(1000, np.float32) for _ in range(2)]
    codec.accumulate(memoryview(bytes(buffer))[offset : offset + size], 5, sums[0])
    codec.accumulate(payload, 5, sums[1])
    assert sums[0].tobytes() == sums[1].tobytes()


def test_a_sum_of_the_largest_contributions_stays_finite(codec: Codec) -> None:
    payload = codec.encode(np.full(64, MAX_MAGNITUDE, np.float32))
    into = np.zeros(64, np.float32)
    for _ in range(256):
        codec.accumulate(payload, MAX_WEIGHT, into)
    assert np.isfinite(into).all()


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, 2.0**54])
def test_nonsense_weights_are_refused(codec: Codec, weight: float) -> None:
    into = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="weight"):
        codec.accumulate(codec.encode(into), weight, into)


def test_wrong_arrays_are_refused(codec: Codec) -> None:
    good = np.ones(8, np.float32)
    payload = codec.encode(good)
    frozen = good.copy()
    frozen.flags.writeable = False
    codec.encode(frozen)
    for wrong in (good.astype(np.float64), good.reshape(2, 4), np.ones(16, np.float32)[::2], good[:0]):
        with pytest.raises(ValueError, match="expected"):
            codec.encode(wrong)
        with pytest.raises(ValueError, match="expected"):
            codec.decode(payload, 8, wrong)
    for into in (frozen, np.ones(9, np.float32)):
        with pytest.raises(ValueError, match="expected"):
            codec.decode(payload, 8, into)
    with pytest.raises(ValueError, match="expected"):
        codec.accumulate(payload, 1.0, frozen)
    with pytest.raises(ValueError, match="takes"):
        codec.encode(good, bytearray(codec.encoded_size(8) - 1))


def test_unknown_codecs_are_named() -> None:
    for name in ("int9", "union"):
        with pytest.raises(ConfigError, match="int8"):
            named(name)
    assert {codec.lossless for codec in CODECS.values() if codec.name == "float32"} == {True}
    assert {name: codec.version for name, codec in ALL.items() if codec.version > 1} == {"sparse": 2}
