"""All codecs but ``lowrank`` on the device where the values are, so that only encoded bytes leave a GPU.

The same bytes as :mod:`atoll.protocol.codecs` writes (docs/wire/codecs.md), from torch operations that round as IEEE
754 demands on CPU and CUDA alike: one division, comparisons, integers. Two traps are avoided. Dividing a CUDA tensor by
a Python number multiplies by its reciprocal, so every divisor here is a tensor on the device. And torch.compile may
contract and reassociate, so nothing here is compiled.

What the reducer and the outer step compute stays on the CPU, in the kernels of the protocol.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from atoll.protocol.codecs import get_codec
from atoll.protocol.codecs.base import LIMIT_BITS
from atoll.protocol.codecs.float16 import MOST
from atoll.protocol.codecs.int8 import BLOCK
from atoll.protocol.kernels import probe, subnormals_on
from atoll.protocol.kernels_numba import INT4_LEVELS

from . import sparse_torch

SUPPORTED = ("int8", "int4", "sparse", "float16", "float32")

_LEVELS = [float(level) for level in INT4_LEVELS]


def encode_rows(name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Chunks of one size, float32 [count, n] and contiguous, as payloads uint8 [count, ``payload_size``], and whether
    the codec takes all of them (a bool tensor); where not, the payloads are rubbish. Nothing here waits for the
    device."""
    _supported(name)
    if rows.dtype != torch.float32 or rows.ndim != 2 or not rows.is_contiguous() or not rows.numel():
        raise ValueError(f"expected contiguous rows of float32, found {rows.dtype} of {tuple(rows.shape)}")
    payload, worst = _encoded(name, rows)
    return payload, worst <= int(LIMIT_BITS)


def decode_rows(name: str, payload: Tensor, n: int) -> Tensor:
    """What :func:`encode_rows` made, decoded again: float32 [count, n]. For own payloads: nothing is checked."""
    _supported(name)
    _subnormals(payload)
    return _decoded(name, payload, n)


def defect(name: str, device: torch.device) -> str:
    """What keeps this device from encoding: an error, or other bits than the protocol's; empty when nothing does.

    Some ten thousand values of all magnitudes are encoded and decoded there, and compared; it takes milliseconds.
    """
    codec = get_codec(name)
    try:
        for count, n in ((2, 5000), (1, BLOCK), (1, 4 * BLOCK + 37)):
            values = probe(count * n, n).reshape(count, n)
            payload, sound = encode_rows(name, torch.from_numpy(values.copy()).to(device))
            back = decode_rows(name, payload, n).cpu().numpy()
            if not bool(sound):
                return f"{device} refuses to encode sound values as {name}"
            for row, given, found in zip(values, payload.cpu().numpy(), back, strict=True):
                expected, exact = bytes(codec.encode(row)), np.empty(n, np.float32)
                codec.decode(expected, n, exact)
                if given.tobytes() != expected:
                    return f"{device} makes other bytes of {name} than the protocol"
                if found.tobytes() != exact.tobytes():
                    return f"{device} reads other values from {name} than the protocol"
            spoilt = torch.from_numpy(values.copy()).to(device)
            spoilt[-1, -1] = torch.nan
            if bool(encode_rows(name, spoilt)[1]):
                return f"{device} takes NaN for a number to encode as {name}"
    except Exception as error:  # whatever it is, the host can still encode
        return f"{device} cannot encode {name}: {type(error).__name__}: {' '.join(str(error).splitlines()[:1])}"
    return ""


