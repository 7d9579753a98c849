"""A peer that enters rounds as an ordinary, signed member and then breaks the protocol on its reduce streams.

What it sends is put together here, frame by frame, from docs/protocol.md ("The reduce stream"). The same cases run on
the simulated transport and on libp2p.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import re
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from atoll.protocol.averaged import pack
from atoll.protocol.calling import Calling, make_seal
from atoll.protocol.codecs import averages_codec
from atoll.protocol.commits import bitmap, members_in
from atoll.protocol.control import Call
from atoll.protocol.errors import TransportError
from atoll.protocol.frames import FrameStream
from atoll.protocol.island import Snapshot
from atoll.protocol.lowrank import Factors, LowRankLayout
from atoll.protocol.messages import Commit, Member, Part, Seal, decode, encode, hash_of, seal_bytes
from atoll.protocol.peer import Peer
from atoll.protocol.reduce import PROTOCOL, Hello, Progress, Welcome
from atoll.protocol.round import Round
from atoll.protocol.simlink import HEADER, Piece, SimStream
from atoll.protocol.transport import Stream

HONEST = ["p0", "p1", "p2"]
HOSTILE = "p3"
ALIVE, CONTRIBUTION, AVERAGE, END = 0, 1, 2, 3
HUGE = 512 << 20
CONSTANT = 0.25
ALL = 1 << 30


@dataclass(frozen=True)
class Case:
    """One way to break the protocol, and what it must come to."""

    act: Callable[[Wire], Awaitable[None]]
    reason: str = ""
    """A regular expression for what the log says; empty: nothing is wrong with it."""
    fault: str = "hostile"
    counts: int = 0
    """Chunks of each part in which the hostile member's contribution counts all the same, from the first on."""
    as_member: bool = False
    """Whether it is a case of a member towards reducers, or of a reducer towards members."""
    ends: bool = True
    """Whether the other side ends the stream before the round does."""

    @property
    def name(self) -> str:
        return self.act.__name__


