"""Codecs: how a chunk of float32 crosses the network. The bytes are specified in docs/wire/codecs.md.

A payload carries its data and nothing else: the manifest names the codec and the frame around it gives the length.
"""

from __future__ import annotations

from ..errors import ConfigError
from .base import MAX_MAGNITUDE, MAX_WEIGHT, Codec
from .float16 import Float16
from .float32 import Float32
from .int4 import Int4
from .int8 import Int8
from .lowrank import LowRank
from .sparse import Sparse
from .union import Union

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32(), Float16(), Int8(), Int4(), Sparse(), LowRank())}
"""Those that a manifest names: of contributions, and of averages where they have no other."""
AVERAGES: dict[str, Codec] = {codec.name: codec for codec in (Union(),)}
"""Those of averages alone."""

__all__ = [
    "AVERAGES",
    "CODECS",
    "MAX_MAGNITUDE",
    "MAX_WEIGHT",
    "Codec",
    "Float16",
    "Float32",
    "Int4",
    "Int8",
    "LowRank",
    "Sparse",
    "Union",
    "averages_codec",
    "get_codec",
]


def get_codec(name: str) -> Codec:
    """The codec of that name. Raises :class:`ConfigError` for an unknown one."""
    codec = CODECS.get(name)
    if codec is None:
        raise ConfigError(f"unknown codec {name!r}; choose one of {', '.join(CODECS)}")
    return codec


def averages_codec(name: str) -> Codec:
    """The codec of averaged chunks in a run whose contributions are packed by ``name``.

    The same one, except for ``sparse``: a mean of sparse contributions keeps more values than any of them, and what a
    reducer dropped from it would be lost, since no residual takes it up. Raises :class:`ConfigError` as
    :func:`get_codec` does.
    """
    codec = get_codec(name)
    return AVERAGES[codec.averages] if codec.averages else codec
