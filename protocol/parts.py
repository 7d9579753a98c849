"""Who reduces how much of a round's fragment: by the links that its members state.

Every member sends its contribution to what others reduce, and a reducer sends its averages to everyone: of a fragment
of S bytes a member that reduces the share s of it carries S (1 + (n - 2) s) each way. With equal links equal shares are
best. With unequal links it takes a smaller share for a slow link to be done at the same time as a fast one, down to
none: a share in proportion to the link would leave the slow ones behind all the same.

This is the coordinator's own choice; members accept any parts that cover the fragment.
"""

from __future__ import annotations

from collections.abc import Sequence

from .deadline import SLOWEST
from .messages import Part

TOP = 2.0
"""A member counts as this many times the median link at most: with a false statement nobody makes a round longer than
by this factor (see :func:`shares`), for as long as its link is not below the median."""


def shares(rates: Sequence[float], members: int) -> list[float]:
    """Shares of a fragment, summing to 1, that let the slowest of its reducers be done as soon as it can be.

    rates: bytes per second of each reducer's link in its slower direction, all positive. members: of the roster, at
    least as many; those who reduce nothing carry the fragment once each way whatever the shares are.

    The time is the largest of (1 + (n - 2) sᵢ) / rᵢ. At the optimum it is the same for all that have a share, t, so
    that sᵢ = (t rᵢ - 1) / (n - 2), and whoever is too slow for that has none. A member that states c times its true
    rate so takes c × t, where t is at most the time of equal shares.
    """
    if members <= 2:
        total = sum(rates)  # everything crosses once each way, whoever averages it
        return [rate / total for rate in rates]
    fastest = sorted(range(len(rates)), key=lambda index: -rates[index])
    time = 0.0
    run = 0.0
    for count, index in enumerate(fastest, start=1):
        if count > 1 and time * rates[index] <= 1:
            break
        run += rates[index]
        time = (members - 2 + count) / run
    raw = [max(time * rate - 1, 0.0) / (members - 2) for rate in rates]
    total = sum(raw)
    return [share / total for share in raw]


def split_parts(seal_members: Sequence[tuple[bool, float, float]], chunks: int) -> list[Part]:
    """Cut ``chunks`` into parts over the reachable members, by the links that they state.

    seal_members: (reachable, upload, download) of each member, bytes per second, 0 when unknown. With nobody
    reachable the first member reduces everything: its own connections carry the others' streams.
    """
    able = [i for i, (reachable, _, _) in enumerate(seal_members) if reachable] or [0]
    # A reducer sends as much as it receives, so the slower direction counts.
    # It is at least what D takes it for: a statement next to nothing must neither stand for the median nor overflow.
    rates = [min(seal_members[i][1], seal_members[i][2], 1e15) for i in able]
    rates = [max(rate, SLOWEST) if rate > 0 else 0.0 for rate in rates]
    known = sorted(rate for rate in rates if rate > 0)
    median = known[len(known) // 2] if known else 1.0
    rates = [min(rate or median, median * TOP) for rate in rates]
    given, parts, run = 0, [], 0.0
    for index, share in zip(able, shares(rates, len(seal_members)), strict=True):
        run += share
        upto = chunks if index == able[-1] else min(round(chunks * run), chunks)
        if upto > given:
            parts.append(Part(index, given, upto - given))
            given = upto
    return parts
