"""Segments over a pipe: one stream's bytes, cut so that what is under way stays as little as the link needs.

A stream shares its connection with all others to the same peer: heartbeats, votes, and the credits that libp2p's own
flow control sends for what comes the other way. Left alone, the daemon puts as much into the connection's send buffer
as that takes, megabytes, which is seconds on a home's uplink; behind them everything waits, and since the credits do,
the other direction comes to a half of its rate. So the sender asks for acknowledgements and keeps so little under way
that the queues on the path add :data:`QUEUE` seconds at most, as LEDBAT does (RFC 6817): as long as acknowledgements
come about as quickly as the quickest did, more; when they take much longer, less. It asks a few times for what may be
under way, so that they are rare where that is much: each is a packet of its own, and a turn of both daemons.

A segment is its kind u8, a value u32 big-endian, and for data that many bytes:
 0 data: value is the length, 1 or more
 1 acknowledgement: value is the number of data bytes up to the end of a segment that asked, modulo 2**32; all are taken
 2 the sender's last word: it has closed the stream, and neither sends nor takes anything any more; value is 0
 3 data that asks to be acknowledged when all of it is taken; it ends :data:`_ASK_LEAST` bytes or more beyond the one
   before it that did, so that nobody makes others answer everything

Why a last word: libp2p closes a stream's two directions one after the other, and its daemon, when the first is closed,
now and then resets the stream before it comes to the second, which throws away what the other side has not read yet.
So a stream is let go only when the other side has closed it too, which it does when it reads the last word.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable

from .errors import PeerMisbehaved, StreamClosed
from .pipes import Pipe
from .transport import PeerId

_HEAD = struct.Struct(">BI")
_DATA, _TAKEN, _LAST, _ASKING = 0, 1, 2, 3
_MOD = 1 << 32

_LONGEST = 1 << 18
"""Data bytes in a segment that we send; a reader takes any length."""
_FIRST_WINDOW = 1 << 18
_LEAST_WINDOW = 3 << 16
_MOST_WINDOW = 1 << 24
QUEUE = 0.1
"""Seconds that data may wait on its way beyond the shortest time seen, before less is kept under way."""
_ASKS = 4
"""Acknowledgements that are asked for in a window."""
_ASK_LEAST = 1 << 14
"""Data bytes from one that is asked for to the next, at least."""
_TURN = 8
"""Looks at the socket until others have their turn."""
_HEADS = 4096
"""Segments that are still passed over once the stream is closed here."""


class Segments:
    """Takes over a pipe; has its interface. At most one task may read and one may write at a time.

    clock: seconds, monotonic. Raises :class:`PeerMisbehaved` where the other side breaks the form.
    """

    def __init__(self, pipe: Pipe, peer: PeerId, clock: Callable[[], float]) -> None:
        self._pipe = pipe
        self._peer = peer
        self._clock = clock
        self.over = False
        """The other side has said its last word."""
        # What comes
        self._left = 0  # bytes of the data segment that has begun
        self._asks = False  # whether that asks to be acknowledged
        self._head = bytearray(_HEAD.size)
        self._headed = 0  # bytes of the next head that are there
        self._heads = 0  # heads passed over since the stream was closed here
        self._taken = 0
        self._asked_for = 0  # the end of the last segment that asked
        self._reading = False
        # What goes
        self._sent = 0
        self._written = 0  # of them, up to the end of the last segment that is written whole
        self._acknowledged = 0
        self._asked = 0  # where an acknowledgement was last asked for
        self._window = _FIRST_WINDOW
        self._shortest = float("inf")
        self._steady_until = clock()
        # What is asked for: (bytes sent up to there, when that segment began to go)
        self._awaited: deque[tuple[int, float]] = deque()
        self._due: int | None = None  # what is to be acknowledged next
        self._rest = b""  # what is not written yet of the acknowledgement before it
        self._writing = asyncio.Lock()  # for a segment
        self._paying: asyncio.Task[None] | None = None
        self._news: asyncio.Future[None] | None = None  # for a writer without room
        self._prompt = False  # acknowledgements are seen when they come

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    @property
    def whole(self) -> bool:
        """Whether nothing is half written, so that a last word would be read as one."""
        return not self._writing.locked()

    @property
    def window(self) -> int:
        """Bytes that may be under way."""
        return self._window

    # Reading

    async def read(self, into: memoryview, on_progress: Callable[[int], None]) -> bool:
        """Read some bytes into ``into``; False at the end. ``on_progress`` is told how many, which a cancellation that
        comes at the same moment cannot lose. Raises StreamClosed, PeerMisbehaved."""

        def step() -> bool | None:
            for _ in range(_TURN):
                found = self._piece(into)
                if found is None or found < 0:
                    return None if found is None else False
                if found:
                    on_progress(found)
                    return True
            return None

        return await self._pull(step)

    async def fill(self, into: memoryview, on_progress: Callable[[int], None]) -> bool:
        """Read until ``into`` is full; False when the stream ended before. ``on_progress`` is told of every piece."""
        filled = 0

        def step() -> bool | None:
            nonlocal filled
            for _ in range(_TURN):
                if filled == len(into):
                    return True
                found = self._piece(into[filled:])
                if found is None or found < 0:
                    return None if found is None else False
                if found:
                    filled += found
                    on_progress(found)
            return True if filled == len(into) else None

        return await self._pull(step)

    async def _pull(self, step: Callable[[], bool | None]) -> bool:
        self._prompt = self._reading = True
        self._tell()  # a writer that listens for acknowledgements leaves that to us
        try:
            return await self._pipe.pull(step)
        finally:
            self._reading = False
            self._tell()

    def _piece(self, into: memoryview) -> int | None:
        """Bytes put into ``into`` with one look at the socket; 0 when that was only a head, -1 at the end, None when
        nothing is there."""
        if self.over:
            return -1
        if not self._left:
            return self._look()
        want = min(self._left, len(into))
        # The next head comes with the end of this segment.
        count = self._pipe.take(into[:want], memoryview(self._head) if want == self._left else None)
        if count is None:
            return None
        if not count:
            return -1
        data = min(count, want)
        self._headed = count - data
        self._took(data)
        return data

    def _look(self) -> int | None:
        """Read the head of the next segment, and deal with it; what :meth:`_piece` answers."""
        if self._headed < _HEAD.size:
            count = self._pipe.take(memoryview(self._head)[self._headed :])
            if count is None:
                return None
            if not count:
                return -1
            self._headed += count
            if self._headed < _HEAD.size:
                return 0
        kind, value = _HEAD.unpack(self._head)
        self._headed = 0
        if kind in (_DATA, _ASKING) and value:
            self._left, self._asks = value, kind == _ASKING
            if self._asks:
                since = self._taken + value - self._asked_for
                if since < _ASK_LEAST:
                    raise PeerMisbehaved(f"asked for an acknowledgement after {since} bytes", self._peer)
                self._asked_for += since
        elif kind == _TAKEN:
            self._heard(value)
        elif kind == _LAST and not value:
            self.over = True
            self._tell()
            return -1
        else:
            raise PeerMisbehaved(f"a segment of kind {kind} with {value}", self._peer)
        return 0

    def _took(self, count: int) -> None:
        self._taken += count
        self._left -= count
        if self._asks and not self._left:
            self._asks = False
            self._due = self._taken  # in place of what is due and not written
            self._pay()

    def _pay(self) -> None:
        """Write what is owed, here and now if that takes no waiting and nobody is in the middle of a segment."""
        if self._writing.locked() or self._pipe.closed:
            return  # the writer takes it along
        if owed := self._owed():
            self._rest = owed[self._pipe.give(owed) :]
        if self._owed() and self._paying is None:
            self._paying = asyncio.get_running_loop().create_task(self._pay_later())

    def _owed(self) -> bytes:
        """Acknowledgements to be written now."""
        if not self._rest and self._due is not None:
            self._rest, self._due = _HEAD.pack(_TAKEN, self._due % _MOD), None
        return self._rest

    async def _pay_later(self) -> None:
        try:
            async with self._writing:
                await self._settle()
        except StreamClosed:
            pass  # who reads or writes is told
        finally:
            self._paying = None

    async def _settle(self) -> None:
        def progress(count: int) -> None:
            self._rest = self._rest[count:]

        while owed := self._owed():
            await self._pipe.write(memoryview(owed), on_progress=progress)  # a cancellation leaves the rest to others

    # Writing

    async def write(self, *parts: memoryview, on_progress: Callable[[int], None] | None = None) -> None:
        """Write all parts, one after another; ``on_progress`` is told of every piece. Raises StreamClosed."""
        left = deque(part for part in parts if part)
        while left:
            await self._room()
            longest = min(_LONGEST, max(self._window // _ASKS, _ASK_LEAST))
            pieces, size = [], 0
            while left and size < longest:
                part = left.popleft()
                if len(part) > longest - size:
                    left.appendleft(part[longest - size :])
                    part = part[: longest - size]
                pieces.append(part)
                size += len(part)
            try:
                async with self._writing:
                    await self._settle()
                    await self._segment(size, pieces, on_progress)
            finally:
                if self._owed():  # since; the other side may be waiting for it, as we are about to
                    self._pay()

    async def _segment(self, size: int, pieces: list[memoryview], on_progress: Callable[[int], None] | None) -> None:
        began, written, asked = self._clock(), 0, self._asked

        def progress(count: int) -> None:
            nonlocal written
            data = max(0, written + count - _HEAD.size) - max(0, written - _HEAD.size)
            written += count
            if written == _HEAD.size + size:
                self._written = self._sent
            if on_progress is not None and data:
                on_progress(data)

        # Before it is written: its acknowledgement may come while a part of it still waits.
        self._sent += size
        asks = self._sent - asked >= max(self._window // _ASKS, _ASK_LEAST)
        if asks:
            self._asked = self._sent
            self._awaited.append((self._sent, began))
        head = _HEAD.pack(_ASKING if asks else _DATA, size)
        try:
            await self._pipe.write(memoryview(head), *pieces, on_progress=progress)
        except asyncio.CancelledError:
            if written < _HEAD.size + size:
                if written:  # the rest would be read as what it is not
                    self._pipe.close()
                else:
                    self._sent -= size
                    if asks:
                        self._asked = asked
                        self._awaited.pop()
            raise

    async def _room(self) -> None:
        """Wait until more may be under way; not where acknowledgements cannot be seen, behind data that nobody reads:
        then the sockets' own buffers are the bound."""
        self._prompt = self._reading  # else what is there may have been there for long
        while not self._has_room() and not self.over:
            self._news = asyncio.get_running_loop().create_future()
            if self._reading:
                await self._pipe.wait_for(self._news)
            elif not self._look_for_news():
                return
            elif not self._has_room():
                self._prompt = True
                await self._pipe.listen(self._news)

    def _has_room(self) -> bool:
        # Who awaits nothing would wait for ever: the window may have shrunk below what went since it last asked.
        return not self._awaited or self._sent - self._acknowledged < self._window

    def _look_for_news(self) -> bool:
        """Deal with what has come while nobody reads, up to data; whether more of it may come."""
        for _ in range(_TURN):
            if self._left or self.over:
                return False
            found = self._look()
            if found is None:
                return True
            if found < 0:
                return False
        return True  # and is looked at in the next turn

    def _heard(self, value: int) -> None:
        """The other side has taken all up to there."""
        new = (value - self._acknowledged) % _MOD
        now, end, began = self._clock(), 0, 0.0
        full = 2 * (self._sent - self._acknowledged) >= self._window
        self._acknowledged += new
        while self._awaited and end < self._acknowledged <= self._written:
            end, began = self._awaited.popleft()
        if not new or end != self._acknowledged:
            raise PeerMisbehaved("an acknowledgement of what was not asked for", self._peer)
        if self._prompt:
            took = now - began
            self._shortest = min(self._shortest, took)
            if took <= self._shortest + QUEUE / 2:
                if full:
                    self._window = min(self._window + new, _MOST_WINDOW)
            elif took > self._shortest + QUEUE and now >= self._steady_until:
                share = max((self._shortest + QUEUE) / took, 0.5)
                self._window = max(int(self._window * share), _LEAST_WINDOW)
                self._steady_until = now + took  # until then acknowledgements speak of what was
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # The end

    def interrupt(self) -> None:
        """Make every read and write that is under way or begins later raise StreamClosed."""
        self._pipe.interrupt()
        self._tell()

    def end_writing(self) -> None:
        """Tell the other side that no more comes; what was written still arrives."""
        self._pipe.end_writing()

    async def part(self, timeout: float, most: int) -> None:
        """Say the last word, and throw away what comes, until the other side's, or its end; for at most ``timeout``
        seconds and ``most`` bytes. After :meth:`interrupt`, with nobody in the middle of a segment."""
        await self._pipe.part(self._rest + _HEAD.pack(_LAST, 0), self._skim, timeout, most)

    async def drain(self, timeout: float, most: int) -> None:
        """Throw away what comes until the other side ends; for at most ``timeout`` seconds and ``most`` bytes."""
        await self._pipe.drain(timeout, most)

    def close(self) -> None:
        """Let go of the pipe at once. Idempotent."""
        if self._paying is not None:
            self._paying.cancel()
        self._pipe.close()
        self._tell()

    def _skim(self, data: memoryview) -> bool:
        """Whether the last word is in ``data``, the next bytes that came."""
        while data and not self.over:
            if self._left:
                passed = min(self._left, len(data))
                self._left -= passed
            else:
                passed = min(_HEAD.size - self._headed, len(data))
                self._head[self._headed : self._headed + passed] = data[:passed]
                self._headed += passed
                if self._headed == _HEAD.size:
                    kind, value = _HEAD.unpack(self._head)
                    self._headed = 0
                    self._left = value if kind in (_DATA, _ASKING) else 0
                    self._heads += 1
                    self.over = kind == _LAST or self._heads > _HEADS
            data = data[passed:]
        return self.over
