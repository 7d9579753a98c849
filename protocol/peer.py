"""A peer of a run: finds the others, trains, reports, calls or is called, reduces, signs, applies.

This is the protocol of the design under "One round", on whatever transport, store and island it is given. One task,
:meth:`Peer._main`, makes all decisions about the own state, one at a time; message handlers only take notes and wake
it up. What it decides about stands in modules of their own, which share a :class:`.core.Core`: each is given those
that it needs, and those above it only as functions to call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .anchoring import Guide
from .applying import Applying
from .catching_up import CatchingUp
from .clock import ClockWatch
from .codecs import get_codec
from .commits import Position
from .control import (
    Ballot,
    Busy,
    Call,
    Committed,
    Control,
    Enter,
    Heard,
    Ping,
    Reassign,
    Refuse,
    Release,
    Report,
    Sealed,
    Voided,
)
from .coordinating import Coordinating
from .core import Core
from .directory import Directory
from .ends import Ends
from .engagement import Engagement
from .entering import EnteringCalls
from .fetch import Fetcher
from .flights import Flights
from .handing_over import HandingOver
from .heads import Heads
from .holdups import HoldUps
from .identity import Signer
from .incoming import Incoming
from .island import Island, Progress
from .keeping import Keeping
from .manifest import Manifest
from .messages import Head
from .messenger import Messenger, message_limit
from .probe import Prober
from .rates import Rates
from .records import Record, State
from .reduce import PROTOCOL as REDUCE
from .refusals import Events, Refusals
from .replica import Replica
from .reporting import Reporting
from .reports import Reports
from .restoring import Restoring
from .rounds import Rounds
from .saving import Saving
from .store import Store
from .succession import Succession
from .tasks import Tasks
from .timing import Timing
from .training import Training
from .transfer import Donor
from .transport import PeerId, Standing, Transport
from .wakeup import Agenda

LINGER = 30.0
"""Seconds for which a peer at the end of the run waits for others to have its head."""

Floats = NDArray[np.float32]


class Peer:
    """One peer. ``run`` takes part until the run's budget is used up or :meth:`stop` is called.

    theta0: builds the initial parameters (float32, one element a model parameter); their digest must be the
    manifest's.
    island: the compute; None for a peer that follows without training (an observer, an archive).
    events: receives everything worth knowing (docs/operations.md lists the events).
    keep_every: seconds after which what the island has trained since the last commit is saved, again and again, and at
    an orderly end; 0: never, as in a run of several fragments. A crash then costs the inner steps since that, not all
    since the commit.
    on_head: awaited after every commit that was applied, with the position; for evaluation and export.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        signer: Signer,
        manifest: Manifest,
        store: Store,
        theta0: Callable[[], Floats],
        events: Events,
        island: Island | None = None,
        name: str = "",
        version: str = "",
        reachable: bool = True,
        linger: float = LINGER,
        keep_every: float = 0.0,
        on_head: Callable[[Position], None] | None = None,
    ) -> None:
        self.transport = transport
        self.signer = signer
        self.manifest = manifest
        self.layout = manifest.layout
        self.store = store
        self.island = island
        self.name = name
        self.version = version
        self._linger = linger
        self._on_head = on_head
        self._silence = manifest.round.silence
        self._transfer_told = float("-inf")
        nonce = transport.nonce()
        agenda = Agenda(transport.now)
        self._wake = agenda.wake
        self._events = Refusals(events, transport.now)
        self._refuse = self._events.refuse
        self._flights = Flights(manifest, self.layout)
        rates = Rates(transport.now())

        def warn(message: str) -> None:
            self._events("warning", message=message)

        self.messenger = Messenger(
            transport, self._receive, silence=self._silence, admits=manifest.admits, refused=self._refuse,
            limit=message_limit(self.layout.count), lost=self._wake.set,
        )  # fmt: skip
        self.directory = Directory(
            transport, signer, manifest, record=self._record, refused=self._refuse, changed=self._wake.set,
            told=self._told, forgotten=self._forget,
        )  # fmt: skip
        self.donor = Donor(
            transport, store, admits=manifest.admits, busy=lambda: self._flights.busy, recent=self._flights.recent,
            member=self._flights.has, refused=self._refuse, warn=warn,
        )  # fmt: skip
        self.guide = Guide(
            transport, signer, manifest, store, events=self._events, others=lambda: list(self.directory.known),
            changed=lambda: self._heads.look_again(), found=lambda head: self._catching_up.found_on_disk(head),
            publish=self.directory.publish_anew, refused=self._refuse,
        )  # fmt: skip
        self.clock = ClockWatch(
            transport, lonely=self.directory.lonely, corrected=self.directory.anew, admits=manifest.admits, warn=warn
        )
        self.fetcher = Fetcher(
            transport, manifest, self.layout, signer, report=self._refuse, progress=self._transferred, guide=self.guide
        )
        self._prober = Prober(
            transport, rates, room=self._room, partners=self._partners,
            known=lambda peer: manifest.admits(peer) and peer in self.directory.known, refused=self._refuse,
            events=self._events,
        )  # fmt: skip
        self._hold_ups = HoldUps(
            transport.now, self._held_up, every=self._silence / 5, most=self._silence / 2
        )  # fmt: skip
        self._tasks = Tasks()
        self._core = core = Core(
            transport=transport, signer=signer, manifest=manifest, layout=self.layout,
            codec=get_codec(manifest.codec.name), store=store, island=island, reachable=reachable, events=self._events,
            nonce=nonce, messenger=self.messenger, directory=self.directory, guide=self.guide, fetcher=self.fetcher,
            flights=self._flights, rates=rates, tasks=self._tasks, agenda=agenda,
        )  # fmt: skip
        self._agenda = agenda
        self._heads = heads = Heads(core)
        self._succession = succession = Succession(core, heads)
        self._training = training = Training(core)
        self._reports = reports = Reports(core, training)
        self._timing = timing = Timing(core, heads, succession, reports, training)
        self._reporting = reporting = Reporting(core, heads, reports, succession, timing)
        self._keeping = keeping = Keeping(core, training, timing, every=keep_every)
        self._engagement = engagement = Engagement(core, succession)
        self._incoming = incoming = Incoming(core, heads, engagement)
        self._restoring = restoring = Restoring(core, heads, theta0)
        self._ends = ends = Ends(core)
        handing = HandingOver(core, training)
        self._saving = saving = Saving(core, handing, in_use=self.donor.in_use)
        self._applying = applying = Applying(
            core, training, handing, saving, keeping, succession, timing, incoming, restoring, ends,
            arrived=self._new_head,
        )  # fmt: skip
        self._rounds = rounds = Rounds(
            core, training, heads, succession, reports, timing, reporting, engagement, incoming, applying, ends,
            landed=self._prober.poke,
        )  # fmt: skip
        self._coordinating = Coordinating(
            core, heads, succession, reports, timing, training, engagement, incoming, rounds
        )  # fmt: skip
        self._entering = EnteringCalls(core, heads, succession, timing, training, engagement, rounds)
        self._catching_up = CatchingUp(
            core, heads, timing, training, keeping, incoming, restoring, saving, applying, ends, rounds,
            arrived=self._new_head,
        )  # fmt: skip

    # --- what others may know ------------------------------------------------------------------------------------

    @property
    def replica(self) -> Replica:
        return self._core.replica

    @property
    def rates(self) -> Rates:
        return self._core.rates

    @property
    def state(self) -> State:
        return self._core.state

    @property
    def head(self) -> Head:
        """The newest commit that this peer has applied."""
        return self._core.head

    @property
    def finished(self) -> bool:
        """Whether the run's budget of outer steps is used up at this head."""
        return self._core.finished

    @property
    def fragment(self) -> int:
        """The fragment of the next round to be called."""
        return self._core.fragment

    @property
    def contributed(self) -> int:
        """Tokens of this peer that commits have averaged since it started."""
        return self._applying.contributed

    @property
    def progress(self) -> Progress:
        """What the island has done since its last contribution to the fragment that is due."""
        if self.island is None:
            return Progress()
        return self._training.accounts.progress(self.island.progress(), self._core.fragment)

    @property
    def company(self) -> int:
        """Other peers of the run that were heard lately."""
        since = float("-inf")
        return sum(self.messenger.silent_for(peer, since) <= 3 * self._silence for peer in self.directory.known)

    # --- life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part. Returns at the end of the run, or after :meth:`stop`. Raises AtollError when it cannot go on."""
        spawn = self._tasks.spawn
        try:
            await self._restoring.load(residual=self._training.lossy and self._core.encoder is None)
            self._flights.leave(self.head)
            self._new_head()
            self.transport.guard(self._standing)
            await self.messenger.start()
            await self.transport.serve(REDUCE, self._rounds.serve)
            await self.donor.start()
            await self.guide.anchors.start()
            await self.clock.start()
            await self._prober.start()
            if self.island is not None:
                spawn(self._prober.run())
                await self._training.begin(await self._keeping.restore())
            tasks = self.directory.publish(), self.directory.read(), self._reporting.run()
            for work in (*tasks, self.guide.keep(), self.clock.run()):
                spawn(work)
            self._hold_ups.start()
            await asyncio.wait([spawn(self._main(), name="peer")])
            if self._tasks.failure is not None:
                raise self._tasks.failure
        finally:
            await self._leave()

    def stop(self) -> None:
        """Leave as soon as the current decision allows; what is not committed is lost, and said so."""
        self._core.stopping = True
        for flight in self._flights:
            flight.end("this peer is leaving")
        self._engagement.resolve(None)
        self._wake.set()

    async def _leave(self) -> None:
        self._core.set_state("leaving")
        self._hold_ups.stop()
        await self._tasks.end()  # a round that is cut off leaves its last streams to be seen off
        await self._saving.leave()
        await self.messenger.close()
        if self.replica is not None and self._training.lossy and self._tasks.failure is None:
            await self._saving.save_residual()

    async def _main(self) -> None:
        core, heads = self._core, self._heads
        core.set_state("training" if self.island is not None else "observing")
        finished_at: float | None = None
        while not core.stopping:
            # What changes by news wakes this task; what comes due by time alone is noted on the agenda. The rest, like
            # the state that a record names, is found out late at no cost.
            self._agenda.begin(self._silence)
            if self._flights:
                if lost := self._flights.lost(core.head):
                    await self._rounds.ground("another roster committed in its place", lost)
                    continue
                if (flight := self._flights.landing(core.head)) is not None:
                    await self._rounds.land(flight)
                    continue
            if (following := self._incoming.to_follow()) is not None:
                await self._applying.follow(*following)
                continue
            if heads.plan is not None:
                await self._catching_up.catch_up(heads.plan)
                continue
            if heads.looking is None and heads.must_catch_up():
                self._catching_up.look()
            if core.finished:
                now = self.transport.now()
                finished_at = finished_at or now
                self._agenda.look_at = now + self._silence / 20
                core.set_state("finished")
                if self._linger < float("inf") and (self._everyone_knows() or now - finished_at > self._linger):
                    return
            elif self.island is not None and not heads.owes():
                if (invitation := self._engagement.take_invitation()) is not None:
                    await self._entering.take_part(invitation)
                    continue
                rested = self._agenda.reached(self._timing.rests_until)
                if rested and (due := self._timing.due()) is not None:
                    await self._coordinating.call(due)
                    continue
                if self._agenda.reached(self._keeping.at):
                    await self._keeping.keep()
                    continue
            await self._agenda.wait()
        await self._rounds.ground("this peer is leaving")
        if self._keeping.every and self.island is not None and not core.finished:
            await self._keeping.keep()
            if self._keeping.saving is not None:
                await asyncio.wait([self._keeping.saving])

    def _everyone_knows(self) -> bool:
        """Whether every peer that was heard lately has this head, or there is none."""
        live = [p for p in self.directory.known if self.messenger.silent_for(p, float("-inf")) <= self._silence]
        waited = self.transport.now() - self._core.base_since
        return waited > self._silence / 2 and all(self._heads.claimed.get(peer) == self.head for peer in live)

    def _held_up(self, seconds: float) -> None:
        """This process was suspended, or starved, so silence proves nothing: reset, and ask for heads."""
        self._events("warning", message=f"this process was held up for {seconds:.1f} s; it asks for the head")
        self.messenger.forgive()
        self._core.base_since = self.transport.now()
        if self.island is not None:
            self.messenger.post_all(self.directory.known, self._reports.own())

    # --- news ----------------------------------------------------------------------------------------------------

    def _told(self, peer: PeerId, record: Record) -> None:
        """There is a new record of a peer."""
        self._heads.told(peer, record)
        if record.reachable and not self._core.reachable and self.island is not None and self.messenger.failing(peer):
            # It lives, and cannot dial this peer, which it may need: after its return nobody else may know the run.
            self.messenger.post(peer, self._reports.own())

    def _receive(self, peer: PeerId, message: Control) -> None:
        self.directory.heard(peer)
        if peer not in self.directory.known and not self._flights.has(peer):
            return  # there is no room for more peers, so nothing is kept of this one
        self._heads.spoke(peer)
        match message:
            case Report():
                self._reports.hear(peer, message)
                self._heads.learn(peer, message.head)
                self._core.hear_round(message)
                self.messenger.post(peer, Heard(self._core.head, self._core.last_round))
                self._timing.note_readiness(message)
            case Heard():
                self._heads.learn(peer, message.head)
                self._core.hear_round(message)
            case Call():
                self._entering.called(peer, message)
            case Enter() | Busy() | Refuse():
                if isinstance(message, Refuse):
                    self._engagement.taken_back(peer, message.call)
                self._coordinating.answered(peer, message)
            case Release():
                self._engagement.release(peer, message.call)
            case Sealed():
                self._engagement.offer_seal(peer, message)
            case Ping() | Reassign() | Ballot() | Voided():
                self._rounds.receive(peer, message)
            case Committed():
                self._incoming.offer(peer, message.commit)

    def _new_head(self) -> None:
        """The head has changed: what belonged to the old base is void."""
        core = self._core
        core.new_head()
        self._timing.next_place()
        self._succession.new_head()
        self._entering.new_head()
        self._rounds.new_head()
        self._keeping.new_head()
        self._heads.look_again()
        self._reporting.soon.set()
        self._training.accounts.inner_steps = self.manifest.inner_steps(core.replica.rank)
        self._flights.new_head(core.head)
        self._heads.new_head()
        self._incoming.new_head()
        digest, head = core.replica.start_digest(self.transport), core.head
        digest.add_done_callback(lambda task: self._log_digest(head, task))
        if self._on_head is not None:
            self._on_head(core.replica.position)
        for flight in self._flights:
            flight.round.news()
        self._entering.unpark()
        self._wake.set()

    def _log_digest(self, head: Head, task: asyncio.Task[bytes]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._events(
                "digest", round=head.round, outer_step=head.outer_step, commit=head.id.hex(), digest=task.result().hex()
            )

    def _forget(self, peer: PeerId) -> None:
        """A peer has been gone for long: nothing is kept of it."""
        parts = self._heads, self._succession, self._reports, self._timing, self._rounds, self._entering
        for part in (*parts, self.guide, self.messenger):
            part.forget(peer)

    def _transferred(self, done: int, total: int) -> None:
        now = self.transport.now()
        self.rates.transferred(done, total, now)
        if total > 1 << 20 and (now - self._transfer_told > 1.0 or done >= total):
            self._transfer_told = now
            self._events("transfer", done=done, total=total)

    # --- what this peer says and allows ----------------------------------------------------------------------------

    def _record(self, expires: float) -> Record:
        progress = self.island.progress() if self.island is not None else Progress()
        return Record(
            run=self.manifest.run_id, peer=self.transport.peer_id, issued=self.transport.wall(), expires=expires,
            addresses=tuple(self.transport.addresses()), state=self.state, head=self.head,
            step_time=progress.step_time, tokens=self.contributed,
            upload=self.rates.upload, download=self.rates.download,
            version=self.version, reachable=self._core.reachable, name=self.name, anchor=self.guide.anchors.sealed,
            anchored=self.guide.holds(self.head.id),
        )  # fmt: skip

    def _standing(self, peer: PeerId) -> Standing:
        if not self.manifest.admits(peer):
            return Standing.STRANGER
        if self._flights.has(peer):
            return Standing.MEMBER
        return Standing.KNOWN if peer in self.directory.known else Standing.UNKNOWN

    def _room(self) -> float:
        """Seconds for which no round will want this peer's link, as far as it knows; 0 while one may."""
        engaged = self._engagement.whose is not None or self._engagement.invitation is not None
        if engaged or self.finished or self._flights.busy:
            return 0.0
        if self.state not in ("training", "waiting", "observing"):
            return 0.0
        return self._reports.own().eta if self.island is not None else float("inf")

    def _partners(self) -> list[PeerId]:
        """Others to measure the link with, in random order: those first who can be reached and were heard lately."""
        peers = [peer for peer in self.directory.known if not self.messenger.failing(peer)]
        self.transport.random.shuffle(peers)

        def doubtful(peer: PeerId) -> tuple[bool, bool]:
            record = self.directory.known[peer].record
            silent = self.messenger.silent_for(peer, float("-inf")) > 30 * self._silence
            return record is not None and not record.reachable, silent

        return sorted(peers, key=doubtful)
