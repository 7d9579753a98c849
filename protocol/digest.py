"""BLAKE3, the one hash of the protocol."""

from __future__ import annotations

from typing import TypeAlias

from blake3 import blake3

BytesLike: TypeAlias = bytes | bytearray | memoryview
"""Anything the codecs, the digests and the transport take as bytes."""


def blake3_digest(*parts: BytesLike) -> bytes:
    """BLAKE3 (32 bytes) of the parts, as if they were one byte string: nothing marks where a part ends."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    digest: bytes = hasher.digest()
    return digest
