"""The libp2p transport with real daemons on 127.0.0.1."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.protocol import frames, hivemind_transport, probe
from atoll.protocol.errors import (
    AddressError,
    Fault,
    FrameTooLarge,
    NetworkDown,
    NetworkError,
    PeerUnreachable,
    ResourceError,
    StreamClosed,
)
from atoll.protocol.hivemind_dht import MAX_VALUE
from atoll.protocol.hivemind_transport import HivemindTransport
from atoll.protocol.identity import load_or_create_identity
from atoll.protocol.p2pd import Daemon
from atoll.protocol.ports import reserve
from atoll.protocol.probe import Prober
from atoll.protocol.rates import Rates
from atoll.protocol.transport import PeerId, Stream

pytestmark = pytest.mark.real

RUN = bytes(range(32))
KEYS = ("peers/0", "peers/1")


def signed_by_its_peer(key: bytes, peer: PeerId, value: bytes, expires: float) -> bool:
    return value.startswith(peer.encode())


async def make(
    tmp_path: Path, name: str, known: list[HivemindTransport] | None = None, **options: Any
) -> HivemindTransport:
    defaults: dict[str, Any] = {"run_id": RUN, "keys": KEYS, "seeds": [full(transport) for transport in known or []]}
    return await HivemindTransport.create(
        identity_path=tmp_path / name, validator=signed_by_its_peer, **defaults | options
    )


def full(transport: HivemindTransport) -> str:
    return f"{transport.addresses()[0]}/p2p/{transport.peer_id}"


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive(8 << 20))


async def send_for_ever(stream: Stream) -> None:
    while True:
        await stream.send(bytes(4 << 20))


async def until(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while True:
            result = condition()
            if result is True or (not isinstance(result, bool) and await result):
                return
            await asyncio.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).iterdir())


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this process's own (short, for the sockets' names), so that what is left shows."""
    with tempfile.TemporaryDirectory(prefix="atest-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_frames_both_ways(tmp_path: Path) -> None:
    async def run() -> None:
        server = await make(tmp_path, "server")
        client = await make(tmp_path, "client")
        try:
            await server.serve("echo", echo)
            client.learn(server.peer_id, server.addresses())
            stream = await client.open(server.peer_id, "echo", timeout=5)
            assert stream.peer == server.peer_id
            sizes = (0, 1, 65535, 65536, 65537, 5 << 20)
            frames = [os.urandom(size) for size in sizes]

            async def send() -> None:
                for frame in frames:
                    await stream.send(frame)
                await stream.send(bytearray(frames[2]))
                await stream.send(memoryview(frames[3])[1:])

            sending = asyncio.create_task(send())
            for frame in [*frames, frames[2], frames[3][1:]]:
                assert await stream.receive(8 << 20) == frame
            await sending
            total = sum(sizes) + sizes[2] + sizes[3] - 1
            assert (stream.bytes_sent, stream.bytes_received) == (total, total)
            assert client.bytes_sent == client.bytes_received == server.bytes_sent == total
            assert client.now() - stream.last_heard < 5

            # a reading that is given up loses nothing
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.receive(), 0.05)
            await stream.send(b"after")
            assert await stream.receive() == b"after"
            await stream.close()
            await stream.close()
            with pytest.raises(StreamClosed):
                await stream.send(b"x")
            with pytest.raises(StreamClosed):
                await stream.receive()
        finally:
            await client.close()
            await server.close()

    asyncio.run(run())


@pytest.mark.parametrize("both", [True, False])
def test_of_two_that_dial_each_other_one_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both: bool) -> None:
    """Over links with a delay two dials that cross fail, again and again; so one side waits for the other's, and
    dials after a while if none comes."""
    monkeypatch.setattr(hivemind_transport, "_is_near", lambda address: False)  # loopback hides the delay, not the rule
    apart: dict[PeerId, bool] = {}
    original = Daemon.connect

    async def connect(self: Daemon, peer: PeerId, addresses: list[str], timeout: float) -> None:
        apart[self.peer_id] = peer not in await self.peers()
        await original(self, peer, addresses, timeout)

    monkeypatch.setattr(Daemon, "connect", connect)

    async def run() -> None:
        small, large = sorted([await make(tmp_path, "one"), await make(tmp_path, "two")], key=lambda t: t.peer_id)
        try:
            for transport, other in ((small, large), (large, small)):
                await transport.serve("echo", echo)
                transport.learn(other.peer_id, other.addresses())
            dials = [large.open(small.peer_id, "echo", timeout=5)]
            if both:
                dials.append(small.open(large.peer_id, "echo", timeout=5))
            await asyncio.gather(*dials)
            assert apart == ({small.peer_id: True, large.peer_id: False} if both else {large.peer_id: True})
        finally:
            for transport in (small, large):
                await transport.close()

    asyncio.run(run())


