"""The transport over libp2p: streams through a p2p daemon of our own, records in hivemind's DHT.

Importing this module imports hivemind and torch (2 to 3 s): import it where it is used.

What is promised: the daemon may die at any moment and comes back within a second with the same identity and port;
streams in flight raise :class:`StreamClosed`, handlers and the DHT go on. Seeds are dialled for ever, so a swarm
that loses all of them goes on, and merges again when one returns. Opening a stream to a peer whose process stands
still may succeed (its daemon answers for it): only what is received proves life.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .address import Multiaddr
from .errors import (
    AddressError,
    AtollError,
    NetworkDown,
    NetworkError,
    PeerUnreachable,
    ResourceError,
    StreamClosed,
    TransportError,
)
from .frames import FrameStream
from .hivemind_dht import Gate, HivemindDht, Validate, ValidatorObject
from .hivemind_import import P2P
from .hivemind_import import Multiaddr as HivemindMultiaddr
from .identity import load_or_create_identity
from .p2pd import NOT_YET, Daemon, DaemonOptions, PrivateFolder
from .pipes import Pipe
from .ports import reserve
from .quota import StreamQuota
from .records import BUCKETS, dht_key
from .transport import P, PeerId, R, Standing, Stream, Transport
from .which import NOT_SERVED, STREAMS, WHICH, ask_which, which_handler

log = logging.getLogger(__name__)

DEFAULT_LISTEN = ("/ip4/127.0.0.1/tcp/0",)
JOIN_TIMEOUT = 30.0
"""Seconds that :meth:`HivemindTransport.create` waits for a seed when one is required."""

_SEED_EVERY = 10.0
"""Seconds between two greetings of a seed that answers."""
_SEED_RETRY = (0.5, 10.0)
"""Seconds until the next try at one that does not: at first, at most."""
_CHECK_EVERY = 30.0
"""Seconds between two looks at the daemon's addresses, and whether it answers at all."""
_EXPLORE_AT = (1.0, 5.0, 15.0)
_EXPLORE_EVERY = 60.0
_RESTART_DELAYS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
_DIAL_TIMEOUT = 8.0
_GIVE_WAY = 0.3
"""Seconds for which one of two peers leaves it to the other to dial; more than a packet takes between any two."""
_MAX_BOOK = 4096
_CLOSE_STREAMS = 1.5
_CLOSE_DAEMON = 1.5
_WHICH_TIMEOUT = 3.0

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


