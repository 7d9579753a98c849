"""Segments over socket pairs, and over a slow link made of one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from atoll.protocol.errors import FrameTooLarge, PeerMisbehaved, StreamClosed
from atoll.protocol.frames import FrameStream
from atoll.protocol.pipes import Pipe
from atoll.protocol.segments import _ASK_LEAST, _FIRST_WINDOW, _LEAST_WINDOW, _MOST_WINDOW, QUEUE, Segments
from atoll.protocol.transport import PeerId


def pair() -> tuple[FrameStream, FrameStream]:
    near, far = socket.socketpair()
    return stream(near), stream(far)


def stream(sock: socket.socket) -> FrameStream:
    return FrameStream(Pipe(sock), PeerId("other"), clock=time.monotonic)


def head(kind: int, value: int) -> bytes:
    return struct.pack(">BI", kind, value)


def asked(size: int) -> bytes:
    """A segment, of zeros, that asks to be acknowledged."""
    return head(3, size) + bytes(size)


async def get(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        assert more, "the stream ended"
        data += more
    return data


def there(sock: socket.socket) -> bytes:
    """What can be read at once."""
    data = b""
    with contextlib.suppress(BlockingIOError):
        while more := sock.recv(1 << 16):
            data += more
    return data


async def segment(sock: socket.socket) -> tuple[int, int]:
    """Read a segment with what is in it; (kind, value)."""
    kind, value = struct.unpack(">BI", await get(sock, 5))
    if kind in (0, 3):
        await get(sock, value)
    return kind, value


def play(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


async def end(*streams: FrameStream) -> None:
    for one in streams:
        await one.close()
    await asyncio.gather(*(one._closing for one in streams if one._closing is not None))


def test_frames_of_all_sizes_both_ways_at_once() -> None:
    sizes = [0, 1, 4, 65531, 65536, 262144, 262145, 3 << 20, *(random.Random(1).choices(range(300_000), k=60))]
    frames = [os.urandom(size) for size in sizes]

    async def test() -> None:
        a, b = pair()

        async def send(one: FrameStream, order: int) -> None:
            for frame in frames[::order]:
                await one.send(frame[:7], frame[7:])

        async def receive(one: FrameStream, order: int) -> None:
            for frame in frames[::order]:
                assert await one.receive(4 << 20) == frame

        await asyncio.gather(send(a, 1), receive(a, -1), send(b, -1), receive(b, 1))
        assert a.bytes_sent == b.bytes_sent == a.bytes_received == b.bytes_received == sum(sizes)
        await end(a, b)

    play(test)


def test_both_ways_at_once_through_small_buffers_without_a_standstill() -> None:
    """Segments are written in many pieces then, and acknowledgements fall due in the middle of them."""

    async def test() -> None:
        a, b = pair()
        for one in (a, b):
            one._pipe._pipe._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)

        async def send(one: FrameStream) -> None:
            for _ in range(40):
                await one.send(bytes(300_000))

        async def receive(one: FrameStream) -> None:
            for _ in range(40):
                assert len(await one.receive()) == 300_000

        await asyncio.gather(send(a), receive(a), send(b), receive(b))
        await end(a, b)

    play(test)


def test_what_falls_due_during_a_segment_is_told_before_the_writer_waits_for_room() -> None:
    """Else both sides, each without room, would wait for what the other owes it."""

    async def test() -> None:
        near, far = socket.socketpair()
        far.setblocking(False)
        segments = Segments(Pipe(near), PeerId("other"), time.monotonic)
        segments._window = 1
        data = memoryview(bytes((1 << 14) + 1))  # two segments

        def progress(count: int) -> None:
            if not segments._taken:
                segments._left, segments._asks = 1 << 20, True
                segments._took(1 << 20)

        writing = asyncio.create_task(segments.write(data, on_progress=progress))
        read = bytearray()
        while len(read) < 5 + (1 << 14) + 5:
            read += await asyncio.get_running_loop().sock_recv(far, 1 << 16)
        assert struct.unpack(">BI", read[-5:]) == (1, 1 << 20)
        assert not writing.done()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        segments.close()
        far.close()

    play(test)


def test_no_more_under_way_than_the_window_while_nobody_reads() -> None:
    async def test() -> None:
        a, b = pair()
        for one in (a, b):
            one._pipe._pipe._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        sending = asyncio.create_task(a.send(bytes(4 << 20)))
        done, _ = await asyncio.wait([sending], timeout=0.3)
        assert not done
        assert a.bytes_sent <= _FIRST_WINDOW + (1 << 18), "what goes beyond is one segment at most"
        assert len(await b.receive(4 << 20)) == 4 << 20
        await sending
        assert a._pipe.window > _FIRST_WINDOW, "a quick reader gets more at a time"
        await end(a, b)

    play(test)


def test_a_sender_that_reads_nothing_hears_acknowledgements_and_data_in_front_of_them_stops_nobody() -> None:
    async def test() -> None:
        a, b = pair()
        received: list[int] = []

        async def read(one: FrameStream) -> None:
            while len(received) < 17:
                received.append(len(await one.receive(8 << 20)))

        reading = asyncio.create_task(read(b))
        for _ in range(8):
            await a.send(bytes(1 << 20))  # a never reads
        await b.send(bytes(50_000))
        for _ in range(8):
            await a.send(bytes(1 << 20))  # acknowledgements now come behind data that a does not read
        assert len(await a.receive()) == 50_000
        await a.send(b"")
        await reading
        assert received == [1 << 20] * 16 + [0]
        await end(a, b)

    play(test)


class Link:
    """Carries bytes from one socket to another at a rate, after a delay, with a queue as long as it takes."""

    def __init__(self, source: socket.socket, target: socket.socket, rate: float, delay: float) -> None:
        self.source, self.target, self.rate, self.delay = source, target, rate, delay
        self.held: deque[tuple[float, bytes]] = deque()
        self.queued = 0
        self.longest = 0.0
        """Seconds that the last byte of the queue had to wait at most."""
        self.filled = asyncio.Event()

    async def run(self) -> None:
        await asyncio.gather(self._take(), self._hand_over())

    async def _take(self) -> None:
        loop, free = asyncio.get_running_loop(), 0.0
        while data := await loop.sock_recv(self.source, 1 << 16):
            free = max(free, loop.time()) + len(data) / self.rate
            self.longest = max(self.longest, free - loop.time())
            self.held.append((free + self.delay, data))
            self.filled.set()

    async def _hand_over(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self.held:
                self.filled.clear()
                await self.filled.wait()
            due, data = self.held.popleft()
            await asyncio.sleep(max(due - loop.time(), 0))
            await loop.sock_sendall(self.target, data)


def test_queues_on_a_slow_link_stay_short_and_the_link_full() -> None:
    rate, delay, size = 2e6, 0.01, 6_000_000

    async def test() -> None:
        sockets = [*socket.socketpair(), *socket.socketpair()]
        for sock in sockets:
            sock.setblocking(False)
        a, b = stream(sockets[0]), stream(sockets[3])
        links = [Link(sockets[1], sockets[2], rate, delay), Link(sockets[2], sockets[1], rate, delay)]
        running = [asyncio.create_task(link.run()) for link in links]

        async def send(one: FrameStream) -> None:
            for _ in range(size // 250_000):
                await one.send(bytes(250_000))

        async def receive(one: FrameStream) -> None:
            for _ in range(size // 250_000):
                await one.receive()

        began = time.monotonic()
        await asyncio.gather(send(a), receive(a), send(b), receive(b))
        took = time.monotonic() - began
        for link in links:
            # The first window, and a segment; 3 s would be all that was to be sent.
            assert link.longest < (_FIRST_WINDOW + (1 << 18)) / rate + 2 * QUEUE
        assert took < 2 * size / rate, "both directions at once, and neither waits for the other"
        await end(a, b)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for sock in sockets[1:3]:
            sock.close()

    play(test)


def test_what_asks_is_acknowledged_when_all_of_it_is_taken_and_nothing_else_is() -> None:
    async def test() -> None:
        near, far = socket.socketpair()
        far.setblocking(False)
        segments = Segments(Pipe(near), PeerId("other"), time.monotonic)
        into = memoryview(bytearray(1 << 20))

        async def take(data: bytes, count: int) -> bytes:
            """Send, read so many bytes, and say what came back."""
            sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(far, data))
            assert await segments.fill(into[:count], lambda _: None)
            await sending
            return there(far)

        size = 200_000
        assert await take(head(0, size) + bytes(size), size) == b""
        assert await take(head(3, size) + bytes(size - 1), size - 1) == b""
        assert await take(bytes(1), 1) == head(1, 2 * size)
        assert await take(head(0, 9) + bytes(9), 9) == b""
        assert await take(asked(_ASK_LEAST - 9) + asked(_ASK_LEAST), 2 * _ASK_LEAST - 9) == head(
            1, 2 * size + _ASK_LEAST
        ) + head(1, 2 * size + 2 * _ASK_LEAST)
        segments.close()
        far.close()

    play(test)


def test_acknowledgements_that_cannot_be_written_become_one() -> None:
    """A peer that asks and does not listen: what it is owed stays one acknowledgement, the latest."""

    async def test() -> None:
        near, far = socket.socketpair()
        far.setblocking(False)
        segments = Segments(Pipe(near), PeerId("other"), time.monotonic)
        stuffed = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                stuffed += near.send(bytes(1 << 12))
        with contextlib.suppress(BlockingIOError):
            while True:
                stuffed += near.send(bytes(1))
        into = memoryview(bytearray(100 * _ASK_LEAST))
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(far, asked(_ASK_LEAST) * 100))
        assert await segments.fill(into, lambda _: None)
        await sending
        await get(far, stuffed)
        owed = await get(far, 10)
        assert owed == head(1, _ASK_LEAST) + head(1, 100 * _ASK_LEAST)
        await asyncio.sleep(0.05)
        assert there(far) == b""
        segments.close()
        far.close()

    play(test)


@pytest.mark.parametrize("window", [_LEAST_WINDOW, 1 << 18, 1 << 20, 1 << 23])
def test_a_sender_asks_four_times_in_a_window_whatever_it_writes(window: int) -> None:
    async def test() -> None:
        near, far = socket.socketpair()
        far.setblocking(False)
        segments = Segments(Pipe(near), PeerId("other"), time.monotonic)
        segments._window = window

        async def write() -> None:
            for size in (1, 100, 5000, 100_000) * 1000:
                await segments.write(memoryview(bytes(size)))

        writing = asyncio.create_task(write())
        ends, asks = [0], [0]
        while ends[-1] < window:
            kind, value = await segment(far)
            ends.append(ends[-1] + value)
            if kind == 3:
                asks.append(ends[-1])
        assert ends[-2] < window, "the last segment had room"
        assert 3 <= len(asks) - 1 <= 4
        assert all(one - before >= window // 4 for before, one in pairwise(asks))
        done, _ = await asyncio.wait([writing], timeout=0.05)
        assert not done
        assert there(far) == b""
        await asyncio.get_running_loop().sock_sendall(far, head(1, asks[1]))
        assert (await segment(far))[0] in (0, 3), "it goes on with the first acknowledgement"
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        segments.close()
        far.close()

    play(test)


def test_a_window_that_shrinks_below_what_is_under_way_stops_nobody() -> None:
    """What went since the sender last asked may be more than the window is now; nobody would tell when it is taken."""

    async def test() -> None:
        near, far = socket.socketpair()
        far.setblocking(False)
        for sock in (near, far):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        segments = Segments(Pipe(near), PeerId("other"), time.monotonic)
        segments._window = _MOST_WINDOW
        await segments.write(memoryview(bytes(1 << 20)))
        segments._window = _LEAST_WINDOW
        writing = asyncio.create_task(segments.write(memoryview(bytes(_LEAST_WINDOW))))
        for _ in range(4):
            assert (await segment(far))[0] == 0
        kind, value = await segment(far)
        assert kind == 3, "one more segment, to ask"
        done, _ = await asyncio.wait([writing], timeout=0.05)
        assert not done
        assert there(far) == b"", "and no more before there is an answer"
        await asyncio.get_running_loop().sock_sendall(far, head(1, (1 << 20) + value))
        await asyncio.wait_for(writing, 5)
        segments.close()
        far.close()

    play(test)


@pytest.mark.parametrize("seed", range(4))
def test_windows_of_any_size_at_any_moment_stop_nobody(seed: int) -> None:
    chance = random.Random(seed)

    async def test() -> None:
        a, b = pair()

        async def send(one: FrameStream) -> None:
            for _ in range(150):
                one._pipe._window = chance.choice((_LEAST_WINDOW, _LEAST_WINDOW + 1, 1 << 20, _MOST_WINDOW))
                await one.send(bytes(chance.choice((0, 10, 50_000, 300_000))))

        async def receive(one: FrameStream) -> None:
            for _ in range(150):
                await one.receive()
                if chance.random() < 0.2:
                    await asyncio.sleep(0.001)

        await asyncio.gather(send(a), receive(a), send(b), receive(b))
        await end(a, b)

    play(test)


def test_a_write_that_was_cancelled_before_it_began_has_asked_for_nothing() -> None:
    async def test() -> None:
        a, b = pair()
        a._pipe._pipe._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        a._pipe._pipe._moved = 1 << 30  # so that the pipe lets others go first, and nothing is written yet
        sending = asyncio.create_task(a.send(bytes(1 << 16)))
        await asyncio.sleep(0)
        assert a._pipe._awaited
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert not a._pipe._awaited
        assert a.bytes_sent == 0
        for _ in range(20):
            await a.send(bytes(1 << 16))
            assert len(await b.receive()) == 1 << 16
        await end(a, b)

    play(test)


def unbegun() -> tuple[Segments, socket.socket, asyncio.Task[None]]:
    """A stream on which a segment that asks waits to be written, and nothing of it is."""
    near, far = socket.socketpair()
    far.setblocking(False)
    segments = Segments(Pipe(near), PeerId("other"), time.monotonic)
    segments._pipe._moved = 1 << 30  # so that the pipe lets others go first
    return segments, far, asyncio.create_task(segments.write(memoryview(bytes(1 << 16))))


def test_a_write_that_is_cancelled_leaves_no_acknowledgement_behind() -> None:
    async def test() -> None:
        segments, far, writing = unbegun()
        await asyncio.sleep(0)
        segments._left, segments._asks = 10, True
        segments._took(10)
        assert there(far) == b"", "the writer is to take it along"
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert await get(far, 5) == head(1, 10)
        segments.close()
        far.close()

    play(test)


def test_what_is_not_written_yet_cannot_be_acknowledged() -> None:
    async def test() -> None:
        segments, far, writing = unbegun()
        await asyncio.sleep(0)
        assert segments._awaited
        with pytest.raises(PeerMisbehaved):
            segments._heard(1 << 16)
        writing.cancel()
        assert isinstance((await asyncio.gather(writing, return_exceptions=True))[0], asyncio.CancelledError)
        segments.close()
        far.close()

    play(test)


def test_the_window_follows_the_time_that_acknowledgements_take() -> None:
    async def test() -> None:
        near, far = socket.socketpair()
        now = 100.0
        segments = Segments(Pipe(near), PeerId("other"), lambda: now)
        segments._prompt = True

        def one_window(seconds: float, share: float = 1.0) -> int:
            """Send a share of a window in segments, all acknowledged ``seconds`` later."""
            nonlocal now
            size = int(segments.window * share)
            for _ in range(4):
                segments._sent += size // 4
                segments._written = segments._sent
                segments._awaited.append((segments._sent, now))
            now += seconds
            segments._heard(segments._sent % (1 << 32))
            return segments.window

        first = segments.window
        assert one_window(0.02) == 2 * first, "doubles with each round trip"
        assert one_window(0.02, 0.4) == 2 * first, "not where it was not used"
        assert one_window(0.02 + 0.7 * QUEUE) == 2 * first
        assert first < one_window(0.02 + 1.5 * QUEUE) < 2 * first
        assert one_window(10) >= first // 2, "by half at most"
        for _ in range(20):
            one_window(10)
        assert segments.window == _LEAST_WINDOW
        for _ in range(30):
            one_window(0.02)
        assert segments.window == _MOST_WINDOW
        segments.close()
        far.close()

    play(test)


@pytest.mark.parametrize(
    "raw",
    [
        head(4, 1),
        head(0, 0),
        head(3, 0),
        head(2, 7),
        head(1, 1),
        head(1, 0),
        asked(_ASK_LEAST - 1),
        asked(1 << 16) + asked(_ASK_LEAST - 1),
    ],
    ids=[
        "unknown kind",
        "empty data",
        "empty data that asks",
        "last word with a value",
        "acknowledged: not sent",
        "acknowledged: nothing",
        "asks at once",
        "asks too often",
    ],
)
def test_what_breaks_the_form_is_refused(raw: bytes) -> None:
    async def test() -> None:
        near, far = socket.socketpair()
        a = stream(near)
        far.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(far, raw)

        async def read() -> None:
            while True:
                await a.receive()

        with pytest.raises(PeerMisbehaved) as caught:
            await read()
        assert caught.value.peer == "other"
        far.close()
        await end(a)

    play(test)


def test_heads_without_data_hold_nobody_up() -> None:
    """A flood of segments of one byte: others have their turns, open or closed here."""

    async def test() -> None:
        near, far = socket.socketpair()
        far.setblocking(False)
        a = stream(near)
        flood = (head(0, 1) + bytes(1)) * 50_000
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(far, flood))
        reading = asyncio.create_task(a.receive())
        worst = 0.0
        for _ in range(200):
            began = time.monotonic()
            await asyncio.sleep(0)
            worst = max(worst, time.monotonic() - began)
        assert worst < 1, "one turn"
        reading.cancel()
        sending.cancel()
        await asyncio.gather(reading, sending, return_exceptions=True)
        a._sent = True
        again = asyncio.create_task(asyncio.get_running_loop().sock_sendall(far, flood * 4))
        await a.close()
        assert a._closing is not None
        await asyncio.wait_for(a._closing, 5)
        far.close()
        await asyncio.gather(again, return_exceptions=True)

    play(test)


def test_who_begins_to_read_takes_over_from_a_writer_that_listens() -> None:
    async def test() -> None:
        a, b = pair()
        a._pipe._pipe._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        sending = asyncio.create_task(a.send(bytes(1 << 20)))
        await asyncio.sleep(0.05)
        assert a._pipe._pipe._listener is not None, "it waits for acknowledgements"
        await b.send(bytes(10))
        assert await a.receive() == bytes(10)  # at once
        loop = asyncio.get_running_loop()
        await b.send(bytes(10))
        await asyncio.sleep(0.05)
        near = a._pipe._pipe._socket
        listening = a._pipe._pipe._listener is not None and not a._pipe._pipe._listener.done()
        assert listening or not loop.remove_reader(near), "no reader is left of nobody"
        assert await a.receive() == bytes(10)
        assert len(await b.receive(1 << 20)) == 1 << 20
        await sending
        await end(a, b)

    play(test)


def test_a_closed_stream_lets_go_of_its_number() -> None:
    """Numbers of sockets are used again at once: who reads from a closed stream must not touch another's."""

    async def test() -> None:
        a, b = pair()
        a._pipe._pipe._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        sending = asyncio.create_task(a.send(bytes(1 << 20)))
        await asyncio.sleep(0.05)
        number = a._pipe._pipe._socket.fileno()
        assert a._pipe._pipe._listener is not None
        a.abort()
        near, far = socket.socketpair()
        assert number in (near.fileno(), far.fileno())
        loop = asyncio.get_running_loop()
        loop.add_reader(number, lambda: None)
        with pytest.raises(StreamClosed):
            await a.receive()
        with pytest.raises(StreamClosed):
            await sending
        assert loop.remove_reader(number), "it is still watched for its new owner"
        near.close()
        far.close()
        await end(a, b)

    play(test)


