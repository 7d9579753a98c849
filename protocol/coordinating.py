"""The coordinator: calls, collects who enters, and seals the roster (design: "One round", 2)."""

from __future__ import annotations

import asyncio

from .calling import Calling, make_seal, unite
from .control import Busy, Call, Enter, Heard, Refuse, Release, Sealed
from .core import Core
from .engagement import Engagement
from .errors import ResourceError
from .heads import Heads
from .incoming import Incoming
from .island import Snapshot
from .messages import Member, hash_of, seal_bytes
from .reports import Reports
from .rounds import Rounds
from .succession import Succession
from .timing import Due, Timing
from .training import Training
from .transport import PeerId


class Coordinating:
    """This peer's own calls."""

    def __init__(
        self,
        core: Core,
        heads: Heads,
        succession: Succession,
        reports: Reports,
        timing: Timing,
        training: Training,
        engagement: Engagement,
        incoming: Incoming,
        rounds: Rounds,
    ) -> None:
        self._core = core
        self._heads = heads
        self._succession = succession
        self._reports = reports
        self._timing = timing
        self._training = training
        self._engagement = engagement
        self._incoming = incoming
        self._rounds = rounds
        self._transport = core.transport
        self._me = core.me
        self._signer = core.signer
        self._manifest = core.manifest
        self._layout = core.layout
        self._messenger = core.messenger
        self._directory = core.directory
        self._flights = core.flights
        self._silence = core.silence
        self._refuse = core.refuse
        self._taken_back = b""
        """The last call of this peer that its island could not follow."""

    def answered(self, peer: PeerId, message: Enter | Busy | Refuse) -> None:
        """A peer has answered a call, this one or an earlier one."""
        calling = self._engagement.calling
        self._timing.deaf.discard(peer)
        if calling is None or calling.nonce != message.call:
            if isinstance(message, Enter):
                if message.call == self._taken_back:
                    self._messenger.post(peer, Refuse(message.call, self._core.head))
                self._messenger.post(peer, Release(message.call))
            return
        match message:
            case Enter():
                most = 0 if calling.leases else self._manifest.round.weight_cap
                if message.member.peer != peer or message.member.weight > most:
                    self._refuse(peer, f"it enters with weight {message.member.weight}, allowed are {most}")
                    self._messenger.post(peer, Release(message.call))
                    calling.answer(peer)
                else:
                    calling.enter(peer, message)
            case Busy():
                calling.busy[peer] = PeerId(message.coordinator)
                calling.changed.set()
            case Refuse():
                self._heads.learn(peer, message.head)
                calling.answer(peer)

    async def call(self, due: Due) -> None:
        """Call, collect, seal, and take part."""
        rules, now = self._manifest.round, self._transport.now()
        self._succession.pass_over(self._me)
        live = self._reports.live()
        live.pop(self._me, None)
        chosen = sorted(live, key=lambda peer: -live[peer].tokens)
        if due is Due.LEASES:
            chosen.sort(key=lambda peer: live[peer].leased > 0)
            for peer, report in [*live.items(), (self._me, self._reports.own())]:
                if not report.leased:
                    self._timing.called_for(peer, now)
        chosen = chosen[: rules.max_group - 1]
        spare = [p for p in self._directory.candidates() if p not in live and not self._messenger.failing(p)]
        leases = due is Due.LEASES
        awaited = {peer for peer in chosen if peer not in self._timing.deaf}
        fragment = self._layout.due(self._core.head.outer_step) if leases else self._core.fragment
        nonce, head = self._transport.nonce(), self._core.head
        calling = Calling(nonce, self._core.last_round + 1, head, awaited, leases, fragment=fragment)
        self._engagement.begin_call(calling)
        call = Call(nonce, calling.round, fragment, head, leases)
        called = [*chosen, *spare[: rules.max_group - 1 - len(chosen)]]
        self._messenger.post_all(called, call)
        own: tuple[Member, Snapshot] | None = None
        self._timing.rest(now)
        speaking = asyncio.get_running_loop().create_task(self._speak(calling))
        try:
            own = await self._training.enter(call)
            # A step may take longer than T on a large island, and a peer answers a call after its step.
            slowest = max((report.step_time for report in live.values()), default=0.0)
            window = now + min(self._silence + 2 * slowest, 2 * self._silence)
            if call.leases:
                window = now + self._silence / 2
            while not calling.complete() and self._transport.now() < window and not self._core.stopping:
                calling.changed.clear()
                await self._rounds.land_beside()
                others = calling.busy.values()
                if self._incoming.overtakes(call.base, call.fragment) or any(
                    self._succession.earlier(other, self._me) for other in others
                ):
                    break
                for peer in calling.expected - calling.answered:
                    # Silence counts from the last word, which may have come before the call.
                    dead = self._messenger.silent_for(peer, float("-inf")) > self._silence
                    if dead or self._messenger.failing(peer):
                        calling.answer(peer)
                try:
                    async with asyncio.timeout(self._silence / 10):
                        await calling.changed.wait()
                except TimeoutError:
                    self._messenger.post_all(list(calling.busy), call)
            else:
                for peer in calling.expected - calling.answered - calling.busy.keys():
                    # It speaks and does not answer: it is called all the same, and waited for again after a while. Who
                    # fell silent meanwhile may be frozen, or cut off; that is no reason to do without it afterwards.
                    if self._messenger.heard(peer) > (now + window) / 2:
                        self._timing.deaf.add(peer)
            self._engagement.end_call()
            if any(self._succession.earlier(other, self._me) for other in calling.busy.values()):
                return
            if any(self._incoming.merge(ballot) for ballot in unite([*self._flights.seen(), *calling.seen])):
                return
            if (
                len(calling.entered) + 1 < rules.quorum
                or self._incoming.overtakes(call.base, call.fragment)
                or self._core.stopping
            ):
                self._succession.void(self._me)
                return
            seal = make_seal(
                calling, own[0], coordinator=self._me, manifest=self._manifest, layout=self._layout,
                unfit=self._rounds.unfit(), leases=leases, rank=self._core.replica.rank,
            )  # fmt: skip
            sealed = Sealed(seal, self._signer.sign(seal_bytes(hash_of(seal))))
            inside = [PeerId(member.peer) for member in seal.members]
            self._messenger.post_all(inside, sealed)
            for peer in calling.entered:
                if peer not in inside:
                    self._messenger.post(peer, Release(calling.nonce))
            calling.entered.clear()
            speaking.cancel()
            snapshot = own[1]
            own = None
            await self._rounds.run(sealed, snapshot)
        except ResourceError as error:
            # Else the others would go on waiting for this peer, which lives and stands first.
            self._taken_back = calling.nonce
            self._messenger.post_all(calling.entered, Refuse(calling.nonce, self._core.head))
            await self._timing.stand_back(error)
        finally:
            speaking.cancel()
            self._engagement.end_call()
            self._messenger.post_all(calling.entered, Release(calling.nonce))
            if own is not None:
                await self._training.withdraw(call)
            self._engagement.be_free()

    async def _speak(self, calling: Calling) -> None:
        """Until the seal, those who have entered wait for a sign of life; their reports, which are answered, may go to
        others, and a step of this peer's own, or a late member, may take longer than T."""
        while True:
            await asyncio.sleep(self._silence / 3)
            self._messenger.post_all(calling.entered, Heard(self._core.head, self._core.last_round))
