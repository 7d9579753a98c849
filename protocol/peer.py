"""A peer of a run: finds the others, trains, reports, calls or is called, reduces, signs, applies.

This is the protocol of the design under "One round", on whatever transport, store and island it is given. One task,
:meth:`Peer._main`, makes all decisions about the own state, one at a time; message handlers only take notes and wake
it up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .anchoring import Guide
from .averaged import check_all
from .calling import Calling, make_seal, unite
from .candidates import order, rank
from .clock import ClockWatch
from .codecs import get_codec
from .commitlog import LogEntry
from .commits import (
    START,
    Position,
    averaged_of,
    check_child,
    check_seal,
    check_vote,
    contributed,
    majority,
    members_in,
    verify_commit,
)
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
from .deadline import ASSUMED, encoded_size, transfer_seconds
from .directory import Directory
from .encoder import Encoded, Encoder, Outcome, averaged, share_of
from .errors import (
    DiskFull,
    Fault,
    NonFinite,
    PeerMisbehaved,
    PeerSlow,
    ResourceError,
    RoundVoid,
    StateError,
    TransportError,
)
from .fetch import Fetcher, Plan
from .flights import CALLS, Answer, Brought, Entering, Flight, Flights
from .fragments import Accounts
from .identity import Signer
from .island import Island, Progress, Run, Snapshot
from .layout import ChunkLayout
from .manifest import Manifest
from .messages import GENESIS, MAX_ROUND_GAP, Body, Commit, Head, Member, Vote, better, decode, hash_of, seal_bytes
from .messenger import Messenger, message_limit
from .overlap import Merge, Overlap, left
from .places import place, place_of, reach
from .probe import Prober
from .rates import Rates
from .records import Record, State
from .reduce import HELLO_LIMIT, Hello
from .reduce import PROTOCOL as REDUCE
from .refusals import Events, Refusals
from .replica import CARRY, Replica, rank_in_force
from .round import Round, Surroundings
from .stale import HALF
from .state import GlobalState
from .store import LOST, Store
from .transfer import Donor
from .transport import PeerId, Standing, Stream, Transport
from .wakeup import Wakeup

REPORT_EVERY = 2.0
"""Seconds between two reports to the first candidates."""
LINGER = 30.0
"""Seconds for which a peer at the end of the run waits for others to have its head."""
ALONE = 3
"""Silences for which a peer that hears nobody makes no commit alone."""
LOOKING = 7
"""The same while others claim a better head that it has found no reason to doubt: as long as a commit may take after a
fault. A claim must not keep it from going on for ever."""
MAX_DONORS = 8
"""Peers asked at once for what this one lacks."""
MAX_BAN = 6
"""Two to this power: commits for which a reducer that failed again and again gets no part."""
COMMITS = 16
"""Commits on the head that are kept until one of them is followed."""
EARLY_LIMIT = 256
"""Messages kept for rosters that this peer has not been told of yet."""

Floats = NDArray[np.float32]
RoundMessage = Ping | Reassign | Ballot | Voided


class Due(Enum):
    """What a coordinator calls its candidates for."""

    ROUND = "round"
    LEASES = "leases"


@dataclass
class _Limbo:
    """A void roster of this base that may still turn out committed: then what was frozen for it has been averaged."""

    round: Round
    theta: Floats | Encoded | None
    brought: Brought


@dataclass
class _Invitation:
    coordinator: PeerId
    call: Call


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
        self.codec = get_codec(manifest.codec.name)
        self.store = store
        self.island = island
        self.name = name
        self.version = version
        self.reachable = reachable
        self.state: State = "joining"
        self.contributed = 0
        """Tokens of this peer that commits have averaged since it started."""
        self._theta0 = theta0
        self._linger = linger
        # With several fragments each commit is a new head, and would void what was saved for the others.
        self._keep_every = keep_every if self.layout.fragments == 1 else 0.0
        self._keep_at = float("inf")
        self._keeping: asyncio.Task[None] | None = None
        self._untold = b"", b""
        """The last commit of leases alone, of which an island that encodes is not told; and which it knows instead."""
        self._carried = False
        """Whether θ and leases may come from an earlier life of this process, whose last roster others may commit."""
        self._on_head = on_head
        self._events: Events = Refusals(events, transport.now)
        self._silence = manifest.round.silence
        self._nonce = transport.random.randbytes(16)
        self._stopping = False
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._failure: BaseException | None = None
        self._wake = Wakeup()
        # The replica is filled by _load before anything reads it.
        self.replica: Replica = None  # type: ignore[assignment]

        self.messenger = Messenger(
            transport, self._receive, silence=self._silence, admits=manifest.admits, refused=self._refuse,
            limit=message_limit(self.layout.count), lost=self._wake.set,
        )  # fmt: skip
        self.directory = Directory(
            transport,
            signer,
            manifest,
            record=self._record,
            refused=self._refuse,
            changed=self._wake.set,
            told=self._told_record,
            forgotten=self._forget,
        )
        self.donor = Donor(
            transport, store, admits=manifest.admits, busy=lambda: self._flights.busy, recent=self._recent,
            member=self._in_round, refused=self._refuse, warn=lambda message: self._events("warning", message=message),
        )  # fmt: skip
        self.guide = Guide(
            transport, signer, manifest, store, events=self._events, others=lambda: list(self.directory.known),
            changed=self._look_again, found=self._found_on_disk,
            publish=self.directory.publish_anew, refused=self._refuse,
        )  # fmt: skip
        self.clock = ClockWatch(
            transport, lonely=self.directory.lonely, corrected=self.directory.anew, admits=manifest.admits,
            warn=lambda message: self._events("warning", message=message),
        )  # fmt: skip
        self.fetcher = Fetcher(
            transport, manifest, self.layout, signer, report=self._refuse, progress=self._transferred, guide=self.guide
        )
        self._transfer_told = float("-inf")
        # What others said, by peer.
        self._heads: dict[PeerId, Head] = {}
        self._ahead: dict[PeerId, Head] = {}
        """Those of them that are worth a look: better than the own head, or with the organiser's anchor behind them."""
        self._patience: dict[PeerId, tuple[int, float]] = {}
        """Calls for leases on behalf of a peer since it last contributed, and when the next may be."""
        self._doubts: dict[PeerId, tuple[float, float]] = {}
        """Who claimed a head that could not be had: how long that was not believed, and until when."""
        self._reluctant: dict[PeerId, tuple[float, float]] = {}
        """Who stood first, lived, and did not call: for how long others go first, and until when."""
        self._deaf: dict[PeerId, tuple[float, float]] = {}
        """Who did not answer a call of this peer: for how long it is not waited for, and until when."""
        self._sealless: dict[PeerId, tuple[float, float]] = {}
        """Who lived, and sealed nothing after this peer had entered its call: for how long it may not call this peer,
        and until when."""
        self._ready_since: float | None = None
        self._reports: dict[PeerId, tuple[Report, float]] = {}
        # The own part in a round.
        self._base_since = transport.now()
        self._stepped = (-1, transport.now())
        """The outer step of the head, and when this peer came to it."""
        self._alone_since = transport.now()
        self._quorum_since: float | None = None
        self._voids: dict[PeerId, int] = {}
        self._ranks: dict[PeerId, bytes] = {}
        self._ranked: tuple[list[PeerId] | None, list[PeerId]] = (None, [])
        """The directory's candidates as they were, and these and this peer by rank for the head."""
        self._look_at = float("-inf")
        """When the main task looks again, unless woken earlier."""
        self._report_now = Wakeup()
        self._last_round = 0
        self._calling: Calling | None = None
        self._engaged: PeerId | None = None
        self._invitation: _Invitation | None = None
        self._sealed: asyncio.Future[Sealed | None] | None = None
        self._awaited: Call | None = None
        self._flights = Flights(manifest, self.layout)
        self._parked: dict[PeerId, Call] = {}
        """Calls on a commit that is about to be applied here."""
        self._round_began = asyncio.Event()
        self._limbo: list[_Limbo] = []
        self._early: deque[tuple[PeerId, RoundMessage]] = deque(maxlen=EARLY_LIMIT)
        # Beside those on the head there is room for all that one identity alone may make up above it.
        self._commits: deque[tuple[bytes, Commit]] = deque(maxlen=COMMITS + self._flights.width - 1)
        self._ended: dict[bytes, tuple[Commit, float]] = {}
        """The newest commits, as many as rounds may be in flight, that this process applied, and when, by roster."""
        self._told_end: dict[PeerId, float] = {}
        """When members of these rosters that still pinged one were last sent the commit."""
        self._better_since: float | None = None
        self._looking: asyncio.Task[None] | None = None
        self._plan: Plan | None = None
        """A verified way to a better head."""
        self._checkpointing: asyncio.Task[None] | None = None
        self._round_started = transport.now()
        self._spurned: deque[bytes] = deque(maxlen=64)
        self._callers: dict[PeerId, None] = {}
        """Who has called on this base."""
        self._fruitless = 0
        """Own calls on this base that came to nothing."""
        self._called_here: dict[bytes, None] = {}
        """Calls entered on this base: none is entered twice, or one roster could be signed twice."""
        self._unfit: dict[PeerId, None] = {}
        """Who failed to reduce its part in a roster of this base."""
        self._strikes: dict[PeerId, tuple[int, int]] = {}
        """Who failed at it before this peer's own eyes: how often, and the height until which it gets no part."""
        self._frozen = True
        """Whether the island has been frozen and not resumed since; it begins so."""
        self._ahead_of_round = False
        """Whether it trains ahead of a round: a snapshot was taken that no commit has followed, nor an abort."""
        rules, outer = manifest.round, manifest.outer
        momentum = outer.momentum if outer.optimizer == "nesterov" else 0.0
        self._rule = Overlap(Merge(rules.merge), lr=outer.lr, mu=momentum, alpha=rules.mix)
        self._accounts = Accounts(self.layout, rules.inner_steps)
        """What is not handed over yet, by fragment."""
        self._encoded: Encoded | None = None
        """What an island that encodes has frozen for the round; None when nothing is brought."""
        self._life = island.life if island is not None else 0
        """The island's life that the accounts are of."""
        self._lossy = island is not None and not self.codec.lossless and manifest.codec.error_feedback > 0
        """Whether there is a residual, here or at the island."""
        self._rests_until = float("-inf")
        """A call that came to nothing is not repeated at once: neither the others nor the log must drown in calls."""
        self._recoveries = 0
        self._owed = GENESIS
        """The best head that this peer ever had; below it, it takes part in nothing."""
        self.rates = Rates(transport.now())
        self._prober = Prober(
            transport, self.rates, room=self._room, partners=self._partners,
            known=lambda peer: manifest.admits(peer) and peer in self.directory.known, refused=self._refuse,
            events=self._events,
        )  # fmt: skip

    # --- life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part. Returns at the end of the run, or after :meth:`stop`. Raises AtollError when it cannot go on."""
        loop = asyncio.get_running_loop()
        try:
            await self._load()
            self.transport.guard(self._standing)
            await self.messenger.start()
            await self.transport.serve(REDUCE, self._serve_reduce)
            await self.donor.start()
            await self.guide.anchors.start()
            await self.clock.start()
            await self._prober.start()
            if self.island is not None:
                self._spawn(self._prober.run())
                await self._begin_training()
            tasks = self.directory.publish(), self.directory.read(), self._report(), self._watch_clock()
            for work in (*tasks, self.guide.keep(), self.clock.run()):
                self._spawn(work)
            main = loop.create_task(self._main(), name="peer")
            self._tasks[main] = None
            main.add_done_callback(self._reaped)
            await asyncio.wait([main])
            if self._failure is not None:
                raise self._failure
        finally:
            await self._leave()

    def stop(self) -> None:
        """Leave as soon as the current decision allows; what is not committed is lost, and said so."""
        self._stopping = True
        for flight in self._flights:
            flight.end("this peer is leaving")
        if self._sealed is not None and not self._sealed.done():
            self._sealed.set_result(None)
        self._wake.set()

    async def _leave(self) -> None:
        self._set_state("leaving")
        while tasks := list(self._tasks):  # a round that is cut off leaves its last streams to be seen off
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._checkpointing is not None:
            await asyncio.gather(self._checkpointing, return_exceptions=True)
        await self.messenger.close()
        if self.replica is not None and self._lossy and self._failure is None:
            await self._save_residual()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._reaped)
        return task

    def _reaped(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            # A defect, or something that this peer cannot go on with: end all, and let run() raise it.
            self._failure = error
            for other in list(self._tasks):
                other.cancel()

    def _set_state(self, state: State, reason: str = "") -> None:
        if state != self.state:
            self.state = state
            self._events("state", state=state, **({"reason": reason} if reason else {}))
            self.directory.publish_soon()

    def _refuse(self, peer: PeerId, reason: str, fault: Fault = Fault.HOSTILE) -> None:
        self._events("refused", peer=peer, reason=reason, fault=fault.value)

    def _standing(self, peer: PeerId) -> Standing:
        if not self.manifest.admits(peer):
            return Standing.STRANGER
        if self._in_round(peer):
            return Standing.MEMBER
        return Standing.KNOWN if peer in self.directory.known else Standing.UNKNOWN

    def _in_round(self, peer: PeerId) -> bool:
        return any(peer in flight.round.peers for flight in self._flights)

    @property
    def _round(self) -> Round | None:
        """The first round in flight."""
        return next((flight.round for flight in self._flights), None)

    def _room(self) -> float:
        """Seconds for which no round will want this peer's link, as far as it knows; 0 while one may."""
        if self.finished or self._flights.busy or self._engaged is not None or self._invitation is not None:
            return 0.0
        if self.state not in ("training", "waiting", "observing"):
            return 0.0
        return self._own_report().eta if self.island is not None else float("inf")

    def _partners(self) -> list[PeerId]:
        """Others to measure the link with, in random order: those first who can be reached and were heard lately."""
        peers = [peer for peer in self.directory.known if not self.messenger.failing(peer)]
        self.transport.random.shuffle(peers)

        def doubtful(peer: PeerId) -> tuple[bool, bool]:
            record = self.directory.known[peer].record
            silent = self.messenger.silent_for(peer, float("-inf")) > 30 * self._silence
            return record is not None and not record.reachable, silent

        return sorted(peers, key=doubtful)

    def _record(self, expires: float) -> Record:
        progress = self.island.progress() if self.island is not None else Progress()
        return Record(
            run=self.manifest.run_id, peer=self.transport.peer_id, issued=self.transport.wall(), expires=expires,
            addresses=tuple(self.transport.addresses()), state=self.state, head=self.head,
            step_time=progress.step_time, tokens=self.contributed,
            upload=self.rates.upload, download=self.rates.download,
            version=self.version, reachable=self.reachable, name=self.name, anchor=self.guide.anchors.sealed,
            anchored=self.guide.holds(self.head.id),
        )  # fmt: skip

    def _transferred(self, done: int, total: int) -> None:
        now = self.transport.now()
        self.rates.transferred(done, total, now)
        if total > 1 << 20 and (now - self._transfer_told > 1.0 or done >= total):
            self._transfer_told = now
            self._events("transfer", done=done, total=total)

    @property
    def head(self) -> Head:
        """The newest commit that this peer has applied."""
        return self.replica.position.head if self.replica is not None else GENESIS

    @property
    def finished(self) -> bool:
        """Whether the run's budget of outer steps is used up at this head."""
        return self.head.outer_step >= self.manifest.outer_steps

    @property
    def fragment(self) -> int:
        """The fragment of the next round to be called."""
        at = self._flights.next(self.head)
        return self.layout.due(self.head.outer_step if at is None else at)

    @property
    def progress(self) -> Progress:
        """What the island has done since its last contribution to the fragment that is due."""
        if self.island is None:
            return Progress()
        return self._accounts.progress(self.island.progress(), self.fragment)

    @property
    def _winding_up(self) -> bool:
        """Whether all inner steps are done, and what is left of them is averaged, fragment after fragment."""
        return self.head.outer_step >= self.manifest.regular_steps and not self.finished

    # --- state at the start --------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """From disk as far as it goes, else θ₀. Raises StateError when θ₀ is not what the manifest says."""
        self.guide.restore()
        loaded = await self.transport.offload(self.store.load)
        state = loaded.state if loaded is not None else None
        position = loaded.position if loaded is not None else START
        if state is None:
            state = await self.transport.offload(self._fresh)
        residual = None
        if self._lossy and self._encoder is None:
            residual = np.zeros(self.layout.parameters, np.float32)
        rank = await self._rank_of(state, position)
        self.replica = Replica(self.manifest, self.layout, self.codec, state, position, residual=residual, rank=rank)
        await self._replay(loaded.replay if loaded is not None else [])
        if residual is not None and self.head != GENESIS:
            kept = await self.transport.offload(self.store.load_residual, self.head.id)
            if kept is not None:
                residual[:] = kept
        if self.store.prefers(self.store.seen, self.head):
            # Its disk has lost what it had once applied. Others have it: from θ₀ it would only make a fork.
            self._owed = self.store.seen
            what = f"the state of round {self._owed.round}" if self._owed != LOST else "the state, and which it was"
            self._events("warning", message=f"the disk has lost {what}; it is fetched")
        if self.head != GENESIS:
            self._events("resumed", round=self.head.round, outer_step=self.head.outer_step, height=self.head.height)
        self._flights.leave(self.head)
        self._new_head()

    async def _replay(self, entries: Sequence[LogEntry]) -> None:
        """Apply logged commits to the replica, as far as they are whole; what is missing then comes from peers."""
        for entry in entries:
            commit = await self.transport.offload(self.store.commit, entry.id)
            try:
                chunks = await self.transport.offload(self.store.chunks, entry.id)
            except StateError as error:
                self._events("warning", message=str(error))
                return
            if commit is None or commit.body.state != await self.replica.digest(self.transport):
                self._events("warning", message=f"the log does not fit the state at round {self.head.round}")
                return
            try:
                await self.transport.offload(self.replica.apply, commit.body, entry.id, chunks)
            except (PeerMisbehaved, NonFinite) as error:
                self._events("warning", message=f"the log of round {commit.body.round} cannot be applied: {error}")
                return

    async def _rank_of(self, state: GlobalState, position: Position) -> int:
        if not self.manifest.codec.window:
            return 0
        return await self.transport.offload(rank_in_force, self.manifest, self.layout, state, position)

    def _fresh(self) -> GlobalState:
        state = GlobalState.fresh(self.layout, self._theta0())
        if state.digest().hex() != self.manifest.state.theta0:
            raise StateError(
                f"the initial parameters computed here have digest {state.digest().hex()[:16]}, the manifest says "
                f"{self.manifest.state.theta0[:16]}: this machine or version builds another model"
            )
        return state

    async def _begin_training(self) -> None:
        assert self.island is not None
        theta = await self._restore()
        self._carried = theta is not None
        encoding = self._encoder is not None and await self._begin_encoding(self._encoder, theta)
        if not encoding:
            self.island.local[:] = self.replica.params if theta is None or self._encoder is not None else theta
        self._frozen = False
        self._accounts.inner_steps = self.manifest.inner_steps(self.replica.rank)
        if self._carried:
            ahead = self._may_step()
            await self.island.resume(reload=not encoding, spent=0.0, outer_step=self.head.outer_step, ahead=ahead)
        else:
            self._accounts.clear(self.fragment)
            await self.island.resume(reload=not encoding, spent=1.0, outer_step=self.head.outer_step)

    async def _begin_encoding(self, encoder: Encoder, theta: Floats | None) -> bool:
        """Give an island that encodes what it keeps itself. False when it died of it: then it begins from g."""
        residual = None
        if self._lossy and self.head != GENESIS:
            residual = await self.transport.offload(self.store.load_residual, self.head.id)
        try:
            await encoder.begin(self.replica.params, commit_id=self.head.id, residual=residual, theta=theta)
        except ResourceError as error:
            self._events("warning", message=f"the island did not take over what was saved: {error}")
            return False
        return True

    @property
    def _encoder(self) -> Encoder | None:
        return self.island.encoder if self.island is not None else None

    def _note_life(self) -> None:
        """An island that encodes may have died, and begun anew from the global parameters by itself: then nothing of
        what it had done is left. Its next life may leave the encoding to this side, which then needs a residual."""
        if self.island is None or self.island.life == self._life:
            return
        self._life = self.island.life
        self._accounts.clear(self.fragment)
        if self._lossy and self._encoder is None and self.replica.residual is None:
            self.replica.residual = np.zeros(self.layout.parameters, np.float32)

    # --- uncommitted progress -------------------------------------------------------------------------------------

    async def _restore(self) -> Floats | None:
        """Take up the inner steps that an earlier life of this process had made from this head and saved: θ, if it
        was."""
        assert self.island is not None
        kept = await self.transport.offload(self.store.load_progress, self.head.id) if self._keep_every else None
        if kept is None:
            return None
        theta, told = kept
        try:
            self.island.restore(told)
        except ValueError as error:
            self._events("warning", message=f"the inner steps that were saved cannot be taken up: {error}")
            return None
        self._events("restored", round=self.head.round, outer_step=self.head.outer_step)
        return theta

    async def _keep_progress(self) -> None:
        """Save what the island has trained since the last commit: training pauses for a copy, not for the disk."""
        island = self.island
        assert island is not None
        self._keep_at = self.transport.now() + self._keep_every
        if self._frozen or self._ahead_of_round or (self._keeping is not None and not self._keeping.done()):
            return
        try:
            snapshot = await self._freeze()
        except ResourceError as error:
            await self._no_island(error)
            return
        encoder, theta = self._encoder, None
        try:
            if snapshot.steps:
                theta = await (encoder.theta() if encoder is not None else self.transport.offload(island.local.copy))
        except ResourceError as error:
            self._events("warning", message=f"the inner steps since the last commit were not saved: {error}")
        if theta is not None:
            told = island.keep()
            self._keeping = self._spawn(self._save_progress(self.head.id, theta, told))
        await self._thaw(self.fragment)

    async def _save_progress(self, commit_id: bytes, theta: Floats, told: str) -> None:
        try:
            await self.transport.offload(self.store.save_progress, commit_id, theta, told)
        except (ResourceError, StateError) as error:
            self._events("warning", message=f"the inner steps since the last commit were not saved: {error}")

    def _was_handed_over(self, body: Body) -> bool:
        """Whether a commit averages what an earlier life of this process brought: that is part of what was saved, or
        trained on the samples that were still leased then."""
        if not self._carried:
            return False
        count, mine = len(body.seal.members), self.transport.peer_id
        earlier = {i for i, m in enumerate(body.seal.members) if m.peer == mine and m.nonce != self._nonce}
        return any(not earlier.isdisjoint(members_in(entry.contributors, count)) for entry in body.chunks)

    # --- decisions -----------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        self._set_state("training" if self.island is not None else "observing")
        finished_at: float | None = None
        while not self._stopping:
            self._wake.clear()
            # What changes by news wakes this task; what comes due by time alone is noted by _reached. The rest, like
            # the state that a record names, is found out late at no cost.
            self._look_at = self.transport.now() + self._silence
            if lost := self._flights.lost(self.head):
                await self._ground("another roster committed in its place", lost)
                continue
            if (flight := self._flights.landing(self.head)) is not None:
                await self._land(flight)
                continue
            if (following := self._to_follow()) is not None:
                await self._follow(*following)
                continue
            if self._plan is not None:
                await self._catch_up(self._plan)
                continue
            if self._looking is None and self._must_catch_up():
                ahead = sorted(
                    self._ahead, key=lambda peer: (self.messenger.failing(peer), -self.messenger.heard(peer))
                )
                self._looking = self._spawn(self._look_into(ahead[:MAX_DONORS]))
            if self.finished:
                now = self.transport.now()
                finished_at = finished_at or now
                self._look_at = now + self._silence / 20
                self._set_state("finished")
                if self._linger < float("inf") and (self._everyone_knows() or now - finished_at > self._linger):
                    return
            elif self.island is not None and not self.store.prefers(self._owed, self.head):
                if self._invitation is not None:
                    invitation, self._invitation = self._invitation, None
                    await self._take_part(invitation)
                    continue
                rested = self._reached(self._rests_until)
                if rested and (due := self._due()) is not None and self._leads():
                    await self._coordinate(due)
                    continue
                if self._reached(self._keep_at):
                    await self._keep_progress()
                    continue
            await self._wake.wait(max(self._look_at - self.transport.now(), 0.001))
        await self._ground("this peer is leaving")
        if self._keep_every and self.island is not None and not self.finished:
            await self._keep_progress()
            if self._keeping is not None:
                await asyncio.wait([self._keeping])

    def _reached(self, moment: float) -> bool:
        """Whether that moment of ``Transport.now()`` has come; if not, the main task looks again then."""
        if self.transport.now() >= moment:
            return True
        self._look_at = min(self._look_at, moment)
        return False

    def _everyone_knows(self) -> bool:
        """Whether every peer that was heard lately has this head, or there is none."""
        live = [p for p in self.directory.known if self.messenger.silent_for(p, float("-inf")) <= self._silence]
        waited = self.transport.now() - self._base_since
        return waited > self._silence / 2 and all(self._heads.get(peer) == self.head for peer in live)

    def _new_head(self) -> None:
        """The head has changed: what belonged to the old base is void."""
        self._base_since = self.transport.now()
        if self.head.outer_step != self._stepped[0]:
            self._stepped = (self.head.outer_step, self._base_since)
        self._quorum_since = None
        self._voids.clear()
        self._ranks.clear()
        self._ranked = (None, [])
        if not self._flights.several:
            self._called_here.clear()
            self._invitation = None
        self._callers.clear()
        self._fruitless = 0
        self._unfit.clear()
        if self._keep_every:
            self._keep_at = self._base_since + self._keep_every
        self._look_again()
        self._report_now.set()
        self._accounts.inner_steps = self.manifest.inner_steps(self.replica.rank)
        self._last_round = max([self.head.round, *(flight.round.seal.round for flight in self._flights)])
        # Of this base and before; what was for a later place may still come.
        later = self.head.outer_step if self._flights.several else float("inf")
        self._limbo = [limbo for limbo in self._limbo if limbo.round.place >= later]
        self._better_since = None
        self._keep_commits(lambda _, body: body.parent == self.head.id or self._flights.ahead(body, self.head))
        digest = self.replica.start_digest(self.transport)
        head = self.head
        digest.add_done_callback(lambda task: self._log_digest(head, task))
        if self._on_head is not None:
            self._on_head(self.replica.position)
        for flight in self._flights:
            flight.round.news()
        for peer in list(self._parked):
            try:
                self._called(peer, self._parked.pop(peer))
            except PeerMisbehaved as error:
                self._refuse(peer, str(error))
        self._wake.set()

    def _look_again(self) -> None:
        """The own head or the organiser's anchor is another: which of the others' heads are worth a look?"""
        if self.replica is None:
            return
        now = self.transport.now()
        self._ahead = {
            peer: head for peer, head in self._heads.items()
            if self.guide.worth(peer, head, self.head) and self._doubts.get(peer, (0.0, now))[1] <= now
        }  # fmt: skip
        self.guide.say(self.head)
        self._wake.set()

    def _log_digest(self, head: Head, task: asyncio.Task[bytes]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._events(
                "digest", round=head.round, outer_step=head.outer_step, commit=head.id.hex(), digest=task.result().hex()
            )

    def _forget(self, peer: PeerId) -> None:
        """A peer has been gone for long: nothing is kept of it."""
        said = (self._heads, self._ahead, self._reports, self._ranks, self._parked)
        for table in (*said, self._doubts, self._patience, self._strikes, self._reluctant, self._deaf, self._sealless):
            table.pop(peer, None)
        self.guide.forget(peer)
        self.messenger.forget(peer)

    # --- reporting -----------------------------------------------------------------------------------------------

    def _ordered(self) -> list[PeerId]:
        """All candidates, this peer included, in the order in which they lead; not for the caller to write."""
        candidates = self.directory.candidates()
        if candidates is not self._ranked[0]:
            ranked = order([*candidates, self.transport.peer_id], rank=self._rank, voids={}, unreachable=[])
            self._ranked = (candidates, ranked)
        ranked, away = self._ranked[1], self.messenger.unreachable()
        for table in (self._reluctant, self._sealless):
            away += [peer for peer in table if self._is_put_off(table, peer)]
        if not (away or self._voids):
            return ranked
        return order(ranked, rank=self._rank, voids=self._voids, unreachable=away)

    def _rank(self, peer: PeerId) -> bytes:
        known = self._ranks.get(peer)
        if known is None:
            base = self.head.id
            if self._flights.several:
                # Heads differ for a moment while calls go on, and the order must not.
                at = self._flights.next(self.head)
                base = (self.head.outer_step if at is None else at).to_bytes(32, "big")
            known = self._ranks[peer] = rank(self.manifest.run_id, base, peer)
        return known

    def _next_place(self) -> None:
        """A round has been launched, or came to nothing: the next one is for another place."""
        if not self._flights.several:
            return
        self._quorum_since = None
        self._fruitless = 0
        self._ranks.clear()
        self._ranked = (None, [])
        self._report_now.set()

    def _own_report(self) -> Report:
        assert self.island is not None
        self._note_life()
        counted = self.island.progress()
        progress = self._accounts.progress(counted, self.fragment)
        ready, eta = self.manifest.schedule.own(
            progress, self._accounts.wanting(counted, self.fragment), outer_step=self.head.outer_step,
            elapsed=self._elapsed(), peers=len(self.directory.candidates()) + 1,
        )  # fmt: skip
        if self._flights.next(self.head) is None:
            # As many rounds are in flight as may be.
            ready, eta = False, max(eta, self._silence)
        return Report(
            self.head,
            progress.steps,
            progress.tokens,
            progress.leased,
            ready,
            eta,
            progress.step_time,
            self._last_round,
        )

    async def _report(self) -> None:
        """Tell the first candidate how far this peer is, every two seconds and whenever it matters; the next two, who
        only have to know who lives when the first dies, every second time."""
        if self.island is None:
            return
        told: tuple[Head, bool, int | None] | None = None
        told_at, beat = float("-inf"), 0
        every = min(REPORT_EVERY, self._silence / 2.5)
        while True:
            self._report_now.clear()
            report = self._own_report()
            now = self.transport.now()
            self._ready_since = (self._ready_since or now) if report.ready else None
            self._note_readiness(report)
            self._say_whether_it_trains(report)
            saying = report.head, report.ready, self._flights.next(self.head)
            news = saying != told
            if news or now >= told_at + every:
                ordered = self._ordered()
                beat = 0 if news else beat + 1
                # Whoever has waited long tells everyone: views of the order may differ.
                patient = self.finished or self._waited_long()
                count = len(ordered) if patient else 1 if beat % 2 else 3
                others = [peer for peer in ordered[: count + 1] if peer != self.transport.peer_id]
                self.messenger.post_all(others[:count], report)
                told, told_at = saying, now
            # Wake when the next report is due, or when this peer will be ready, whichever is first.
            pause = max(told_at + every - self.transport.now(), 0.01)
            if not report.ready and report.leased:
                pause = min(pause, max(report.eta, self._silence / 50))
            await self._report_now.wait(pause)

    def _put_off(self, table: dict[PeerId, tuple[float, float]], peer: PeerId) -> None:
        """Do without a peer for a while, twice as long each time: from 8T to 64T."""
        pause = min(2 * table.get(peer, (4 * self._silence, 0.0))[0], 64 * self._silence)
        table[peer] = (pause, self.transport.now() + pause)

    def _is_put_off(self, table: dict[PeerId, tuple[float, float]], peer: PeerId) -> bool:
        return peer in table and table[peer][1] > self.transport.now()

    def _waited_long(self) -> bool:
        """Whether this peer has been ready for so long on this base that something is wrong with who should have
        called."""
        if self._ready_since is None:
            return False
        return self.transport.now() - max(self._ready_since, self._base_since) > 2 * self._silence

    def _pass_over(self, coordinator: PeerId) -> None:
        """Somebody calls after all have waited long: who stood before it, lives, and has not called on this base does
        not do its office, and stands behind all others for a while, each time a longer one. That is this peer's own
        view, and excludes nobody."""
        if not self._waited_long():
            return
        for peer in self._ordered():
            if peer in (coordinator, self.transport.peer_id):
                return
            here = self._is_here(peer) and self.messenger.silent_for(peer, 0.0) <= self._silence
            if here and peer not in self._callers:
                self._put_off(self._reluctant, peer)

    def _say_whether_it_trains(self, report: Report) -> None:
        """Without samples a peer stands still until a commit brings some; it must not look as if it trained."""
        if self.state not in ("training", "waiting") or (self._flights and not self._flights.several):
            return
        if report.leased:
            self._set_state("training")
        elif self.transport.now() - self._base_since > self._silence:
            live, quorum = len(self._live()), self.manifest.round.quorum
            missing = f"{live} of {quorum} peers that a round needs are here" if live < quorum else "for a round"
            self._set_state("waiting", missing)

    @property
    def company(self) -> int:
        """Other peers of the run that were heard lately."""
        since = float("-inf")
        return sum(self.messenger.silent_for(peer, since) <= 3 * self._silence for peer in self.directory.known)

    def _note_readiness(self, report: Report) -> None:
        # Once a quorum is ready, what the others still need decides about grace.
        waiting = self._quorum_since is not None or report.ready or not (report.leased or report.tokens)
        waiting = waiting or self.manifest.round.by == "tokens"
        if report.head == self.head and waiting:
            self._wake.set()

    async def _watch_clock(self) -> None:
        """When this process was held up (suspended, starved), silence proves nothing: reset, and ask for heads."""
        step = self._silence / 5
        while True:
            before = self.transport.now()
            await asyncio.sleep(step)
            late = self.transport.now() - before - step
            if late > self._silence / 2:
                self._events("warning", message=f"this process was held up for {late:.1f} s; it asks for the head")
                self.messenger.forgive()
                self._base_since = self.transport.now()
                if self.island is not None:
                    self.messenger.post_all(self.directory.known, self._own_report())

    def _live(self) -> dict[PeerId, Report]:
        """Peers at this head whose reports are fresh; the own one included."""
        head, now, silence = self.head, self.transport.now(), self._silence
        live = {
            peer: report for peer, (report, at) in self._reports.items()
            if self._flights.knows(report.head, head) and (now < at + silence or now < self._gone_at(peer, at))
        }  # fmt: skip
        if self.island is not None:
            live[self.transport.peer_id] = self._own_report()
        return live

    def _is_here(self, peer: PeerId) -> bool:
        """Whether a peer was last heard to be at this head, or about to be."""
        head = self._heads.get(peer)
        return head is not None and self._flights.knows(head, self.head)

    def _gone_at(self, peer: PeerId, since: float) -> float:
        """When a peer that says nothing more counts as gone, its silence counted from ``since`` at the earliest."""
        return max(self.messenger.heard(peer), since, self.messenger.epoch) + self._silence

    def _leads(self) -> bool:
        """Whether every candidate ahead of this peer is silent, or elsewhere, for long enough."""
        now = self.transport.now()
        for peer in self._ordered():
            if peer == self.transport.peer_id:
                return True
            if self._doubts.get(peer, (0.0, now))[1] > now:
                continue  # it says that it is elsewhere, and that could not be verified
            known = self.directory.known.get(peer)
            since = max(self._base_since, known.since if known is not None else 0.0, self.messenger.epoch)
            here = self._is_here(peer) and not self._reached(self._gone_at(peer, since))
            if here or not (self.messenger.failing(peer) or self._reached(since + self._silence)):
                # The order must exclude nobody: if who is ahead does not call in all that time, this peer does.
                ready = self._quorum_since if self._quorum_since is not None else now
                return self._reached(ready + 3 * self._silence + self._grace())
        return True

    def _elapsed(self) -> float:
        """Seconds since this peer saw the last outer step, or began."""
        return self.transport.now() - self._stepped[1]

    def _grace(self, live: dict[PeerId, Report] | None = None) -> float:
        """Seconds for which a coordinator waits for the late: a share of what the inner steps take. ``live`` as from
        :meth:`_live`, if that is known."""
        live = self._live() if live is None else live
        times = sorted(report.step_time for report in live.values() if report.step_time > 0)
        if not times:
            return 0.0
        # The lower median, and at most a few times the own pace: nobody stretches it by what it says of itself.
        own = self.island.progress().step_time if self.island is not None else 0.0
        pace = times[(len(times) - 1) // 2]
        steps = self._accounts.inner_steps / self.layout.fragments
        return self.manifest.round.grace * steps * (min(pace, 4 * own) if own else pace)

    def _due(self) -> Due | None:
        """What to call now, if anything: a round when a quorum of the live is ready and grace is over; leases alone
        when somebody has no samples and the next round is not near."""
        rules, now = self.manifest.round, self.transport.now()
        if self._flights and (
            self._flights.next(self.head) is None or self._last_round - self.head.round >= MAX_ROUND_GAP // 2
        ):
            return None  # until some have landed
        # Who does not answer calls makes no quorum, whatever it reports.
        everyone = self._live()
        live = {peer: report for peer, report in everyone.items() if not self._is_put_off(self._deaf, peer)}
        if len(live) > 1:
            self._alone_since = now
        else:
            # Where others say that they are elsewhere, the way to them comes first: alone it would only make a fork.
            patience = LOOKING if self._ahead or self._looking is not None else ALONE
            if not self._reached(self._alone_since + patience * self._silence):
                return None
        if len(live) < rules.quorum:
            self._quorum_since = None
            return None
        trainers = [report for report in live.values() if report.leased or report.tokens]
        outer_step, elapsed = self.head.outer_step, self._elapsed()
        wait = self.manifest.schedule.wait(trainers, outer_step=outer_step, elapsed=elapsed) if trainers else 0.0
        if wait > 0:
            self._quorum_since = None
            if rules.by != "steps":  # of steps it is told
                self._reached(now + max(wait, self._silence / 50))
            without = [
                peer for peer, report in live.items()
                if not report.leased and self._reached(self._patience.get(peer, (0, now))[1])
            ]  # fmt: skip
            # It costs next to nothing, but whoever says that it has no samples must not cause one after another.
            near = wait <= 2 * self._silence or not self._reached(self._base_since + self._silence / 2)
            near = near or len(self._flights) > 0
            return Due.LEASES if without and not near else None
        if self._quorum_since is None:
            self._quorum_since = now
        if not trainers and self._flights:
            return None
        if not trainers:
            # Nobody has samples yet. Give those who are just starting a moment.
            return Due.ROUND if self._reached(self._quorum_since + self._silence / 5) else None
        over = self._quorum_since + self._grace(everyone)
        late = [
            peer for peer, report in live.items()
            if (report.leased or report.tokens) and not report.ready and (report.eta or over - now) <= over - now
        ]  # fmt: skip
        for peer in late:
            if peer in self._reports:  # the own is never late by silence
                self._reached(self._gone_at(peer, self._reports[peer][1]))
        return Due.ROUND if self._reached(over) or not late else None

    # --- receiving -----------------------------------------------------------------------------------------------

    def _receive(self, peer: PeerId, message: Control) -> None:
        self.directory.heard(peer)
        if peer not in self.directory.known and not self._in_round(peer):
            return  # there is no room for more peers, so nothing is kept of this one
        match message:
            case Report():
                self._reports[peer] = (self._flights.read(peer, message), self.transport.now())
                self._learn_head(peer, message.head)
                self._hear_round(message)
                self.messenger.post(peer, Heard(self.head, self._last_round))
                self._note_readiness(message)
            case Heard():
                self._learn_head(peer, message.head)
                self._hear_round(message)
            case Call():
                self._called(peer, message)
            case Enter() | Busy() | Refuse():
                self._answered(peer, message)
            case Release():
                if self._awaited is not None and self._awaited.call == message.call and peer == self._engaged:
                    self._resolve_seal(None)
                invitation = self._invitation
                if invitation is not None and (invitation.coordinator, invitation.call.call) == (peer, message.call):
                    self._invitation = None
            case Sealed():
                self._offer_seal(peer, message)
            case Ping() | Reassign() | Ballot() | Voided():
                self._for_round(peer, message)
            case Committed():
                self._offer_commit(peer, message.commit)

    def _hear_round(self, message: Report | Heard) -> None:
        if message.head == self.head and message.round <= self.head.round + MAX_ROUND_GAP // 2:
            self._last_round = max(self._last_round, message.round)

    def _told_record(self, peer: PeerId, record: Record) -> None:
        """A record names a head; records are old news, so what the peer said itself since then stands. What it says of
        the anchor nothing else says."""
        self.guide.told(peer, record.anchor, record.anchored)
        known = self._heads.get(peer)
        if known is None or better(record.head, known):
            known = record.head
        elif not record.anchored:
            return
        self._learn_head(peer, known)

    def _learn_head(self, peer: PeerId, head: Head) -> None:
        if self._heads.get(peer) == self.head != head:
            self._wake.set()  # it may have stood before this peer
        self._heads[peer] = head
        doubt = self._doubts.get(peer)
        if doubt is not None and self.transport.now() < doubt[1]:
            return
        if self.guide.worth(peer, head, self.head):
            self._ahead[peer] = head
            self._wake.set()
        else:
            self._ahead.pop(peer, None)

    def _called(self, peer: PeerId, call: Call) -> None:
        if self.island is None or self._stopping or self.store.prefers(self._owed, self.head):
            return
        answer = self._answer_to(peer, call)
        if answer is Answer.WAIT:
            self._learn_head(peer, call.base)
            self._parked[peer] = call
            asyncio.get_running_loop().call_later(self._silence / 2, self._unpark, peer, call)
            return
        if answer is not Answer.ENTER:
            if answer is Answer.BUSY and (flight := self._flights.at(self._place_of(call))) is not None:
                self.messenger.post(peer, Busy(call.call, PeerId(flight.round.seal.coordinator)))
                return
            self._learn_head(peer, call.base)
            self.messenger.post(peer, Refuse(call.call, self.head))
            return
        self._callers[peer] = None
        invitation = _Invitation(peer, call)
        if call.call in self._called_here:
            return
        if self._is_put_off(self._sealless, peer):
            self.messenger.post(peer, Refuse(call.call, self.head))
            return
        if self._engaged is not None:
            mine = self._engaged == self.transport.peer_id and self._calling is not None
            if mine and self._earlier(peer, self.transport.peer_id):
                # The other call is the rightful one: give up the own, and enter.
                self._invite(invitation)
                assert self._calling is not None
                self._calling.busy[peer] = peer
                self._calling.changed.set()
            else:
                self.messenger.post(peer, Busy(call.call, self._engaged))
            return
        self._invite(invitation)
        self._wake.set()

    def _unpark(self, peer: PeerId, call: Call) -> None:
        """The commit that a call stands on has not come here."""
        if self._parked.get(peer) is call:
            del self._parked[peer]
            self.messenger.post(peer, Refuse(call.call, self.head))

    def _place_of(self, call: Call) -> int:
        return place(call.base, call.fragment, self.layout)

    def _answer_to(self, peer: PeerId, call: Call) -> Answer:
        """What to make of a call. Raises :class:`PeerMisbehaved` for one that nobody may make on that base."""
        if not call.base.round < call.round <= call.base.round + MAX_ROUND_GAP:
            return Answer.REFUSE
        if not self._flights.knows(call.base, self.head):
            return self._flights.answer(call.base, 0, self.head)
        due, most = self.layout.due(call.base.outer_step), reach(call.base.outer_step, self.manifest)
        if call.fragment >= self.layout.fragments or (call.fragment - due) % self.layout.fragments >= most:
            raise PeerMisbehaved(f"a call for fragment {call.fragment} where {due} is due", peer)
        return self._flights.answer(call.base, call.fragment, self.head) if self._flights.several else Answer.ENTER

    def _invite(self, invitation: _Invitation) -> None:
        """Of two calls the earlier candidate's is entered, and of one candidate's the last; the other is told."""
        held, self._invitation = self._invitation, invitation
        if held is None or held.coordinator == invitation.coordinator:
            return
        if not self._earlier(invitation.coordinator, held.coordinator):
            held, self._invitation = invitation, held
        self.messenger.post(held.coordinator, Busy(held.call.call, self._invitation.coordinator))

    def _earlier(self, a: PeerId, b: PeerId) -> bool:
        """Whether candidate a stands before b for this base."""
        return (self._voids.get(a, 0), self._rank(a)) < (self._voids.get(b, 0), self._rank(b))

    def _answered(self, peer: PeerId, message: Enter | Busy | Refuse) -> None:
        calling = self._calling
        self._deaf.pop(peer, None)
        if calling is None or calling.nonce != message.call:
            if isinstance(message, Enter):
                self.messenger.post(peer, Release(message.call))
            return
        match message:
            case Enter():
                most = 0 if calling.leases else self.manifest.round.weight_cap
                if message.member.peer != peer or message.member.weight > most:
                    self._refuse(peer, f"it enters with weight {message.member.weight}, allowed are {most}")
                    self.messenger.post(peer, Release(message.call))
                    calling.answer(peer)
                else:
                    calling.enter(peer, message)
            case Busy():
                calling.busy[peer] = PeerId(message.coordinator)
                calling.changed.set()
            case Refuse():
                self._learn_head(peer, message.head)
                calling.answer(peer)

    def _offer_seal(self, sender: PeerId, sealed: Sealed) -> None:
        call, seal = self._awaited, sealed.seal
        if call is None or self._engaged != seal.coordinator or seal.nonce != call.call:
            return
        coordinator = PeerId(seal.coordinator)
        if not self.signer.verify(coordinator, seal_bytes(hash_of(seal)), sealed.signature):
            # Whoever forged it: the coordinator's own may still come.
            self._refuse(sender, "a seal whose signature does not verify")
            return
        try:
            check_seal(seal, self.manifest, self.layout)
            if (seal.round, seal.leases, seal.fragment) != (call.round, call.leases, call.fragment):
                raise PeerMisbehaved("a seal that is not what was called for")
            if seal.rank != self.replica.rank:
                raise PeerMisbehaved(f"a seal with rank {seal.rank} where {self.replica.rank} is in force")
        except PeerMisbehaved as error:
            self._refuse(coordinator, str(error))
            self._put_off(self._sealless, coordinator)
            self._voids[coordinator] = self._voids.get(coordinator, 0) + 1
            self._resolve_seal(None)
            return
        self._resolve_seal(sealed)

    def _resolve_seal(self, sealed: Sealed | None) -> None:
        if self._sealed is not None and not self._sealed.done():
            self._sealed.set_result(sealed)
            if self._flights.several:
                self._wake.set()

    def _for_round(self, peer: PeerId, message: RoundMessage) -> None:
        if (flight := self._flights.of(message.roster)) is not None:
            flight.round.receive(peer, message)
            return
        if (ended := self._ended.get(message.roster)) is not None:
            if isinstance(message, Ping):
                self._tell_end(peer, *ended)
            return
        if isinstance(message, Ballot):
            for limbo in self._limbo:
                if limbo.round.roster_id == message.roster:
                    self._merge(message)
                    return
        if not isinstance(message, Ping) and sum(sender == peer for sender, _ in self._early) < 8:
            self._early.append((peer, message))

    def _tell_end(self, peer: PeerId, commit: Commit, ended: float) -> None:
        """A member still pings the roster of the head, or one before it that was in flight beside that: it has missed
        how that round ended, unless it is only late."""
        now, pause = self.transport.now(), self._silence / 5
        since = ended if self._flights.several else self._base_since
        if now - max(since, self._told_end.get(peer, since)) <= pause:
            return
        # A commit is large and a ping small: nobody else gets one for the asking, and nobody one after another.
        if any(member.peer == peer for member in commit.body.seal.members):
            self._told_end[peer] = now
            self.messenger.post(peer, Committed(commit))

    def _offer_commit(self, peer: PeerId, commit: Commit) -> None:
        """A commit arrived: this round's, the next one for this head, or a sign that this peer is behind."""
        body = commit.body
        commit_id = hash_of(body)
        if commit_id == self.head.id or commit_id in self._spurned or body.height <= 0:
            return
        if body.parent != self.head.id and not better(Head(commit_id, body.height, body.weight, 0, 0), self.head):
            return
        try:
            verify_commit(commit, self.manifest, self.layout, self.signer)
        except PeerMisbehaved as error:
            self._refuse(peer, str(error))
            return
        head = Head(commit_id, body.height, body.weight, body.round, body.outer_step)
        self._learn_head(peer, head)
        if (flight := self._flights.of(hash_of(body.seal))) is not None:
            flight.round.committed(commit)
            return
        if all(commit_id != known for known, _ in self._commits):
            if body.parent != self.head.id:
                if self._flights.ahead(body, self.head) and not self._told_ahead(body):
                    self._commits.append((commit_id, commit))  # those before it are about to come, too
                return
            self._commits.append((commit_id, commit))
            rival = self._rival(commit)
            if rival is not None and len(body.seal.members) == 1 < len(rival.round.peers):
                return  # a peer alone does not end a group's round; its commit waits
            if self._calling is not None and self._takes(commit, self._calling.base, self._calling.fragment):
                self._calling.changed.set()
            if rival is not None:
                rival.end("another roster committed on the same base")
            if self._awaited is not None and self._takes(commit, self._awaited.base, self._awaited.fragment):
                self._resolve_seal(None)
            self._wake.set()

    def _told_ahead(self, body: Body) -> bool:
        """Whether another commit above the next one is kept that has the height and the coordinator of this one: of
        what an identity makes up by itself no more is kept than of what it may have led."""
        said = body.height, body.seal.coordinator
        return any((known.body.height, known.body.seal.coordinator) == said for _, known in self._commits)

    def _keep_commits(self, kept: Callable[[bytes, Body], bool]) -> None:
        """Forget those of which that does not hold."""
        rest = [(commit_id, commit) for commit_id, commit in self._commits if kept(commit_id, commit.body)]
        self._commits = deque(rest, maxlen=self._commits.maxlen)

    def _forget_commit(self, commit_id: bytes) -> None:
        self._keep_commits(lambda known, _: known != commit_id)

    def _takes(self, commit: Commit, base: Head, fragment: int | None) -> bool:
        """Whether a commit on this head takes the place that another roster, or call, was for."""
        if not self._flights.several:
            return True
        # One of leases alone takes none.
        if not commit.body.chunks or fragment is None or commit.body.parent != self.head.id:
            return False
        return place(base, fragment, self.layout) == self.head.outer_step

    def _rival(self, commit: Commit) -> Flight | None:
        """The round in flight whose place a commit on this head takes."""
        for flight in self._flights:
            # A frozen island is unfrozen by any commit, and must not train on while a round averages what it holds.
            if flight.paused or self._takes(commit, flight.round.seal.base, flight.round.seal.fragment):
                return flight
        return None

    def _to_follow(self) -> tuple[bytes, Commit] | None:
        """The next commit on this head that is to be followed: a round whose place it takes has to end before."""
        for commit_id, commit in self._commits:
            if commit.body.parent != self.head.id:
                continue
            if (rival := self._rival(commit)) is None:
                self._forget_commit(commit_id)
                return commit_id, commit
            if len(commit.body.seal.members) > 1 or len(rival.round.peers) == 1:
                rival.end("another roster committed on the same base")
        return None

    async def _serve_reduce(self, stream: Stream) -> None:
        """A member opened a reduce stream; its first frame carries the roster, news that may come before the seal."""
        peer = stream.peer
        if not self.manifest.admits(peer):
            self._refuse(peer, "the manifest does not admit this peer")
            return
        try:
            try:
                async with asyncio.timeout(2 * self._silence):
                    hello = decode(await stream.receive(HELLO_LIMIT), Hello, peer)
            except TimeoutError:
                self._refuse(peer, f"a reduce stream without a hello in {2 * self._silence:.1f} s", Fault.SLOW)
                return
            roster_id = hash_of(hello.seal)
            self._check_hello(peer, hello, roster_id)
            if self._flights.of(roster_id) is None:
                self._offer_seal(peer, Sealed(hello.seal, hello.signature))
            try:
                async with asyncio.timeout(self._silence):
                    while (flight := self._flights.of(roster_id)) is None:
                        await self._round_began.wait()
            except TimeoutError:
                return  # one that ended here, or never began
            await flight.round.serve(stream, hello)
        except (PeerMisbehaved, PeerSlow) as error:
            self._refuse(peer, str(error), error.fault)

    def _check_hello(self, peer: PeerId, hello: Hello, roster_id: bytes) -> None:
        """Raise :class:`PeerMisbehaved` unless this is a roster that both are in and its coordinator signed."""
        seal = hello.seal
        members = {member.peer for member in seal.members}
        if peer not in members or self.transport.peer_id not in members:
            raise PeerMisbehaved("a reduce stream for a roster that not both are in")
        if self._flights.of(roster_id) is not None:
            return
        if not self.signer.verify(PeerId(seal.coordinator), seal_bytes(roster_id), hello.signature):
            raise PeerMisbehaved("a reduce stream for a roster that its coordinator did not sign")
        check_seal(seal, self.manifest, self.layout)

    # --- calling and entering ------------------------------------------------------------------------------------

    async def _enter(self, call: Call) -> tuple[Member, Snapshot]:
        """Say what this peer brings, frozen; or, into a call for leases alone, without stopping for it.

        Raises ResourceError when the island is gone.
        """
        assert self.island is not None
        rules, weight = self.manifest.round, 0
        self._encoded = None
        if call.leases:
            progress = self.island.progress()
            snapshot = Snapshot(progress.steps, progress.tokens, progress.units, progress.leased)
        else:
            snapshot = await self._set_out(call)
            self._note_life()
            weight = self._stated(snapshot, call.fragment)[0]
        if weight and not await self._sendable(call.fragment):
            reason = "the local parameters are not finite, or huge; they are dropped, with their tokens"
            self._events("warning", message=reason)
            await self._reload_island()
            snapshot, weight = await self._set_out(call), 0
        brought = self._accounts.snapshot(snapshot, call.fragment)
        target = rules.first_lease if not brought.units and not brought.leased else 2 * brought.units
        target = min(max(target, rules.first_lease // 2), rules.max_lease)
        if call.leases and brought.leased:
            target = 0  # whoever has samples waits for the next round with its wishes
        want = max(target - brought.leased - self._flights.wanted(), 0)
        total = self._accounts.total(snapshot, call.fragment)
        self._flights.entering = Entering(Brought(snapshot, total), self._ahead_of_round, self._frozen)
        member = Member(
            peer=self.transport.peer_id, nonce=self._nonce, weight=weight,
            steps=self._stated(snapshot, call.fragment)[1], want=want, upload=self.rates.upload,
            download=self.rates.download, reachable=self.reachable,
        )  # fmt: skip
        return member, snapshot

    def _stated(self, snapshot: Snapshot, fragment: int) -> tuple[int, int]:
        """Tokens and steps that this peer states of what it has frozen of a fragment."""
        brought = self._accounts.snapshot(snapshot, fragment)
        age = self._accounts.age(fragment)
        tokens, steps = self.manifest.stale.stated(brought.tokens, brought.steps, age)
        return min(tokens, self.manifest.round.weight_cap), steps

    def _grow_old(self, body: Body, share: float) -> int:
        """A commit has averaged a share of this peer's contribution: the tokens that are too old now, to be dropped."""
        if self.island is None or not body.chunks or body.outer_step >= self.manifest.outer_steps:
            return 0
        tokens = self._accounts.progress(self.island.progress(), body.fragment).tokens
        age = self._accounts.grow_old(body.fragment, tokens > 0 and share < HALF)
        if not self.manifest.stale.drops(age):
            return 0
        self._accounts.grow_old(body.fragment, False)
        return tokens

    async def _sendable(self, fragment: int) -> bool:
        """Whether all of what this peer brings can be sent; an island that encodes has done so then."""
        encoder = self._encoder
        if encoder is None:
            return await self.transport.offload(self.replica.sendable, self._local(), fragment)
        self._encoded = await encoder.encode(fragment)
        return self._encoded is not None

    async def _no_island(self, error: ResourceError) -> None:
        """The island is gone or hangs: let others lead while it comes back."""
        self._events("warning", message=f"the island did not freeze: {error}")
        me = self.transport.peer_id
        self._voids[me] = self._voids.get(me, 0) + 1
        self._rests_until = self.transport.now() + self._silence
        await self._thaw(self.fragment)  # the wish is kept, and is the next child's

    async def _freeze(self) -> Snapshot:
        assert self.island is not None
        self._frozen = True
        return await self.island.freeze()

    async def _set_out(self, call: Call) -> Snapshot:
        """Freeze what a round is to average; with overlap, training goes on from there."""
        island, ahead, fragment = self.island, self.manifest.round.overlap, call.fragment
        assert island is not None
        # In the last rounds there is nothing to run ahead for.
        if not ahead or island.frozen is None or self._place_of(call) + 1 >= self.manifest.regular_steps:
            return await self._freeze()
        self._frozen = True
        until = self._flights.until()
        if self._rule.departs:
            snapshot = await island.freeze()
            for part in self.layout.fragment(fragment).stretches():
                await self.transport.offload(np.copyto, island.frozen[part], island.local[part])
            await self.transport.offload(self.replica.start, self._rule, island.frozen, island.local, fragment)
            await island.resume(
                reload=True, spent=0.0, outer_step=self.head.outer_step, ahead=ahead, until=until
            )  # fmt: skip
        else:
            snapshot = await island.snapshot(ahead, self.layout.fragment(fragment).stretches(), until)
        self._frozen, self._ahead_of_round = False, True
        return snapshot

    def _theta(self) -> Floats | Encoded | None:
        """What the round averages: θ at the freeze, or what the island has encoded of it."""
        return self._local() if self._encoder is None else self._encoded

    def _local(self) -> Floats:
        assert self.island is not None
        if self._ahead_of_round:
            assert self.island.frozen is not None
            return self.island.frozen
        return self.island.local

    async def _reload_island(self, *, residual: bool = False) -> None:
        """The local parameters become the global ones; what had not been handed over is gone. So is the residual,
        unless it is to be kept."""
        assert self.island is not None
        if not self._frozen:
            try:
                await self._freeze()
            except ResourceError as error:
                self._events("warning", message=f"the island did not freeze: {error}")
        self.island.local[:] = self.replica.params
        if self.replica.residual is not None and not residual:
            self.replica.residual.fill(0)
        for limbo in self._limbo:
            limbo.theta = None  # its Δ is no longer in the local parameters, and cannot leave them
        self._flights.ground()
        self._frozen = self._ahead_of_round = False
        self._encoded = None
        self._accounts.clear(self.fragment)
        await self.island.resume(reload=True, spent=1.0, outer_step=self.head.outer_step)

    async def _thaw(self, fragment: int) -> None:
        """Go on training as before, if a freeze stopped it, or ahead of a round of that fragment that has come to
        nothing."""
        assert self.island is not None
        until = self._flights.until()
        if self._frozen:
            self._frozen = self._ahead_of_round = False
            await self.island.resume(
                reload=False, spent=0.0, outer_step=self.head.outer_step, ahead=self._may_step(), until=until
            )  # fmt: skip
        elif self._ahead_of_round:
            self._ahead_of_round = False
            if self._rule.departs:
                assert self.island.frozen is not None
                runs = await self.transport.offload(self.replica.abort, self._rule, self.island.frozen, fragment)
                await self._move_island(runs, spent=0.0, of=None)
            else:
                await self.island.resume(reload=False, spent=0.0, outer_step=self.head.outer_step, until=until)

    async def _withdraw(self, call: Call) -> None:
        """A call that was entered has come to nothing."""
        entering, self._flights.entering = self._flights.entering, None
        if entering is not None and entering.grounded:
            self._ahead_of_round = False
        await self._thaw(call.fragment)

    def _may_step(self, tokens: int | None = None) -> int | None:
        """How many inner steps an island that goes on may make: any number, but none while the run winds up and it
        still has something to hand over. tokens: those that its own counters hold."""
        if not self._winding_up:
            return None
        assert self.island is not None
        counted = self.island.progress() if tokens is None else Progress(tokens=tokens)
        return 0 if self._accounts.progress(counted, self.fragment).tokens else None

    async def _move_island(self, runs: list[Run], *, spent: float, of: Snapshot | None) -> Snapshot | None:
        """Change the local parameters of an island that trains, by the shift in its ``frozen``; its counters as they
        were then. None when it died of it: then it has begun anew from the global parameters."""
        assert self.island is not None
        self._ahead_of_round = False
        until = self._flights.until()
        try:
            moved = await self.island.move(runs, spent=spent, outer_step=self.head.outer_step, of=of, until=until)
        except ResourceError as error:
            self._frozen = True
            self._events("warning", message=f"{error}; the inner steps since the last commit are lost")
            await self._reload_island(residual=True)
            return None
        self._lower(moved, spent, of)
        return moved

    def _lower(self, counted: Snapshot, spent: float, of: Snapshot | None) -> None:
        """A share has been taken out of the island's counters."""
        self._flights.lower(counted, spent, of)
        for limbo in self._limbo:
            limbo.brought.lower(counted, spent, of)

    def _seen(self) -> list[Ballot]:
        return [ballot for limbo in self._limbo for ballot in limbo.round.ballots()][:8]

    async def _coordinate(self, due: Due) -> None:
        """Call, collect, seal, and take part."""
        rules, now = self.manifest.round, self.transport.now()
        self._pass_over(self.transport.peer_id)
        live = self._live()
        live.pop(self.transport.peer_id, None)
        chosen = sorted(live, key=lambda peer: -live[peer].tokens)
        if due is Due.LEASES:
            chosen.sort(key=lambda peer: live[peer].leased > 0)
            for peer, report in [*live.items(), (self.transport.peer_id, self._own_report())]:
                if not report.leased:
                    count = self._patience.get(peer, (0, 0.0))[0] + 1
                    self._patience[peer] = (count, now + self._silence * 2 ** min(count, 10))
        chosen = chosen[: rules.max_group - 1]
        spare = [p for p in self.directory.candidates() if p not in live and not self.messenger.failing(p)]
        leases = due is Due.LEASES
        awaited = {peer for peer in chosen if not self._is_put_off(self._deaf, peer)}
        fragment = self.layout.due(self.head.outer_step) if leases else self.fragment
        calling = Calling(
            self.transport.random.randbytes(16), self._last_round + 1, self.head, awaited, leases, fragment=fragment
        )
        self._calling, self._engaged = calling, self.transport.peer_id
        call = Call(calling.nonce, calling.round, fragment, self.head, due is Due.LEASES)
        called = [*chosen, *spare[: rules.max_group - 1 - len(chosen)]]
        self.messenger.post_all(called, call)
        own: tuple[Member, Snapshot] | None = None
        # A random part breaks ties between two that give way to each other.
        # Each fruitless call makes it rest longer: where views differ, many may call at once, again and again.
        rest = self._silence * 2 ** min(self._fruitless, 5)
        self._rests_until = now + rest * (0.1 + 0.1 * self.transport.random.random())
        self._fruitless += 1
        try:
            own = await self._enter(call)
            # A step may take longer than T on a large island, and a peer answers a call after its step.
            slowest = max((report.step_time for report in live.values()), default=0.0)
            window = now + min(self._silence + 2 * slowest, 2 * self._silence)
            if call.leases:
                window = now + self._silence / 2
            while not calling.complete() and self.transport.now() < window and not self._stopping:
                calling.changed.clear()
                await self._land_beside()
                others = calling.busy.values()
                if self._overtaken(call) or any(self._earlier(other, self.transport.peer_id) for other in others):
                    break
                for peer in calling.expected - calling.answered:
                    # Silence counts from the last word, which may have come before the call.
                    dead = self.messenger.silent_for(peer, float("-inf")) > self._silence
                    if dead or self.messenger.failing(peer):
                        calling.answer(peer)
                try:
                    async with asyncio.timeout(self._silence / 10):
                        await calling.changed.wait()
                except TimeoutError:
                    self.messenger.post_all(list(calling.busy), call)
            else:
                for peer in calling.expected - calling.answered - calling.busy.keys():
                    # It speaks and does not answer: it is called all the same, and waited for again after a while. Who
                    # fell silent meanwhile may be frozen, or cut off; that is no reason to do without it afterwards.
                    if self.messenger.heard(peer) > (now + window) / 2:
                        self._put_off(self._deaf, peer)
            self._calling = None
            if any(self._earlier(other, self.transport.peer_id) for other in calling.busy.values()):
                return
            if any(self._merge(ballot) for ballot in unite([*self._seen(), *calling.seen])):
                return
            if len(calling.entered) + 1 < rules.quorum or self._overtaken(call) or self._stopping:
                self._voids[self.transport.peer_id] = self._voids.get(self.transport.peer_id, 0) + 1
                return
            seal = make_seal(
                calling, own[0], coordinator=self.transport.peer_id, manifest=self.manifest, layout=self.layout,
                unfit=[*self._unfit, *(peer for peer, (_, until) in self._strikes.items() if self.head.height < until)],
                leases=call.leases, rank=self.replica.rank,
            )  # fmt: skip
            sealed = Sealed(seal, self.signer.sign(seal_bytes(hash_of(seal))))
            inside = [PeerId(member.peer) for member in seal.members]
            self.messenger.post_all(inside, sealed)
            for peer in calling.entered:
                if peer not in inside:
                    self.messenger.post(peer, Release(calling.nonce))
            calling.entered.clear()
            snapshot = own[1]
            own = None
            await self._run_round(sealed, snapshot)
        except ResourceError as error:
            await self._no_island(error)
        finally:
            self._calling = None
            self.messenger.post_all(calling.entered, Release(calling.nonce))
            if own is not None:
                await self._withdraw(call)
            self._engaged = None

    def _overtaken(self, call: Call) -> bool:
        """Whether a commit has taken the place that a call is for."""
        return any(self._takes(commit, call.base, call.fragment) for _, commit in self._commits)

    async def _take_part(self, invitation: _Invitation) -> None:
        """Enter another's call, wait for its seal, and take part."""
        coordinator, call = invitation.coordinator, invitation.call
        if self._answer_to(coordinator, call) is not Answer.ENTER:
            return  # it has become a matter of the past
        self._pass_over(coordinator)
        self._engaged, self._awaited = coordinator, call
        self._called_here[call.call] = None
        if len(self._called_here) > CALLS and self._flights.several:
            del self._called_here[next(iter(self._called_here))]
        self._sealed = asyncio.get_running_loop().create_future()
        entered: tuple[Member, Snapshot] | None = None
        try:
            entered = await self._enter(call)
            self.messenger.post(coordinator, Enter(call.call, entered[0], self._seen()))
            sealed = await self._await_seal(coordinator)
            if sealed is not None:
                mine = next((m for m in sealed.seal.members if m.peer == self.transport.peer_id), None)
                if mine != entered[0] or sealed.seal.base != call.base:
                    self._refuse(coordinator, "it sealed a roster that does not say what this peer entered with")
                else:
                    snapshot, entered = entered[1], None
                    await self._run_round(sealed, snapshot)
        except ResourceError as error:
            await self._no_island(error)
            self.messenger.post(coordinator, Refuse(call.call, self.head))
        finally:
            self._sealed, self._awaited = None, None
            if entered is not None:
                await self._withdraw(call)
            self._engaged = None

    async def _await_seal(self, coordinator: PeerId) -> Sealed | None:
        """The seal; None when the coordinator gave up, fell silent, or takes too long."""
        assert self._sealed is not None
        entered = self.transport.now()
        while not self._sealed.done():
            waited = self.transport.now() - entered
            silent = self.messenger.silent_for(coordinator, entered)
            if silent > self._silence or waited > 4 * self._silence:
                if silent <= self._silence:
                    self._put_off(self._sealless, coordinator)
                self._voids[coordinator] = self._voids.get(coordinator, 0) + 1
                self._events("void", round=self._last_round + 1, roster="", reason="no seal came")
                return None
            if not self._flights.several:
                await asyncio.wait([self._sealed], timeout=self._silence / 5)
                continue
            self._wake.clear()
            await self._land_beside()
            if not self._sealed.done():
                await self._wake.wait(self._silence / 5)
        return self._sealed.result()

    # --- the round -----------------------------------------------------------------------------------------------

    def _obsolete(self, roster_id: bytes) -> bool:
        # Only what was verified counts here: anybody can claim a head, and must not stop a round with it.
        flight, plan = self._flights.of(roster_id), self._plan
        if plan is not None and self.guide.surpasses(plan.head, plan.anchored, self.head):
            return True
        if flight is None:
            return True
        seal, group = flight.round.seal, len(flight.round.peers) > 1
        return any(
            self._takes(commit, seal.base, seal.fragment) and (len(commit.body.seal.members) > 1 or not group)
            for _, commit in self._commits
        )

    async def _run_round(self, sealed: Sealed, snapshot: Snapshot) -> None:
        """From the seal to the commit, or back to training. Where rounds may be in flight beside one another, this ends
        with the seal, and the main task looks at the round again when it is over."""
        flight = self._launch(sealed, snapshot)
        if self._flights.several:
            flight.task = self._spawn(self._fly(flight))
        else:
            await self._fly(flight)
            await self._land(flight)

    def _launch(self, sealed: Sealed, snapshot: Snapshot) -> Flight:
        assert self.island is not None
        seal, roster_id, several = sealed.seal, hash_of(sealed.seal), self._flights.several
        if not several or self._frozen:
            self._set_state("averaging")
        self._last_round = max(self._last_round, seal.round)
        patience = self._flights.patience(place_of(seal, self.layout), self._silence)
        self._events(
            "seal", round=seal.round, fragment=seal.fragment, roster=roster_id.hex(),
            members=[m.peer for m in seal.members], coordinator=seal.coordinator, deadline=seal.deadline,
            bound=max(seal.deadline, patience - self.transport.now()) + 3 * self._silence,
            **({"stopped": snapshot.stopped} if self._ahead_of_round else {}),
            **({"rank": seal.rank} if seal.rank else {}),
            **({"device_bytes": self._encoded.moved} if self._encoded is not None else {}),
        )  # fmt: skip
        around = Surroundings(
            self.transport, self.messenger, self.signer, self.manifest, self.layout, self.replica, self._events,
            fetch=self.fetcher.chunks, everyone=lambda: list(self.directory.known),
            obsolete=lambda: self._obsolete(roster_id), afterwards=self._spawn,
            carried=self._flights.carried if several else None,
        )  # fmt: skip
        entering, self._flights.entering = self._flights.entering, None
        assert entering is not None
        theta: Floats | Encoded | None = self._theta()
        if several:
            theta = self.island.frozen if entering.ahead else self.island.local
        current = Round(around, seal, sealed.signature, roster_id, theta)
        current.stay(patience)
        flight = Flight(
            current, entering.brought, self.transport.now(), entering.ahead, entering.paused,
            grounded=entering.grounded,
        )  # fmt: skip
        self._flights.add(flight)
        if several:
            self._ahead_of_round = False
            for peer in current.peers:
                if peer in self._reports:
                    report, at = self._reports[peer]
                    self._reports[peer] = (self._flights.read(peer, report), at)
            self._rests_until = float("-inf")
            self._next_place()
        began, self._round_began = self._round_began, asyncio.Event()
        began.set()
        early, self._early = list(self._early), deque(maxlen=EARLY_LIMIT)
        for peer, message in early:
            try:
                self._for_round(peer, message)
            except PeerMisbehaved as error:
                self._refuse(peer, str(error))
        return flight

    async def _fly(self, flight: Flight) -> None:
        try:
            flight.commit = await flight.round.run()
        except RoundVoid as void:
            flight.void = void
        self._wake.set()
        if self._calling is not None:
            self._calling.changed.set()

    async def _land_beside(self) -> None:
        """Land rounds while the answers to a call, or its seal, are waited for: what was frozen for it stays."""
        if self._flights.several:
            while (flight := self._flights.landing(self.head)) is not None:
                await self._land(flight)

    async def _land(self, flight: Flight, chunks: list[bytes] | None = None) -> None:
        """A round is over: apply its commit, which stands on the head, or go on training as if it had never been.
        chunks: of the commit, if not all of them came in the round."""
        current, island = flight.round, self.island
        assert island is not None
        if self._flights.several:
            self._ahead_of_round = flight.ahead and not flight.grounded
        flight.landing = True
        try:
            if flight.commit is None:
                await self._come_to_nothing(flight)
            else:
                commit, frozen = flight.commit, self._frozen_of(flight)
                if flight.grounded and self.replica.residual is not None:
                    # What was rounded off of it has been sent, and what it was is gone.
                    for stretch in self.layout.fragment(current.seal.fragment).stretches():
                        self.replica.residual[stretch] = 0
                await self._apply(
                    hash_of(commit.body), commit, current.averaged(commit) if chunks is None else chunks,
                    me=current.me, frozen=None if flight.grounded else frozen, held=flight.brought,
                    seconds=self.transport.now() - flight.started,
                )  # fmt: skip
        finally:
            self._flights.remove(flight)
            if (entering := self._flights.entering) is not None:
                self._ahead_of_round = entering.ahead and not entering.grounded
            for peer in current.faulty:
                count = self._strikes.get(peer, (0, 0))[0] + 1
                self._strikes[peer] = (count, self.head.height + 2 ** min(count + 1, MAX_BAN))
            self.rates.round(current.account(), self.transport.now())
            self._prober.poke()
            if not self._stopping and (not self._flights.several or self.state == "averaging"):
                self._set_state("training")

    def _frozen_of(self, flight: Flight) -> Floats | Encoded | None:
        """What a round has averaged of this peer."""
        assert self.island is not None
        if isinstance(flight.round.theta, Encoded):
            return flight.round.theta
        if not self._flights.several:
            return self._theta()
        return self.island.frozen if flight.ahead else self.island.local

    async def _come_to_nothing(self, flight: Flight) -> None:
        """A round has ended void here; others may commit it yet."""
        current, seal = flight.round, flight.round.seal
        self._flights.remove(flight)
        self._events("void", round=seal.round, roster=current.roster_id.hex(), reason=str(flight.void))
        coordinator = PeerId(seal.coordinator)
        self._voids[coordinator] = self._voids.get(coordinator, 0) + 1
        # A copy, for the others may commit it yet, and then exactly this Δ has been taken over.
        theta = current.theta if not flight.grounded else None
        if theta is not None and not isinstance(theta, Encoded):
            theta = await self.transport.offload(_copied, theta, self.layout.fragment(seal.fragment))
        committed = {hash_of(commit.body.seal) for _, commit in self._commits}
        others = [limbo for limbo in self._limbo if limbo.round.place != current.place]
        # A roster for leases brought nothing: it must not push out one that did.
        kept = [
            limbo for limbo in self._limbo
            if limbo.round.place == current.place and (limbo.theta is not None or limbo.round.ballots())
        ][-1:]  # fmt: skip
        self._limbo = [*others, *kept, _Limbo(current, theta, flight.brought)]
        for older in kept:
            # Memory for one copy, unless this very one turned out to have been committed.
            if theta is not None and older.round.roster_id not in committed:
                older.theta = None
        self._unfit |= current.failed_reducers
        if self._encoder is not None:
            self._encoder.hold([limbo.theta for limbo in self._limbo if isinstance(limbo.theta, Encoded)])
        self._next_place()
        await self._thaw(seal.fragment)
        for ballot in current.ballots():
            self._merge(ballot)

    async def _ground(self, reason: str, flights: Sequence[Flight] | None = None) -> None:
        """End rounds in flight (all of them) that cannot be committed here any more, and go on training."""
        for flight in list(self._flights) if flights is None else flights:
            flight.end(reason)
            if flight.task is not None:
                if flight.round.has_commit:
                    flight.task.cancel()  # it waits for chunks
                await asyncio.wait([flight.task])
            flight.commit, flight.void = None, flight.void or RoundVoid(reason)
            await self._land(flight)

    def _merge(self, ballot: Ballot) -> bool:
        """Votes for a void roster of this base; True when they complete a commit."""
        body = ballot.body
        if body.parent != self.head.id or hash_of(body.seal) != ballot.roster:
            return False
        limbo = next((item for item in self._limbo if item.round.roster_id == ballot.roster), None)
        commit_id = hash_of(body)
        votes = {
            vote.member: vote for vote in ballot.votes
            if check_vote(body, commit_id, vote.member, vote.signature, self.signer)
        }  # fmt: skip
        if limbo is not None and commit_id in limbo.round.proposals:
            known = limbo.round.proposals[commit_id].votes
            known.update((member, vote.signature) for member, vote in votes.items() if member not in known)
            votes = {member: Vote(member, signature) for member, signature in known.items()}
        if len(votes) < majority(len(body.seal.members)):
            return False
        commit = Commit(body, [votes[member] for member in sorted(votes)])
        try:
            verify_commit(commit, self.manifest, self.layout, self.signer)
        except PeerMisbehaved:
            return False
        if all(commit_id != known_id for known_id, _ in self._commits):
            self._commits.append((commit_id, commit))
            self.messenger.post_all(self.directory.known, Committed(commit))
        self._wake.set()
        return True

    # --- applying ------------------------------------------------------------------------------------------------

    def _recent(self, digest: bytes) -> bytes | None:
        """An averaged chunk that is not in the log yet: of a round in progress, or of a void one."""
        for current in [*(flight.round for flight in self._flights), *(limbo.round for limbo in self._limbo)]:
            if digest in current.held:
                return current.held[digest]
        return None

    async def _apply(
        self, commit_id: bytes, commit: Commit, chunks: list[bytes], *, me: int | None,
        frozen: Floats | Encoded | None, held: Brought | None, seconds: float, lost: bool = False,
    ) -> None:  # fmt: skip
        """Log a commit, apply it whole, and go on training. Where there is no overlap the island is frozen until
        then, else it trains on but for the moment in which its parameters move."""
        body, island = commit.body, self.island
        if self._checkpointing is not None:
            await self._checkpointing
            self._checkpointing = None
        try:
            check_child(body, self.replica.position, self.manifest, self.layout)
            await self.transport.offload(check_all, body, chunks, self.layout, self.codec, self.manifest.merging)
        except PeerMisbehaved as error:
            await self._spurn(commit_id, body, str(error))
            return
        digest = await self.replica.digest(self.transport)
        if digest != body.state:
            if await self._recover(body.state):
                self._commits.appendleft((commit_id, commit))
            else:
                # What every byte on disk says again is so; then the commit is what is wrong.
                await self._spurn(commit_id, body, "it attests a state that is not its parent's")
            return
        if body.seal.rank != self.replica.rank:
            await self._spurn(commit_id, body, f"its rank is {body.seal.rank}, and {self.replica.rank} is in force")
            return
        try:
            await self.transport.offload(self.store.append, commit, chunks)
        except DiskFull as error:
            self._events("warning", message=f"the commit was not logged: {error}")
        last = body.outer_step >= self.manifest.regular_steps
        self._note_life()
        encoder = self._encoder
        moving = island is not None and bool(chunks) and not self._frozen
        dropped = self._grow_old(
            body, 1.0 if lost else contributed(body.seal, body.chunks, self.layout)[me] if me is not None else 0.0
        )  # fmt: skip
        here = encoder is None and island is not None and (island.frozen is None or lost or bool(dropped))
        if moving and (here or last):
            # Its θ is about to be written; nothing may be training on it.
            moving = False
            try:
                await self._freeze()
            except ResourceError as error:
                self._events("warning", message=f"the island did not freeze: {error}")
        rule = self._rule if self._ahead_of_round else CARRY
        applied = await self.transport.offload(
            self.replica.apply, body, commit_id, chunks, me=me, rule=rule,
            frozen=frozen if not isinstance(frozen, Encoded) else None,
            local=island.local if island is not None and encoder is None and not (lost or dropped or moving) else None,
            shift=island.frozen if island is not None and encoder is None and moving else None,
        )  # fmt: skip
        self._reluctant.pop(PeerId(body.seal.coordinator), None)
        self._sealless.pop(PeerId(body.seal.coordinator), None)
        names = [member.peer for member in body.seal.members]
        for member in body.seal.members:
            if member.weight:
                self._patience.pop(PeerId(member.peer), None)
            if member.peer != self.transport.peer_id:
                self.directory.heard(PeerId(member.peer))
        more: dict[str, Any] = {}
        if island is not None and me is not None:
            self._carried = False
            self.contributed += averaged_of(body.seal, body.chunks, self.layout)[me]
            island.lease([lease.span for lease in body.leases if lease.member == me])
        if island is not None and encoder is not None:
            brought = frozen if isinstance(frozen, Encoded) else None
            more = await self._tell_encoder(
                encoder, commit_id, body, me, brought, held.of if held is not None else None, lost=lost,
                dropped=dropped, rule=rule,
            )  # fmt: skip
        elif island is not None:
            # What was done since the freeze stays, and counts next time; by one rule it is lost to this fragment.
            overwrite, part = rule.merge is Merge.OVERWRITE, self.layout.fragment(body.fragment)
            paused = frozen is island.local or (overwrite and self.layout.fragments == 1)
            of, total = (None, None) if paused or held is None else (held.of, held.total)
            snapshot = held.of if held is not None else None
            spent = applied.share
            if lost or dropped:
                for span in map(part.span, range(part.count)):
                    island.local[span] = self.replica.params[span]
                    if self.replica.residual is not None and lost:
                        self.replica.residual[span] = 0
                spent, of, total = 1.0, None, None
            if dropped:
                self._ahead_of_round = False
                more["stale_tokens"] = round(dropped * part.parameters / self.layout.parameters)
            if moving:
                moved = await self._move_island(applied.runs, spent=spent, of=of)
                if moved is not None:
                    self._accounts.commit(body.fragment, spent, moved, of, overwrite=overwrite, total=total)
                    if overwrite and snapshot is not None:
                        share = applied.share * (part.parameters / self.layout.parameters)
                        more["lost_tokens"] = round(max(moved.tokens - snapshot.tokens, 0) * share)
                more["stopped"] = moved.stopped if moved is not None else 0.0
            elif self._frozen and not self.finished:  # after the last round there is nothing to train for
                counted = island.progress()
                now = Snapshot(counted.steps, counted.tokens, counted.units, counted.leased)
                self._accounts.commit(body.fragment, spent, now, of, overwrite=overwrite, total=total)
                self._frozen = False
                ahead = self._may_step(left(now.tokens, spent, of.tokens if of is not None else None))
                await island.resume(
                    reload=bool(chunks), spent=spent, outer_step=body.outer_step, of=of, ahead=ahead,
                    until=self._flights.until(),
                )  # fmt: skip
                self._lower(now, spent, of)
            elif self._ahead_of_round:
                await self._thaw(body.fragment)  # leases alone: nothing was averaged
        self._log_commit(commit_id, commit, names, seconds, more)
        self._ended[hash_of(body.seal)] = commit, self.transport.now()
        while len(self._ended) > self._flights.width:
            del self._ended[next(iter(self._ended))]
        self._told_end.clear()
        self._flights.pass_head(self.head)
        self._new_head()
        if chunks and (self.head.outer_step % self.manifest.state.checkpoint_every == 0 or self.finished):
            self._checkpointing = asyncio.get_running_loop().create_task(self._checkpoint())

    async def _tell_encoder(
        self, encoder: Encoder, commit_id: bytes, body: Body, me: int | None, brought: Encoded | None,
        snapshot: Snapshot | None, *, lost: bool, dropped: int, rule: Overlap,
    ) -> dict[str, Any]:  # fmt: skip
        """Let an island that encodes take over a commit that has been applied here; what to log of it. dropped: tokens
        that are too old now."""
        island, part = self.island, self.layout.fragment(body.fragment)
        assert island is not None
        if not body.chunks or self.finished:  # leases alone; after the last round there is nothing to train for
            if not body.chunks:
                self._untold = commit_id, self._told_of(body.parent)
                await self._thaw(body.fragment)
            return {}
        if brought is not None and brought.life != island.life:
            brought = None  # it counts in the commit, and is no longer in the local parameters
        mine, others = averaged(body, me if brought is not None else None)
        overwrite, moving = rule.merge is Merge.OVERWRITE, not self._frozen
        paused = self._frozen and brought is not None and brought is self._encoded
        spent, of = share_of(mine, part), snapshot
        if lost or dropped or paused or (overwrite and self.layout.fragments == 1):
            of = None
        if lost or dropped:
            spent = 1.0
        ahead = None
        if not moving:  # its counters stand still
            counted = island.progress()
            now = Snapshot(counted.steps, counted.tokens, counted.units, counted.leased)
            self._accounts.commit(body.fragment, spent, now, of, overwrite=overwrite)
            ahead = self._may_step(left(now.tokens, spent, of.tokens if of is not None else None))
        outcome = Outcome(body.fragment, commit_id, mine, others, brought, lost, bool(dropped), rule)
        try:
            moved, known = await encoder.commit(
                outcome, self.replica.params, spent=spent, of=of, outer_step=body.outer_step, ahead=ahead
            )
        except ResourceError as error:
            self._events("warning", message=f"{error}; the inner steps since the last commit are lost")
            await self._reload_island()
            return {"stopped": 0.0} if moving else {}
        self._frozen = self._ahead_of_round = False
        if not known:
            self._events("warning", message="progress since a void round that was committed after all is dropped")
            spent, of = 1.0, None
        if moving:
            self._accounts.commit(body.fragment, spent, moved, of, overwrite=overwrite)
        elif not known:
            self._accounts.clear(self.fragment)
        more: dict[str, Any] = {"stopped": moved.stopped} if moving else {}
        if dropped:
            more["stale_tokens"] = round(dropped * part.parameters / self.layout.parameters)
        if overwrite and moving and snapshot is not None:
            share = share_of(mine, part) * (part.parameters / self.layout.parameters)
            more["lost_tokens"] = round(max(moved.tokens - snapshot.tokens, 0) * share)
        return more

    async def _spurn(self, commit_id: bytes, body: Body, reason: str) -> None:
        """A commit with a majority's signatures that is false all the same: never apply it, and go on training."""
        self._refuse(PeerId(body.seal.coordinator), f"the commit of round {body.round}: {reason}")
        self._spurned.append(commit_id)
        self._forget_commit(commit_id)
        if self.island is not None:
            await self._thaw(body.fragment)

    def _log_commit(
        self, commit_id: bytes, commit: Commit, names: list[str], seconds: float, more: dict[str, Any]
    ) -> None:
        body = commit.body
        shares = contributed(body.seal, body.chunks, self.layout)
        self._events(
            "commit", round=body.seal.round, fragment=body.fragment, outer_step=body.outer_step, height=body.height,
            id=commit_id.hex(), parent=body.parent.hex(), members=names,
            contributors=dict(zip(names, shares, strict=True)),
            tokens=body.tokens, weight=body.weight, seconds=seconds, lone=len(names) == 1,
            votes=len(commit.votes), cursor=body.cursor, **more,
        )  # fmt: skip

    async def _checkpoint(self) -> None:
        try:
            await self.replica.digest(self.transport)
            keep = self.donor.in_use()
            await self.transport.offload(self.store.save_checkpoint, self.replica.position, self.replica.state, keep)
        except (ResourceError, StateError) as error:
            self._events("warning", message=f"no checkpoint was written: {error}")
            return
        # It is valid with this head only: a crash before the next commit finds it, a later one begins without.
        await self._save_residual()

    async def _save_residual(self) -> None:
        """Write the residual of the head to the disk, from here or from an island that keeps it, if it has one."""
        commit_id, residual, encoder = self.replica.position.head.id, self.replica.residual, self._encoder
        try:
            if encoder is not None:
                residual = await encoder.residual(self._told_of(commit_id))
            if residual is not None:
                await self.transport.offload(self.store.save_residual, commit_id, residual)
        except (ResourceError, StateError) as error:
            self._events("warning", message=f"the residual was not saved: {error}")

    def _told_of(self, head: bytes) -> bytes:
        """The commit with chunks, or the one that it began with, that an island that encodes knows this head by."""
        return self._untold[1] if self._untold[0] == head else head

    async def _follow(self, commit_id: bytes, commit: Commit) -> None:
        """Apply a commit on this head that this peer had no live part in: another roster's, or a void one's."""
        body = commit.body
        try:
            check_child(body, self.replica.position, self.manifest, self.layout)
        except PeerMisbehaved as error:
            self._refuse(PeerId(body.seal.coordinator), str(error))
            return
        donors = [PeerId(member.peer) for member in body.seal.members if member.peer != self.transport.peer_id]
        started = self.transport.now()
        try:
            size = encoded_size(self.layout.wire(body.fragment, body.seal.rank), self.manifest.codec.name)
            rate = self.rates.download or ASSUMED
            async with asyncio.timeout(4 * self._silence + 4 * transfer_seconds(size, 2, rate)):
                chunks = await self.fetcher.chunks(body, donors, self._recent)
        except (TransportError, TimeoutError) as error:
            # Whoever has the head has its chunks; the way to it is then the ordinary catching up.
            self._events("warning", message=f"round {body.round}: a chunk of the commit is not to be had: {error}")
            return
        await self._apply_late(commit_id, commit, chunks, self.transport.now() - started)

    async def _apply_late(self, commit_id: bytes, commit: Commit, chunks: list[bytes], seconds: float) -> None:
        """Apply a commit on this head outside of its round. What was frozen for its roster, if this peer was in it,
        has been averaged and leaves the local weights; all else moves along."""
        body = commit.body
        me = next(
            (i for i, m in enumerate(body.seal.members) if (m.peer, m.nonce) == (self.transport.peer_id, self._nonce)),
            None,
        )
        roster = hash_of(body.seal)
        limbo = next((item for item in self._limbo if item.round.roster_id == roster), None)
        frozen = limbo.theta if limbo is not None else None
        count = len(body.seal.members)
        averaged = me is not None and any(me in members_in(entry.contributors, count) for entry in body.chunks)
        lost = averaged and frozen is None
        if lost:
            self._events("warning", message="progress since a void round that was committed after all is dropped")
        elif self._was_handed_over(body) and self.island is not None:
            self._events("warning", message="the inner steps that were saved have been averaged; they are dropped")
            self.island.revoke()  # some of these samples are in that average too
            lost, self._carried = True, False
        await self._apply(
            commit_id, commit, chunks, me=me, frozen=None if lost else frozen,
            held=limbo.brought if limbo is not None else None,
            seconds=seconds, lost=lost,
        )  # fmt: skip

    # --- catching up ---------------------------------------------------------------------------------------------

    def _must_catch_up(self) -> bool:
        """Whether a better head has been known for so long that its commit will not come by itself any more."""
        if not self._ahead:
            self._better_since = None
            return False
        now = self.transport.now()
        self._better_since = self._better_since or now
        # The next commit may be one that a round in flight here is about to bring.
        coming = self._flights.at(self.head.outer_step) is not None
        return self._reached(self._better_since + (2 * self._silence if coming else self._silence / 5))

    async def _look_into(self, claimants: list[PeerId]) -> None:
        """Ask those who claim a better head for a way to it that can be verified. Runs beside the rounds: anybody can
        claim a head, so a claim alone must keep this peer from nothing."""
        try:
            starts = await self.transport.offload(self.store.restorable)
            plan = await self.fetcher.plan(claimants, self.head, starts)
            if plan is not None and plan.base == plan.head:
                await self.guide.take(plan.lineage)  # of a chain that is here
            self._plan = plan
        except (TransportError, ResourceError, StateError) as error:
            self._events("warning", message=f"cannot catch up yet: {error}")
            if error.fault is Fault.LOCAL:
                claimants = []  # nothing was learnt about them
                await asyncio.sleep(self._silence)
        if self._plan is None:
            for peer in claimants:
                if peer in self._heads and not better(self._heads[peer], self.head):
                    # Nothing is wrong with its head, but that it could not show the anchor behind it.
                    self.guide.doubt(peer)
                    self._ahead.pop(peer, None)
                else:
                    self._disbelieve(peer)
        self._looking = None
        self._wake.set()

    def _found_on_disk(self, head: Head) -> None:
        """A chain that this peer has left is the organiser's."""
        if self.guide.surpasses(head, b"", self.head):
            self._plan = Plan(head, head, None, [], [])
            self._wake.set()

    def _disbelieve(self, peer: PeerId) -> None:
        """What that peer said is not what it gives; it is asked again after a while, each time a longer one."""
        self._heads.pop(peer, None)
        self._ahead.pop(peer, None)
        pause = min(2 * self._doubts.get(peer, (self._silence / 2, 0.0))[0], 60 * self._silence)
        self._doubts[peer] = (pause, self.transport.now() + pause)

    async def _catch_up(self, plan: Plan) -> None:
        """Fetch what lies between this head and a verified better one, and go over to it."""
        before, self._better_since, self._plan = self.state, None, None
        if not self.guide.surpasses(plan.head, plan.anchored, self.head):
            self._look_again()  # it may have shown what is behind the own head
            return
        if plan.base != self.head or plan.checkpoint is not None:
            await self._ground("a better head than its base is known")
        self._set_state("joining")
        if self._checkpointing is not None:
            await self._checkpointing
            self._checkpointing = None
        try:
            await self.fetcher.carry_out(plan, self.store, self._keep)
        except (TransportError, ResourceError, StateError, NonFinite) as error:
            self._events("warning", message=f"cannot catch up yet: {error}")
            if error.fault is Fault.LOCAL:
                await asyncio.sleep(self._silence)
            else:
                for peer in plan.donors:
                    self._disbelieve(peer)
        else:
            await self.guide.take(plan.lineage)
            self._alone_since = self.transport.now()  # others are where it goes
            if plan.base == self.head and plan.checkpoint is None:
                await self._walk(plan)
            else:
                await self._go_over(plan.head)
        if self.state == "joining":
            self._set_state("observing" if self.island is None else before if before != "joining" else "training")

    async def _walk(self, plan: Plan) -> None:
        """Apply a plan's commits one after another, as far as they follow from this head."""
        for step in plan.steps:
            if step.commit.body.parent != self.head.id:
                break
            commit_id = hash_of(step.commit.body)
            try:
                chunks = await self.transport.offload(self.store.chunks, commit_id)
            except StateError as error:
                self._events("warning", message=str(error))
                break
            flight = self._flights.of(hash_of(step.commit.body.seal))
            if flight is None:
                if (rival := self._rival(step.commit)) is not None:
                    await self._ground("another roster committed on the same base", [rival])
                await self._apply_late(commit_id, step.commit, chunks, 0.0)
                continue
            if flight.task is not None:
                flight.task.cancel()
                await asyncio.wait([flight.task])
            flight.commit, flight.void = step.commit, None
            await self._land(flight, chunks)

    def _keep(self, commit: Commit, chunks: list[bytes]) -> None:
        """Log a fetched commit, once its chunks are known to be sound."""
        check_all(commit.body, chunks, self.layout, self.codec, self.manifest.merging)
        self.store.append(commit, chunks)

    async def _go_over(self, head: Head) -> None:
        """Reload what the store has of another head: a fork's end, or a jump over commits that are no longer kept.

        What this peer has not handed over belongs to the chain that it leaves: it is dropped, and said to be lost.
        """
        loaded = await self.transport.offload(self.store.load, head.id)
        if loaded is None:
            self._events("warning", message=f"the state of round {head.round} could not be loaded; it is fetched again")
            if self.island is not None:
                await self._thaw(self.fragment)
            return
        progress = self.island.progress() if self.island is not None else Progress()
        if self.island is not None:
            try:
                await self._freeze()
            except ResourceError as error:
                self._events("warning", message=f"the island did not freeze: {error}")
        before = self.head
        state = loaded.state if loaded.state is not None else await self.transport.offload(self._fresh)
        self.replica.adopt(state, loaded.position, await self._rank_of(state, loaded.position))
        self._ended.clear()
        await self._replay(loaded.replay)
        if self.store.prefers(head, self.head):
            self._owed = head
        try:
            await self.transport.offload(self.store.see, head)
        except ResourceError as error:
            self._events("warning", message=f"the head was not written down: {error}")
        self._events(
            "resync", round=self.head.round, outer_step=self.head.outer_step, left=before.id.hex(),
            left_round=before.round, lost_tokens=self._accounts.unmerged(progress),
        )  # fmt: skip
        if self.island is not None:
            self.island.revoke()
            self._carried = False
            await self._reload_island()
        self._flights.leave(self.head)
        self._new_head()

    async def _recover(self, attested: bytes) -> bool:
        """This peer's state is not what the swarm attests: compute it from disk again, where every byte is checked.

        True when the disk has the attested state, which is taken over; the memory was wrong then. Else nothing changes.
        """
        loaded = await self.transport.offload(self.store.load, self.head.id)
        if loaded is None:
            return False
        state = loaded.state if loaded.state is not None else await self.transport.offload(self._fresh)
        mine = self.replica
        rank = await self._rank_of(state, loaded.position)
        scratch = Replica(self.manifest, self.layout, self.codec, state, loaded.position, rank=rank)
        self.replica = scratch
        try:
            await self._replay(loaded.replay)
        finally:
            self.replica = mine
        if scratch.position != mine.position or await scratch.digest(self.transport) != attested:
            return False
        self._recoveries += 1
        if self._recoveries > 3:
            raise StateError("the state in memory was wrong again; check this machine's memory, then start anew")
        self._events("warning", message="the state in memory was wrong; it was taken from disk again")
        self.replica.adopt(state, scratch.position, scratch.rank)
        if self.island is not None:
            await self._reload_island()
        return True


def _copied(theta: Floats, part: ChunkLayout) -> Floats:
    """A copy of a fragment's elements, in their places; memory elsewhere is not touched."""
    copy = np.empty_like(theta)
    for stretch in part.stretches():
        copy[stretch] = theta[stretch]
    return copy
