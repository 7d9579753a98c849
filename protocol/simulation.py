"""A network in memory under a virtual clock: the second implementation of the transport.

The same protocol code that runs over libp2p runs here, many peers in one process, hours in seconds, and a seed
replays. Hosts have a name, a peer id, up- and downlink, clocks that may be wrong, and may be behind NAT; they crash,
freeze and restart; links have latency, loss and a bandwidth of their own, and are cut and healed, one way too::

    network = SimNetwork(seed=7, latency=0.03)
    alice, bob = network.host("alice"), network.host("bob", upload=1e6)

    async def main() -> None:
        alice.run(serve_something)  # async def serve_something(transport: SimTransport) -> None
        task = bob.run(talk_to_it)
        network.at(5.0, lambda: alice.crash(power_cut=True))
        await task

    network.run(main())
    print(network.trace.hexdigest())

What it does not model: congestion control (a lossy link is slower in its delays only), relays and hole punching, the
cost of computing unless ``offload_seconds`` says so. Nothing is global: several networks may live in one process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from blake3 import blake3

from .errors import PeerUnreachable, SimulationError, TransportError
from .quota import StreamQuota
from .simlink import Link, Nic, SimStream, Wire, WireObserver
from .simloop import DEAD, FROZEN, RUNNING, SimLoop
from .simloop import run as run_loop
from .transport import Dht, PeerId, Standing, Stream, Transport

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

EPOCH = 1_750_000_000.0
"""Unix time at virtual second 0 on a host whose clock is right."""
MIB = 1 << 20

Program = Callable[["SimTransport"], Coroutine[Any, Any, Any]]
EventHook = Callable[["SimHost", str, Mapping[str, Any]], None]
Validator = Callable[[str, PeerId, bytes], bool]

_log = logging.getLogger(__name__)
_FRAME = struct.Struct("<dIQ?")
_HASH_AT_ONCE = 1 << 16


class Trace:
    """A running BLAKE3 over everything that happened in a network: equal hashes, equal runs.

    Status changes and delivered frames go in by themselves; ``add`` puts in more. With ``keep`` the records stay in
    ``records`` as (time, kind, fields), frames by their length.
    """

    def __init__(self, loop: SimLoop, *, keep: bool = False) -> None:
        self._loop = loop
        self._hash = blake3()
        self._hashed = bytearray()
        """What is yet to be hashed: many small pieces cost more than one large one."""
        self.keep = keep
        self.records: list[tuple[float, str, tuple[Any, ...]]] = []
        self.hook: Callable[[float, str, tuple[Any, ...]], None] | None = None
        """Called with every record."""

    def add(self, kind: str, *fields: Any) -> None:
        """A record. Fields enter by their ``repr``; give it nothing that prints an address or a set."""
        if self._loop.is_closing():
            return  # the run is over; what its remains do is no part of it
        now = self._loop.clock
        self._hashed += f"{now!r} {kind} {fields!r}\n".encode()
        self._note(now, kind, fields)

    def frame(self, wire: int, back: bool, source: str, target: str, frame: bytes) -> None:
        """A frame has arrived over a wire, whose ends :meth:`add` has named; ``back``: at the end that opened it."""
        if self._loop._closing:
            return
        now, hashed = self._loop.clock, self._hashed
        hashed += _FRAME.pack(now, wire, len(frame), back)
        hashed += frame
        if len(hashed) > _HASH_AT_ONCE:
            self._flush()
        if self.keep or self.hook is not None:
            self._note(now, "frame", (source, target, wire, len(frame)))

    def _note(self, now: float, kind: str, fields: tuple[Any, ...]) -> None:
        if self.keep:
            self.records.append((now, kind, fields))
        if self.hook is not None:
            self.hook(now, kind, fields)

    def _flush(self) -> None:
        self._hash.update(self._hashed)
        self._hashed.clear()

    def hexdigest(self) -> str:
        self._flush()
        return str(self._hash.hexdigest())


class _Record:
    __slots__ = ("expires", "holders", "value")

    def __init__(self, value: bytes, expires: float, holders: set[str]) -> None:
        self.value = value
        self.expires = expires  # by the wall clock
        self.holders = holders  # names of the hosts that store it


class _Store:
    """The DHT's records: key → publisher → versions. A host sees what the hosts that it reaches store."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[PeerId, list[_Record]]] = {}

    def put(self, key: str, peer: PeerId, record: _Record) -> None:
        """Store; where a version that expires later is stored, that one stays."""
        peers = self._keys.setdefault(key, {})
        versions = peers.setdefault(peer, [])
        for old in versions:
            if old.expires <= record.expires:
                old.holders -= record.holders
            else:
                record.holders -= old.holders
        versions.append(record)
        self._keep(peers, lambda record: bool(record.holders))

    def read(self, key: str, visible: frozenset[str], wall: float) -> dict[PeerId, bytes]:
        found: dict[PeerId, bytes] = {}
        for peer, versions in self._keys.get(key, {}).items():
            best = 0.0
            for record in versions:
                if record.expires > max(wall, best) and not visible.isdisjoint(record.holders):
                    best = record.expires
                    found[peer] = record.value
        return found

    def forget(self, host: str) -> None:
        """A host has lost what it stored."""
        for peers in self._keys.values():
            for versions in peers.values():
                for record in versions:
                    record.holders.discard(host)
            self._keep(peers, lambda record: bool(record.holders))

    def expire(self, key: str, wall: float) -> None:
        """Forget what expired before ``wall``, so that a long run does not fill the memory."""
        if key in self._keys:
            self._keep(self._keys[key], lambda record: record.expires > wall)

    @staticmethod
    def _keep(peers: dict[PeerId, list[_Record]], wanted: Callable[[_Record], bool]) -> None:
        for peer in list(peers):
            versions = peers[peer] = [record for record in peers[peer] if wanted(record)]
            if not versions:
                del peers[peer]


