"""How the last rounds ended, for members that have missed it."""

from __future__ import annotations

from collections.abc import Iterator

from .control import Committed
from .core import Core
from .messages import Commit, hash_of
from .transport import PeerId


class Ends:
    """The newest commits, as many as rounds may be in flight, that this process has applied."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._transport = core.transport
        self._messenger = core.messenger
        self._flights = core.flights
        self._silence = core.silence
        self._ended: dict[bytes, tuple[Commit, float]] = {}
        """Each, and when it was applied, by roster."""
        self._told: dict[PeerId, float] = {}
        """When members of these rosters that still pinged one were last sent the commit."""

    def __contains__(self, roster: bytes) -> bool:
        return roster in self._ended

    def __iter__(self) -> Iterator[bytes]:
        """The rosters, oldest first."""
        return iter(self._ended)

    def add(self, commit: Commit) -> None:
        """A commit has been applied."""
        self._ended[hash_of(commit.body.seal)] = commit, self._transport.now()
        while len(self._ended) > self._flights.width:
            del self._ended[next(iter(self._ended))]
        self._told.clear()

    def clear(self) -> None:
        """This peer is on another chain."""
        self._ended.clear()

    def tell(self, peer: PeerId, roster: bytes) -> None:
        """A member still pings the roster of the head, or one before it that was in flight beside that: it has missed
        how that round ended, unless it is only late."""
        commit, ended = self._ended[roster]
        now, pause = self._transport.now(), self._silence / 5
        since = ended if self._flights.several else self._core.base_since
        if now - max(since, self._told.get(peer, since)) <= pause:
            return
        # A commit is large and a ping small: nobody else gets one for the asking, and nobody one after another.
        if any(member.peer == peer for member in commit.body.seal.members):
            self._told[peer] = now
            self._messenger.post(peer, Committed(commit))
