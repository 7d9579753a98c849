"""Measures this peer's link alone, with a few others at once, between rounds. docs/protocol.md is the format.

Several partners at once, since the link of one may be the smaller; what goes to all of them together is what the own
link carries. Who sends keeps few bytes under way and waits for their acknowledgement, so that a slow link is not filled
for long, and what was sent is not what some buffer has swallowed. Sending stops after :data:`SECONDS` or
:data:`BYTES`, whichever is first. Both ends break off when a round may begin.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import Fault, PeerMisbehaved, PeerSlow, TransportError
from .rates import Rates
from .refusals import Events
from .transport import PeerId, Stream, Transport
from .wakeup import Wakeup

PROTOCOL = "probe/1"
ASK, READY, BUSY, DATA, ACK, END = range(6)
SMALLEST, LARGEST = 1 << 10, 1 << 14
"""Bytes of a data frame, its kind included."""
BYTES = 1 << 21
"""… of all data frames in one direction of one stream, at most."""
SECONDS = 1.0
"""… and for how long they are sent."""
FIRST, WINDOW = 1 << 13, 1 << 20
"""Bytes that are not acknowledged yet: so many at first, more while the way is not filled, so many at most."""
FILLED = 1.5, 0.02
"""An acknowledgement that takes so many times the shortest, and so many seconds, says that the way is filled."""
ASKING = 2.0
"""Seconds for which a peer waits for a stream to a partner and its answer."""
PHASE = 3.0
"""Seconds until all that was sent in one direction is acknowledged; else the partner is left out."""
STALL = 4.0
"""Seconds for which either end waits for a frame: longer than the other waits for its slowest partner."""
LIMIT = 12.0
"""Seconds that a probe takes at either end, whatever the other one does."""
LOOK = 0.1
"""Seconds between two looks at whether a round may begin."""
ROOM = 4.0
"""Seconds free of rounds for which a peer begins a probe."""
ROOM_TO_ANSWER = 2.5
"""… and answers one."""
PARTNERS = 3
TRIES = 4
"""Times that a peer tries again, a little later, while somebody is busy; then it takes who is there."""
PAUSE = 2.0, 8.0
"""Seconds between two of them, drawn from this range."""
SPREAD = 30.0
"""Seconds after which a probe begins once it is due, at most, drawn at random: rounds end for all at once."""
EACH = 60.0
"""Seconds between two probes of one peer that are answered."""
ASKS = 8
"""Times that a peer may ask in that time and send nothing, as one does that finds another partner busy."""
AT_ONCE, REFILL = 4, 15.0
"""Probes answered in a row, of whomever, and seconds for each further one."""

T = TypeVar("T")


@dataclass
class Meter:
    """What has arrived over all streams together, on one clock."""

    points: list[tuple[float, int]] = field(default_factory=list)

    def add(self, now: float, size: int) -> None:
        self.points.append((now, size + (self.points[-1][1] if self.points else 0)))

    def rate(self) -> float:
        """Bytes per second of the last two thirds, since connections find their rate in the first; 0 when too little
        has come to tell. A line is fitted, since arrivals of several streams come in bunches."""
        total = self.points[-1][1] if self.points else 0
        points = [(at, size) for at, size in self.points if 3 * size >= total]
        if len(points) < 4:
            return 0.0
        middle: float = sum(at for at, _ in points) / len(points)
        mean: float = sum(size for _, size in points) / len(points)
        spread = sum((at - middle) ** 2 for at, _ in points)
        if not spread:
            return 0.0
        return sum((at - middle) * (size - mean) for at, size in points) / spread


class Quota:
    """How many probes are answered: each costs at most a second or two of the link and 2 MiB each way."""

    def __init__(self, now: float) -> None:
        self._asked: dict[PeerId, tuple[float, int]] = {}
        """Since when, and how often; at most as many as the peers that are known."""
        self._left, self._since = float(AT_ONCE), now

    def ask(self, peer: PeerId, now: float) -> bool:
        """Whether a question of that peer's may be answered."""
        self._asked = {other: asked for other, asked in self._asked.items() if now - asked[0] < EACH}
        since, count = self._asked.get(peer, (now, 0))
        self._asked[peer] = (since, count + 1)
        self._left = min(self._left + (now - self._since) / REFILL, AT_ONCE)
        self._since = now
        return count < ASKS and self._left >= 1

    def take(self, peer: PeerId, now: float) -> None:
        """The probe begins, or what came was none; counts once for each question that was answered."""
        if self._asked.get(peer, (now, 0))[1] <= ASKS:
            self._left -= 1
        self._asked[peer] = (now, ASKS + 1)


class _Busy(Exception):
    """A partner has no time now."""


