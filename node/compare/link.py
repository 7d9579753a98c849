"""Simulated wall time: when a run's ticks would have gone by on a link of given rate and latency."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.protocol.errors import UsageError

ROUND_TRIPS = 5
"""Round trips of a round besides its bytes: call, seal, hello and welcome, the first contribution and its average,
proposal and votes."""
STEP_TRIPS = 1
"""Of an all-reduce in data-parallel training: half of one to scatter, half to gather."""


@dataclass(frozen=True)
class Link:
    """What each peer has, up and down at once."""

    bytes_per_second: float
    latency: float
    """Seconds one way."""

    @classmethod
    def parse(cls, text: str) -> Link:
        """``20mbit,50ms``: rate, and latency one way. Raises :class:`UsageError`."""
        found = re.fullmatch(r"\s*([\d.]+)\s*([kmg]?)bit\s*,\s*([\d.]+)\s*(ms|s)\s*", text.lower())
        try:
            if found is None:
                raise ValueError
            rate = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8
            latency = float(found[3]) * (1e-3 if found[4] == "ms" else 1)
            if rate <= 0:
                raise ValueError
        except ValueError:
            raise UsageError(f"--link: expected a rate and a latency, as in 20mbit,50ms; found {text!r}") from None
        return cls(rate, latency)

    def __str__(self) -> str:
        return f"{self.bytes_per_second * 8e-6:g} Mbit/s, {self.latency * 1e3:g} ms"


class Transfer(NamedTuple):
    """The reduction of one round."""

    begin: int
    """Tick at which it begins."""
    meanwhile: int
    """Ticks for which training goes on before it must have ended."""
    size: int
    """Bytes that one peer sends."""


def pack_transfers(transfers: Sequence[Transfer]) -> list[list[int]]:
    """Runs of evenly spaced, equal transfers as [begin, meanwhile, size, count, spacing]."""
    packed: list[list[int]] = []
    for begin, meanwhile, size in transfers:
        if packed and packed[-1][1:3] == [meanwhile, size]:
            first, _, _, count, spacing = packed[-1]
            if count == 1 or begin == first + count * spacing:
                packed[-1][3:] = [count + 1, begin - first if count == 1 else spacing]
                continue
        packed.append([begin, meanwhile, size, 1, 0])
    return packed


def unpack_transfers(packed: Sequence[Sequence[int]]) -> list[Transfer]:
    """The opposite of :func:`pack_transfers`."""
    return [
        Transfer(begin + k * spacing, meanwhile, size)
        for begin, meanwhile, size, count, spacing in packed
        for k in range(count)
    ]


def wall_times(
    ticks: Sequence[int], transfers: Sequence[Transfer], step_seconds: float, link: Link, trips: float
) -> list[float]:
    """Seconds from the start of a run to each of these ticks (rising).

    transfers: by tick. They use the link one after the other; training stands still when the ticks are over before the
    transfer is, and a run is over when the last transfer is.
    step_seconds: of a tick. trips: round trips of a transfer.
    """
    stalls: list[tuple[int, float]] = []
    stalled = free = 0.0
    pending: list[tuple[int, float]] = []

    def settle(until: float) -> None:
        """Stall for transfers that must be over by this tick."""
        nonlocal stalled
        while pending and pending[0][0] <= until:
            tick, done = pending.pop(0)
            late = done - (tick * step_seconds + stalled)
            if late > 0:
                stalled += late
                stalls.append((tick, late))

    for begin, meanwhile, size in transfers:
        settle(begin)
        start = max(begin * step_seconds + stalled, free)
        free = start + size / link.bytes_per_second + trips * 2 * link.latency
        pending.append((min(begin + meanwhile, ticks[-1]), free))
        if not meanwhile:
            settle(begin)
    settle(float("inf"))
    times = []
    index, late = 0, 0.0
    for tick in ticks:
        while index < len(stalls) and stalls[index][0] <= tick:
            late += stalls[index][1]
            index += 1
        times.append(tick * step_seconds + late)
    return times
