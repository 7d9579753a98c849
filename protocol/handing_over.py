"""What a commit does to the island: what it has averaged is handed over, what was done since stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .commits import contributed
from .core import Core
from .encoder import Encoded, Encoder, Outcome, averaged, share_of
from .errors import ResourceError
from .flights import Brought
from .island import Island, Snapshot
from .messages import Body
from .overlap import Merge, Overlap, left
from .replica import CARRY, Applied
from .training import Training

Floats = NDArray[np.float32]


@dataclass
class Stake:
    """What this peer has in a commit.

    me: its place in the roster; None: it was not in it. frozen: its θ at the freeze, or what the island has encoded of
    it; None when that is gone, or was nothing. held: its counters then. lost: the progress since the freeze is to be
    dropped.
    """

    me: int | None
    frozen: Floats | Encoded | None
    held: Brought | None
    lost: bool = False

    @property
    def of(self) -> Snapshot | None:
        """The island's counters at the freeze."""
        return self.held.of if self.held is not None else None


@dataclass
class Way:
    """How a commit reaches the island."""

    encoder: Encoder | None
    moving: bool
    """Whether it trains on but for the moment in which its parameters move."""
    dropped: int
    """Tokens that are too old now."""
    rule: Overlap
    local: Floats | None
    """The island's θ, for the replica to write."""
    shift: Floats | None
    """Where the replica is to write how that moves, instead."""