class Prober:
    """Measures this peer's link when ``rates`` says so, and answers others.

    room: seconds for which no round will want this peer's link, as far as it knows; 0 while one does.
    partners: peers to measure with, the best first, or none. known: whether a peer is one of the run's that this one
    has a record or a word of. refused, events: as everywhere.
    """

    def __init__(
        self, transport: Transport, rates: Rates, *, room: Callable[[], float],
        partners: Callable[[], Sequence[PeerId]], known: Callable[[PeerId], bool],
        refused: Callable[[PeerId, str, Fault], None], events: Events,
    ) -> None:  # fmt: skip
        self.rates = rates
        self._transport = transport
        self._room = room
        self._partners = partners
        self._known = known
        self._refused = refused
        self._events = events
        self._quota = Quota(transport.now())
        self._occupied = False
        self._wake = Wakeup()

    async def start(self) -> None:
        """Begin to answer."""
        await self._transport.serve(PROTOCOL, self.answer)

    def poke(self) -> None:
        """A round is over: a probe may have become due."""
        self._wake.set()

    async def run(self) -> None:
        """Measure whenever it is due and there is room; runs until cancelled."""
        now, random = self._transport.now, self._transport.random
        tries, tried = 0, False
        while True:
            self._wake.clear()
            due = self.rates.due_in(now())
            if due > 0:
                await self._wake.wait(min(due, 3600.0))
                tries, tried = 0, False
                continue
            room = self._room()
            if not tried:
                # All members of a round come here at once.
                tried = True
                await asyncio.sleep(random.uniform(0.0, min(SPREAD, max(room - ROOM, 0.0) / 2)))
                continue
            if room < ROOM or self._occupied:
                tried = room > 0  # after a round all come here at once again
                await asyncio.sleep(random.uniform(0.5, 1.5))
                continue
            try:
                await self.measure(lenient=tries >= TRIES)
                tries = 0
            except _Busy:
                tries += 1
                await asyncio.sleep(random.uniform(*PAUSE))

    async def measure(self, *, lenient: bool) -> None:
        """One probe. lenient: go on without who is busy; else nothing is measured then, and _Busy raised."""
        partners = list(self._partners())[:PARTNERS]
        found: tuple[float, float, list[PeerId]] | None = None
        self._occupied = True
        try:
            async with asyncio.timeout(LIMIT):
                found = await self._while_free(self._measure(partners, lenient))
        except TimeoutError:
            found = None
        finally:
            self._occupied = False
        if self._room() <= 0:
            return  # a round came: it is as if never begun
        now = self._transport.now()
        if found is None or not found[0] or not found[1]:
            self.rates.not_probed(now)
            return
        self.rates.probed(found[0], found[1], now)
        self._events(
            "probe", upload=found[0], download=found[1], partners=found[2],
            stated=[self.rates.upload, self.rates.download],
        )  # fmt: skip

    async def _measure(self, partners: Sequence[PeerId], lenient: bool) -> tuple[float, float, list[PeerId]]:
        streams: list[Stream] = []
        try:
            asked = await asyncio.gather(*(self._ask(peer, streams) for peer in partners), return_exceptions=True)
            for peer, answer in zip(partners, asked, strict=True):
                if isinstance(answer, BaseException) and not isinstance(answer, _Busy):
                    self._left_out(peer, answer)
            if not lenient and any(isinstance(answer, _Busy) for answer in asked):
                raise _Busy
            ready = [stream for stream in asked if not isinstance(stream, BaseException)]
            up, down = Meter(), Meter()
            ready = await self._all(ready, lambda stream: self._pump(stream, up))
            ready = await self._all(ready, lambda stream: self._take_turn(stream, down))
            return up.rate(), down.rate(), [stream.peer for stream in ready]
        finally:
            await asyncio.gather(*(stream.close() for stream in streams), return_exceptions=True)

    async def _all(
        self, streams: Sequence[Stream], work: Callable[[Stream], Coroutine[Any, Any, None]]
    ) -> list[Stream]:
        """Do the same with all partners at once; those with whom it worked."""
        done = await asyncio.gather(*(work(stream) for stream in streams), return_exceptions=True)
        left = []
        for stream, error in zip(streams, done, strict=True):
            if error is None:
                left.append(stream)
            else:
                self._left_out(stream.peer, error)
        return left

    def _left_out(self, peer: PeerId, error: BaseException) -> None:
        if isinstance(error, PeerMisbehaved | PeerSlow):
            self._refused(peer, f"a probe: {error}", error.fault)
        elif not isinstance(error, TransportError):
            raise error

    async def _ask(self, peer: PeerId, streams: list[Stream]) -> Stream:
        stream = await self._transport.open(peer, PROTOCOL, timeout=ASKING)
        streams.append(stream)
        await _send(stream, ASK)
        kind, _ = await _receive(stream, ASKING)
        if kind == BUSY:
            raise _Busy
        if kind != READY:
            raise PeerMisbehaved(f"frame of kind {kind} in answer to a probe", peer)
        return stream

    async def _take_turn(self, stream: Stream, meter: Meter) -> None:
        await _send(stream, END)
        await self._sink(stream, meter)

    # --- the other side

    async def answer(self, stream: Stream) -> None:
        """Serve one probe of another peer's: take what it sends, then send as much."""
        peer = stream.peer
        if not self._known(peer):
            return
        free = not self._occupied and self._room() >= ROOM_TO_ANSWER
        if not free or not self._quota.ask(peer, self._transport.now()):
            await self._decline(stream)
            return
        self._occupied = True
        try:
            async with asyncio.timeout(LIMIT):
                await self._while_free(self._answer(stream))
        except TimeoutError:
            self._refused(peer, f"a probe that was not over in {LIMIT:.0f} s", Fault.SLOW)
        except (PeerMisbehaved, PeerSlow) as error:
            self._quota.take(peer, self._transport.now())
            self._refused(peer, f"a probe: {error}", error.fault)
        finally:
            self._occupied = False

    async def _decline(self, stream: Stream) -> None:
        """Say so, and leave it to the other side to close, so that the word is not lost with the stream."""
        try:
            async with asyncio.timeout(STALL):
                await stream.send(bytes([BUSY]))
                for _ in range(2):  # its question, and the end
                    await stream.receive(1)
        except (TransportError, TimeoutError):
            pass

    async def _answer(self, stream: Stream) -> None:
        kind, _ = await _receive(stream)
        if kind != ASK:
            raise PeerMisbehaved(f"frame of kind {kind} in place of a question", stream.peer)
        await _send(stream, READY)
        kind, size = await _receive(stream)
        self._quota.take(stream.peer, self._transport.now())
        await self._sink(stream, Meter(), (kind, size))
        await self._pump(stream, Meter())
        await _send(stream, END)

    # --- both sides

    async def _while_free(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Do something until it is done or a round may begin, whichever is first; None in the second case."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=LOOK)
                if not task.done() and self._room() <= 0:
                    return None
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _pump(self, stream: Stream, meter: Meter) -> None:
        """Send data as fast as it is acknowledged, within the bounds. Raises PeerSlow when not all of it is in time."""
        try:
            async with asyncio.timeout(PHASE):
                await self._pour(stream, meter)
        except TimeoutError:
            raise PeerSlow(f"it did not acknowledge all in {PHASE:.0f} s") from None

    async def _pour(self, stream: Stream, meter: Meter) -> None:
        now, random = self._transport.now, self._transport.random
        ends, window, least = now() + SECONDS, FIRST, float("inf")
        left, pending = BYTES, 0
        under_way: deque[tuple[float, int]] = deque()
        while True:
            # Small frames tell the rate of a slow link in a second, large ones cost a fast one less.
            size = min(max(window // 8, SMALLEST), LARGEST)
            if pending + size <= window and left >= size and now() < ends:
                under_way.append((now(), size))
                pending += size
                left -= size
                await _send(stream, DATA, random.randbytes(size - 1))  # nothing on the way can compress that
                continue
            if not under_way:
                return
            kind, length = await _receive(stream)
            if kind != ACK or length != 1:
                raise PeerMisbehaved(f"frame of kind {kind} in place of an acknowledgement", stream.peer)
            at, size = under_way.popleft()
            pending -= size
            delay = now() - at
            least = min(least, delay)
            meter.add(now(), size)
            if delay <= FILLED[0] * least + FILLED[1]:
                window = min(window + 2 * size, WINDOW)

    async def _sink(self, stream: Stream, meter: Meter, first: tuple[int, int] | None = None) -> None:
        """Take and acknowledge data up to the end of it."""
        left = BYTES
        while True:
            kind, size = first or await _receive(stream)
            first = None
            if kind == END:
                return
            left -= size
            if kind != DATA or size < SMALLEST or left < 0:
                raise PeerMisbehaved(f"frame of kind {kind} and {size} bytes, {left} before the bound", stream.peer)
            meter.add(self._transport.now(), size)
            await _send(stream, ACK)


async def _send(stream: Stream, kind: int, data: bytes = b"") -> None:
    try:
        async with asyncio.timeout(STALL):
            await stream.send(bytes([kind]), data)
    except TimeoutError:
        raise PeerSlow(f"it took nothing for {STALL:.0f} s") from None


async def _receive(stream: Stream, patience: float = STALL) -> tuple[int, int]:
    """Kind and size of the next frame. Raises PeerSlow, StreamClosed, PeerMisbehaved."""
    try:
        async with asyncio.timeout(patience):
            frame = await stream.receive_view(LARGEST)
    except TimeoutError:
        raise PeerSlow(f"it sent nothing for {patience:.0f} s") from None
    if not len(frame):
        raise PeerMisbehaved("an empty frame", stream.peer)
    return frame[0], len(frame)