class SimDht(Dht):
    """One host's view of the simulated DHT.

    Hosts behind NAT store nothing for others. A record is stored by every host that the publisher reaches and becomes
    readable after ``dht_delay``; a reader sees what those store that it reaches then, unexpired by its own wall clock.
    """

    def __init__(self, transport: SimTransport) -> None:
        self._transport = transport

    async def publish(self, key: str, value: bytes, expires_in: float) -> bool:
        transport = self._transport
        network, host = transport.host.network, transport.host
        if not await transport.pause(2 * network.latency_of(host.name, host.name)):
            return False
        expires = transport.wall() + expires_in
        holders = set(network.reach(host))
        if not holders or (network.validator is not None and not network.validator(key, transport.peer_id, value)):
            return False
        record = _Record(bytes(value), expires, holders)
        network.loop.kernel_at(
            network.loop.clock + network.dht_delay, network.store_record, key, transport.peer_id, record
        )
        return True

    async def read(self, key: str) -> Mapping[PeerId, bytes]:
        transport = self._transport
        network, host = transport.host.network, transport.host
        if not await transport.pause(2 * network.latency_of(host.name, host.name)):
            return {}
        return network.records.read(key, network.reach(host), transport.wall())


class _Dial:
    """One attempt to open a stream."""

    def __init__(self, transport: SimTransport, protocol: str) -> None:
        self.transport = transport
        self.protocol = protocol
        self.abandoned = False
        self.answer: asyncio.Future[SimStream | str] = transport.nic.loop.create_future()

    def tell(self, answer: SimStream | str) -> None:
        if self.abandoned or self.answer.done():
            if isinstance(answer, SimStream):
                answer.shut()
        else:
            if isinstance(answer, SimStream):
                answer.last_heard = answer.nic.host.monotonic()
            self.answer.set_result(answer)

    def abandon(self) -> None:
        self.abandoned = True
        if self.answer.done() and not self.answer.cancelled():
            answer = self.answer.result()
            if isinstance(answer, SimStream):
                answer.shut()


