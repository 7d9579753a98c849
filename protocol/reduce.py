"""Butterfly reduction of one fragment: each part is averaged by one member, over one duplex stream a pair.

Frames of a reduce stream, after the opener's :class:`Hello` and the reducer's :class:`Welcome`: kind u8, then
 0 nothing: a sign of life while there is nothing to send
 1 index u32, payload: the opener's contribution to a chunk, encoded in the run's codec; where tensors are merged by
   norms and directions (:mod:`.radial`) after the norms of the tensors in it
 2 index u32, averaged chunk: the reducer's answer (see :mod:`.averaged`)
 3 count u32, BLAKE3 over what was sent in this direction since the stream began: the explicit end
Chunks come in order, each once. Reading never waits for writing: every direction has its own task. After both ends the
reducer closes the stream, a little later; anything else that comes after an end is misbehaviour.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from .averaged import Averaged, check, hash_chunk, pack, size_limit
from .codecs import MAX_MAGNITUDE, Codec, averages_codec
from .commits import bitmap, members_in
from .digest import BytesLike
from .errors import Fault, NonFinite, PeerMisbehaved, PeerSlow, StreamClosed
from .layout import ChunkLayout
from .merging import Merging
from .messages import Digest, Member, Natural, Part, Seal, Signature, decode, encode
from .radial import NORM_BYTES, Directions
from .transport import Stream, Transport
from .wakeup import Wakeup

PROTOCOL = "reduce/1"
WINDOW = 8
"""Chunks that a reducer works on at once; it reads nothing beyond them, so its memory is bounded."""
HELLO_LIMIT = 256 * 1024
ALIVE, CONTRIBUTION, AVERAGE, END = 0, 1, 2, 3
_CHUNK = struct.Struct(">BI")
END_SIZE = 32
"""Bytes after the count in the frame that ends a direction: more than the smallest chunk of a sparse codec has."""


class Hello(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """First frame of a reduce stream, from the member to the reducer. It carries the roster, so that a reducer
    whom the coordinator's own message has not reached yet can begin."""

    seal: Seal
    signature: Signature
    first: Natural
    count: Natural
    have: Natural
    """Index of the first averaged chunk that the member still wants."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The reducer's answer."""

    roster: Digest
    next: Natural
    """Index of the first chunk whose contribution the reducer still takes from this member."""


