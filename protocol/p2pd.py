"""Start, watch and speak to one p2p daemon: the Go process that holds a peer's libp2p host.

hivemind starts the daemon in our process group, where Ctrl-C kills it before anybody could say goodbye, and leaves
it behind when we are killed. Here it gets a session of its own and dies with us (``PR_SET_PDEATHSIG``, on Linux),
and its unix sockets live in a private folder that goes with it.

Requests to it are messages of libp2p's daemon protocol on fresh connections to its control socket, each with a
deadline: a daemon that hangs or dies never hangs its peer.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import AddressError, PeerUnreachable, ResourceError, StreamClosed, TransportError
from .hivemind_import import P2PD, Multiaddr, p2pd_pb2
from .identity import base58_decode, base58_encode
from .pipes import Pipe
from .transport import PeerId

log = logging.getLogger(__name__)

_PREFIX = "atoll-p2p-"
_MAX_MESSAGE = 4 * 1024 * 1024
_START_TIMEOUT = 20.0
_REQUEST_TIMEOUT = 10.0
NOT_YET = "is not tried again yet"
"""Part of the reason when libp2p did not even try, because an attempt failed seconds or minutes before."""
_P2P_CODE = b"\xa5\x03"
"""421 as a varint: the multiaddress component ``/p2p/``."""

_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""PR_SET_PDEATHSIG in the child, then the daemon in its place. A process of its own costs 20 ms and, unlike
``preexec_fn``, forks neither our threads nor our page tables."""

Accept = Callable[[str, PeerId, Pipe], Awaitable[None]]
"""Called with (protocol, peer, pipe) for every stream that a peer opens."""


@dataclass(frozen=True)
class DaemonOptions:
    """What a daemon is started with. ``listen`` names real ports, none of them 0."""

    identity: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    client: bool = False
    """Ask libp2p's own peer routing, but do not serve it."""
    relays: tuple[str, ...] = ()
    """Relays (multiaddresses with ``/p2p/``) to be reachable through, for a peer behind NAT."""
    relay_service: bool = False
    """Relay between other peers."""
    extra: tuple[str, ...] = field(default=())

    def arguments(self, control: str) -> list[str]:
        flags: dict[str, object] = {
            "id": self.identity,
            "listen": f"/unix{control}",
            "hostAddrs": ",".join(self.listen),
            "natPortMap": 0,
            "autonat": int(self.relay_service),
            "relay": 1,
            "relayService": int(self.relay_service),
            "relayDiscovery": 0,
            "autoRelay": int(bool(self.relays)),
            "connManager": 1,
            "idleTimeout": "30s",
            # TLS alone: the daemon prefers Noise where it has both, which takes a third more of its CPU time.
            "tls": 1,
            "noise": 0,
            "b": 0,
            "persistentConnMaxMsgSize": _MAX_MESSAGE,
            ("dhtClient" if self.client else "dhtServer"): 1,
        }
        if self.announce:
            flags["announceAddrs"] = ",".join(self.announce)
        if self.relays:
            flags["trustedRelays"] = ",".join(self.relays)
            flags["forceReachabilityPrivate"] = 1
        if self.relay_service:
            flags["forceReachabilityPublic"] = 1
        return [f"-{name}={value}" for name, value in flags.items()] + list(self.extra)


