"""What the round asks of an island that encodes its contributions itself, because its parameters lie on a device from
which copying them is what a round would wait for.

Such an island keeps beside θ, where θ is: the global parameters g, the residual e, and what it has frozen for a round.
The peer gets the encoded chunks of a contribution, all at once and before it enters a roster, so that no later part of
the round depends on the island: chunks may be sent again as often as reducers are replaced. Back it gives the new g.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .commits import members_in
from .digest import BytesLike
from .island import Snapshot
from .layout import ChunkLayout
from .messages import Body
from .overlap import Overlap

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Encoded:
    """A contribution in the run's codec, byte for byte what :meth:`.replica.Replica.encode` makes of the same state.

    payload: the bytes of a chunk of the fragment, the same at each call until the island has encoded the next one.
    moved: bytes that left the device for it. freeze, life: which freeze of which life of the island it was made of.
    """

    fragment: int
    payload: Callable[[int], BytesLike]
    moved: int
    freeze: int
    life: int


@dataclass(frozen=True)
class Outcome:
    """What a commit is to an island that encodes.

    mine: chunks of the fragment that were averaged with what ``source`` says, others: those averaged without it.
    lost: θ of the fragment becomes g, and e zero there: what was averaged is no longer known apart from what came
    after. dropped: θ of the fragment becomes g, since what is not in it is too old (:mod:`.stale`). rule: how θ moves
    where the own contribution was averaged while training went on.
    """

    fragment: int
    commit_id: bytes
    mine: Sequence[int]
    others: Sequence[int]
    source: Encoded | None
    lost: bool
    dropped: bool
    rule: Overlap


class Encoder(ABC):
    """The part of an island that encodes. All waits are bounded: :class:`~atoll.protocol.errors.ResourceError` when the
    island died or does not answer. It then begins a new life from the last global parameters that it was given, with
    e = 0, and with all counters at 0 (:attr:`.island.Island.life`)."""

    @abstractmethod
    async def begin(self, params: Floats, *, commit_id: bytes, residual: Floats | None, theta: Floats | None) -> None:
        """Take over g, the residual that belongs to it (None: zero) and θ (None: g), before the first
        :meth:`.island.Island.resume`, which then has nothing to reload."""

    @abstractmethod
    async def encode(self, fragment: int, share: float = 1.0) -> Encoded | None:
        """Encode what the last freeze or snapshot has frozen; None, and nothing leaves the device, where x is not
        finite. share: below 1, and after a freeze alone, Δ of the fragment is shortened to it before
        (:func:`.stale.shorten`)."""

    @abstractmethod
    def hold(self, wanted: Sequence[Encoded]) -> None:
        """A roster ended void, and may be committed yet: keep what was frozen for these until the next commit, and for
        no others. Before the island goes on."""

    @abstractmethod
    async def commit(
        self, outcome: Outcome, params: Floats, *, spent: float, of: Snapshot | None, outer_step: int,
        ahead: int | None,
    ) -> tuple[Snapshot, bool]:  # fmt: skip
        """Take over the new g, move θ and e as a commit demands, and train on.

        params: g after the commit, of which only the outcome's fragment is read. spent, of, outer_step, ahead: as in
        :meth:`.island.Island.resume`. Returns what :meth:`.island.Island.move` does, and whether the outcome's source
        was at hand: if not, the fragment was treated as ``lost``, with all counters taken off and no limit (``ahead``).
        """

    @abstractmethod
    async def residual(self, commit_id: bytes) -> Floats | None:
        """A copy of e for the disk, fetched beside training; None where e belongs to another commit, or there is none.
        commit_id: the one of :meth:`begin`, or the last that :meth:`commit` took over."""

    @abstractmethod
    async def theta(self) -> Floats:
        """A copy of θ of a frozen island, for the disk."""


def averaged(body: Body, me: int | None) -> tuple[list[int], list[int]]:
    """Chunks of a body in whose average member ``me`` is, and those averaged without it."""
    count = len(body.seal.members)
    mine: list[int] = []
    others: list[int] = []
    for index, entry in enumerate(body.chunks):
        inside = members_in(entry.contributors, count)
        if inside:
            (mine if me is not None and me in inside else others).append(index)
    return mine, others


def share_of(chunks: Sequence[int], part: ChunkLayout) -> float:
    """The share of a fragment's elements that lie in these of its chunks, 0 … 1."""
    return sum(map(part.size, chunks)) / part.parameters
