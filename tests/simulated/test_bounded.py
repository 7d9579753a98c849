"""One part of a round on the simulated network: what its reducer and its members hold at any moment is bounded, and
all that costs processor time runs off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atoll.protocol.averaged import unpack
from atoll.protocol.codecs import Codec, averages_codec, get_codec
from atoll.protocol.commits import members_in
from atoll.protocol.errors import Fault
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.merging import Merging
from atoll.protocol.messages import GENESIS, Member, Part, Seal, decode
from atoll.protocol.reduce import HELLO_LIMIT, PROTOCOL, WINDOW, Hello, Progress, Reducer, exchange
from atoll.protocol.simulation import SimNetwork, SimTransport
from atoll.protocol.transport import Stream

CHUNK, COUNT = 4096, 60
SILENCE = 2.0
BROUGHT = 5
"""Chunks that the slow member brings before it falls silent."""
ROSTER = bytes(32)
NAMES = ["reducer", "fast", "slow"]


class Group:
    """Three members, the first of which reduces everything. ``peaks``: the most of each kind that there has been."""

    def __init__(self, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codec, self.layout = get_codec(codec), ChunkLayout(CHUNK * COUNT, CHUNK)
        self.network = SimNetwork(latency=0.001, window=1 << 14, piece=1 << 12, offload_seconds=lambda *_: 0.001)
        self.hosts = {name: self.network.host(name) for name in NAMES}
        self.members = [Member(str(h.peer_id), bytes(16), 10, 1, 0, 0.0, 0.0, True) for h in self.hosts.values()]
        self.part = Part(0, 0, COUNT)
        self.seal = Seal(ROSTER, 1, 0, GENESIS, self.members[0].peer, bytes(16), self.members, [self.part], False, 60.0)
        self.merging = Merging("tokens", 100, 1)
        self.frame = 5 + self.codec.encoded_size(CHUNK)
        self.averages: dict[str, list[bytes]] = {name: [] for name in NAMES}
        self.refused: list[tuple[int, Fault]] = []
        self.peaks = {"sums": 0, "ahead of the averages": 0, "encoded ahead": 0}
        self.encoded, self.sent = 0, 0
        """Chunks of the fast member."""
        self.off_the_loop = 0
        """Functions that run where the product puts what costs time."""
        self.stream: Stream | None = None
        """The reducer's end of the one from the fast member, and the size of its first frame."""
        self.hello = 0
        self.reducer: Reducer | None = None
        for name in ("encode", "decode", "accumulate", "validate"):
            self._only_off_the_loop(name, monkeypatch)

    def _only_off_the_loop(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(Codec, name)

        def checked(*args: Any, **rest: Any) -> Any:
            assert self.off_the_loop, f"{name} of a codec on the event loop"
            return real(*args, **rest)

        monkeypatch.setattr(Codec, name, checked)

    def watch(self, transport: SimTransport) -> None:
        offload = transport.offload

        async def watched(function: Callable[..., Any], *args: Any, **rest: Any) -> Any:
            def run() -> Any:
                self.off_the_loop += 1
                try:
                    return function(*args, **rest)
                finally:
                    self.off_the_loop -= 1

            self.look()
            result = await offload(run)
            self.look()
            return result

        transport.offload = watched  # type: ignore[method-assign]

    def look(self) -> None:
        if self.reducer is not None and self.stream is not None:
            now = {
                "sums": len(self.reducer._sums) + len(self.reducer._spare),
                "ahead of the averages": self.received() - self.reducer._low * self.frame,
                "encoded ahead": self.encoded - self.sent,
            }
            self.peaks = {what: max(most, now[what]) for what, most in self.peaks.items()}

    def received(self) -> int:
        """Bytes of the fast member's chunks."""
        assert self.stream is not None
        return self.stream.bytes_received - self.hello

    def values(self, member: int, index: int) -> np.ndarray:
        return np.random.default_rng((member, index)).standard_normal(CHUNK).astype(np.float32)

    async def reduce(self, transport: SimTransport) -> None:
        self.watch(transport)
        started = transport.now()
        self.reducer = Reducer(
            transport, self.layout, self.codec, self.members, 0, self.part, merging=self.merging, silence=SILENCE,
            cutoff=started + 60, sink=lambda index, data, digest: self.averages["reducer"].append(data),
            refused=lambda member, reason, fault: self.refused.append((member, fault)), floor=lambda: started,
            silent=lambda member: 0.0,
        )  # fmt: skip
        reducer = self.reducer

        async def serve(stream: Stream) -> None:
            frame = await stream.receive(HELLO_LIMIT)
            hello = decode(frame, Hello, stream.peer)
            member = [m.peer for m in self.members].index(str(stream.peer))
            if NAMES[member] == "fast":
                self.stream, self.hello = stream, len(frame)
            await reducer.accept(member, stream, hello, ROSTER)

        await transport.serve(PROTOCOL, serve)
        await reducer.run(lambda index: self.codec.encode(self.values(0, index)))

    async def contribute(self, transport: SimTransport, name: str) -> None:
        self.watch(transport)
        me = NAMES.index(name)
        stream = await transport.open(self.hosts["reducer"].peer_id, PROTOCOL, timeout=5.0)
        send, sent = stream.send, 0

        async def sending(*parts: bytes | bytearray | memoryview) -> None:
            nonlocal sent
            if name == "slow" and sent:
                await asyncio.sleep(0.3 * SILENCE if sent <= BROUGHT else 1e9)
            await send(*parts)
            sent += 1
            if name == "fast" and sent > 1:  # the hello was the first
                self.sent += 1

        stream.send = sending  # type: ignore[method-assign]

        def own(index: int) -> bytearray | memoryview:
            self.encoded += name == "fast"
            return self.codec.encode(self.values(me, index))

        await exchange(
            stream, Hello(self.seal, bytes(64), 0, COUNT, 0), ROSTER, Progress.of(self.part), transport=transport,
            layout=self.layout, codec=self.codec, members=self.members, me=me, merging=self.merging, silence=SILENCE,
            own=own, sink=lambda index, data, digest: self.averages[name].append(data),
        )  # fmt: skip

    def run(self) -> None:
        async def main() -> None:
            reducing = self.hosts["reducer"].run(self.reduce)
            tasks = [self.hosts[n].run(lambda transport, n=n: self.contribute(transport, n)) for n in NAMES[1:]]
            while not (reducing.done() and tasks[0].done()) and self.network.loop.time() < 60:
                self.look()
                await asyncio.sleep(0.01)
            assert (reducing.done(), tasks[0].done()) == (True, True)
            await asyncio.gather(reducing, tasks[0])
            tasks[1].cancel()

        self.network.run(main())


@pytest.mark.parametrize("codec", ["int8", "sparse"])
def test_a_fast_member_waits_for_a_slow_one_within_bounded_memory(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(codec, monkeypatch)
    group.run()
    assert group.refused == [(2, Fault.SLOW)]
    # One chunk is averaged while the next ones are summed, and its memory is used again.
    assert WINDOW <= group.peaks["sums"] <= WINDOW + 2
    assert WINDOW * group.frame <= group.peaks["ahead of the averages"] <= (WINDOW + 2) * group.frame
    # The one that is being sent, and the next.
    assert 1 <= group.peaks["encoded ahead"] <= 2
    assert group.averages["fast"] == group.averages["reducer"]
    for index, data in enumerate(group.averages["reducer"]):
        averaged = unpack(data)
        inside = [0, 1, 2] if index < BROUGHT else [0, 1]
        assert members_in(averaged.contributors, 3) == inside
        group.off_the_loop += 1  # what a test does is nobody's hold-up
        total, mean = np.zeros(CHUNK, np.float32), np.empty(CHUNK, np.float32)
        for member in inside:
            group.codec.accumulate(group.codec.encode(group.values(member, index)), 10.0, total)
        averages = averages_codec(codec)
        averages.decode(averaged.payload, CHUNK, mean)
        group.off_the_loop -= 1
        np.testing.assert_allclose(mean, total / (10 * len(inside)), atol=0.005 * np.abs(total).max())
