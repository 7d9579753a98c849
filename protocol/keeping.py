"""Uncommitted progress on disk: what a crash of the own process must not cost."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from .commits import members_in
from .core import Core
from .errors import ResourceError, StateError
from .messages import Body
from .timing import Timing
from .training import Training

Floats = NDArray[np.float32]


class Keeping:
    """Saves what the island has trained since the last commit, and takes it up again.

    every: seconds between two times; 0: never.
    """

    def __init__(self, core: Core, training: Training, timing: Timing, *, every: float) -> None:
        self._core = core
        self._training = training
        self._timing = timing
        self._transport = core.transport
        self._me = core.me
        self._store = core.store
        self._island = core.island
        self._events = core.events
        self._nonce = core.nonce
        self._spawn = core.tasks.spawn
        # With several fragments each commit is a new head, and would void what was saved for the others.
        self.every = every if core.layout.fragments == 1 else 0.0
        self.at = float("inf")
        """When to save next."""
        self.saving: asyncio.Task[None] | None = None
        self.carried = False
        """Whether θ and leases may come from an earlier life of this process, whose last roster others may commit."""

    async def restore(self) -> Floats | None:
        """Take up the inner steps that an earlier life of this process had made from this head and saved: θ, if it
        was."""
        assert self._island is not None
        kept = await self._transport.offload(self._store.load_progress, self._core.head.id) if self.every else None
        if kept is None:
            return None
        theta, told = kept
        try:
            self._island.restore(told)
        except ValueError as error:
            self._events("warning", message=f"the inner steps that were saved cannot be taken up: {error}")
            return None
        self._events("restored", round=self._core.head.round, outer_step=self._core.head.outer_step)
        self.carried = True
        return theta

    def new_head(self) -> None:
        """What was saved belongs to the head before."""
        if self.every:
            self.at = self._core.base_since + self.every

    async def keep(self) -> None:
        """Save what the island has trained since the last commit: training pauses for a copy, not for the disk."""
        island = self._island
        assert island is not None
        self.at = self._transport.now() + self.every
        if self._training.frozen or self._training.ahead or (self.saving is not None and not self.saving.done()):
            return
        try:
            snapshot = await self._training.freeze()
        except ResourceError as error:
            await self._timing.stand_back(error)
            return
        encoder, theta = self._core.encoder, None
        try:
            if snapshot.steps:
                theta = await (encoder.theta() if encoder is not None else self._transport.offload(island.local.copy))
        except ResourceError as error:
            self._events("warning", message=f"the inner steps since the last commit were not saved: {error}")
        if theta is not None:
            told = island.keep()
            self.saving = self._spawn(self._save(self._core.head.id, theta, told))
        await self._training.thaw(self._core.fragment)

    async def _save(self, commit_id: bytes, theta: Floats, told: str) -> None:
        try:
            await self._transport.offload(self._store.save_progress, commit_id, theta, told)
        except (ResourceError, StateError) as error:
            self._events("warning", message=f"the inner steps since the last commit were not saved: {error}")

    def was_handed_over(self, body: Body) -> bool:
        """Whether a commit averages what an earlier life of this process brought: that is part of what was saved, or
        trained on the samples that were still leased then."""
        if not self.carried:
            return False
        count, mine = len(body.seal.members), self._me
        earlier = {i for i, m in enumerate(body.seal.members) if m.peer == mine and m.nonce != self._nonce}
        return any(not earlier.isdisjoint(members_in(entry.contributors, count)) for entry in body.chunks)