@dataclass
class Wire:
    """The hostile peer's end of one reduce stream."""

    round: Round
    part: Part
    stream: Stream
    hello: Hello
    hashed: Any = field(default_factory=blake3)
    count: int = 0
    taken: int = 0
    """Bytes of a huge message that went out before the stream ended."""
    marker: Path | None = None
    """A file that comes into being when somebody unpickles."""

    @property
    def last(self) -> int:
        return self.part.first + self.part.count - 1

    def size(self, index: int) -> int:
        return self.round.around.layout.wire(0).size(index)

    def payload(self, index: int) -> bytearray:
        """The honest contribution to a chunk."""
        own = self.round._own()
        assert own is not None
        return bytearray(own(index))

    def averaged(self, index: int) -> bytes:
        """A sound averaged chunk: of the own contribution alone."""
        return self.packed(index, [self.round.me], self.mean(index))

    def constant(self, index: int) -> bytearray:
        """An average with the same value everywhere."""
        codec = averages_codec(self.round.around.replica.codec.name)
        return bytearray(codec.encode(np.full(self.size(index), CONSTANT, np.float32)))

    def mean(self, index: int, scale: float = 1.0) -> bytearray:
        around, theta = self.round.around, self.round.theta
        assert theta is not None
        x = around.replica.contribution(index, theta) * np.float32(scale)
        if isinstance(around.layout, LowRankLayout):
            x = Factors(around.layout).project(index, x, around.replica.state.momentum)
        sent = np.empty_like(x)
        around.replica.codec.decode(around.replica.codec.encode(x), len(x), sent)
        return bytearray(averages_codec(around.replica.codec.name).encode(sent))

    def packed(self, index: int, inside: Sequence[int], payload: bytes | bytearray, weight: int | None = None) -> bytes:
        members = self.round.seal.members
        total = sum(members[i].weight for i in inside) if weight is None else weight
        return pack(index, bitmap(inside, len(members)), total, payload)

    async def frame(self, kind: int, index: int, payload: bytes | bytearray | memoryview = b"") -> None:
        data = struct.pack(">BI", kind, index) + payload
        self.hashed.update(data)
        self.count += 1
        await self.stream.send(data)

    async def chunk(self, index: int) -> None:
        await self.frame(CONTRIBUTION, index, self.payload(index))

    async def average(self, index: int) -> None:
        await self.frame(AVERAGE, index, self.averaged(index))

    async def end(self, count: int | None = None, digest: bytes | None = None) -> None:
        data = self.hashed.digest() if digest is None else digest
        await self.stream.send(struct.pack(">BI", END, self.count if count is None else count) + data)

    async def bytes(self, data: bytes) -> None:
        """Bytes outside of any frame. On the simulated network there are only frames: then as one."""
        if isinstance(self.stream, FrameStream):
            await self.stream._pipe.write(memoryview(data))
        else:
            await self.stream.send(data)

    async def part_of_a_frame(self, size: int, part: bytes | bytearray) -> None:
        """The length of a frame, and the beginning of what it holds."""
        if isinstance(self.stream, FrameStream):
            await self.bytes(size.to_bytes(4, "big") + bytes(part))
        else:
            self._unfinished(size, HEADER + len(part))

    async def a_byte_more(self, size: int) -> None:
        """Of a frame of that size which has begun."""
        if isinstance(self.stream, FrameStream):
            await self.bytes(b"\0")
        else:
            self._unfinished(size, 1)

    def _unfinished(self, size: int, count: int) -> None:
        """So many bytes of a frame leave, on the simulated network, whose streams send whole ones only."""
        assert isinstance(self.stream, SimStream)
        pipe, now = self.stream.outgoing, asyncio.get_running_loop().time()
        piece = Piece(pipe, count)
        piece.head = size
        pipe.accepted += count
        pipe.transmitted += count
        pipe.travel(piece, now, now)

    async def breaks(self) -> None:
        """The stream breaks in the middle of a frame."""
        if isinstance(self.stream, FrameStream):
            self.stream._pipe.end_writing()  # closing it would put a last word into the frame
            await self.stream.close()
        elif isinstance(self.stream, SimStream):
            await asyncio.sleep(0.5)  # a reset overtakes what is under way
            self.stream.wire.reset("it broke in the middle of a frame")

    async def begin(self) -> Welcome:
        """As every member: hello, welcome, and the first chunk."""
        await self.stream.send(encode(self.hello))
        welcome = decode(await self.stream.receive(1024), Welcome, self.stream.peer)
        await self.chunk(self.part.first)
        return welcome

    async def rest(self) -> None:
        for index in range(self.part.first + 1, self.last + 1):
            await self.chunk(index)

    async def until_closed(self) -> None:
        """Read on until the other side ends the stream; averages are kept, as a member that wants the round to end."""
        try:
            while True:
                frame = await self.stream.receive(1 << 22)
                if frame[:1] == bytes([AVERAGE]):
                    self.round._hold(int.from_bytes(frame[1:5], "big"), frame[5:])
        except TransportError:
            pass


# --- as a member, towards a reducer


async def wrong_shape_short(wire: Wire) -> None:
    await wire.begin()
    await wire.frame(CONTRIBUTION, wire.part.first + 1, wire.payload(wire.part.first + 1)[:-7])


async def wrong_shape_long(wire: Wire) -> None:
    await wire.begin()
    await wire.frame(CONTRIBUTION, wire.part.first + 1, wire.payload(wire.part.first + 1) + bytes(1000))


async def end_too_early(wire: Wire) -> None:
    await wire.begin()
    await wire.end()


async def end_with_a_wrong_count(wire: Wire) -> None:
    await wire.begin()
    await wire.rest()
    await wire.end(count=wire.count + 1)


async def end_with_a_wrong_hash(wire: Wire) -> None:
    await wire.begin()
    await wire.rest()
    await wire.end(digest=bytes(32))


async def index_out_of_range(wire: Wire) -> None:
    await wire.begin()
    await wire.frame(CONTRIBUTION, 2**32 - 1, wire.payload(wire.part.first + 1))


