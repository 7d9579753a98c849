"""The state on disk: checkpoints of the run, and the residual that belongs to this peer's head."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .core import Core
from .errors import ResourceError, StateError
from .handing_over import HandingOver


class Saving:
    """Writes checkpoints beside everything else.

    in_use: checkpoints that others are downloading, to be kept a little longer.
    """

    def __init__(self, core: Core, handing: HandingOver, *, in_use: Callable[[], frozenset[bytes]]) -> None:
        self._core = core
        self._handing = handing
        self._in_use = in_use
        self._transport = core.transport
        self._store = core.store
        self._events = core.events
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Write a checkpoint of the head."""
        self._task = asyncio.get_running_loop().create_task(self._checkpoint())

    async def done(self) -> None:
        """Wait until no checkpoint is being written: the state is about to change."""
        if self._task is not None:
            await self._task
            self._task = None

    async def leave(self) -> None:
        """Wait for a checkpoint that is being written, whatever comes of it."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _checkpoint(self) -> None:
        try:
            await self._core.replica.digest(self._transport)
            position, state = self._core.replica.position, self._core.replica.state
            await self._transport.offload(self._store.save_checkpoint, position, state, self._in_use())
        except (ResourceError, StateError) as error:
            self._events("warning", message=f"no checkpoint was written: {error}")
            return
        # It is valid with this head only: a crash before the next commit finds it, a later one begins without.
        await self.save_residual()

    async def save_residual(self) -> None:
        """Write the residual of the head to the disk, from here or from an island that keeps it, if it has one."""
        commit_id, residual, encoder = self._core.head.id, self._core.replica.residual, self._core.encoder
        try:
            if encoder is not None:
                residual = await encoder.residual(self._handing.told_of(commit_id))
            if residual is not None:
                await self._transport.offload(self._store.save_residual, commit_id, residual)
        except (ResourceError, StateError) as error:
            self._events("warning", message=f"the residual was not saved: {error}")
