"""Doing without somebody for a while, each time for longer."""

from __future__ import annotations

from collections.abc import Callable

from .transport import PeerId


class PutOff:
    """Who is done without at present.

    now: the clock. first: seconds of the first time; each further time is twice as long, up to ``most`` seconds.
    """

    __slots__ = ("_first", "_most", "_now", "_until")

    def __init__(self, now: Callable[[], float], first: float, most: float) -> None:
        self._now = now
        self._first = first
        self._most = most
        self._until: dict[PeerId, tuple[float, float]] = {}
        """For how long, and until when."""

    def add(self, peer: PeerId) -> None:
        """Do without a peer, once more."""
        last = self._until.get(peer)
        pause = self._first if last is None else min(2 * last[0], self._most)
        self._until[peer] = (pause, self._now() + pause)

    def lift(self, peer: PeerId) -> None:
        """Do with a peer again; the next time is twice as long as the last all the same."""
        if (held := self._until.get(peer)) is not None:
            self._until[peer] = (held[0], self._now())

    def discard(self, peer: PeerId) -> None:
        """Nothing is held against a peer any more."""
        self._until.pop(peer, None)

    def clear(self) -> None:
        """Nothing is held against anybody any more."""
        self._until.clear()

    def __contains__(self, peer: PeerId) -> bool:
        held = self._until.get(peer)
        return held is not None and held[1] > self._now()

    def members(self) -> list[PeerId]:
        """All who are done without at present."""
        if not self._until:
            return []
        now = self._now()
        return [peer for peer, (_, until) in self._until.items() if until > now]
