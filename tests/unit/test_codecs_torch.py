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
from atoll.protocol.errors import NonFinite, PeerMisbehaved
from atoll.protocol.layout import ChunkLayout

from .test_codecs import SPECIAL, Floats, poison, vectors

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NAMES = codecs_torch.SUPPORTED


def same(name: str, values: Floats, device: str) -> None:
    expected = bytes(get_codec(name).encode(values))
    payload = codecs_torch.encode(name, torch.from_numpy(values.copy()).to(device))
    assert payload.device.type == device
    assert payload.cpu().numpy().tobytes() == expected
    back = np.empty_like(values)
    get_codec(name).decode(expected, values.size, back)
    assert codecs_torch.decode(name, payload, values.size).cpu().numpy().tobytes() == back.tobytes()


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


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), n=st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_read_or_refused_alike(name: str, data: st.DataObject, n: int) -> None:
    codec = get_codec(name)
    payload = data.draw(st.binary(min_size=codec.encoded_size(n), max_size=codec.encoded_size(n)))
    tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    out = np.empty(n, np.float32)
    try:
        codec.decode(payload, n, out)
    except PeerMisbehaved:
        with pytest.raises(PeerMisbehaved):
            codecs_torch.decode(name, tensor, n)
    else:
        assert codecs_torch.decode(name, tensor, n).numpy().tobytes() == out.tobytes()


@pytest.mark.parametrize(("name", "payload"), [case for case in poison() if case[0] in NAMES])
def test_poison_is_refused(name: str, payload: bytes) -> None:
    with pytest.raises(PeerMisbehaved):
        codecs_torch.decode(name, torch.frombuffer(bytearray(payload), dtype=torch.uint8), 65)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf, 1.9e19, -3.4e38])
@pytest.mark.parametrize("n", [1, 64, 65, 200])
def test_numbers_of_a_diverged_training_are_not_sent(device: str, name: str, bad: float, n: int) -> None:
    for place in {0, n // 2, n - 1}:
        values = torch.ones(n, device=device)
        values[place] = bad
        with pytest.raises(NonFinite, match="diverged"):
            codecs_torch.encode(name, values)
        with pytest.raises(NonFinite, match="diverged"):
            list(codecs_torch.encode_chunks(name, values, ChunkLayout(n, 64)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [5, 1024, 4096, 4097, 10 * 1024 + 130, 16 * 1024])
@pytest.mark.parametrize("piece", [512, 3000, 1 << 24])
def test_all_chunks_of_a_fragment(device: str, name: str, n: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs_torch, "PIECE", piece)
    values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    layout = ChunkLayout(n, 1024)
    codec = get_codec(name)
    found = list(codecs_torch.encode_chunks(name, torch.from_numpy(values).to(device), layout))
    assert [index for index, _ in found] == list(range(layout.count))
    for index, payload in found:
        assert bytes(payload) == bytes(codec.encode(values[layout.span(index)]))


def test_a_parameter_that_wants_gradients_is_encoded_like_any_tensor() -> None:
    values = torch.randn(100, requires_grad=True)
    assert not codecs_torch.encode("int8", values).requires_grad


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
    good = torch.ones(128)
    for wrong in (good.double(), good.view(2, 64), good[::2], good[:0]):
        with pytest.raises(ValueError, match="expected"):
            codecs_torch.encode("int8", wrong)
    with pytest.raises(ValueError, match="int8, int4"):
        codecs_torch.encode("sparse", good)
    with pytest.raises(ValueError, match="expected 100"):
        list(codecs_torch.encode_chunks("int8", good, ChunkLayout(100, 64)))
    with pytest.raises(ValueError, match="expected"):
        codecs_torch.decode("int8", good, 4)
    with pytest.raises(PeerMisbehaved, match="takes"):
        codecs_torch.decode("int8", torch.zeros(3, dtype=torch.uint8), 4)
