"""What a peer states of its link, from what it measures: pure accounting, no I/O.

A round tells little about links: everybody waits for the slowest, so all reach about the same. What a member reached is
a lower bound of its link, and more only for those whom the round waited for, as far as the statements in its roster
tell. So links are also measured alone now and then (:mod:`.probe`); this module says when that is worth it.

Two limits tie the statement to both sources. It is at most :data:`ABOVE_ROUNDS` times the best of the last rounds,
since D follows from it and has room for four times the ideal transfer: where processors and not links bound the rounds,
a probe must not make D too short for them. And rounds alone take it to no less than a quarter of what was probed: a
member that stalls all the others would otherwise stretch D, by which it is judged, with each round anew.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .deadline import ASSUMED, SLOWEST, slowest_link
from .messages import Seal

MEASURABLE = 1 << 20
"""Bytes in each direction below which a transfer says nothing about a link."""
MEMORY = 3
"""Rounds whose rates bound the statement."""
ABOVE_ROUNDS = 4.0
"""How many times the best of them it may be."""
BELOW_PROBE = 0.25
"""The part of the last probe below which rounds alone do not take it."""
FOLLOW = 0.5
"""How far the statement moves, in one round, to the lower rate that the member reached as the slowest."""
BOUND = 0.8
"""Who would take this share of the time of the slowest, as the roster states the links, may be what a round waits for.
"""
SLACK = 1.5, 1.0
"""A round that takes this many times the ideal time, and so many seconds more, shows that some statement is wrong."""
WORTH = 2.0, 0.03
"""A link is measured where its rounds take so many seconds at least, and this share of the inner steps between them."""
RENEW = 1800.0
"""Seconds between two probes when nothing looks wrong."""
EARLY = 120.0
"""… after a round that shows that some statement is wrong; twice as long after each further one in a row."""
RETRY = 60.0
"""… after one that found nobody to measure with; twice as long each time."""


@dataclass(frozen=True)
class Account:
    """What one member saw of a round."""

    seal: Seal
    me: int
    """Its number in the roster."""
    contribution: float
    """Bytes of an encoded chunk, on average."""
    average: float
    """… of an averaged one."""
    seconds: float
    """From the seal to the last average, or to where the round ended for this member without it."""
    sent: int
    received: int
    whole: bool
    """Whether all averages came."""
    load: float = 1.0
    """How many times this round's own bytes those are, where other rounds have shared the link."""


def ideal_seconds(account: Account) -> list[tuple[float, float]]:
    """For each member how long what it has to send and to receive takes, by the links that the roster states. Who
    states nothing counts as the slowest of the others."""
    seal = account.seal
    total = sum(part.count for part in seal.parts)
    reduced = [0] * len(seal.members)
    for part in seal.parts:
        reduced[part.reducer] += part.count
    weighed = sum(member.weight > 0 for member in seal.members)
    unknown = slowest_link(seal.members)
    times = []
    for member, own in zip(seal.members, reduced, strict=True):
        brings = member.weight > 0
        up = brings * (total - own) * account.contribution + own * (len(reduced) - 1) * account.average
        down = (total - own) * account.average + own * (weighed - brings) * account.contribution
        # As in D, nobody counts as slower than SLOWEST: else one statement next to nothing would explain any delay.
        rates = [max(rate or unknown, SLOWEST) for rate in (member.upload, member.download)]
        times.append((up / rates[0], down / rates[1]))
    return times


