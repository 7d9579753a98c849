"""How a flattened fragment is cut into chunks, the unit of transfer, averaging and hashing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkLayout:
    """A vector of ``parameters`` elements in chunks of ``chunk`` elements; the last one may be shorter.

    Raises :class:`ValueError` when either is below 1.
    """

    parameters: int
    chunk: int

    def __post_init__(self) -> None:
        if self.parameters < 1 or self.chunk < 1:
            raise ValueError(f"a layout needs at least one element and chunks of at least one, found {self}")

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.parameters // self.chunk)

    def span(self, i: int) -> slice:
        """Elements of chunk ``i``. Raises :class:`IndexError` outside ``0 … count - 1``."""
        if not 0 <= i < self.count:
            raise IndexError(f"chunk {i} of {self.count}")
        return slice(i * self.chunk, min((i + 1) * self.chunk, self.parameters))

    def size(self, i: int) -> int:
        """Number of elements in chunk ``i``."""
        span = self.span(i)
        return int(span.stop - span.start)
