from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol import kernels
from atoll.protocol.digest import blake3_digest
from atoll.protocol.errors import ConfigError, NonFinite, PeerMisbehaved
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.outer import outer_step
from atoll.protocol.state import GlobalState
from atoll.protocol.theta0 import TensorSpec, theta0

LAYOUT = ChunkLayout(300, 128)


def fresh() -> GlobalState:
    return GlobalState.fresh(LAYOUT, kernels.probe(300))


def means(seed: int) -> list[np.ndarray]:
    return [kernels.probe(LAYOUT.size(i), seed + i) for i in range(LAYOUT.count)]


def snapshot(state: GlobalState) -> bytes:
    return state.params.tobytes() + state.momentum.tobytes()


def test_digest_by_the_book() -> None:
    state = GlobalState(LAYOUT, kernels.probe(300, 1), kernels.probe(300, 2), fragment=3)
    hashes = []
    for start, stop in ((0, 128), (128, 256), (256, 300)):
        for vector in (state.params, state.momentum):
            hashes.append(blake3_digest(struct.pack(f"<{stop - start}f", *vector[start:stop])))
    assert state.hashes() == hashes
    expected = blake3_digest(b"atoll state 1\0", struct.pack("<QQQ", 300, 128, 3), *hashes)
    assert state.digest() == GlobalState.digest_of(LAYOUT, hashes, fragment=3) == expected
    assert GlobalState.digest_of(LAYOUT, hashes) != expected
    with pytest.raises(PeerMisbehaved, match="6 blob hashes"):
        GlobalState.digest_of(LAYOUT, hashes[:-1])
    with pytest.raises(PeerMisbehaved):
        GlobalState.digest_of(LAYOUT, [*hashes[:-1], b"short"])


def test_vectors_of_the_specification() -> None:
    """Those of docs/wire/codecs.md: theta0, the state digest and two outer steps."""

    def bits(array: np.ndarray) -> list[str]:
        return [f"{word:08x}" for word in array.view(np.uint32)]

    specs = [
        TensorSpec("a", (2, 2), "normal", 0.02),
        TensorSpec("b", (1,), "ones"),
        TensorSpec("c", (3,), "normal", 1.0),
    ]
    state = GlobalState.fresh(ChunkLayout(8, 5), theta0(20240229, specs))
    tail = ["3f951b03", "bf63556e", "becd29f6"]
    assert bits(state.params) == ["bb91f0cb", "bbe3405d", "bca77a4d", "3ca2ac76", "3f800000", *tail]
    assert state.digest().hex() == "ab90029b98e94677832e6d8f6b2fa508f87f7d96cea55d40bd8b51c35ae40516"
    first = np.array([0x3DCCCCCD, 0x3E4CCCCD, 0x3E99999A, 0x3ECCCCCD, 0x3F000000], np.uint32).view(np.float32)
    second = np.full(3, 0x000116C2, np.uint32).view(np.float32)
    state.apply([first, second], lr=0.7, mu=0.6)
    state.apply([first, None], lr=0.7, mu=0.6)
    assert bits(state.params) == ["be81dee8", "bf015da5", "bf449e8a", "bf7a18e5", "be7be76c", *tail]
    assert bits(state.momentum) == ["3e23d70a", "3ea3d70a", "3ef5c290", "3f23d70a", "3f4ccccd", *["000116c2"] * 3]
    assert state.digest().hex() == "2f02078a547b671a059fe129ff5a86a6605f2c53ebcaae31ebb852cd14dae458"


