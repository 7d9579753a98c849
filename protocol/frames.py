"""Frames over segments: the :class:`Stream` of the libp2p transport.

A frame is a big-endian uint32 length and that many bytes. What is big is read straight into its own memory, piece
by piece, after its length was checked; only up to 64 KiB are ever read ahead. Below it :mod:`.segments` bounds what is
under way, and makes sure that what was sent arrives though the stream is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .errors import FrameTooLarge, StreamClosed
from .pipes import Pipe
from .segments import Segments
from .transport import DEFAULT_FRAME_LIMIT, PeerId, Stream

_AHEAD = 1 << 16
_HEADER = 4
LINGER = 10.0
"""Seconds a closed stream may take to hand over what was sent."""
LINGER_BYTES = 16 << 20
"""Bytes that are still read, and thrown away, meanwhile: who sees the end stops, and what was under way is less."""


class FrameStream(Stream):
    """One stream. ``clock`` is ``Transport.now``; ``on_moved`` is told (sent, received) payload bytes as they move.

    ``on_closed`` gets the task that finishes the stream in the background after :meth:`close`.
    """

    def __init__(
        self,
        pipe: Pipe,
        peer: PeerId,
        *,
        clock: Callable[[], float],
        on_moved: Callable[[int, int], None] = lambda sent, received: None,
        on_closed: Callable[[FrameStream, asyncio.Task[None]], None] = lambda stream, task: None,
    ) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_heard = clock()
        self._pipe = Segments(pipe, peer, clock)
        self._clock = clock
        self._on_moved = on_moved
        self._on_closed = on_closed
        self._sending = asyncio.Lock()
        self._receiving = asyncio.Lock()
        self._ahead = bytearray()  # allocated at the first read: many streams only ever send
        self._start = self._end = 0
        self._frame: bytearray | None = None  # survives a cancelled receive()
        self._filled = 0
        self._broken: str | None = None
        self._unreadable = False
        self._sent = False
        """Whether a frame was sent, so that there is something that the other side may still have to read."""
        self._closing: asyncio.Task[None] | None = None

    async def send(self, *parts: bytes | bytearray | memoryview) -> None:
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(view.nbytes for view in views)
        if size >= 1 << 32:
            raise ValueError(f"a frame has less than 4 GiB, not {size} bytes")
        async with self._sending:
            self._check()
            written = 0

            def progress(count: int) -> None:
                nonlocal written
                payload = max(0, written + count - _HEADER) - max(0, written - _HEADER)
                written += count
                self.bytes_sent += payload
                self._on_moved(payload, 0)

            try:
                await self._pipe.write(memoryview(size.to_bytes(_HEADER, "big")), *views, on_progress=progress)
            except asyncio.CancelledError:
                if 0 < written < _HEADER + size:  # the rest would be read as the next frame
                    self._broken = "an earlier send was cancelled in the middle of a frame"
                    self._pipe.close()
                raise
            self._sent = True

    async def receive(self, limit: int = DEFAULT_FRAME_LIMIT) -> bytes:
        return bytes(await self.receive_view(limit))

    async def receive_view(self, limit: int = DEFAULT_FRAME_LIMIT) -> memoryview:
        async with self._receiving:
            self._check()
            if self._unreadable:
                raise StreamClosed("the stream cannot be read any more: an earlier frame was above the limit")
            if self._frame is None:
                while self._end - self._start < _HEADER:
                    await self._fill()
                size = int.from_bytes(self._ahead[self._start : self._start + _HEADER], "big")
                self._check_size(size, limit)
                self._start += _HEADER
                ready = min(size, self._end - self._start)
                frame = bytearray(size)
                frame[:ready] = memoryview(self._ahead)[self._start : self._start + ready]
                self._start += ready
                self._frame, self._filled = frame, ready
                self._count(ready)
            frame = self._frame
            self._check_size(len(frame), limit)
            if self._filled < len(frame) and not await self._pipe.fill(
                memoryview(frame)[self._filled :], self._progress
            ):
                raise StreamClosed(
                    f"the stream of {self.peer} ended inside a frame, at {self._filled} of {len(frame)} bytes"
                )
            self._frame = None
            return memoryview(frame)

    async def close(self) -> None:
        if self._closing is None:
            last = self._sent and self._pipe.whole and not self._pipe.over
            self._pipe.interrupt()
            if not last:
                self._pipe.end_writing()
            self._closing = asyncio.create_task(self._finish(last))
            self._on_closed(self, self._closing)

    def abort(self) -> None:
        """End both directions now, delivered or not."""
        self._pipe.close()

    async def _finish(self, last: bool) -> None:
        try:
            await (self._pipe.part if last else self._pipe.drain)(LINGER, LINGER_BYTES)
        finally:
            self._pipe.close()

    async def _fill(self) -> None:
        if not self._ahead:
            self._ahead = bytearray(_AHEAD)
        if self._start:
            rest = self._ahead[self._start : self._end]
            self._ahead[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        if not await self._pipe.read(memoryview(self._ahead)[self._end :], self._further):
            raise StreamClosed(f"the stream of {self.peer} ended" + (" inside a frame" if self._end else ""))

    def _further(self, count: int) -> None:
        self._end += count
        self.last_heard = self._clock()

    def _progress(self, count: int) -> None:
        self.last_heard = self._clock()
        self._filled += count
        self._count(count)

    def _count(self, received: int) -> None:
        self.bytes_received += received
        self._on_moved(0, received)

    def _check_size(self, size: int, limit: int) -> None:
        if size > limit:
            self._unreadable = True  # only that: whoever sends meanwhile is not to hide this error
            raise FrameTooLarge(
                f"a frame of {size} bytes from {self.peer}, where at most {limit} are allowed", self.peer
            )

    def _check(self) -> None:
        if self._closing is not None:
            raise StreamClosed("the stream was closed on this side")
        if self._broken is not None:
            raise StreamClosed(f"the stream cannot be used any more: {self._broken}")
