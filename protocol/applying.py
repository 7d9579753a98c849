"""Applying commits: whole, on their parent, in the log before in the state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .averaged import check_all
from .commits import averaged_of, check_child, contributed, members_in
from .core import Core
from .deadline import ASSUMED, encoded_size, transfer_seconds
from .encoder import Encoded, Encoder, Outcome, averaged, share_of
from .ends import Ends
from .errors import DiskFull, PeerMisbehaved, ResourceError, StateError, TransportError
from .flights import Brought
from .incoming import Incoming
from .island import Snapshot
from .keeping import Keeping
from .messages import Body, Commit, hash_of
from .overlap import Merge, Overlap, left
from .replica import CARRY
from .restoring import Restoring
from .succession import Succession
from .timing import Timing
from .training import Training
from .transport import PeerId

Floats = NDArray[np.float32]


class Applying:
    """Applies commits of rounds that this peer was in, and of others.

    arrived: called when the head is another.
    """

    def __init__(
        self,
        core: Core,
        training: Training,
        keeping: Keeping,
        succession: Succession,
        timing: Timing,
        incoming: Incoming,
        restoring: Restoring,
        ends: Ends,
        *,
        in_use: Callable[[], frozenset[bytes]],
        arrived: Callable[[], None],
    ) -> None:
        self._core = core
        self._training = training
        self._keeping = keeping
        self._succession = succession
        self._timing = timing
        self._incoming = incoming
        self._restoring = restoring
        self._ends = ends
        self._in_use = in_use
        self._arrived = arrived
        self._transport = core.transport
        self._me = core.me
        self._manifest = core.manifest
        self._layout = core.layout
        self._codec = core.codec
        self._store = core.store
        self._island = core.island
        self._directory = core.directory
        self._fetcher = core.fetcher
        self._flights = core.flights
        self._events = core.events
        self._silence = core.silence
        self._nonce = core.nonce
        self._refuse = core.refuse
        self.contributed = 0
        """Tokens of this peer that commits have averaged since it started."""
        self._untold = b"", b""
        """The last commit of leases alone, of which an island that encodes is not told; and which it knows instead."""
        self._checkpointing: asyncio.Task[None] | None = None

    async def apply(
        self, commit_id: bytes, commit: Commit, chunks: list[bytes], *, me: int | None,
        frozen: Floats | Encoded | None, held: Brought | None, seconds: float, lost: bool = False,
    ) -> None:  # fmt: skip
        """Log a commit, apply it whole, and go on training. Where there is no overlap the island is frozen until
        then, else it trains on but for the moment in which its parameters move."""
        body, island = commit.body, self._island
        await self.checkpointed()
        try:
            check_child(body, self._core.replica.position, self._manifest, self._layout)
            await self._transport.offload(check_all, body, chunks, self._layout, self._codec, self._manifest.merging)
        except PeerMisbehaved as error:
            await self._spurn(commit_id, body, str(error))
            return
        digest = await self._core.replica.digest(self._transport)
        if digest != body.state:
            if await self._restoring.recover(body.state):
                if island is not None:
                    await self._training.reload()
                self._incoming.again(commit_id, commit)
            else:
                # What every byte on disk says again is so; then the commit is what is wrong.
                await self._spurn(commit_id, body, "it attests a state that is not its parent's")
            return
        if body.seal.rank != self._core.replica.rank:
            rank = self._core.replica.rank
            await self._spurn(commit_id, body, f"its rank is {body.seal.rank}, and {rank} is in force")
            return
        try:
            await self._transport.offload(self._store.append, commit, chunks)
        except DiskFull as error:
            self._events("warning", message=f"the commit was not logged: {error}")
        last = body.outer_step >= self._manifest.regular_steps
        self._training.note_life()
        encoder = self._core.encoder
        moving = island is not None and bool(chunks) and not self._training.frozen
        dropped = self._training.grow_old(
            body, 1.0 if lost else contributed(body.seal, body.chunks, self._layout)[me] if me is not None else 0.0
        )  # fmt: skip
        here = encoder is None and island is not None and (island.frozen is None or lost or bool(dropped))
        if moving and (here or last):
            # Its θ is about to be written; nothing may be training on it.
            moving = False
            try:
                await self._training.freeze()
            except ResourceError as error:
                self._events("warning", message=f"the island did not freeze: {error}")
        rule = self._training.rule if self._training.ahead else CARRY
        applied = await self._transport.offload(
            self._core.replica.apply, body, commit_id, chunks, me=me, rule=rule,
            frozen=frozen if not isinstance(frozen, Encoded) else None,
            local=island.local if island is not None and encoder is None and not (lost or dropped or moving) else None,
            shift=island.frozen if island is not None and encoder is None and moving else None,
        )  # fmt: skip
        self._succession.committed(PeerId(body.seal.coordinator))
        names = [member.peer for member in body.seal.members]
        for member in body.seal.members:
            if member.weight:
                self._timing.contributed(PeerId(member.peer))
            if member.peer != self._me:
                self._directory.heard(PeerId(member.peer))
        more: dict[str, Any] = {}
        if island is not None and me is not None:
            self._keeping.carried = False
            self.contributed += averaged_of(body.seal, body.chunks, self._layout)[me]
            island.lease([lease.span for lease in body.leases if lease.member == me])
        if island is not None and encoder is not None:
            brought = frozen if isinstance(frozen, Encoded) else None
            more = await self._tell_encoder(
                encoder, commit_id, body, me, brought, held.of if held is not None else None, lost=lost,
                dropped=dropped, rule=rule,
            )  # fmt: skip
        elif island is not None:
            # What was done since the freeze stays, and counts next time; by one rule it is lost to this fragment.
            overwrite, part = rule.merge is Merge.OVERWRITE, self._layout.fragment(body.fragment)
            paused = frozen is island.local or (overwrite and self._layout.fragments == 1)
            of, total = (None, None) if paused or held is None else (held.of, held.total)
            snapshot = held.of if held is not None else None
            spent = applied.share
            if lost or dropped:
                for span in map(part.span, range(part.count)):
                    island.local[span] = self._core.replica.params[span]
                    if self._core.replica.residual is not None and lost:
                        self._core.replica.residual[span] = 0
                spent, of, total = 1.0, None, None
            if dropped:
                self._training.ahead = False
                more["stale_tokens"] = round(dropped * part.parameters / self._layout.parameters)
            if moving:
                moved = await self._training.move(applied.runs, spent=spent, of=of)
                if moved is not None:
                    self._training.accounts.commit(body.fragment, spent, moved, of, overwrite=overwrite, total=total)
                    if overwrite and snapshot is not None:
                        share = applied.share * (part.parameters / self._layout.parameters)
                        more["lost_tokens"] = round(max(moved.tokens - snapshot.tokens, 0) * share)
                more["stopped"] = moved.stopped if moved is not None else 0.0
            elif self._training.frozen and not self._core.finished:
                # After the last round there is nothing to train for.
                counted = island.progress()
                now = Snapshot(counted.steps, counted.tokens, counted.units, counted.leased)
                self._training.accounts.commit(body.fragment, spent, now, of, overwrite=overwrite, total=total)
                self._training.frozen = False
                ahead = self._training.may_step(left(now.tokens, spent, of.tokens if of is not None else None))
                await island.resume(
                    reload=bool(chunks), spent=spent, outer_step=body.outer_step, of=of, ahead=ahead,
                    until=self._flights.until(),
                )  # fmt: skip
                self._flights.lower(now, spent, of)
            elif self._training.ahead:
                await self._training.thaw(body.fragment)  # leases alone: nothing was averaged
        self._log_commit(commit_id, commit, names, seconds, more)
        self._ends.add(commit)
        self._flights.pass_head(self._core.head)
        self._arrived()
        if chunks and (self._core.head.outer_step % self._manifest.state.checkpoint_every == 0 or self._core.finished):
            self._checkpointing = asyncio.get_running_loop().create_task(self._checkpoint())

    async def _tell_encoder(
        self, encoder: Encoder, commit_id: bytes, body: Body, me: int | None, brought: Encoded | None,
        snapshot: Snapshot | None, *, lost: bool, dropped: int, rule: Overlap,
    ) -> dict[str, Any]:  # fmt: skip
        """Let an island that encodes take over a commit that has been applied here; what to log of it. dropped: tokens
        that are too old now."""
        island, part = self._island, self._layout.fragment(body.fragment)
        assert island is not None
        if not body.chunks or self._core.finished:  # leases alone; after the last round there is nothing to train for
            if not body.chunks:
                self._untold = commit_id, self._told_of(body.parent)
                await self._training.thaw(body.fragment)
            return {}
        if brought is not None and brought.life != island.life:
            brought = None  # it counts in the commit, and is no longer in the local parameters
        mine, others = averaged(body, me if brought is not None else None)
        overwrite, moving = rule.merge is Merge.OVERWRITE, not self._training.frozen
        paused = self._training.frozen and brought is not None and brought is self._training.encoded
        spent, of = share_of(mine, part), snapshot
        if lost or dropped or paused or (overwrite and self._layout.fragments == 1):
            of = None
        if lost or dropped:
            spent = 1.0
        ahead = None
        if not moving:  # its counters stand still
            counted = island.progress()
            now = Snapshot(counted.steps, counted.tokens, counted.units, counted.leased)
            self._training.accounts.commit(body.fragment, spent, now, of, overwrite=overwrite)
            ahead = self._training.may_step(left(now.tokens, spent, of.tokens if of is not None else None))
        outcome = Outcome(body.fragment, commit_id, mine, others, brought, lost, bool(dropped), rule)
        try:
            moved, known = await encoder.commit(
                outcome, self._core.replica.params, spent=spent, of=of, outer_step=body.outer_step, ahead=ahead
            )
        except ResourceError as error:
            self._events("warning", message=f"{error}; the inner steps since the last commit are lost")
            await self._training.reload()
            return {"stopped": 0.0} if moving else {}
        self._training.frozen = self._training.ahead = False
        if not known:
            self._events("warning", message="progress since a void round that was committed after all is dropped")
            spent, of = 1.0, None
        if moving:
            self._training.accounts.commit(body.fragment, spent, moved, of, overwrite=overwrite)
        elif not known:
            self._training.accounts.clear(self._core.fragment)
        more: dict[str, Any] = {"stopped": moved.stopped} if moving else {}
        if dropped:
            more["stale_tokens"] = round(dropped * part.parameters / self._layout.parameters)
        if overwrite and moving and snapshot is not None:
            share = share_of(mine, part) * (part.parameters / self._layout.parameters)
            more["lost_tokens"] = round(max(moved.tokens - snapshot.tokens, 0) * share)
        return more

    async def _spurn(self, commit_id: bytes, body: Body, reason: str) -> None:
        """A commit with a majority's signatures that is false all the same: never apply it, and go on training."""
        self._refuse(PeerId(body.seal.coordinator), f"the commit of round {body.round}: {reason}")
        self._incoming.spurn(commit_id)
        if self._island is not None:
            await self._training.thaw(body.fragment)

    def _log_commit(
        self, commit_id: bytes, commit: Commit, names: list[str], seconds: float, more: dict[str, Any]
    ) -> None:
        body = commit.body
        shares = contributed(body.seal, body.chunks, self._layout)
        self._events(
            "commit", round=body.seal.round, fragment=body.fragment, outer_step=body.outer_step, height=body.height,
            id=commit_id.hex(), parent=body.parent.hex(), members=names,
            contributors=dict(zip(names, shares, strict=True)),
            tokens=body.tokens, weight=body.weight, seconds=seconds, lone=len(names) == 1,
            votes=len(commit.votes), cursor=body.cursor, **more,
        )  # fmt: skip

    async def checkpointed(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._checkpointing is not None:
            await self._checkpointing
            self._checkpointing = None

    async def finish(self) -> None:
        """Wait for a checkpoint that is being written, whatever comes of it."""
        if self._checkpointing is not None:
            await asyncio.gather(self._checkpointing, return_exceptions=True)

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
                residual = await encoder.residual(self._told_of(commit_id))
            if residual is not None:
                await self._transport.offload(self._store.save_residual, commit_id, residual)
        except (ResourceError, StateError) as error:
            self._events("warning", message=f"the residual was not saved: {error}")

    def _told_of(self, head: bytes) -> bytes:
        """The commit with chunks, or the one that it began with, that an island that encodes knows this head by."""
        return self._untold[1] if self._untold[0] == head else head

    async def follow(self, commit_id: bytes, commit: Commit) -> None:
        """Apply a commit on this head that this peer had no live part in: another roster's, or a void one's."""
        body = commit.body
        try:
            check_child(body, self._core.replica.position, self._manifest, self._layout)
        except PeerMisbehaved as error:
            self._refuse(PeerId(body.seal.coordinator), str(error))
            return
        donors = [PeerId(member.peer) for member in body.seal.members if member.peer != self._me]
        started = self._transport.now()
        try:
            size = encoded_size(self._layout.wire(body.fragment, body.seal.rank), self._manifest.codec.name)
            rate = self._core.rates.download or ASSUMED
            async with asyncio.timeout(4 * self._silence + 4 * transfer_seconds(size, 2, rate)):
                chunks = await self._fetcher.chunks(body, donors, self._flights.recent)
        except (TransportError, TimeoutError) as error:
            # Whoever has the head has its chunks; the way to it is then the ordinary catching up.
            self._events("warning", message=f"round {body.round}: a chunk of the commit is not to be had: {error}")
            return
        await self.apply_late(commit_id, commit, chunks, self._transport.now() - started)

    async def apply_late(self, commit_id: bytes, commit: Commit, chunks: list[bytes], seconds: float) -> None:
        """Apply a commit on this head outside of its round. What was frozen for its roster, if this peer was in it,
        has been averaged and leaves the local weights; all else moves along."""
        body = commit.body
        me = next(
            (i for i, m in enumerate(body.seal.members) if (m.peer, m.nonce) == (self._me, self._nonce)),
            None,
        )
        roster = hash_of(body.seal)
        limbo = self._flights.limbo_of(roster)
        frozen = limbo.theta if limbo is not None else None
        count = len(body.seal.members)
        averaged = me is not None and any(me in members_in(entry.contributors, count) for entry in body.chunks)
        lost = averaged and frozen is None
        if lost:
            self._events("warning", message="progress since a void round that was committed after all is dropped")
        elif self._keeping.was_handed_over(body) and self._island is not None:
            self._events("warning", message="the inner steps that were saved have been averaged; they are dropped")
            self._island.revoke()  # some of these samples are in that average too
            lost, self._keeping.carried = True, False
        await self.apply(
            commit_id, commit, chunks, me=me, frozen=None if lost else frozen,
            held=limbo.brought if limbo is not None else None,
            seconds=seconds, lost=lost,
        )  # fmt: skip
