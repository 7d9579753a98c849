"""How the flattened model is cut into chunks, the unit of transfer, averaging and hashing, and into fragments."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ChunkLayout:
    """A vector of ``parameters`` elements in chunks of ``chunk`` elements; the last one may be shorter.

    It is one fragment; :class:`FragmentedLayout` has several. Raises :class:`ValueError` when either is below 1.
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

    def stretches(self) -> tuple[slice, ...]:
        """The elements of all chunks, as few slices in order as there can be."""
        return (slice(0, self.parameters),)

    # --- fragments

    @property
    def fragments(self) -> int:
        """Parts of the model that have rounds of their own."""
        return 1

    def fragment(self, number: int) -> ChunkLayout:
        """The chunks of one fragment, numbered from 0; their spans lie in the whole vector. Raises
        :class:`IndexError` for a fragment that there is not."""
        if number != 0:
            raise IndexError(f"fragment {number} of 1")
        return self

    def place(self, number: int, i: int) -> int:
        """The number that chunk ``i`` of a fragment has among all chunks."""
        return i

    def wire(self, fragment: int, rank: int = 0) -> ChunkLayout:
        """The chunks of one fragment as they travel, each with as many values as its payload holds: its elements,
        unless matrices travel as factors of some rank (:mod:`.lowrank`)."""
        return self.fragment(fragment)

    def due(self, outer_step: int) -> int:
        """The fragment of the rounds that follow so many outer steps: one after the other, again and again."""
        return outer_step % self.fragments


@dataclass(frozen=True)
class Chunks(ChunkLayout):
    """Chunks that are told one by one: of a fragment, or of a vector in which fragments lie side by side.

    parameters: elements in all of them together. chunk: most elements of one. spans: start and stop of each, in the
    whole vector, in order.
    """

    spans: tuple[tuple[int, int], ...] = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [stop - start for start, stop in self.spans]
        if sum(sizes) != self.parameters or not all(0 < size <= self.chunk for size in sizes):
            raise ValueError(f"{len(sizes)} spans do not make {self}")

    @property
    def count(self) -> int:
        return len(self.spans)

    def span(self, i: int) -> slice:
        if not 0 <= i < len(self.spans):
            raise IndexError(f"chunk {i} of {len(self.spans)}")
        return slice(*self.spans[i])

    def stretches(self) -> tuple[slice, ...]:
        found: list[slice] = []
        for start, stop in self.spans:
            if found and found[-1].stop == start:
                found[-1] = slice(found[-1].start, stop)
            else:
                found.append(slice(start, stop))
        return tuple(found)


@dataclass(frozen=True)
class FragmentedLayout(Chunks):
    """A vector of several fragments. Its chunks are numbered in the order in which they lie; none is in two fragments.

    members: of each fragment, the numbers of its chunks, in order.
    """

    members: tuple[tuple[int, ...], ...] = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        at = 0
        for start, stop in self.spans:
            if start != at:
                raise ValueError(f"the chunks of a layout follow one another, found one at {start} after {at}")
            at = stop
        if sorted(i for chunks in self.members for i in chunks) != list(range(self.count)) or not all(self.members):
            raise ValueError("each chunk of a layout is in one fragment, and no fragment is empty")
        parts = tuple(self._part(chunks) for chunks in self.members)
        object.__setattr__(self, "_parts", parts)

    def _part(self, chunks: tuple[int, ...]) -> Chunks:
        spans = tuple(self.spans[i] for i in chunks)
        return Chunks(sum(stop - start for start, stop in spans), self.chunk, spans)

    @property
    def fragments(self) -> int:
        return len(self.members)

    def fragment(self, number: int) -> ChunkLayout:
        if not 0 <= number < len(self.members):
            raise IndexError(f"fragment {number} of {len(self.members)}")
        parts: tuple[Chunks, ...] = self.__dict__["_parts"]
        return parts[number]

    def place(self, number: int, i: int) -> int:
        return self.members[number][i]
