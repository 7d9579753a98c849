"""What the supervisor and the trainer child tell one another: JSON lines over a socket pair.

Progress does not travel here: it is read from the shared counters (:mod:`atoll.node.sharedmem`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Coding(msgspec.Struct, frozen=True):
    """What a child needs that encodes on its device (:class:`atoll.node.device_replica.DeviceReplica`)."""

    must: bool
    """Whether on any device; else on CUDA only."""
    codec: str
    decay: float | None
    """β of the error feedback; None where there is no residual."""
    chunk: int
    layers: list[list[int]]
    packing: Literal["balanced", "strided"]


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
    coding: Coding | None = None
    """None: contributions are encoded on the host."""
    encoded: int = 0
    """Bytes of the shared memory for encoded contributions."""


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
    until: int | None = None
    """Number of steps at which to pause in any case, for the sake of a round that is in flight already."""
    store: bool = False
    """Whether to store θ as well."""


class Move(msgspec.Struct, tag="move", frozen=True):
    """Parent → child: finish the step, change θ by the shift in ``frozen``, train on, answer :class:`Moved`. Counters:
    see :func:`atoll.protocol.overlap.left`."""

    number: int
    runs: list[tuple[int, int, float]]
    """Start, stop and ``keep`` of each stretch of parameters."""
    spent: float
    of: tuple[int, int, int] | None
    """Steps, tokens and units of the snapshot that ``spent`` is a share of."""
    outer_step: int
    until: int | None = None
    """Number of steps at which to pause, on the counters as they are before this."""


class Resume(msgspec.Struct, tag="resume", frozen=True):
    """Parent → child: lower the counters (see :class:`Move`) and train on."""

    number: int
    reload: bool
    outer_step: int
    until: int | None
    """Pause again at this number of steps, the counters being lowered."""
    spent: float = 0.0
    of: tuple[int, int, int] | None = None


class Commit(msgspec.Struct, tag="commit", frozen=True):
    """Parent → child that encodes: a commit; the new g lies in the shared memory. Take it over, train on, answer
    :class:`Moved`. See :meth:`atoll.protocol.encoder.Encoder.commit`."""

    number: int
    fragment: int
    mine: list[int]
    others: list[int]
    source: int | None
    """Number of the freeze whose x was averaged."""
    lost: bool
    dropped: bool
    merge: str
    alpha: float
    head: str
    """The commit's id."""
    spent: float
    of: tuple[int, int, int] | None
    outer_step: int
    until: int | None
    """As in :class:`Resume`. Without limit where the source is not at hand: then nothing is left to hand over."""


class Hold(msgspec.Struct, tag="hold", frozen=True):
    """Parent → child that encodes: of all that was frozen keep these, by number, until the next commit."""

    numbers: list[int]


class Place(msgspec.Struct, tag="place", frozen=True):
    """Parent → child that encodes, before it trains: what the shared memory holds is θ and g (``params``, with e = 0),
    or ``theta``, or ``residual`` alone. Answered by :class:`Placed`."""

    number: int
    what: Literal["params", "theta", "residual"]
    head: str
    """The commit that e belongs to."""


class Encode(msgspec.Struct, tag="encode", frozen=True):
    """Parent → child that encodes: write a fragment's payloads into the shared memory. Answered by :class:`Encoded`,
    while it trains."""

    number: int
    freeze: int
    """Number of the freeze."""
    fragment: int
    share: float
    """What Δ is shortened to before."""


class Read(msgspec.Struct, tag="read", frozen=True):
    """Parent → child that encodes: write elements into the shared memory's window. Answered by :class:`Piece`, while it
    trains."""

    number: int
    what: Literal["theta", "residual"]
    start: int
    stop: int


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Child → parent: torch is imported, the data are loaded and checked, the device is there."""

    device: str
    name: str
    """The device as its maker calls it."""
    threads: int
    precision: str
    micro_batch: int
    encodes: bool = False
    note: str = ""
    """Why it does not encode, though it was asked to."""
    pageable: str = ""
    """Why the shared memory is not page-locked, though that would pay."""


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
    """Seconds for which training has stood still at its limit and for this, see
    :meth:`atoll.protocol.island.Island.move`."""
    known: bool = True
    """Of a commit: whether what was averaged was still there."""


class Placed(msgspec.Struct, tag="placed", frozen=True):
    """Child → parent: the answer to :class:`Place`."""

    number: int


class Encoded(msgspec.Struct, tag="encoded", frozen=True):
    """Child → parent: the answer to :class:`Encode`."""

    number: int
    sound: bool
    """Whether x can be sent."""
    moved: int
    """Bytes that crossed from the device to the host."""
    failed: str = ""
    """Why nothing was encoded."""
    crowded: bool = False
    """Whether it was for want of memory, which leaving it to the host makes good."""


class Piece(msgspec.Struct, tag="piece", frozen=True):
    """Child → parent: the answer to :class:`Read`."""

    number: int
    head: str
    """The commit that the residual belongs to."""
    failed: str = ""
    """Why nothing was read: the window holds what it held before."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Child → parent: the child ends for this reason."""

    kind: str
    """Name of an :class:`~atoll.protocol.errors.AtollError`, or of the unexpected exception."""
    message: str
    memory: bool = False
    """Whether memory ran out: the next child starts with a smaller micro-batch."""
    crowded: bool = False
    """Whether it was the device's memory, which the next child has more of if it leaves encoding to the host."""


Service = Encode | Read
"""What the child does beside training."""
ToChild = Setup | Grant | Revoke | Freeze | Move | Resume | Commit | Hold | Place | Service
ToParent = Ready | Frozen | Moved | Placed | Encoded | Piece | Failed

to_child = msgspec.json.Decoder(ToChild)
to_parent = msgspec.json.Decoder(ToParent)


def line(message: ToChild | ToParent) -> bytes:
    """One message as a line."""
    return msgspec.json.encode(message) + b"\n"
