"""``lowrank``: matrices travel as their parts along a few directions that all peers share.

In the manner of PowerSGD (arXiv 1905.13727), as DiLoCoX (arXiv 2506.21263) uses it with int4 behind, but with one
average a round in place of two. What all peers share already is the outer momentum b: it is part of the state, so the
directions in which the last averages went are known to all, to a joiner too, and need not be sent, agreed upon or kept.
For a matrix X of m rows and n columns let U [r, m] and Q [r, n] be orthonormal directions found in b. Sent are

    A = Q·Xᵀ  [r, m]        and        C = U·X − (U·Aᵀ)·Q  [r, n]

and what they are decoded to is Aᵀ·Q + Uᵀ·C: the part of X that lies in the rows of Q or in the columns of U (the
tangent space of the matrices of rank r at b). This is linear in X and the directions are everybody's, so a reducer
averages A and C as they are: averages are as small as contributions, and need no directions. New directions come in on
both sides with each round, into the momentum, and so into the next U and Q: the warm start of PowerSGD.

Everything here is float32 and float64 in a fixed order of operations (:mod:`.kernels`): all peers must decode an
average to the same bits. Specification: docs/wire/codecs.md; why: docs/decisions-codecs.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .codecs import MAX_MAGNITUDE
from .codecs.base import LIMIT_BITS
from .errors import NonFinite
from .kernels import frozen, subnormals_on, table
from .layout import ChunkLayout, Chunks, FragmentedLayout
from .state import spread
from .theta0 import TensorSpec, fill

Floats = NDArray[np.float32]
Both = tuple[Floats, Floats]
"""U [r, rows] and Q [r, columns] of a piece, each as one vector, line after line."""
BLOCK = 64
"""Values that share a scale (:mod:`.codecs.int4`): each factor, and each tensor that is sent whole, begins a block."""
GAIN = 2
"""A matrix is sent as factors where these have at most one in so many of its elements."""


def gains(rows: int, columns: int, rank: int) -> bool:
    """Whether two factors of that rank are at most half as large as the matrix. Vectors never gain."""
    return 0 < rank < min(rows, columns) and GAIN * rank * (rows + columns) <= rows * columns


def largest_rank(shapes: Sequence[tuple[int, int]]) -> int:
    """The highest rank at which some matrix [rows, columns] still gains; 0 when none ever does."""
    return max((min(m * n // (GAIN * (m + n)), min(m, n) - 1) for m, n in shapes), default=0)


@dataclass(frozen=True)
class Piece:
    """What lies in one chunk of one tensor: a tensor, or some rows of it."""

    at: int
    """Its first element in the chunk."""
    rows: int
    columns: int
    """A vector is one row."""
    number: int
    """Among all pieces of the model; it picks the random directions."""

    @property
    def size(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Segment:
    """A piece, and where its values are among those of its chunk that travel."""

    piece: Piece
    rank: int
    """0: it travels whole."""
    left: int
    """Of A, or of the whole piece."""
    right: int
    """Of C."""
    end: int


@lru_cache(maxsize=4096)
def segments(pieces: tuple[Piece, ...], rank: int) -> tuple[Segment, ...]:
    """The values of a chunk in the order in which they travel; what a block lacks before the next begins is zeros."""
    found = []
    at = 0
    for piece in pieces:
        start = -(-at // BLOCK) * BLOCK
        if gains(piece.rows, piece.columns, rank):
            right = -(-(start + rank * piece.rows) // BLOCK) * BLOCK
            at = right + rank * piece.columns
            found.append(Segment(piece, rank, start, right, at))
        else:
            at = start + piece.size
            found.append(Segment(piece, 0, start, at, at))
    return tuple(found)


@dataclass(frozen=True)
class LowRankLayout(FragmentedLayout):
    """A vector whose chunks begin and end with rows of matrices.

    pieces: of each chunk, what lies in it, in order. rank: of the factors, where a round names no other.
    """

    pieces: tuple[tuple[Piece, ...], ...] = field(repr=False)
    rank: int

    def wire(self, fragment: int, rank: int = 0) -> ChunkLayout:
        return _wire(self, fragment, rank or self.rank)


@lru_cache(maxsize=256)
def _wire(layout: LowRankLayout, fragment: int, rank: int) -> ChunkLayout:
    spans = []
    at = 0
    for number in layout.members[fragment]:
        size = segments(layout.pieces[number], rank)[-1].end
        spans.append((at, at + size))
        at += size
    return Chunks(at, max(stop - start for start, stop in spans), tuple(spans))


def cut(sizes: Sequence[int], columns: Sequence[int], chunk: int) -> Iterator[list[tuple[int, int]]]:
    """The chunks of neighbouring tensors; of each chunk its pieces, as (elements, columns).

    Whole tensors as long as they fit; a larger one by itself, as many whole rows as fit, its last chunk being shorter;
    and one whose rows are longer than a chunk, every ``chunk`` elements, each of them a vector.
    """
    filled: list[tuple[int, int]] = []
    for size, width in zip(sizes, columns, strict=True):
        if filled and sum(count for count, _ in filled) + size > chunk:
            yield filled
            filled = []
        if size <= chunk:
            filled.append((size, width))
            continue
        step = chunk // width * width if width <= chunk else chunk
        for start in range(0, size, step):
            count = min(step, size - start)
            yield [(count, width if width <= chunk else count)]
    if filled:
        yield filled


def directions(parts: Sequence[Segment], momentum: Floats) -> list[Both | None]:
    """U [r, rows] and Q [r, columns] of each piece of a chunk; None where it travels whole.

    momentum: float32, of the elements of the chunk.
    """
    subnormals_on()
    return [_found(part, momentum)[0] if part.rank else None for part in parts]


def _found(part: Segment, momentum: Floats) -> tuple[Both, Floats]:
    """U and Q of a piece that is split, and U·B [r, columns]."""
    piece, rank = part.piece, part.rank
    matrix = frozen(momentum[piece.at : piece.at + piece.size])
    by_chance = [
        fill_normal(2 * piece.number + side, rank * length) for side, length in enumerate((piece.columns, piece.rows))
    ]
    left, right = np.empty(rank * piece.rows, np.float32), np.empty(rank * piece.columns, np.float32)
    lines, other = by_chance[0], np.empty_like(left)
    for _ in range(2):
        table().matrix_times(matrix, frozen(turned(lines, rank)), rank, other)
        table().orthonormal(frozen(other), frozen(by_chance[1]), rank, left)
        table().times_matrix(frozen(left), matrix, rank, right)
        lines = np.empty_like(right)
        table().orthonormal(frozen(right), frozen(by_chance[0]), rank, lines)
    return (frozen(left), frozen(lines)), right


def estimate(layout: LowRankLayout, momentum: Floats, kept: float) -> int:
    """The rank for the rounds to come: the smallest at which the directions of the momentum's left side hold at least
    the share ``kept`` of its energy, over all pieces that are split at the layout's rank; at most that rank.

    DiLoCoX (arXiv 2506.21263) re-estimates the rank over a window of rounds; the momentum is one, of 1 / (1 − μ)
    rounds. It is the same for all who hold the state: float64 in a fixed order. Takes as long as all directions do.
    """

    def one(place: int) -> list[tuple[float, list[float]]]:
        subnormals_on()  # of the thread that this is called in
        start = layout.span(place)
        energies = []
        for part in segments(layout.pieces[place], layout.rank):
            if part.rank:
                own = momentum[start][part.piece.at : part.piece.at + part.piece.size]
                _, lines = _found(part, momentum[start])
                energies.append((_energy(own), [_energy(line) for line in lines.reshape(part.rank, -1)]))
        return energies

    found = [energies for place in spread(one, range(layout.count), 4 * layout.chunk) for energies in place]
    total = 0.0
    for whole, _ in found:
        total += whole
    held = 0.0
    for rank in range(1, layout.rank):
        for _, lines in found:
            held += lines[rank - 1]
        if total > 0 and held >= kept * total:
            return rank
    return layout.rank


def _energy(values: Floats) -> float:
    """The squares added one after the other, in order."""
    wide = values.astype(np.float64)
    return float(np.add.accumulate(wide * wide)[-1])


def fill_normal(number: int, size: int) -> Floats:
    """Normally distributed float32 [size], the same everywhere: those of tensor ``number`` of seed 0 in θ₀."""
    out = np.empty(size, np.float32)
    fill(0, number, TensorSpec("directions", (size,), "normal", 1.0), out)
    return out


def turned(lines: Floats, rank: int) -> Floats:
    """[rank, length] as [length, rank]."""
    return np.ascontiguousarray(lines.reshape(rank, -1).T).reshape(-1)


def project(parts: Sequence[Segment], found: Sequence[Both | None], x: Floats) -> Floats:
    """The values of a chunk that travel: float32 [parts[-1].end]. Those above 2⁶⁴ in magnitude become 2⁶⁴.

    Raises :class:`NonFinite` when an element of ``x`` is NaN, infinite or above that.
    """
    subnormals_on()
    if table().largest(frozen(x)) > LIMIT_BITS:
        raise NonFinite(
            f"cannot send {x.size} values as factors: at least one is NaN, infinite or above {MAX_MAGNITUDE:.3g}; the "
            "training has probably diverged (lower the learning rates)"
        )
    values = np.zeros(parts[-1].end, np.float32)
    for part, both in zip(parts, found, strict=True):
        piece, rank = part.piece, part.rank
        own = frozen(x[piece.at : piece.at + piece.size])
        if both is None:
            values[part.left : part.left + piece.size] = own
            continue
        left, right = both
        a = values[part.left : part.left + rank * piece.rows]
        c = values[part.right : part.end]
        table().matrix_times(own, frozen(turned(right, rank)), rank, a)
        table().times_matrix(left, own, rank, c)
        # what A has taken already of the columns of U
        taken = np.empty(rank * rank, np.float32)
        table().matrix_times(left, frozen(turned(a, rank)), rank, taken)
        np.negative(taken, out=taken)
        table().outer_add(frozen(taken), right, rank, c)
    np.clip(values, -MAX_MAGNITUDE, MAX_MAGNITUDE, out=values)
    return values


def expand(parts: Sequence[Segment], found: Sequence[Both | None], values: Floats, out: Floats) -> None:
    """Write a chunk as the values that travelled say it is."""
    subnormals_on()
    for part, both in zip(parts, found, strict=True):
        piece, rank = part.piece, part.rank
        own = out[piece.at : piece.at + piece.size]
        if both is None:
            own[:] = values[part.left : part.left + piece.size]
            continue
        left, right = both
        own[:] = 0
        table().outer_add(frozen(values[part.left : part.left + rank * piece.rows]), right, rank, own)
        table().outer_add(left, frozen(values[part.right : part.end]), rank, own)


class Factors:
    """Between the elements of chunks and the values that travel, while the outer momentum stays as it is.

    The directions of a chunk are found when they are first needed, and kept: r·(m + n) numbers of each matrix. For use
    by several threads; two that need the same directions at once both find them, and find the same.
    """

    def __init__(self, layout: LowRankLayout) -> None:
        self._layout = layout
        self._found: dict[tuple[int, int], list[Both | None]] = {}

    def size(self, place: int, rank: int = 0) -> int:
        """Values of chunk ``place`` (of all chunks) that travel. rank: the layout's, unless told."""
        return segments(self._layout.pieces[place], rank or self._layout.rank)[-1].end

    def project(self, place: int, x: Floats, momentum: Floats, rank: int = 0) -> Floats:
        """The values of a chunk that travel. x: its elements; momentum: of the whole model."""
        parts = segments(self._layout.pieces[place], rank or self._layout.rank)
        return project(parts, self._directions(place, parts, momentum), x)

    def expand(self, place: int, values: Floats, momentum: Floats, out: Floats, rank: int = 0) -> None:
        """The opposite: write the chunk's elements into ``out``."""
        parts = segments(self._layout.pieces[place], rank or self._layout.rank)
        expand(parts, self._directions(place, parts, momentum), values, out)

    def _directions(self, place: int, parts: Sequence[Segment], momentum: Floats) -> list[Both | None]:
        key = (place, max(part.rank for part in parts))
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = directions(parts, momentum[self._layout.span(place)])
        return found
