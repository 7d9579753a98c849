"""How a peer gets what it lacks from several donors at once: the way to the best head, and chunks by hash.

A joiner asks several peers for their heads, takes the log that leads to the best one and checks every commit of it
(majority of signatures, and that each follows from its parent), then chooses where to begin: at a state that it can
restore itself, or at the newest checkpoint that the commit after it attests, whichever costs fewer bytes. Blobs and
averaged chunks come by hash from many donors at once; a donor that lies, stops, truncates or trickles is dropped, and
its share goes to the others. Nothing unchecked ever reaches the caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blake3 import blake3

from .anchor import Anchor, could_hold
from .anchoring import Guide
from .averaged import size_limit
from .checkpoints import blob_span, digest_of, split
from .codecs import averages_codec, get_codec
from .commits import (
    START,
    Position,
    averaged_tokens,
    check_body,
    check_child,
    parent_of,
    position_of,
    rank_before,
    verify_commit,
)
from .disk import Buffer
from .errors import Fault, NetworkDown, PeerMisbehaved, PeerUnreachable, TransportError, fault_of
from .identity import Signer
from .layout import ChunkLayout
from .lineage import MAX_LINEAGE, MAX_LINEAGE_BYTES
from .manifest import Manifest
from .messages import MAX_MEMBERS, NO_DIGEST, Body, Commit, Head, better, decode, encode, hash_of, head_of
from .store import Store
from .transfer import (
    PAGE_BYTES,
    PAGE_COMMITS,
    PROTOCOL,
    Bodies,
    Chain,
    Data,
    Declined,
    GetBlob,
    GetChain,
    GetChunk,
    GetHashes,
    GetHeads,
    GetLineage,
    Heads,
    Request,
    ask,
    expect,
    receive_response,
    send_request,
)
from .transport import PeerId, Stream, Transport

MAX_LOG = 1 << 14
"""Commits that one donor may make us look at."""
STEAL_AFTER = 0.5
"""Seconds before a piece that another donor owes is asked for twice, at least."""
RETRIES = 3
"""Times that one donor is tried again after saying that it is busy."""
_HASH = 32


class Blobs(Protocol):
    """Where the blobs of a checkpoint go; :class:`~atoll.protocol.store.Download` is one. Called off the loop."""

    def have(self, index: int) -> bool: ...
    def write(self, index: int, blob: Buffer) -> None: ...


@dataclass(frozen=True)
class Step:
    """A verified commit on the way, and where it leads."""

    commit: Commit
    position: Position


@dataclass(frozen=True)
class Start:
    """A checkpoint to begin from: attested by the signed commit after it."""

    position: Position
    digest: bytes
    hashes: bytes
    """Of all blobs, 32 bytes each; they make the digest."""
    donors: list[PeerId]


@dataclass(frozen=True)
class Plan:
    """A verified way to a better head."""

    head: Head
    base: Head
    """Where the state is had: at :attr:`checkpoint`, or, when that is None, at a state that the caller can restore."""
    checkpoint: Start | None
    steps: list[Step]
    """The commits from ``base`` to ``head``; their chunks come with :meth:`Fetcher.replay`."""
    donors: list[PeerId]
    anchored: bytes = b""
    """The anchored commit, when it was shown to be behind ``head``."""
    lineage: Sequence[bytes] = ()
    """The bodies from there to ``base``, which show it, as far as the caller does not have them."""
    path: Sequence[Head] = ()
    """The verified commits below ``head`` that were looked at, whether the way leads through them or not."""


@dataclass(eq=False)
class _Piece:
    """One thing to be fetched by hash."""

    index: int
    hash: bytes
    request: Request
    limit: int
    holders: int = 0
    asked_at: float = 0.0
    done: bool = False


class Fetcher:
    """Fetches from donors, for one peer of one run.

    codec and layout come from the manifest. report: told which donor was dropped, why, and whose fault it is.
    progress: told bytes done and bytes in all, of the transfer under way.
    parallel: donors used at once. window: requests that one donor has outstanding.
    guide: what the caller makes of the organiser's anchors; None: there are none.
    """

    def __init__(
        self,
        transport: Transport,
        manifest: Manifest,
        layout: ChunkLayout,
        signer: Signer,
        *,
        report: Callable[[PeerId, str, Fault], None] = lambda peer, reason, fault: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        parallel: int = 4,
        window: int = 4,
        guide: Guide | None = None,
    ) -> None:
        self._transport = transport
        self._manifest = manifest
        self._layout = layout
        self._signer = signer
        self._codec = get_codec(manifest.codec.name)
        self._report = report
        self._progress = progress
        self._parallel = parallel
        self._window = window
        self._guide = guide
        self._silence = manifest.round.silence
        self._patience = 2 * self._silence
        """Seconds without a byte from a donor that nobody else can stand in for; where another can, it is T."""
        self._liars: dict[PeerId, None] = {}
        """Donors that broke the protocol: not asked again by this fetcher."""
        self.mute: dict[PeerId, None] = {}
        """Donors of the last plan that gave no answer when they were asked what head they have."""
        count = layout.count
        # A commit names every chunk (hash and contributors) and every member, besides fixed fields.
        self._commit_limit = count * (_HASH + MAX_MEMBERS // 8 + 8) + MAX_MEMBERS * 512 + 4096

    # --- the way to the best head

    async def plan(self, donors: Sequence[PeerId], current: Head, starts: Mapping[bytes, Head]) -> Plan | None:
        """Find a verified way to the best head that the donors offer.

        current: the caller's own head; None comes back when nobody offers a better one. starts: what the caller can
        restore itself (:meth:`Store.restorable`), θ₀ under :data:`NO_DIGEST` included.
        Raises :class:`TransportError` when a better head is offered and no way to it could be verified, or when
        nobody answers; :class:`NetworkDown` when it is this machine that reaches nobody.
        """
        self.mute = {}
        asked = _Asked(self._trusted(donors), self._offer, lambda offer: better(offer.best, current) or offer.anchored)
        try:
            # Who does not answer must not hold up what the others say: meanwhile the run goes on, and a way that is
            # found late leads to a head of the past, where nobody is any more.
            await asked.first(self._patience / 10)
            failed: TransportError | None = None
            if not asked.complete:
                try:
                    plan = await self._choose(asked, current, starts)
                    if plan is not None and (plan.anchored or self._guide is None or self._guide.newest is None):
                        return plan
                except TransportError as error:
                    failed = error  # one of the others may still have it
            await asked.all()
            if failed is None or asked.offers():
                plan = await self._choose(asked, current, starts)
                if plan is not None or failed is None:
                    return plan
            raise failed
        finally:
            await asked.close()

    async def _choose(self, asked: _Asked, current: Head, starts: Mapping[bytes, Head]) -> Plan | None:
        """A verified way by what the donors have said so far; as :meth:`plan`."""
        offers = asked.offers()
        if not offers:
            if asked.down is not None:
                raise asked.down
            raise PeerUnreachable(f"none of {len(asked.donors)} peers says what head it has")
        anchor, claims = self._anchored(offers)
        mine = anchor is not None and self._guide is not None and self._guide.holds(current.id)
        unshown: Plan | None = None
        failed = False
        tried: set[PeerId] = set()
        for peer in sorted(offers, key=lambda peer: (peer not in claims, _rank(offers[peer].best))):
            head = offers[peer].best
            if not better(head, current) if (peer in claims) == mine else mine:
                # A claim that could not be verified is no head.
                return unshown
            try:
                tried.add(peer)
                others = not asked.complete or any(
                    other not in tried and better(offer.best, current) and (other in claims) == (peer in claims)
                    for other, offer in offers.items()
                )
                plan = await self._way(
                    peer, head, offers, starts, anchor, ask=peer in claims,
                    patience=self._silence if others else self._patience,
                )  # fmt: skip
            except TransportError as error:
                failed = True
                self._drop(peer, error)
                if not asked.complete and fault_of(error) in (Fault.GONE, Fault.SLOW):
                    continue  # if nobody else offers anything, it gets the time that it has then
                if not isinstance(error, Declined):
                    asked.forget(peer)
                    del offers[peer]
                continue
            if plan.anchored or anchor is None:
                return plan
            # Nobody may be able to show any more what is behind a chain that is right all the same.
            if not mine and better(head, current) and (unshown is None or better(head, unshown.head)):
                unshown = plan
            if peer not in claims:
                return unshown
        if unshown is None and failed:
            raise TransportError("peers offer a better head, and no way to it could be verified")
        return unshown

    def _anchored(self, offers: Mapping[PeerId, Heads]) -> tuple[Anchor | None, set[PeerId]]:
        """The organiser's newest anchor, those of the donors included, and who claims to have it behind its head."""
        if self._guide is None:
            return None, set()
        for peer, offer in offers.items():
            self._guide.told(peer, offer.anchor, offer.anchored)
        anchor = self._guide.newest
        if anchor is None:
            return None, set()
        return anchor, {
            peer for peer, offer in offers.items() if self._guide.claims(peer) and could_hold(anchor, offer.best)
        }

    async def log(self, peer: PeerId, head: Head) -> list[Step]:
        """The commits up to a head that a peer claims, as low as its log reaches, every one verified. Raises
        :class:`TransportError`."""
        return await self._chain(peer, head, 0, self._patience)

    async def _offer(self, peer: PeerId) -> Heads | NetworkDown | None:
        try:
            # One limit for all of it: who answers "wait" for ever must not hold up what the others say.
            async with asyncio.timeout(self._patience):
                offer = await ask(self._transport, peer, GetHeads(), Heads, limit=1 << 16, patience=self._patience)
        except NetworkDown as error:
            return error
        except (TransportError, TimeoutError) as error:
            if fault_of(error) in (Fault.GONE, Fault.SLOW):
                self.mute[peer] = None
            self._drop(peer, error)
            return None
        return offer

    async def _way(
        self,
        peer: PeerId,
        head: Head,
        offers: Mapping[PeerId, Heads],
        starts: Mapping[bytes, Head],
        anchor: Anchor | None,
        *,
        ask: bool,
        patience: float,
    ) -> Plan:
        """A verified way to a donor's head. anchor: what may be behind it; where the way itself does not show that, the
        donor is asked to, if ``ask``. patience: seconds without a byte from it."""
        own = max((start.height for start in starts.values() if start.height < head.height), default=0)
        if head.id in starts:
            if head != starts[head.id]:
                raise PeerMisbehaved("a head that is not what its commit says", peer)
            below = await self._lineage(peer, [head], starts, anchor, ask, patience)
            return Plan(head, head, None, [], list(offers), *_shown(anchor, below, [], head))
        steps = await self._chain(peer, head, own + 1, patience)
        if steps[0].position.head.height == own + 1 > 1 and steps[0].commit.body.parent not in starts:
            # Another fork: begin as low as they can.
            steps = await self._chain(peer, head, 0, patience)
        ids = [step.commit.body.parent for step in steps]
        # Where the log begins, a body says itself what came before; of what is here that is known better.
        lowest = self._parent_of(steps[0].commit.body)
        if lowest != starts.get(lowest.id, lowest):
            raise PeerMisbehaved("a log whose beginning is not what its commit says", peer)
        path = [*(step.position.head for step in reversed(steps)), lowest]
        below = await self._lineage(peer, path, starts, anchor, ask, patience)
        mine = next((at for at in reversed(range(len(ids))) if ids[at] in starts), None)
        held: dict[bytes, list[PeerId]] = {}
        for other, heads in offers.items():
            for checkpoint in heads.checkpoints:
                held.setdefault(checkpoint.id, []).append(other)
        donors = [other for other in offers if not better(head, offers[other].best)]
        donors += [other for other in offers if other not in donors]
        theirs = [at for at in reversed(range(len(ids))) if ids[at] in held and ids[at] != NO_DIGEST]
        for at in theirs:
            if mine is not None and self._cost(steps[mine:]) <= 8 * self._layout.parameters + self._cost(steps[at:]):
                break
            start = await self._start(steps[at].commit.body, held[ids[at]])
            if start is not None:
                base = start.position.head
                return Plan(head, base, start, steps[at:], donors, *_shown(anchor, below, steps, base), path)
        if mine is None:
            raise Declined(f"nobody offers a state from which {peer}'s head can be reached")
        base = self._parent_of(steps[mine].commit.body)
        return Plan(head, base, None, steps[mine:], donors, *_shown(anchor, below, steps, base), path)

    async def _lineage(
        self, peer: PeerId, path: Sequence[Head], starts: Mapping[bytes, Head], anchor: Anchor | None, ask: bool,
        patience: float,
    ) -> list[bytes] | None:  # fmt: skip
        """The bodies between an anchor and a path of verified commits, newest first; none are needed where the path
        reaches the anchor, or what is here and known to stand on it.

        Each must be sound, be the one that the commit above it names, and stand where that says in all respects, down
        to the anchored commit as its owner signed it. So nobody can invent the weight between the two.
        None when the donor cannot show that the anchor is behind the path. Raises :class:`PeerMisbehaved` for bodies
        that are not those asked for.
        """
        if anchor is None or self._guide is None:
            return None
        for head in path:
            if head.id == anchor.head.id:
                return [] if head == anchor.head else None
            if head.id in starts and self._guide.holds(head.id):
                return [] if head == starts[head.id] else None
        if not ask:
            return None
        bodies: list[bytes] = []
        wanted, size = path[-1], 0
        stream = await self._transport.open(peer, PROTOCOL, timeout=patience)
        limit = PAGE_BYTES + self._commit_limit + 4096
        try:
            while wanted.height > anchor.head.height:
                if size > MAX_LINEAGE_BYTES or len(bodies) > MAX_LINEAGE:
                    return None
                await send_request(stream, GetLineage(wanted.id, anchor.head.height), patience)
                page = expect(await receive_response(self._transport, stream, limit, patience), Bodies, peer)
                before = size
                for data in page.bodies:
                    if wanted.height <= anchor.head.height:
                        raise PeerMisbehaved("bodies below what was asked for", peer)
                    wanted = await self._transport.offload(self._base_in, data, wanted, peer)
                    size += len(data)
                bodies += page.bodies
                # A page ends before its bounds only where this donor knows no more: small ones could go on for days.
                if (
                    wanted.height > anchor.head.height
                    and len(page.bodies) < PAGE_COMMITS
                    and size - before <= PAGE_BYTES
                ):
                    return None
        except Declined:
            return None
        finally:
            await stream.close()
        return bodies if wanted == anchor.head else None

    def _base_in(self, data: bytes, wanted: Head, peer: PeerId) -> Head:
        """What a body stands on; it must be sound, and the one wanted. Raises :class:`PeerMisbehaved`."""
        body = decode(data, Body, peer)
        if encode(body) != data or head_of(body, hash_of(body)) != wanted:
            raise PeerMisbehaved("a body that is not the one asked for", peer)
        try:
            check_body(body, self._manifest, self._layout)
        except PeerMisbehaved as error:
            raise PeerMisbehaved(f"a lineage with {error}", peer) from None
        return self._parent_of(body)

    def _cost(self, steps: Sequence[Step]) -> int:
        """Bytes of the chunks to be fetched."""
        kind = averages_codec(self._codec.name)
        chunks = [self._layout.wire(f).chunk for f in range(self._layout.fragments)]
        bodies = [step.commit.body for step in steps]
        return sum(
            kind.average_size(chunks[body.fragment], len(body.seal.members)) * len(body.chunks) for body in bodies
        )

    async def _chain(self, peer: PeerId, head: Head, first: int, patience: float) -> list[Step]:
        """The commits from ``first``, or as low as the donor's log reaches, up to a head; every one verified."""
        steps: list[Step] = []
        stream = await self._transport.open(peer, PROTOCOL, timeout=patience)
        limit = PAGE_BYTES + self._commit_limit + 4096
        try:
            while not steps or steps[-1].position.head.id != head.id:
                after = first if not steps else steps[-1].position.head.height + 1
                if len(steps) > MAX_LOG or after > head.height:
                    raise PeerMisbehaved(f"a log of {len(steps)} commits that does not end in the head it claims", peer)
                await send_request(stream, GetChain(head.id, after), patience)
                page = expect(await receive_response(self._transport, stream, limit, patience), Chain, peer)
                if not page.commits:
                    raise PeerMisbehaved("an empty page of commits", peer)
                steps += await self._transport.offload(self._verify, page.commits, steps[-1:], peer)
                if steps[-1].position.head.height > head.height:
                    raise PeerMisbehaved("a log that goes past the head it claims", peer)
        finally:
            await stream.close()
        if steps[-1].position.head != head:
            raise PeerMisbehaved("a head that is not what its commit says", peer)
        return steps

    def _verify(self, commits: Sequence[bytes], before: Sequence[Step], peer: PeerId) -> list[Step]:
        parent = before[0].position if before else None
        steps = []
        try:
            for data in commits:
                commit = decode(data, Commit, peer)
                if encode(commit) != data:
                    raise PeerMisbehaved("a commit that is not in its canonical form", peer)
                commit_id = verify_commit(commit, self._manifest, self._layout, self._signer)
                check_child(commit.body, parent or self._base_of(commit.body), self._manifest, self._layout)
                parent = position_of(commit.body, commit_id)
                steps.append(Step(commit, parent))
        except PeerMisbehaved as error:
            # Whoever made a wrong commit, it is the donor that passed it on unchecked.
            raise PeerMisbehaved(f"a log with {error}", peer) from None
        return steps

    def _base_of(self, body: Body) -> Position:
        """Where the chain stood before a body: all of it follows from the body."""
        if body.parent == NO_DIGEST:
            if body.state != bytes.fromhex(self._manifest.state.theta0):
                raise PeerMisbehaved("a first commit on another θ₀ than the manifest's")
            return START
        cursor = body.cursor - sum(lease.span.count for lease in body.leases)
        tokens = body.tokens - averaged_tokens(body.seal, body.chunks, self._layout)
        if cursor < 0 or tokens < 0:
            raise PeerMisbehaved("a body whose cursor or tokens are less than its own share")
        return Position(self._parent_of(body), cursor, tokens, rank_before(body.seal, self._manifest, self._layout))

    def _parent_of(self, body: Body) -> Head:
        return parent_of(body, self._manifest, self._layout)

    async def _start(self, child: Body, donors: Sequence[PeerId]) -> Start | None:
        """The hashes of a checkpoint, from the first donor whose hashes make the digest that the child attests."""
        honest = list(donors)
        limit = 2 * self._layout.count * _HASH
        for peer in donors:
            patience = self._silence if peer != donors[-1] else self._patience
            try:
                request = GetHashes(child.parent)
                found = await ask(self._transport, peer, request, Data, limit=limit, patience=patience)
                if digest_of(self._layout, found.data) != child.state:
                    raise PeerMisbehaved("hashes of a checkpoint that do not make the attested digest", peer)
                return Start(self._base_of(child), child.state, found.data, honest)
            except Declined:
                honest.remove(peer)
            except TransportError as error:
                self._drop(peer, error)
                honest.remove(peer)
        return None

    # --- transfers

    async def checkpoint(self, start: Start, blobs: Blobs) -> None:
        """Fetch the blobs that ``blobs`` does not have, from many donors at once.

        Raises :class:`TransportError` when no donor is left; what has arrived stays, and the next call goes on.
        Errors of ``blobs`` (a full disk) pass through.
        """
        pieces = []
        for index, blob_hash in enumerate(split(start.hashes)):
            if not blobs.have(index):
                size = blob_span(self._layout, index)[1]
                pieces.append(_Piece(index, blob_hash, GetBlob(start.position.head.id, index), size))
        await self._collect(pieces, start.donors, blobs.write)

    async def replay(
        self, plan: Plan, have: Callable[[bytes], bytes | None] = lambda chunk_hash: None
    ) -> AsyncIterator[tuple[Commit, list[bytes]]]:
        """The plan's commits in order, each with its averaged chunks. One commit's chunks are in memory at a time.

        have: chunks that are here already, by hash; called off the event loop.
        """
        for step in plan.steps:
            yield step.commit, await self.chunks(step.commit.body, plan.donors, have)

    async def chunks(
        self, body: Body, donors: Sequence[PeerId], have: Callable[[bytes], bytes | None] = lambda chunk_hash: None
    ) -> list[bytes]:
        """All averaged chunks of a body, verified by hash. Raises :class:`TransportError` when no donor is left."""
        found: dict[int, bytes] = {}
        pieces = []
        part = self._layout.wire(body.fragment, body.seal.rank)
        for index, entry in enumerate(body.chunks):
            here = await self._transport.offload(have, entry.hash)
            if here is not None:
                found[index] = here
            else:
                limit = size_limit(self._codec, part.size(index), len(body.seal.members), self._manifest.merging)
                pieces.append(_Piece(index, entry.hash, GetChunk(entry.hash), limit))
        await self._collect(pieces, donors, found.__setitem__)
        return [found[index] for index in range(len(body.chunks))]

    async def chunk(self, chunk_hash: bytes, donors: Sequence[PeerId]) -> bytes:
        """One averaged chunk by its hash. Raises :class:`TransportError` when none of the donors gives it."""
        found: dict[int, bytes] = {}
        most = max(self._layout.wire(f).chunk for f in range(self._layout.fragments))
        limit = size_limit(self._codec, most, MAX_MEMBERS, self._manifest.merging)
        await self._collect([_Piece(0, chunk_hash, GetChunk(chunk_hash), limit)], donors, found.__setitem__)
        return found[0]

    async def fetch_into(
        self,
        store: Store,
        donors: Sequence[PeerId],
        current: Head,
        keep: Callable[[Commit, list[bytes]], None] | None = None,
    ) -> Plan | None:
        """Bring a store to the best head that the donors offer, so that ``store.load(plan.head.id)`` leads there.

        None when nobody offers a better head than ``current``. The caller loops: commits go on appearing meanwhile.
        keep: called (off the event loop) in place of ``store.append``.
        Raises as :meth:`plan`, and :class:`~atoll.protocol.errors.DiskFull`; what has arrived stays for the next call.
        """
        plan = await self.plan(donors, current, await self._transport.offload(store.restorable))
        if plan is not None:
            await self.carry_out(plan, store, keep)
        return plan

    async def carry_out(
        self, plan: Plan, store: Store, keep: Callable[[Commit, list[bytes]], None] | None = None
    ) -> None:
        """Bring into a store what a plan names; see :meth:`fetch_into`."""
        offload = self._transport.offload
        if plan.checkpoint is not None:
            start = plan.checkpoint
            download = await offload(store.download, start.position, start.digest, start.hashes)
            await self.checkpoint(start, download)
            await offload(download.finish)
        async for commit, chunks in self.replay(plan, store.chunk):
            await offload(keep or store.append, commit, chunks)

    # --- the engine

    async def _collect(
        self, pieces: Sequence[_Piece], donors: Sequence[PeerId], deliver: Callable[[int, bytes], None]
    ) -> None:
        if not pieces:
            return
        collection = _Collection(self._transport, pieces, self._trusted(donors), deliver, self._progress)
        loop = asyncio.get_running_loop()
        count = min(self._parallel, len(collection.spare))
        slots = [loop.create_task(self._slot(collection), name=f"fetch {i}") for i in range(count)]
        try:
            for slot in slots:
                slot.add_done_callback(lambda _: collection.wake())
            while collection.left and not all(slot.done() for slot in slots):
                await collection.news()
                for slot in slots:
                    if slot.done():
                        slot.result()
        finally:
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)
        if collection.left:
            raise TransportError(f"{collection.left} of {len(pieces)} pieces could not be had from {len(donors)} peers")

    async def _slot(self, collection: _Collection) -> None:
        """Work with one donor after another until all is there or nobody is left."""
        tries: dict[PeerId, int] = {}
        while collection.left and collection.spare:
            peer = collection.spare.popleft()
            try:
                await self._work(collection, peer)
            except Declined as error:
                tries[peer] = tries.get(peer, 0) + 1
                if error.retry and tries[peer] <= RETRIES:
                    await asyncio.sleep(self._patience / 8)
                    collection.spare.append(peer)
            except TransportError as error:
                self._drop(peer, error)

    async def _work(self, collection: _Collection, peer: PeerId) -> None:
        now = self._transport.now
        owed: deque[_Piece] = deque()
        average = 0.0
        stream: Stream | None = None
        try:
            stream = await self._transport.open(peer, PROTOCOL, timeout=self._patience)
            while collection.left:
                while len(owed) < self._window and (piece := collection.take()) is not None:
                    owed.append(piece)
                    await send_request(stream, piece.request, self._patience)
                if not owed:
                    # Everything is asked for. What another donor owes for long is asked for a second time.
                    patience = max(STEAL_AFTER, 2 * average)
                    piece = collection.steal(patience)
                    if piece is None:
                        await collection.news(patience)
                        continue
                    owed.append(piece)
                    await send_request(stream, piece.request, self._patience)
                began = now()
                response = await receive_response(self._transport, stream, owed[0].limit, self._patience)
                data = expect(response, Data, peer).data
                if not await self._transport.offload(_matches, data, owed[0].hash):
                    raise PeerMisbehaved(f"a piece of {len(data)} bytes that does not match its hash", peer)
                piece = owed.popleft()
                piece.holders -= 1
                average = now() - began if not average else 0.8 * average + 0.2 * (now() - began)
                await collection.arrived(piece, data)
        finally:
            collection.give_back(owed)
            if stream is not None:
                await stream.close()

    def _trusted(self, donors: Sequence[PeerId]) -> list[PeerId]:
        return [peer for peer in donors if peer not in self._liars and peer != self._transport.peer_id]

    def _drop(self, peer: PeerId, error: TransportError | TimeoutError) -> None:
        """Go on without a donor. Raises :class:`NetworkDown` again: then it is not the donor."""
        if isinstance(error, NetworkDown):
            raise error
        if isinstance(error, PeerMisbehaved):
            self._liars[peer] = None
        self._report(peer, str(error) or "it does not answer in time", fault_of(error))


