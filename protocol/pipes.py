"""A connected unix socket as the event loop uses it: two independent directions, no buffer, safe to cancel.

asyncio's own streams tie the two directions together (a failed write throws away what could still be read) and
keep data in buffers that grow; here every byte is moved by the task that wants it, so back-pressure is the
kernel's, and a cancelled read or write has lost nothing that it did not report.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from .errors import StreamClosed

_TURN = 1 << 20
"""Bytes moved without a wait after which other tasks get a turn."""
_PIECE = 1 << 18
"""Bytes asked for in one system call at most, so that every piece counts as a sign of life."""


class Pipe:
    """Takes over ``sock``. At most one task may read and one may write at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        # For the event loop: given the socket, it makes a text of it, with two system calls, whenever it looks in vain.
        self._number = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[None]] = set()
        self._moved = 0
        self._listener: asyncio.Future[None] | None = None
        self._interrupted = False
        self.closed = False

    @classmethod
    async def connect(cls, path: str) -> Pipe:
        """Connect to the unix socket at ``path``. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, path)
            return cls(sock)
        except BaseException:
            sock.close()
            raise

    async def pull(self, step: Callable[[], bool | None]) -> bool:
        """Call ``step``, which calls :meth:`take`, now and whenever something is there, until it answers.

        The daemon hands over 32 KiB or less at a time: pieces are read by the loop's callback, since waking a task
        for each would cost more than moving the bytes. Raises StreamClosed, and what ``step`` raises.
        """
        if self._listener is not None:
            self._listener = None
            self._loop.remove_reader(self._number)
        return await self._move(step, self._loop.add_reader, self._loop.remove_reader)

    def take(self, *into: memoryview | None) -> int | None:
        """Read what is there, into one piece of memory after the other; None when nothing is, 0 at the end."""
        try:
            count = self._socket.recvmsg_into([view for view in into if view is not None])[0]
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise StreamClosed(f"the stream broke: {error.strerror or error}") from None
        self._moved += count + 64  # many tiny pieces need a turn as well
        return count

    def give(self, data: bytes) -> int:
        """Write what can be written without waiting; how many bytes that were. Not while :meth:`write` is."""
        try:
            return self._socket.send(data)
        except OSError:
            return 0  # no room; or it broke, as whoever reads or writes is told

    async def wait_for(self, news: asyncio.Future[None]) -> None:
        """Wait for ``news`` from elsewhere. Raises StreamClosed when it broke or was closed here."""
        self._check()
        self._waiting.add(news)
        try:
            await news
        finally:
            self._waiting.discard(news)
        self._check()

    async def listen(self, news: asyncio.Future[None]) -> None:
        """:meth:`wait_for`, and for something to be there; whoever begins to read takes over."""
        self._check()
        self._listener = news
        self._loop.add_reader(self._number, _wake, news)
        try:
            await self.wait_for(news)
        finally:
            if self._listener is news:
                self._listener = None
                if not self.closed:
                    self._loop.remove_reader(self._number)

    async def read_exactly(self, count: int) -> bytearray:
        """Read ``count`` bytes. Raises StreamClosed when it ends before."""
        data, filled = bytearray(count), 0

        def step() -> bool | None:
            nonlocal filled
            while filled < count:
                found = self.take(memoryview(data)[filled:])
                if not found:
                    return None if found is None else False
                filled += found
            return True

        if not await self.pull(step):
            raise StreamClosed("the stream ended")
        return data

    async def write(self, *parts: memoryview, on_progress: Callable[[int], None] | None = None) -> None:
        """Write all parts, one after another; ``on_progress`` is told of every piece. Raises StreamClosed."""
        left = [part for part in parts if part]

        def step() -> bool | None:
            for _ in range(_TURN // _PIECE):
                if not left:
                    return True
                try:
                    # What is small goes out together with what follows, not as a packet of its own.
                    count = self._socket.sendmsg([part[:_PIECE] for part in left[:4]])
                except (BlockingIOError, InterruptedError):
                    return None
                except OSError as error:
                    raise StreamClosed(f"the stream broke: {error.strerror or error}") from None
                if on_progress is not None:
                    on_progress(count)
                self._moved += count + 64
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = left[0][count:]
            return None if left else True

        await self._move(step, self._loop.add_writer, self._loop.remove_writer)

    def interrupt(self) -> None:
        """Make every read and write that is under way or begins later raise StreamClosed."""
        self._interrupted = True
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def end_writing(self) -> None:
        """Tell the other side that no more comes; what was written still arrives."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is gone already

    async def drain(self, timeout: float, most: int) -> None:
        """Read and throw away until the other side ends, for at most ``timeout`` seconds and ``most`` bytes.

        A socket closed with unread data in it resets the stream, and the daemon then forgets what it still holds.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._throw_away(lambda _: False, most)
        except (TimeoutError, StreamClosed):
            pass

    async def part(self, last: bytes, over: Callable[[memoryview], bool], timeout: float, most: int) -> None:
        """Write ``last`` after all that was written, and throw away what comes, until ``over``, which sees it, says
        that this was all, or the other side ends; for at most ``timeout`` seconds and ``most`` bytes. To be called
        after :meth:`interrupt`, when nobody else reads or writes any more."""
        writing = self._loop.create_task(self._write_last(last))
        try:
            async with asyncio.timeout(timeout):
                await self._throw_away(over, most)
        except (TimeoutError, StreamClosed):
            pass
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _throw_away(self, over: Callable[[memoryview], bool], most: int) -> None:
        scratch = memoryview(bytearray(1 << 16))
        while not self.closed and most > 0 and (count := self.take(scratch)) != 0:
            if count is None:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
            elif over(scratch[:count]):
                return
            else:
                most -= count
                await self._pace()

    async def _write_last(self, data: bytes) -> None:
        while data and not self.closed:
            try:
                data = data[self._socket.send(data) :]
            except (BlockingIOError, InterruptedError):
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
            except OSError:
                return  # the other side is gone, as reading will tell

    def close(self) -> None:
        """Let go of the socket at once. Idempotent."""
        if not self.closed:
            self.closed = True
            self._listener = None  # the number may soon be another's
            self.interrupt()
            if not self._loop.is_closed():
                self._loop.remove_reader(self._number)
                self._loop.remove_writer(self._number)
            self._socket.close()

    def _check(self) -> None:
        if self._interrupted or self.closed:
            raise StreamClosed("the stream was closed on this side")

    async def _ready(self, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(future)
        add(self._number, _wake, future)
        self._moved = 0
        try:
            await future
        finally:
            self._waiting.discard(future)
            if not self.closed:
                remove(self._number)

    async def _move(
        self, step: Callable[[], bool | None], add: Callable[..., Any], remove: Callable[[int], Any]
    ) -> bool:
        """Call ``step`` now, and whenever the socket is ready, until it answers; a cancellation loses nothing."""
        await self._pace()
        self._check()
        answer = step()
        if answer is not None:
            return answer
        future: asyncio.Future[None] = self._loop.create_future()
        failure: Exception = StreamClosed("the stream was closed on this side")

        def ready() -> None:
            nonlocal answer, failure
            if future.done():
                return
            try:
                answer = step()
                if answer is None:
                    return
            except Exception as error:
                failure = error
            future.set_result(None)

        self._waiting.add(future)
        add(self._number, ready)
        self._moved = 0
        try:
            await future
        finally:
            self._waiting.discard(future)
            if not self.closed:
                remove(self._number)
        self._moved = 0
        if answer is None:
            raise failure
        return answer

    async def _pace(self) -> None:
        """Give other tasks a turn; before a piece is moved, since a cancellation here must not lose one."""
        if self._moved >= _TURN:
            self._moved = 0
            await asyncio.sleep(0)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