async def both(first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
    """Run two directions of a stream; the first failure ends the other and is raised as it is.

    A cancellation is never lost. ``asyncio.gather`` raises the failure of a direction that comes at the same moment
    instead, and who then tries again, as one does when a stream breaks, goes on for ever.
    """
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(first), loop.create_task(second)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failures = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for failure in failures:
        if failure is not None:
            raise failure


class Reducer:
    """Averages one part. Contributions are added as whole, valid chunks only; whoever holds the window up for
    ``silence`` seconds, or misses the cut-off, is left out from there on.

    sink: called with each averaged chunk (index, bytes, hash).
    refused: called with (member, reason, fault) when a member is left out for what it does not bring. What it does
    wrong is raised by :meth:`accept`.
    floor: ``Transport.now()`` before which silence proves nothing (the process itself was held up then).
    silent: seconds since anything at all was heard from a member. Who has been silent for ``silence`` is dead, and is
    not waited for: a part that is averaged anew because its reducer has died would else wait once more for what that
    reducer owes as a member.
    """

    def __init__(
        self, transport: Transport, layout: ChunkLayout, codec: Codec, members: Sequence[Member], me: int, part: Part,
        *, merging: Merging, silence: float, cutoff: float, sink: Callable[[int, bytes, bytes], None],
        refused: Callable[[int, str, Fault], None], floor: Callable[[], float], silent: Callable[[int], float],
    ) -> None:  # fmt: skip
        self._transport = transport
        self._layout = layout
        self._codec = codec
        self._averages_codec = averages_codec(codec.name)
        self._members = list(members)
        self._me = me
        self._merging = merging
        """Of the part's fragment."""
        tensors = merging.part
        self._directions = Directions(tensors, codec) if tensors is not None else None
        self.part = part
        self._silence = silence
        self._cutoff = cutoff
        self._sink = sink
        self._refused = refused
        self._floor = floor
        self._silent = silent
        self._began = transport.now()
        self._low = part.first
        self._end = part.first + part.count
        self._sums: dict[int, np.ndarray[Any, np.dtype[np.float32]]] = {}
        self._spare: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        """Sums of chunks that are done, to be used again: fresh memory costs as much time as an addition."""
        self._inside: dict[int, list[int]] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._next = {i: part.first for i, member in enumerate(members) if member.weight and i != me}
        self._delivered = dict.fromkeys(self._next, float("-inf"))
        self._waited = dict.fromkeys(self._next, 0.0)
        """Seconds for which each member, one of a minority, has kept all others waiting."""
        self._out: set[int] = set()
        self._barred: set[int] = set()
        """Those of them that broke the protocol: their next streams are closed without a word."""
        self._averages: dict[int, bytes] = {}
        self._connected: dict[int, Stream] = {}
        self._adding: dict[asyncio.Task[None], int | None] = {}
        self._closed = False
        self._arrived = Wakeup()
        """A contribution was added, or its member left out."""
        self._averaged = Wakeup()
        """A chunk was averaged, or a member left out, or all is over."""

    def _leave_out(self, member: int, reason: str) -> None:
        if member not in self._out:
            self._out.add(member)
            fault = Fault.SLOW if member in self._connected else Fault.GONE
            # Who came to a part when it was almost over has given nobody the time to contribute.
            self._refused(member, reason, fault if self._began < self._cutoff - self._silence / 4 else Fault.LOCAL)
            self._arrived.pulse()
            self._averaged.pulse()

    def _bar(self, member: int) -> None:
        self._out.add(member)
        self._barred.add(member)
        self._arrived.pulse()
        self._averaged.pulse()

    async def _add(
        self, member: int, index: int, payload: BytesLike, noted: Callable[[], object] | None = None
    ) -> None:
        """Add a contribution, whole and once. noted: called beside that, for each that came in its turn.

        It runs to its end in a task of its own even if the member's stream breaks meanwhile: a thread that adds cannot
        be called back, and the books must say what it did."""
        task = asyncio.get_running_loop().create_task(self._add_whole(member, index, payload, noted))
        self._adding[task] = member
        task.add_done_callback(self._added)
        await asyncio.shield(task)

    def _added(self, task: asyncio.Task[None]) -> None:
        self._adding.pop(task, None)
        if not task.cancelled():
            task.exception()  # raised where it is awaited, if anybody still waits

    async def _add_whole(self, member: int, index: int, payload: BytesLike, noted: Callable[[], object] | None) -> None:
        async with self._locks.setdefault(index, asyncio.Lock()):
            if member in self._out or index < self._low:
                raise PeerMisbehaved(f"chunk {index} came after it was averaged without it")
            if member in self._next and self._next[member] != index:
                if noted is not None:
                    noted()
                return  # it came over an earlier stream already
            into = self._sums.get(index)
            if into is None:
                into = self._sums[index] = self._fresh(self._layout.size(index))
            weight = float(self._merging.weight(self._members[member]))

            def add() -> None:
                if noted is not None:
                    noted()
                if self._directions is not None:
                    self._directions.add(member, index, payload, weight, into)
                else:
                    self._codec.accumulate(payload, weight, into)

            await self._transport.offload(add)
            self._inside.setdefault(index, []).append(member)
            if member in self._next:
                self._next[member] = index + 1
                self._delivered[member] = self._transport.now()
        self._arrived.pulse()

    def _fresh(self, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        for i, spare in enumerate(self._spare):
            if spare.size == size:
                del self._spare[i]
                spare.fill(0)
                return spare
        return np.zeros(size, np.float32)

    def close(self) -> None:
        """End all streams: the round is over. Idempotent."""
        self._closed = True
        for stream in self._connected.values():
            task = asyncio.get_running_loop().create_task(stream.close())
            self._adding[task] = None
            task.add_done_callback(self._added)
        self._averaged.pulse()

    async def run(self, own: Callable[[int], BytesLike] | None) -> None:
        """Average chunk after chunk. ``own(index)``: this member's own contribution, encoded as it would be sent;
        it passes through the codec like everyone's."""
        for index in range(self._low, self._end):
            if own is not None:
                await self._add(self._me, index, await self._transport.offload(own, index))
            since = self._transport.now()
            while missing := [m for m, upto in self._next.items() if upto <= index and m not in self._out]:
                now = self._transport.now()
                left = self._silence / 4
                for member in missing:
                    waited = now - max(since, self._delivered[member], self._floor())
                    silent = self._silent(member)
                    if waited > self._silence:
                        self._leave_out(member, f"no chunk {index} in {self._silence:.1f} s")
                    elif silent > self._silence:
                        self._leave_out(member, f"nothing from it in {self._silence:.1f} s, chunk {index} is due")
                    elif now > self._cutoff:
                        self._leave_out(member, f"no chunk {index} before the round's cut-off")
                    elif self._waited[member] > self._silence and now > self._due(index):
                        self._leave_out(member, f"chunk {index} too late for the rest to come in time")
                    left = min(left, self._silence - max(waited, silent))
                if all(member in self._out for member in missing):
                    break
                await self._arrived.wait(max(left, self._silence / 100))
                if 2 * len(missing) <= len(self._next):
                    for member in missing:
                        self._waited[member] += max(self._transport.now() - max(now, self._floor()), 0.0)
            await self._finish(index)

    def _due(self, index: int) -> float:
        """When a chunk is late: T, and then in proportion to the part half of what is left until T before the cut-off,
        which is twice the ideal transfer. Who is slower leaves the others no time for their chunks."""
        pace = max(self._cutoff - self._began - 2 * self._silence, 0.0) / 2
        return self._began + self._silence + pace * (index + 1 - self.part.first) / self.part.count

    async def _finish(self, index: int) -> None:
        async with self._locks.setdefault(index, asyncio.Lock()):
            inside = sorted(self._inside.get(index, []))
            weight = self._merging.total(self._members, inside)
            total = self._sums.pop(index, None)
            contributors = bitmap(inside, len(self._members))
            norms = self._directions.norms(index, inside) if self._directions is not None else None
            if weight and total is not None:
                average, digest = await self._transport.offload(
                    self._average, index, contributors, weight, total, norms
                )
                self._spare.append(total)
            else:
                average = pack(index, contributors, weight, b"", norms)
                digest = hash_chunk(average)
            self._inside.pop(index, None)
            self._low = index + 1
        self._locks.pop(index, None)
        self._averages[index] = average
        self._sink(index, average, digest)
        self._averaged.pulse()

    def _average(
        self, index: int, contributors: bytes, weight: int, total: np.ndarray[Any, np.dtype[np.float32]],
        norms: bytes | None,
    ) -> tuple[bytes, bytes]:  # fmt: skip
        total /= np.float32(weight)
        try:
            payload = self._averages_codec.encode(total)
        except NonFinite:
            # Each contribution was within the codec's bound; rounding may take their mean a hair beyond it.
            np.clip(total, -MAX_MAGNITUDE, MAX_MAGNITUDE, out=total)
            payload = self._averages_codec.encode(total)
        average = pack(index, contributors, weight, payload, norms)
        return average, hash_chunk(average)

    # --- one member's stream -------------------------------------------------------------------------------------

    async def accept(self, member: int, stream: Stream, hello: Hello, roster_id: bytes) -> None:
        """Serve one member's stream to its end. Raises StreamClosed when it breaks, and PeerMisbehaved when the member
        breaks the rules: it is left out from there on. A second stream beside one that lives is refused alone."""
        if (hello.first, hello.count) != (self.part.first, self.part.count):
            raise PeerMisbehaved(f"part {hello.first}+{hello.count} is not mine", stream.peer)
        if not self.part.first <= hello.have <= self._end:
            raise PeerMisbehaved(f"chunk {hello.have} is outside the part", stream.peer)
        if member in self._barred:
            raise StreamClosed(f"{stream.peer} broke the protocol on an earlier stream")
        other = self._connected.get(member)
        if other is not None and self._transport.now() - other.last_heard < self._silence / 2:
            raise PeerMisbehaved("two streams for one part", stream.peer)
        if other is not None:
            await other.close()
        self._connected[member] = stream
        try:
            # What an earlier stream brought is still being added: only then is it known what comes next.
            await asyncio.gather(*(t for t, m in self._adding.items() if m == member), return_exceptions=True)
            due = self._end if member in self._out else self._next.get(member, self._end)
            await stream.send(encode(Welcome(roster_id, due)))
            written = asyncio.Event()
            await both(self._read(member, stream, written), self._write(stream, hello.have, written))
        except PeerMisbehaved:
            self._bar(member)
            raise
        finally:
            if self._connected.get(member) is stream:
                del self._connected[member]

    async def _read(self, member: int, stream: Stream, written: asyncio.Event) -> None:
        """One member's contributions, to their end; and that nothing follows until a little after the last average."""
        await self._take(member, stream)
        reading = asyncio.get_running_loop().create_task(_nothing_more(stream))
        try:
            while not reading.done():
                await asyncio.wait([reading], timeout=self._silence / 4)
                if written.is_set():
                    break
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _take(self, member: int, stream: Stream) -> None:
        norms = NORM_BYTES * self._merging.most_norms
        limit = _CHUNK.size + max(norms + self._codec.encoded_size(self._layout.chunk), END_SIZE)
        count, running = 0, blake3()
        while True:
            frame = await stream.receive_view(limit)
            kind, index = _unpack(frame, stream)
            if kind == END:
                if index != count or frame[_CHUNK.size :] != running.digest():
                    raise PeerMisbehaved("an end that does not fit what was sent", stream.peer)
                upto = self._next.get(member, self._end)
                if upto < self._end and member not in self._out:
                    raise PeerMisbehaved(f"the end after chunk {upto - 1} of a part up to {self._end - 1}", stream.peer)
                return
            if kind != CONTRIBUTION or member not in self._next:
                raise PeerMisbehaved(f"frame of kind {kind} from a member that owes none", stream.peer)
            if index != self._next[member] or index >= self._end:
                raise PeerMisbehaved(f"chunk {index} where {self._next[member]} was due", stream.peer)
            count += 1
            while index >= self._low + WINDOW and member not in self._out:
                await self._averaged.wait(self._silence)
                self._check_open()
            if member in self._out:
                # It may keep receiving; what it still sends is read and dropped, so that its stream never jams.
                await _drain(stream, limit, self._end - index)
                return
            try:
                await self._add(member, index, frame[_CHUNK.size :], partial(running.update, frame))
            except PeerMisbehaved as error:
                if member in self._out:
                    await _drain(stream, limit, self._end - index)
                    return
                raise PeerMisbehaved(str(error), stream.peer) from None

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed("the round is over")

    async def _write(self, stream: Stream, have: int, written: asyncio.Event) -> None:
        running = blake3()
        for index in range(have, self._end):
            while index not in self._averages:
                await self._averaged.wait(self._silence / 3)
                self._check_open()
                if index not in self._averages:
                    await stream.send(bytes([ALIVE]))
            start, average = _CHUNK.pack(AVERAGE, index), self._averages[index]
            running.update(start)
            running.update(average)
            await stream.send(start, average)
        await stream.send(_CHUNK.pack(END, self._end - have) + running.digest())
        written.set()


@dataclass
class Progress:
    """How far a member is with one part at one reducer, over all its streams."""

    sent: int
    """First chunk of which no contribution has gone out."""
    due: int
    """First averaged chunk that has not come."""
    end: int
    """First chunk behind the part."""
    written: bool = False
    """Whether this member's direction of the present stream has ended."""

    @classmethod
    def of(cls, part: Part) -> Progress:
        return cls(part.first, part.first, part.first + part.count)

    @property
    def whole(self) -> bool:
        """Whether all averages are here; only the explicit end may still be missing."""
        return self.due == self.end


async def exchange(
    stream: Stream, hello: Hello, roster_id: bytes, progress: Progress, *, transport: Transport, layout: ChunkLayout,
    codec: Codec, members: list[Member], me: int, merging: Merging, silence: float,
    own: Callable[[int], BytesLike] | None, sink: Callable[[int, bytes, bytes], None],
) -> None:  # fmt: skip
    """The member's side of one reduce stream: send the own chunks of a part, receive its averages.

    progress: is brought forward; it outlives a stream that breaks. me: this member's number in the roster.
    own: encodes the contribution to a chunk; None when this member only receives. merging: of the part's fragment.
    sink: called with each averaged chunk once it is valid (index, bytes, hash).
    Raises StreamClosed when the stream breaks, PeerSlow when the end does not come within ``silence`` seconds after the
    last average, PeerMisbehaved when the reducer breaks the rules.
    """
    progress.written = False
    await stream.send(encode(hello))
    async with asyncio.timeout(3 * silence):
        welcome = decode(await stream.receive(1024), Welcome, stream.peer)
    if welcome.roster != roster_id or welcome.next > progress.end:
        raise PeerMisbehaved("a welcome to another roster", stream.peer)

    async def write() -> None:
        count, running = 0, blake3()

        def prepare(index: int) -> tuple[bytes, BytesLike]:
            assert own is not None
            start, payload = _CHUNK.pack(CONTRIBUTION, index), own(index)
            running.update(start)
            running.update(payload)
            return start, payload

        indices = range(max(welcome.next, hello.first), progress.end if own is not None else 0)
        # While one chunk is on its way the next is encoded; no more than one, so that memory stays bounded.
        ahead: asyncio.Task[tuple[bytes, BytesLike]] | None = None
        try:
            for index in indices:
                start, payload = await (ahead or transport.offload(prepare, index))
                loop = asyncio.get_running_loop()
                ahead = loop.create_task(transport.offload(prepare, index + 1)) if index + 1 in indices else None
                progress.sent = max(progress.sent, index + 1)
                await stream.send(start, payload)
                count += 1
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)
        await stream.send(_CHUNK.pack(END, count) + running.digest())
        progress.written = True

    async def read() -> None:
        limit = _CHUNK.size + max(size_limit(codec, layout.chunk, len(members), merging), END_SIZE)
        count, running = 0, blake3()

        def take(frame: bytes | memoryview, index: int) -> tuple[Averaged, bytes, bytes]:
            running.update(frame)
            data = bytes(frame[_CHUNK.size :])
            averaged = check(data, index, members, codec, layout.size(index), merging)
            return averaged, data, hash_chunk(data)

        while True:
            try:
                async with asyncio.timeout(silence if progress.whole else None):
                    frame = await stream.receive_view(limit)
                    while len(frame) == 1 and frame[0] == ALIVE:
                        frame = await stream.receive_view(limit)
            except TimeoutError:
                raise PeerSlow(f"all averages of a part, and no end in {silence:.1f} s") from None
            kind, index = _unpack(frame, stream)
            due = progress.due
            if kind == END:
                if (index, due) != (count, progress.end) or frame[_CHUNK.size :] != running.digest():
                    raise PeerMisbehaved("an end that does not fit what was sent", stream.peer)
                return
            if kind != AVERAGE or index != due or due >= progress.end:
                raise PeerMisbehaved(f"frame of kind {kind}, chunk {index} where {due} was due", stream.peer)
            averaged, data, digest = await transport.offload(take, frame, index)
            del frame  # it would stay as long as the next one takes to arrive
            if index >= progress.sent and me in members_in(averaged.contributors, len(members)):
                raise PeerMisbehaved(f"chunk {index} counts a contribution that was not sent", stream.peer)
            sink(index, data, digest)
            count += 1
            progress.due += 1

    await both(read(), write())
    try:
        async with asyncio.timeout(silence):
            await _nothing_more(stream)
    except TimeoutError:
        pass  # that it does not close is its own loss


async def _nothing_more(stream: Stream) -> None:
    """After an explicit end: wait for the other side to close. Raises :class:`PeerMisbehaved` for anything else."""
    try:
        frame = await stream.receive_view(_CHUNK.size)
    except StreamClosed:
        return
    raise PeerMisbehaved(f"{len(frame)} bytes after the end", stream.peer)


def _unpack(frame: bytes | memoryview, stream: Stream) -> tuple[int, int]:
    if len(frame) < _CHUNK.size:
        raise PeerMisbehaved(f"a reduce frame of {len(frame)} bytes", stream.peer)
    kind, index = _CHUNK.unpack_from(frame)
    return kind, index


async def _drain(stream: Stream, limit: int, frames: int) -> None:
    """Read what a member that was left out still sends: its chunks, at most so many, and its end."""
    try:
        for _ in range(frames):
            frame = await stream.receive_view(limit)
            if len(frame) >= _CHUNK.size and frame[0] == END:
                return
    except StreamClosed:
        return
    raise PeerMisbehaved(f"more than the {frames} frames that a member may still send", stream.peer)
