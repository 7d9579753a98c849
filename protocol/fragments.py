"""Fragments: parts of the model that have rounds of their own, so that the peak of the traffic falls by their number.

Streaming DiLoCo (arXiv 2501.18512) sends one fragment after the other, each every H inner steps at an offset of its
own, and takes layers in strides; Decoupled DiLoCo (arXiv 2604.21428) packs tensors into fragments of even size. A
fragment is made of whole tensors. Pure functions: every peer must come to the same answer (docs/protocol.md).

:class:`Accounts` keeps what a peer has done since each fragment's last contribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from .island import Progress, Snapshot
from .layout import ChunkLayout, FragmentedLayout
from .lowrank import LowRankLayout, Piece, cut
from .overlap import left

Packing = Literal["balanced", "strided"]
Layers = Sequence[Sequence[int]]
"""Elements of the tensors of each layer, in the order in which they lie in the flat vector; what stands before and
behind the layers proper (embedding, last norm, head) counts as one each."""


def pack(layers: Layers, fragments: int, packing: Packing) -> list[int]:
    """The fragment of each tensor, in flat order.

    ``strided``: layer i goes to fragment i modulo P. ``balanced``: tensors, the largest first and of equal ones the
    earlier, go each to the fragment that is the smallest so far, of equal ones to the lower number; then the fragments
    are numbered by their first tensors.

    Raises :class:`ValueError` for fewer tensors (or layers) than fragments, or sizes below 1.
    """
    sizes = list(chain.from_iterable(layers))
    if fragments < 1 or min(sizes, default=0) < 1:
        raise ValueError(f"expected fragments of tensors of at least one element, found {fragments} of {sizes}")
    most = len(sizes) if packing == "balanced" else sum(1 for layer in layers if layer)
    if fragments > most:
        raise ValueError(f"fragments = {fragments} exceeds the {most} {_UNITS[packing]} of the model")
    if packing == "strided":
        filled = [layer for layer in layers if layer]
        return [number % fragments for number, layer in enumerate(filled) for _ in layer]
    loads, chosen = [0] * fragments, [0] * len(sizes)
    for tensor in sorted(range(len(sizes)), key=lambda tensor: (-sizes[tensor], tensor)):
        least = loads.index(min(loads))
        chosen[tensor] = least
        loads[least] += sizes[tensor]
    numbers: dict[int, int] = {}
    for fragment in chosen:
        numbers.setdefault(fragment, len(numbers))
    return [numbers[fragment] for fragment in chosen]


_UNITS = {"balanced": "tensors", "strided": "layers"}


def make_layout(
    parameters: int, chunk: int, layers: Layers, fragments: int, packing: Packing, columns: Sequence[int] = (),
    rank: int = 0,
) -> ChunkLayout:  # fmt: skip
    """How a model of ``parameters`` elements is cut, for any number of fragments.

    With one fragment, every ``chunk`` elements. With several, each run of neighbouring tensors of one fragment by
    itself, every ``chunk`` elements from its beginning, its last chunk being shorter: so a chunk lies in one piece, and
    in one fragment. Chunks are numbered in flat order, those of a fragment in the same order.

    columns: of each tensor (of a vector all its elements), where matrices travel as factors of that ``rank``: chunks
    then begin and end with their rows (:func:`.lowrank.cut`), with one fragment too.

    Raises as :func:`pack`, and :class:`ValueError` when ``layers`` do not make so many elements, or no whole number of
    rows.
    """
    if fragments == 1 and not rank:
        return ChunkLayout(parameters, chunk)
    sizes = list(chain.from_iterable(layers))
    if sum(sizes) != parameters:
        raise ValueError(f"layers of {sum(sizes)} elements do not make a model of {parameters}")
    if rank and (len(columns) != len(sizes) or any(size % width for size, width in zip(sizes, columns, strict=True))):
        raise ValueError(f"{len(columns)} numbers of columns do not fit {len(sizes)} tensors")
    spans: list[tuple[int, int]] = []
    pieces: list[tuple[Piece, ...]] = []
    members: list[list[int]] = [[] for _ in range(fragments)]
    chosen = pack(layers, fragments, packing)
    at = tensor = 0
    while tensor < len(sizes):
        first, stop, fragment = tensor, at, chosen[tensor]
        while tensor < len(sizes) and chosen[tensor] == fragment:
            stop += sizes[tensor]
            tensor += 1
        if rank:
            for inside in cut(sizes[first:tensor], columns[first:tensor], chunk):
                number, start = sum(map(len, pieces)), at
                found: list[Piece] = []
                for size, width in inside:
                    found.append(Piece(at - start, size // width, width, number + len(found)))
                    at += size
                pieces.append(tuple(found))
                members[fragment].append(len(spans))
                spans.append((start, at))
            continue
        for start in range(at, stop, chunk):
            members[fragment].append(len(spans))
            spans.append((start, min(start + chunk, stop)))
        at = stop
    if rank:
        return LowRankLayout(parameters, chunk, tuple(spans), tuple(map(tuple, members)), tuple(pieces), rank)
    return FragmentedLayout(parameters, chunk, tuple(spans), tuple(map(tuple, members)))


def early(fragment: int, due: int, fragments: int, inner_steps: int) -> int:
    """Inner steps by which a peer's first contribution to a fragment comes early, when ``due`` is the next fragment at
    the moment in which it begins: so that the rounds are spread over H steps from the first one on. The last in order
    is not early."""
    turn = (fragment - due) % fragments
    return inner_steps - (turn + 1) * inner_steps // fragments


@dataclass
class _Counts:
    steps: int = 0
    tokens: int = 0
    units: int = 0


class Accounts:
    """What one peer has done since its last contribution to each fragment: steps, tokens and sample units.

    The island has counters of its own (:class:`.island.Progress`), out of which every commit takes the share in which
    this peer's contribution was averaged. With one fragment they are the account. With more, they tell what was done
    since the last commit of any fragment; what was done before, and that fragment has not handed over, stands here.
    """

    def __init__(self, layout: ChunkLayout, inner_steps: int) -> None:
        self._layout = layout
        self.inner_steps = inner_steps
        """H, as it is in force."""
        self.clear(0)

    def clear(self, due: int) -> None:
        """All progress is gone, or there was none: begin anew, ``due`` being the fragment of the next round."""
        count = self._layout.fragments
        self._more = [_Counts() for _ in range(count)]
        self._ages = [0] * count
        self._short = [0] * count
        """Steps by which each contribution has been shortened."""
        self._before = [0] * count
        """Steps of it that were made before the fragment's last commit."""
        self._early = [early(fragment, due, count, self.inner_steps) for fragment in range(count)]

    def progress(self, of: Progress, fragment: int) -> Progress:
        """The island's progress, as it counts for one fragment."""
        more = self._more[fragment]
        if not (more.steps or more.tokens or more.units):
            return of
        # Below 0 by what an island that died had lost to this fragment already, and now to all.
        return Progress(
            max(of.steps + more.steps, 0), max(of.tokens + more.tokens, 0), max(of.units + more.units, 0), of.leased,
            of.step_time, of.loss, of.fields,
        )  # fmt: skip

    def snapshot(self, of: Snapshot, fragment: int) -> Snapshot:
        """The counters of a frozen island, as they count for one fragment."""
        more = self._more[fragment]
        return Snapshot(
            max(of.steps + more.steps, 0), max(of.tokens + more.tokens, 0), max(of.units + more.units, 0), of.leased,
            of.stopped,
        )  # fmt: skip

    def total(self, of: Snapshot, fragment: int) -> tuple[int, int, int]:
        """Steps, tokens and units of :meth:`snapshot`, below 0 where they are: no commit of another fragment changes
        what these are of a given moment."""
        more = self._more[fragment]
        return of.steps + more.steps, of.tokens + more.tokens, of.units + more.units

    def wanting(self, steps: int, fragment: int) -> int:
        """Inner steps until this peer has done its part for a round of that fragment: H since its last contribution,
        and fewer for the first. steps: those that it has done, as they count for that fragment."""
        return max(self.inner_steps - self._early[fragment] - steps, 0)

    def age(self, fragment: int) -> int:
        """Rounds of a fragment that have missed what this peer has for it (:mod:`.stale`)."""
        return self._ages[fragment]

    def length(self, steps: int, fragment: int) -> tuple[int, int]:
        """Of a contribution of so many steps: the length of its Δ, in steps, and those since the fragment's last
        commit (:meth:`.stale.Stale.share`)."""
        return max(steps - self._short[fragment], 0), max(steps - self._before[fragment], 0)

    def shorten(self, steps: int, fragment: int, share: float) -> None:
        """The Δ of a contribution of so many steps has been shortened to that share."""
        length, _ = self.length(steps, fragment)
        self._short[fragment] = steps - round(length * share)

    def grow_old(self, fragment: int, missed: bool) -> int:
        """A round of that fragment is over, and has missed it or not; its age then."""
        self._ages[fragment] = self._ages[fragment] + 1 if missed else 0
        return self._ages[fragment]

    def unmerged(self, of: Progress) -> int:
        """Tokens that have not been averaged: each in the share of the model in which it has not."""
        shares = [self._layout.fragment(f).parameters / self._layout.parameters for f in range(len(self._more))]
        return round(sum(share * self.progress(of, number).tokens for number, share in enumerate(shares)))

    def commit(
        self, fragment: int, share: float, now: Snapshot, of: Snapshot | None, *, overwrite: bool = False,
        total: tuple[int, int, int] | None = None, leases: bool = False,
    ) -> None:  # fmt: skip
        """A commit has averaged a share (0 … 1) of this peer's contribution to a fragment.

        now: the island's counters at the moment in which the commit reaches it. of: those that the share is of, where
        steps have been made since (see :func:`.overlap.left`). The island takes the same share out of its own counters;
        for the other fragments that moves to here. overwrite: the steps made since are lost to this fragment, in the
        same share. They stay in the island's counters, for it may die before what it has learnt is written down.
        total: what :meth:`total` was at the freeze that ``of`` tells of; it is what counts where other fragments have
        been committed in between. leases: it granted leases alone.
        """
        for number, more in enumerate(self._more):
            for at, name in enumerate(("steps", "tokens", "units")):
                counted, since = getattr(now, name), getattr(of, name) if of is not None else None
                kept, before = left(counted, share, since), getattr(more, name)
                after = before + counted
                if number == fragment:
                    handed = None
                    if since is not None and not overwrite:
                        handed = before + since if total is None else total[at]
                    after = left(after, share, handed)
                setattr(more, name, after - kept)
        if share > 0:
            self._early[fragment] = 0
        self._short[fragment] = left(self._short[fragment], share)
        if not leases:
            kept = left(now.steps, share, of.steps if of is not None else None)
            self._before[fragment] = kept + self._more[fragment].steps
