"""One peer's copy of the run: the global state at a head, its own residual, and how a commit changes both.

The rules are those of Decoupled DiLoCo's carry with error feedback (arXiv 2604.21428, 2506.21263), kept exact: an
inner step counts once, and a chunk that was not averaged is as if it had never been sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .averaged import check_all
from .codecs import MAX_MAGNITUDE, Codec
from .commits import START, Position, members_in, position_of
from .layout import ChunkLayout
from .manifest import Manifest
from .messages import Body
from .state import GlobalState
from .transport import Transport

Floats = NDArray[np.float32]


class Replica:
    """Global parameters g, outer momentum b, residual e, and the position in the chain that they belong to.

    Arrays are float32 with one element a model parameter. ``residual`` is None where nothing is contributed
    (observers, archives) and where the codec loses nothing.
    """

    def __init__(
        self, manifest: Manifest, layout: ChunkLayout, codec: Codec, state: GlobalState, position: Position = START,
        *, residual: Floats | None = None,
    ) -> None:  # fmt: skip
        self.manifest = manifest
        self.layout = layout
        self.codec = codec
        self.state = state
        self.position = position
        self.residual = residual
        self._digest: asyncio.Task[bytes] | None = None

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

    def contribution(self, index: int, theta: Floats) -> Floats:
        """x of one chunk: Δ + residual, Δ = g − θ. ``theta``: the frozen local parameters, all of them."""
        span = self.layout.span(index)
        x = self.state.params[span] - theta[span]
        if self.residual is not None:
            # β < 1 lets old quantization errors fade (arXiv 2508.15706).
            decay = np.float32(self.manifest.codec.error_feedback)
            x += self.residual[span] if decay == 1 else decay * self.residual[span]
        return x

    def encode(self, index: int, theta: Floats) -> bytes:
        """What is sent of one chunk; the same bytes each time while nothing has been committed."""
        return bytes(self.codec.encode(self.contribution(index, theta)))

    def sendable(self, theta: Floats) -> bool:
        """Whether the codec takes every element of x: finite, and of a sane magnitude."""
        for index in range(self.layout.count):
            # The largest magnitude is NaN or infinite when any element is.
            if not float(np.abs(self.contribution(index, theta)).max(initial=0.0)) <= MAX_MAGNITUDE:
                return False
        return True

    # --- applying ------------------------------------------------------------------------------------------------

    def means(self, body: Body, chunks: Sequence[bytes]) -> list[Floats | None]:
        """Decode a commit's averaged chunks; None where nobody contributed. Raises PeerMisbehaved."""
        return check_all(body, chunks, self.layout, self.codec)

    def apply(
        self,
        body: Body,
        commit_id: bytes,
        chunks: Sequence[bytes],
        *,
        me: int | None = None,
        frozen: Floats | None = None,
        local: Floats | None = None,
    ) -> float:
        """Take one outer step; CPU-heavy, to be run off the event loop.

        me, frozen: this peer's place in the roster and its θ at the freeze, when it contributed. Where its chunk is
        in the average, the frozen Δ leaves ``local`` and the codec's error stays behind as residual; elsewhere both
        stay as they were.
        local: the peer's θ now; it moves with the global parameters. The same array as ``frozen`` when the peer
        has paused since the freeze.
        Returns the share (0 … 1) of the fragment in which this peer's contribution was averaged.
        """
        means = self.means(body, chunks)
        inside = [False] * self.layout.count
        if me is not None and frozen is not None:
            for index, entry in enumerate(body.chunks):
                inside[index] = me in members_in(entry.contributors, len(body.seal.members))
                if inside[index] and self.residual is not None:
                    x = self.contribution(index, frozen)
                    decoded = np.empty_like(x)
                    self.codec.decode(memoryview(self.codec.encode(x)), len(x), decoded)
                    np.subtract(x, decoded, out=self.residual[self.layout.span(index)])
        before = self.state.params.copy() if local is not None and chunks else None
        outer = self.manifest.outer
        if chunks:
            self.state.apply(means, lr=outer.lr, mu=outer.momentum, kind=outer.optimizer)
        averaged = 0
        for index in range(self.layout.count if chunks else 0):
            span = self.layout.span(index)
            new = self.state.params[span]
            averaged += len(new) * inside[index]
            if local is None or before is None:
                continue
            if not inside[index]:
                local[span] += new - before[span]
            elif local is frozen:
                local[span] = new
            else:
                assert frozen is not None
                local[span] = new + (local[span] - frozen[span])
        self.position = position_of(body, commit_id)
        self._digest = None
        return averaged / self.layout.parameters

    def adopt(self, state: GlobalState, position: Position) -> None:
        """Go over to another head's state (a re-synchronisation): the residual is void with it."""
        self.state = state
        self.position = position
        self._digest = None
        if self.residual is not None:
            self.residual.fill(0)
