"""How long a round may take: D of the design, from what a roster says of its members."""

from __future__ import annotations

from collections.abc import Sequence

from .codecs import averages_codec
from .layout import ChunkLayout
from .messages import Member

ASSUMED = 1e6
"""Bytes per second of a link that nobody has measured yet."""
SLOWEST = 16e3
"""Bytes per second below which a stated link counts as this fast: one member must not stretch a round for ever."""


def slowest_link(members: Sequence[Member]) -> float:
    """Bytes per second of the slowest stated up- or downlink in a roster."""
    rates = [rate for member in members for rate in (member.upload, member.download) if rate > 0]
    return max(min(rates, default=ASSUMED), SLOWEST)


def encoded_size(layout: ChunkLayout, codec: str, members: Sequence[Member]) -> int:
    """Bytes of the whole fragment, averaged and encoded, at most; ``layout``: its chunks as they travel."""
    kind = averages_codec(codec)  # never smaller than what a contribution takes
    contributions = sum(member.weight > 0 for member in members)
    return sum(kind.average_size(layout.size(index), contributions) for index in range(layout.count))


def transfer_seconds(size: int, members: int, rate: float) -> float:
    """Ideal seconds of a butterfly over n members: 2(n−1)/n of ``size`` bytes through a link of ``rate``."""
    return 2 * (members - 1) / max(members, 1) * size / rate


def deadline_seconds(
    members: Sequence[Member], layout: ChunkLayout, codec: str, silence: float, in_flight: int = 1
) -> float:
    """D: T for a reducer that never answers, T for its replacement, 2T to sign, and twice the ideal transfer for each
    of the two attempts at the reduction. Where nobody contributes there is nothing to transfer.

    in_flight: rounds that may share the links.
    """
    size = encoded_size(layout, codec, members) if any(member.weight for member in members) else 0
    return 4 * silence + 4 * in_flight * transfer_seconds(size, len(members), slowest_link(members))
