"""What carries bytes in the simulated network: links, uplinks and downlinks, and the streams over them.

A frame is cut into pieces that queue at the sender's uplink, travel, and queue at the receiver's downlink. Both
serve their streams in turn and small messages every second time, so a heartbeat waits for about one piece however
much bulk is under way. A piece passes a downlink while it arrives (bandwidths overlap, they do not add up). A stream
holds at most a window of bytes that were sent and not yet read; a reader that waits for the rest of a frame reads
what arrives of it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Final

import msgspec

from .errors import FrameTooLarge, StreamClosed
from .simloop import DEAD, FROZEN, RUNNING, SimHandle, SimLoop, SimProcess
from .transport import DEFAULT_FRAME_LIMIT, PeerId, Stream

if TYPE_CHECKING:
    from .simulation import SimHost

HEADER = 4
PACKET = 1460
SMALL: Final = 2048
PIECE_TIME: Final = 0.05
"""Seconds that one piece may occupy the slowest part of its way: slow links have small pieces."""
RETRANSMIT: Final = 0.2
"""Seconds before the first retransmission; each further one waits twice as long (RFC 6298)."""


class Link:
    """The way from one host to another: its conditions, and what is stuck in it while it is cut."""

    def __init__(self, loop: SimLoop, rng: random.Random, latency: float, jitter: float, loss: float) -> None:
        self.loop = loop
        self.random = rng
        self.latency = latency
        """Seconds one way."""
        self.jitter = jitter
        """Share of the latency that is added at most, at random."""
        self.loss = loss
        """Probability that a packet is lost (and sent again, which costs time)."""
        self.bandwidth = math.inf
        """Bytes per second of this way alone."""
        self.cut = False
        self.free_at = 0.0
        self._held: list[tuple[float, Callable[[], None]]] = []

    def delay(self) -> float:
        return self.latency * (1 + self.jitter * self.random.random()) if self.jitter else self.latency

    def setback(self, size: int) -> float:
        """Seconds that lost packets cost a piece of ``size`` bytes."""
        packets = -(-max(size, 1) // PACKET)
        if self.random.random() >= 1 - (1 - self.loss) ** packets:
            return 0.0
        round_trip = 2 * self.latency
        if packets > 3:
            return round_trip  # the packets behind it tell: fast retransmit
        timeout = total = RETRANSMIT + round_trip
        while self.random.random() < self.loss:
            timeout *= 2
            total += timeout
        return total

    def carry(self, when: float, action: Callable[[], None]) -> None:
        """Do ``action`` at the far end at ``when``; while the link is cut it waits."""
        self.loop.kernel_at(when, self._carried, action)

    def _carried(self, action: Callable[[], None]) -> None:
        if self.cut:
            self.hold(lambda: self._carried(action))
        else:
            action()

    def hold(self, release: Callable[[], None]) -> None:
        """Call ``release`` some time after the link is healed."""
        self._held.append((self.loop.clock, release))

    def heal(self) -> None:
        self.cut = False
        held, self._held = self._held, []
        now = self.loop.clock
        for since, release in held:
            # The sender tries again at growing intervals, so what was stuck long arrives long after.
            tries = math.ceil(math.log2((now - since) / RETRANSMIT + 1) - 1e-9)
            self.loop.kernel_at(max(now, since + RETRANSMIT * (2**tries - 1)) + self.latency, release)


class Nic:
    """One incarnation's network card and sockets: dead when the process is."""

    def __init__(self, host: SimHost, process: SimProcess, loop: SimLoop, upload: float, download: float) -> None:
        self.host = host
        self.process = process
        self.loop = loop
        self.uplink = Uplink(loop, upload)
        self.downlink = Downlink(loop, download)
        self.wires: dict[int, Wire] = {}

    def connected(self, other: Nic) -> bool:
        return any(other is wire.other(self) and wire.open for wire in self.wires.values())


class Piece(msgspec.Struct, eq=False):
    """Some bytes of one pipe, and the frames that end in them."""

    pipe: Pipe
    size: int = 0
    frames: list[bytes] = msgspec.field(default_factory=list)
    head: int | None = None
    """Length of the frame that begins or goes on in this piece without ending in it."""
    eof: bool = False
    earliest: float = 0.0
    """When the downlink may begin to take it: its first byte is there."""


