"""The transport interface: what the protocol needs from a network, and nothing more.

Two implementations: :mod:`atoll.protocol.hivemind_transport` (libp2p, hivemind's DHT) and
:mod:`atoll.protocol.simulation` (an in-memory network under a virtual clock). The protocol code is the same on
both: it uses plain asyncio on whatever loop runs it, and takes time and randomness from its transport only.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import NewType, ParamSpec, TypeVar

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58 text (``12D3KooW…``). Ed25519 ids carry the public key."""


class Standing(Enum):
    """What a peer is to this one. Each standing has places of its own."""

    STRANGER = "stranger"
    """Not admitted by the manifest: it is told so, and may fetch the manifest."""
    UNKNOWN = "unknown"
    """Admitted, and neither its record nor a word of it is known yet."""
    KNOWN = "known"
    """Its record is known, or it has spoken."""
    MEMBER = "member"
    """In a round with this peer now: what others do must not keep it out."""


P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_FRAME_LIMIT = 4 * 1024 * 1024
"""Bytes of the largest control frame that a reader takes unless it names another limit."""


class Stream(ABC):
    """A duplex, ordered, reliable stream of frames to one peer.

    On the wire a frame is a big-endian uint32 length and that many bytes. Sending and receiving may run in
    different tasks at once. The end of a libp2p stream is silent and says nothing, so the protocols on top
    send explicit ends.
    """

    peer: PeerId
    """Who is at the other end; authenticated by the transport."""
    bytes_sent: int
    """Payload bytes sent so far, without the frame lengths."""
    bytes_received: int
    last_heard: float
    """``Transport.now()`` when the last byte arrived (partial frames count: any byte is a sign of life)."""

    @abstractmethod
    async def send(self, *parts: bytes | bytearray | memoryview) -> None:
        """Send one frame, the parts one after another; returns when the transport has taken it (back-pressure).

        Raises :class:`StreamClosed` when the other side is gone.
        """

    def offer(self, frame: bytes) -> bool:
        """Send a small frame here and now, if that takes no waiting; False, with nothing sent, if it would, or the
        stream has ended, or the transport cannot tell. Not while :meth:`send` is under way."""
        return False

    @abstractmethod
    async def receive(self, limit: int = DEFAULT_FRAME_LIMIT) -> bytes:
        """The next frame. Raises :class:`StreamClosed` at the end, :class:`FrameTooLarge` above ``limit``."""

    async def each(self, handle: Callable[[bytes], None], limit: int = DEFAULT_FRAME_LIMIT) -> None:
        """Give every frame to ``handle``, one after another; ends when :meth:`receive` would raise, or ``handle``
        does, with what was raised."""
        while True:
            handle(await self.receive(limit))

    async def receive_view(self, limit: int = DEFAULT_FRAME_LIMIT) -> memoryview:
        """:meth:`receive` without a copy, where the transport can; the memory is the caller's."""
        return memoryview(await self.receive(limit))

    @abstractmethod
    async def close(self) -> None:
        """Close both directions; what was sent is still delivered. Idempotent, never raises, never hangs."""


class Dht(ABC):
    """The run's key-value store of signed, expiring records: one subkey a peer under each of a few fixed keys.

    The record validator given to the implementation refuses what is not signed by the peer of its subkey.
    """

    @abstractmethod
    async def publish(self, key: str, value: bytes, expires_in: float) -> bool:
        """Store ``value`` under ``(key, own peer id)`` for ``expires_in`` seconds. False when nobody took it."""

    @abstractmethod
    async def read(self, key: str) -> Mapping[PeerId, bytes]:
        """The unexpired values under ``key``, by peer. Empty when there are none or nobody answers."""


class Transport(ABC):
    """One peer's network: identity, streams, the DHT, clocks, randomness and an executor."""

    peer_id: PeerId
    dht: Dht
    random: random.Random
    """The only source of randomness for protocol code; with a seed it gives the same after a restart."""

    @abstractmethod
    def nonce(self) -> bytes:
        """16 bytes that nobody has had before, an earlier process of this peer with the same seed included."""

    @abstractmethod
    def now(self) -> float:
        """Seconds on a monotonic clock that counts while the machine is suspended. Durations only."""

    @abstractmethod
    def wall(self) -> float:
        """Seconds since 1970; for DHT expiry and logs only. May jump, may differ between peers."""

    @abstractmethod
    def correct(self, seconds: float) -> None:
        """From now on :meth:`wall`, and the DHT with it, is this machine's clock and so many seconds."""

    @abstractmethod
    def contacts(self) -> list[PeerId]:
        """Some peers of the run that can be asked now, whether anything was read from the DHT or not."""

    @abstractmethod
    async def open(self, peer: PeerId, protocol: str, *, timeout: float) -> Stream:
        """Open a stream to ``peer`` for the named protocol.

        Raises :class:`PeerUnreachable` when there is no answer within ``timeout`` seconds, and :class:`NetworkDown`
        when this machine has no way to the network now, which says nothing about the peer.
        """

    @abstractmethod
    async def serve(self, protocol: str, handler: Callable[[Stream], Awaitable[None]]) -> None:
        """From now on call ``handler`` in a task of its own for every stream that a peer opens for ``protocol``.

        The stream is closed when the handler returns. A :class:`TransportError` in a handler is logged and
        swallowed; any other exception is a defect and reported as one.
        """

    @abstractmethod
    def guard(self, standing: Callable[[PeerId], Standing]) -> None:
        """From now on ask ``standing`` what a peer is to this one, for each stream that it opens: how many it may have
        depends on it (see :mod:`.quota`). Until then everybody counts as known."""

    @abstractmethod
    async def offload(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a CPU-heavy function off the event loop (a bounded thread pool; in the simulation: at once)."""

    @abstractmethod
    def addresses(self) -> list[str]:
        """Multiaddresses under which others may reach this peer, without the ``/p2p/`` part."""

    @abstractmethod
    def learn(self, peer: PeerId, addresses: list[str]) -> None:
        """Remember addresses of a peer, to be dialled when a stream to it is opened."""

    @abstractmethod
    async def close(self) -> None:
        """Leave the network and end everything started here. Idempotent; bounded by the implementation."""