class PrivateFolder:
    """A folder for a daemon's unix sockets that only we may enter, locked while we live."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        sweep(parent)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = os.open(self.path / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.rename(self.path / "new", self.path / "lock")
        except OSError as error:
            raise ResourceError(
                f"cannot make a folder for sockets in {parent}: {error.strerror}; "
                "free some space there, or set TMPDIR to a folder that can be written"
            ) from None
        if len(os.fsencode(self.socket("p2pclient-0123456789a"))) > 100:
            self.remove()
            raise ResourceError(f"the path {parent} is too long for unix sockets; set TMPDIR to a shorter one")

    def socket(self, name: str) -> str:
        return str(self.path / f"{name}.sock")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> list[Path]:
    """Remove our folders in ``parent`` whose owner is dead; returns those removed."""
    removed = []
    for folder in parent.glob(_PREFIX + "*"):
        try:
            state = folder.lstat()
            if state.st_uid != os.getuid() or folder.is_symlink():
                continue
            try:
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                if time.time() - state.st_mtime < 60:  # its owner has not locked it yet
                    continue
                lock = -1
            try:
                if lock >= 0:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
            finally:
                if lock >= 0:
                    os.close(lock)
        except OSError:
            continue  # in use, or not ours
    return removed


class _Watch(asyncio.SubprocessProtocol):
    """Follows what the process writes, and its end."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=20)
        self.ready = asyncio.Event()
        """It listens, or never will."""
        self.exited = asyncio.Event()
        self._rest = b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-4096:]
        for line in lines:
            text = line.decode(errors="replace").strip()
            if text:
                log.debug("p2pd: %s", text)
                self.lines.append(text[:300])
                if text.startswith("Peer ID:"):
                    self.ready.set()

    def process_exited(self) -> None:
        self.exited.set()
        self.ready.set()


