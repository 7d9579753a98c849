"""Which heads others have, and which of them are worth going after."""

from __future__ import annotations

import asyncio

from .core import Core
from .fetch import Plan
from .messages import GENESIS, Head, better
from .putoff import PutOff
from .records import Record
from .transport import PeerId


class Heads:
    """What others say that their heads are, and what this peer makes of it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._transport = core.transport
        self._store = core.store
        self._guide = core.guide
        self._flights = core.flights
        self._silence = core.silence
        self._wake = core.agenda.wake
        self._reached = core.agenda.reached
        self.claimed: dict[PeerId, Head] = {}
        """What each peer last said."""
        self.ahead: dict[PeerId, Head] = {}
        """Those of them that are worth a look: better than the own head, or with the organiser's anchor behind them."""
        self.doubts = PutOff(core.transport.now, core.silence, 60 * core.silence)
        """Who claimed a head that could not be had."""
        self._mute: dict[PeerId, bool] = {}
        """Those of them that gave no answer at all, which says nothing against what they claim, and whether they have
        been given another chance since they last gave one."""
        self.owed = GENESIS
        """The best head that this peer ever had; below it, it takes part in nothing."""
        self.better_since: float | None = None
        """When a better head than the own was first known."""
        self.looking: asyncio.Task[None] | None = None
        """What looks into them."""
        self.plan: Plan | None = None
        """A verified way to a better head."""

    def look_again(self) -> None:
        """The own head or the organiser's anchor is another: which of the others' heads are worth a look?"""
        if self._core.replica is None:
            return
        self.ahead = {
            peer: head for peer, head in self.claimed.items()
            if self._guide.worth(peer, head, self._core.head) and peer not in self.doubts
        }  # fmt: skip
        self._guide.say(self._core.head)
        self._wake.set()

    def is_here(self, peer: PeerId) -> bool:
        """Whether a peer was last heard to be at this head, or about to be."""
        head = self.claimed.get(peer)
        return head is not None and self._flights.knows(head, self._core.head)

    def told(self, peer: PeerId, record: Record) -> None:
        """A record names a head; records are old news, so what the peer said itself since then stands. What it says of
        the anchor nothing else says."""
        self._guide.told(peer, record.anchor, record.anchored)
        known = self.claimed.get(peer)
        if known is None or better(record.head, known):
            known = record.head
        elif not record.anchored:
            return
        self.learn(peer, known)

    def learn(self, peer: PeerId, head: Head) -> None:
        """A peer says what its head is."""
        own = self._core.head
        if self.claimed.get(peer) == own != head:
            self._wake.set()  # it may have stood before this peer
        self.claimed[peer] = head
        if peer in self.doubts:
            return
        if self._guide.worth(peer, head, own):
            self.ahead[peer] = head
            self._wake.set()
        else:
            self.ahead.pop(peer, None)

    def must_catch_up(self) -> bool:
        """Whether a better head has been known for so long that its commit will not come by itself any more."""
        if not self.ahead:
            self.better_since = None
            return False
        now = self._transport.now()
        self.better_since = self.better_since or now
        # The next commit may be one that a round in flight here is about to bring.
        coming = self._flights.at(self._core.head.outer_step) is not None
        return self._reached(self.better_since + (2 * self._silence if coming else self._silence / 5))

    def disbelieve(self, peer: PeerId, *, mute: bool = False) -> None:
        """What that peer said is not what it gives; it is asked again after a while, each time a longer one.

        mute: it gave no answer, nor was it heard lately. Then it is asked again as soon as it says something itself:
        behind NAT, it may be that only now there is a way to it.
        """
        self.claimed.pop(peer, None)
        self.ahead.pop(peer, None)
        self.doubts.add(peer)
        if not mute:
            self._mute.pop(peer, None)
        elif peer in self._core.directory.known:
            self._mute.setdefault(peer, False)

    def spoke(self, peer: PeerId) -> None:
        """A peer has sent a message of its own. Who stays mute all the same gets no third chance before its time."""
        if self._mute.get(peer) is False:
            self._mute[peer] = True
            self.doubts.lift(peer)

    def answered(self, peer: PeerId) -> None:
        """A peer that was asked has said what head it has."""
        self._mute.pop(peer, None)

    def owes(self) -> bool:
        """Whether this peer has had a better head than its own is now."""
        return self.owed != GENESIS and self._store.prefers(self.owed, self._core.head)

    def owe(self, head: Head) -> None:
        """This peer has had that head, and its state is lost here."""
        self.owed = head

    def look(self, task: asyncio.Task[None]) -> None:
        """A task has begun to look into the better heads."""
        self.looking = task

    def looked(self) -> None:
        """It is done."""
        self.looking = None

    def show(self, plan: Plan | None) -> None:
        """A way was found, or none."""
        self.plan = plan

    def set_out(self) -> None:
        """The way that was found is taken now."""
        self.better_since = self.plan = None

    def new_head(self) -> None:
        """The own head is another."""
        self.better_since = None

    def forget(self, peer: PeerId) -> None:
        for table in (self.claimed, self.ahead, self._mute):
            table.pop(peer, None)
        self.doubts.discard(peer)
