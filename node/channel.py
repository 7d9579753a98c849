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
    frozen: bool
    """Whether the shared memory has room for what a round averages while training goes on."""
    model: dict[str, Any]
    data: dict[str, Any]
    inner: dict[str, Any]
    inner_steps: int
    rounds: int
    fragments: int
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
    """Counts what is asked for; the answer repeats it."""
    ahead: int | None = None
    """Instead: copy θ into the shared memory's ``frozen`` and train on, for at most so many steps."""
    parts: list[tuple[int, int]] | None = None
    """Start and stop of what is to be copied; None: all of it."""


class Move(msgspec.Struct, tag="move", frozen=True):
    """Parent → child: finish the step, change θ by the shift in ``frozen``, train on without a limit, answer
    :class:`Moved`. Counters: see :func:`atoll.protocol.overlap.left`."""

    number: int
    runs: list[tuple[int, int, float]]
    """Start, stop and ``keep`` of each stretch of parameters."""
    spent: float
    of: tuple[int, int, int] | None
    """Steps, tokens and units of the snapshot that ``spent`` is a share of."""
    outer_step: int


class Resume(msgspec.Struct, tag="resume", frozen=True):
    """Parent → child: lower the counters (see :class:`Move`) and train on."""

    number: int
    reload: bool
    outer_step: int
    until: int | None
    """Pause again at this number of steps, the counters being lowered."""
    spent: float = 0.0
    of: tuple[int, int, int] | None = None


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Child → parent: torch is imported, the data are loaded and checked, the device is there."""

    device: str
    name: str
    """The device as its maker calls it."""
    threads: int
    precision: str
    micro_batch: int


class Frozen(msgspec.Struct, tag="frozen", frozen=True):
    """Child → parent: the answer to :class:`Freeze`, with the counters at that moment."""

    number: int
    steps: int
    tokens: int
    units: int
    drawn: int
    epoch: int
    """Generation of leases that ``drawn`` is of."""
    stopped: float
    """Seconds for which training stood still to take the copy."""


class Moved(msgspec.Struct, tag="moved", frozen=True):
    """Child → parent: the answer to :class:`Move`, with the counters as they were before it."""

    number: int
    steps: int
    tokens: int
    units: int
    stopped: float
    """Seconds for which training has stood still since the last snapshot, at its limit and for this."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Child → parent: the child ends for this reason."""

    kind: str
    """Name of an :class:`~atoll.protocol.errors.AtollError`, or of the unexpected exception."""
    message: str
    memory: bool = False
    """Whether memory ran out: the next child starts with a smaller micro-batch."""


ToChild = Setup | Grant | Revoke | Freeze | Move | Resume
ToParent = Ready | Frozen | Moved | Failed

to_child = msgspec.json.Decoder(ToChild)
to_parent = msgspec.json.Decoder(ToParent)


def line(message: ToChild | ToParent) -> bytes:
    """One message as a line."""
    return msgspec.json.encode(message) + b"\n"