@dataclass
class _Seed:
    peer: PeerId
    addresses: list[str]
    """Without the ``/p2p/`` part."""
    reason: str | None = ""
    """Why it was not reached; None when it was."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class HivemindTransport(Transport):
    """One peer on libp2p. Made by :meth:`create`; several may live in one process."""

    bytes_sent: int
    """Stream payload bytes over all streams so far."""
    bytes_received: int

    def __init__(
        self,
        *,
        peer_id: PeerId,
        identity_path: Path,
        folder: PrivateFolder,
        run_id: bytes,
        seeds: list[str],
        validator: Validate | ValidatorObject | Gate,
        keys: Iterable[str] | None,
        listen: list[str] | None,
        announce: list[str] | None,
        client_mode: bool,
        seed: int | None,
        threads: int,
        relays: list[str] | None,
        relay_service: bool,
    ) -> None:
        """Use :meth:`create`, which starts what is only described here."""
        self.peer_id = peer_id
        self.random = random.Random(seed)
        self.bytes_sent = self.bytes_received = 0
        self._identity_path = identity_path
        self._folder = folder
        self._run = run_id.hex()[:16]
        self._listen = list(DEFAULT_LISTEN if listen is None else listen)
        self._announce = tuple(_without_peer(address) for address in announce or ())
        self._relays = tuple(str(Multiaddr.parse(address)) for address in relays or ())
        self._relay_service = relay_service
        self._client = client_mode
        self._seeds = _parse_seeds(seeds, self.peer_id)
        self._jitter = random.Random()
        self._pool = ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="atoll-offload")
        self._handlers: dict[str, Callable[[Stream], Awaitable[None]]] = {WHICH: which_handler(self._run)}
        self._handling: set[asyncio.Task[None]] = set()
        self._quota = StreamQuota()
        self._streams: dict[FrameStream, asyncio.Task[None] | None] = {}
        self._book: OrderedDict[PeerId, list[str]] = OrderedDict()
        self._up = asyncio.Event()
        self._daemon: Daemon | None = None
        self._p2p: Any = None
        self._addresses: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        if keys is None:
            keys = [dht_key(run_id, bucket) for bucket in range(BUCKETS)]
        self._corrected = 0.0
        self.dht = self._dht = HivemindDht(run_id, self.peer_id, keys=keys, validator=validator, client=client_mode)

    @classmethod
    async def create(
        cls,
        *,
        identity_path: Path,
        run_id: bytes,
        seeds: list[str],
        validator: Validate | ValidatorObject | Gate,
        listen: list[str] | None = None,
        announce: list[str] | None = None,
        client_mode: bool = False,
        seed: int | None = None,
        threads: int = 2,
        require_seed: bool = False,
        keys: Iterable[str] | None = None,
        relays: list[str] | None = None,
        relay_service: bool = False,
    ) -> HivemindTransport:
        """Start the daemon, listen, and begin to look for the run.

        identity_path: file of the libp2p Ed25519 key; made when there is none.
        run_id: 32 bytes; peers of other runs are neither heard nor found.
        listen: multiaddresses to listen on, port 0 for any; ``/ip4/127.0.0.1/tcp/0`` when None.
        announce: multiaddresses to give to others instead of those found out.
        seeds: multiaddresses with ``/p2p/`` of well-known peers of the run; dialled and greeted for ever.
        validator: decides which DHT entries are kept: a :class:`~atoll.protocol.records.RecordGate`, an object with
            hivemind's ``validate(record)``, or a function of (SHA-1 of the key, peer, value, expiry in unix seconds).
        client_mode: this peer cannot be reached from outside: it asks the DHT but holds no part of it.
        seed: of :attr:`random`.
        threads: size of the pool of :meth:`offload`.
        require_seed: wait until a seed has answered, see :meth:`wait_joined`.
        keys: the DHT keys of the run; those of its peer records when None.
        relays: relays to be reachable through, for a peer behind NAT. relay_service: be one.

        Raises:
            AddressError: an address is malformed.
            NetworkError: no seed answered although one is required.
            StateError: the identity file cannot be used.
            ResourceError: a port is taken, or the daemon cannot be started.
        """
        identity_path = Path(identity_path)
        signer = await asyncio.to_thread(load_or_create_identity, identity_path)
        folder = await asyncio.to_thread(PrivateFolder)
        try:
            self = cls(
                peer_id=signer.peer_id,
                identity_path=identity_path,
                folder=folder,
                run_id=run_id,
                seeds=seeds,
                validator=validator,
                keys=keys,
                listen=listen,
                announce=announce,
                client_mode=client_mode,
                seed=seed,
                threads=threads,
                relays=relays,
                relay_service=relay_service,
            )
        except BaseException:
            folder.remove()
            raise
        try:
            await self._start()
            if self._daemon_now().peer_id != self.peer_id:
                raise ResourceError(
                    f"the p2p daemon runs as {self._daemon_now().peer_id}, but {identity_path} is {self.peer_id}; "
                    "is the file being changed by somebody?"
                )
            self._spawn(self._supervise(), "supervise")
            self._spawn(self._look_after(), "look after")
            self._spawn(self._explore(), "explore")
            for item in self._seeds:
                self._spawn(self._keep(item), f"seed {item.peer}")
            if require_seed:
                await self.wait_joined(JOIN_TIMEOUT)
        except BaseException:
            await self.close()
            raise
        return self

    # The interface

    def nonce(self) -> bytes:
        return secrets.token_bytes(16)

    def now(self) -> float:
        return time.clock_gettime(_CLOCK)

    def wall(self) -> float:
        return time.time() + self._corrected

    def correct(self, seconds: float) -> None:
        self._corrected = seconds
        self._dht.correct(seconds)

    def contacts(self) -> list[PeerId]:
        return self.neighbours()

    async def open(self, peer: PeerId, protocol: str, *, timeout: float) -> Stream:
        name = self._protocol(protocol)
        try:
            async with asyncio.timeout(timeout):
                await self._up.wait()
                daemon = self._daemon_now()
                addresses = self._book.get(peer)
                if addresses:
                    await self._dial(daemon, peer, addresses, timeout)
                return self._stream(await daemon.open(peer, name, timeout), peer)
        except TimeoutError:
            if not self._up.is_set():
                raise NetworkDown(f"the own p2p daemon has not been back within {timeout:g} s") from None
            raise PeerUnreachable(f"{peer}: no answer within {timeout:g} s for {protocol!r}") from None
        except (PeerUnreachable, NetworkDown):
            raise
        except StreamClosed as error:
            # The daemon's socket, not the peer's stream: it has just died.
            raise NetworkDown(f"the own p2p daemon is gone: {error}") from None
        except (TransportError, ValueError) as error:
            raise PeerUnreachable(f"{peer}: {error}") from None

    async def _dial(self, daemon: Daemon, peer: PeerId, addresses: list[str], timeout: float) -> None:
        """Have a connection to ``peer``; of two that dial each other, the one with the larger id gives way.

        libp2p dials from the port it listens on, so that two SYNs that cross make one connection of which either side
        takes itself for the client. Both handshakes fail then, and both daemons try no more for 5 s, to fail again in
        the same way: members of a roster, who all begin at once, would never meet. Raises PeerUnreachable.
        """
        if self.peer_id > peer and not self._client and not all(_is_near(address) for address in addresses):
            for _ in range(10):
                if peer in await daemon.peers():
                    break
                await asyncio.sleep(_GIVE_WAY / 10)
        await daemon.connect(peer, addresses, timeout)

    async def serve(self, protocol: str, handler: Callable[[Stream], Awaitable[None]]) -> None:
        name = self._protocol(protocol)
        self._handlers[name] = handler
        if self._up.is_set():
            try:
                await self._daemon_now().register(name)
            except TransportError:
                pass  # the daemon has just died: the next one is told

    def guard(self, standing: Callable[[PeerId], Standing]) -> None:
        self._quota.standing = standing

    async def offload(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, functools.partial(function, *args, **kwargs))

    def use_threads(self, count: int) -> None:
        """Another size of the pool of :meth:`offload`; what is being done there is finished."""
        before, self._pool = self._pool, ThreadPoolExecutor(max(1, count), thread_name_prefix="atoll-offload")
        before.shutdown(wait=False)

    def addresses(self) -> list[str]:
        return list(self._addresses)

    def learn(self, peer: PeerId, addresses: list[str]) -> None:
        if peer == self.peer_id:
            return
        good = []
        for address in addresses[:16]:
            try:
                good.append(_without_peer(address))
            except AddressError as error:
                log.debug("an address of %s is of no use: %s", peer, error)
        if good:
            self._book[peer] = good
            self._book.move_to_end(peer)
            if len(self._book) > _MAX_BOOK:
                self._book.popitem(last=False)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    # More than the interface

    async def wait_joined(self, timeout: float) -> None:
        """Wait until another peer of the run is known. At once when there are no seeds.

        Raises NetworkError after ``timeout`` seconds, saying for every seed what stood in the way.
        """
        if not self._seeds:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._dht.joined.wait()
        except TimeoutError:
            reasons = list(self.seed_status().values())
            # Where somebody else answers, the reason itself says what to do.
            known = all(" answers: " in reason for reason in reasons)
            check = "that the address is the newest one, that the peer there runs, and that no firewall is in between"
            advice = "" if known else f". Check {check}"
            raise NetworkError(
                f"no peer of the run could be reached within {timeout:g} s: {'; '.join(reasons)}{advice}"
            ) from None

    def seed_status(self) -> dict[PeerId, str]:
        """For every seed: ``"reached"``, or its addresses and why not."""
        return {item.peer: "reached" for item in self._seeds} | self.unreached()

    def unreached(self) -> dict[PeerId, str]:
        """For every seed that has not answered: its addresses, and why not."""
        return {
            item.peer: item.reason or f"{', '.join(item.addresses)}: no answer yet"
            for item in self._seeds
            if item.reason is not None
        }

    @property
    def joined(self) -> bool:
        """Whether another peer of the run is known now."""
        return self._dht.joined.is_set()

    def neighbours(self) -> list[PeerId]:
        """Peers of the run that the DHT node knows now."""
        return self._dht.neighbours()

    @property
    def daemon_pid(self) -> int | None:
        """Process id of the p2p daemon; None while it restarts."""
        return None if self._daemon is None else self._daemon.pid

    # The daemon

    def _daemon_now(self) -> Daemon:
        if self._daemon is None:
            raise NetworkDown("the own p2p daemon is restarting")
        return self._daemon

    async def _start(self) -> None:
        """Start a daemon, and attach all that goes through it. Raises AtollError, leaving nothing behind."""
        with reserve(self._listen) as reserved:
            options = DaemonOptions(
                identity=self._identity_path,
                listen=tuple(reserved.addresses),
                announce=self._announce,
                client=self._client,
                relays=self._relays,
                relay_service=self._relay_service,
            )
            daemon = await Daemon.start(options, self._folder)
            self._listen = reserved.addresses  # the next daemon gets the same ports
        p2p: Any = None
        try:
            async with asyncio.timeout(15):
                await daemon.listen(self._arrived)
                for name in self._handlers:
                    await daemon.register(name)
                kind: Any = type("FolderP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{self._folder.path}/"})
                p2p = await kind.replicate(HivemindMultiaddr(f"/unix{daemon.control}"))
                await self._dht.attach(p2p)
        except (TimeoutError, OSError, TransportError, asyncio.IncompleteReadError) as error:
            await self._drop(daemon, p2p)
            raise ResourceError(
                f"the p2p daemon stopped answering while starting ({error!r}); it said: {daemon.last_words()}"
            ) from None
        except BaseException:
            await self._drop(daemon, p2p)
            raise
        control = p2p._client.control
        for task in (control._read_task, control._write_task):
            task.add_done_callback(functools.partial(self._rpc_ended, daemon))
        self._daemon, self._p2p = daemon, p2p
        self._note_addresses(daemon.addresses)
        self._up.set()
        for item in self._seeds:
            item.wake.set()

    def _rpc_ended(self, daemon: Daemon, task: asyncio.Task[None]) -> None:
        """hivemind's connection to the daemon is gone: with the daemon, as a rule."""
        error = None if task.cancelled() else task.exception()
        if not task.cancelled() and self._daemon is daemon:
            log.debug("the connection to the p2p daemon ended: %r", error)
            daemon.kill()  # and all begins anew, see _supervise

    async def _drop(self, daemon: Daemon | None, p2p: Any, grace: float = 0.0) -> None:
        """Let go of a daemon, alive or dead, without asking hivemind, which would wait for answers."""
        self._dht.detach()
        if p2p is not None:
            p2p._terminate()
        if daemon is not None:
            await daemon.stop(grace)

    async def _supervise(self) -> None:
        while True:
            daemon, p2p = self._daemon_now(), self._p2p
            status = await daemon.wait()
            log.warning("the p2p daemon ended with status %d and is started again; it said: %s",
                        status, daemon.last_words())  # fmt: skip
            self._up.clear()
            self._daemon = self._p2p = None
            await self._drop(daemon, p2p)
            tries = 0
            while self._daemon is None:
                await asyncio.sleep(_RESTART_DELAYS[min(tries, len(_RESTART_DELAYS) - 1)])
                tries += 1
                try:
                    await self._start()
                except AtollError as error:
                    log.warning("the p2p daemon cannot be started again, the next try follows: %s", error)
            await self._call_friends()

    async def _look_after(self) -> None:
        """Note changed addresses; end a daemon that does not answer three times in a row."""
        silent = 0
        while True:
            await asyncio.sleep(_CHECK_EVERY)
            daemon = self._daemon
            if daemon is None:
                silent = 0
                continue
            try:
                await daemon.identify()
            except TransportError:
                silent += 1
                if silent >= 3 and self._daemon is daemon:
                    log.warning("the p2p daemon does not answer and is ended")
                    daemon.kill()
                    silent = 0
            else:
                silent = 0
                self._note_addresses(daemon.addresses)

    def _note_addresses(self, found: list[str]) -> None:
        found = list(dict.fromkeys(self._announce or found))
        away = [address for address in found if not _is_near(address)]
        self._addresses = away or found  # nobody elsewhere can use a loopback address

    # Finding the run

    async def _keep(self, item: _Seed) -> None:
        """Greet a seed for ever."""
        delay = _SEED_RETRY[0]
        while True:
            await self._up.wait()
            item.wake.clear()
            before, reason = item.reason, await self._greet(item)
            if reason is None or NOT_YET not in reason or not before:
                item.reason = reason  # else the one before says more
            if item.reason is None:
                if before is not None:
                    log.info("reached the seed %s", item.peer)
                    await self._dht.explore()
                delay = _SEED_RETRY[0]
                pause = _SEED_EVERY
            else:
                if before != item.reason:
                    log.info("the seed %s is not reached: %s", item.peer, item.reason)
                pause = delay
                delay = min(2 * delay, _SEED_RETRY[1])
            try:
                async with asyncio.timeout(pause * self._jitter.uniform(0.8, 1.2)):
                    await item.wake.wait()
            except TimeoutError:
                pass

    async def _greet(self, item: _Seed) -> str | None:
        """One attempt; None, or why it did not work."""
        try:
            if item.reason is None:
                if await self._dht.ping(item.peer) is None:
                    return None
                # libp2p may take a dead connection for a live one for minutes: begin anew
                await self._daemon_now().disconnect(item.peer)
            problem = await _try_ports(item.addresses)
            if problem is not None:
                return problem
            await self._dial(self._daemon_now(), item.peer, item.addresses, _DIAL_TIMEOUT)
            reason = await self._dht.ping(item.peer)
            if reason == NOT_SERVED:
                reason = await self._what_it_serves(item.peer)
        except TransportError as error:
            reason = str(error)
        return reason and f"{', '.join(item.addresses)}: {reason}"

    async def _what_it_serves(self, peer: PeerId) -> str:
        """Why a peer that answers does not serve this run, as far as it says so itself."""
        try:
            async with asyncio.timeout(_WHICH_TIMEOUT):
                pipe = await self._daemon_now().open(peer, WHICH, _WHICH_TIMEOUT)
                return await ask_which(self._stream(pipe, peer), self._run)
        except (TransportError, TimeoutError):
            return NOT_SERVED

    async def _explore(self) -> None:
        for wait in _EXPLORE_AT:
            await asyncio.sleep(wait * self._jitter.uniform(0.8, 1.2))
            await self._dht.explore()
        while True:
            await asyncio.sleep(_EXPLORE_EVERY * self._jitter.uniform(0.8, 1.2))
            if not self._dht.neighbours():
                await self._call_friends()
            await self._dht.explore()

    async def _call_friends(self) -> None:
        """Greet some peers whose addresses are known: the seeds may all be gone."""
        for peer in list(self._book)[-8:]:
            try:
                await self._dial(self._daemon_now(), peer, self._book[peer], _DIAL_TIMEOUT)
                await self._dht.ping(peer)
            except (TransportError, KeyError):
                continue

    # Streams

    def _protocol(self, protocol: str) -> str:
        return f"/atoll/{STREAMS}/{self._run}/{protocol}"

    def _stream(self, pipe: Pipe, peer: PeerId) -> FrameStream:
        stream = FrameStream(pipe, peer, clock=self.now, on_moved=self._moved, on_closed=self._finishing)
        self._streams[stream] = None
        return stream

    def _moved(self, sent: int, received: int) -> None:
        self.bytes_sent += sent
        self.bytes_received += received

    def _finishing(self, stream: FrameStream, task: asyncio.Task[None]) -> None:
        self._streams[stream] = task
        task.add_done_callback(lambda _: self._streams.pop(stream, None))

    async def _arrived(self, name: str, peer: PeerId, pipe: Pipe) -> None:
        handler = self._handlers.get(name)
        if handler is None or self._closing is not None or not self._quota.take(peer):
            log.debug("a stream of %s for %s was turned away", peer, name)
            pipe.close()
            return
        task = asyncio.create_task(self._handle(self._stream(pipe, peer), name, handler))
        self._handling.add(task)
        task.add_done_callback(self._handling.discard)

    async def _handle(self, stream: FrameStream, name: str, handler: Callable[[Stream], Awaitable[None]]) -> None:
        try:
            await handler(stream)
        except TransportError as error:
            log.info("a stream of %s for %s ended (%s): %s", stream.peer, name, error.fault.value, error)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"defect in the handler of {name}, called by {stream.peer}", "exception": error}
            )
        finally:
            await stream.close()
            # Its place is free when it has ended, or who never ends streams could leave any number behind.
            ending = self._streams.get(stream)
            if ending is None:
                self._quota.give(stream.peer)
            else:
                ending.add_done_callback(lambda _: self._quota.give(stream.peer))

    # The end

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=f"atoll transport: {name}")
        task.add_done_callback(_report)
        self._tasks.append(task)

    async def _close(self) -> None:
        """At most 5 s: streams hand over what was sent, handlers end, then the daemon."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for task in list(self._handling):
            task.cancel()
        if self._handling:
            await asyncio.wait(list(self._handling), timeout=1.0)
        for stream in list(self._streams):
            await stream.close()
        finishing = [task for task in self._streams.values() if task is not None]
        if finishing:
            await asyncio.wait(finishing, timeout=_CLOSE_STREAMS)
        for stream in list(self._streams):
            stream.abort()
        daemon, p2p = self._daemon, self._p2p
        self._daemon = self._p2p = None
        self._up.clear()
        await self._drop(daemon, p2p, _CLOSE_DAEMON)
        if finishing:
            await asyncio.wait(finishing, timeout=0.5)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._folder.remove()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": f"defect in {task.get_name()}", "exception": error})


def _is_near(address: str) -> bool:
    """Whether packets to an address take no time in which others could cross them."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def _without_peer(address: str) -> str:
    return str(Multiaddr.parse(address).at(None))


