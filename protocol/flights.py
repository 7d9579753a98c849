"""The rounds that one peer has in flight, each of another fragment: which places of the chain they are for, what was
brought into them, and how far training may run ahead of them.

Nothing here waits or sends. Where the overlap is no longer than it is from one round to the next there is one round at
a time, and its place is always that of the head.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import msgspec
import numpy as np
from numpy.typing import NDArray

from .control import Ballot, Report
from .encoder import Encoded
from .errors import RoundVoid
from .island import Snapshot
from .layout import ChunkLayout
from .manifest import Manifest
from .messages import Body, Commit, Head, better
from .overlap import left
from .places import place, reach
from .round import Round
from .transport import PeerId

CALLS = 64
"""Calls that are remembered as entered, where rounds are in flight beside one another."""


class Brought:
    """What a peer was frozen with for a roster.

    of: the island's counters at the freeze. total: these as they count for the fragment
    (:meth:`.fragments.Accounts.total`).
    """

    def __init__(self, of: Snapshot, total: tuple[int, int, int]) -> None:
        self._of = of
        self._counts = (of.steps, of.tokens, of.units)
        self.total = total

    @property
    def steps(self) -> int:
        """Inner steps at the freeze, on the island's counters as they run now: below 0 when a later freeze has been
        averaged since."""
        return self._counts[0]

    @property
    def of(self) -> Snapshot:
        """The counters at the freeze, on the island's as they run now."""
        steps, tokens, units = (max(count, 0) for count in self._counts)
        return Snapshot(steps, tokens, units, self._of.leased, self._of.stopped)

    def lower(self, counted: Snapshot, share: float, of: Snapshot | None) -> None:
        """Another commit has taken a share out of the island's counters, which were ``counted``."""
        now = (counted.steps, counted.tokens, counted.units)
        since = (of.steps, of.tokens, of.units) if of is not None else (None, None, None)
        gone = [count - left(count, share, before) for count, before in zip(now, since, strict=True)]
        steps, tokens, units = (count - less for count, less in zip(self._counts, gone, strict=True))
        self._counts = (steps, tokens, units)


@dataclass(eq=False)
class Flight:
    """A round from its seal until it is applied, or void."""

    round: Round
    brought: Brought
    started: float
    ahead: bool
    """Whether what was frozen for it is a copy, from which training goes on."""
    paused: bool
    """Whether training stands still for it."""
    landing: bool = False
    """Whether it is being applied, or undone."""
    grounded: bool = False
    """What was frozen for it is no longer in the local parameters: these began anew since."""
    commit: Commit | None = None
    void: RoundVoid | None = None
    task: asyncio.Task[None] | None = None

    @property
    def place(self) -> int:
        return self.round.place

    def end(self, reason: str) -> None:
        """Make it void, unless its outcome is known."""
        if not self.round.outcome.done():
            self.round.outcome.set_exception(RoundVoid(reason))


@dataclass(eq=False)
class Entering:
    """What a peer has frozen for a call that is not sealed yet."""

    brought: Brought
    ahead: bool
    paused: bool
    grounded: bool = False


@dataclass(eq=False)
class Limbo:
    """A void roster of this base that may still turn out committed: then what was frozen for it has been averaged."""

    round: Round
    theta: NDArray[np.float32] | Encoded | None
    brought: Brought


class Answer(Enum):
    """What to make of a call."""

    ENTER = "enter"
    WAIT = "wait"
    """It stands on a commit that is about to be applied here."""
    BUSY = "busy"
    """That place is taken by a round in flight."""
    REFUSE = "refuse"


