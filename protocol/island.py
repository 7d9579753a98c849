"""What the round asks of an island: the compute one peer trains with, whatever it is made of.

``node.trainer`` implements it with a child process; the simulation with arithmetic under the virtual clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from .messages import Span

if TYPE_CHECKING:
    from .encoder import Encoder


class Progress(msgspec.Struct, frozen=True):
    """How far the island is since its last contribution. Cheap to read at any time."""

    steps: int = 0
    """Inner steps since the last contribution was committed."""
    tokens: int = 0
    """Tokens in those steps."""
    units: int = 0
    """Sample units in those steps."""
    leased: int = 0
    """Sample units leased and not yet used, without a rest that is too small for a step."""
    step_time: float = 0.0
    """Seconds per inner step, an exponential average; 0 before the first step."""
    loss: float | None = None
    """Training loss of the latest steps, nats per token."""
    fields: dict[str, float] = msgspec.field(default_factory=dict)
    """More for the event log (learning rate, memory, …)."""


@dataclass(frozen=True)
class Snapshot:
    """What a frozen island holds: the counters at the moment of the freeze (see :class:`Progress`)."""

    steps: int
    tokens: int
    units: int
    leased: int
    stopped: float = 0.0
    """Seconds for which training stood still for it; 0 where it stands still anyway."""


@dataclass(frozen=True)
class Run:
    """Elements ``start`` … ``stop`` of the parameters, where θ ← keep·θ + shift (:mod:`.overlap`)."""

    start: int
    stop: int
    keep: float


class Island(ABC):
    """One peer's compute.

    The island trains whenever it is not frozen, has a lease, and was told of global parameters by
    :meth:`resume`. ``local`` is memory that both sides see: float32, one element a model
    parameter, in the order of the model's layout.
    """

    local: NDArray[np.float32]
    """The island's own parameters θ. The peer reads and writes it only between :meth:`freeze` and :meth:`resume`."""

    frozen: NDArray[np.float32] | None = None
    """Memory as ``local``'s for what a round averages while training goes on. The island writes it in
    :meth:`snapshot`, the peer from there to the next; None where every round pauses training."""

    encoder: Encoder | None = None
    """What encodes on the island's own device; None where the peer does it from ``local`` and ``frozen``. May become
    None, with a new life, when the device has no room for it. While there is one, ``local`` is only what the island
    begins a new life from, and ``frozen`` is not used."""

    life: int = 0
    """Grows each time an island that encodes has died, and with it all that it had not handed over."""

    @abstractmethod
    def progress(self) -> Progress: ...

    @abstractmethod
    def lease(self, spans: list[Span]) -> None:
        """Add sample units that may be used, in order, after those leased before."""

    @abstractmethod
    def revoke(self) -> None:
        """Drop all leases that have not been used (the chain that granted them is gone)."""

    @abstractmethod
    def keep(self) -> str:
        """What :meth:`restore` needs besides θ, of a frozen island: its counters and the leases not used yet. For the
        disk, so text."""

    @abstractmethod
    def restore(self, kept: str) -> None:
        """Take back what :meth:`keep` told in an earlier life of this process; before the first :meth:`resume`, which
        then has ``reload`` and nothing spent. Raises ValueError, with nothing changed, for any other text."""

    @abstractmethod
    async def freeze(self) -> Snapshot:
        """Finish the current inner step, write θ into ``local``, pause. Counters stay as they are.

        Bounded: raises :class:`~atoll.protocol.errors.ResourceError` when the island died or does not answer.
        """

    @abstractmethod
    async def resume(
        self, *, reload: bool, spent: float, outer_step: int, of: Snapshot | None = None, ahead: int | None = None,
        until: int | None = None,
    ) -> None:  # fmt: skip
        """Go on training after a freeze, or for the first time; or, with nothing reloaded and nothing spent, lift the
        limit that a :meth:`snapshot` has set, or put another in its place.

        reload: take θ from ``local``, which the peer has rewritten (else θ is what it was).
        spent: the share of the counters (steps, tokens, units) that a commit has taken over, 0 … 1; what is left
        counts in the next contribution. 1 with a re-synchronisation as well.
        of: the snapshot whose counters the share is of, if these are not the present ones (:func:`.overlap.left`).
        outer_step: outer steps taken along the chain; learning-rate schedules follow it.
        ahead: pause again after so many inner steps; None: never.
        until: pause at this number of steps at the latest, on the counters as they are before any are spent; None:
        there is no such number.
        """

    @abstractmethod
    async def snapshot(self, ahead: int, parts: Sequence[slice], until: int | None = None) -> Snapshot:
        """Finish the current inner step, copy θ into ``frozen``, and train on, for at most ``ahead`` inner steps.

        parts: what of θ is to be copied, the elements of a fragment; what else lies in ``frozen`` may be of rounds that
        are in flight, and stays. until: as in :meth:`resume`.
        The limit holds until :meth:`resume`, :meth:`move` or :meth:`freeze`. Bounded, and raises as :meth:`freeze`
        does; the island is then frozen.
        """

    @abstractmethod
    async def move(
        self, runs: list[Run], *, spent: float, outer_step: int, of: Snapshot | None, until: int | None = None
    ) -> Snapshot:
        """Finish the current inner step, change θ by the shift that lies in ``frozen``, and train on without a limit,
        but for ``until``.

        runs: where, and how. spent, outer_step, of, until: as in :meth:`resume`. Returns the counters as they were
        before the share was taken out of them, and, as ``stopped``, the seconds for which training has stood still
        since the last move, or since a snapshot before which it had no limit, for want of this or for it. When the
        island has died, ``local`` is changed instead, and its next life goes on from there. Bounded: raises
        :class:`~atoll.protocol.errors.ResourceError` when it died in the middle, so that nobody knows θ any more; the
        island is then frozen.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the island; bounded; leaves no process behind."""