def _parse_seeds(seeds: list[str], own: PeerId) -> list[_Seed]:
    found: dict[PeerId, _Seed] = {}
    for text in seeds:
        parsed = Multiaddr.parse(text)
        if parsed.peer is None:
            raise AddressError(
                f"seed {text!r}: expected the peer's id at its end (…/p2p/12D3KooW…); "
                "without it another machine could answer"
            )
        if parsed.peer != own:
            found.setdefault(parsed.peer, _Seed(parsed.peer, [])).addresses.append(str(parsed.at(None)))
    return list(found.values())


async def _try_ports(addresses: list[str]) -> str | None:
    """Whether any of the addresses takes a TCP connection; None, or what stands in the way.

    libp2p answers "dial backoff" for up to five minutes to whoever dials a dead address again and again; so it is
    only asked to dial when somebody listens there.
    """
    problems = []
    for address in addresses:
        parsed = Multiaddr.parse(address)
        if parsed.transport[0] != "tcp" or parsed.relay is not None:
            return None
        family = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT):
                _, writer = await asyncio.open_connection(
                    parsed.name, parsed.port, family=family.get(parsed.host, socket.AF_UNSPEC)
                )
            writer.close()
            return None
        except TimeoutError:
            problems.append(f"{address}: no answer within {_DIAL_TIMEOUT:g} s")
        except ConnectionRefusedError:
            problems.append(f"{address}: connection refused, nobody listens there")
        except socket.gaierror:
            problems.append(f"{address}: the host name is unknown")
        except OSError as error:
            problems.append(f"{address}: {(error.strerror or str(error)).lower()}")
    return "; ".join(problems)
