"""The codecs in torch, on CPU tensors (and on CUDA where there is one), against the protocol's own bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node import codecs_torch
from atoll.protocol.codecs import get_codec

from .test_codecs import SPECIAL, Floats, long_vector, vectors

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NAMES = codecs_torch.SUPPORTED


def same(name: str, values: Floats, device: str, count: int = 1) -> None:
    """So many chunks with these values, the last with their negatives, as the protocol's codec has each."""
    chunks = np.stack([*[values] * (count - 1), -values])
    payload, sound = codecs_torch.encode_rows(name, torch.from_numpy(chunks).to(device))
    assert (payload.device.type, bool(sound)) == (device, True)
    back = codecs_torch.decode_rows(name, payload, values.size).cpu().numpy()
    for chunk, found, decoded in zip(chunks, payload.cpu().numpy(), back, strict=True):
        expected, exact = bytes(get_codec(name).encode(chunk)), np.empty_like(values)
        get_codec(name).decode(expected, values.size, exact)
        assert found.tobytes() == expected
        assert decoded.tobytes() == exact.tobytes()
    assert payload.shape == (count, codecs_torch.payload_size(name, values.size))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("vector", SPECIAL)
def test_the_same_bytes_for_special_vectors(device: str, name: str, vector: str) -> None:
    same(name, SPECIAL[vector], device)


@pytest.mark.parametrize("name", NAMES)
@given(values=vectors)
@settings(max_examples=80, deadline=None)
def test_the_same_bytes_for_any_vector(name: str, values: Floats) -> None:
    for device in DEVICES:
        same(name, values, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf, 1.9e19, -3.4e38])
@pytest.mark.parametrize("n", [1, 64, 65, 200, 4200])
def test_numbers_of_a_diverged_training_are_not_sent(device: str, name: str, bad: float, n: int) -> None:
    for place in {0, n // 2, n - 1}:
        values = torch.ones(3, n, device=device)
        assert bool(codecs_torch.encode_rows(name, values)[1])
        values[1, place] = bad
        assert not bool(codecs_torch.encode_rows(name, values)[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@given(
    n=st.one_of(st.integers(4000, 4300), st.integers(1, 9000)),
    count=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["normal", "heavy", "few values", "mostly zero", "probe", "rising"]),
    scale=st.sampled_from([1.0, 1e-7, 1e6, 1e-40]),
)
@settings(max_examples=30, deadline=None)
def test_the_same_bytes_for_long_vectors(
    device: str, name: str, n: int, count: int, seed: int, kind: str, scale: float
) -> None:
    values = long_vector(kind, n, seed)
    same(name, values if kind == "probe" else (scale * values).astype(np.float32), device, count)


@pytest.mark.parametrize("name", NAMES)
def test_flushed_subnormals_are_switched_on_again(name: str) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush")
    try:
        same(name, SPECIAL["subnormal1000"], "cpu")
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_device_is_checked_before_it_encodes(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = torch.device(device)
    assert codecs_torch.defect(name, place) == ""
    encode, decode = codecs_torch.encode_rows, codecs_torch.decode_rows

    def differs(which: str, rows: Callable[..., Any], said: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(codecs_torch, which, rows)
            assert said in codecs_torch.defect(name, place)

    def last(payload: torch.Tensor) -> torch.Tensor:
        payload[-1, -1] ^= 0x10
        return payload

    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nand more")

    def sound(rows: torch.Tensor, always: bool) -> torch.Tensor:
        return torch.full((), always, device=rows.device)

    differs("encode_rows", lambda name, rows: (last(encode(name, rows)[0]), encode(name, rows)[1]), "other bytes")
    differs("encode_rows", lambda name, rows: (encode(name, rows)[0], sound(rows, False)), "refuses")
    differs("encode_rows", lambda name, rows: (encode(name, rows)[0], sound(rows, True)), "NaN")
    differs("encode_rows", fails, "RuntimeError: CUDA error: no kernel image is available for execution on the device")
    differs("decode_rows", lambda name, payload, n: decode(name, payload, n) * 1.0000002, "other values")


def test_wrong_arguments_are_refused() -> None:
    good = torch.ones(2, 128)
    for wrong in (good.double(), good.view(256), good[:, ::2], good[:0]):
        with pytest.raises(ValueError, match="expected contiguous rows"):
            codecs_torch.encode_rows("int8", wrong)
    with pytest.raises(ValueError, match="int8, int4"):
        codecs_torch.encode_rows("lowrank", good)
    with pytest.raises(ValueError, match="int8, int4"):
        codecs_torch.decode_rows("lowrank", good, 128)
