"""How a peer serves the run to others: heads, log, checkpoints and averaged chunks. docs/wire/sync.md is the format.

A client (:mod:`atoll.protocol.fetch`) opens a stream for :data:`PROTOCOL` and sends requests; the donor answers each
with one frame, in order. The client may have several requests outstanding. A donor caps what it gives, in streams and
in bytes per second, and gives a quarter of that while its own round is in flight, so that joiners never starve a
round; while an answer has to wait it sends :class:`Wait`, so that being slow on purpose does not look like death.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar

import msgspec

from .anchor import SealedAnchor
from .commitlog import LogEntry
from .errors import (
    Fault,
    PeerMisbehaved,
    PeerSlow,
    ResourceError,
    StateError,
    StreamClosed,
    TransportError,
    WrongRun,
)
from .lineage import Lineage
from .manifest import MAX_MANIFEST, Manifest
from .messages import Digest, Head, Natural, decode, encode
from .transport import PeerId, Stream, Transport

PROTOCOL = "sync/1"
MANIFEST_PROTOCOL = "manifest/1"
REQUEST_LIMIT = 1024
"""Bytes of the largest request."""
PAGE_COMMITS = 256
"""Commits in one answer, at most."""
PAGE_BYTES = 1 << 20
"""An answer with commits ends with the one that passes this size."""
ENVELOPE = 64
"""Bytes that a response adds to the data it carries, at most."""
MAX_HELD = 64
"""Checkpoints that one peer may say it holds."""
SLOWEST = 32e3
"""Bytes per second below which a donor is given up."""

T = TypeVar("T")


class GetHeads(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="heads?"):
    """What do you have? Answered by :class:`Heads`."""


class GetChain(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="chain?"):
    """The commits from height ``first`` (or as low as the log reaches) up to ``head``. Answered by :class:`Chain`."""

    head: Digest
    first: Natural


class GetHashes(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="hashes?"):
    """The hashes of all blobs of a checkpoint, 32 bytes each, as one :class:`Data`."""

    checkpoint: Digest


class GetBlob(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="blob?"):
    """One blob of a checkpoint, as :class:`Data`."""

    checkpoint: Digest
    index: Natural


class GetChunk(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="chunk?"):
    """An averaged chunk by its hash, as :class:`Data`."""

    hash: Digest


class GetLineage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="lineage?"):
    """The bodies of a commit and of those before it, down to height ``above`` + 1. Answered by :class:`Bodies`."""

    commit: Digest
    above: Natural


class GetManifest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="manifest?"):
    """The run's signed manifest as TOML, as :class:`Data`. Only under :data:`MANIFEST_PROTOCOL`."""


Request = GetHeads | GetChain | GetHashes | GetBlob | GetChunk | GetLineage


class Heads(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="heads"):
    best: Head
    """The best head whose state can be had from this donor."""
    checkpoints: Annotated[list[Head], msgspec.Meta(max_length=MAX_HELD)]
    """The commits whose checkpoints it holds."""
    anchor: SealedAnchor
    """The organiser's newest anchor that it knows; empty: none."""
    anchored: bool
    """Whether that anchor is behind :attr:`best`."""


class Bodies(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="lineage"):
    bodies: Annotated[list[bytes], msgspec.Meta(max_length=PAGE_COMMITS)]
    """Encoded bodies, each the parent of the one before. When the last is not low enough, ask again from its parent."""


class Chain(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="chain"):
    commits: Annotated[list[bytes], msgspec.Meta(max_length=PAGE_COMMITS)]
    """Encoded commits, by height, without a gap. When the last is not the head, ask again from the next height."""


class Data(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="data"):
    data: bytes


class Missing(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="missing"):
    """What was asked for is not here (any more)."""


class Wait(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="wait"):
    """A sign of life: the answer is still to come."""


class Refused(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="refused"):
    """No answer, and the stream ends: the donor is busy, or does not admit the client."""

    reason: Annotated[str, msgspec.Meta(max_length=200)]
    retry: bool
    """Whether it makes sense to ask again a little later."""


Response = Heads | Chain | Bodies | Data | Missing | Wait | Refused


class Source(Protocol):
    """What a donor gives from; :class:`~atoll.protocol.store.Store` is one. Called off the event loop."""

    def best(self) -> Head: ...
    def checkpoint_heads(self) -> list[Head]: ...
    def chain(self, head_id: bytes, first: int) -> Sequence[LogEntry]: ...
    def bodies(self, commit_id: bytes, above: int) -> Iterable[bytes]: ...
    @property
    def lineage(self) -> Lineage: ...
    def commit_bytes(self, commit_id: bytes) -> bytes | None: ...
    def checkpoint_hashes(self, commit_id: bytes) -> bytes | None: ...
    def checkpoint_blob(self, commit_id: bytes, index: int) -> bytes | None: ...
    def chunk(self, chunk_hash: bytes) -> bytes | None: ...


