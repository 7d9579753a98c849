"""Finished runs, one a line of ``results.jsonl``: what makes a comparison resumable."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

import atoll
from atoll.protocol.errors import ResourceError, StateError

FILE = "results.jsonl"
SOURCES = (
    "node/compare/simulate.py",
    "node/compare/lowrank.py",
    "node/data/*.py",
    "node/evaluate.py",
    "node/learner.py",
    "node/model.py",
    "node/optim.py",
    "node/specs.py",
    "protocol/codecs/*.py",
    "protocol/kernels_numpy.py",
    "protocol/merging.py",
    "protocol/outer.py",
    "protocol/overlap.py",
    "protocol/radial.py",
    "protocol/theta0.py",
)
"""What a result depends on besides its manifest and scenario. (numba's kernels give numpy's bits, or are not used.)"""


REAL_SOURCES = (
    "node/*.py",
    "node/compare/real.py",
    "node/data/*.py",
    "node/swarm/launch.py",
    "node/swarm/ledger.py",
    "node/swarm/processes.py",
    "bootstrap/*.py",
    "protocol/*.py",
    "protocol/codecs/*.py",
)
"""The same of a run with real nodes."""


@cache
def code_version(real: bool = False) -> str:
    """A hash of the sources that results depend on, and of the libraries' versions."""
    import importlib.metadata

    root = Path(atoll.__file__).parent
    libraries = f"torch {importlib.metadata.version('torch')} numpy {np.__version__}"
    if real:
        libraries += f" hivemind {importlib.metadata.version('hivemind')}"
    total = blake3(f"{libraries}\n".encode())
    for pattern in REAL_SOURCES if real else SOURCES:
        for path in sorted(root.glob(pattern)):
            total.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return total.hexdigest()[:16]


@cache
def commit() -> str:
    """The git commit of these sources, with ``+`` when files were changed since; empty outside a checkout."""
    root = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


class Results:
    """The runs that ``folder`` knows; appended to one by one, so that an interruption costs the run in hand alone."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.found: dict[str, dict[str, Any]] = {}
        """By key; the newest counts."""
        try:
            lines = self.path.read_text().splitlines() if self.path.exists() else []
        except (OSError, UnicodeError) as error:
            raise StateError(f"cannot read {self.path}: {error}") from None
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                self.found[record["key"]] = record
            except (ValueError, KeyError, TypeError):
                if number < len(lines):
                    raise StateError(
                        f"line {number} of {self.path} is no result; remove it, or choose another folder with --out"
                    ) from None
                # the last line of a run that was cut off while writing: that run is done again

    def get(self, key: str) -> dict[str, Any] | None:
        return self.found.get(key)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a finished run. Raises :class:`ResourceError` when it cannot be written."""
        try:
            with self.path.open("ab") as file:
                if file.tell() and not self._ends_well():
                    file.write(b"\n")
                file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ResourceError(f"cannot write {self.path}: {error.strerror}") from None
        self.found[record["key"]] = record

    def _ends_well(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
