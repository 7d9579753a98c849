"""What the supervisor and the trainer child tell one another: JSON lines over a socket pair.

Progress does not travel here: it is read from the shared counters (:mod:`atoll.node.sharedmem`).
"""

from __future__ import annotations

from typing import Any

import msgspec


class Setup(msgspec.Struct, tag="setup", frozen=True):
    """Parent → child, first: everything the child needs to know."""

    fd: int
    """Descriptor of the shared memory in the child."""
    parameters: int
    model: dict[str, Any]
    data: dict[str, Any]
    inner: dict[str, Any]
    inner_steps: int
    rounds: int
    device: str
    threads: int | None
    micro_batch: int | None


class Grant(msgspec.Struct, tag="lease", frozen=True):
    """Parent → child: sample units ``[start, count]`` that may be used after those granted before."""

    spans: list[tuple[int, int]]


class Revoke(msgspec.Struct, tag="revoke", frozen=True):
    """Parent → child: drop what is leased; generation ``epoch`` begins."""

    epoch: int


class Freeze(msgspec.Struct, tag="freeze", frozen=True):
    """Parent → child: finish the step, store θ, pause, answer :class:`Frozen`."""

    number: int
    """Counts the freezes; the answer repeats it."""


class Resume(msgspec.Struct, tag="resume", frozen=True):
    """Parent → child: train on. The parent has already set the counters."""

    reload: bool
    outer_step: int


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Child → parent: torch is imported, the data are loaded and checked, the device is there."""

    device: str
    name: str
    """The device as its maker calls it."""
    threads: int
    precision: str
    micro_batch: int


class Frozen(msgspec.Struct, tag="frozen", frozen=True):
    """Child → parent: the answer to :class:`Freeze`."""

    number: int


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Child → parent: the child ends for this reason."""

    kind: str
    """Name of an :class:`~atoll.protocol.errors.AtollError`, or of the unexpected exception."""
    message: str
    memory: bool = False
    """Whether memory ran out: the next child starts with a smaller micro-batch."""


ToChild = Setup | Grant | Revoke | Freeze | Resume
ToParent = Ready | Frozen | Failed

to_child = msgspec.json.Decoder(ToChild)
to_parent = msgspec.json.Decoder(ToParent)


def line(message: ToChild | ToParent) -> bytes:
    """One message as a line."""
    return msgspec.json.encode(message) + b"\n"