@dataclass(frozen=True)
class Limits:
    """What a donor gives at most."""

    rate: float = 32e6
    """Bytes per second over all clients; 0: as fast as they take it."""
    burst: float = 8e6
    """Bytes that may go at once after a pause."""
    busy_share: float = 0.25
    """The part of ``rate`` that is given while a round is in flight."""
    streams: int = 16
    """Places for whoever is in no round with this peer; those who are have their own."""
    streams_per_peer: int = 2
    streams_of_a_member: int = 4
    spare: float = 15.0
    """Seconds without a request after which a stream loses its place to one that finds none."""
    idle: float = 60.0
    """Seconds after which a stream without a request ends."""
    sign_of_life: float = 1.0
    """Seconds after which a delayed answer is announced, again and again."""
    slowest: float = 16e3
    """Bytes per second below which a client is too slow to be served: it would hold a place for ever."""
    request_cost: float = 2048.0
    """Bytes that a request counts besides its answer, so that floods of small ones are limited too."""
    hold: float = 120.0
    """Seconds that a checkpoint stays in use after a request for a part of it."""


class Donor:
    """Serves one run to whoever the access rule admits.

    source: what is on disk. recent: averaged chunks that are not there yet, by hash (looked at first; must not block).
    busy: whether a round is in flight. member: whether a peer is in it; its places are its own, and a chunk of the
    round goes to it at once, so that no joiner delays the round.
    refused: told who was refused and why. warn: told of errors of this machine's own.
    """

    def __init__(
        self,
        transport: Transport,
        source: Source,
        *,
        limits: Limits | None = None,
        admits: Callable[[PeerId], bool] = lambda peer: True,
        busy: Callable[[], bool] = lambda: False,
        recent: Callable[[bytes], bytes | None] = lambda chunk_hash: None,
        member: Callable[[PeerId], bool] = lambda peer: False,
        refused: Callable[[PeerId, str], None] = lambda peer, reason: None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._transport = transport
        self._source = source
        self._limits = limits or Limits()
        self._admits = admits
        self._busy = busy
        self._recent = recent
        self._member = member
        self._refused = refused
        self._warn = warn
        self._clients: dict[_Client, None] = {}
        self._given: dict[tuple[PeerId, bytes], None] = {}
        """Chunks of the round in flight that a member has been given at once; again they wait their turn."""
        self._reading = asyncio.Semaphore(1)
        """A donor keeps one thread busy at most; the round needs the others."""
        self._free_at = transport.now()
        """When all that was promised so far has gone out at the allowed rate."""
        self._used: dict[bytes, float] = {}
        self.bytes_given = 0

    async def start(self) -> None:
        """Begin to serve."""
        await self._transport.serve(PROTOCOL, self.handler)

    def in_use(self) -> frozenset[bytes]:
        """Checkpoints that clients are downloading: keep them a little longer (:meth:`Store.save_checkpoint`)."""
        old = self._transport.now() - self._limits.hold
        self._used = {checkpoint: at for checkpoint, at in self._used.items() if at > old}
        return frozenset(self._used)

    async def handler(self, stream: Stream) -> None:
        """Serve one stream until the client closes it, breaks the rules or goes silent."""
        peer = stream.peer
        reason = self._objection(peer)
        if reason is not None:
            await _say_and_wait(stream, encode(reason))
            return
        client = _Client(peer, stream, self._transport.now())
        self._clients[client] = None
        try:
            while True:
                client.waits_since = self._transport.now()
                async with asyncio.timeout(self._limits.idle):
                    frame = await stream.receive(REQUEST_LIMIT)
                client.waits_since = None
                request: Request = decode(frame, Request, peer)  # type: ignore[arg-type]
                await self._answer(client, encode(await self._respond(request)), request)
        except (StreamClosed, TimeoutError):
            # The client has what it wanted, or is gone.
            return
        except PeerMisbehaved as error:
            self._refused(peer, str(error))
        except (StateError, ResourceError, OSError, MemoryError) as error:
            # This machine's own: not the client's fault, and not a lie to it either.
            self._warn(f"nothing can be given to others: {str(error) or type(error).__name__}")
            await _say_and_wait(stream, encode(Refused("its own disk or memory fails", retry=False)))
        finally:
            self._clients.pop(client, None)

    def _objection(self, peer: PeerId) -> Refused | None:
        limits = self._limits
        if not self._admits(peer):
            self._refused(peer, "the manifest does not admit this peer")
            return Refused("the manifest does not admit you", retry=False)
        member = self._member(peer)
        each = limits.streams_of_a_member if member else limits.streams_per_peer
        if sum(client.peer == peer for client in self._clients) >= each:
            return Refused(f"you have {each} streams already", retry=True)
        others = [client for client in self._clients if not self._member(client.peer)]
        if member or len(others) < limits.streams:
            return None
        # Who asks for nothing must not keep out who would.
        idle = max(others, key=lambda client: client.idle(self._transport.now()))
        if idle.idle(self._transport.now()) < limits.spare:
            return Refused("all places are taken", retry=True)
        del self._clients[idle]
        idle.ending = asyncio.get_running_loop().create_task(idle.stream.close())
        return None

    async def _respond(self, request: Request) -> Response:
        if isinstance(request, GetChunk) and (data := self._recent(request.hash)) is not None:
            return Data(data)
        async with self._reading:
            return await self._read(request)

    async def _read(self, request: Request) -> Response:
        offload, source = self._transport.offload, self._source
        match request:
            case GetHeads():
                best = await offload(source.best)
                held = (await offload(source.checkpoint_heads))[-MAX_HELD:]
                return Heads(best, held, source.lineage.sealed, source.lineage.holds(best.id))
            case GetChain(head, first):
                commits = await offload(self._page, head, first)
                return Chain(commits) if commits else Missing()
            case GetLineage(commit, above):
                bodies = await offload(self._lineage, commit, above)
                return Bodies(bodies) if bodies else Missing()
            case GetHashes(checkpoint):
                self._used_now(checkpoint)
                return _data(await offload(source.checkpoint_hashes, checkpoint))
            case GetBlob(checkpoint, index):
                self._used_now(checkpoint)
                return _data(await offload(source.checkpoint_blob, checkpoint, index))
            case GetChunk(chunk_hash):
                return _data(await offload(source.chunk, chunk_hash))

    def _used_now(self, checkpoint: bytes) -> None:
        # Clients name what they like; only what is held counts, so this stays as small as the list of checkpoints.
        if checkpoint in self._used or any(head.id == checkpoint for head in self._source.checkpoint_heads()):
            self._used[checkpoint] = self._transport.now()

    def _page(self, head: bytes, first: int) -> list[bytes]:
        commits: list[bytes] = []
        size = 0
        for entry in self._source.chain(head, first):
            data = self._source.commit_bytes(entry.id)
            if data is None or len(commits) == PAGE_COMMITS or size > PAGE_BYTES:
                break
            commits.append(data)
            size += len(data)
        return commits

    def _lineage(self, commit: bytes, above: int) -> list[bytes]:
        bodies: list[bytes] = []
        size = 0
        for data in self._source.bodies(commit, above):
            bodies.append(data)
            size += len(data)
            if len(bodies) == PAGE_COMMITS or size > PAGE_BYTES:
                break
        return bodies

    def _at_once(self, peer: PeerId, request: Request) -> bool:
        """Whether this is what a round may be waiting for."""
        if not self._busy():
            self._given.clear()
            return False
        if not isinstance(request, GetChunk) or not self._member(peer) or self._recent(request.hash) is None:
            return False
        again = (peer, request.hash) in self._given
        self._given[(peer, request.hash)] = None
        return not again

    async def _answer(self, client: _Client, frame: bytes, request: Request) -> None:
        """Send an answer when its turn has come, and keep the client patient until then."""
        limits, now, stream = self._limits, self._transport.now, client.stream
        if limits.rate and not self._at_once(client.peer, request):
            rate = limits.rate * (limits.busy_share if self._busy() else 1.0)
            due = max(self._free_at, now() - limits.burst / limits.rate)
            self._free_at = due + (len(frame) + limits.request_cost) / rate
            while (left := due - now()) > 0:
                if left > limits.sign_of_life:
                    await asyncio.sleep(limits.sign_of_life)
                    await self._send(stream, encode(Wait()))
                else:
                    await asyncio.sleep(left)
        await self._send(stream, frame)
        self.bytes_given += len(frame)

    async def _send(self, stream: Stream, frame: bytes) -> None:
        async with asyncio.timeout(10.0 + len(frame) / self._limits.slowest):
            await stream.send(frame)


@dataclass(eq=False)
class _Client:
    """One stream that is served."""

    peer: PeerId
    stream: Stream
    waits_since: float | None
    """Since when it has asked for nothing; None while an answer is made."""
    ending: asyncio.Task[None] | None = None

    def idle(self, now: float) -> float:
        return now - self.waits_since if self.waits_since is not None else 0.0


async def _say_and_wait(stream: Stream, frame: bytes) -> None:
    """Send a last frame and leave it to the other side to close, so that it is not lost with the stream."""
    try:
        async with asyncio.timeout(20.0):
            await stream.send(frame)
            await stream.receive(REQUEST_LIMIT)
    except (StreamClosed, TimeoutError):
        pass


def _data(data: bytes | None) -> Response:
    return Missing() if data is None else Data(data)


class Declined(TransportError):
    """A donor does not give this, or not now; nothing is wrong with it. ``retry``: it may a little later."""

    fault = Fault.SLOW

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


async def receive_response(
    transport: Transport, stream: Stream, limit: int, patience: float
) -> Heads | Chain | Bodies | Data | Missing:
    """The next answer. ``limit``: bytes of data in it. ``patience``: seconds without a byte after which a donor counts
    as silent; one that trickles, or announces delays for ever, is given up too.

    Raises :class:`Declined` when the donor refuses, :class:`TransportError` when it is silent or breaks the protocol.
    """
    began = transport.now()
    longest = 4 * patience + limit / SLOWEST
    while True:
        # Reading must not be cancelled and begun again, so the clock is watched beside it.
        reading = asyncio.ensure_future(stream.receive(max(limit + ENVELOPE, REQUEST_LIMIT)))
        try:
            while not reading.done():
                now = transport.now()
                left = min(max(stream.last_heard, began) + patience, began + longest) - now
                if left <= 0:
                    what = "is silent" if now - began < longest else f"took {longest:.0f} s for {limit} bytes"
                    raise PeerSlow(f"{stream.peer} {what}")
                await asyncio.wait([reading], timeout=left)
        finally:
            reading.cancel()
            # Looked at even when it is done: it may have failed at the very moment at which this was cancelled.
            await asyncio.gather(reading, return_exceptions=True)
        response: Response = decode(reading.result(), Response, stream.peer)  # type: ignore[arg-type]
        if isinstance(response, Refused):
            raise Declined(f"{stream.peer} refuses: {response.reason}", retry=response.retry)
        if not isinstance(response, Wait):
            return response


async def send_request(stream: Stream, request: Request | GetManifest, patience: float) -> None:
    """Send a request; a donor that takes none for so long counts as silent."""
    try:
        async with asyncio.timeout(patience):
            await stream.send(encode(request))
    except TimeoutError:
        raise PeerSlow(f"{stream.peer} takes no requests") from None


async def ask(
    transport: Transport, peer: PeerId, request: Request | GetManifest, kind: type[T], *, limit: int, patience: float,
    protocol: str = PROTOCOL,
) -> T:  # fmt: skip
    """One request on a stream of its own. Raises :class:`TransportError`; :class:`PeerMisbehaved` when the answer is
    of another kind."""
    stream = await transport.open(peer, protocol, timeout=patience)
    try:
        await send_request(stream, request, patience)
        return expect(await receive_response(transport, stream, limit, patience), kind, peer)
    finally:
        await stream.close()


def expect(response: object, kind: type[T], peer: PeerId) -> T:
    """The response, if it is of the expected kind; :class:`Declined` for :class:`Missing`."""
    if isinstance(response, kind):
        return response
    if isinstance(response, Missing):
        raise Declined(f"{peer} does not have it")
    raise PeerMisbehaved(f"{type(response).__name__} in place of {kind.__name__}", peer)


def manifest_handler(toml: bytes) -> Callable[[Stream], Awaitable[None]]:
    """A handler for :data:`MANIFEST_PROTOCOL` that serves a signed manifest, to anyone who knows the address."""
    frame = encode(Data(toml))

    async def handle(stream: Stream) -> None:
        try:
            async with asyncio.timeout(20.0):
                decode(await stream.receive(REQUEST_LIMIT), GetManifest, stream.peer)
        except TimeoutError:
            return
        await _say_and_wait(stream, frame)

    return handle


async def serve_manifest(transport: Transport, toml: bytes) -> None:
    """Serve the run's signed manifest."""
    await transport.serve(MANIFEST_PROTOCOL, manifest_handler(toml))


async def fetch_manifest(transport: Transport, peer: PeerId, run_id: bytes, *, timeout: float = 10.0) -> bytes:
    """The signed manifest of a run as TOML, from a peer that is known by address only; signature and run id checked.

    Raises :class:`TransportError` when the peer does not answer, :class:`WrongRun` when it serves another run,
    :class:`~atoll.protocol.errors.ManifestError` when what it serves is no valid signed manifest, and
    :class:`~atoll.protocol.errors.VersionError` when the run speaks another version of the protocol.
    """
    data = await ask(
        transport, peer, GetManifest(), Data, limit=MAX_MANIFEST, patience=timeout, protocol=MANIFEST_PROTOCOL
    )
    manifest = Manifest.from_toml(data.data)
    if manifest.run_id != run_id:
        raise WrongRun(
            f"{peer} serves run {manifest.run_id.hex()[:12]} ({manifest.name}), the address names run "
            f"{run_id.hex()[:12]}; ask for the current address of the run"
        )
    manifest.check_signature()
    return data.data
