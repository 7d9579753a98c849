"""How the organiser's newest anchor goes from peer to peer, and what it means for the heads that others claim.

An anchor travels in peer records and in the answer to ``heads?`` (:mod:`.transfer`), and over ``anchor/1``, where
anybody may leave one and take the newest: it proves itself, so it does not matter who brings it. Whoever learns a
newer one passes it on to a few others at once.

A claim to have the anchor behind one's head is looked into like any other claim (:mod:`.fetch`), and keeps nobody from
anything: nobody who claims it, nobody to follow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec

from .anchor import Anchor, SealedAnchor, could_hold, newer, open_anchor, peek
from .errors import PeerMisbehaved, ResourceError, StreamClosed, TransportError
from .identity import Signer
from .lineage import keep_quietly
from .manifest import Manifest
from .messages import Head, better, decode, encode
from .putoff import PutOff
from .refusals import Events
from .store import Store
from .transport import PeerId, Stream, Transport
from .wakeup import Wakeup

PROTOCOL = "anchor/1"
FRAME_LIMIT = 512
"""Bytes of the largest frame in either direction."""
SPREAD = 8
"""Others who are told at once of a new anchor."""
PATIENCE = 10.0
"""Seconds for one exchange."""


class Bring(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="anchor"):
    """An anchor, or the wish for one (empty); the answer is the newest that the other side knows, of the same form."""

    sealed: SealedAnchor


class Anchors:
    """The newest anchor that one process knows.

    adopted: called when a newer one than before is known: to make it last, and to look at heads anew.
    refused: told who brought an anchor that is none, and why.
    """

    def __init__(
        self,
        transport: Transport,
        signer: Signer,
        manifest: Manifest,
        *,
        adopted: Callable[[Anchor, bytes], None],
        refused: Callable[[PeerId, str], None],
    ) -> None:
        self._transport = transport
        self._signer = signer
        self._manifest = manifest
        self._adopted = adopted
        self._refused = refused
        self.newest: Anchor | None = None
        self.sealed = b""

    def restore(self, sealed: bytes) -> bool:
        """Take up the anchor of an earlier start; False when it is not one of this run's owner."""
        try:
            self.newest, self.sealed = self._open(sealed, None), sealed
        except PeerMisbehaved:
            return False
        return True

    def _open(self, sealed: bytes, sender: str | None) -> Anchor:
        return open_anchor(sealed, self._signer, self._manifest.run_id, self._manifest.owner, sender)

    def learn(self, sealed: bytes, sender: PeerId) -> bool:
        """What somebody says is an anchor; whether it is newer than the one known. Empty: nothing is said."""
        if not sealed or sealed == self.sealed:
            return False
        try:
            # An old one costs no signature to be verified.
            if not newer(peek(sealed, sender), self.newest):
                return False
            anchor = self._open(sealed, sender)
        except PeerMisbehaved as error:
            self._refused(sender, str(error))
            return False
        self.newest, self.sealed = anchor, sealed
        self._adopted(anchor, sealed)
        return True

    async def start(self) -> None:
        """Take and give anchors from now on."""
        await self._transport.serve(PROTOCOL, self._serve)

    async def _serve(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                self.learn(decode(await stream.receive(FRAME_LIMIT), Bring, stream.peer).sealed, stream.peer)
                await stream.send(encode(Bring(self.sealed)))
                await stream.receive(FRAME_LIMIT)  # the other side closes, or the answer could be lost
        except (StreamClosed, TimeoutError):
            pass
        except PeerMisbehaved as error:
            self._refused(stream.peer, str(error))

    async def spread(self, peers: Sequence[PeerId]) -> int:
        """Bring the newest to some of these peers, chosen by chance; how many have it then."""
        chosen = list(peers)
        if len(chosen) > SPREAD:
            chosen = self._transport.random.sample(chosen, SPREAD)
        answers = await asyncio.gather(*(self._bring(peer) for peer in chosen))
        return sum(answers)

    async def _bring(self, peer: PeerId) -> bool:
        try:
            answer = await exchange(self._transport, peer, self.sealed)
        except TransportError:
            return False  # there are other ways, and others
        self.learn(answer, peer)
        return answer == self.sealed


async def exchange(transport: Transport, peer: PeerId, sealed: bytes, *, timeout: float = PATIENCE) -> bytes:
    """Leave an anchor (empty: none) with a peer, and take the newest that it knows then (empty: none), unverified.

    Raises :class:`TransportError` when the peer does not answer, or not with an anchor.
    """
    stream = await transport.open(peer, PROTOCOL, timeout=timeout)
    try:
        async with asyncio.timeout(timeout):
            await stream.send(encode(Bring(sealed)))
            return decode(await stream.receive(FRAME_LIMIT), Bring, peer).sealed
    except TimeoutError:
        raise TransportError(f"{peer} does not answer to an anchor in {timeout:.0f} s") from None
    finally:
        await stream.close()


class Guide:
    """A peer's dealings with anchors: it keeps the newest on disk, says what it means, passes it on, and knows which
    claimed heads are worth a look.

    events: the peer's. others: whom to tell. changed: called when claimed heads are to be looked at anew. found:
    called with a head on the own disk that has a new anchor behind it. publish: called when the own record says
    something new.
    """

    def __init__(
        self,
        transport: Transport,
        signer: Signer,
        manifest: Manifest,
        store: Store,
        *,
        events: Events,
        others: Callable[[], list[PeerId]],
        changed: Callable[[], None],
        found: Callable[[Head], None],
        publish: Callable[[], None],
        refused: Callable[[PeerId, str], None],
    ) -> None:
        self.anchors = Anchors(transport, signer, manifest, adopted=self._adopt, refused=refused)
        self._transport = transport
        self._store = store
        self._events = events
        self._others = others
        self._changed = changed
        self._found = found
        self._publish = publish
        self._news = Wakeup()
        self._told: tuple[bytes, bool] | None = None
        self._claims: dict[PeerId, Anchor] = {}
        """The anchor that a peer says is behind its head."""
        self._doubts = PutOff(transport.now, manifest.round.silence, 60 * manifest.round.silence)
        """Who said so and could not show it: that is not believed for T, then for twice as long, at most for 60T."""

    # --- the anchor itself

    @property
    def newest(self) -> Anchor | None:
        return self.anchors.newest

    def restore(self) -> None:
        """Take up what the disk knows."""
        sealed = self._store.lineage.sealed
        if sealed and not self.anchors.restore(sealed):
            self._store.lineage.forget()
            self._events("warning", message="the anchor on disk is not one of this run's owner; going on without it")

    def _adopt(self, anchor: Anchor, sealed: bytes) -> None:
        self._store.lineage.adopt(anchor, sealed)
        self._doubts.clear()
        self._news.set()
        self._changed()

    async def keep(self) -> None:
        """Write down and pass on what is new; runs until cancelled."""
        while True:
            if not await self._news.wait(3600.0):
                continue
            self._news.clear()
            try:
                await self._transport.offload(self._store.lineage.save)
            except ResourceError as error:
                self._events("warning", message=f"the anchor was not written down: {error}")
            # A chain that was left for a heavier one may still be on this disk, and be the rightful one.
            best = await self._transport.offload(self._store.best)
            if self.holds(best.id):
                self._found(best)
            await self.anchors.spread(self._others())

    def say(self, own: Head) -> None:
        """Tell, once each, of a new anchor and of its coming into this peer's chain or dropping out of it."""
        anchor = self.newest
        if anchor is None:
            return
        now = self.anchors.sealed, self.holds(own.id)
        if now != self._told:
            self._told = now
            self._publish()
            self._events(
                "anchor", number=anchor.number, commit=anchor.head.id.hex(), round=anchor.head.round,
                outer_step=anchor.head.outer_step, height=anchor.head.height, held=now[1],
            )  # fmt: skip

    # --- heads

    def holds(self, commit_id: bytes) -> bool:
        """Whether the newest anchor is known to be behind a commit."""
        return self._store.lineage.holds(commit_id)

    async def take(self, bodies: Sequence[bytes]) -> None:
        """Keep bodies that show that the anchor is behind some commit; see :meth:`.lineage.Lineage.keep`."""
        if bodies:
            await self._transport.offload(keep_quietly, self._store.lineage, bodies)

    def told(self, peer: PeerId, sealed: bytes, anchored: bool) -> None:
        """What a peer says of an anchor and its own head."""
        self.anchors.learn(sealed, peer)
        self._claims.pop(peer, None)
        if anchored and sealed:
            with contextlib.suppress(PeerMisbehaved):  # what is no anchor has been reported
                self._claims[peer] = peek(sealed)

    def forget(self, peer: PeerId) -> None:
        """A peer has been gone for long."""
        self._claims.pop(peer, None)
        self._doubts.discard(peer)

    def claims(self, peer: PeerId) -> bool:
        """Whether a peer says that the newest anchor is behind its head, and may be believed at present."""
        said = self._claims.get(peer)
        return said is not None and said == self.newest and peer not in self._doubts

    def doubt(self, peer: PeerId) -> None:
        """It could not show what it claimed."""
        self._doubts.add(peer)

    def worth(self, peer: PeerId, head: Head, own: Head) -> bool:
        """Whether the head that a peer claims should be looked into, from this peer's own."""
        anchor = self.anchors.newest
        if anchor is None:
            return better(head, own)
        if self.holds(own.id):
            return better(head, own) and could_hold(anchor, head)
        return better(head, own) or (self.claims(peer) and could_hold(anchor, head))

    def surpasses(self, head: Head, anchored: bytes, own: Head) -> bool:
        """Whether to leave the own head for a verified one. ``anchored``: the anchored commit shown to be behind it."""
        anchor = self.newest
        theirs = anchor is not None and (anchored == anchor.head.id or self.holds(head.id))
        mine = self.holds(own.id)
        return theirs if theirs != mine else better(head, own)
