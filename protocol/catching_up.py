"""Catching up: from the own head to a better one that others have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .applying import Applying
from .averaged import check_all
from .core import Core
from .ends import Ends
from .errors import Fault, NonFinite, ResourceError, StateError, TransportError
from .fetch import Plan
from .forks import lost_between
from .heads import Heads
from .incoming import Incoming
from .island import Progress
from .keeping import Keeping
from .messages import Commit, Head, better, hash_of
from .restoring import Restoring
from .rounds import Rounds
from .saving import Saving
from .timing import Timing
from .training import Training
from .transport import PeerId

MAX_DONORS = 8
"""Peers asked at once for what this one lacks."""


class CatchingUp:
    """Looks into better heads, and goes over to them.

    arrived: called when the head is another.
    """

    def __init__(
        self,
        core: Core,
        heads: Heads,
        timing: Timing,
        training: Training,
        keeping: Keeping,
        incoming: Incoming,
        restoring: Restoring,
        saving: Saving,
        applying: Applying,
        ends: Ends,
        rounds: Rounds,
        *,
        arrived: Callable[[], None],
    ) -> None:
        self._core = core
        self._heads = heads
        self._timing = timing
        self._training = training
        self._keeping = keeping
        self._incoming = incoming
        self._restoring = restoring
        self._saving = saving
        self._applying = applying
        self._ends = ends
        self._rounds = rounds
        self._arrived = arrived
        self._transport = core.transport
        self._manifest = core.manifest
        self._layout = core.layout
        self._codec = core.codec
        self._store = core.store
        self._island = core.island
        self._messenger = core.messenger
        self._guide = core.guide
        self._fetcher = core.fetcher
        self._flights = core.flights
        self._events = core.events
        self._silence = core.silence
        self._spawn = core.tasks.spawn
        self._wake = core.agenda.wake

    def look(self) -> None:
        """Begin to look into the better heads that are known."""
        ahead = sorted(
            self._heads.ahead, key=lambda peer: (self._messenger.failing(peer), -self._messenger.heard(peer))
        )
        self._heads.look(self._spawn(self._look_into(ahead[:MAX_DONORS])))

    async def _look_into(self, claimants: list[PeerId]) -> None:
        """Ask those who claim a better head for a way to it that can be verified. Runs beside the rounds: anybody can
        claim a head, so a claim alone must keep this peer from nothing."""
        try:
            starts = await self._transport.offload(self._store.restorable)
            plan = await self._fetcher.plan(claimants, self._core.head, starts)
            if plan is not None and plan.base == plan.head:
                await self._guide.take(plan.lineage)  # of a chain that is here
            self._heads.show(plan)
        except (TransportError, ResourceError, StateError) as error:
            self._events("warning", message=f"cannot catch up yet: {error}")
            if error.fault is Fault.LOCAL:
                claimants = []  # nothing was learnt about them
                await asyncio.sleep(self._silence)
        for peer in claimants:
            if peer not in self._fetcher.mute:
                self._heads.answered(peer)
        if self._heads.plan is None:
            for peer in claimants:
                if peer in self._heads.claimed and not better(self._heads.claimed[peer], self._core.head):
                    # Nothing is wrong with its head, but that it could not show the anchor behind it.
                    self._guide.doubt(peer)
                    self._heads.ahead.pop(peer, None)
                else:
                    # Who is heard, and gives no answer to that, is not out of reach.
                    away = self._messenger.silent_for(peer, float("-inf")) > self._silence
                    self._heads.disbelieve(peer, mute=away and peer in self._fetcher.mute)
        self._heads.looked()
        self._wake.set()

    def found_on_disk(self, head: Head) -> None:
        """A chain that this peer has left is the organiser's."""
        if self._guide.surpasses(head, b"", self._core.head):
            self._heads.show(Plan(head, head, None, [], []))
            self._wake.set()

    async def catch_up(self, plan: Plan) -> None:
        """Fetch what lies between this head and a verified better one, and go over to it."""
        before = self._core.state
        self._heads.set_out()
        if not self._guide.surpasses(plan.head, plan.anchored, self._core.head):
            self._heads.look_again()  # it may have shown what is behind the own head
            return
        if plan.base != self._core.head or plan.checkpoint is not None:
            await self._rounds.ground("a better head than its base is known")
        self._core.set_state("joining")
        await self._saving.done()
        try:
            await self._fetcher.carry_out(plan, self._store, self._log)
        except (TransportError, ResourceError, StateError, NonFinite) as error:
            self._events("warning", message=f"cannot catch up yet: {error}")
            if error.fault is Fault.LOCAL:
                await asyncio.sleep(self._silence)
            else:
                for peer in plan.donors:
                    self._heads.disbelieve(peer)
        else:
            await self._guide.take(plan.lineage)
            self._timing.in_company()  # others are where it goes
            if plan.base == self._core.head and plan.checkpoint is None:
                await self._walk(plan)
            else:
                await self._go_over(plan)
        if self._core.state == "joining":
            self._core.set_state("observing" if self._island is None else before if before != "joining" else "training")

    async def _walk(self, plan: Plan) -> None:
        """Apply a plan's commits one after another, as far as they follow from this head."""
        for step in plan.steps:
            if step.commit.body.parent != self._core.head.id:
                break
            commit_id = hash_of(step.commit.body)
            try:
                chunks = await self._transport.offload(self._store.chunks, commit_id)
            except StateError as error:
                self._events("warning", message=str(error))
                break
            flight = self._flights.of(hash_of(step.commit.body.seal))
            if flight is None:
                if (rival := self._incoming.rival(step.commit)) is not None:
                    await self._rounds.ground("another roster committed on the same base", [rival])
                await self._applying.apply_late(commit_id, step.commit, chunks, 0.0)
                continue
            if flight.task is not None:
                flight.task.cancel()
                await asyncio.wait([flight.task])
            flight.commit, flight.void = step.commit, None
            await self._rounds.land(flight, chunks)

    def _log(self, commit: Commit, chunks: list[bytes]) -> None:
        """Log a fetched commit, once its chunks are known to be sound."""
        check_all(commit.body, chunks, self._layout, self._codec, self._manifest.merging)
        self._store.append(commit, chunks)

    async def _go_over(self, plan: Plan) -> None:
        """Reload what the store has of another head: a fork's end, or a jump over commits that are no longer kept.

        What this peer has not handed over belongs to the chain that it leaves: it is dropped, and said to be lost.
        """
        head = plan.head
        loaded = await self._transport.offload(self._store.load, head.id)
        if loaded is None:
            self._events("warning", message=f"the state of round {head.round} could not be loaded; it is fetched again")
            if self._island is not None:
                await self._training.thaw(self._core.fragment)
            return
        progress = self._island.progress() if self._island is not None else Progress()
        if self._island is not None:
            try:
                await self._training.freeze()
            except ResourceError as error:
                self._events("warning", message=f"the island did not freeze: {error}")
        before = self._core.head
        state = loaded.state if loaded.state is not None else await self._transport.offload(self._restoring.fresh)
        self._core.replica.adopt(state, loaded.position, await self._restoring.rank_of(state, loaded.position))
        self._ends.clear()
        await self._restoring.replay(self._core.replica, loaded.replay)
        if self._store.prefers(head, self._core.head):
            self._heads.owe(head)
        try:
            await self._transport.offload(self._store.see, head)
        except ResourceError as error:
            self._events("warning", message=f"the head was not written down: {error}")
        chain = [self._core.head, *plan.path, *(entry.head for entry in self._store.chain(self._core.head.id, 0))]
        lost = await self._transport.offload(
            lost_between, before, chain, self._store.commit, self._core.me, self._layout
        )
        self._events(
            "resync", round=self._core.head.round, outer_step=self._core.head.outer_step, left=before.id.hex(),
            left_round=before.round, lost_tokens=self._training.accounts.unmerged(progress),
            lost_commits=lost.commits, lost_averaged=lost.tokens, lost_more=lost.more,
        )  # fmt: skip
        if self._island is not None:
            self._island.revoke()
            self._keeping.carried = False
            await self._training.reload()
        self._flights.leave(self._core.head)
        self._arrived()