class _Direction:
    """The statement for one direction of the link."""

    def __init__(self) -> None:
        self.stated = 0.0
        self._probed = 0.0
        self._reached: deque[float] = deque(maxlen=MEMORY)

    def round(self, rate: float, bottleneck: bool) -> None:
        self._reached.append(rate)
        if rate >= self.stated:
            self.stated = rate
        elif bottleneck:
            lower = max(self.stated + FOLLOW * (rate - self.stated), BELOW_PROBE * self._probed)
            self.stated = min(self.stated, lower)
        self._bound()

    def probe(self, rate: float) -> None:
        # A partner that is slow, or on purpose so, takes it down by half at most; the next one may be another.
        self._probed = max([rate, self.stated / 2, *list(self._reached)[-1:]])
        self.stated = self._probed
        self._bound()

    def at_least(self, rate: float) -> None:
        self.stated = max(self.stated, rate)
        self._bound()

    def _bound(self) -> None:
        if self._reached:
            self.stated = min(self.stated, ABOVE_ROUNDS * max(self._reached))


class Rates:
    """The link of one peer, and when to measure it. Times are ``Transport.now()``, rates bytes per second."""

    def __init__(self, now: float) -> None:
        self._up, self._down = _Direction(), _Direction()
        self._ended = now
        """When the last round ended: since then inner steps have been made."""
        self._worth = False
        self._due = now
        self._probed = float("-inf")
        self._surprised = False
        """Whether the last round showed that some statement is wrong."""
        self._surprises = 0
        """Probes in a row after which it still did."""
        self._failures = 0
        self._transfer: tuple[float, int, int] | None = None

    @property
    def upload(self) -> float:
        """What this peer states; 0 while nothing is known."""
        return self._up.stated

    @property
    def download(self) -> float:
        return self._down.stated

    def round(self, account: Account, ended: float) -> None:
        """A round is over, ``ended`` just now."""
        began = ended - account.seconds
        trained, self._ended = max(began - self._ended, 0.0), ended
        if min(account.sent, account.received) < MEASURABLE:
            return
        times = [(account.load * up, account.load * down) for up, down in ideal_seconds(account)]
        longest = max(max(pair) for pair in times)
        seconds = max(account.seconds, 1e-3)
        factor, more = SLACK
        wrong = seconds > factor * longest + more
        if account.whole or wrong:
            # Who has not got everything after all that time is slower than it states, if its link is what held it up.
            # If another's was, the statement was of no use either: D was too short.
            (up, down), least = times[account.me], BOUND * longest if account.whole else 0.0
            self._up.round(account.sent / seconds, up >= least)
            self._down.round(account.received / seconds, down >= least)
        # With two members all parts are alike; a short round is not worth the seconds of a probe.
        least, share = WORTH
        self._worth = len(times) > 2 and seconds >= max(least, share * trained)
        if wrong:
            # Nobody can tell from here whose statement is wrong. Everyone looks at its own.
            self._due = min(self._due, self._probed + min(EARLY * 2**self._surprises, RENEW))
            self._surprised = True
        elif account.whole:
            self._surprised, self._surprises = False, 0

    def transferred(self, done: int, total: int, now: float) -> None:
        """A transfer of state has brought ``done`` of ``total`` bytes: the download is at least that fast. Donors may
        be slower than this link, so what is below the rate that an unknown link is taken to have says nothing."""
        known = self._transfer
        if known is None or known[2] != total or done < known[1]:
            self._transfer = (now, done, total)
            return
        began, first, _ = known
        if done >= total:
            self._transfer = None
            if done - first >= MEASURABLE and (rate := (done - first) / max(now - began, 1e-3)) > ASSUMED:
                self._down.at_least(rate)

    def probed(self, upload: float, download: float, now: float) -> None:
        """The link alone was measured."""
        self._up.probe(upload)
        self._down.probe(download)
        if self._surprised and self._probed > float("-inf"):
            self._surprises = min(self._surprises + 1, 8)
        self._probed, self._due, self._failures, self._surprised = now, now + RENEW, 0, False

    def not_probed(self, now: float) -> None:
        """Nobody was found to measure it with."""
        self._due = now + min(RETRY * 2**self._failures, RENEW)
        self._failures = min(self._failures + 1, 8)

    def due_in(self, now: float) -> float:
        """Seconds until the link is to be measured; infinite while it changes nothing."""
        return max(self._due - now, 0.0) if self._worth else float("inf")