def test_the_last_word_ends_both_and_what_was_sent_before_it_arrives() -> None:
    async def test() -> None:
        a, b = pair()
        await b.send(b"not read by a")
        await a.send(b"first")
        await a.close()
        assert await b.receive() == b"first"
        with pytest.raises(StreamClosed, match="ended"):
            await b.receive()
        await b.send(b"into the void")
        await end(a, b)
        with pytest.raises(StreamClosed):
            await a.send(b"")

    play(test)


def test_a_frame_that_is_cut_by_the_end_is_told_from_a_whole_one() -> None:
    async def test() -> None:
        a, b = pair()
        sending = asyncio.create_task(a.send(bytes(8 << 20)))
        await asyncio.sleep(0)
        assert 0 < a.bytes_sent < 8 << 20
        await a.close()
        with pytest.raises(StreamClosed):
            await sending
        with pytest.raises(StreamClosed, match="inside a frame"):
            await b.receive(8 << 20)
        await end(a, b)

    play(test)


def test_a_frame_above_the_limit_is_not_read_and_an_answer_to_it_arrives() -> None:
    async def test() -> None:
        a, b = pair()
        sending = asyncio.create_task(a.send(bytes(2 << 20)))
        with pytest.raises(FrameTooLarge):
            await b.receive(1 << 20)
        await b.send(b"too long")
        await b.close()
        assert await a.receive() == b"too long"
        await end(a, b)
        await asyncio.gather(sending, return_exceptions=True)

    play(test)


def test_cancelled_reads_and_writes_lose_nothing() -> None:
    """Whoever cancels a receive goes on where it was; a send that had not begun leaves no trace."""
    chance: Any = random.Random(7)

    async def test() -> None:
        a, b = pair()
        frames = [chance.randbytes(chance.randrange(chance.choice((10, 200_000)))) for _ in range(60)]

        async def send() -> None:
            for frame in frames:
                await a.send(frame)

        sending = asyncio.create_task(send())
        got: list[bytes] = []

        async def receive() -> None:
            got.append(await b.receive())

        while len(got) < len(frames):
            receiving = asyncio.create_task(receive())
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            receiving.cancel()  # at any moment, also when what it waits for has just come
            await asyncio.gather(receiving, return_exceptions=True)
        assert got == frames
        await sending
        async with a._sending:
            waiting = asyncio.create_task(a.send(b"never"))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await a.send(b"after")
        assert await b.receive() == b"after"
        await end(a, b)

    play(test)