def payload_size(name: str, n: int) -> int:
    """Bytes of a payload of ``n`` values."""
    if name == "sparse":
        return sparse_torch.payload_size(n)
    blocks = -(-n // BLOCK)
    return {"int8": 2 * blocks + n, "int4": 2 * blocks + -(-n // 2), "float16": 2 * n, "float32": 4 * n}[name]


def _decoded(name: str, payload: Tensor, n: int) -> Tensor:
    """Payloads uint8 [count, size] of ``n`` values each, as float32 [count, n]."""
    # A view as a wider type needs an aligned beginning, which a row or a part of a buffer may lack.
    if name == "float16":
        return payload.clone(memory_format=torch.contiguous_format).view(torch.float16).to(torch.float32)
    if name == "float32":
        return payload.clone(memory_format=torch.contiguous_format).view(torch.float32)
    if name == "sparse":
        return sparse_torch.decode(payload, n)
    count, blocks = len(payload), -(-n // BLOCK)
    pairs = payload[:, : 2 * blocks].reshape(count, blocks, 2).to(torch.int32)
    scales = ((pairs[:, :, 0] | (pairs[:, :, 1] << 8)) << 16).view(torch.float32)
    data = payload[:, 2 * blocks :]
    if name == "int8":
        levels = data.contiguous().view(torch.int8).to(torch.float32)
    else:
        whole = n // BLOCK
        rows = data[:, : whole * BLOCK // 2].reshape(count, whole, BLOCK // 2)
        rest = data[:, whole * BLOCK // 2 :]
        blocked = torch.cat([rows & 15, rows >> 4], dim=2).view(count, -1)
        codes = torch.cat([blocked, rest & 15, rest >> 4], dim=1)[:, :n]
        levels = torch.tensor(_LEVELS, dtype=torch.float32, device=payload.device)[codes.to(torch.int64)]
    return levels * scales.repeat_interleave(BLOCK, dim=1)[:, :n]


def _encoded(name: str, chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Chunks [count, n] as payloads uint8 [count, size], and the bits of the largest magnitude (on the device)."""
    _subnormals(chunks)
    count, n = chunks.shape
    if name in ("float16", "float32", "sparse"):
        worst = (chunks.view(torch.int32) & 0x7FFFFFFF).amax()
        if name == "sparse":
            return sparse_torch.encode(chunks), worst
        # What is refused by ``worst`` may become anything.
        values = chunks.clamp(-MOST, MOST).to(torch.float16) if name == "float16" else chunks.clone()
        return values.view(torch.uint8), worst
    blocks = -(-n // BLOCK)
    rows = torch.nn.functional.pad(chunks, (0, blocks * BLOCK - n)) if n % BLOCK else chunks
    rows = rows.reshape(count, blocks, BLOCK)
    # NaN passes a maximum of magnitudes; as integers, NaN and infinities lie above every number.
    worst = (rows.view(torch.int32) & 0x7FFFFFFF).amax(dim=2)
    exact = worst.view(torch.float32) / torch.full((1,), 127.0, device=chunks.device)
    # Above the limit, bits wrap around or name NaN; the caller refuses the chunk by ``worst`` then.
    bits = (exact.view(torch.int32) + 0xFFFF) >> 16
    scales = torch.where(bits == 0, torch.ones_like(exact), (bits << 16).view(torch.float32))
    quotients = rows / scales[:, :, None]
    heads = torch.stack([bits & 0xFF, bits >> 8], dim=2).to(torch.uint8).view(count, 2 * blocks)
    if name == "int8":
        levels = quotients.round_().to(torch.int8).view(count, -1)[:, :n]
        return torch.cat([heads, levels.contiguous().view(torch.uint8)], dim=1), worst.amax()
    codes = _codes(quotients)
    octets = codes[:, :, : BLOCK // 2] | (codes[:, :, BLOCK // 2 :] << 4)
    whole = n // BLOCK
    parts = [heads, octets[:, :whole].reshape(count, -1)]
    if n % BLOCK:
        half = (n % BLOCK + 1) // 2
        parts.append(codes[:, whole, :half] | (codes[:, whole, half : 2 * half] << 4))
    return torch.cat(parts, dim=1), worst.amax()


def _codes(quotients: Tensor) -> Tensor:
    """Codes of the nearest levels, uint8; half-way, of the one nearer to zero."""
    code = torch.zeros_like(quotients, dtype=torch.uint8)
    for low, high in itertools.pairwise(_LEVELS):
        middle = (low + high) / 2
        code += quotients > middle if middle > 0 else quotients >= middle
    return code


def _subnormals(tensor: Tensor) -> None:
    # CUDA kernels of torch keep subnormals; on the CPU it is the thread's control register that decides, also in the
    # threads of torch's pool, which set_flush_denormal reaches.
    if tensor.device.type == "cpu":
        torch.set_flush_denormal(False)
        subnormals_on()


def _supported(name: str) -> None:
    if name not in SUPPORTED:
        raise ValueError(f"{name} is not encoded on the device; expected one of {', '.join(SUPPORTED)}")
