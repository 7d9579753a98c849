"""When to call: whether a round is due, for whom to wait, and whose turn it is."""

from __future__ import annotations

from enum import Enum

from .control import Report
from .core import Core
from .directory import PUBLISH_EVERY, READ_EVERY
from .errors import ResourceError
from .heads import Heads
from .messages import GENESIS, MAX_ROUND_GAP
from .putoff import PutOff
from .reports import Reports
from .succession import Succession
from .training import Training
from .transport import PeerId

ALONE = 3
"""Silences for which a peer that hears nobody makes no commit alone."""
LOOKING = 7
"""The same while others claim a better head that it has found no reason to doubt: as long as a commit may take after a
fault. A claim must not keep it from going on for ever."""
MEETING = PUBLISH_EVERY + 2 * READ_EVERY[1]
"""Seconds more for which a peer that has no state begins no run while others say that there is one: until those that it
cannot dial, behind NAT, have read of it and dialled it."""


class Due(Enum):
    """What a coordinator calls its candidates for."""

    ROUND = "round"
    LEASES = "leases"


class Timing:
    """Decides, from what all report, whether this peer is to call now."""

    def __init__(self, core: Core, heads: Heads, succession: Succession, reports: Reports, training: Training) -> None:
        self._core = core
        self._heads = heads
        self._succession = succession
        self._reports = reports
        self._training = training
        self._transport = core.transport
        self._me = core.me
        self._rules = core.manifest.round
        self._schedule = core.manifest.schedule
        self._layout = core.layout
        self._by_tokens = self._rules.by == "tokens"
        self._messenger = core.messenger
        self._directory = core.directory
        self._flights = core.flights
        self._events = core.events
        self._silence = core.silence
        self._wake = core.agenda.wake
        self._reached = core.agenda.reached
        self.quorum_since: float | None = None
        """Since when a quorum has been ready on this base."""
        self.alone_since = core.transport.now()
        """Since when nobody else has been live here."""
        self._elsewhere_since: float | None = None
        """Since when others, and not this peer, have been known to have a head."""
        self.rests_until = float("-inf")
        """A call that came to nothing is not repeated at once: neither the others nor the log must drown in calls."""
        self.deaf = PutOff(core.transport.now, 8 * core.silence, 64 * core.silence)
        """Who did not answer a call of this peer: it is not waited for."""
        self._fruitless = 0
        """Own calls on this base that came to nothing."""
        self._patience: dict[PeerId, tuple[int, float]] = {}
        """Calls for leases on behalf of a peer since it last contributed, and when the next may be."""

    def note_readiness(self, report: Report) -> None:
        """A report, the own or another's, may mean that a call is due."""
        # Once a quorum is ready, what the others still need decides about grace.
        waiting = self.quorum_since is not None or report.ready or not (report.leased or report.tokens)
        if (waiting or self._by_tokens) and report.head == self._core.head:
            self._wake.set()

    def _leads(self, live: dict[PeerId, Report]) -> bool:
        """Whether every candidate ahead of this peer is silent, or elsewhere, for long enough."""
        now = self._transport.now()
        for peer in self._succession.ordered():
            if peer == self._me:
                return True
            if peer in self._heads.doubts:
                continue  # it says that it is elsewhere, and that could not be verified
            known = self._directory.known.get(peer)
            since = max(self._core.base_since, known.since if known is not None else 0.0, self._messenger.epoch)
            here = self._heads.is_here(peer) and not self._reached(self._reports.gone_at(peer, since))
            if here or not (self._messenger.failing(peer) or self._reached(since + self._silence)):
                # The order must exclude nobody: if who is ahead does not call in all that time, this peer does.
                ready = self.quorum_since if self.quorum_since is not None else now
                return self._reached(ready + 3 * self._silence + self._grace(live))
        return True

    def _grace(self, live: dict[PeerId, Report]) -> float:
        """Seconds for which a coordinator waits for the late: a share of what the inner steps take."""
        times = sorted([report.step_time for report in live.values() if report.step_time > 0])
        if not times:
            return 0.0
        # The lower median, and at most a few times the own pace: nobody stretches it by what it says of itself.
        own = live[self._me].step_time
        pace = times[(len(times) - 1) // 2]
        steps = self._training.accounts.inner_steps / self._layout.fragments
        return self._rules.grace * steps * (min(pace, 4 * own) if own else pace)

    def due(self) -> Due | None:
        """What this peer is to call now, if anything."""
        head, flights = self._core.head, self._flights
        gap = self._core.last_round - head.round
        if flights and (flights.next(head) is None or gap >= MAX_ROUND_GAP // 2):
            return None  # until some have landed
        live = self._reports.live()
        due = self._of_all(live)
        return due if due is not None and self._leads(live) else None

    def _of_all(self, everyone: dict[PeerId, Report]) -> Due | None:
        """What is to be called now, by whoever leads: a round when a quorum of the live is ready and grace is over;
        leases alone when somebody has no samples and the next round is not near."""
        rules, now = self._rules, self._transport.now()
        head, flights = self._core.head, self._flights
        if head != GENESIS or not self._directory.runs():
            self._elsewhere_since = None
        else:
            self._elsewhere_since = now if self._elsewhere_since is None else self._elsewhere_since
            if not self._reached(self._elsewhere_since + LOOKING * self._silence + MEETING):
                return None  # the run goes on elsewhere; to begin it again would be a fork from its start
        # Who does not answer calls makes no quorum, whatever it reports.
        live = everyone
        if deaf := self.deaf.members():
            live = {peer: report for peer, report in everyone.items() if peer not in deaf}
        if len(live) > 1:
            self.in_company()
        else:
            # Where others say that they are elsewhere, the way to them comes first: alone it would only make a fork.
            patience = LOOKING if self._heads.ahead or self._heads.looking is not None else ALONE
            if not self._reached(self.alone_since + patience * self._silence):
                return None
        if len(live) < rules.quorum:
            self.quorum_since = None
            return None
        trainers = [report for report in live.values() if report.leased or report.tokens]
        wait, elapsed = 0.0, self._core.elapsed()
        if trainers:
            wait = self._schedule.wait(trainers, outer_step=head.outer_step, elapsed=elapsed)
        if wait > 0:
            self.quorum_since = None
            if rules.by != "steps":  # of steps it is told
                self._reached(now + max(wait, self._silence / 50))
            without = [
                peer for peer, report in live.items()
                if not report.leased and self._reached(self._patience.get(peer, (0, now))[1])
            ]  # fmt: skip
            # It costs next to nothing, but whoever says that it has no samples must not cause one after another.
            near = wait <= 2 * self._silence or not self._reached(self._core.base_since + self._silence / 2)
            near = near or len(flights) > 0
            return Due.LEASES if without and not near else None
        if self.quorum_since is None:
            self.quorum_since = now
        if not trainers and flights:
            return None
        if not trainers:
            # Nobody has samples yet. Give those who are just starting a moment.
            return Due.ROUND if self._reached(self.quorum_since + self._silence / 5) else None
        over = self.quorum_since + self._grace(everyone)
        late = [
            peer for peer, report in live.items()
            if (report.leased or report.tokens) and not report.ready and (report.eta or over - now) <= over - now
        ]  # fmt: skip
        for peer in late:
            if peer in self._reports.heard:  # the own is never late by silence
                self._reached(self._reports.gone_at(peer, self._reports.heard[peer][1]))
        return Due.ROUND if self._reached(over) or not late else None

    async def stand_back(self, error: ResourceError) -> None:
        """The island is gone or hangs: let others lead while it comes back."""
        self._events("warning", message=f"the island did not freeze: {error}")
        self._succession.void(self._me)
        self.rests_until = self._transport.now() + self._silence
        await self._training.thaw(self._core.fragment)  # the wish is kept, and is the next child's

    def rest(self, now: float) -> None:
        """This peer calls: the next call, should this one come to nothing, is not to follow at once."""
        # A random part breaks ties between two that give way to each other.
        # Each fruitless call makes it rest longer: where views differ, many may call at once, again and again.
        rest = self._silence * 2 ** min(self._fruitless, 5)
        self.rests_until = now + rest * (0.1 + 0.1 * self._transport.random.random())
        self._fruitless += 1

    def call_at_once(self) -> None:
        """What was called for has come about: the next call need not wait."""
        self.rests_until = float("-inf")

    def in_company(self) -> None:
        """Others are here now."""
        self.alone_since = self._transport.now()

    def called_for(self, peer: PeerId, now: float) -> None:
        """Leases are called for on behalf of a peer that has none."""
        count = self._patience.get(peer, (0, 0.0))[0] + 1
        self._patience[peer] = (count, now + self._silence * 2 ** min(count, 10))

    def contributed(self, peer: PeerId) -> None:
        """A peer has brought something to a commit."""
        self._patience.pop(peer, None)

    def next_place(self) -> None:
        """The next round is for another place in the chain."""
        self.quorum_since = None
        self._fruitless = 0

    def forget(self, peer: PeerId) -> None:
        self._patience.pop(peer, None)
        self.deaf.discard(peer)
