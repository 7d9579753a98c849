"""What peers report to one another: how far each is."""

from __future__ import annotations

from collections.abc import Iterable

from .control import Report
from .core import Core
from .training import Training
from .transport import PeerId


class Reports:
    """The last report of each peer, and this peer's own."""

    def __init__(self, core: Core, training: Training) -> None:
        self._core = core
        self._training = training
        self._transport = core.transport
        self._me = core.me
        self._schedule = core.manifest.schedule
        self._layout = core.layout
        self._island = core.island
        self._messenger = core.messenger
        self._directory = core.directory
        self._flights = core.flights
        self._silence = core.silence
        self.heard: dict[PeerId, tuple[Report, float]] = {}
        """What each last reported, and when."""

    def own(self) -> Report:
        """What this peer reports of itself."""
        assert self._island is not None
        core, accounts = self._core, self._training.accounts
        self._training.note_life()
        head = core.head
        at, outer_step = self._flights.next(head), head.outer_step
        fragment = self._layout.due(outer_step if at is None else at)
        progress = accounts.progress(self._island.progress(), fragment)
        steps = progress.steps
        ready, eta = self._schedule.own(
            progress, accounts.wanting(steps, fragment), outer_step=outer_step, elapsed=core.elapsed(),
            peers=len(self._directory.candidates()) + 1,
        )  # fmt: skip
        if at is None:
            # As many rounds are in flight as may be.
            ready, eta = False, max(eta, self._silence)
        return Report(
            head, steps, progress.tokens, progress.leased, ready, eta, progress.step_time, core.last_round
        )  # fmt: skip

    def live(self) -> dict[PeerId, Report]:
        """Peers at this head whose reports are fresh; the own one included."""
        head, now, silence = self._core.head, self._transport.now(), self._silence
        live = {
            peer: report for peer, (report, at) in self.heard.items()
            if (report.head == head or self._flights.knows(report.head, head))
            and (now < at + silence or now < self.gone_at(peer, at))
        }  # fmt: skip
        if self._island is not None:
            live[self._me] = self.own()
        return live

    def gone_at(self, peer: PeerId, since: float) -> float:
        """When a peer that says nothing more counts as gone, its silence counted from ``since`` at the earliest."""
        return max(self._messenger.heard(peer), since, self._messenger.epoch) + self._silence

    def hear(self, peer: PeerId, report: Report) -> None:
        self.heard[peer] = (self._flights.read(peer, report), self._transport.now())

    def read_again(self, peers: Iterable[PeerId]) -> None:
        """A round with these peers has been sealed, of which their last reports may not know yet."""
        for peer in peers:
            if peer in self.heard:
                report, at = self.heard[peer]
                self.heard[peer] = (self._flights.read(peer, report), at)

    def forget(self, peer: PeerId) -> None:
        self.heard.pop(peer, None)
