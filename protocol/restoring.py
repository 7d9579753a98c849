"""The state of the run from the own disk, or from the beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .commitlog import LogEntry
from .commits import START, Position
from .core import Core
from .errors import NonFinite, PeerMisbehaved, StateError
from .heads import Heads
from .messages import GENESIS
from .replica import Replica, rank_in_force
from .state import GlobalState
from .store import LOST

Floats = NDArray[np.float32]


class Restoring:
    """Builds and rebuilds the replica.

    theta0: the initial parameters (float32, one element a model parameter).
    """

    def __init__(self, core: Core, heads: Heads, theta0: Callable[[], Floats]) -> None:
        self._core = core
        self._heads = heads
        self._theta0 = theta0
        self._transport = core.transport
        self._manifest = core.manifest
        self._layout = core.layout
        self._codec = core.codec
        self._store = core.store
        self._guide = core.guide
        self._events = core.events
        self._recoveries = 0

    async def load(self, *, residual: bool) -> None:
        """Fill the replica, with a residual or without one: from disk as far as it goes, else from θ₀.

        Raises StateError when θ₀ is not what the manifest says."""
        self._guide.restore()
        loaded = await self._transport.offload(self._store.load)
        state = loaded.state if loaded is not None else None
        position = loaded.position if loaded is not None else START
        if state is None:
            state = await self._transport.offload(self.fresh)
        left = np.zeros(self._layout.parameters, np.float32) if residual else None
        rank = await self.rank_of(state, position)
        replica = Replica(self._manifest, self._layout, self._codec, state, position, residual=left, rank=rank)
        self._core.replica = replica
        await self.replay(replica, loaded.replay if loaded is not None else [])
        head = replica.position.head
        if left is not None and head != GENESIS:
            kept = await self._transport.offload(self._store.load_residual, head.id)
            if kept is not None:
                left[:] = kept
        owed = self._store.seen
        if self._store.prefers(owed, head):
            # Its disk has lost what it had once applied. Others have it: from θ₀ it would only make a fork.
            self._heads.owe(owed)
            what = f"the state of round {owed.round}" if owed != LOST else "the state, and which it was"
            self._events("warning", message=f"the disk has lost {what}; it is fetched")
        if head != GENESIS:
            self._events("resumed", round=head.round, outer_step=head.outer_step, height=head.height)

    async def replay(self, replica: Replica, entries: Sequence[LogEntry]) -> None:
        """Apply logged commits to a replica, as far as they are whole; what is missing then comes from peers."""
        for entry in entries:
            commit = await self._transport.offload(self._store.commit, entry.id)
            try:
                chunks = await self._transport.offload(self._store.chunks, entry.id)
            except StateError as error:
                self._events("warning", message=str(error))
                return
            if commit is None or commit.body.state != await replica.digest(self._transport):
                self._events(
                    "warning", message=f"the log does not fit the state at round {replica.position.head.round}"
                )
                return
            try:
                await self._transport.offload(replica.apply, commit.body, entry.id, chunks)
            except (PeerMisbehaved, NonFinite) as error:
                self._events("warning", message=f"the log of round {commit.body.round} cannot be applied: {error}")
                return

    async def rank_of(self, state: GlobalState, position: Position) -> int:
        """The rank in force there, off the event loop."""
        if not self._manifest.codec.window:
            return 0
        return await self._transport.offload(rank_in_force, self._manifest, self._layout, state, position)

    def fresh(self) -> GlobalState:
        """θ₀. Raises StateError when it is not what the manifest says. CPU-heavy."""
        state = GlobalState.fresh(self._layout, self._theta0())
        if state.digest().hex() != self._manifest.state.theta0:
            raise StateError(
                f"the initial parameters computed here have digest {state.digest().hex()[:16]}, the manifest says "
                f"{self._manifest.state.theta0[:16]}: this machine or version builds another model"
            )
        return state

    async def recover(self, attested: bytes) -> bool:
        """This peer's state is not what the swarm attests: compute it from disk again, where every byte is checked.

        True when the disk has the attested state, which is taken over; the memory was wrong then. Else nothing changes.
        """
        loaded = await self._transport.offload(self._store.load, self._core.head.id)
        if loaded is None:
            return False
        state = loaded.state if loaded.state is not None else await self._transport.offload(self.fresh)
        mine = self._core.replica
        rank = await self.rank_of(state, loaded.position)
        scratch = Replica(self._manifest, self._layout, self._codec, state, loaded.position, rank=rank)
        await self.replay(scratch, loaded.replay)
        if scratch.position != mine.position or await scratch.digest(self._transport) != attested:
            return False
        self._recoveries += 1
        if self._recoveries > 3:
            raise StateError("the state in memory was wrong again; check this machine's memory, then start anew")
        self._events("warning", message="the state in memory was wrong; it was taken from disk again")
        mine.adopt(state, scratch.position, scratch.rank)
        return True
