"""Who coordinates: the order of candidates, as a pure function of what a peer knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from blake3 import blake3

from .transport import PeerId


def rank(run: bytes, base: bytes, peer: PeerId) -> bytes:
    """The place of a peer among equals for one base: a hash, so that the office moves with every commit."""
    return blake3(b"atoll candidate 1\0" + run + base + peer.encode()).digest()


def order(
    peers: Iterable[PeerId], *, rank: Callable[[PeerId], bytes], voids: Mapping[PeerId, int],
    unreachable: Iterable[PeerId],
) -> list[PeerId]:  # fmt: skip
    """Candidates in the order in which they lead a round on one base, by ``rank`` of that base.

    First who led the fewest void rosters on this base, the unreachable after all others, then by rank.
    Nobody is ever excluded: with everyone else gone the last in order leads.
    """
    return put_back(sorted(peers, key=rank), voids, unreachable)


def put_back(ranked: list[PeerId], voids: Mapping[PeerId, int], unreachable: Iterable[PeerId]) -> list[PeerId]:
    """:func:`order`, of candidates by rank; the same list when nothing is held against anybody."""
    away = set(unreachable)
    if not (away or voids):
        return ranked
    return sorted(ranked, key=lambda peer: (peer in away, voids.get(peer, 0)))
