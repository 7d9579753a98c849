"""Any folder or file of text, as bytes."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.protocol.errors import DataError

from .holdout import File

PROBE = 8192
"""Bytes at a file's start in which a NUL says that it is no text."""


def read(path: Path) -> list[File]:
    """The text files under ``path`` (hidden ones and links left out), or the one file that it is.

    Raises :class:`DataError` when it is missing, unreadable or holds no text.
    """
    path = path.expanduser()
    if path.is_file():
        candidates = [(path.name, path)]
    elif path.is_dir():
        candidates = [(p.relative_to(path).as_posix(), p) for p in _walk(path)]
    else:
        raise DataError(f"there is no folder or file {path}; give the text's place with [data] path or --data")
    files: list[File] = []
    for name, file in candidates:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from None
        if data and b"\0" not in data[:PROBE]:
            files.append(File(name, data))
    if not files:
        raise DataError(f"no text in {path}: {len(candidates)} files, all of them empty or binary")
    return files


def _walk(root: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        paths = (Path(parent, name) for name in sorted(names) if not name.startswith("."))
        found += [p for p in paths if p.is_file() and not p.is_symlink()]
    return found
