"""Radial-directional merging: the mean of norms times the mean direction, tensor by tensor (arXiv 2604.21428).

With w the weights, v the contributions to one tensor as the others decode them, and φ(v) = v / ‖v‖, what is merged is

    Σ w‖v‖ / Σw  ·  φ(Σ w φ(v))

A member states the norms of its tensors with each chunk that it sends; the reducer averages directions, φ(v), and puts
the norms beside them into the averaged chunk, which the commit names by hash. What follows is everybody's own
arithmetic, and must come out the same to the last bit: ‖Σ w φ(v)‖ is computed from the directions as all decode them,
by :func:`squares`. docs/wire/codecs.md is the specification.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from .codecs import Codec
from .digest import BytesLike
from .errors import PeerMisbehaved
from .kernels import subnormals_on
from .layout import ChunkLayout
from .state import spread

Floats = NDArray[np.float32]
BLOCK = 1 << 16
"""Values whose squares are summed at once."""
LEAST, MOST = 2.0**-100, 2.0**84
"""Norms that are not 0 lie between: below, 1 / norm would leave float32; above, no tensor of encoded values gets."""
SLACK = 2.0**-9
"""By which share the square of a stated norm may be off: it was rounded to float32."""
TIMES = 100.0
"""A norm counts for at most this many times the largest of the other contributors."""
SHORTEST = 1 / 64
"""Where contributions cancel one another, their mean direction is not lengthened by more than 1 / this."""
NORM_BYTES = 4


def squares(values: Floats) -> float:
    """The sum of the squares of float32 values, the same bits everywhere.

    In blocks of 65,536 values, the last one shorter; each value is squared in float64, which is exact. Within a block
    of n, with h = ⌈n/2⌉, sᵢ ← sᵢ + sᵢ₊ₕ for i < n − h, and n ← h, until one is left. The sums of the blocks are added
    in order. All in float64, one rounding an addition; no library's sum is used, since their orders differ.
    """
    subnormals_on()
    total = 0.0
    for start in range(0, len(values), BLOCK):
        s = values[start : start + BLOCK].astype(np.float64)
        s *= s
        n = len(s)
        while n > 1:
            half = (n + 1) // 2
            s[: n - half] += s[half:n]
            n = half
        total += float(s[0])
    return total


@dataclass(frozen=True)
class Piece:
    """What lies of a tensor in one chunk."""

    tensor: int
    """Its number, from 0 in flat order."""
    place: slice
    """Elements within the chunk."""


class Radial:
    """Where the tensors lie that are merged so: all but the embeddings.

    layers: elements of the tensors, as in the manifest. embeddings: numbers of the tensors, in flat order, that are
    merged by the weighted mean.
    """

    def __init__(self, layout: ChunkLayout, layers: Sequence[Sequence[int]], embeddings: Sequence[int]) -> None:
        self._layout = layout
        self.sizes = list(chain.from_iterable(layers))
        self._starts = [0, *accumulate(self.sizes)]
        self._plain = frozenset(embeddings)
        self._firsts: dict[int, list[int]] = {}
        self._pieces: dict[tuple[int, int], tuple[Piece, ...]] = {}

    def pieces(self, fragment: int, index: int) -> tuple[Piece, ...]:
        """The pieces of such tensors in a chunk of a fragment, in order."""
        known = self._pieces.get((fragment, index))
        if known is None:
            known = self._pieces[fragment, index] = self._cut(fragment, index)
        return known

    def _cut(self, fragment: int, index: int) -> tuple[Piece, ...]:
        span = self._layout.fragment(fragment).span(index)
        found, at = [], span.start
        tensor = bisect_right(self._starts, at) - 1
        while at < span.stop:
            stop = min(self._starts[tensor + 1], span.stop)
            if tensor not in self._plain:
                found.append(Piece(tensor, slice(at - span.start, stop - span.start)))
            at, tensor = stop, tensor + 1
        return tuple(found)

    def chunks(self, fragment: int, tensor: int) -> range:
        """The chunks of a fragment in which a tensor of it lies."""
        firsts = self._firsts.get(fragment)
        if firsts is None:
            part = self._layout.fragment(fragment)
            firsts = self._firsts[fragment] = [part.span(i).start for i in range(part.count)]
        first, last = self._starts[tensor], self._starts[tensor + 1] - 1
        return range(bisect_right(firsts, first) - 1, bisect_right(firsts, last))

    @cached_property
    def most(self) -> int:
        """At least as many pieces as any chunk has."""
        starts = [self._layout.span(i).start for i in range(self._layout.count)]
        begun = [0] * len(starts)
        for start in self._starts[:-1]:
            begun[bisect_right(starts, start) - 1] += 1
        return 1 + max(begun)


@dataclass(frozen=True)
class Part:
    """The tensors of one fragment."""

    radial: Radial
    fragment: int

    def pieces(self, index: int) -> tuple[Piece, ...]:
        return self.radial.pieces(self.fragment, index)

    def chunks(self, tensor: int) -> range:
        return self.radial.chunks(self.fragment, tensor)


# --- what a member sends --------------------------------------------------------------------------------------------


class Norms:
    """The norms of one contribution, tensor by tensor, each computed when a chunk of it is first sent.

    sent: what the others decode of a chunk, float32. chunk: elements of the largest, for the number of threads.
    """

    def __init__(self, part: Part, sent: Callable[[int], Floats], chunk: int) -> None:
        self._part = part
        self._sent = sent
        self._chunk = chunk
        self._lock = threading.Lock()
        self._sums: dict[int, list[float]] = {}
        self._norms: dict[int, np.float32] = {}

    def of(self, index: int) -> bytes:
        """The norms of the tensors that have pieces in a chunk, in order, as they are sent before its payload."""
        with self._lock:
            return np.array([self._norm(piece.tensor) for piece in self._part.pieces(index)], "<f4").tobytes()

    def _norm(self, tensor: int) -> np.float32:
        known = self._norms.get(tensor)
        if known is None:
            chunks = self._part.chunks(tensor)
            missing = [index for index in chunks if index not in self._sums]
            for index, sums in zip(missing, spread(self._squares, missing, 4 * self._chunk), strict=True):
                self._sums[index] = sums
            total = 0.0
            for index in chunks:
                place = next(k for k, piece in enumerate(self._part.pieces(index)) if piece.tensor == tensor)
                total += self._sums[index][place]
            norm = math.sqrt(total)
            known = self._norms[tensor] = np.float32(norm if norm >= LEAST else 0.0)
        return known

    def _squares(self, index: int) -> list[float]:
        values = self._sent(index)
        return [squares(values[piece.place]) for piece in self._part.pieces(index)]


# --- what a reducer does --------------------------------------------------------------------------------------------


class Directions:
    """The contributions to one part, as its reducer adds them: directions, each weighted, and the norms beside them.

    A norm that is too small would let its owner's direction outweigh all others, so what comes of a tensor must not be
    longer than was stated; and where all of a tensor comes to this reducer, not shorter. What a member sends of a
    tensor to other reducers is not seen here: by understating it can gain the root of their number.
    """

    def __init__(self, part: Part, codec: Codec) -> None:
        self._part = part
        self._codec = codec
        self._energy: dict[tuple[int, int], tuple[float, int]] = {}
        """By member and tensor: the squares of what came of it, and of how many chunks."""
        self._norms: dict[int, dict[int, Floats]] = {}
        """By chunk and member: the norms that it stated."""

    def add(self, member: int, index: int, data: BytesLike, weight: float, into: Floats) -> None:
        """Add a contribution to a chunk. Raises :class:`PeerMisbehaved`, with ``into`` untouched, for what no honest
        member sends."""
        pieces = self._part.pieces(index)
        norms, payload = split(data, len(pieces))
        values = np.empty(into.size, np.float32)
        self._codec.decode(payload, values.size, values)
        for piece, norm in zip(pieces, norms, strict=True):
            self._measure(member, piece, float(norm), values[piece.place])
        normalise(values, pieces, norms)
        values *= np.float32(weight)
        into += values
        self._norms.setdefault(index, {})[member] = norms

    def _measure(self, member: int, piece: Piece, norm: float, values: Floats) -> None:
        key, stated = (member, piece.tensor), norm * norm
        found, count = self._energy.get(key, (0.0, 0))
        found, count = found + squares(values), count + 1
        self._energy[key] = (found, count)
        if found > max(stated, LEAST * LEAST) * (1 + SLACK):
            raise PeerMisbehaved(f"tensor {piece.tensor} is longer than the norm {norm:.3g} that was stated for it")
        if count == len(self._part.chunks(piece.tensor)) and found < stated * (1 - SLACK):
            raise PeerMisbehaved(f"tensor {piece.tensor} is shorter than the norm {norm:.3g} that was stated for it")

    def norms(self, index: int, inside: Sequence[int]) -> bytes:
        """The norms that stand in an averaged chunk; they are forgotten here."""
        stated = self._norms.pop(index, {})
        rows = [stated[member] for member in inside]
        return np.stack(rows, axis=1).astype("<f4").tobytes() if rows else b""


def normalise(values: Floats, pieces: Sequence[Piece], norms: Floats) -> None:
    """Each piece over the norm of its tensor, in place; zeros where that is 0. What is in no piece stays."""
    for piece, norm in zip(pieces, norms, strict=True):
        values[piece.place] *= np.float32(1) / norm if norm else np.float32(0)


def split(data: BytesLike, pieces: int) -> tuple[Floats, memoryview]:
    """The norms before a contribution, and its payload. Raises :class:`PeerMisbehaved`."""
    view = memoryview(data)
    if view.nbytes < pieces * NORM_BYTES:
        raise PeerMisbehaved(f"a contribution of {view.nbytes} bytes, which has {pieces} norms")
    return read(view[: pieces * NORM_BYTES]), view[pieces * NORM_BYTES :]


def read(data: BytesLike) -> Floats:
    """Norms as they were sent. Raises :class:`PeerMisbehaved` for one that is negative, not finite, or none that a
    tensor can have."""
    norms = np.frombuffer(data, "<f4").astype(np.float32)
    good = (norms == 0) & ~np.signbit(norms) | (norms >= LEAST) & (norms <= MOST)
    if not good.all():
        raise PeerMisbehaved(f"a norm of {norms[~good][0]}: expected 0, or {LEAST:.3g} to {MOST:.3g}")
    return norms


# --- what everybody does --------------------------------------------------------------------------------------------


def bounded(norms: Sequence[float]) -> list[float]:
    """Norms of one tensor, each at most a hundred times the largest of the others, unless these are all 0."""
    if len(norms) < 2:
        return list(norms)
    second, largest = sorted(norms)[-2:]
    found = []
    for norm in norms:
        others = second if norm == largest else largest
        found.append(min(norm, TIMES * others) if others else norm)
    return found


def outsized(norms: Sequence[float], steps: Sequence[int]) -> dict[int, float]:
    """Of a piece's contributors, by number, those whose norm :func:`bounded` cuts down, and how many times the largest
    of the others it is. Not who has made so many more inner steps than these: for each step, too, it must be as far
    above all others."""
    found: dict[int, float] = {}
    if len(norms) < 3:
        return found  # of two that differ nothing says which is wrong
    paces = [norm / max(count, 1) for norm, count in zip(norms, steps, strict=True)]
    for number, (norm, kept) in enumerate(zip(norms, bounded(norms), strict=True)):
        if kept < norm and paces[number] > TIMES * max(paces[:number] + paces[number + 1 :]):
            found[number] = TIMES * norm / kept
    return found


def radius(weights: Sequence[int], norms: Sequence[float]) -> float:
    """The mean of the norms of a piece's contributors, by weight."""
    total, whole = 0.0, 0.0
    for weight, norm in zip(weights, bounded(norms), strict=True):
        total += float(weight) * norm
        whole += float(weight)
    return total / whole


