"""Segments over a pipe: one stream's bytes, cut so that what is under way stays as little as the link needs.

A stream shares its connection with all others to the same peer: heartbeats, votes, and the credits that libp2p's own
flow control sends for what comes the other way. Left alone, the daemon puts as much into the connection's send buffer
as that takes, megabytes, which is seconds on a home's uplink; behind them everything waits, and since the credits do,
the other direction comes to a half of its rate. So the sender asks for acknowledgements and keeps so little under way
that the queues on the path add :data:`QUEUE` seconds at most, as LEDBAT does (RFC 6817): as long as acknowledgements
come about as quickly as the quickest did, more; when they take much longer, less.

A segment is its kind u8, a value u32 big-endian, and for data that many bytes:
 0 data: value is the length, 1 or more
 1 acknowledgement: value is the number of data bytes taken so far in this direction, modulo 2**32
 2 the sender's last word: it has closed the stream, and neither sends nor takes anything any more; value is 0

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
_DATA, _TAKEN, _LAST = 0, 1, 2
_MOD = 1 << 32

_LONGEST = 1 << 18
"""Data bytes in a segment that we send; a reader takes any length."""
_FIRST_WINDOW = 1 << 18
_LEAST_WINDOW = 3 << 16
_MOST_WINDOW = 1 << 24
QUEUE = 0.1
"""Seconds that data may wait on its way beyond the shortest time seen, before less is kept under way."""
_ACK_BYTES = 1 << 16
"""Data taken until it is acknowledged; twice that where the last acknowledgement was less than :data:`_ACK_EVERY` ago.
Twice that is less than the least window: a sender without room always hears of what it has under way."""
_ACK_EVERY = 0.005
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
        self._head = bytearray(_HEAD.size)
        self._headed = 0  # bytes of the next head that are there
        self._heads = 0  # heads passed over since the stream was closed here
        self._taken = 0
        self._told = 0  # of them acknowledged
        self._told_at = clock()
        self._reading = False
        # What goes
        self._sent = 0
        self._acknowledged = 0
        self._window = _FIRST_WINDOW
        self._shortest = float("inf")
        self._steady_until = clock()
        self._under_way: deque[tuple[int, float]] = deque()  # (bytes sent up to there, when they began to go)
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
        self._left -= data
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
        if kind == _DATA and value:
            self._left = value
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
        behind = self._taken - self._told
        if behind >= _ACK_BYTES and (behind >= 2 * _ACK_BYTES or self._clock() - self._told_at >= _ACK_EVERY):
            self._told, self._told_at = self._taken, self._clock()
            self._due = self._taken
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
            longest = min(_LONGEST, max(self._window // 4, 1 << 14))
            pieces, size = [], 0
            while left and size < longest:
                part = left.popleft()
                if len(part) > longest - size:
                    left.appendleft(part[longest - size :])
                    part = part[: longest - size]
                pieces.append(part)
                size += len(part)
            async with self._writing:
                await self._settle()
                await self._segment(size, pieces, on_progress)
            if self._owed():  # since; the other side may be waiting for it, as we are about to
                self._pay()

    async def _segment(self, size: int, pieces: list[memoryview], on_progress: Callable[[int], None] | None) -> None:
        began, written = self._clock(), 0

        def progress(count: int) -> None:
            nonlocal written
            data = max(0, written + count - _HEAD.size) - max(0, written - _HEAD.size)
            written += count
            if on_progress is not None and data:
                on_progress(data)

        # Before it is written: its acknowledgement may come while a part of it still waits.
        self._sent += size
        self._under_way.append((self._sent, began))
        try:
            await self._pipe.write(memoryview(_HEAD.pack(_DATA, size)), *pieces, on_progress=progress)
        except asyncio.CancelledError:
            if written < _HEAD.size + size:
                if written:  # the rest would be read as what it is not
                    self._pipe.close()
                else:
                    self._sent -= size
                    self._under_way.pop()
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
        return self._sent - self._acknowledged < self._window

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
        """The other side has taken so many bytes in all."""
        new = (value - self._acknowledged) % _MOD
        if not 0 < new <= self._sent - self._acknowledged:
            raise PeerMisbehaved("an acknowledgement of nothing new, or of what was not sent", self._peer)
        now, began = self._clock(), None
        full = 2 * (self._sent - self._acknowledged) >= self._window
        self._acknowledged += new
        while self._under_way and self._under_way[0][0] <= self._acknowledged:
            began = self._under_way.popleft()[1]
        if began is not None and self._prompt:
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
                    self._left = value if kind == _DATA else 0
                    self._heads += 1
                    self.over = kind == _LAST or self._heads > _HEADS
            data = data[passed:]
        return self.over
