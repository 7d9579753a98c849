"""The rounds that this peer is in: from the seal to the commit, or back to training."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .applying import Applying
from .commits import check_seal
from .control import Ballot, Ping, Reassign, Sealed, Voided
from .core import Core
from .encoder import Encoded
from .ends import Ends
from .engagement import Engagement
from .errors import Fault, PeerMisbehaved, PeerSlow, RoundVoid
from .flights import Flight, Limbo
from .handing_over import Stake
from .heads import Heads
from .incoming import Incoming
from .island import Snapshot
from .layout import ChunkLayout
from .messages import decode, hash_of, seal_bytes
from .places import place_of
from .reduce import HELLO_LIMIT, Hello
from .reporting import Reporting
from .reports import Reports
from .round import Round, Surroundings
from .succession import Succession
from .timing import Timing
from .training import Training
from .transport import PeerId, Stream

Floats = NDArray[np.float32]
RoundMessage = Ping | Reassign | Ballot | Voided

MAX_BAN = 6
"""Two to this power: commits for which a reducer that failed again and again gets no part."""
EARLY_LIMIT = 256
"""Messages kept for rosters that this peer has not been told of yet."""


class Rounds:
    """Launches rounds, brings them what is meant for them, and lands them.

    landed: called when a round is over.
    """

    def __init__(
        self,
        core: Core,
        training: Training,
        heads: Heads,
        succession: Succession,
        reports: Reports,
        timing: Timing,
        reporting: Reporting,
        engagement: Engagement,
        incoming: Incoming,
        applying: Applying,
        ends: Ends,
        *,
        landed: Callable[[], None],
    ) -> None:
        self._core = core
        self._training = training
        self._heads = heads
        self._succession = succession
        self._reports = reports
        self._timing = timing
        self._reporting = reporting
        self._engagement = engagement
        self._incoming = incoming
        self._applying = applying
        self._ends = ends
        self._landed = landed
        self._transport = core.transport
        self._me = core.me
        self._signer = core.signer
        self._manifest = core.manifest
        self._layout = core.layout
        self._island = core.island
        self._messenger = core.messenger
        self._directory = core.directory
        self._guide = core.guide
        self._fetcher = core.fetcher
        self._flights = core.flights
        self._events = core.events
        self._silence = core.silence
        self._refuse = core.refuse
        self._spawn = core.tasks.spawn
        self._wake = core.agenda.wake
        self._began = asyncio.Event()
        self._early: deque[tuple[PeerId, RoundMessage]] = deque(maxlen=EARLY_LIMIT)
        self._unfit: dict[PeerId, None] = {}
        """Who failed to reduce its part in a roster of this base."""
        self._strikes: dict[PeerId, tuple[int, int]] = {}
        """Who failed at it before this peer's own eyes: how often, and the height until which it gets no part."""

    def _next_place(self) -> None:
        """A round has been launched, or came to nothing: the next one is for another place."""
        if not self._flights.several:
            return
        self._timing.next_place()
        self._succession.next_place()
        self._reporting.soon.set()

    def receive(self, peer: PeerId, message: RoundMessage) -> None:
        """A message for a roster, which may be in flight, over, or not sealed here yet."""
        if (flight := self._flights.of(message.roster)) is not None:
            flight.round.receive(peer, message)
            return
        if message.roster in self._ends:
            if isinstance(message, Ping):
                self._ends.tell(peer, message.roster)
            return
        if isinstance(message, Ballot) and self._flights.limbo_of(message.roster) is not None:
            self._incoming.merge(message)
            return
        if not isinstance(message, Ping) and sum(sender == peer for sender, _ in self._early) < 8:
            self._early.append((peer, message))

    async def serve(self, stream: Stream) -> None:
        """A member opened a reduce stream; its first frame carries the roster, news that may come before the seal."""
        peer = stream.peer
        if not self._manifest.admits(peer):
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
                self._engagement.offer_seal(peer, Sealed(hello.seal, hello.signature))
            try:
                async with asyncio.timeout(self._silence):
                    while (flight := self._flights.of(roster_id)) is None:
                        await self._began.wait()
            except TimeoutError:
                return  # one that ended here, or never began
            await flight.round.serve(stream, hello)
        except (PeerMisbehaved, PeerSlow) as error:
            self._refuse(peer, str(error), error.fault)

    def _check_hello(self, peer: PeerId, hello: Hello, roster_id: bytes) -> None:
        """Raise :class:`PeerMisbehaved` unless this is a roster that both are in and its coordinator signed."""
        seal = hello.seal
        members = {member.peer for member in seal.members}
        if peer not in members or self._me not in members:
            raise PeerMisbehaved("a reduce stream for a roster that not both are in")
        if self._flights.of(roster_id) is not None:
            return
        if not self._signer.verify(PeerId(seal.coordinator), seal_bytes(roster_id), hello.signature):
            raise PeerMisbehaved("a reduce stream for a roster that its coordinator did not sign")
        check_seal(seal, self._manifest, self._layout)

    def _obsolete(self, roster_id: bytes) -> bool:
        # Only what was verified counts here: anybody can claim a head, and must not stop a round with it.
        flight, plan = self._flights.of(roster_id), self._heads.plan
        if plan is not None and self._guide.surpasses(plan.head, plan.anchored, self._core.head):
            return True
        if flight is None:
            return True
        seal, group = flight.round.seal, len(flight.round.peers) > 1
        return self._incoming.overtakes(seal.base, seal.fragment, alone=not group)

    async def run(self, sealed: Sealed, snapshot: Snapshot) -> None:
        """From the seal to the commit, or back to training. Where rounds may be in flight beside one another, this ends
        with the seal, and the main task looks at the round again when it is over."""
        flight = self._launch(sealed, snapshot)
        if self._flights.several:
            flight.task = self._spawn(self._fly(flight))
        else:
            await self._fly(flight)
            await self.land(flight)

    def _launch(self, sealed: Sealed, snapshot: Snapshot) -> Flight:
        assert self._island is not None
        seal, roster_id, several = sealed.seal, hash_of(sealed.seal), self._flights.several
        if not several or self._training.frozen:
            self._core.set_state("averaging")
        self._core.last_round = max(self._core.last_round, seal.round)
        patience = self._flights.patience(place_of(seal, self._layout), self._silence)
        self._events(
            "seal", round=seal.round, fragment=seal.fragment, roster=roster_id.hex(),
            members=[m.peer for m in seal.members], coordinator=seal.coordinator, deadline=seal.deadline,
            bound=max(seal.deadline, patience - self._transport.now()) + 3 * self._silence,
            **({"stopped": snapshot.stopped} if self._training.ahead else {}),
            **({"rank": seal.rank} if seal.rank else {}),
            **({"device_bytes": self._training.encoded.moved} if self._training.encoded is not None else {}),
        )  # fmt: skip
        around = Surroundings(
            self._transport, self._messenger, self._signer, self._manifest, self._layout, self._core.replica,
            self._events, fetch=self._fetcher.chunks, everyone=lambda: list(self._directory.known),
            obsolete=lambda: self._obsolete(roster_id), afterwards=self._spawn,
            carried=self._flights.carried if several else None,
        )  # fmt: skip
        entering, self._flights.entering = self._flights.entering, None
        assert entering is not None
        theta: Floats | Encoded | None = self._training.theta()
        if several:
            theta = self._island.frozen if entering.ahead else self._island.local
        current = Round(around, seal, sealed.signature, roster_id, theta)
        current.stay(patience)
        flight = Flight(
            current, entering.brought, self._transport.now(), entering.ahead, entering.paused,
            grounded=entering.grounded,
        )  # fmt: skip
        self._flights.add(flight)
        if several:
            self._training.run_ahead(False)
            self._reports.read_again(current.peers)
            self._timing.call_at_once()
            self._next_place()
        began, self._began = self._began, asyncio.Event()
        began.set()
        early, self._early = list(self._early), deque(maxlen=EARLY_LIMIT)
        for peer, message in early:
            try:
                self.receive(peer, message)
            except PeerMisbehaved as error:
                self._refuse(peer, str(error))
        return flight

    async def _fly(self, flight: Flight) -> None:
        try:
            flight.commit = await flight.round.run()
        except RoundVoid as void:
            flight.void = void
        self._wake.set()
        if self._engagement.calling is not None:
            self._engagement.calling.changed.set()

    async def land_beside(self) -> None:
        """Land rounds while the answers to a call, or its seal, are waited for: what was frozen for it stays."""
        if self._flights.several:
            while (flight := self._flights.landing(self._core.head)) is not None:
                await self.land(flight)

    async def land(self, flight: Flight, chunks: list[bytes] | None = None) -> None:
        """A round is over: apply its commit, which stands on the head, or go on training as if it had never been.
        chunks: of the commit, if not all of them came in the round."""
        current, island = flight.round, self._island
        assert island is not None
        if self._flights.several:
            self._training.run_ahead(flight.ahead and not flight.grounded)
        flight.landing = True
        try:
            if flight.commit is None:
                await self._come_to_nothing(flight)
            else:
                commit, frozen = flight.commit, self._frozen_of(flight)
                if flight.grounded and self._core.replica.residual is not None:
                    # What was rounded off of it has been sent, and what it was is gone.
                    for stretch in self._layout.fragment(current.seal.fragment).stretches():
                        self._core.replica.residual[stretch] = 0
                averaged = current.averaged(commit) if chunks is None else chunks
                stake = Stake(current.me, None if flight.grounded else frozen, flight.brought)
                seconds = self._transport.now() - flight.started
                await self._applying.apply(hash_of(commit.body), commit, averaged, stake, seconds)
        finally:
            self._flights.remove(flight)
            if (entering := self._flights.entering) is not None:
                self._training.run_ahead(entering.ahead and not entering.grounded)
            for peer in current.faulty:
                count = self._strikes.get(peer, (0, 0))[0] + 1
                self._strikes[peer] = (count, self._core.head.height + 2 ** min(count + 1, MAX_BAN))
            self._core.rates.round(current.account(), self._transport.now())
            self._landed()
            if not self._core.stopping and (not self._flights.several or self._core.state == "averaging"):
                self._core.set_state("training")

    def _frozen_of(self, flight: Flight) -> Floats | Encoded | None:
        """What a round has averaged of this peer."""
        assert self._island is not None
        if isinstance(flight.round.theta, Encoded):
            return flight.round.theta
        if not self._flights.several:
            return self._training.theta()
        return self._island.frozen if flight.ahead else self._island.local

    async def _come_to_nothing(self, flight: Flight) -> None:
        """A round has ended void here; others may commit it yet."""
        current, seal = flight.round, flight.round.seal
        self._flights.remove(flight)
        self._events("void", round=seal.round, roster=current.roster_id.hex(), reason=str(flight.void))
        coordinator = PeerId(seal.coordinator)
        self._succession.void(coordinator)
        # A copy, for the others may commit it yet, and then exactly this Δ has been taken over.
        theta = current.theta if not flight.grounded else None
        if theta is not None and not isinstance(theta, Encoded):
            theta = await self._transport.offload(_copied, theta, self._layout.fragment(seal.fragment))
        committed = self._incoming.rosters()
        others = [limbo for limbo in self._flights.limbo if limbo.round.place != current.place]
        # A roster for leases brought nothing: it must not push out one that did.
        kept = [
            limbo for limbo in self._flights.limbo
            if limbo.round.place == current.place and (limbo.theta is not None or limbo.round.ballots())
        ][-1:]  # fmt: skip
        self._flights.limbo = [*others, *kept, Limbo(current, theta, flight.brought)]
        for older in kept:
            # Memory for one copy, unless this very one turned out to have been committed.
            if theta is not None and older.round.roster_id not in committed:
                older.theta = None
        self._unfit |= current.failed_reducers
        if self._core.encoder is not None:
            self._core.encoder.hold([limbo.theta for limbo in self._flights.limbo if isinstance(limbo.theta, Encoded)])
        self._next_place()
        await self._training.thaw(seal.fragment)
        for ballot in current.ballots():
            self._incoming.merge(ballot)

    async def ground(self, reason: str, flights: Sequence[Flight] | None = None) -> None:
        """End rounds in flight (all of them) that cannot be committed here any more, and go on training."""
        for flight in list(self._flights) if flights is None else flights:
            flight.end(reason)
            if flight.task is not None:
                if flight.round.has_commit:
                    flight.task.cancel()  # it waits for chunks
                await asyncio.wait([flight.task])
            flight.commit, flight.void = None, flight.void or RoundVoid(reason)
            await self.land(flight)

    def unfit(self) -> list[PeerId]:
        """Who gets no part to reduce in the next roster."""
        height = self._core.head.height
        return [*self._unfit, *(peer for peer, (_, until) in self._strikes.items() if height < until)]

    def new_head(self) -> None:
        """The base is another."""
        self._unfit.clear()

    def forget(self, peer: PeerId) -> None:
        self._strikes.pop(peer, None)


def _copied(theta: Floats, part: ChunkLayout) -> Floats:
    """A copy of a fragment's elements, in their places; memory elsewhere is not touched."""
    copy = np.empty_like(theta)
    for stretch in part.stretches():
        copy[stretch] = theta[stretch]
    return copy
