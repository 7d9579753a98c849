"""One peer's copy of the run: the global state at a head, its own residual, and how a commit changes both.

The rules are those of Decoupled DiLoCo's carry with error feedback (arXiv 2604.21428, 2506.21263), kept exact: an
inner step counts once, and a chunk that was not averaged is as if it had never been sent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .averaged import Averaged, check_all
from .codecs import MAX_MAGNITUDE, Codec, averages_codec
from .commits import START, Position, estimates, members_in, position_of
from .digest import BytesLike
from .encoder import Encoded
from .island import Run
from .kernels import frozen, subnormals_on, table
from .layout import ChunkLayout
from .lowrank import Factors, LowRankLayout, estimate
from .manifest import Manifest
from .messages import Body
from .outer import check_outer
from .overlap import Overlap, move
from .radial import Norms, radius, scales, squares
from .state import GlobalState, spread
from .transport import Transport

Floats = NDArray[np.float32]
CARRY = Overlap()


@dataclass(frozen=True)
class Applied:
    """What a commit was to this peer."""

    share: float
    """Of the fragment, in which this peer's contribution was averaged, 0 … 1."""
    runs: list[Run]
    """How the local parameters move, where a shift was asked for."""


class Replica:
    """Global parameters g, outer momentum b, residual e, and the position in the chain that they belong to.

    Arrays are float32 with one element a model parameter. ``residual`` is None where nothing is contributed
    (observers, archives) and where the codec loses nothing.
    """

    def __init__(
        self, manifest: Manifest, layout: ChunkLayout, codec: Codec, state: GlobalState, position: Position = START,
        *, residual: Floats | None = None, rank: int | None = None,
    ) -> None:  # fmt: skip
        self.manifest = manifest
        self.layout = layout
        self.codec = codec
        self.averages = averages_codec(codec.name)
        """What averages travel in."""
        self.state = state
        self.position = position
        self.residual = residual
        self._factors = Factors(layout) if isinstance(layout, LowRankLayout) else None
        self.rank = rank_in_force(manifest, layout, state, position) if rank is None else rank
        """Of the factors in the next round, where it is estimated anew from time to time; else 0."""
        self._digest: asyncio.Task[bytes] | None = None
        self._memory = threading.local()

    @property
    def params(self) -> Floats:
        return self.state.params

    # --- digest --------------------------------------------------------------------------------------------------

    def start_digest(self, transport: Transport) -> asyncio.Task[bytes]:
        """Hash what changed, off the event loop; the task's result is the state digest at the head."""
        if self._digest is None:
            self._digest = asyncio.get_running_loop().create_task(transport.offload(self.state.digest), name="digest")
        return self._digest

    async def digest(self, transport: Transport) -> bytes:
        """State digest at the head, waiting for it if it is not known yet."""
        return await asyncio.shield(self.start_digest(transport))

    # --- contributing --------------------------------------------------------------------------------------------

    def contribution(self, index: int, theta: Floats, out: Floats | None = None, *, fragment: int = 0) -> Floats:
        """x of one chunk of a fragment: Δ + residual, Δ = g − θ. ``theta``: the frozen local parameters, all of them.

        out: float32, as long as the chunk, to be written and returned instead of fresh memory.
        """
        span = self.layout.fragment(fragment).span(index)
        x = np.empty(span.stop - span.start, np.float32) if out is None else out
        params, local = self.state.params[span], theta[span]
        if self.residual is None:
            return np.subtract(params, local, out=x)
        # β < 1 lets old quantization errors fade (arXiv 2508.15706).
        decay = np.float32(self.manifest.codec.error_feedback)
        subnormals_on()
        table().contribution(frozen(params), frozen(local), frozen(self.residual[span]), decay, x)
        return x

    def encode(self, index: int, theta: Floats, fragment: int = 0) -> bytearray | memoryview:
        """What is sent of one chunk; the same bytes each time while nothing has been committed."""
        scratch = self._scratch(self.layout.fragment(fragment).size(index))
        return self._packed(fragment, index, self.rank, self.contribution(index, theta, scratch, fragment=fragment))

    def _packed(self, fragment: int, index: int, rank: int, x: Floats) -> bytearray | memoryview:
        """The payload of a chunk of a fragment."""
        if self._factors is None:
            return self.codec.encode(x)
        place = self.layout.place(fragment, index)
        return self.codec.encode(self._factors.project(place, x, self.state.momentum, rank))

    def _unpacked(self, codec: Codec, fragment: int, index: int, rank: int, payload: BytesLike, out: Floats) -> None:
        """The elements of a chunk of a fragment, from a payload that is valid."""
        if self._factors is None:
            codec.decode(payload, len(out), out)
            return
        place = self.layout.place(fragment, index)
        values = np.empty(self.layout.wire(fragment, rank).size(index), np.float32)
        codec.decode(payload, len(values), values)
        self._factors.expand(place, values, self.state.momentum, out, rank)

    def _forget_factors(self) -> None:
        """The momentum has changed."""
        if isinstance(self.layout, LowRankLayout):
            self._factors = Factors(self.layout)

    def sender(self, theta: Floats | Encoded, fragment: int = 0) -> Callable[[int], BytesLike]:
        """What gives a contribution chunk by chunk, as it is sent: by :meth:`encode`, or as the island has encoded it,
        and after the norms of its tensors where they are merged by norms and directions."""
        part = self.manifest.merging.of(fragment).part

        def payload(index: int) -> BytesLike:
            return theta.payload(index) if isinstance(theta, Encoded) else self.encode(index, theta, fragment)

        if part is None:
            return payload

        def decoded(index: int) -> Floats:
            sent = np.empty(self.layout.fragment(fragment).size(index), np.float32)
            self.codec.decode(payload(index), len(sent), sent)
            return sent

        norms = Norms(part, decoded, self.layout.chunk)
        return lambda index: norms.of(index) + payload(index)

    def _scratch(self, size: int) -> Floats:
        """Memory of this thread for one chunk: fresh pages for each would cost as much time as the encoding."""
        memory: Floats | None = getattr(self._memory, "chunk", None)
        if memory is None:
            memory = self._memory.chunk = np.empty(min(self.layout.chunk, self.layout.parameters), np.float32)
        return memory[:size]

    def sendable(self, theta: Floats, fragment: int = 0) -> bool:
        """Whether the codec takes every element of a fragment's x: finite, and of a sane magnitude."""
        part = self.layout.fragment(fragment)
        for index in range(part.count):
            # The largest magnitude is NaN or infinite when any element is.
            x = self.contribution(index, theta, self._scratch(part.size(index)), fragment=fragment)
            if not float(np.abs(x, out=x).max(initial=0.0)) <= MAX_MAGNITUDE:
                return False
        return True

    # --- applying ------------------------------------------------------------------------------------------------

    def means(self, body: Body, chunks: Sequence[bytes]) -> list[Floats | None]:
        """What a commit's averaged chunks come to, as they travel; None where nobody contributed. Raises
        PeerMisbehaved."""
        means: list[Floats | None] = []
        wire = self.layout.wire(body.fragment, body.seal.rank)
        averages = check_all(body, chunks, self.layout, self.codec, self.manifest.merging)
        lengthen = self._lengthen(body, averages)
        for index, averaged in enumerate(averages):
            mean = np.empty(wire.size(index), np.float32) if averaged.weight else None
            if mean is not None:
                self.averages.decode(averaged.payload, len(mean), mean)
                lengthen(index, mean)
            means.append(mean)
        return means

    def _lengthen(self, body: Body, averages: Sequence[Averaged]) -> Callable[[int, Floats], None]:
        """What makes of the directions in a decoded chunk, in place, what is merged (:mod:`.radial`); nothing where
        means are averaged. CPU-heavy."""
        merging = self.manifest.merging.of(body.fragment)
        part = merging.part
        if part is None:
            return lambda index, values: None
        layout, members = self.layout.fragment(body.fragment), body.seal.members

        def measure(index: int) -> tuple[list[float], list[float]] | None:
            averaged = averages[index]
            if not averaged.weight:
                return None
            values = self._scratch(layout.size(index))
            self.averages.decode(averaged.payload, len(values), values)
            weights = [merging.weight(members[i]) for i in members_in(averaged.contributors, len(members))]
            sums = [squares(values[piece.place]) for piece in part.pieces(index)]
            return sums, [radius(weights, list(map(float, norms))) for norms in averaged.norms]

        factors = scales(part, spread(measure, range(len(averages)), 4 * self.layout.chunk))

        def lengthen(index: int, values: Floats) -> None:
            for piece, factor in zip(part.pieces(index), factors[index], strict=True):
                values[piece.place] *= factor

        return lengthen

    def apply(
        self,
        body: Body,
        commit_id: bytes,
        chunks: Sequence[bytes],
        *,
        me: int | None = None,
        frozen: Floats | None = None,
        local: Floats | None = None,
        shift: Floats | None = None,
        rule: Overlap = CARRY,
        checked: Sequence[Averaged] | None = None,
    ) -> Applied:
        """Take one outer step of the commit's fragment; CPU-heavy, to be run off the event loop. Nothing of the other
        fragments is looked at or changed.

        me, frozen: this peer's place in the roster and its θ at the freeze, when it took part. Where its chunk is
        in the average, the frozen Δ leaves the local parameters and the codec's error stays behind as residual;
        elsewhere both stay as they were.
        local: the peer's θ now, written in place; it moves with the global parameters. The same array as ``frozen``
        when the peer has paused since the freeze.
        shift: instead of ``local``, while training goes on: where to write how θ moves, by ``rule``; may be the array
        ``frozen``, whose use is over with the commit.
        checked: what :func:`.averaged.check_all` has said of these chunks, if it was asked.
        """
        # Everything is checked before the first write; then chunk after chunk, so that it takes no memory to speak of.
        averages = checked
        if averages is None:
            averages = check_all(body, chunks, self.layout, self.codec, self.manifest.merging)
        lengthen = self._lengthen(body, averages)
        outer = self.manifest.outer
        check_outer(outer.lr, outer.momentum, outer.optimizer)
        members = len(body.seal.members)
        fragment, part = body.fragment, self.layout.fragment(body.fragment)
        rank = body.seal.rank
        # The period of a delayed momentum is one of steps of this fragment.
        phase = (body.outer_step - 1) // self.layout.fragments % outer.period

        def one(index: int) -> tuple[int, Run]:
            """Apply one chunk; the number of its elements when this peer's contribution is in it, and how θ moves."""
            averaged = averages[index]
            mine = me is not None and frozen is not None and me in members_in(averaged.contributors, members)
            span = part.span(index)
            run = Run(span.start, span.stop, 1.0)
            if not averaged.weight and (shift is None or not rule.departs):
                if shift is not None:
                    shift[span] = 0
                return 0, run
            scratch = self._scratch(span.stop - span.start)
            if mine and self.residual is not None:
                assert frozen is not None
                x = self.contribution(index, frozen, scratch, fragment=fragment)
                sent = self._packed(fragment, index, rank, x)
                # The scratch holds x, so the decoded values go where the difference will be.
                residual = self.residual[span]
                self._unpacked(self.codec, fragment, index, rank, sent, residual)
                np.subtract(x, residual, out=residual)
            new = self.state.params[span]
            start = old = new
            if frozen is not None and frozen is not local:
                start = frozen[span]
                if rule.departs:
                    start = rule.start(start, new, self.state.momentum[span], np.empty_like(start))
            if not mine and (local is not None or shift is not None):
                old = new.copy()
            if averaged.weight:
                self._unpacked(self.averages, fragment, index, rank, averaged.payload, scratch)
                lengthen(index, scratch)
                self.state.step(
                    self.layout.place(fragment, index), scratch, lr=outer.lr, mu=outer.momentum, kind=outer.optimizer,
                    phase=phase, period=outer.period,
                )  # fmt: skip
            if local is None and shift is None:
                return len(new) if mine else 0, run
            if mine and local is not None and local is frozen:
                local[span] = new
                return len(new), run
            # The mean has been used, so its memory is free.
            out = shift[span] if shift is not None else scratch
            if mine:
                keep = rule.committed(start, new, out)
            elif frozen is None or frozen is local:
                keep = CARRY.left_out(old, old, old, new, out)
            else:
                keep = rule.left_out(frozen[span], start, old, new, out)
            if local is not None:
                move(local[span], keep, out)
            return len(new) if mine else 0, Run(span.start, span.stop, keep)

        done = spread(one, range(len(chunks)), 4 * self.layout.chunk, spare=shift is not None)
        self._forget_factors()
        # In this order: a round that is in flight beside this one's may ask for the digest at any moment.
        self._digest = None
        self.position = position_of(body, commit_id)
        self.rank = rank_in_force(self.manifest, self.layout, self.state, self.position)
        share = sum(size for size, _ in done) / part.parameters
        return Applied(share, _joined([run for _, run in done]) if shift is not None else [])

    def start(self, rule: Overlap, frozen: Floats, out: Floats, fragment: int = 0) -> None:
        """θ̃, what training goes on from while a round of that fragment is in flight on this head; CPU-heavy. ``out``
        stays as it is elsewhere."""
        part = self.layout.fragment(fragment)

        def one(index: int) -> None:
            span = part.span(index)
            rule.start(frozen[span], self.state.params[span], self.state.momentum[span], out[span])

        spread(one, range(part.count), 4 * self.layout.chunk)

    def abort(self, rule: Overlap, frozen: Floats, fragment: int = 0) -> list[Run]:
        """How θ moves when a round of that fragment ends without a commit: the shift is written into ``frozen``;
        CPU-heavy."""
        part = self.layout.fragment(fragment)

        def one(index: int) -> Run:
            span = part.span(index)
            mine = frozen[span]
            start = rule.start(mine, self.state.params[span], self.state.momentum[span], np.empty_like(mine))
            return Run(span.start, span.stop, rule.aborted(mine, start, mine))

        return _joined(spread(one, range(part.count), 4 * self.layout.chunk, spare=1))

    def adopt(self, state: GlobalState, position: Position, rank: int | None = None) -> None:
        """Go over to another head's state (a re-synchronisation): the residual is void with it. rank: what
        :func:`rank_in_force` says of them, if that is known."""
        self.state = state
        self.position = position
        self._digest = None
        self._forget_factors()
        self.rank = rank_in_force(self.manifest, self.layout, state, position) if rank is None else rank
        if self.residual is not None:
            self.residual.fill(0)


def rank_in_force(manifest: Manifest, layout: ChunkLayout, state: GlobalState, position: Position) -> int:
    """The rank of the factors in the rounds on a head, as its chain and its state say; 0 where it is the manifest's.
    CPU-heavy after a window."""
    codec, head = manifest.codec, position.head
    if not codec.window or not isinstance(layout, LowRankLayout):
        return 0
    if head.outer_step == 0:
        return codec.rank
    if estimates(head.outer_step, manifest, layout):
        return estimate(layout, state.momentum, codec.kept)
    return position.rank


def _joined(runs: list[Run]) -> list[Run]:
    """Neighbours with the same ``keep`` as one."""
    joined: list[Run] = []
    for run in runs:
        if joined and (joined[-1].stop, joined[-1].keep) == (run.start, run.keep):
            joined[-1] = Run(joined[-1].start, run.stop, run.keep)
        else:
            joined.append(run)
    return joined
