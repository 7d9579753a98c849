"""As many bytes alone: what a round's bytes take over plain TCP, over libp2p, and over the streams of this project.

``BARE`` are the p2p daemons' streams as they are, a socket to the own daemon; ``STREAMS`` what
:class:`~atoll.protocol.hivemind_transport.HivemindTransport` makes of them: frames, in segments that bound what is
under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.protocol.hivemind_transport import HivemindTransport
    from atoll.protocol.pipes import Pipe

BARE = "bench/bare"
STREAMS = "bench/streams"
FRAME = 1 << 18
"""Bytes handed over at a time."""
_PATIENCE = 30.0
_COUNT = 8


@functools.cache
def bare_transport() -> type[HivemindTransport]:
    """The transport, but that streams of ``BARE`` stay sockets to the daemon, in both directions."""
    from atoll.protocol.hivemind_transport import HivemindTransport

    class Bare(HivemindTransport):
        async def _arrived(self, name: str, peer: Any, pipe: Pipe) -> None:
            if name == self._protocol(BARE):
                task = asyncio.create_task(_answer(pipe))
                self._handling.add(task)
                task.add_done_callback(self._handling.discard)
            else:
                await super()._arrived(name, peer, pipe)

    return Bare


class Pusher:
    """Bytes to and from the peers of a transport that :func:`bare_transport` made. A push ends when all of it has been
    taken by the other side, and as much has come from there."""

    def __init__(self, transport: HivemindTransport) -> None:
        self._transport = transport

    async def push(self, peer: Any, over: str, size: int) -> None:
        if over == BARE:
            await self._push_bare(peer, size)
            return
        stream = await self._transport.open(peer, over, timeout=_PATIENCE)
        await stream.send(size.to_bytes(_COUNT, "big"))
        await self._both(stream, size)
        await stream.close()

    async def serve(self, stream: Any) -> None:
        await self._both(stream, int.from_bytes(await stream.receive(), "big"))

    async def _both(self, stream: Any, size: int) -> None:
        async def out() -> None:
            frame = bytes(FRAME)
            for start in range(0, size, FRAME):
                await stream.send(frame[: min(FRAME, size - start)])

        async def come() -> None:
            left = size
            while left > 0:
                left -= len(await stream.receive(FRAME))

        await asyncio.gather(out(), come())
        await stream.send(b".")
        await stream.receive()

    async def _push_bare(self, peer: Any, size: int) -> None:
        from atoll.protocol.errors import NetworkDown

        daemon = self._transport._daemon
        if daemon is None:
            raise NetworkDown("the own p2p daemon is restarting")
        pipe = await daemon.open(peer, self._transport._protocol(BARE), _PATIENCE)
        try:
            await pipe.write(memoryview(size.to_bytes(_COUNT, "big")))
            await _exchange(pipe, size)
        finally:
            pipe.close()


async def _answer(pipe: Pipe) -> None:
    from atoll.protocol.errors import StreamClosed

    try:
        # Who dies in the middle is told of where it was asked to push.
        with contextlib.suppress(StreamClosed):
            await _exchange(pipe, int.from_bytes(await pipe.read_exactly(_COUNT), "big"))
    finally:
        pipe.close()


async def _exchange(pipe: Pipe, size: int) -> None:
    """``size`` bytes each way, then one that says that all have come."""
    from atoll.protocol.errors import StreamClosed

    async def out() -> None:
        frame = memoryview(bytes(FRAME))
        for start in range(0, size, FRAME):
            await pipe.write(frame[: min(FRAME, size - start)])

    async def come() -> None:
        left, scratch = size, memoryview(bytearray(FRAME))

        def step() -> bool | None:
            nonlocal left
            while left > 0:
                count = pipe.take(scratch[: min(FRAME, left)])
                if not count:
                    return None if count is None else False
                left -= count
            return True

        while left > 0:
            if not await pipe.pull(step):
                raise StreamClosed(f"the stream ended with {left} bytes to come")

    await asyncio.gather(out(), come())
    # A stream of libp2p's may be cut as it is closed: who closes first has had the other's last byte.
    with contextlib.suppress(StreamClosed):
        await pipe.write(memoryview(b"."))
        await pipe.read_exactly(1)


def tcp_listener(host: str) -> socket.socket:
    """Takes plain TCP connections at a free port."""
    listener = socket.create_server((host, 0))
    listener.setblocking(False)
    return listener


async def receive_tcp(listener: socket.socket, count: int, size: int) -> None:
    """Take so many connections and exchange ``size`` bytes each way over each."""
    async with asyncio.TaskGroup() as group:
        for _ in range(count):  # one after another: a loop waits for one thing at a socket
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            group.create_task(_over_tcp(connection, size))


async def send_tcp(end: tuple[str, int], size: int) -> None:
    """Make a connection and exchange ``size`` bytes each way."""
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, end)
    await _over_tcp(connection, size)


async def _over_tcp(connection: socket.socket, size: int) -> None:
    loop = asyncio.get_running_loop()

    async def out() -> None:
        frame = memoryview(bytes(FRAME))
        for start in range(0, size, FRAME):
            await loop.sock_sendall(connection, frame[: min(FRAME, size - start)])

    async def come() -> None:
        left, scratch = size, memoryview(bytearray(FRAME))
        while left > 0:
            count = await loop.sock_recv_into(connection, scratch[: min(FRAME, left)])
            if not count:
                raise ConnectionError(f"the connection ended with {left} bytes to come")
            left -= count

    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(out(), come())
        await loop.sock_sendall(connection, b".")
        await loop.sock_recv(connection, 1)
