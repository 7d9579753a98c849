"""Applying commits: whole, on their parent, in the log before in the state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .averaged import Averaged, check_all, outsized_in
from .commits import averaged_of, check_child, contributed, members_in
from .core import Core
from .deadline import ASSUMED, encoded_size, transfer_seconds
from .encoder import Encoded
from .ends import Ends
from .errors import DiskFull, PeerMisbehaved, TransportError
from .handing_over import HandingOver, Stake
from .incoming import Incoming
from .keeping import Keeping
from .messages import Body, Commit, hash_of
from .radial import TIMES
from .restoring import Restoring
from .saving import Saving
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
        handing: HandingOver,
        saving: Saving,
        keeping: Keeping,
        succession: Succession,
        timing: Timing,
        incoming: Incoming,
        restoring: Restoring,
        ends: Ends,
        *,
        arrived: Callable[[], None],
    ) -> None:
        self._core = core
        self._training = training
        self._handing = handing
        self._saving = saving
        self._keeping = keeping
        self._succession = succession
        self._timing = timing
        self._incoming = incoming
        self._restoring = restoring
        self._ends = ends
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

    async def apply(self, commit_id: bytes, commit: Commit, chunks: list[bytes], stake: Stake, seconds: float) -> None:
        """Log a commit, apply it whole, and go on training. seconds: that it took, for the log."""
        body = commit.body
        await self._saving.done()
        checked = await self._check(commit_id, commit, chunks)
        if checked is None:
            return
        try:
            await self._transport.offload(self._store.append, commit, chunks)
        except DiskFull as error:
            self._events("warning", message=f"the commit was not logged: {error}")
        way = await self._handing.prepare(body, stake)
        applied = await self._transport.offload(
            self._core.replica.apply, body, commit_id, chunks, me=stake.me, rule=way.rule,
            frozen=stake.frozen if not isinstance(stake.frozen, Encoded) else None, local=way.local, shift=way.shift,
            checked=checked,
        )  # fmt: skip
        self._note_members(body, stake.me)
        self._name_outsized(body, checked)
        more = await self._handing.finish(commit_id, body, stake, way, applied)
        self._log_commit(commit_id, commit, seconds, stake.me is not None, more)
        self._ends.add(commit)
        self._flights.pass_head(self._core.head)
        self._arrived()
        if chunks and (self._core.head.outer_step % self._manifest.state.checkpoint_every == 0 or self._core.finished):
            self._saving.begin()

    async def _check(self, commit_id: bytes, commit: Commit, chunks: list[bytes]) -> list[Averaged] | None:
        """The averages of a commit, if it may be applied here now; one that is false is never looked at again."""
        body, offload = commit.body, self._transport.offload
        try:
            check_child(body, self._core.replica.position, self._manifest, self._layout)
            checked = await offload(check_all, body, chunks, self._layout, self._codec, self._manifest.merging)
        except PeerMisbehaved as error:
            await self._spurn(commit_id, body, str(error))
            return None
        if await self._core.replica.digest(self._transport) != body.state:
            if await self._restoring.recover(body.state):
                if self._island is not None:
                    await self._training.reload()
                self._incoming.again(commit_id, commit)
            else:
                # What every byte on disk says again is so; then the commit is what is wrong.
                await self._spurn(commit_id, body, "it attests a state that is not its parent's")
            return None
        if body.seal.rank != (rank := self._core.replica.rank):
            await self._spurn(commit_id, body, f"its rank is {body.seal.rank}, and {rank} is in force")
            return None
        return checked

    def _note_members(self, body: Body, me: int | None) -> None:
        """What a commit says of those who were in it, this peer included."""
        self._succession.committed(PeerId(body.seal.coordinator))
        for member in body.seal.members:
            if member.weight:
                self._timing.contributed(PeerId(member.peer))
            if member.peer != self._me:
                self._directory.heard(PeerId(member.peer))
        if self._island is not None and me is not None:
            self._keeping.carried = False
            self.contributed += averaged_of(body.seal, body.chunks, self._layout)[me]
            self._island.lease([lease.span for lease in body.leases if lease.member == me])

    def _name_outsized(self, body: Body, averages: list[Averaged]) -> None:
        """Who tried to decide by the length of its contribution how far the model moves. It has no great part in that,
        and should be known all the same."""
        for number, times in outsized_in(body, averages).items():
            reason = (
                f"round {body.round}: the norm of a tensor of its contribution is {times:.3g} times the largest of the "
                f"others'; it counts as {TIMES:.0f} times. Where no harm is meant, its training has diverged"
            )
            peer = PeerId(body.seal.members[number].peer)
            if peer == self._me:
                self._events("warning", message=f"this peer's own contribution: {reason}")
            else:
                self._refuse(peer, reason)

    async def _spurn(self, commit_id: bytes, body: Body, reason: str) -> None:
        """A commit with a majority's signatures that is false all the same: never apply it, and go on training."""
        self._refuse(PeerId(body.seal.coordinator), f"the commit of round {body.round}: {reason}")
        self._incoming.spurn(commit_id)
        if self._island is not None:
            await self._training.thaw(body.fragment)

    def _log_commit(self, commit_id: bytes, commit: Commit, seconds: float, member: bool, more: dict[str, Any]) -> None:
        body = commit.body
        names = [member.peer for member in body.seal.members]
        shares = contributed(body.seal, body.chunks, self._layout)
        self._events(
            "commit", round=body.seal.round, fragment=body.fragment, outer_step=body.outer_step, height=body.height,
            id=commit_id.hex(), parent=body.parent.hex(), members=names,
            contributors=dict(zip(names, shares, strict=True)),
            tokens=body.tokens, weight=body.weight, seconds=seconds, lone=len(names) == 1,
            votes=len(commit.votes), cursor=body.cursor, took_part=member, averaged=bool(body.chunks), **more,
        )  # fmt: skip

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
            wire = self._layout.wire(body.fragment, body.seal.rank)
            size = encoded_size(wire, self._manifest.codec.name, body.seal.members)
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
        members, own = body.seal.members, (self._me, self._nonce)
        me = next((i for i, member in enumerate(members) if (member.peer, member.nonce) == own), None)
        limbo = self._flights.limbo_of(hash_of(body.seal))
        frozen = limbo.theta if limbo is not None else None
        count = len(members)
        averaged = me is not None and any(me in members_in(entry.contributors, count) for entry in body.chunks)
        lost = averaged and frozen is None
        if lost:
            self._events("warning", message="progress since a void round that was committed after all is dropped")
        elif self._keeping.was_handed_over(body) and self._island is not None:
            self._events("warning", message="the inner steps that were saved have been averaged; they are dropped")
            self._island.revoke()  # some of these samples are in that average too
            lost, self._keeping.carried = True, False
        stake = Stake(me, None if lost else frozen, limbo.brought if limbo is not None else None, lost)
        await self.apply(commit_id, commit, chunks, stake, seconds)
