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
    """Counts the streams that others have opened. ``standing`` is asked at each arrival; a stream keeps the place of
    the standing with which it arrived."""

    def __init__(self, standing: Callable[[PeerId], Standing] = lambda peer: Standing.KNOWN) -> None:
        self.standing = standing
        self._total: Counter[Standing] = Counter()
        self._held: Counter[PeerId] = Counter()

    def take(self, peer: PeerId) -> Standing | None:
        """A place for one more stream of ``peer``, to be given back by :meth:`give`; None when it gets none."""
        standing = self.standing(peer)
        places = PLACES[standing]
        if self._held.get(peer, 0) >= places.each or self._total[standing] >= places.all:
            return None
        self._held[peer] += 1
        self._total[standing] += 1
        return standing

    def give(self, peer: PeerId, standing: Standing) -> None:
        """A stream has ended."""
        self._total[standing] -= 1
        self._held[peer] -= 1
        if not self._held[peer]:
            del self._held[peer]