def scales(part: Part, found: Sequence[tuple[Sequence[float], Sequence[float]] | None]) -> list[tuple[np.float32, ...]]:
    """By which number each piece of the averaged directions is to be multiplied, chunk by chunk.

    found: for each chunk the sums of the squares of its pieces, and their mean norms (:func:`radius`); None where
    nobody contributed.
    """
    lengths: dict[int, float] = {}
    present: dict[int, int] = {}
    for index, one in enumerate(found):
        if one is not None:
            for piece, sums in zip(part.pieces(index), one[0], strict=True):
                lengths[piece.tensor] = lengths.get(piece.tensor, 0.0) + sums
                present[piece.tensor] = present.get(piece.tensor, 0) + piece.place.stop - piece.place.start
    factors: dict[int, float] = {}
    for tensor, length in lengths.items():
        # Where a part of the tensor was not averaged, the rest is as long as its share of the elements lets expect.
        share = math.sqrt(present[tensor] / part.radial.sizes[tensor])
        factors[tensor] = share / max(math.sqrt(length), share * SHORTEST)
    result: list[tuple[np.float32, ...]] = []
    for index, one in enumerate(found):
        pieces = part.pieces(index) if one is not None else ()
        mean = one[1] if one is not None else ()
        result.append(tuple(np.float32(n * factors[p.tensor]) for p, n in zip(pieces, mean, strict=True)))
    return result
