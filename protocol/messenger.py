"""Control messages over streams: one outgoing stream a peer, opened when there is something to say."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from .control import Control
from .errors import NetworkDown, PeerMisbehaved, PeerUnreachable, TransportError
from .messages import MAX_MEMBERS, decode, encode
from .transport import PeerId, Stream, Transport
from .wakeup import Wakeup

PROTOCOL = "control/1"
MAX_HEARD = 8192
"""Peers of whom it is remembered when they were heard: more than are known at once; ids cost nothing."""
_LARGE, _LARGEST = 512, 1 << 15
"""Bytes of messages that are remembered: below, remembering costs more than it saves; above, memory."""
QUEUE_LIMIT = 256
"""Messages kept for a peer that takes none; beyond it the oldest go first, since news replaces news."""


_NEVER = float("-inf")


def _read(data: bytes, peer: PeerId) -> Control:
    """Decode and validate a message. Raises :class:`PeerMisbehaved`, attributed to ``peer``."""
    if not _LARGE < len(data) <= _LARGEST:
        return decode(data, Control, peer)  # type: ignore[arg-type]
    try:
        return _read_again(data)
    except PeerMisbehaved as error:
        raise PeerMisbehaved(str(error), peer) from None


@lru_cache(maxsize=128)
def _read_again(data: bytes) -> Control:
    """What names a whole roster comes in the same bytes several times: a commit by each herald, and all that is sent to
    everyone by the peers of a simulation."""
    return decode(data, Control)  # type: ignore[arg-type]


def message_limit(chunks: int) -> int:
    """Bytes of the largest control message of a run: an entry shows up to eight bodies, and a body names every chunk by
    its hash and contributors, and every member."""
    body = chunks * (32 + MAX_MEMBERS // 8 + 8) + MAX_MEMBERS * 512 + 4096
    return 9 * body


@dataclass
class _Link:
    queue: deque[bytes] = field(default_factory=deque)
    wake: Wakeup = field(default_factory=Wakeup)
    task: asyncio.Task[None] | None = None
    stream: Stream | None = None
    used: bool = False
    """Whether anything was sent since the sender last looked."""


class Messenger:
    """Sends and receives control messages, and knows when a byte last came from whom.

    ``handler(peer, message)`` is called for each message, in order for each peer; it must not block.
    ``silence`` is T of the design: seconds after which a peer that says nothing counts as dead. ``lost()`` is called
    whenever a peer turned out to be out of reach (:meth:`failing`).
    """

    def __init__(
        self,
        transport: Transport,
        handler: Callable[[PeerId, Control], None],
        *,
        silence: float,
        admits: Callable[[PeerId], bool],
        refused: Callable[[PeerId, str], None],
        limit: int,
        lost: Callable[[], None] = lambda: None,
        idle: float = 120.0,
    ) -> None:
        self._transport = transport
        self._handler = handler
        self._silence = silence
        self._admits = admits
        self._refused = refused
        self._limit = limit
        self._lost = lost
        self._idle = idle
        self._closed = False
        self._links: dict[PeerId, _Link] = {}
        self._streams: dict[PeerId, dict[int, Stream]] = {}
        self._last_heard: dict[PeerId, float] = {}
        self._failed: dict[PeerId, float] = {}
        """When the last attempt to reach a peer failed, until one succeeds."""
        self.epoch = float("-inf")
        """When silence was last forgiven (see :meth:`forgive`)."""

    async def start(self) -> None:
        """Begin to receive."""
        await self._transport.serve(PROTOCOL, self._receive)

    async def close(self) -> None:
        """End all links; what is queued is dropped, and so is what is posted from now on."""
        self._closed = True
        links, self._links = self._links, {}
        self._failed.clear()
        for link in links.values():
            if link.task is not None:
                link.task.cancel()
        for link in links.values():
            if link.task is not None:
                await asyncio.gather(link.task, return_exceptions=True)

    # --- signs of life -------------------------------------------------------------------------------------------

    def watch(self, stream: Stream) -> None:
        """Count bytes on another protocol's stream as signs of life, until :meth:`unwatch`."""
        self._streams.setdefault(stream.peer, {})[id(stream)] = stream

    def unwatch(self, stream: Stream) -> None:
        streams = self._streams.get(stream.peer, {})
        if streams.pop(id(stream), None) is not None:
            self._note(stream.peer, stream.last_heard)
        if not streams:
            self._streams.pop(stream.peer, None)

    def heard(self, peer: PeerId) -> float:
        """``Transport.now()`` of the last byte from that peer; minus infinity when there was none."""
        last = self._last_heard.get(peer, _NEVER)
        streams = self._streams.get(peer)
        if streams is not None:
            for stream in streams.values():
                heard = stream.last_heard
                if heard > last:
                    last = heard
        return last

    def silent_for(self, peer: PeerId, since: float) -> float:
        """Seconds that the peer has been silent, counted from ``since`` at the earliest.

        The count also restarts when this process itself was held up (see :meth:`forgive`).
        """
        return self._transport.now() - max(self.heard(peer), since, self.epoch)

    def forgive(self) -> None:
        """Reset every silence detector: this process was frozen or starved, so silence proves nothing."""
        self.epoch = self._transport.now()

    def failing(self, peer: PeerId) -> bool:
        """Whether the last attempt to reach the peer failed, and it has not spoken since."""
        at = self._failed.get(peer)
        return at is not None and self.heard(peer) < at

    def unreachable(self) -> list[PeerId]:
        """Those for whom :meth:`failing` holds."""
        return [peer for peer in self._failed if self.failing(peer)]

    def forget(self, peer: PeerId) -> None:
        """Keep nothing of a peer that has been gone for long."""
        self._last_heard.pop(peer, None)
        self._failed.pop(peer, None)
        link = self._links.pop(peer, None)
        if link is not None and link.task is not None:
            link.task.cancel()

    def _note(self, peer: PeerId, at: float) -> None:
        if at > self._last_heard.get(peer, float("-inf")):
            self._last_heard.pop(peer, None)
            self._last_heard[peer] = at
            if len(self._last_heard) > MAX_HEARD:
                del self._last_heard[next(iter(self._last_heard))]

    # --- sending -------------------------------------------------------------------------------------------------

    def post(self, peer: PeerId, message: Control) -> None:
        """Queue a message for a peer; never blocks, never raises. Lost when the peer cannot be reached."""
        self._enqueue(peer, encode(message))

    def post_all(self, peers: Iterable[PeerId], message: Control) -> None:
        """:meth:`post` to several peers, encoding once; oneself is left out."""
        data = encode(message)
        for peer in peers:
            if peer != self._transport.peer_id:
                self._enqueue(peer, data)

    def _enqueue(self, peer: PeerId, data: bytes) -> None:
        if self._closed:
            return  # streams that others opened are served until the transport closes, and want answers
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _Link()
        if len(link.queue) >= QUEUE_LIMIT:
            link.queue.popleft()
        if link.stream is not None and not link.queue and link.stream.offer(data):
            link.used = True
            return
        link.queue.append(data)
        link.wake.set()
        if link.task is None or link.task.done():
            link.task = asyncio.get_running_loop().create_task(self._send(peer, link), name=f"control to {peer}")

    async def _send(self, peer: PeerId, link: _Link) -> None:
        """Drain one peer's queue; ends when there was nothing to send for a while."""
        try:
            while True:
                link.wake.clear()
                while link.queue:
                    data = link.queue[0]
                    try:
                        if link.stream is None:
                            link.stream = await self._transport.open(peer, PROTOCOL, timeout=self._silence)
                            self._failed.pop(peer, None)
                        async with asyncio.timeout(2 * self._silence):
                            await link.stream.send(data)
                    except NetworkDown:
                        # Says nothing about the peer; and what others sent meanwhile could not arrive.
                        self.forgive()
                        await asyncio.sleep(self._silence / 5)
                        continue
                    except PeerUnreachable:
                        self._failed[peer] = self._transport.now()
                        link.queue.clear()
                        self._lost()
                        # Whoever posts next pays one attempt; a dead peer must not keep us dialling.
                        await asyncio.sleep(self._silence / 5)
                        continue
                    except (TransportError, TimeoutError):
                        stream, link.stream = link.stream, None
                        if stream is not None:
                            await stream.close()
                        # A stream breaks when the peer restarted: the same message goes over a new one, once.
                        if peer in self._failed:
                            link.queue.clear()
                        self._failed[peer] = self._transport.now()
                        self._lost()
                        continue
                    self._failed.pop(peer, None)
                    if link.queue and link.queue[0] is data:
                        link.queue.popleft()
                link.used = False
                if not (await link.wake.wait(self._idle) or link.queue or link.used):
                    return
        finally:
            stream, link.stream = link.stream, None
            if stream is not None:
                await stream.close()

    # --- receiving -----------------------------------------------------------------------------------------------

    async def _receive(self, stream: Stream) -> None:
        peer = stream.peer
        if not self._admits(peer):
            self._refused(peer, "the manifest does not admit this peer")
            return

        def take(data: bytes) -> None:
            self._handler(peer, _read(data, peer))

        self.watch(stream)
        self._note(peer, self._transport.now())
        try:
            await stream.each(take, self._limit)
        except PeerMisbehaved as error:
            self._refused(peer, str(error))
        finally:
            self.unwatch(stream)