def test_limits_closing_and_defects(tmp_path: Path) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        defects: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: defects.append(context))
        caught: asyncio.Queue[BaseException | bytes] = asyncio.Queue()
        ends: asyncio.Queue[int] = asyncio.Queue()
        server = await make(tmp_path, "server")
        client = await make(tmp_path, "client", [server], require_seed=True)

        async def limited(stream: Stream) -> None:
            try:
                await caught.put(await stream.receive(1000))
                await stream.receive(1000)
            except FrameTooLarge as error:
                await caught.put(error)
                with pytest.raises(StreamClosed):
                    await stream.receive()
                await stream.send(b"it can still be told")
                raise

        async def slow(stream: Stream) -> None:
            """Reads late, while it has sent what nobody reads."""
            await stream.send(bytes(1 << 16))
            await asyncio.sleep(0.5)
            count = 0
            try:
                while True:
                    count += len(await stream.receive())
            except StreamClosed:
                await ends.put(count)

        async def faulty(stream: Stream) -> None:
            raise RuntimeError("a defect")

        try:
            for name, handler in (("limited", limited), ("slow", slow), ("faulty", faulty)):
                await server.serve(name, handler)
            stream = await client.open(server.peer_id, "limited", timeout=5)
            await stream.send(bytes(1000))
            await stream.send(bytes(1001))
            assert await caught.get() == bytes(1000)
            error = await caught.get()
            assert isinstance(error, FrameTooLarge)
            assert error.peer == client.peer_id
            assert await stream.receive() == b"it can still be told"
            await stream.close()

            stream = await client.open(server.peer_id, "slow", timeout=5)
            for _ in range(8):
                await stream.send(bytes(1 << 20))
            began = loop.time()
            await stream.close()  # with unread data in it
            assert loop.time() - began < 0.5
            assert await asyncio.wait_for(ends.get(), 10) == 8 << 20

            assert not defects
            stream = await client.open(server.peer_id, "faulty", timeout=5)
            with pytest.raises(StreamClosed):
                await stream.receive()
            await until(lambda: bool(defects), 5)
            assert "a defect" in repr(defects[0]["exception"])
            await stream.close()

            # a reader that is told of the end elsewhere
            stream = await client.open(server.peer_id, "limited", timeout=5)
            reading = asyncio.create_task(stream.receive())
            await asyncio.sleep(0.1)
            await stream.close()
            with pytest.raises(StreamClosed):
                await asyncio.wait_for(reading, 1)
            assert await client.offload(lambda a, b: a + b, 1, b=2) == 3
            gate = threading.Event()
            held = [asyncio.ensure_future(client.offload(gate.wait, 60)) for _ in range(3)]
            await asyncio.sleep(0)
            client.use_threads(1)
            assert await client.offload(len, "another pool") == 12
            gate.set()
            assert await asyncio.gather(*held) == [True] * 3, "what the last pool had begun or was given is done"
        finally:
            await client.close()
            await server.close()

    asyncio.run(run())