class SimTransport(Transport):
    """The transport of one incarnation of a host. After a crash nothing that is awaited on it ever returns."""

    def __init__(self, host: SimHost, incarnation: int) -> None:
        network = host.network
        self.host = host
        self.incarnation = incarnation
        self.process = network.loop.process(f"{host.name}#{incarnation}")
        self.nic = Nic(host, self.process, network.loop, host.upload, host.download)
        self.peer_id = host.peer_id
        self.random = random.Random(f"{network.seed}/{host.name}/{incarnation}")
        self.dht = SimDht(self)
        self.known: dict[PeerId, list[str]] = {}
        """What :meth:`learn` was told. Opening a stream does not depend on it."""
        self.closed = False
        self.corrected = 0.0
        """Seconds that are added to the host's wall clock."""
        self._handlers: dict[str, Callable[[Stream], Awaitable[None]]] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._waiting: list[_Dial] = []
        self._quota = StreamQuota()

    def nonce(self) -> bytes:
        return self.random.randbytes(16)  # it is seeded by the incarnation too

    async def pause(self, seconds: float) -> bool:
        """Sleep; then whether this transport is still in use. Never returns in a dead process."""
        if self.process.state == DEAD:
            await self._for_ever()
        await asyncio.sleep(seconds)
        if self.process.state == DEAD:
            await self._for_ever()
        return not self.closed

    async def _for_ever(self) -> None:
        """What anybody waits for in a dead process."""
        await self.nic.loop.create_future()

    def now(self) -> float:
        return self.nic.loop.clock + self.host.boot_offset  # as SimHost.monotonic, without a call

    def wall(self) -> float:
        return EPOCH + self.nic.loop.clock + self.host.clock_offset + self.corrected

    def correct(self, seconds: float) -> None:
        self.corrected = seconds

    def contacts(self) -> list[PeerId]:
        network = self.host.network
        others = sorted(network.reach(self.host) - {self.host.name})
        return [network.hosts[name].peer_id for name in others]

    async def open(self, peer: PeerId, protocol: str, *, timeout: float) -> Stream:
        if self.process.state == DEAD:
            await self._for_ever()
        if self.closed:
            raise PeerUnreachable(f"cannot reach {peer}: this transport is closed")
        if peer == self.peer_id:
            raise PeerUnreachable("a peer cannot open a stream to itself")
        dial = _Dial(self, protocol)
        self.host.network.dial(dial, peer)
        try:
            async with asyncio.timeout(timeout):
                answer = await dial.answer
        except TimeoutError:
            dial.abandon()
            raise PeerUnreachable(f"no answer from {peer} within {timeout:g} s") from None
        except BaseException:
            dial.abandon()
            raise
        if isinstance(answer, str):
            raise PeerUnreachable(f"cannot open {protocol!r} to {peer}: {answer}")
        return answer

    async def serve(self, protocol: str, handler: Callable[[Stream], Awaitable[None]]) -> None:
        self._handlers[protocol] = handler

    def accept(self, dial: _Dial) -> None:
        """A dial has arrived at this process."""
        if self.process.state == FROZEN:
            self._waiting.append(dial)
            return
        network, caller = self.host.network, dial.transport
        if dial.abandoned or caller.process.state == DEAD:
            return
        handler = self._handlers.get(dial.protocol)
        answer: SimStream | str
        if self.process.state == DEAD or self.closed:
            answer = "connection refused"
        elif handler is None:
            answer = "the peer does not serve this protocol"
        elif not self._quota.take(caller.peer_id):
            answer = "the peer takes no more streams"
        else:
            wire = network.connect(caller, self, dial.protocol)
            answer = wire.near
            task = self.process.create_task(self._handle(handler, wire.far), name=f"{dial.protocol}<{caller.host.name}")
            self._tasks[task] = None
            task.add_done_callback(self._handled)
        back = network.link_between(self.host.name, caller.host.name)
        back.carry(network.loop.clock + back.delay(), lambda: dial.tell(answer))

    async def _handle(self, handler: Callable[[Stream], Awaitable[None]], stream: SimStream) -> None:
        try:
            await handler(stream)
        except* TransportError as errors:
            _log.debug("%s: a stream of %s failed: %s", self.host.name, stream.peer, errors.exceptions[0])
        finally:
            await stream.close()
            self._quota.give(stream.peer)

    def _handled(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.nic.loop.call_exception_handler(
                {"message": f"a stream handler of {self.host.name} failed", "exception": error}
            )

    async def offload(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Waits the virtual seconds that ``SimNetwork.offload_seconds`` names, then runs ``function`` here."""
        if self.process.state == DEAD:
            await self._for_ever()
        cost = self.host.network.offload_seconds
        await asyncio.sleep(0.0 if cost is None else cost(function, args, kwargs))
        if self.process.state == DEAD:
            await self._for_ever()
        return function(*args, **kwargs)

    def addresses(self) -> list[str]:
        return [f"/dns4/{self.host.name}/tcp/31337"] if self.host.reachable else []

    def guard(self, standing: Callable[[PeerId], Standing]) -> None:
        self._quota.standing = standing

    def learn(self, peer: PeerId, addresses: list[str]) -> None:
        self.known[peer] = list(addresses)

    async def close(self) -> None:
        if self.process.state == DEAD:
            await self._for_ever()
        if self.closed:
            return
        self.closed = True
        self._handlers.clear()
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        for wire in list(self.nic.wires.values()):
            wire.end_at(self.nic).shut()
        self.host.network.left(self.host)
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)

    def refuse_waiting(self) -> None:
        """The process died frozen: its machine, if it has power, refuses who was waiting for an answer."""
        waiting, self._waiting = self._waiting, []
        if self.host.powered:
            for dial in waiting:
                self.accept(dial)

    def thaw(self) -> None:
        """What happened while the process was frozen reaches it."""
        self.process.thaw()
        self.nic.uplink.resume()
        for wire in list(self.nic.wires.values()):
            wire.end_at(self.nic).thawed()
            wire.check_silence()
        waiting, self._waiting = self._waiting, []
        for dial in waiting:
            self.accept(dial)


class SimHost:
    """A machine in the network. It comes up with its first incarnation; :meth:`run` starts code on it."""

    def __init__(
        self,
        network: SimNetwork,
        name: str,
        peer_id: PeerId,
        upload: float,
        download: float,
        reachable: bool,
        clock_offset: float,
        boot_offset: float,
        program: Program | None,
    ) -> None:
        self.network = network
        self.name = name
        self.peer_id = peer_id
        self.upload = upload
        self.download = download
        self._reachable = reachable
        self.clock_offset = clock_offset
        """Seconds that its wall clock is ahead. May be changed at any time: the clock jumps."""
        self.boot_offset = boot_offset
        """What its monotonic clock showed at virtual second 0."""
        self.program = program
        """What :meth:`restart` runs."""
        self.powered = True
        self.bytes_sent = 0
        """Payload bytes of frames from this host that have been delivered."""
        self.bytes_received = 0
        self.transport = SimTransport(self, 0)

    def monotonic(self) -> float:
        """What its monotonic clock shows; :meth:`SimTransport.now`."""
        return self.network.loop.clock + self.boot_offset

    @property
    def reachable(self) -> bool:
        """False: behind NAT. Nobody opens a stream to it, but over a connection (any open stream) that exists."""
        return self._reachable

    @reachable.setter
    def reachable(self, value: bool) -> None:
        self._reachable = value
        self.network.changed()

    @property
    def running(self) -> bool:
        return self.transport.process.state == RUNNING

    @property
    def frozen(self) -> bool:
        return self.transport.process.state == FROZEN

    @property
    def dead(self) -> bool:
        return self.transport.process.state == DEAD

    def run(
        self, program: Callable[[SimTransport], Coroutine[Any, Any, T]], *, name: str | None = None
    ) -> asyncio.Task[T]:
        """Start ``program(transport)`` on this host. A task of a host that crashes never ends."""
        if self.dead:
            raise SimulationError(f"host {self.name} is dead; restart() it before running code on it")
        task = self.transport.process.create_task(program(self.transport), name=name)
        self.network.loop.watch(task)
        return task

    def crash(self, power_cut: bool = False) -> None:
        """SIGKILL: nothing on it runs again. Its connections are reset at once; with ``power_cut`` it just goes silent.

        Called by the host's own code (an event hook) it takes effect at that code's next suspension; what the code
        sends until then goes nowhere.
        """
        if not self.dead:
            self.network.trace.add("power cut" if power_cut else "crash", self.name)
            self.powered = not power_cut
            nic = self.transport.nic
            self.transport.process.kill()
            for wire in list(nic.wires.values()):
                if power_cut:
                    wire.end_at(nic).break_("its power was cut")
                else:
                    wire.killed(nic)
                wire.check_silence()
            self.network.left(self)
            self.transport.refuse_waiting()
        elif power_cut:
            self.powered = False

    def freeze(self) -> None:
        """SIGSTOP, of the peer and of its p2p daemon: timers and arrivals wait, clocks go on, others hear nothing."""
        if self.running:
            self.network.trace.add("freeze", self.name)
            self.transport.process.freeze()
            self.transport.nic.uplink.pause()
            for wire in list(self.transport.nic.wires.values()):
                wire.check_silence()
            self.network.changed()

    def thaw(self) -> None:
        """SIGCONT."""
        if self.frozen:
            self.network.trace.add("thaw", self.name)
            self.transport.thaw()
            self.network.changed()

    def restart(self) -> SimTransport:
        """A new incarnation with the same identity (a host that is still up crashes first); runs ``program``."""
        self.crash()
        self.powered = True
        self.transport = SimTransport(self, self.transport.incarnation + 1)
        self.network.trace.add("restart", self.name, self.transport.incarnation)
        self.network.changed()
        if self.program is not None:
            self.run(self.program)
        return self.transport

    def bandwidth(self, *, upload: float | None = None, download: float | None = None) -> None:
        """Change the host's bandwidths, in bytes per second, from the next piece on."""
        if upload is not None:
            self.upload = self.transport.nic.uplink.rate = upload
        if download is not None:
            self.download = self.transport.nic.downlink.rate = download

    def event(self, name: str, fields: Mapping[str, Any] | None = None) -> None:
        """Report what the code on this host does, for the trace and the hooks (see :meth:`SimNetwork.when`)."""
        if not self.dead:
            self.network.happened(self, name, {} if fields is None else fields)

    def __repr__(self) -> str:
        return f"<SimHost {self.name} {('running', 'frozen', 'dead')[self.transport.process.state]}>"


class Cut:
    """A cut that was made; :meth:`heal` takes back this one only."""

    def __init__(self, network: SimNetwork, links: list[Link]) -> None:
        self._network = network
        self.links = links

    def heal(self) -> None:
        self._network.heal_cut(self)


class SimNetwork(WireObserver):
    """The network.

    seed: of everything random, the hosts' ``Transport.random`` included.
    latency: seconds one way; or a function of the names of sender and receiver.
    jitter: share of the latency added at most. loss: probability of losing a packet of 1,460 bytes.
    upload, download: bytes per second of a host that names none.
    breaks_per_hour: how often a stream breaks for no reason, on average.
    window: bytes that a stream takes before :meth:`Stream.send` waits; at least what fills the way.
    piece: bytes of the largest piece.
    silence: seconds without any answer after which a stream is given up (a cut, a freeze, a power cut).
    handshake: round trips that connecting costs when no stream connects the two.
    dht_delay: seconds until a record can be read.
    boot_spread: seconds over which the hosts' monotonic clocks are spread; 0: ``now()`` is the loop's time.
    validator: (key, publisher, value) → whether the DHT stores it.
    offload_seconds: (function, args, kwargs) → virtual seconds that it takes.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        latency: float | Callable[[str, str], float] = 0.02,
        jitter: float = 0.0,
        loss: float = 0.0,
        upload: float = math.inf,
        download: float = math.inf,
        breaks_per_hour: float = 0.0,
        window: int = MIB,
        piece: int = 1 << 16,
        silence: float = 30.0,
        handshake: int = 2,
        dht_delay: float = 0.1,
        boot_spread: float = 0.0,
        validator: Validator | None = None,
        offload_seconds: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], float] | None = None,
        keep_trace: bool = False,
        loop: SimLoop | None = None,
    ) -> None:
        self.loop = SimLoop() if loop is None else loop
        self.seed = seed
        self.random = random.Random(f"{seed}/network")
        self.trace = Trace(self.loop, keep=keep_trace)
        self.hosts: dict[str, SimHost] = {}
        self.validator = validator
        self.offload_seconds = offload_seconds
        self.dht_delay = dht_delay
        self.records = _Store()
        self._latency = latency
        self._jitter = jitter
        self._loss = loss
        self._upload = upload
        self._download = download
        self._breaks_per_hour = breaks_per_hour
        self._window = max(window, piece)
        self._piece = piece
        self._silence = silence
        self._handshake = handshake
        self._boot_spread = boot_spread
        self._by_peer: dict[PeerId, SimHost] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._cuts: dict[Cut, None] = {}
        self._hooks: list[EventHook] = []
        self._reach: dict[str, frozenset[str]] = {}
        self._wires = 0

    # -- building and running

    def host(
        self,
        name: str,
        *,
        peer_id: PeerId | None = None,
        upload: float | None = None,
        download: float | None = None,
        reachable: bool = True,
        clock_offset: float = 0.0,
        program: Program | None = None,
    ) -> SimHost:
        """Add a host; its peer id is ``sim-NAME`` unless given."""
        if name in self.hosts:
            raise SimulationError(f"there is a host {name} already; find it in .hosts")
        peer = PeerId(f"sim-{name}") if peer_id is None else peer_id
        if peer in self._by_peer:
            raise SimulationError(f"peer id {peer} is taken by host {self._by_peer[peer].name}")
        host = SimHost(
            self,
            name,
            peer,
            self._upload if upload is None else upload,
            self._download if download is None else download,
            reachable,
            clock_offset,
            random.Random(f"{self.seed}/{name}/boot").uniform(0, self._boot_spread),
            program,
        )
        self.hosts[name] = self._by_peer[peer] = host
        self.changed()
        return host

    def run(self, main: Coroutine[Any, Any, T], *, limit: float | None = None) -> T:
        """Run ``main``, under no host, to its end and close the loop; see :func:`atoll.protocol.simloop.run`."""
        return run_loop(main, self.loop, limit=limit)

    # -- conditions

    def link(
        self,
        source: SimHost | str,
        target: SimHost | str,
        *,
        latency: float | None = None,
        jitter: float | None = None,
        loss: float | None = None,
        bandwidth: float | None = None,
        one_way: bool = False,
    ) -> None:
        """Set conditions between two hosts, in both directions unless ``one_way``."""
        a, b = _name(source), _name(target)
        for link in [self.link_between(a, b)] + ([] if one_way else [self.link_between(b, a)]):
            link.latency = link.latency if latency is None else latency
            link.jitter = link.jitter if jitter is None else jitter
            link.loss = link.loss if loss is None else loss
            link.bandwidth = link.bandwidth if bandwidth is None else bandwidth

    def cut(
        self,
        source: SimHost | str | Iterable[SimHost | str],
        target: SimHost | str | Iterable[SimHost | str],
        *,
        one_way: bool = False,
    ) -> Cut:
        """Nothing gets from ``source`` (one or several) to ``target``, nor back unless ``one_way``.

        What is under way stalls; it arrives after the cut is healed, if no end has given the stream up by then.
        """
        links = []
        for a in _names(source):
            for b in _names(target):
                if a != b:
                    links.append(self.link_between(a, b))
                    if not one_way:
                        links.append(self.link_between(b, a))
        cut = Cut(self, links)
        self._cuts[cut] = None
        self._apply_cuts()
        return cut

    def isolate(self, host: SimHost | str) -> Cut:
        """Cut a host off all others."""
        return self.cut(host, [name for name in self.hosts if name != _name(host)])

    def heal(self, source: SimHost | str | None = None, target: SimHost | str | None = None) -> None:
        """Take back every cut; with two hosts: what is cut between these, in both directions."""
        if source is None or target is None:
            self._cuts.clear()
        else:
            a, b = _name(source), _name(target)
            healed = (self.link_between(a, b), self.link_between(b, a))
            for cut in self._cuts:
                cut.links = [link for link in cut.links if link not in healed]
        self._apply_cuts()

    def heal_cut(self, cut: Cut) -> None:
        if self._cuts.pop(cut, self) is None:
            self._apply_cuts()

    def _apply_cuts(self) -> None:
        cut = {link for made in self._cuts for link in made.links}
        for (a, b), link in self._links.items():
            if link in cut and not link.cut:
                link.cut = True
                self.trace.add("cut", a, b)
            elif link not in cut and link.cut:
                self.trace.add("heal", a, b)
                link.heal()
        for host in self.hosts.values():
            for wire in list(host.transport.nic.wires.values()):
                wire.check_silence()
        self.changed()

    def latency_of(self, source: str, target: str) -> float:
        """Seconds one way between hosts whose link has no other."""
        return self._latency if isinstance(self._latency, float | int) else self._latency(source, target)

    def link_between(self, source: str, target: str) -> Link:
        """The way from one host to another."""
        link = self._links.get((source, target))
        if link is None:
            for name in (source, target):
                if name not in self.hosts:
                    raise SimulationError(f"there is no host {name}; add it by .host()")
            latency = self.latency_of(source, target)
            link = self._links[source, target] = Link(self.loop, self.random, latency, self._jitter, self._loss)
        return link

    # -- schedules and events

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Do ``action`` at the virtual second ``when``, under no host."""
        self.loop.kernel_at(when, action)

    def when(
        self,
        event: str,
        action: Callable[[SimHost], object],
        *,
        host: SimHost | str | None = None,
        where: Callable[[Mapping[str, Any]], bool] | None = None,
        count: int = 1,
        delay: float | None = None,
    ) -> None:
        """Do ``action(host)`` once, when ``event`` is reported for the ``count``-th time (by ``host``, if given).

        where: only events whose fields satisfy it count. delay: virtual seconds later; None: at once, within the
        code that reports.
        """
        left = count
        name = None if host is None else _name(host)

        def hook(reporter: SimHost, reported: str, fields: Mapping[str, Any]) -> None:
            nonlocal left
            if reported != event or left == 0 or name not in (None, reporter.name):
                return
            if where is not None and not where(fields):
                return
            left -= 1
            if left == 0:
                if delay is None:
                    action(reporter)
                else:
                    self.loop.kernel_at(self.loop.clock + delay, action, reporter)

        self._hooks.append(hook)

    def happened(self, host: SimHost, name: str, fields: Mapping[str, Any]) -> None:
        """See :meth:`SimHost.event`."""
        self.trace.add("event", host.name, name, _plain(fields))
        for hook in list(self._hooks):
            hook(host, name, fields)

    # -- for hosts and streams

    def changed(self) -> None:
        """Who reaches whom may have changed."""
        self._reach.clear()

    def left(self, host: SimHost) -> None:
        """A host has gone, and with it what it stored."""
        self.records.forget(host.name)
        self.changed()

    def store_record(self, key: str, peer: PeerId, record: _Record) -> None:
        record.holders = {name for name in record.holders if not self.hosts[name].dead}
        if record.holders:
            self.records.expire(key, EPOCH + self.loop.clock - 3600)
            self.records.put(key, peer, record)

    def reach(self, host: SimHost) -> frozenset[str]:
        """Names of the hosts that store records and that ``host`` can talk to, itself included."""
        found = self._reach.get(host.name)
        if found is None:
            found = self._reach[host.name] = frozenset(
                name
                for name, other in self.hosts.items()
                if other.reachable
                and other.running
                and not other.transport.closed
                and (
                    other is host
                    or not (self.link_between(host.name, name).cut or self.link_between(name, host.name).cut)
                )
            )
        return found

    def dial(self, dial: _Dial, peer: PeerId) -> None:
        """Carry an attempt to open a stream to where ``peer`` is."""
        caller = dial.transport
        target = self._by_peer.get(peer)
        if target is None:
            when = self.loop.clock + 2 * self.latency_of(caller.host.name, caller.host.name)
            self.loop.kernel_at(when, dial.tell, "nobody knows an address of it")
            return
        there = self.link_between(caller.host.name, target.name)
        back = self.link_between(target.name, caller.host.name)
        when = self.loop.clock + there.delay()
        if not caller.nic.connected(target.transport.nic):
            when += self._handshake * (there.delay() + back.delay())
        there.carry(when, lambda: self._dialled(dial, target))

    def _dialled(self, dial: _Dial, target: SimHost) -> None:
        behind_nat = not target.reachable and not dial.transport.nic.connected(target.transport.nic)
        if target.powered and not behind_nat:
            target.transport.accept(dial)

    def connect(self, near: SimTransport, far: SimTransport, protocol: str) -> Wire:
        """A stream between two transports, for both to use at once."""
        self._wires += 1
        wire = Wire(
            self._wires,
            protocol,
            near.nic,
            far.nic,
            self.link_between(near.host.name, far.host.name),
            self.link_between(far.host.name, near.host.name),
            window=self._window,
            piece=self._piece,
            timeout=self._silence,
            observe=self,
        )
        self.trace.add("stream", wire.serial, near.host.name, far.host.name, protocol)
        wire.check_silence()
        if self._breaks_per_hour:
            life = self.random.expovariate(self._breaks_per_hour / 3600)
            self.loop.kernel_at(self.loop.clock + life, wire.reset, "it broke")
        return wire

    def delivered(self, wire: Wire, source: SimStream, target: SimStream, frame: bytes) -> None:
        there, here, size = source.nic.host, target.nic.host, len(frame)
        there.bytes_sent += size
        here.bytes_received += size
        self.trace.frame(wire.serial, target is wire.near, there.name, here.name, frame)

    def broke(self, wire: Wire, end: SimStream, reason: str) -> None:
        self.trace.add("broke", wire.serial, end.nic.host.name, reason)


def _name(host: SimHost | str) -> str:
    return host if isinstance(host, str) else host.name


def _names(hosts: SimHost | str | Iterable[SimHost | str]) -> list[str]:
    return [_name(hosts)] if isinstance(hosts, str | SimHost) else [_name(host) for host in hosts]


def _plain(value: Any) -> Any:
    """``value`` with what prints differently from run to run replaced."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_plain(item)) for item in value)
    return type(value).__name__