def test_apply_is_the_outer_step_of_every_chunk_and_leaves_others_alone() -> None:
    state, chunks = fresh(), means(5)
    params, momentum = state.params.copy(), state.momentum.copy()
    state.apply([chunks[0], None, chunks[2]], lr=0.7, mu=0.6)
    for i in (0, 2):
        span = LAYOUT.span(i)
        outer_step(params[span], momentum[span], chunks[i], 0.7, 0.6)
    assert snapshot(state) == params.tobytes() + momentum.tobytes()
    state.apply([None] * 3, lr=0.7, mu=0.6)
    assert snapshot(state) == params.tobytes() + momentum.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_apply_is_all_or_nothing(bad: float) -> None:
    state = fresh()
    before, digest = snapshot(state), state.digest()
    poisoned = means(5)
    poisoned[2][-1] = bad
    with pytest.raises(NonFinite, match="nothing was applied"):
        state.apply(poisoned, lr=0.7, mu=0.6)
    with pytest.raises(ValueError, match="3 chunks"):
        state.apply(means(5)[:2], lr=0.7, mu=0.6)
    for wrong in (np.zeros(43, np.float32), np.zeros(44), np.zeros(88, np.float32)[::2]):
        with pytest.raises(ValueError, match="expected chunk 2"):
            state.apply([*means(5)[:2], wrong], lr=0.7, mu=0.6)
    with pytest.raises(ConfigError):
        state.apply(means(5), lr=0.7, mu=0.6, kind="adam")
    assert snapshot(state) == before
    state.forget()
    assert state.digest() == digest


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2**32)), max_size=6))
@settings(max_examples=50, deadline=None)
def test_cached_hashes_are_those_of_the_bytes(steps: list[tuple[int, int]]) -> None:
    state = fresh()
    for mask, seed in steps:
        chunks = [chunk if mask >> i & 1 else None for i, chunk in enumerate(means(seed))]
        state.apply(chunks, lr=0.7, mu=0.6)
        assert state.hashes() == [blake3_digest(state.blob(i)) for i in range(state.blob_count)]


def test_only_what_changed_is_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    state = fresh()
    state.digest()
    hashed: list[int] = []
    original = GlobalState._hash
    monkeypatch.setattr(GlobalState, "_hash", lambda self, i: (hashed.append(i), original(self, i))[1])
    state.digest()
    assert hashed == []
    state.apply([None, means(1)[1], None], lr=0.7, mu=0.6)
    state.digest()
    assert hashed == [2, 3]


def test_hashing_in_parallel_gives_the_same() -> None:
    layout = ChunkLayout((9 << 20) + 5, 1 << 18)
    state = GlobalState.fresh(layout, np.arange(layout.parameters, dtype=np.float32))
    assert state.hashes() == [blake3_digest(state.blob(i)) for i in range(state.blob_count)]


def test_blobs_carry_a_state_over() -> None:
    source = fresh()
    source.apply(means(9), lr=0.7, mu=0.6)
    target = GlobalState.fresh(LAYOUT, np.zeros(300, np.float32))
    target.digest()
    for i in range(source.blob_count):
        data = source.blob(i)
        assert len(data) == 4 * LAYOUT.size(i // 2)
        target.set_blob(i, memoryview(b"x" + data)[1:])  # at an odd address
    assert snapshot(target) == snapshot(source)
    assert target.digest() == source.digest()


def test_wrong_blobs_are_refused_and_change_nothing() -> None:
    state = fresh()
    before = snapshot(state)
    good = state.blob(5)
    for wrong in (good[:-1], good + b"\0", b"", good[:-4] + struct.pack("<f", np.nan)):
        with pytest.raises(PeerMisbehaved, match="blob 5"):
            state.set_blob(5, wrong)
    for index in (-1, 6):
        with pytest.raises(IndexError):
            state.blob(index)
        with pytest.raises(IndexError):
            state.set_blob(index, good)
    assert snapshot(state) == before


def test_memory_of_the_caller_is_used_and_never_replaced() -> None:
    memory = np.frombuffer(bytearray(2400), np.float32)
    params, momentum = memory[:300], memory[300:]
    state = GlobalState(LAYOUT, params, momentum)
    state.apply(means(3), lr=0.7, mu=0.6)
    state.set_blob(0, bytes(512))
    assert state.params is params
    assert state.momentum is momentum
    assert np.count_nonzero(memory) > 300
    params[0] = 5
    state.forget()
    assert state.hashes()[0] == blake3_digest(state.blob(0))


def test_copies_are_independent() -> None:
    state = GlobalState(LAYOUT, kernels.probe(300), kernels.probe(300, 2), fragment=1)
    digest = state.digest()
    other = state.copy()
    assert other.digest() == digest
    other.apply(means(3), lr=0.7, mu=0.6)
    assert other.digest() != digest
    state.forget()
    assert state.digest() == digest


def test_wrong_memory_is_refused() -> None:
    good = np.zeros(300, np.float32)
    for wrong in (np.zeros(299, np.float32), np.zeros(300), np.zeros(600, np.float32)[::2], kernels.frozen(good)):
        with pytest.raises(ValueError, match="parameters"):
            GlobalState(LAYOUT, wrong, good)
        with pytest.raises(ValueError, match="momentum"):
            GlobalState(LAYOUT, good, wrong)
