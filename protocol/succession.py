"""Who leads: the order of candidates on this base, as one peer sees it."""

from __future__ import annotations

from .candidates import put_back, rank
from .core import Core
from .heads import Heads
from .putoff import PutOff
from .transport import PeerId


class Succession:
    """The candidates in the order in which they lead, with what this peer holds against some of them."""

    def __init__(self, core: Core, heads: Heads) -> None:
        self._core = core
        self._heads = heads
        self._transport = core.transport
        self._me = core.me
        self._manifest = core.manifest
        self._messenger = core.messenger
        self._directory = core.directory
        self._flights = core.flights
        self._silence = core.silence
        self.voids: dict[PeerId, int] = {}
        """Rosters of this base that each peer led, and that came to nothing."""
        self.reluctant = PutOff(core.transport.now, 8 * core.silence, 64 * core.silence)
        """Who stood first, lived, and did not call: others go first for a while."""
        self.sealless = PutOff(core.transport.now, 8 * core.silence, 64 * core.silence)
        """Who lived, and sealed nothing after this peer had entered its call: it may not call this peer for a while."""
        self.callers: dict[PeerId, None] = {}
        """Who has called on this base."""
        self.ready_since: float | None = None
        """Since when this peer has reported that it is ready."""
        self._ranks: dict[PeerId, bytes] = {}
        self._ranked: tuple[list[PeerId] | None, list[PeerId]] = (None, [])
        """The directory's candidates as they were, and these and this peer by rank for the head."""

    def ordered(self) -> list[PeerId]:
        """All candidates, this peer included, in the order in which they lead; not for the caller to write."""
        candidates = self._directory.candidates()
        if candidates is not self._ranked[0]:
            self._ranked = (candidates, sorted([*candidates, self._me], key=self._rank))
        away = self._messenger.unreachable() + self.reluctant.members() + self.sealless.members()
        return put_back(self._ranked[1], self.voids, away)

    def _rank(self, peer: PeerId) -> bytes:
        known = self._ranks.get(peer)
        if known is None:
            base = self._core.head.id
            if self._flights.several:
                # Heads differ for a moment while calls go on, and the order must not.
                at = self._flights.next(self._core.head)
                base = (self._core.head.outer_step if at is None else at).to_bytes(32, "big")
            known = self._ranks[peer] = rank(self._manifest.run_id, base, peer)
        return known

    def void(self, coordinator: PeerId) -> None:
        """What a peer led on this base has come to nothing."""
        self.voids[coordinator] = self.voids.get(coordinator, 0) + 1

    def committed(self, coordinator: PeerId) -> None:
        """What a peer led was committed."""
        self.reluctant.discard(coordinator)
        self.sealless.discard(coordinator)

    def next_place(self) -> None:
        """The next round is for another place in the chain."""
        self._ranks.clear()
        self._ranked = (None, [])

    def new_head(self) -> None:
        """The base is another."""
        self.voids.clear()
        self.callers.clear()
        self.next_place()

    def forget(self, peer: PeerId) -> None:
        self._ranks.pop(peer, None)
        self.reluctant.discard(peer)
        self.sealless.discard(peer)

    def waited_long(self) -> bool:
        """Whether this peer has been ready for so long on this base that something is wrong with who should have
        called."""
        if self.ready_since is None:
            return False
        return self._transport.now() - max(self.ready_since, self._core.base_since) > 2 * self._silence

    def pass_over(self, coordinator: PeerId) -> None:
        """Somebody calls after all have waited long: who stood before it, lives, and has not called on this base does
        not do its office, and stands behind all others for a while, each time a longer one. That is this peer's own
        view, and excludes nobody."""
        if not self.waited_long():
            return
        for peer in self.ordered():
            if peer in (coordinator, self._me):
                return
            here = self._heads.is_here(peer) and self._messenger.silent_for(peer, 0.0) <= self._silence
            if here and peer not in self.callers:
                self.reluctant.add(peer)

    def earlier(self, a: PeerId, b: PeerId) -> bool:
        """Whether candidate a stands before b for this base."""
        return (self.voids.get(a, 0), self._rank(a)) < (self.voids.get(b, 0), self._rank(b))