async def index_of_another_part(wire: Wire) -> None:
    await wire.begin()
    index = wire.last + 1 if wire.last + 1 < len(wire.round.chunks) else wire.part.first - 1
    await wire.frame(CONTRIBUTION, index, wire.payload(index))


async def chunk_twice(wire: Wire) -> None:
    await wire.begin()
    await wire.chunk(wire.part.first)


async def not_a_number(wire: Wire) -> None:
    await wire.begin()
    payload = wire.payload(wire.part.first + 1)
    payload[0:2] = struct.pack("<H", 0x7FC0)  # the first scale, as a bfloat16
    await wire.frame(CONTRIBUTION, wire.part.first + 1, payload)


async def beyond_the_bound(wire: Wire) -> None:
    """1e30 in every value."""
    await wire.begin()
    index = wire.part.first + 1
    await wire.frame(CONTRIBUTION, index, huge_values(wire.size(index)))


def huge_values(n: int) -> bytes:
    """1e30 in every value of an ``int8`` payload."""
    scale = int(np.array([1e30 / 127], np.float32).view(np.uint32)[0]) >> 16
    return struct.pack("<H", scale) * -(-n // 64) + b"\x7f" * n


async def constant(wire: Wire) -> None:
    """Every value the same: unusual, and valid."""
    await wire.stream.send(encode(wire.hello))
    decode(await wire.stream.receive(1024), Welcome, wire.stream.peer)
    for index in range(wire.part.first, wire.last + 1):
        values = np.full(wire.size(index), CONSTANT, np.float32)
        await wire.frame(CONTRIBUTION, index, wire.round.around.replica.codec.encode(values))
    await wire.end()


async def half_a_chunk(wire: Wire) -> None:
    """The stream breaks in the middle of a frame, and no other one follows."""
    await wire.begin()
    await _half(wire)
    await wire.breaks()


async def _half(wire: Wire) -> int:
    """Half of the frame of the second chunk; the size of all of it."""
    payload = wire.payload(wire.part.first + 1)
    start = struct.pack(">BI", CONTRIBUTION, wire.part.first + 1)
    await wire.part_of_a_frame(len(start) + len(payload), start + payload[: len(payload) // 2])
    return len(start) + len(payload)


async def stall(wire: Wire) -> None:
    """A frame that begins, and does not go on."""
    await wire.begin()
    await _half(wire)


async def trickle(wire: Wire) -> None:
    """A byte now and then, each a sign of life, and no chunk ever whole."""
    await wire.begin()
    size = await _half(wire)
    for _ in range(size // 4):
        await asyncio.sleep(wire.round.silence / 5)
        if isinstance(wire.stream, SimStream):
            wire.stream._check_send()
        await wire.a_byte_more(size)


async def stall_before_the_hello(wire: Wire) -> None:
    await asyncio.sleep(0)


async def huge_message(wire: Wire) -> None:
    """512 MiB in one frame, and they come."""
    await wire.begin()
    await _huge(wire)


async def _huge(wire: Wire) -> None:
    if isinstance(wire.stream, FrameStream):
        await wire.bytes(HUGE.to_bytes(4, "big"))
        piece = bytes(1 << 20)
        for _ in range(HUGE >> 20):
            await wire.bytes(piece)
            wire.taken += len(piece)
    else:
        assert isinstance(wire.stream, SimStream)
        try:
            await wire.stream.send(bytes(HUGE))
        finally:
            wire.taken = wire.stream.outgoing.transmitted


async def two_streams(wire: Wire) -> None:
    second = await wire.round.around.transport.open(wire.stream.peer, PROTOCOL, timeout=5.0)
    await wire.begin()
    try:
        await second.send(encode(wire.hello))  # the first has just been heard
        await Wire(wire.round, wire.part, second, wire.hello).chunk(wire.part.first)
        await Wire(wire.round, wire.part, second, wire.hello).until_closed()
    except TransportError:
        pass
    finally:
        await second.close()
    await wire.rest()
    await wire.end()


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def bomb(wire: Wire) -> bytes:
    assert wire.marker is not None
    return pickle.dumps([Bomb(wire.marker)] * 100)


async def pickle_as_hello(wire: Wire) -> None:
    await wire.stream.send(bomb(wire))


async def pickle_as_chunk(wire: Wire) -> None:
    await wire.begin()
    await wire.stream.send(bomb(wire))


async def pickle_without_a_frame(wire: Wire) -> None:
    await wire.begin()
    await wire.bytes(bomb(wire) + bytes(100))


def _with_seal(wire: Wire, seal: Seal) -> Hello:
    signature = wire.round.around.signer.sign(seal_bytes(hash_of(seal)))
    return msgspec.structs.replace(wire.hello, seal=seal, signature=signature)


async def another_roster(wire: Wire) -> None:
    """One that its coordinator did not sign, or, as the coordinator, one that breaks the rules."""
    seal = wire.round.seal
    await wire.stream.send(encode(_with_seal(wire, msgspec.structs.replace(seal, round=seal.round, limit=1e6))))


async def roster_without_it(wire: Wire) -> None:
    seal = wire.round.seal
    me = wire.round.around.transport.peer_id
    others = [member for member in seal.members if member.peer != me]
    await wire.stream.send(encode(_with_seal(wire, msgspec.structs.replace(seal, members=others))))


async def part_of_another(wire: Wire) -> None:
    other = next(part for part in wire.round.seal.parts if part.reducer != wire.part.reducer)
    await wire.stream.send(encode(msgspec.structs.replace(wire.hello, first=other.first, count=other.count)))


async def bytes_after_the_end(wire: Wire) -> None:
    await wire.begin()
    await wire.rest()
    await wire.end()
    await wire.stream.send(struct.pack(">BI", CONTRIBUTION, wire.last) + wire.payload(wire.last))


async def wrong_kind(wire: Wire) -> None:
    await wire.begin()
    await wire.frame(AVERAGE, wire.part.first + 1, wire.averaged(wire.part.first + 1))


async def wrong_version(wire: Wire) -> None:
    """The first byte of a frame says what follows: this is none that version 1 knows."""
    await wire.begin()
    await wire.frame(0x81, wire.part.first + 1, wire.payload(wire.part.first + 1))


async def empty_frames(wire: Wire) -> None:
    await wire.begin()
    await wire.stream.send(b"")


MEMBER = [
    replace(case, as_member=True)
    for case in [
        Case(wrong_shape_short, r"values in int8 takes \d+ bytes, received", counts=1),
        Case(wrong_shape_long, r"a frame of \d+ bytes", counts=1),
        Case(end_too_early, "the end after chunk", counts=1),
        Case(end_with_a_wrong_count, "an end that does not fit", counts=ALL),
        Case(end_with_a_wrong_hash, "an end that does not fit", counts=ALL),
        Case(index_out_of_range, "chunk 4294967295 where", counts=1),
        Case(index_of_another_part, r"chunk \d+ where \d+ was due", counts=1),
        Case(chunk_twice, r"chunk \d+ where \d+ was due", counts=1),
        Case(not_a_number, "what no encoder writes", counts=1),
        Case(beyond_the_bound, "what no encoder writes", counts=1),
        Case(constant, counts=ALL),
        Case(half_a_chunk, r"no chunk \d+ in", fault="gone", counts=1),
        Case(stall, r"no chunk \d+ in", fault="slow", counts=1, ends=False),
        Case(trickle, r"no chunk \d+ in", fault="slow", counts=1, ends=False),
        Case(stall_before_the_hello, r"no chunk \d+ in", fault="gone", ends=False),
        Case(huge_message, "a frame of 536870912 bytes", counts=1),
        Case(two_streams, "two streams for one part", counts=ALL, ends=False),
        Case(pickle_as_hello, "malformed Hello"),
        Case(pickle_as_chunk, "frame of kind 128|a frame of", counts=1),
        Case(pickle_without_a_frame, "a frame of|frame of kind 128", counts=1),
        Case(another_roster, "did not sign|a deadline of"),
        Case(roster_without_it, "that not both are in"),
        Case(part_of_another, "is not this peer's", fault="slow"),
        Case(bytes_after_the_end, "after the end|a frame of", counts=ALL),
        Case(wrong_kind, "frame of kind 2|a frame of", counts=1),
        Case(wrong_version, "frame of kind 129", counts=1),
        Case(empty_frames, "a reduce frame of 0 bytes", counts=1),
    ]
]


# --- as a reducer, towards the members


async def average_of_nan(wire: Wire) -> None:
    await wire.average(wire.part.first)
    payload = wire.mean(wire.part.first + 1)
    payload[0:2] = struct.pack("<H", 0x7FC0)
    await wire.frame(AVERAGE, wire.part.first + 1, wire.packed(wire.part.first + 1, [wire.round.me], payload))


async def average_beyond_the_bound(wire: Wire) -> None:
    """1e30 in every value."""
    await wire.average(wire.part.first)
    index = wire.part.first + 1
    payload = bytearray(huge_values(wire.size(index)))
    await wire.frame(AVERAGE, index, wire.packed(index, [wire.round.me], payload))


async def constant_average(wire: Wire) -> None:
    """Every value the same, as if it had brought that itself: unusual, and valid."""
    for index in range(wire.part.first, wire.last + 1):
        await wire.frame(AVERAGE, index, wire.packed(index, [wire.round.me], wire.constant(index)))
    await wire.end()


async def half_an_average(wire: Wire) -> None:
    """The stream breaks in the middle of a frame, and so does each that follows."""
    index = wire.part.first + 1
    if wire.hello.have < index:
        await wire.average(wire.part.first)
    frame = struct.pack(">BI", AVERAGE, index) + wire.averaged(index)
    await wire.part_of_a_frame(len(frame), frame[: len(frame) // 2])
    await wire.breaks()


async def average_of_wrong_shape(wire: Wire) -> None:
    await wire.average(wire.part.first)
    await wire.frame(AVERAGE, wire.part.first + 1, wire.averaged(wire.part.first + 1)[:-3])


async def average_of_another_version(wire: Wire) -> None:
    data = bytearray(wire.averaged(wire.part.first))
    data[0] = 2
    await wire.frame(AVERAGE, wire.part.first, data)


async def average_twice(wire: Wire) -> None:
    await wire.average(wire.part.first)
    await wire.average(wire.part.first)


async def wrong_weight(wire: Wire) -> None:
    index, me = wire.part.first, wire.round.me
    own = wire.round.seal.members[me].weight
    await wire.frame(AVERAGE, index, wire.packed(index, [me], wire.mean(index), 100 * own))


async def wrong_contributors(wire: Wire) -> None:
    """A bit for a member that does not exist."""
    index, members = wire.part.first, wire.round.seal.members
    data = bytearray(wire.averaged(index))
    data[14] |= 1 << len(members)
    await wire.frame(AVERAGE, index, data)


async def contributions_that_never_came(wire: Wire) -> None:
    """The welcome takes no contribution, the average counts it all the same."""
    index = wire.part.first
    everyone = [i for i, member in enumerate(wire.round.seal.members) if member.weight]
    await wire.frame(AVERAGE, index, wire.packed(index, everyone, wire.mean(index)))


async def stall_after_half(wire: Wire) -> None:
    await wire.average(wire.part.first)
    while True:
        await asyncio.sleep(wire.round.silence / 3)
        await wire.stream.send(bytes([ALIVE]))


async def close_after_half(wire: Wire) -> None:
    if wire.hello.have == wire.part.first:
        await wire.average(wire.part.first)
    await wire.stream.close()


async def two_stories(wire: Wire) -> None:
    """One member gets other averages than the rest."""
    honest = sorted(m for m in range(len(wire.round.peers)) if m != wire.round.me)
    leader = wire.round.leader()
    victim = next(m for m in honest if m != leader)
    await _tell(wire, 2.0 if wire.round.peers[victim] == wire.stream.peer else 1.0)


async def as_many_stories_as_members(wire: Wire) -> None:
    await _tell(wire, 1.0 + wire.round.peers.index(wire.stream.peer))


async def _tell(wire: Wire, scale: float) -> None:
    for index in range(wire.part.first, wire.last + 1):
        await wire.frame(AVERAGE, index, wire.packed(index, [wire.round.me], wire.mean(index, scale)))
    await wire.end()


async def averages_after_the_end(wire: Wire) -> None:
    await _tell(wire, 1.0)
    await wire.average(wire.last)


async def no_end(wire: Wire) -> None:
    for index in range(wire.part.first, wire.last + 1):
        await wire.average(index)


async def averages_with_a_wrong_hash(wire: Wire) -> None:
    for index in range(wire.part.first, wire.last):
        await wire.average(index)
    await wire.end(digest=bytes(32))


async def huge_average(wire: Wire) -> None:
    await wire.average(wire.part.first)
    await _huge(wire)


async def pickle_as_average(wire: Wire) -> None:
    await wire.average(wire.part.first)
    await wire.stream.send(bomb(wire))


async def welcome_to_another_roster(wire: Wire) -> None:
    await wire.stream.send(encode(Welcome(bytes(32), wire.part.first)))


async def pickle_as_welcome(wire: Wire) -> None:
    await wire.stream.send(bomb(wire))


UNWELCOMING = (welcome_to_another_roster, pickle_as_welcome)
REDUCER = [
    Case(average_of_nan, "what no encoder writes"),
    Case(average_beyond_the_bound, "what no encoder writes"),
    Case(constant_average),
    Case(half_an_average, "stands still", fault="slow", ends=False),
    Case(average_of_wrong_shape, r"values in int8 takes \d+ bytes, received"),
    Case(average_of_another_version, "of version 2"),
    Case(average_twice, r"chunk \d+ where \d+ was due"),
    Case(wrong_weight, "states weight"),
    Case(wrong_contributors, "a bitmap of"),
    Case(contributions_that_never_came, "a contribution that was not sent"),
    Case(stall_after_half, "stands still", fault="slow", ends=False),
    Case(close_after_half, "stands still", fault="slow", ends=False),
    Case(two_stories, "another average of chunk", ends=False),
    Case(averages_after_the_end, "after the end|a frame of"),
    Case(no_end, "and no end in", fault="slow"),
    Case(averages_with_a_wrong_hash, "an end that does not fit"),
    Case(huge_average, "a frame of 536870912 bytes"),
    Case(pickle_as_average, "frame of kind 128|a frame of"),
    Case(welcome_to_another_roster, "a welcome to another roster"),
    Case(pickle_as_welcome, "malformed Welcome|a frame of"),
]


def at_random(seed: int, *, as_member: bool) -> Case:
    """Sound frames, damaged ones and noise, in any order, with pauses."""

    async def noise(wire: Wire) -> None:
        rng = random.Random(f"{seed} {wire.stream.peer}")
        if as_member:
            await wire.stream.send(encode(wire.hello) if rng.random() < 0.9 else rng.randbytes(rng.randrange(400)))
        due = wire.part.first
        for _ in range(rng.randrange(1, 12)):
            index = due if rng.random() < 0.7 else rng.choice([due + 1, wire.last, 2**31, wire.part.first])
            known = min(index, wire.last)
            payload = bytearray(wire.payload(known) if as_member else wire.averaged(known))
            kind = CONTRIBUTION if as_member else AVERAGE
            match rng.choice(["frame"] * 6 + ["damaged", "damaged", "cut", "noise", "alive", "end", "pause", "close"]):
                case "frame":
                    await wire.frame(kind, index, payload)
                    due += index == due
                case "damaged":
                    for _ in range(rng.randrange(1, 4)):
                        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
                    await wire.frame(kind, index, payload)
                    due += index == due
                case "cut":
                    await wire.frame(kind, index, payload[: rng.randrange(len(payload))])
                case "noise":
                    await wire.stream.send(rng.randbytes(rng.randrange(200)))
                case "alive":
                    await wire.stream.send(bytes([ALIVE]))
                case "end":
                    await wire.end(count=wire.count if rng.random() < 0.5 else rng.randrange(9))
                case "pause":
                    await asyncio.sleep(rng.uniform(0, 1.5) * wire.round.silence)
                case "close":
                    await wire.stream.close()
            due = min(due, wire.last)

    return Case(noise, as_member=as_member, ends=False)


class HostileRound(Round):
    """A round in which this peer does what a case says on its reduce streams, and is an ordinary member otherwise."""

    case: Case
    marker: Path
    wires: list[Wire]
    closed: list[Wire]
    """Those of them that the other side has ended."""

    @property
    def _reduces(self) -> bool:
        return not self.case.as_member

    def _made_wire(self, part: Part, stream: Stream, hello: Hello) -> Wire:
        wire = Wire(self, part, stream, hello, marker=self.marker)
        self.wires.append(wire)
        return wire

    async def _exchange(self, part: Part, progress: Progress) -> None:
        if self._reduces:
            await super()._exchange(part, progress)
            return
        stream = await self.around.transport.open(self.peers[part.reducer], PROTOCOL, timeout=5.0)
        self._open(stream)
        wire = self._made_wire(part, stream, Hello(self.seal, self.signature, part.first, part.count, part.first))
        try:
            await self.case.act(wire)
            await wire.until_closed()
        except TransportError:
            pass  # refused in the middle of what it sent
        finally:
            self._shut(stream)
            await stream.close()
            self._distrusted.add(part.reducer)  # nothing more comes from there: it fetches from others at once
        self.closed.append(wire)

    def _take(self, part: Part) -> None:
        if part.reducer != self.me or not self._reduces:
            super()._take(part)
            return
        key = (part.first, part.count)
        self._reducer_of[key] = part.reducer
        self._progress[key] = self.around.transport.now()
        self._work[key] = self._spawn(self._average(part))

    async def _average(self, part: Part) -> None:
        """What it holds itself is sound, so that it can propose and sign like everyone."""
        wire = self._made_wire(part, None, None)  # type: ignore[arg-type]
        for index in range(part.first, part.first + part.count):
            told = wire.constant(index) if self.case.act is constant_average else wire.mean(index)
            self._hold(index, wire.packed(index, [self.me], told))

    async def serve(self, stream: Stream, hello: Hello) -> None:
        part = next((p for p in self.seal.parts if (p.first, p.count) == (hello.first, hello.count)), None)
        if not self._reduces or part is None or part.reducer != self.me:
            await super().serve(stream, hello)
            return
        self._open(stream)
        wire = self._made_wire(part, stream, hello)
        takes_none = self.case.act is contributions_that_never_came
        acting: asyncio.Task[None] | None = None
        try:
            first = part.first + part.count if takes_none else part.first
            if self.case.act not in UNWELCOMING:
                await stream.send(encode(Welcome(self.roster_id, first)))
            acting = asyncio.get_running_loop().create_task(self._act(wire))
            await wire.until_closed()
            self.closed.append(wire)
        finally:
            if acting is not None:
                acting.cancel()
                await asyncio.gather(acting, return_exceptions=True)
            self._shut(stream)

    async def _act(self, wire: Wire) -> None:
        try:
            await self.case.act(wire)
        except TransportError:
            pass


def overstate(peer: Peer, factor: int) -> Callable[[], None]:
    """It enters with so many times its weight. Returns what makes it honest again."""
    enter = peer._training.enter

    async def lying(call: Call) -> tuple[Member, Snapshot]:
        member, snapshot = await enter(call)
        return msgspec.structs.replace(member, weight=member.weight * factor), snapshot

    def stop() -> None:
        peer._training.enter = enter  # type: ignore[method-assign]

    peer._training.enter = lying  # type: ignore[method-assign]
    return stop


def seal_heavily(peer: Peer, factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the coordinator it seals itself with so many times its weight."""

    def lying(calling: Calling, own: Member, **rest: Any) -> Seal:
        if rest["coordinator"] == peer.transport.peer_id:
            own = msgspec.structs.replace(own, weight=own.weight * factor)
        return make_seal(calling, own, **rest)

    monkeypatch.setattr("atoll.protocol.coordinating.make_seal", lying)


@dataclass
class Attack:
    """Which case the hostile peer plays in its next round with weights, and the roster in which it did."""

    hostile: str
    """Its peer id."""
    marker: Path
    case: Case | None = None
    rosters: list[str] = field(default_factory=list)
    rounds: list[HostileRound] = field(default_factory=list)
    once: bool = True
    began: Callable[[HostileRound], None] = lambda current: None

    def round(self, around: Any, seal: Seal, signature: bytes, roster_id: bytes, theta: Any) -> Round:
        """In place of :class:`Round`: the hostile peer's, when its time has come."""
        weighed = all(member.weight for member in seal.members) and len(seal.members) == len(HONEST) + 1
        # What a coordinator can do besides is for the tests of control messages.
        led = seal.coordinator == self.hostile
        part = any(seal.members[part.reducer].peer == self.hostile for part in seal.parts)
        ready = self.case is not None and weighed and not led and (part or self.case.as_member)
        if around.transport.peer_id != self.hostile or self.case is None or not ready:
            return Round(around, seal, signature, roster_id, theta)
        hostile = HostileRound(around, seal, signature, roster_id, theta)
        hostile.case, hostile.marker, hostile.wires, hostile.closed = self.case, self.marker, [], []
        self.rosters.append(roster_id.hex())
        self.rounds.append(hostile)
        if self.once:
            self.case = None
        self.began(hostile)
        return hostile


def constant_where_it_is_told(current: HostileRound, x: np.ndarray) -> None:
    """What it brings by its word, written over what it would have brought: to the parts of others, or to its own."""
    for part in current.seal.parts:
        if (part.reducer != current.me) == (current.case.act is constant):
            for index in range(part.first, part.first + part.count):
                x[current.around.layout.span(index)] = CONSTANT


CONSTANTS = (constant, constant_average)


def verdict(
    case: Case, attack: Attack, ids: Mapping[str, str], refused: Sequence[tuple[str, Mapping[str, Any]]],
    commit: Commit,
) -> list[str]:  # fmt: skip
    """What is wrong with how the honest came out of a round: sentences, none when all is well.

    ids: peer id by name. refused: (name, fields) of the ``refused`` events of that time.
    """
    wrong: list[str] = []
    seal = commit.body.seal
    numbers = {name: next(i for i, m in enumerate(seal.members) if m.peer == peer) for name, peer in ids.items()}
    for name, fields in refused:
        if name in HONEST and fields["peer"] != ids[HOSTILE]:
            wrong.append(f"{name} blames the honest {fields}")
    named = [
        name for name, fields in refused
        if name in HONEST and fields["peer"] == ids[HOSTILE] and fields["fault"] == case.fault
        and re.search(case.reason, fields["reason"])
    ]  # fmt: skip
    if not case.reason and any(name in HONEST for name, _ in refused):
        wrong.append(f"nothing is wrong with it, and it is refused: {refused}")
    reducers = {part.reducer for part in seal.parts}
    expected = [n for n in HONEST if numbers[n] in reducers] if case.as_member else []
    if case.reason and (not named or not set(expected) <= set(named)):
        wrong.append(f"named by {named}, expected {expected or 'somebody'}: {refused}")
    for part in seal.parts:
        for index in range(part.first, part.first + part.count):
            inside = members_in(commit.body.chunks[index].contributors, len(seal.members))
            honest = [numbers[n] for n in HONEST]
            if part.reducer == numbers[HOSTILE]:
                continue  # whoever averaged it in the end; that the mean is right is checked elsewhere
            if not set(honest) <= set(inside):
                wrong.append(f"chunk {index} is the mean of {inside}, without one of {honest}")
            counts = not case.as_member or index - part.first < case.counts
            if (numbers[HOSTILE] in inside) != counts:
                wrong.append(f"chunk {index} (of {part}) is the mean of {inside}, the hostile is {numbers[HOSTILE]}")
    if attack.marker.exists():
        wrong.append("something was unpickled")
    for current in attack.rounds:
        # What is on its way in sockets, daemons and windows, and the 16 MiB that a closed stream still throws away.
        wrong += [f"{wire.taken} bytes of a huge message were taken" for wire in current.wires if wire.taken > 64 << 20]
        if case.ends and case.reason and not current.closed:
            wrong.append("no stream was ended by the other side")
    return wrong