class Flights:
    """The rounds in flight of one peer, in the order in which they were sealed; and those that ended void, but may
    still turn out committed."""

    def __init__(self, manifest: Manifest, layout: ChunkLayout) -> None:
        self._manifest = manifest
        self._layout = layout
        self._all: list[Flight] = []
        self.width = manifest.round.in_flight
        """Rounds that may be in flight at once."""
        self._behind: deque[Head] = deque(maxlen=self.width)
        """The last heads that this peer has had, the present one included: calls on them still count."""
        self.entering: Entering | None = None
        self.limbo: list[Limbo] = []
        self._carried = (0, 0)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def several(self) -> bool:
        """Whether rounds may be in flight beside one another."""
        return self.width > 1

    @property
    def busy(self) -> bool:
        """Whether a round wants this peer's link."""
        return any(not self.several or flight.round.reducing for flight in self._all)

    def add(self, flight: Flight) -> None:
        self._all.append(flight)

    def remove(self, flight: Flight) -> None:
        if flight in self._all:
            self._all.remove(flight)
            sent, received = flight.round.carried
            self._carried = (self._carried[0] + sent, self._carried[1] + received)

    def carried(self) -> tuple[int, int]:
        """Bytes sent and received by all rounds so far."""
        counts = [self._carried, *(flight.round.carried for flight in self._all)]
        return sum(sent for sent, _ in counts), sum(received for _, received in counts)

    def has(self, peer: PeerId) -> bool:
        """Whether a round is in flight that this peer and that one are in."""
        return any(peer in flight.round.peers for flight in self._all)

    def of(self, roster_id: bytes) -> Flight | None:
        """The flight of a roster."""
        return next((flight for flight in self._all if flight.round.roster_id == roster_id), None)

    def at(self, place: int) -> Flight | None:
        """The flight for a place in the chain."""
        return next((flight for flight in self._all if flight.place == place), None)

    def next(self, head: Head) -> int | None:
        """The place of the next round to be called; None while as many are in flight as may be."""
        if not self.several:
            return head.outer_step
        places = range(head.outer_step, head.outer_step + reach(head.outer_step, self._manifest))
        taken = {flight.place for flight in self._all}
        return next((at for at in places if at not in taken), None)

    def landing(self, head: Head) -> Flight | None:
        """A flight that is over here: void, or with a commit on this head."""
        return next(
            (f for f in self._all if f.void is not None or (f.commit is not None and f.commit.body.parent == head.id)),
            None,
        )

    def lost(self, head: Head) -> list[Flight]:
        """Flights whose place in the chain is another commit's."""
        return [flight for flight in self._all if flight.place < head.outer_step]

    def until(self) -> int | None:
        """The number of steps, on the island's counters, at which training has to wait for a round in flight."""
        marks = [f.brought.steps for f in self._all if f.ahead and not (f.grounded or f.landing)]
        if self.entering is not None and self.entering.ahead and not self.entering.grounded:
            marks.append(self.entering.brought.steps)
        return min(marks) + self._manifest.round.overlap if marks else None

    def lower(self, counted: Snapshot, share: float, of: Snapshot | None) -> None:
        """A share has been taken out of the island's counters, see :meth:`Brought.lower`."""
        for flight in self._all:
            flight.brought.lower(counted, share, of)
        if self.entering is not None:
            self.entering.brought.lower(counted, share, of)
        for limbo in self.limbo:
            limbo.brought.lower(counted, share, of)

    def ground(self) -> None:
        """The local parameters begin anew: what was frozen is no longer in them, and cannot leave them."""
        for limbo in self.limbo:
            limbo.theta = None
        for flight in self._all:
            flight.grounded = True
        if self.entering is not None:
            self.entering.grounded = True

    def wanted(self) -> int:
        """Sample units that rounds in flight will bring, if they are committed."""
        most, rounds = self._manifest.round.max_lease, (flight.round for flight in self._all)
        return sum(min(current.seal.members[current.me].want, most) for current in rounds)

    def read(self, peer: PeerId, report: Report) -> Report:
        """A report as it is meant: that its sender is ready, where it does not know yet of a round that it is in, is
        said of that round and not of the next."""
        for flight in self._all if self.several else ():
            if report.ready and peer in flight.round.peers and report.round < flight.round.seal.round:
                eta = self._manifest.round.inner_steps / self._layout.fragments * report.step_time
                return msgspec.structs.replace(report, ready=False, eta=eta)
        return report

    def patience(self, at: int, silence: float) -> float:
        """Until when a round has to last that is sealed now for the place ``at``: it can be signed when those before it
        are over, each at the latest when its own D is, and each place in between takes a moment. Those ends may be put
        off themselves, but that is no reason to put off this one: where rounds follow one another without a pause, ends
        that are counted from ends would move away for ever."""
        return max(
            (
                flight.round.started + flight.round.seal.deadline
                + 2 * silence * min(at - flight.place, self.width - 1)
                for flight in self._all
                if flight.place < at
            ),
            default=float("-inf"),
        )  # fmt: skip

    def ahead(self, body: Body, head: Head) -> bool:
        """Whether a commit, by its body, is one of a round that may be in flight beside that for the head's place:
        higher than the next one, and not so high that what lies between has to be caught up with."""
        return self.several and head.height + 1 < body.height <= head.height + self.width

    # --- void, or not

    def limbo_of(self, roster_id: bytes) -> Limbo | None:
        """What is kept of a void roster."""
        return next((limbo for limbo in self.limbo if limbo.round.roster_id == roster_id), None)

    def seen(self) -> list[Ballot]:
        """What was signed for void rosters, to be shown to others."""
        return [ballot for limbo in self.limbo for ballot in limbo.round.ballots()][:8]

    def recent(self, digest: bytes) -> bytes | None:
        """An averaged chunk that is not in the log yet: of a round in progress, or of a void one."""
        for current in [*(flight.round for flight in self._all), *(limbo.round for limbo in self.limbo)]:
            if digest in current.held:
                return current.held[digest]
        return None

    # --- the chain

    def new_head(self, head: Head) -> None:
        """The head has changed: void rosters of this base and before are over; what was for a later place may still
        come."""
        later = head.outer_step if self.several else float("inf")
        self.limbo = [limbo for limbo in self.limbo if limbo.round.place >= later]

    # --- calls

    def pass_head(self, head: Head) -> None:
        """This peer has applied one more commit."""
        self._behind.append(head)

    def leave(self, head: Head) -> None:
        """This peer is on another chain."""
        self._behind.clear()
        self._behind.append(head)

    def knows(self, base: Head, head: Head) -> bool:
        """Whether a base is the head, or one that it was lately."""
        return base == head or (self.several and base in self._behind)

    def answer(self, base: Head, fragment: int, head: Head) -> Answer:
        """What to make of a call for a fragment that the manifest has, on that base."""
        if not self.knows(base, head):
            return Answer.WAIT if self.several and better(base, head) else Answer.REFUSE
        at = place(base, fragment, self._layout)
        if at < head.outer_step:
            return Answer.REFUSE
        return Answer.BUSY if self.at(at) is not None else Answer.ENTER
