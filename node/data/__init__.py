"""Training data: bytes from files, split by file into training and validation, pinned by one hash.

``pin(config)`` fills in the hash when a manifest is made; ``load(config)`` reads the bytes and refuses, with the
reason, what differs from the pin.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from atoll.protocol.errors import DataError

from ..config import DataConfig
from . import stdlib, text
from .holdout import File, split

__all__ = ["Corpus", "File", "load", "pin"]


@dataclass(frozen=True)
class Corpus:
    """The bytes of a run, as token arrays (uint8), documents joined by a NUL byte."""

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    files: str
    """Hash of the file list (hex)."""
    held_out: tuple[str, ...]
    """Names of the files held out for validation; empty when the tail of the text was held out."""


def pin(config: DataConfig) -> DataConfig:
    """``config`` with the hash of the files found here. Raises :class:`DataError` when there is no usable text."""
    files = _read(config)
    _split(files, config)
    python = platform.python_version() if config.source == "stdlib" else None
    return config.model_copy(update={"files": list_hash(files), "python": python, "count": len(files)})


def load(config: DataConfig, context: int) -> Corpus:
    """The corpus that ``config`` names.

    Raises :class:`DataError` for a missing folder, no text, other bytes than the pinned ones, or fewer bytes than a
    sequence of ``context`` + 1 in either half.
    """
    files = _read(config)
    found = list_hash(files)
    if config.files is not None and found != config.files:
        raise DataError(_mismatch(config, found, len(files)))
    train, validation, held_out = _split(files, config)
    for name, part in (("training", train), ("validation", validation)):
        if len(part) < context + 1:
            raise DataError(
                f"the {name} text has {len(part)} bytes, fewer than one sequence of {context + 1}; "
                "give more text or a smaller [model] context"
            )
    return Corpus(train, validation, found, held_out)


def list_hash(files: list[File]) -> str:
    """One BLAKE3 (hex) over the names and the BLAKE3 of every file, in order of the names."""
    total = blake3()
    for file in sorted(files, key=lambda f: f.name):
        total.update(f"{file.name}\0{blake3(file.data).hexdigest()}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def _read(config: DataConfig) -> list[File]:
    if config.source == "stdlib":
        return stdlib.read()
    if config.path is None:
        raise DataError('[data] source = "text" needs path = "…", a folder or a file of text')
    return text.read(Path(config.path))


def _split(files: list[File], config: DataConfig) -> tuple[NDArray[np.uint8], NDArray[np.uint8], tuple[str, ...]]:
    train, validation, names = split(files)
    if not len(train) or not len(validation):
        raise DataError(f"the {config.source} data has too little text: {sum(len(f.data) for f in files)} bytes")
    return train, validation, names


def _mismatch(config: DataConfig, found: str, count: int) -> str:
    here = f"{count} files with hash {found[:16]}…"
    pinned = f"hash {(config.files or '')[:16]}…"
    if config.count is not None:
        pinned = f"{config.count} files with {pinned}"
    if config.source == "stdlib":
        here += f" (Python {platform.python_version()}, {stdlib.folder()})"
        pinned += f" (Python {config.python})" if config.python else ""
        python = config.python or "the same version"
        remedy = f"run this node with Python {python}, as built by the run's organiser"
        if config.python == platform.python_version():
            remedy = "the versions agree, so this Python's library was changed or repackaged; use an unchanged build"
    else:
        here += f" in {config.path}"
        remedy = "get the very files that the organiser pinned"
    return f"the training data differs from the run's: pinned {pinned}, found {here}; {remedy}"