class _Asked:
    """Donors that are asked at once what head they have, and what they have said so far.

    offer: asks one of them. promising: whether an answer is one that was hoped for.
    """

    def __init__(
        self,
        donors: Sequence[PeerId],
        offer: Callable[[PeerId], Awaitable[Heads | NetworkDown | None]],
        promising: Callable[[Heads], bool],
    ) -> None:
        self.donors = donors
        self.down: NetworkDown | None = None
        """Why nobody can be reached at all, if that is so."""
        self._offer = offer
        self._promising = promising
        self._said: dict[PeerId, Heads] = {}
        self._hoped = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._ask(peer), name=f"the head of {peer}") for peer in donors]

    @property
    def complete(self) -> bool:
        """Whether all have answered, or failed to."""
        return all(task.done() for task in self._tasks)

    def offers(self) -> dict[PeerId, Heads]:
        """The answers, in the order in which the donors were named."""
        return {peer: self._said[peer] for peer in self.donors if peer in self._said}

    def forget(self, peer: PeerId) -> None:
        """What a donor said is of no use."""
        self._said.pop(peer, None)

    async def first(self, more: float) -> None:
        """Wait for a promising answer, and for ``more`` seconds after it for the others; at most until all have."""
        while not self.complete:
            self._hoped.clear()
            if any(self._promising(offer) for offer in self._said.values()):
                await asyncio.wait(self._tasks, timeout=more)
                return
            await self._hoped.wait()

    async def all(self) -> None:
        """Wait until all have answered. Each is given up on after a while."""
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Wait for nobody any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, peer: PeerId) -> None:
        try:
            answer = await self._offer(peer)
            if isinstance(answer, Heads):
                self._said[peer] = answer
            elif answer is not None:
                self.down = self.down or answer
        finally:
            asyncio.get_running_loop().call_soon(self._hoped.set)  # when this task is done


