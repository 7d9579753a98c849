"""Reporting: telling those who may lead how far this peer is."""

from __future__ import annotations

from .control import Report
from .core import Core
from .heads import Heads
from .messages import Head
from .reports import Reports
from .store import LOST
from .succession import Succession
from .timing import Timing
from .wakeup import Wakeup

REPORT_EVERY = 2.0
"""Seconds between two reports to the first candidates."""
PATIENCE = 12
"""Silences for which a peer looks for the state that its disk has lost before it says what may be done; times four each
time that it says so again."""


class Reporting:
    """Sends this peer's reports."""

    def __init__(self, core: Core, heads: Heads, reports: Reports, succession: Succession, timing: Timing) -> None:
        self._core = core
        self._heads = heads
        self._reports = reports
        self._succession = succession
        self._timing = timing
        self._transport = core.transport
        self._me = core.me
        self._manifest = core.manifest
        self._island = core.island
        self._messenger = core.messenger
        self._flights = core.flights
        self._events = core.events
        self._silence = core.silence
        self.soon = Wakeup()
        """To be set when something has changed that others should know."""
        self._lacking: float | None = None
        """Since when the state is missing that the disk has lost; None while it is not."""
        self._patience = PATIENCE * core.silence

    async def run(self) -> None:
        """Tell the first candidate how far this peer is, every two seconds and whenever it matters; the next two, who
        only have to know who lives when the first dies, every second time."""
        if self._island is None:
            return
        told: tuple[Head, bool, int | None] | None = None
        told_at, beat = float("-inf"), 0
        every = min(REPORT_EVERY, self._silence / 2.5)
        while True:
            self.soon.clear()
            report = self._reports.own()
            now = self._transport.now()
            self._succession.ready_since = (self._succession.ready_since or now) if report.ready else None
            self._timing.note_readiness(report)
            self._say_what_is_lacking(now)
            self._say_whether_it_trains(report)
            saying = report.head, report.ready, self._flights.next(self._core.head)
            news = saying != told
            if news or now >= told_at + every:
                ordered = self._succession.ordered()
                beat = 0 if news else beat + 1
                # Whoever has waited long tells everyone: views of the order may differ.
                patient = self._core.finished or self._succession.waited_long()
                count = len(ordered) if patient else 1 if beat % 2 else 3
                others = [peer for peer in ordered[: count + 1] if peer != self._me]
                self._messenger.post_all(others[:count], report)
                told, told_at = saying, now
            # Wake when the next report is due, or when this peer will be ready, whichever is first.
            pause = max(told_at + every - self._transport.now(), 0.01)
            if not report.ready and report.leased:
                pause = min(pause, max(report.eta, self._silence / 50))
            await self.soon.wait(pause)

    def _say_whether_it_trains(self, report: Report) -> None:
        """Without samples a peer stands still until a commit brings some; it must not look as if it trained."""
        if self._core.state not in ("training", "waiting") or (self._flights and not self._flights.several):
            return
        missing, since = "", self._transport.now() - self._core.base_since
        if since > self._silence:
            live, quorum = len(self._reports.live()), self._manifest.round.quorum
            missing = f"{live} of {quorum} peers that a round needs are here" if live < quorum else ""
            if self._heads.owes():
                missing = f"for {self._lost()}, which this disk has lost, from somebody who has it"
        if report.leased:
            self._core.set_state("training", missing)
        elif since > self._silence:
            self._core.set_state("waiting", missing or "for a round")

    def _lost(self) -> str:
        owed = self._heads.owed
        return f"the state of round {owed.round}" if owed != LOST else "the state"

    def _say_what_is_lacking(self, now: float) -> None:
        """Who has seen a head never starts from θ₀, and waits for ever where nobody has it any more; then people must
        decide."""
        if not self._heads.owes():
            self._lacking, self._patience = None, PATIENCE * self._silence
            return
        self._lacking = self._lacking if self._lacking is not None else now
        if now - self._lacking < self._patience or self._heads.ahead or self._heads.plan is not None:
            return
        self._patience *= 4
        heard = sum(
            self._messenger.silent_for(peer, float("-inf")) <= self._silence for peer in self._core.directory.known
        )
        self._events(
            "warning",
            message=f"nobody has {self._lost()}, which this disk has lost: none of the {heard} peers that this one "
            f"hears, for {now - self._lacking:.0f} s. It takes part in nothing until somebody who has that state, or a "
            "better one, is there: start every peer that may have it. If all have lost it, the run can only begin "
            "again: stop all peers, delete the folder store/ in the state folder of each, and start them",
        )