class Uplink:
    """Serialises the pieces of all streams of a sender."""

    def __init__(self, loop: SimLoop, rate: float) -> None:
        self.loop = loop
        self.rate = rate
        self.free_at = 0.0
        self.paused = False
        self._small: deque[Pipe] = deque()
        self._bulk: deque[Pipe] = deque()
        self._turn = False
        self._scheduled = False

    def wake(self, pipe: Pipe) -> None:
        """``pipe`` may have something to send."""
        if pipe.waits_up or not pipe.sendable():
            return
        if self.idle:
            self._transmit(pipe)
        else:
            self._append(pipe)
        self._schedule()

    def _append(self, pipe: Pipe) -> None:
        pipe.waits_up = True
        (self._small if pipe.accepted - pipe.transmitted <= SMALL else self._bulk).append(pipe)

    @property
    def idle(self) -> bool:
        """Whether what is sent now leaves at once."""
        return not (self.paused or self._small or self._bulk) and self.free_at <= self.loop.clock

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._schedule()

    def _schedule(self) -> None:
        if (self._small or self._bulk) and not self._scheduled and not self.paused:
            self._scheduled = True
            self.loop.kernel_at(max(self.free_at, self.loop.clock), self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        if self.paused:
            return
        while (self._small or self._bulk) and self.free_at <= self.loop.clock:
            self._turn = not self._turn
            queue = self._small if self._small and (self._turn or not self._bulk) else self._bulk
            pipe = queue.popleft()
            pipe.waits_up = False
            if pipe.sendable():
                self._transmit(pipe)
        self._schedule()

    def _transmit(self, pipe: Pipe) -> None:
        piece = pipe.take()
        start = self.loop.clock
        self.free_at = end = start + piece.size / self.rate
        pipe.travel(piece, start, end)
        if pipe.sendable():
            self._append(pipe)


class Downlink:
    """Serialises the pieces of all streams of a receiver."""

    def __init__(self, loop: SimLoop, rate: float) -> None:
        self.loop = loop
        self.rate = rate
        self.free_at = 0.0
        self._current: Piece | None = None
        self._small: deque[Pipe] = deque()
        self._bulk: deque[Pipe] = deque()
        self._turn = False

    def offer(self, piece: Piece) -> None:
        pipe = piece.pipe
        if self._current is None and not self._small and not self._bulk:
            # Between two events the line may have been free: count from when the first byte was there.
            start = self.free_at if self.free_at > piece.earliest else piece.earliest
            self.free_at = end = start + piece.size / self.rate
            if end <= self.loop.clock + 1e-9:
                pipe.deliver(piece)
            else:
                self._current = piece
                self.loop.kernel_at(end, self._done)
            return
        pipe.arriving.append(piece)
        if len(pipe.arriving) == 1:
            (self._small if piece.size <= SMALL else self._bulk).append(pipe)

    def _done(self) -> None:
        piece, self._current = self._current, None
        if self._small or self._bulk:
            self._turn = not self._turn
            queue = self._small if self._small and (self._turn or not self._bulk) else self._bulk
            pipe = queue.popleft()
            self._current = pipe.arriving.popleft()
            if pipe.arriving:
                (self._small if pipe.arriving[0].size <= SMALL else self._bulk).append(pipe)
            self.free_at = self.loop.clock + self._current.size / self.rate
            self.loop.kernel_at(self.free_at, self._done)
        assert piece is not None
        piece.pipe.deliver(piece)


class Pipe:
    """One direction of a stream. Byte counts include the headers and run from the stream's beginning."""

    __slots__ = (
        "_deliver_at",
        "_downlink",
        "_ended",
        "_held",
        "_last_arrival",
        "_loop",
        "_offset",
        "_queue",
        "_refused",
        "_uplink",
        "accepted",
        "acknowledged",
        "arrived",
        "arriving",
        "back",
        "consumed",
        "eof",
        "frames",
        "link",
        "partial",
        "reader",
        "transmitted",
        "waits_up",
        "whole",
        "window",
        "writer",
    )

    def __init__(self, writer: SimStream, reader: SimStream, link: Link, back: Link, window: int) -> None:
        self.writer = writer
        self.reader = reader
        self.link = link
        self.back = back
        rate = min(writer.nic.uplink.rate, reader.nic.downlink.rate, link.bandwidth)
        fill = 2 * rate * (link.latency + back.latency)
        self.window = max(window, int(fill)) if math.isfinite(fill) else window
        self._loop = link.loop
        self._uplink = writer.nic.uplink
        self._downlink = reader.nic.downlink
        # The sender's side.
        self._queue: deque[bytes | None] = deque()  # None: the end
        self._offset = 0
        self.accepted = 0
        self.transmitted = 0
        self.acknowledged = 0
        self.waits_up = False
        self._ended = False
        # On the way.
        self._last_arrival = 0.0
        self._deliver_at = 0.0
        self._held: list[Piece] = []
        self.arriving: deque[Piece] = deque()
        # The receiver's side.
        self.frames: deque[tuple[int, bytes]] = deque()
        """Frames that have arrived, each with the byte count at its end."""
        self.partial: int | None = None
        """Length of the frame of which a part has arrived."""
        self.arrived = 0
        self.whole = 0
        """Byte count at the end of the last frame that has arrived whole."""
        self.consumed = 0
        self.eof = False
        self._refused = False

    # -- the sender's side

    def push(self, frame: bytes) -> None:
        size, uplink = HEADER + len(frame), self._uplink
        fits = size <= PACKET and self.accepted + size <= self.acknowledged + self.window
        if fits and not self._queue and uplink.idle:
            # Most frames are one small message on a line that is free: what the queues would come to, at once.
            self.accepted += size
            self.transmitted += size
            piece = Piece(self, size, [frame])
            start = self._loop.clock
            uplink.free_at = end = start + size / uplink.rate
            self.travel(piece, start, end)
            return
        self._queue.append(frame)
        self.accepted += size
        uplink.wake(self)

    def end(self) -> None:
        """Nothing is sent after what has been sent."""
        if not self._ended:
            self._ended = True
            self._queue.append(None)
            self._uplink.wake(self)

    def drop(self) -> None:
        """Forget what has not left yet."""
        self._ended = True
        self._queue.clear()

    def _piece_size(self) -> int:
        rate = min(self.writer.nic.uplink.rate, self.reader.nic.downlink.rate, self.link.bandwidth)
        largest = self.writer.wire.piece
        return largest if rate * PIECE_TIME >= largest else max(PACKET, int(rate * PIECE_TIME))

    def sendable(self) -> bool:
        if not self._queue:
            return False
        room = self.window - (self.transmitted - self.acknowledged)
        return (
            room >= self.writer.wire.piece
            or self._queue[0] is None
            or room >= min(self._piece_size(), self.accepted - self.transmitted)
        )

    def take(self) -> Piece:
        """Cut the next piece off what waits; :meth:`sendable` has said that there is one."""
        piece = Piece(self)
        queue = self._queue
        if len(queue) == 1 and queue[0] is not None and not self._offset and len(queue[0]) <= PACKET - HEADER:
            frame = queue.popleft()  # most pieces are one small message
            assert frame is not None
            piece.frames.append(frame)
            piece.size = HEADER + len(frame)
            self.transmitted += piece.size
            return piece
        room = self._piece_size()
        while queue and piece.size < room:
            frame = queue[0]
            if frame is None:
                queue.popleft()
                piece.eof = True
                break
            rest = HEADER + len(frame) - self._offset
            if rest <= room - piece.size:
                queue.popleft()
                self._offset = 0
                piece.size += rest
                piece.frames.append(frame)
            else:
                self._offset += room - piece.size
                piece.size = room
                piece.head = len(frame)
        if queue and queue[0] is None and not piece.eof:
            queue.popleft()
            piece.eof = True
        self.transmitted += piece.size
        return piece

    def travel(self, piece: Piece, start: float, end: float) -> None:
        """The piece leaves the uplink from ``start`` to ``end``."""
        link = self.link
        delay = link.delay() if link.jitter else link.latency
        first, last = start + delay, end + delay
        if link.bandwidth != math.inf:
            first = max(first, link.free_at)
            link.free_at = last = max(last, first + piece.size / link.bandwidth)
        if link.loss:
            setback = link.setback(piece.size)
            first += setback
            last += setback
        if last < self._last_arrival:
            last = self._last_arrival
        self._last_arrival = when = last
        need = piece.size / self._downlink.rate
        if when < first + need:
            when = first + need
        if when < self._deliver_at:
            when = self._deliver_at
        self._deliver_at = when
        piece.earliest = when - need
        self._loop.kernel_at(when, self._arrive, piece)

    @property
    def last_departure(self) -> float:
        """When everything that has left will have arrived at the downlink."""
        return self._deliver_at

    def _acknowledge(self) -> None:
        """Tell the sender what has been read, unless the way back is cut."""
        if self.acknowledged != self.consumed and not self.back.cut:
            self.acknowledged = self.consumed
            self.writer.drained()
            if self._queue:
                self._uplink.wake(self)

    def healed(self) -> None:
        self._acknowledge()

    # -- the receiver's side

    def _arrive(self, piece: Piece) -> None:
        if self._held:
            self._held.append(piece)
        elif self.link.cut:
            self._held.append(piece)
            self.link.hold(self._release)
        elif self.reader.nic.process.state == DEAD:
            self._refuse()
        else:
            self._downlink.offer(piece)

    def _release(self) -> None:
        if self.link.cut:
            self.link.hold(self._release)
            return
        held, self._held = self._held, []
        for piece in held:
            piece.earliest = self._loop.clock
            self._enter(piece)

    def _enter(self, piece: Piece) -> None:
        if self.reader.nic.process.state == DEAD:
            self._refuse()
        else:
            self._downlink.offer(piece)

    def _refuse(self) -> None:
        """Data for nobody: the machine answers with a reset, if it has power."""
        if not self._refused and self.reader.nic.host.powered:
            self._refused = True
            writer = self.writer
            self.back.carry(self._loop.clock + self.back.delay(), lambda: writer.break_("reset by the other side"))

    def deliver(self, piece: Piece) -> None:
        """The piece has arrived whole."""
        reader = self.reader
        state = reader.nic.process.state
        if state == DEAD or (reader.closed and piece.size):
            self._refuse()
            if state == DEAD:
                return
        self.arrived += piece.size
        self.partial = piece.head
        if reader.closed:
            self.whole += sum(HEADER + len(frame) for frame in piece.frames)
            self.consume(self.arrived)
            return
        wire = reader.wire
        for frame in piece.frames:
            self.whole = whole = self.whole + HEADER + len(frame)
            self.frames.append((whole, frame))
            wire.observe.delivered(wire, self.writer, reader, frame)
        if piece.eof:
            self.eof = True
        reader.arrived(frozen=state == FROZEN)

    def consume(self, position: int) -> None:
        if position > self.consumed:
            self.consumed = position
            self._acknowledge()


class SimStream(Stream):
    """One end of a simulated stream."""

    def __init__(self, wire: Wire, nic: Nic, peer: PeerId) -> None:
        self.wire = wire
        self.nic = nic
        self.peer = peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_heard = nic.host.monotonic()
        self.closed = False
        self.broken: str | None = None
        self.outgoing: Pipe
        self.incoming: Pipe
        self._frames_received = 0
        self._limit = 0
        self._unreadable = False
        self._stale = False
        self._reader: asyncio.Future[None] | None = None
        """What a task that receives waits for."""
        self._handle: Callable[[bytes], None] | None = None
        """What frames are for while a task waits in :meth:`each`; it runs in that task's context."""
        self._context: Context | None = None
        self._due = False
        """Whether they are about to be handed over."""
        self._failure: Exception | None = None
        """What came of that."""
        self._writers: list[asyncio.Future[None]] = []

    @property
    def ended(self) -> bool:
        return self.closed or self.broken is not None

    async def send(self, *parts: bytes | bytearray | memoryview) -> None:
        """As the interface says. A send that is cancelled while it waits has sent the whole frame all the same."""
        if self.nic.process.state == DEAD:
            await self.nic.loop.create_future()
        self._check_send()
        data = parts[0] if len(parts) == 1 and type(parts[0]) is bytes else b"".join(parts)
        pipe = self.outgoing
        self.bytes_sent += len(data)
        pipe.push(data)
        while pipe.accepted - pipe.acknowledged > pipe.window:
            waiter: asyncio.Future[None] = self.nic.loop.create_future()
            self._writers.append(waiter)
            await waiter
            self._check_send()

    def offer(self, frame: bytes) -> bool:
        pipe = self.outgoing
        if self.closed or self.broken is not None or self.incoming.eof or self.nic.process.state == DEAD:
            return False
        if pipe.accepted - pipe.acknowledged + HEADER + len(frame) > pipe.window:
            return False
        self.bytes_sent += len(frame)
        pipe.push(frame)
        return True

    def _check_send(self) -> None:
        if self.closed:
            raise StreamClosed(f"the stream to {self.peer} was closed here; open another one to send")
        if self.broken is not None:
            raise StreamClosed(f"the stream to {self.peer} broke: {self.broken}")
        if self.incoming.eof:
            raise StreamClosed(f"{self.peer} closed the stream")

    async def receive(self, limit: int = DEFAULT_FRAME_LIMIT) -> bytes:
        if self.nic.process.state == DEAD:
            await self.nic.loop.create_future()
        while (frame := self._next(limit)) is None:
            await self._wait(limit)
        return frame

    async def each(self, handle: Callable[[bytes], None], limit: int = DEFAULT_FRAME_LIMIT) -> None:
        """As the interface says. Frames are handed over by a callback: the task that waits here is not woken for them,
        since most of what happens in a simulation is a small frame for a handler."""
        if self.nic.process.state == DEAD:
            await self.nic.loop.create_future()
        self._context = copy_context()
        while True:
            while (frame := self._next(limit)) is not None:
                handle(frame)
            self._handle = handle
            try:
                await self._wait(limit)
            finally:
                self._handle = None
            if self._failure is not None:
                raise self._failure

    def _next(self, limit: int) -> bytes | None:
        """The next frame, if it has arrived. Raises as :meth:`receive`."""
        pipe = self.incoming
        if self.closed:
            raise StreamClosed(f"the stream to {self.peer} was closed here; open another one to receive")
        if self._unreadable:
            raise StreamClosed(f"the stream to {self.peer} ended at a frame above the limit; close it")
        if pipe.frames:
            position, frame = pipe.frames[0]
            size = len(frame)
            if size > limit:
                self._check_limit(size, limit)
            pipe.frames.popleft()
            self._frames_received += size
            if self.bytes_received < self._frames_received:
                self.bytes_received = self._frames_received
            pipe.consume(position)
            return frame
        if self.broken is not None:
            raise StreamClosed(f"the stream to {self.peer} broke: {self.broken}")
        if pipe.partial is not None:
            self._check_limit(pipe.partial, limit)
        if pipe.eof:
            raise StreamClosed(f"{self.peer} closed the stream")
        return None

    async def _wait(self, limit: int) -> None:
        """Until there may be something to receive."""
        if self._reader is not None:
            raise RuntimeError("two tasks receive from one stream at once")
        self._limit = limit
        # A plain future: nobody else ever sees it, so its hash does not matter.
        self._reader = asyncio.Future(loop=self.nic.loop)
        self._read_partial()
        try:
            await self._reader
        finally:
            self._reader = None

    def _hand_over(self) -> None:
        """Frames have arrived for a task that is in :meth:`each`."""
        self._due = False
        reader, handle = self._reader, self._handle
        if reader is None or handle is None:
            return  # it has been woken by something else, and sees to them itself
        try:
            while (frame := self._next(self._limit)) is not None:
                handle(frame)
        except Exception as error:
            self._failure = error
            self._wake_reader()
        else:
            pipe = self.incoming
            if pipe.partial is not None or pipe.arrived > pipe.consumed:
                self._read_partial()

    def _check_limit(self, length: int, limit: int) -> None:
        if length > limit:
            self._unreadable = True
            raise FrameTooLarge(f"a frame of {length} bytes from {self.peer}, at most {limit} expected", self.peer)

    def _read_partial(self) -> None:
        """The reader waits for the rest of a frame: it takes what is there."""
        pipe = self.incoming
        if pipe.partial is not None:
            part = max(0, pipe.arrived - pipe.whole - HEADER)
            self.bytes_received = max(self.bytes_received, self._frames_received + part)
        if pipe.arrived > pipe.consumed:
            pipe.consume(pipe.arrived)

    async def close(self) -> None:
        if not self.closed and self.nic.process.state != DEAD:
            self.shut()

    def shut(self) -> None:
        """:meth:`close`, at once."""
        if self.closed:
            return
        self.closed = True
        if self.broken is None:
            self.outgoing.end()
        self._discard()
        self._wake()
        self.wire.changed()

    def _discard(self) -> None:
        pipe = self.incoming
        pipe.frames.clear()
        pipe.consume(pipe.arrived)

    # -- what happens to it

    def arrived(self, *, frozen: bool) -> None:
        """Bytes, or the end, have arrived in the incoming pipe."""
        pipe = self.incoming
        if frozen:
            self._stale = True
        else:
            nic = self.nic
            self.last_heard = nic.loop.clock + nic.host.boot_offset  # SimHost.monotonic, without a call
        if pipe.eof:
            self.outgoing.drop()
            self._wake()
        elif (reader := self._reader) is not None:
            if pipe.frames and self._handle is not None:
                if not self._due:
                    self._due = True
                    self.nic.loop.call_soon(self._hand_over, context=self._context)
            elif pipe.frames or (pipe.partial is not None and pipe.partial > self._limit):
                if not reader.done():
                    reader.set_result(None)
            elif not frozen:
                self._read_partial()

    def thawed(self) -> None:
        """The process runs again, and sees what arrived while it was frozen."""
        if self._stale:
            self._stale = False
            self.last_heard = self.nic.host.monotonic()
            if self._reader is not None and not self.incoming.frames:
                self._read_partial()

    def break_(self, reason: str) -> None:
        """The stream fails at this end. Frames that have arrived can still be read."""
        if not self.ended:
            self.broken = reason
            self.outgoing.drop()
            self._wake()
            self.wire.broke(self, reason)
        elif self.closed and self.broken is None:
            self.broken = reason
            self.outgoing.drop()

    def drained(self) -> None:
        if self._writers and self.outgoing.accepted - self.outgoing.acknowledged <= self.outgoing.window:
            self._wake_writers()

    def _wake(self) -> None:
        self._wake_reader()
        self._wake_writers()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writers(self) -> None:
        writers, self._writers = self._writers, []
        for waiter in writers:
            if not waiter.done():
                waiter.set_result(None)


class Wire:
    """A stream as the network sees it: two ends, two pipes.

    timeout: seconds of silence (a cut, a freeze, a power cut) after which both ends give the stream up.
    """

    def __init__(
        self,
        serial: int,
        protocol: str,
        near: Nic,
        far: Nic,
        there: Link,
        back: Link,
        *,
        window: int,
        piece: int,
        timeout: float,
        observe: WireObserver,
    ) -> None:
        self.serial = serial
        self.protocol = protocol
        self.piece = piece
        self._timeout = timeout
        self.observe = observe
        self._loop = near.loop
        self._links = (there, back)
        self._expiry: SimHandle | None = None
        self.near = SimStream(self, near, far.host.peer_id)
        self.far = SimStream(self, far, near.host.peer_id)
        self.near.outgoing = self.far.incoming = Pipe(self.near, self.far, there, back, window)
        self.far.outgoing = self.near.incoming = Pipe(self.far, self.near, back, there, window)
        near.wires[serial] = far.wires[serial] = self

    @property
    def open(self) -> bool:
        return not (self.near.ended or self.far.ended)

    def other(self, nic: Nic) -> Nic:
        return self.far.nic if nic is self.near.nic else self.near.nic

    def end_at(self, nic: Nic) -> SimStream:
        return self.near if nic is self.near.nic else self.far

    def broke(self, end: SimStream, reason: str) -> None:
        self.observe.broke(self, end, reason)
        self.changed()

    def changed(self) -> None:
        """An end has closed or broken."""
        if self.near.ended and self.far.ended:
            self.near.nic.wires.pop(self.serial, None)
            self.far.nic.wires.pop(self.serial, None)
            if self._expiry is not None:
                self._expiry.cancel()
                self._expiry = None

    def reset(self, reason: str) -> None:
        """Both ends fail."""
        self.near.break_(reason)
        self.far.break_(reason)

    def killed(self, nic: Nic) -> None:
        """The process at one end is dead; its machine says so to the other end."""
        mine = self.end_at(nic)
        other = self.far if mine is self.near else self.near
        link = self._links[0] if mine is self.near else self._links[1]
        when = max(self._loop.clock + link.delay(), mine.outgoing.last_departure)
        mine.break_("its process was killed")
        if not other.ended:
            link.carry(when, lambda: other.break_("reset by the other side"))

    def check_silence(self) -> None:
        """Something between the ends has changed: start or stop the clock of the stream's death."""
        near, far = self.near.nic.process.state, self.far.nic.process.state
        silent = near != RUNNING or far != RUNNING or self._links[0].cut or self._links[1].cut
        if silent and self._expiry is None:
            if not (self.near.ended and self.far.ended):
                self._expiry = self._loop.kernel_at(self._loop.clock + self._timeout, self._expire)
        elif not silent:
            if self._expiry is not None:
                self._expiry.cancel()
                self._expiry = None
            self.near.outgoing.healed()
            self.far.outgoing.healed()

    def _expire(self) -> None:
        self._expiry = None
        self.reset(f"no sign of life for {self._timeout:g} s")


class WireObserver:
    """Who is told what happens on streams."""

    def delivered(self, wire: Wire, source: SimStream, target: SimStream, frame: bytes) -> None:
        raise NotImplementedError

    def broke(self, wire: Wire, end: SimStream, reason: str) -> None:
        raise NotImplementedError