class Daemon:
    """One running daemon. :meth:`start` it, :meth:`wait` for its death, :meth:`stop` it."""

    peer_id: PeerId
    addresses: list[str]
    """Where it can be reached, as of the last :meth:`identify`; without ``/p2p/``."""

    def __init__(
        self, process: asyncio.SubprocessTransport, watch: _Watch, folder: PrivateFolder, control: str
    ) -> None:
        self._process = process
        self._watch = watch
        self.control = control
        self._listen_path = folder.socket("streams")
        self._acceptor: asyncio.Task[None] | None = None
        self._arrivals: set[asyncio.Task[None]] = set()
        self.addresses = []

    @classmethod
    async def start(cls, options: DaemonOptions, folder: PrivateFolder) -> Daemon:
        """Start the daemon and wait until it listens.

        Raises ResourceError when it does not start, with what it said.
        """
        control = folder.socket("p2pd")
        _unlink(control)
        command = [str(P2PD), *options.arguments(control)]
        if _can_die_with_parent():
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        try:
            process, watch = await asyncio.get_running_loop().subprocess_exec(
                _Watch,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"GOLOG_LOG_LEVEL": "error", "GOLOG_LOG_FMT": "nocolor"},
            )
        except OSError as error:
            raise ResourceError(
                f"cannot start the p2p daemon {P2PD}: {error.strerror or error}; reinstall hivemind for this platform"
            ) from None
        daemon = cls(process, watch, folder, control)
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                await watch.ready.wait()
            await daemon.identify()
        except TimeoutError:
            await daemon.stop(0)
            raise ResourceError(
                f"the p2p daemon did not start within {_START_TIMEOUT:.0f} s; it said: {daemon.last_words()}"
            ) from None
        except TransportError:
            await daemon.stop(0)
            raise ResourceError(f"the p2p daemon ended while starting; it said: {daemon.last_words()}") from None
        except BaseException:
            await daemon.stop(0)
            raise
        return daemon

    @property
    def pid(self) -> int:
        return self._process.get_pid()

    def last_words(self) -> str:
        """The last lines it wrote, for an error message."""
        return " | ".join(self._watch.lines)[-1000:] or "nothing"

    async def wait(self) -> int:
        """Wait until the process is dead; its exit status."""
        await self._watch.exited.wait()
        return self._process.get_returncode() or 0

    async def stop(self, grace: float) -> None:
        """End the process: SIGTERM, SIGKILL after ``grace`` seconds. Idempotent."""
        if self._acceptor is not None:
            self._acceptor.cancel()
        for task in self._arrivals:
            task.cancel()
        if not self._watch.exited.is_set():
            if grace > 0:
                self._signal(signal.SIGTERM)
                try:
                    async with asyncio.timeout(grace):
                        await self._watch.exited.wait()
                except TimeoutError:
                    pass
            if not self._watch.exited.is_set():
                self.kill()
                await self._watch.exited.wait()
        self._process.close()
        await asyncio.gather(*self._arrivals, return_exceptions=True)
        if self._acceptor is not None:
            await asyncio.gather(self._acceptor, return_exceptions=True)
        _unlink(self.control)
        _unlink(self._listen_path)

    def kill(self) -> None:
        """End the process at once; whoever waits for it is told."""
        if not self._watch.exited.is_set():
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        try:
            os.kill(self.pid, number)  # Popen.send_signal would reap the process behind asyncio's back
        except ProcessLookupError:
            pass

    # Requests

    async def identify(self) -> None:
        """Refresh ``peer_id`` and ``addresses``."""
        answer = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), _REQUEST_TIMEOUT)
        self.peer_id = PeerId(base58_encode(answer.identify.id))
        self.addresses = [str(Multiaddr(address)) for address in answer.identify.addrs]

    async def connect(self, peer: PeerId, addresses: list[str], timeout: float) -> None:
        """Have a connection to ``peer``, dialled at ``addresses`` if there is none. Raises PeerUnreachable."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(
                peer=base58_decode(peer),
                addrs=[multiaddr_bytes(address) for address in addresses],
                timeout=max(1, int(timeout)),
            ),
        )
        await self._ask(request, timeout + 1, peer)

    async def disconnect(self, peer: PeerId) -> None:
        """Drop all connections to ``peer``."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.DISCONNECT, disconnect=p2pd_pb2.DisconnectRequest(peer=base58_decode(peer))
        )
        await self._ask(request, _REQUEST_TIMEOUT, peer)

    async def peers(self) -> list[PeerId]:
        """Those connected now."""
        answer = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), _REQUEST_TIMEOUT)
        return [PeerId(base58_encode(info.id)) for info in answer.peers]

    async def open(self, peer: PeerId, protocol: str, timeout: float) -> Pipe:
        """Open a stream; the pipe carries its bytes from here on. Raises PeerUnreachable."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(
                peer=base58_decode(peer), proto=[protocol], timeout=max(1, int(timeout))
            ),
        )
        _, pipe = await self._exchange(request, timeout + 1, peer)
        return pipe

    async def listen(self, accept: Accept) -> None:
        """Begin to take in streams for the protocols given to :meth:`register`."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _unlink(self._listen_path)
        listener.bind(self._listen_path)
        listener.listen(1024)
        listener.setblocking(False)
        self._acceptor = asyncio.create_task(self._accept(listener, accept))

    async def register(self, protocol: str) -> None:
        """From now on streams for ``protocol`` arrive here."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_HANDLER,
            streamHandler=p2pd_pb2.StreamHandlerRequest(
                addr=Multiaddr(f"/unix{self._listen_path}").to_bytes(), proto=[protocol], balanced=False
            ),
        )
        await self._ask(request, _REQUEST_TIMEOUT)

    async def _accept(self, listener: socket.socket, accept: Accept) -> None:
        with listener:
            while True:
                try:
                    # Not by the loop's sock_accept: a cancellation at the moment of success would lose the socket.
                    sock, _ = listener.accept()
                except BlockingIOError:
                    await _readable(listener)
                except OSError as error:  # out of descriptors, for one
                    log.warning("cannot take in a stream: %s", error)
                    await asyncio.sleep(0.5)
                else:
                    self._take_in(Pipe(sock), accept)

    def _take_in(self, pipe: Pipe, accept: Accept) -> None:
        task = asyncio.get_running_loop().create_task(self._introduce(pipe, accept))
        self._arrivals.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._arrivals.discard(task)
            if task.cancelled():  # perhaps before it began, and then nobody else closes it
                pipe.close()

        task.add_done_callback(ended)

    async def _introduce(self, pipe: Pipe, accept: Accept) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT):
                info = p2pd_pb2.StreamInfo.FromString(await _read_message(pipe))
        except (TimeoutError, StreamClosed):
            pipe.close()
            return
        except BaseException:
            pipe.close()
            raise
        await accept(info.proto, PeerId(base58_encode(info.peer)), pipe)

    async def _ask(self, request: Any, timeout: float, peer: PeerId | None = None) -> Any:
        answer, pipe = await self._exchange(request, timeout, peer)
        pipe.close()
        return answer

    async def _exchange(self, request: Any, timeout: float, peer: PeerId | None = None) -> tuple[Any, Pipe]:
        """Send one request on a connection of its own, read the answer, and hand over both."""
        try:
            async with asyncio.timeout(timeout):
                try:
                    pipe = await Pipe.connect(self.control)
                except OSError:
                    raise StreamClosed("the p2p daemon does not answer") from None
                try:
                    body = request.SerializeToString()
                    await pipe.write(memoryview(_varint(len(body)) + body))
                    answer = p2pd_pb2.Response.FromString(await _read_message(pipe))
                    if answer.type == p2pd_pb2.Response.ERROR:
                        raise PeerUnreachable(explain(answer.error.msg, peer))
                except BaseException:
                    pipe.close()
                    raise
                return answer, pipe
        except TimeoutError:
            raise PeerUnreachable(f"{peer or 'the p2p daemon'}: no answer within {timeout:.0f} s") from None


def explain(message: str, peer: PeerId | None) -> str:
    """What libp2p says, in a line a user can act on."""
    who = peer or "the p2p daemon"
    mismatch = re.search(r"peer id mismatch: expected (\w+), but remote key matches (\w+)", message)
    if mismatch:
        return (
            f"another peer id answers: {mismatch[2]}, not {mismatch[1]} as the address says. What runs there has "
            "another identity: ask for the newest address"
        )
    dialled = sorted(set(re.findall(r"\[(/(?:ip|dns)[^\]\s]+)\]", message)))
    where = f" at {', '.join(dialled[:4])}" if dialled else ""
    known = [
        ("protocols not supported", "it does not serve this run's protocol: another run, or another version"),
        ("protocol not supported", "it does not serve this run's protocol: another run, or another version"),
        ("connection refused", "refused: nobody listens there"),
        ("connection reset", "the connection was cut"),
        ("no such host", "the host name is unknown"),
        ("no route to host", "no route to the host"),
        ("network is unreachable", "the network is unreachable"),
        ("no good addresses", "none of its addresses can be used (an unknown host name?)"),
        ("dial to self", "that is this peer itself"),
        ("no addresses", "no address of it is known"),
        ("not found", "no address of it is known"),
        ("failed to find any peer", "no address of it is known"),
        (
            "failed to negotiate security protocol",
            "no handshake: both dialled at one moment, or what is there is no peer",
        ),
        ("dial backoff", f"it could not be dialled a moment ago, and {NOT_YET}"),
        ("deadline exceeded", "no answer in time"),
        ("i/o timeout", "no answer in time"),
    ]
    for needle, meaning in known:
        if needle in message:
            return f"{who}{where}: {meaning}"
    return f"{who}: {' '.join(message.split())[:300]}"


def multiaddr_bytes(address: str) -> bytes:
    """The binary form of a multiaddress (hivemind writes Ed25519 ids in a form that the daemon cannot read)."""
    try:
        data = b""
        pieces = re.split(r"/p2p/([^/]+)", address)
        for index, piece in enumerate(pieces):
            if index % 2:
                peer = base58_decode(piece)
                data += _P2P_CODE + _varint(len(peer)) + peer
            elif piece:
                data += Multiaddr(piece).to_bytes()
        if not data:
            raise ValueError("it is empty")
        return data
    except Exception as error:
        raise AddressError(f"{address!r} is not a multiaddress such as /ip4/192.0.2.1/tcp/4001: {error}") from None


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


async def _read_message(pipe: Pipe) -> bytes:
    size = shift = 0
    while True:
        byte = (await pipe.read_exactly(1))[0]
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
        if shift > 28:
            raise StreamClosed("the p2p daemon sent what is no message")
    if size > _MAX_MESSAGE:
        raise StreamClosed(f"the p2p daemon sent a message of {size} bytes")
    return bytes(await pipe.read_exactly(size))


def _can_die_with_parent() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return hasattr(ctypes.CDLL(None), "prctl")
    except OSError:
        return False


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


async def _readable(sock: socket.socket) -> None:
    """Wait until something can be read, or accepted."""
    loop, number = asyncio.get_running_loop(), sock.fileno()
    ready = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(number, tell)
    try:
        await ready
    finally:
        loop.remove_reader(number)
