"""How many streams others may have open to this peer, decided before anything of a stream is read.

Streams cost memory, a task and a descriptor each, and identities cost nothing: without a bound for those of whom
nothing is known, they could take all places from those with whom this peer is in a round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .transport import PeerId, Standing


@dataclass(frozen=True)
class Places:
    """Streams of one peer at once, and of all peers of that standing together."""

    each: int
    all: int


PLACES = {
    Standing.STRANGER: Places(2, 32),
    Standing.UNKNOWN: Places(8, 256),
    Standing.KNOWN: Places(32, 1024),
    Standing.MEMBER: Places(64, 4096),
}


class StreamQuota:
    """Counts the streams that others have opened. ``standing`` is asked at each arrival, and again of everybody when
    places run out: a stream that came from somebody unknown is not counted as such once its peer is known."""

    def __init__(self, standing: Callable[[PeerId], Standing] = lambda peer: Standing.KNOWN) -> None:
        self.standing = standing
        self._held: Counter[PeerId] = Counter()
        self._counted: dict[PeerId, Standing] = {}
        """As what the streams of each peer are counted."""
        self._total: Counter[Standing] = Counter()

    def take(self, peer: PeerId) -> bool:
        """Whether there is a place for one more stream of ``peer``; it is to be given back by :meth:`give`."""
        standing = self._count(peer)
        places = PLACES[standing]
        full = self._total[standing] >= places.all
        if full:
            for other in self._held:
                self._count(other)
            full = self._total[standing] >= places.all
        if full or self._held.get(peer, 0) >= places.each:
            self._forget(peer)
            return False
        self._held[peer] += 1
        self._total[standing] += 1
        return True

    def give(self, peer: PeerId) -> None:
        """A stream has ended."""
        self._held[peer] -= 1
        self._total[self._counted[peer]] -= 1
        self._forget(peer)

    def _count(self, peer: PeerId) -> Standing:
        """Count a peer's streams as what it is now."""
        standing, held = self.standing(peer), self._held.get(peer, 0)
        before = self._counted.get(peer)
        if before is not None and before is not standing:
            self._total[before] -= held
            self._total[standing] += held
        self._counted[peer] = standing
        return standing

    def _forget(self, peer: PeerId) -> None:
        if not self._held.get(peer, 0):
            self._held.pop(peer, None)
            self._counted.pop(peer, None)
