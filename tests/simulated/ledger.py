"""Who used which sample units: ranges with an owner, none twice."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any


class Ledger:
    """Disjoint ranges, each with a note."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._entries: list[tuple[range, Any]] = []

    def add(self, span: range, note: Any) -> Any | None:
        """Enter a range; the note of one that it overlaps, None when there is none."""
        place = bisect_right(self._starts, span.start)
        found = None
        if place and self._entries[place - 1][0].stop > span.start:
            found = self._entries[place - 1][1]
        elif place < len(self._entries) and self._starts[place] < span.stop:
            found = self._entries[place][1]
        self._starts.insert(place, span.start)
        self._entries.insert(place, (span, note))
        return found
