"""Starts what a swarm on one machine consists of: a bootstrap peer and nodes, on loopback, each in a folder below
``out``, where the signed manifest is ``manifest.toml``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.protocol.errors import (
    AtollError,
    DataError,
    ManifestError,
    NetworkError,
    ResourceError,
    StateError,
    UsageError,
    VersionError,
)

from .processes import Child, Family, Interrupts
from .table import exit_text

LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0")
START_PATIENCE = 60.0
"""Seconds for the bootstrap peer to print its address."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM came."""


def start_bootstrap(family: Family, out: Path, env: Mapping[str, str], interrupts: Interrupts) -> str:
    """The run's address. Raises what the bootstrap peer fails with, or :class:`Interrupted`."""
    folder, file = out / "bootstrap", out / "address"
    arguments = ["atoll", "bootstrap", "--manifest", str(out / "manifest.toml"), "--state", str(folder)]
    child = family.start("bootstrap", folder, [*arguments, *LISTEN, "--address-file", str(file)], env)
    deadline = time.monotonic() + START_PATIENCE
    while not file.exists():
        if interrupts.wait(0.05):
            raise Interrupted
        if child.code is not None:
            raise relayed(child)
        if time.monotonic() > deadline:
            raise ResourceError(
                f"the bootstrap peer printed no address within {START_PATIENCE:.0f} s; its output is in {child.output}"
            )
    return file.read_text().strip()


def start_node(
    family: Family, out: Path, index: int, address: str, env: Mapping[str, str], more: Sequence[str] = ()
) -> Child:
    """Node number ``index``, which ends with the run."""
    name = f"node-{index}"
    arguments = ["atoll", "node", address, "--state", str(out / name), "--name", name, "--finish", "exit"]
    return family.start(name, out / name, [*arguments, *LISTEN, "--log", "plain", *more], env)


def relayed(child: Child, message: str = "") -> AtollError:
    """A child's failure as an error of ours with the same exit code.

    message: default: its last words. Raises RuntimeError when what it ended with is no error but a defect.
    A signal is an error of the machine.
    """
    kinds = {
        2: UsageError, 3: ManifestError, 4: NetworkError, 5: DataError, 6: StateError, 7: ResourceError, 8: VersionError
    }  # fmt: skip
    code = child.code or 0
    said = message or child.last_words() or f"{child.name} ended without a word ({exit_text(code)})"
    kind = kinds.get(code) if 0 < code < 128 else ResourceError
    if kind is None:
        where = f" (all of its output is in {child.output})"
        raise RuntimeError((said if message else f"{child.name}: {said}") + where)
    return kind(said)
