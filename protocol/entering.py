"""The member: answers calls, enters one, and waits for its seal (design: "One round", 2)."""

from __future__ import annotations

import asyncio

from .control import Busy, Call, Enter, Refuse, Sealed
from .core import Core
from .engagement import Engagement, Invitation
from .errors import PeerMisbehaved, ResourceError
from .flights import CALLS, Answer
from .heads import Heads
from .island import Snapshot
from .messages import MAX_ROUND_GAP, Member
from .places import place, reach
from .rounds import Rounds
from .succession import Succession
from .timing import Timing
from .training import Training
from .transport import PeerId


class EnteringCalls:
    """Others' calls."""

    def __init__(
        self,
        core: Core,
        heads: Heads,
        succession: Succession,
        timing: Timing,
        training: Training,
        engagement: Engagement,
        rounds: Rounds,
    ) -> None:
        self._core = core
        self._heads = heads
        self._succession = succession
        self._timing = timing
        self._training = training
        self._engagement = engagement
        self._rounds = rounds
        self._transport = core.transport
        self._me = core.me
        self._manifest = core.manifest
        self._layout = core.layout
        self._island = core.island
        self._messenger = core.messenger
        self._flights = core.flights
        self._events = core.events
        self._silence = core.silence
        self._refuse = core.refuse
        self._wake = core.agenda.wake
        self._parked: dict[PeerId, Call] = {}
        """Calls on a commit that is about to be applied here."""
        self._entered: dict[bytes, None] = {}
        """Calls entered on this base: none is entered twice, or one roster could be signed twice."""

    def called(self, peer: PeerId, call: Call) -> None:
        """A call has come: answer it, or note that it is to be entered."""
        if self._island is None or self._core.stopping or self._heads.owes():
            return
        answer = self._answer_to(peer, call)
        if answer is Answer.WAIT:
            self._heads.learn(peer, call.base)
            self._parked[peer] = call
            asyncio.get_running_loop().call_later(self._silence / 2, self._unpark, peer, call)
            return
        if answer is not Answer.ENTER:
            if (
                answer is Answer.BUSY
                and (flight := self._flights.at(place(call.base, call.fragment, self._layout))) is not None
            ):
                self._messenger.post(peer, Busy(call.call, PeerId(flight.round.seal.coordinator)))
                return
            self._heads.learn(peer, call.base)
            self._messenger.post(peer, Refuse(call.call, self._core.head))
            return
        self._succession.callers[peer] = None
        invitation = Invitation(peer, call)
        if call.call in self._entered:
            return
        if peer in self._succession.sealless:
            self._messenger.post(peer, Refuse(call.call, self._core.head))
            return
        if self._engagement.whose is not None:
            mine = self._engagement.whose == self._me and self._engagement.calling is not None
            if mine and self._succession.earlier(peer, self._me):
                # The other call is the rightful one: give up the own, and enter.
                self._invite(invitation)
                assert self._engagement.calling is not None
                self._engagement.calling.busy[peer] = peer
                self._engagement.calling.changed.set()
            else:
                self._messenger.post(peer, Busy(call.call, self._engagement.whose))
            return
        self._invite(invitation)
        self._wake.set()

    def _unpark(self, peer: PeerId, call: Call) -> None:
        """The commit that a call stands on has not come here."""
        if self._parked.get(peer) is call:
            del self._parked[peer]
            self._messenger.post(peer, Refuse(call.call, self._core.head))

    def _answer_to(self, peer: PeerId, call: Call) -> Answer:
        """What to make of a call. Raises :class:`PeerMisbehaved` for one that nobody may make on that base."""
        if not call.base.round < call.round <= call.base.round + MAX_ROUND_GAP:
            return Answer.REFUSE
        if not self._flights.knows(call.base, self._core.head):
            return self._flights.answer(call.base, 0, self._core.head)
        due, most = self._layout.due(call.base.outer_step), reach(call.base.outer_step, self._manifest)
        if call.fragment >= self._layout.fragments or (call.fragment - due) % self._layout.fragments >= most:
            raise PeerMisbehaved(f"a call for fragment {call.fragment} where {due} is due", peer)
        if not self._flights.several:
            return Answer.ENTER
        return self._flights.answer(call.base, call.fragment, self._core.head)

    def _invite(self, invitation: Invitation) -> None:
        """Of two calls the earlier candidate's is entered, and of one candidate's the last; the other is told."""
        held = self._engagement.invitation
        self._engagement.invite(invitation)
        if held is None or held.coordinator == invitation.coordinator:
            return
        if not self._succession.earlier(invitation.coordinator, held.coordinator):
            self._engagement.invite(held)
            held, invitation = invitation, held
        self._messenger.post(held.coordinator, Busy(held.call.call, invitation.coordinator))

    async def take_part(self, invitation: Invitation) -> None:
        """Enter another's call, wait for its seal, and take part."""
        coordinator, call = invitation.coordinator, invitation.call
        if self._answer_to(coordinator, call) is not Answer.ENTER:
            return  # it has become a matter of the past
        self._succession.pass_over(coordinator)
        self._engagement.enter(coordinator, call)
        self._entered[call.call] = None
        if len(self._entered) > CALLS and self._flights.several:
            del self._entered[next(iter(self._entered))]
        entered: tuple[Member, Snapshot] | None = None
        try:
            entered = await self._training.enter(call)
            self._messenger.post(coordinator, Enter(call.call, entered[0], self._flights.seen()))
            sealed = await self._await_seal(coordinator)
            if sealed is not None:
                mine = next((m for m in sealed.seal.members if m.peer == self._me), None)
                if mine != entered[0] or sealed.seal.base != call.base:
                    self._refuse(coordinator, "it sealed a roster that does not say what this peer entered with")
                else:
                    snapshot, entered = entered[1], None
                    await self._rounds.run(sealed, snapshot)
        except ResourceError as error:
            await self._timing.stand_back(error)
            self._messenger.post(coordinator, Refuse(call.call, self._core.head))
        finally:
            self._engagement.wait_no_more()
            if entered is not None:
                await self._training.withdraw(call)
            self._engagement.be_free()

    async def _await_seal(self, coordinator: PeerId) -> Sealed | None:
        """The seal; None when the coordinator gave up, fell silent, or takes too long."""
        assert self._engagement.sealed is not None
        entered = self._transport.now()
        while not self._engagement.sealed.done():
            waited = self._transport.now() - entered
            silent = self._messenger.silent_for(coordinator, entered)
            if silent > self._silence or waited > 4 * self._silence:
                if silent <= self._silence:
                    self._succession.sealless.add(coordinator)
                self._succession.void(coordinator)
                self._events("void", round=self._core.last_round + 1, roster="", reason="no seal came")
                return None
            if not self._flights.several:
                await asyncio.wait([self._engagement.sealed], timeout=self._silence / 5)
                continue
            self._wake.clear()
            await self._rounds.land_beside()
            if not self._engagement.sealed.done():
                await self._wake.wait(self._silence / 5)
        return self._engagement.sealed.result()

    def new_head(self) -> None:
        """What was called for on the base before is void."""
        if not self._flights.several:
            self._entered.clear()
            self._engagement.take_invitation()

    def unpark(self) -> None:
        """Look again at the calls that have waited for a commit."""
        for peer in list(self._parked):
            try:
                self.called(peer, self._parked.pop(peer))
            except PeerMisbehaved as error:
                self._refuse(peer, str(error))

    def forget(self, peer: PeerId) -> None:
        self._parked.pop(peer, None)
