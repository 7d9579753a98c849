"""The sources of the running Python's standard library: real text that every node already has.

Left out: tests, what others installed, generated build settings, and the tables under ``encodings``, which are near
duplicates of one another and would make the held-out set look too easy.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from atoll.protocol.errors import DataError

from .holdout import File

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "lib-dynload", "__pycache__"}
)


def folder() -> Path:
    """Where the running Python keeps its library."""
    return Path(sysconfig.get_path("stdlib"))


def read() -> list[File]:
    """Every source file. Raises :class:`DataError` when this Python comes without sources."""
    root = folder()
    files: list[File] = []
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("config-"))
        for name in sorted(names):
            path = Path(parent, name)
            # a link or generated settings differ from one build of the same version to the next
            if not name.endswith(".py") or name.startswith("_sysconfigdata") or path.is_symlink():
                continue
            try:
                files.append(File(path.relative_to(root).as_posix(), path.read_bytes()))
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}; it is part of the training data") from None
    if not files:
        raise DataError(
            f"this Python has no library sources under {root}; use a Python that is installed with its .py files, "
            'or a run with [data] source = "text"'
        )
    return files