@dataclass(eq=False)
class _Collection:
    """The pieces of one transfer, shared by the donors that work on it."""

    transport: Transport
    pieces: Sequence[_Piece]
    donors: Sequence[PeerId]
    deliver: Callable[[int, bytes], None]
    progress: Callable[[int, int], None]
    left: int = 0
    spare: deque[PeerId] = field(default_factory=deque)
    """Donors that nobody works with at the moment."""
    waiting: deque[_Piece] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.left = len(self.pieces)
        self.waiting.extend(self.pieces)
        # Not everyone begins with the same donor, or all joiners choke that one.
        shuffled = list(self.donors)
        self.transport.random.shuffle(shuffled)
        self.spare.extend(shuffled)
        self._total = sum(piece.limit for piece in self.pieces)
        self._bytes = 0
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Something happened: pieces are open again, all is there, or a slot has ended."""
        self._news.set()

    async def news(self, patience: float | None = None) -> None:
        """Wait until something happens, or so many seconds. Between looking and this call there must be no await."""
        self._news.clear()
        try:
            async with asyncio.timeout(patience):
                await self._news.wait()
        except TimeoutError:
            pass

    def take(self) -> _Piece | None:
        """A piece that nobody has been asked for."""
        while self.waiting:
            piece = self.waiting.popleft()
            if not piece.done:
                return self._asked(piece)
        return None

    def steal(self, patience: float) -> _Piece | None:
        """The piece that one other donor has owed the longest, if that is longer than ``patience`` seconds."""
        owed = [piece for piece in self.pieces if not piece.done and piece.holders == 1]
        if not owed:
            return None
        oldest = min(owed, key=lambda piece: piece.asked_at)
        return self._asked(oldest) if self.transport.now() - oldest.asked_at >= patience else None

    def _asked(self, piece: _Piece) -> _Piece:
        piece.holders += 1
        piece.asked_at = self.transport.now()
        return piece

    def give_back(self, owed: Sequence[_Piece]) -> None:
        """A donor is gone: what it owed is open again, unless another has been asked too."""
        for piece in owed:
            piece.holders -= 1
            if not piece.done and not piece.holders:
                self.waiting.append(piece)
        self.wake()

    async def arrived(self, piece: _Piece, data: bytes) -> None:
        if piece.done:
            return
        piece.done = True
        try:
            await self.transport.offload(self.deliver, piece.index, data)
        except BaseException:
            piece.done = False
            raise
        self.left -= 1
        self._bytes += len(data)
        self.progress(self._bytes if self.left else self._total, self._total)
        if not self.left:
            self.wake()


def _matches(data: bytes, wanted: bytes) -> bool:
    digest: bytes = blake3(data).digest()
    return digest == wanted


def _shown(
    anchor: Anchor | None, below: Sequence[bytes] | None, steps: Sequence[Step], base: Head
) -> tuple[bytes, list[bytes]]:
    """What a plan says of the anchor: its commit, and the bodies that show it up to ``base``."""
    if anchor is None or below is None:
        return b"", []
    inside = [
        encode(step.commit.body) for step in steps if anchor.head.height < step.position.head.height <= base.height
    ]
    return anchor.head.id, [*below, *inside]


def _rank(head: Head) -> tuple[int, int, bytes]:
    """Sorts the best head first, as :func:`~atoll.protocol.messages.better` compares."""
    return -head.weight, -head.height, head.id
