"""The parent's side of encoding on the trainer's device, and whether a run allows for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from atoll.protocol import encoder as protocol
from atoll.protocol.codecs import get_codec
from atoll.protocol.errors import ConfigError, ResourceError
from atoll.protocol.fragments import make_layout
from atoll.protocol.island import Snapshot
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.manifest import Manifest

from .channel import Coding, Commit, Encode, Encoded, Hold, Moved, Piece, Place, Read

if TYPE_CHECKING:
    from .trainer import TrainerProcess

Floats = NDArray[np.float32]
SUPPORTED = ("int8", "int4", "sparse", "float16", "float32")
"""As :data:`.codecs_torch.SUPPORTED`, known without importing torch."""
ENCODE_TIMEOUT = 30.0
"""Seconds for encoding a fragment beside training, and those of ``SLOWEST``; a child that takes longer hangs, and is
ended."""
SLOWEST = 5e6
"""Parameters a second that any device encodes, or takes over with a commit: a core or two that others use as well."""
MAX_FAILURES = 2
"""Failures to encode in a row, for other reasons than memory, after which the host does it."""
READ_TIMEOUT = 10.0
"""Seconds for one window full of what goes to the disk."""


def coding_of(manifest: Manifest, encode: str, device: str) -> tuple[Coding | None, str]:
    """How a node encodes on its device, None for the host; and what to say about it, if anything.

    encode: auto, host or device (:class:`.options.NodeOptions`). Raises :class:`ConfigError` where ``device`` is asked
    for and the run does not allow for it.
    """
    if encode == "host" or (encode == "auto" and device == "cpu"):
        return None, ""
    codec, rules = manifest.codec, manifest.round
    why = ""
    if codec.name not in SUPPORTED:
        why = f"the codec {codec.name} is only encoded on the host ({', '.join(SUPPORTED)} are on both)"
    elif rules.overlap and rules.merge in ("eager", "delay"):
        why = f'with round.merge = "{rules.merge}" training goes on from a point that only the host knows'
    elif rules.fragments > 1 and rules.overlap * rules.fragments > rules.inner_steps:
        why = "several rounds may be in flight at once, and a device keeps what one of them froze"
    if why and encode == "device":
        raise ConfigError(f"--encode device: {why}; use --encode auto or host")
    if why:
        return None, why
    lossy = not get_codec(codec.name).lossless and codec.error_feedback > 0
    layers = [list(layer) for layer in manifest.state.layers]
    decay = codec.error_feedback if lossy else None
    return Coding(encode == "device", codec.name, decay, manifest.state.chunk, layers, rules.packing), ""


def encoded_bytes(parameters: int, fragments: int, coding: Coding) -> int:
    """Bytes of the largest fragment's encoded contribution."""
    layout, codec = layout_of(parameters, fragments, coding), get_codec(coding.codec)
    parts = map(layout.fragment, range(layout.fragments))
    return max(sum(codec.encoded_size(part.size(i)) for i in range(part.count)) for part in parts)


def layout_of(parameters: int, fragments: int, coding: Coding) -> ChunkLayout:
    """How the parameters are cut."""
    return make_layout(parameters, coding.chunk, coding.layers, fragments, coding.packing)