def test_closing_never_cuts_what_was_sent(tmp_path: Path) -> None:
    """The daemon may reset a stream whose handler has returned. Without a last word one stream in some hundred lost its
    end where processes wait for processors, so many are tried, beside others that take them."""
    size, rounds = 1 << 20, 40
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]

    async def run() -> None:
        peers = [await make(tmp_path, f"peer {index}") for index in range(4)]

        async def answer(stream: Stream) -> None:
            await asyncio.gather(put(stream), take(stream))

        async def put(stream: Stream) -> None:
            for _ in range(4):
                await stream.send(bytes(size // 4))

        async def take(stream: Stream) -> None:
            for _ in range(4):
                assert len(await stream.receive()) == size // 4

        async def call(peer: HivemindTransport, other: HivemindTransport) -> None:
            stream = await peer.open(other.peer_id, "answer", timeout=10)
            await asyncio.gather(put(stream), take(stream))
            await stream.close()

        try:
            for peer in peers:
                await peer.serve("answer", answer)
                for other in peers:
                    peer.learn(other.peer_id, other.addresses())
            pairs = [(peer, other) for peer in peers for other in peers if peer is not other]
            for peer, other in pairs:
                await call(peer, other)
            for _ in range(rounds):
                await asyncio.wait_for(asyncio.gather(*(call(*pair) for pair in pairs)), 60)
            await until(lambda: not any(peer._streams for peer in peers), 5)  # nobody lingers
        finally:
            await asyncio.gather(*(peer.close() for peer in peers))

    try:
        asyncio.run(run())
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_who_closed_reads_on_until_the_other_has_closed(tmp_path: Path) -> None:
    """Both close at once, one in the middle of a long frame of the other's; and one that never closes does not hold the
    other for longer than it says."""

    async def run() -> None:
        server = await make(tmp_path, "server")
        client = await make(tmp_path, "client")
        arrived: asyncio.Queue[bytes] = asyncio.Queue()
        hold = asyncio.Event()

        async def meet(stream: Stream) -> None:
            await stream.send(b"first")
            sending = asyncio.create_task(stream.send(bytes(8 << 20)))
            arrived.put_nowait(await stream.receive())
            arrived.put_nowait(await stream.receive())
            with pytest.raises(StreamClosed, match="ended"):
                await stream.receive()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

        async def deaf(stream: Stream) -> None:
            await stream.send(b"here")
            await hold.wait()

        try:
            await server.serve("meet", meet)
            await server.serve("deaf", deaf)
            client.learn(server.peer_id, server.addresses())
            stream = await client.open(server.peer_id, "meet", timeout=5)
            await stream.send(b"a")
            assert await stream.receive() == b"first"
            await stream.send(b"b" * 100_000)
            await stream.close()
            assert [await asyncio.wait_for(arrived.get(), 5) for _ in "ab"] == [b"a", b"b" * 100_000]
            await until(lambda: not server._streams and not client._streams, 5)

            stream = await client.open(server.peer_id, "deaf", timeout=5)
            await stream.send(b"a")
            assert await stream.receive() == b"here"
            began = asyncio.get_running_loop().time()
            await stream.close()
            assert asyncio.get_running_loop().time() - began < 0.5, "closing never waits"
            await until(lambda: not client._streams, 2 * frames.LINGER)
            hold.set()
            await until(lambda: not server._streams, 5)
        finally:
            hold.set()
            await client.close()
            await server.close()

    asyncio.run(run())


PEER = """
import asyncio, json, sys
from pathlib import Path
from atoll.protocol.hivemind_transport import HivemindTransport

async def echo(stream):
    while True:
        await stream.send(await stream.receive(8 << 20))

async def main():
    transport = await HivemindTransport.create(
        identity_path=Path(sys.argv[1]), run_id=bytes(range(32)), keys=["peers/0", "peers/1"], seeds=[],
        validator=lambda key, peer, value, expires: True,
    )
    await transport.serve("echo", echo)
    print(json.dumps([transport.peer_id, transport.addresses(), transport.daemon_pid]), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def peer_process(identity: Path) -> Iterator[tuple[subprocess.Popen[str], PeerId, list[str], int]]:
    process = subprocess.Popen([sys.executable, "-c", PEER, str(identity)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        peer, addresses, pid = json.loads(process.stdout.readline())
        yield process, PeerId(peer), addresses, pid
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_peer_that_stands_still_and_then_dies(tmp_path: Path) -> None:
    async def run() -> None:
        client = await make(tmp_path, "client")
        try:
            with peer_process(tmp_path / "peer") as (process, peer, addresses, daemon):
                client.learn(peer, addresses)
                stuck = await client.open(peer, "echo", timeout=5)
                stream = await client.open(peer, "echo", timeout=5)
                await stream.send(b"x")
                assert await stream.receive() == b"x"
                process.send_signal(signal.SIGSTOP)
                os.kill(daemon, signal.SIGSTOP)
                heard = stuck.last_heard
                with pytest.raises(TimeoutError):  # back-pressure: it is not all taken into memory
                    await asyncio.wait_for(send_for_ever(stuck), 1.0)
                assert stuck.bytes_sent < 64 << 20
                assert stuck.last_heard == heard
                began = time.monotonic()
                await stuck.close()
                assert time.monotonic() - began < 0.5
                began = time.monotonic()
                try:  # either is right: its kernel may have taken the request
                    await (await client.open(peer, "echo", timeout=1)).close()
                except PeerUnreachable as error:
                    assert "no answer within 1 s" in str(error)  # noqa: PT017
                assert time.monotonic() - began < 3
                process.kill()
                os.kill(daemon, signal.SIGKILL)
                with pytest.raises(StreamClosed):
                    await asyncio.wait_for(stream.receive(), 5)
                with pytest.raises(PeerUnreachable, match=r"refused|not tried again yet|no answer|was cut"):
                    await client.open(peer, "echo", timeout=3)
        finally:
            began = time.monotonic()
            await client.close()
            assert time.monotonic() - began < 5

    asyncio.run(run())


def test_the_daemon_dies_alone(tmp_path: Path) -> None:
    async def run() -> None:
        server = await make(tmp_path, "server")
        client = await make(tmp_path, "client", [server], require_seed=True)
        try:
            await server.serve("echo", echo)
            before = server.addresses(), server.daemon_pid
            assert before[1] is not None
            stream = await client.open(server.peer_id, "echo", timeout=5)
            await stream.send(b"x")
            assert await stream.receive() == b"x"
            assert await server.dht.publish("peers/0", server.peer_id.encode(), 60)
            began = time.monotonic()
            os.kill(before[1], signal.SIGKILL)
            with pytest.raises(StreamClosed):
                await asyncio.wait_for(stream.receive(), 5)
            await until(lambda: server.daemon_pid not in (None, before[1]), 10)
            assert time.monotonic() - began < 8
            assert server.addresses() == before[0]

            async def works() -> bool:
                try:
                    again = await client.open(server.peer_id, "echo", timeout=3)
                    await again.send(b"y")
                    answer = await again.receive()
                    await again.close()
                except (NetworkDown, PeerUnreachable, StreamClosed):
                    return False
                return answer == b"y"

            await until(works, 20)

            async def found() -> bool:
                return server.peer_id in await client.dht.read("peers/0")

            await until(found, 20)
            # and the other side's
            assert client.daemon_pid is not None
            os.kill(client.daemon_pid, signal.SIGKILL)
            await until(works, 20)
            await until(found, 20)
        finally:
            await client.close()
            await server.close()

    asyncio.run(run())


def test_seeds_that_are_not_there(tmp_path: Path) -> None:
    async def run() -> None:
        other_run = await make(tmp_path, "other", run_id=bytes(32))
        stranger = load_or_create_identity(tmp_path / "stranger").peer_id
        with reserve(["/ip4/127.0.0.1/tcp/0"]) as free:
            closed = free.addresses[0]
        client = await make(
            tmp_path,
            "client",
            seeds=[
                f"{closed}/p2p/{load_or_create_identity(tmp_path / 'nobody').peer_id}",
                f"{other_run.addresses()[0]}/p2p/{stranger}",
                full(other_run),
            ],
        )
        try:
            with pytest.raises(NetworkError, match="no peer of the run could be reached within 2 s") as caught:
                await client.wait_joined(2)
            text = str(caught.value)
            assert f"{closed}: connection refused" in text
            assert f"another peer id answers: {other_run.peer_id}, not {stranger}" in text
            assert "the peer there serves run 0000000000000000…" in text
            assert not client.neighbours()
            unheard_of = load_or_create_identity(tmp_path / "unheard of").peer_id
            with pytest.raises(PeerUnreachable, match="no address of it is known"):
                await client.open(unheard_of, "echo", timeout=2)
            client.learn(other_run.peer_id, other_run.addresses())
            with pytest.raises(PeerUnreachable, match="does not serve"):
                await client.open(other_run.peer_id, "echo", timeout=2)
            with pytest.raises(ResourceError, match="is taken"):
                await make(tmp_path, "third", listen=other_run.addresses())
            with pytest.raises(AddressError, match="peer's id"):
                await make(tmp_path, "third", seeds=[closed])
        finally:
            await client.close()
            await other_run.close()

    asyncio.run(run())


@pytest.mark.usefixtures("temporary")
def test_four_find_each_other_and_a_restarted_seed_merges(tmp_path: Path) -> None:
    async def run() -> None:
        before = folders()
        seed = await make(tmp_path, "seed")
        address, listen = full(seed), seed.addresses()
        peers = await asyncio.gather(*(make(tmp_path, f"peer{index}", seeds=[address]) for index in range(4)))
        running: list[HivemindTransport] = [seed, *peers]
        pids = [transport.daemon_pid for transport in running]
        try:
            began = time.monotonic()
            await asyncio.gather(*(peer.wait_joined(20) for peer in peers))

            async def publish(transport: HivemindTransport, text: str = "") -> bool:
                return await transport.dht.publish(KEYS[0], transport.peer_id.encode() + text.encode(), 60)

            def sees(reader: HivemindTransport, expected: set[PeerId]) -> Callable[[], Awaitable[bool]]:
                async def check() -> bool:
                    return set(await reader.dht.read(KEYS[0])) == expected

                return check

            assert all(await asyncio.gather(*map(publish, peers)))
            everyone = {peer.peer_id for peer in peers}
            await asyncio.gather(*(until(sees(reader, everyone), 20) for reader in running))
            assert time.monotonic() - began < 30

            # What is not valid or too big is not stored, and spoils nothing.
            assert not await peers[0].dht.publish(KEYS[0], b"not its own", 60)
            assert not await peers[0].dht.publish(KEYS[0], peers[0].peer_id.encode() + bytes(MAX_VALUE), 60)
            with pytest.raises(ValueError, match="none of the run's DHT keys"):
                await peers[0].dht.read("elsewhere")
            assert await publish(peers[0], "new")
            await until(
                lambda: _holds(peers[3], peers[0].peer_id, peers[0].peer_id.encode() + b"new"),
                10,
            )

            # All seeds dead: the others go on.
            await seed.close()
            running.remove(seed)
            assert all(await asyncio.gather(*(publish(peer, "alone") for peer in peers)))
            await until(sees(peers[1], everyone), 10)

            # It comes back at its old address; a newcomer that knows it alone sees all.
            seed = await make(tmp_path, "seed", listen=listen)
            newcomer = await make(tmp_path, "newcomer", seeds=[address], require_seed=True, client_mode=True)
            running += [seed, newcomer]
            pids += [seed.daemon_pid, newcomer.daemon_pid]
            assert await publish(newcomer)
            everyone.add(newcomer.peer_id)
            await asyncio.gather(*(until(sees(reader, everyone), 25) for reader in running))
        finally:
            began = time.monotonic()
            await asyncio.gather(*(transport.close() for transport in running))
            assert time.monotonic() - began < 5
        assert not [pid for pid in pids if pid is not None and alive(pid)]
        assert folders() <= before

    async def _holds(reader: HivemindTransport, peer: PeerId, value: bytes) -> bool:
        return (await reader.dht.read(KEYS[0])).get(peer) == value

    asyncio.run(run())


def test_a_link_is_measured(tmp_path: Path) -> None:
    """With two partners at once, over real streams; a third one that says nothing costs its time and no more."""

    async def silent(stream: Stream) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        transports = [await make(tmp_path, name) for name in ("me", "a", "b", "mute")]
        events: list[dict[str, Any]] = []
        refused: list[tuple[PeerId, Fault]] = []

        def told(event: str, /, **fields: Any) -> None:
            events.append(fields)

        def prober(transport: HivemindTransport) -> Prober:
            others = [other.peer_id for other in transports if other is not transport]
            return Prober(
                transport, Rates(transport.now()), room=lambda: 60.0, partners=lambda: others, known=lambda peer: True,
                refused=lambda peer, reason, fault: refused.append((peer, fault)), events=told,
            )  # fmt: skip

        try:
            me, *others = [prober(transport) for transport in transports]
            for transport, other in zip(transports[1:3], others[:2], strict=True):
                await other.start()
                transports[0].learn(transport.peer_id, transport.addresses())
            await transports[3].serve(probe.PROTOCOL, silent)
            transports[0].learn(transports[3].peer_id, transports[3].addresses())
            before = transports[0].bytes_sent
            async with asyncio.timeout(probe.LIMIT + 5):
                await me.measure(lenient=False)
            assert events[0]["partners"] == [transport.peer_id for transport in transports[1:3]]
            # Loopback carries some hundred MB/s; how many a busy machine leaves is not the question.
            assert min(events[0]["upload"], events[0]["download"]) > 1e6
            assert refused == [(transports[3].peer_id, Fault.SLOW)]
            assert transports[0].bytes_sent - before <= 2 * 1.01 * probe.BYTES + 10_000
        finally:
            await asyncio.gather(*(transport.close() for transport in transports))

    asyncio.run(run())


def test_importing_hivemind_changes_nothing_else() -> None:
    script = (
        "import logging, multiprocessing, signal\n"
        "before = signal.getsignal(signal.SIGINT), list(logging.root.handlers)\n"
        "import atoll.protocol.hivemind_transport\n"
        "assert (signal.getsignal(signal.SIGINT), list(logging.root.handlers)) == before\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
        "assert logging.getLevelName(logging.WARNING) == 'WARNING'\n"
        "assert logging.getLogger('hivemind').propagate and not logging.getLogger('hivemind').handlers\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_peer_that_starts_again_with_the_same_seed_has_other_nonces(tmp_path: Path) -> None:
    """Rosters and calls are told apart by them: with the seed's own it would enter, and sign, the same ones again."""
    nonces = []

    async def run() -> None:
        for _ in range(2):
            transport = await make(tmp_path, "one", seed=7)
            try:
                nonces.extend([transport.nonce(), transport.nonce()])
            finally:
                await transport.close()

    asyncio.run(run())
    assert len({*nonces}) == 4
    assert {len(nonce) for nonce in nonces} == {16}