class HandingOver:
    """Where there is no overlap the island is frozen until a commit is applied, else it trains on."""

    def __init__(self, core: Core, training: Training) -> None:
        self._core = core
        self._training = training
        self._manifest = core.manifest
        self._layout = core.layout
        self._island = core.island
        self._flights = core.flights
        self._events = core.events
        self._untold = b"", b""
        """The last commit of leases alone, of which an island that encodes is not told; and which it knows instead."""

    def told_of(self, head: bytes) -> bytes:
        """The commit with chunks, or the one that it began with, that an island that encodes knows this head by."""
        return self._untold[1] if self._untold[0] == head else head

    async def prepare(self, body: Body, stake: Stake) -> Way:
        """Before a commit is applied to the replica: freeze an island whose θ is about to be written."""
        island, training = self._island, self._training
        training.note_life()
        encoder = self._core.encoder
        moving = island is not None and bool(body.chunks) and not training.frozen
        share = 1.0 if stake.lost else 0.0
        if stake.me is not None and not stake.lost:
            share = contributed(body.seal, body.chunks, self._layout)[stake.me]
        dropped = training.grow_old(body, share)
        here = encoder is None and island is not None and (island.frozen is None or stake.lost or bool(dropped))
        if moving and (here or body.outer_step >= self._manifest.regular_steps):
            moving = False  # nothing may be training on it
            try:
                await training.freeze()
            except ResourceError as error:
                self._events("warning", message=f"the island did not freeze: {error}")
        local = shift = None
        if island is not None and encoder is None and moving:
            shift = island.frozen
        elif island is not None and encoder is None and not (stake.lost or dropped):
            local = island.local
        return Way(encoder, moving, dropped, training.rule if training.ahead else CARRY, local, shift)

    async def finish(self, commit_id: bytes, body: Body, stake: Stake, way: Way, applied: Applied) -> dict[str, Any]:
        """After it was applied: let the island go on, with what it has not handed over; what to log of it."""
        if self._island is None:
            return {}
        if way.encoder is not None:
            return await self._tell(way.encoder, commit_id, body, stake, way)
        return await self._go_on(self._island, body, stake, way, applied)

    async def _go_on(self, island: Island, body: Body, stake: Stake, way: Way, applied: Applied) -> dict[str, Any]:
        training, replica, held = self._training, self._core.replica, stake.held
        more: dict[str, Any] = {}
        # What was done since the freeze stays, and counts next time; by one rule it is lost to this fragment.
        overwrite, part = way.rule.merge is Merge.OVERWRITE, self._layout.fragment(body.fragment)
        paused = stake.frozen is island.local or (overwrite and self._layout.fragments == 1)
        of, total = (None, None) if paused or held is None else (held.of, held.total)
        snapshot, spent = stake.of, applied.share
        if stake.lost or way.dropped:
            for span in map(part.span, range(part.count)):
                island.local[span] = replica.params[span]
                if replica.residual is not None and stake.lost:
                    replica.residual[span] = 0
            spent, of, total = 1.0, None, None
        if way.dropped:
            training.run_ahead(False)
            more["stale_tokens"] = round(way.dropped * part.parameters / self._layout.parameters)
        if way.moving:
            moved = await training.move(applied.runs, spent=spent, of=of)
            if moved is not None:
                training.accounts.commit(body.fragment, spent, moved, of, overwrite=overwrite, total=total)
                if overwrite and snapshot is not None:
                    share = applied.share * (part.parameters / self._layout.parameters)
                    more["lost_tokens"] = round(max(moved.tokens - snapshot.tokens, 0) * share)
            more["stopped"] = moved.stopped if moved is not None else 0.0
        elif training.frozen and not self._core.finished:  # after the last round there is nothing to train for
            now = training.counted()
            training.accounts.commit(
                body.fragment, spent, now, of, overwrite=overwrite, total=total, leases=not body.chunks
            )  # fmt: skip
            training.go_on(ahead=training.ahead)
            ahead = training.may_step(left(now.tokens, spent, of.tokens if of is not None else None))
            reload = training.take_rewritten() or bool(body.chunks)
            await island.resume(
                reload=reload, spent=spent, outer_step=body.outer_step, of=of, ahead=ahead,
                until=self._flights.until(),
            )  # fmt: skip
            self._flights.lower(now, spent, of)
        elif training.ahead:
            await training.thaw(body.fragment)  # leases alone: nothing was averaged
        return more

    async def _tell(self, encoder: Encoder, commit_id: bytes, body: Body, stake: Stake, way: Way) -> dict[str, Any]:
        """Let an island that encodes take over a commit."""
        island, training, part = self._island, self._training, self._layout.fragment(body.fragment)
        assert island is not None
        if not body.chunks or self._core.finished:  # leases alone; after the last round there is nothing to train for
            if not body.chunks:
                self._untold = commit_id, self.told_of(body.parent)
                await training.thaw(body.fragment)
            return {}
        snapshot, rule = stake.of, way.rule
        brought = stake.frozen if isinstance(stake.frozen, Encoded) else None
        if brought is not None and brought.life != island.life:
            brought = None  # it counts in the commit, and is no longer in the local parameters
        mine, others = averaged(body, stake.me if brought is not None else None)
        overwrite, moving = rule.merge is Merge.OVERWRITE, not training.frozen
        paused = training.frozen and brought is not None and brought is training.encoded
        spent, of = share_of(mine, part), snapshot
        if stake.lost or way.dropped or paused or (overwrite and self._layout.fragments == 1):
            of = None
        if stake.lost or way.dropped:
            spent = 1.0
        ahead = None
        if not moving:  # its counters stand still
            now = training.counted()
            training.accounts.commit(body.fragment, spent, now, of, overwrite=overwrite)
            ahead = training.may_step(left(now.tokens, spent, of.tokens if of is not None else None))
        outcome = Outcome(body.fragment, commit_id, mine, others, brought, stake.lost, bool(way.dropped), rule)
        try:
            moved, known = await encoder.commit(
                outcome, self._core.replica.params, spent=spent, of=of, outer_step=body.outer_step, ahead=ahead
            )
        except ResourceError as error:
            self._events("warning", message=f"{error}; the inner steps since the last commit are lost")
            await training.reload()
            return {"stopped": 0.0} if moving else {}
        training.go_on(ahead=False)
        if not known:
            self._events("warning", message="progress since a void round that was committed after all is dropped")
            spent, of = 1.0, None
        if moving:
            training.accounts.commit(body.fragment, spent, moved, of, overwrite=overwrite)
        elif not known:
            training.accounts.clear(self._core.fragment)
        more: dict[str, Any] = {"stopped": moved.stopped} if moving else {}
        if way.dropped:
            more["stale_tokens"] = round(way.dropped * part.parameters / self._layout.parameters)
        if overwrite and moving and snapshot is not None:
            share = share_of(mine, part) * (part.parameters / self._layout.parameters)
            more["lost_tokens"] = round(max(moved.tokens - snapshot.tokens, 0) * share)
        return more
