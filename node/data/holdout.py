"""The split of files into training and validation bytes, decided by names and sizes alone.

Files between ``SMALLEST`` and ``LARGEST`` bytes are ordered by the BLAKE3 of their name, and the first ``HELD_OUT`` of
them are held out, whole. The bounds keep the whole held-out set cheap to score (about 160 kB of the standard library,
a few CPU seconds) while many files are in it; they look at sizes, never at contents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

HELD_OUT = 56
SMALLEST, LARGEST = 1 << 10, 6 << 10
TAIL = 1 << 18
"""Most bytes that are held out from the end of a text that has too few files."""


@dataclass(frozen=True)
class File:
    name: str
    """Path relative to the source's root, with forward slashes."""
    data: bytes


def split(files: list[File]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], tuple[str, ...]]:
    """Training bytes, validation bytes, and the names of the held-out files.

    With fewer than twice ``HELD_OUT`` eligible files (one big text, say) the last twentieth of the joined
    bytes is held out instead, at most ``TAIL``, and no names are returned.
    """
    files = sorted(files, key=lambda f: f.name)
    eligible = [f for f in files if SMALLEST <= len(f.data) <= LARGEST]
    if len(eligible) >= 2 * HELD_OUT:
        order = sorted(eligible, key=lambda f: blake3(f.name.encode("utf-8", "surrogateescape")).digest())
        held_out = {f.name for f in order[:HELD_OUT]}
        train = _join([f for f in files if f.name not in held_out])
        return train, _join([f for f in files if f.name in held_out]), tuple(sorted(held_out))
    joined = _join(files)
    cut = len(joined) - min(len(joined) // 20, TAIL)
    return joined[:cut], joined[cut:], ()


def _join(files: list[File]) -> NDArray[np.uint8]:
    """The files' bytes, each followed by a NUL."""
    joined = bytearray()
    for file in files:
        joined += file.data
        joined.append(0)
    return np.frombuffer(joined, dtype=np.uint8)