class TrainerEncoder(protocol.Encoder):
    """Encoding by a :class:`.trainer.TrainerProcess`, as long as its children do it."""

    def __init__(self, trainer: TrainerProcess) -> None:
        self._trainer = trainer
        setup = trainer._setup
        assert setup.coding is not None
        self._codec = get_codec(setup.coding.codec)
        self._layout = layout_of(setup.parameters, setup.fragments, setup.coding)
        self._waiting: dict[int, asyncio.Future[Encoded | Piece]] = {}
        self._window = asyncio.Lock()
        """Held while something is fetched through the window."""
        self._failures = 0
        """Of encoding, in a row."""

    async def begin(self, params: Floats, *, commit_id: bytes, residual: Floats | None, theta: Floats | None) -> None:
        await self._place("params", params, commit_id)
        try:
            if residual is not None:
                await self._place("residual", residual, commit_id)
            if theta is not None:
                await self._place("theta", theta, commit_id)
        finally:
            # What the next child would begin with.
            await self._write(params, [slice(0, len(params))])

    async def encode(self, fragment: int, share: float = 1.0) -> protocol.Encoded | None:
        trainer = self._trainer
        freeze, life = trainer._froze
        if life != trainer.life:
            raise ResourceError("the trainer has died since it was frozen")
        limit = ENCODE_TIMEOUT + self._layout.fragment(fragment).parameters / SLOWEST
        answer = await self._serve(Encode(trainer._number(), freeze, fragment, share), limit)
        assert isinstance(answer, Encoded)
        if answer.failed:
            error = ResourceError(f"the trainer could not encode on its device: {answer.failed}")
            self._failures += 1
            if answer.crowded or self._failures >= MAX_FAILURES:
                # Else the peer would have nothing to bring, round after round.
                trainer._to_host = True
                await trainer._end_child(error)
            raise error
        self._failures = 0
        if not answer.sound:
            return None
        part, memory = self._layout.fragment(fragment), trainer._memory.encoded
        ends = list(accumulate((self._codec.encoded_size(part.size(i)) for i in range(part.count)), initial=0))

        def payload(index: int) -> bytes:
            # A copy: what a stream still holds must not change when the next round is encoded.
            return memory[ends[index] : ends[index + 1]].tobytes()

        return protocol.Encoded(fragment, payload, answer.moved, freeze, life)

    def hold(self, wanted: Sequence[protocol.Encoded]) -> None:
        life = self._trainer.life
        self._trainer._tell(Hold([one.freeze for one in wanted if one.life == life]))

    async def commit(
        self, outcome: protocol.Outcome, params: Floats, *, spent: float, of: Snapshot | None, outer_step: int,
        ahead: int | None,
    ) -> tuple[Snapshot, bool]:  # fmt: skip
        trainer, source = self._trainer, outcome.source
        # Before anything else: whoever begins a new life from here on begins it there.
        await self._write(params, self._layout.fragment(outcome.fragment).stretches())
        trainer._outer_step = outer_step
        order = trainer._spend(trainer._number(), spent, of)
        until = trainer._counters().steps + ahead if ahead is not None else None
        trainer._limit(until, trainer._counters().steps)
        trainer._training = True
        message = Commit(
            order.number, outcome.fragment, list(outcome.mine), list(outcome.others),
            source.freeze if source is not None else None, outcome.lost, outcome.dropped, outcome.rule.merge.value,
            outcome.rule.alpha, outcome.commit_id.hex(), spent, order.of, outer_step, until,
        )  # fmt: skip
        try:
            answer = await trainer._ask(message, self._layout.fragment(outcome.fragment).parameters / SLOWEST)
        except ResourceError:
            trainer._training = False
            raise
        assert isinstance(answer, Moved)
        if not answer.known:
            trainer._limit(None, 0)
        moved = Snapshot(answer.steps, answer.tokens, answer.units, trainer._leased(), answer.stopped)
        return moved, answer.known

    async def residual(self, commit_id: bytes) -> Floats | None:
        coding = self._trainer._setup.coding
        if coding is None or coding.decay is None:
            return None
        return await self._read("residual", commit_id.hex())

    async def theta(self) -> Floats:
        values = await self._read("theta", None)
        assert values is not None
        if self._trainer._froze[1] != self._trainer.life:
            # The next child has θ only once it is told to go on.
            raise ResourceError("the trainer has died since it was frozen")
        return values

    # --- messages -------------------------------------------------------------------------------------------------

    def answered(self, message: Encoded | Piece) -> None:
        """The child has answered."""
        waiting = self._waiting.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def died(self, failure: ResourceError) -> None:
        """The child has ended: nothing will be answered any more."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(failure)

    async def _serve(self, order: Encode | Read, limit: float) -> Encoded | Piece:
        """Send, and wait for the answer. Raises :class:`ResourceError` when there is no child, it dies, or it does not
        answer in time; what was to be encoded is then not to be had, and it is ended."""
        trainer = self._trainer
        if trainer._failure is not None:
            raise ResourceError(f"there is no trainer: {trainer._failure}")
        waiting = self._waiting[order.number] = asyncio.get_running_loop().create_future()
        trainer._tell(order)
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), limit)
        except TimeoutError:
            what = "encode a contribution" if isinstance(order, Encode) else "give what goes to the disk"
            error = ResourceError(f"the trainer did not {what} within {limit:.0f} s")
            del self._waiting[order.number]  # nobody waits for it any more
            if isinstance(order, Encode):
                await trainer._end_child(error, limit, limit)
            raise error from None
        finally:
            self._waiting.pop(order.number, None)

    async def _place(self, what: Literal["params", "theta", "residual"], values: Floats, commit_id: bytes) -> None:
        await self._write(values, [slice(0, len(values))])
        order = Place(self._trainer._number(), what, commit_id.hex())
        await self._trainer._ask(order, len(values) / SLOWEST)

    async def _write(self, values: Floats, parts: Sequence[slice]) -> None:
        """Into what the next child would begin with."""
        local = self._trainer.local

        def work() -> None:
            for part in parts:
                local[part] = values[part]

        async with self._trainer._writing:
            await asyncio.to_thread(work)

    async def _read(self, what: Literal["theta", "residual"], head: str | None) -> Floats | None:
        """A vector, through the window; None when it is, or becomes meanwhile, that of another head. Raises
        :class:`ResourceError` when the child cannot give it."""
        trainer, window = self._trainer, self._trainer._memory.window
        values = np.empty(trainer._setup.parameters, np.float32)
        async with self._window:
            for start in range(0, len(values), len(window)):
                stop = min(start + len(window), len(values))
                piece = await self._serve(Read(trainer._number(), what, start, stop), READ_TIMEOUT)
                assert isinstance(piece, Piece)
                if piece.failed:
                    raise ResourceError(f"the trainer could not read what goes to the disk: {piece.failed}")
                if head is not None and piece.head != head:
                    return None
                values[start:stop] = window[: stop - start]
        return values
