"""The organiser's anchors: a commit that the run's owner vouches for (docs/protocol.md, "Anchors").

A run is open to anybody, so weight alone decides forks between honest peers only: whoever holds enough identities can
make a chain of any weight. The owner of the manifest signs the id of a commit; peers then prefer any chain that holds
the newest anchor they know over any that does not. What an anchor cannot do is stop a run: a chain without it is used
as long as nobody shows one with it.

Here is the record, pure; what a disk knows of it is in :mod:`.lineage`, how it travels in :mod:`.anchoring`.
"""

from __future__ import annotations

from typing import Annotated
from typing import Protocol as Interface

import msgspec

from .errors import PeerMisbehaved
from .identity import Signer
from .messages import Digest, Head, Natural, Signature, better, decode, encode
from .transport import PeerId

MAX_ANCHOR = 256
"""Bytes of the longest sealed anchor."""
SealedAnchor = Annotated[bytes, msgspec.Meta(max_length=MAX_ANCHOR)]
"""As it travels; empty: none."""


class Verifier(Interface):
    """What checks signatures: any :class:`~atoll.protocol.identity.Signer`."""

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool: ...


class Anchor(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What the owner says: this commit is of the run's rightful chain."""

    run: Digest
    number: Natural
    """A later anchor has a greater number and replaces all before it."""
    head: Head
    """The commit. Its id is what counts; the rest lets peers see at once which heads cannot have it behind them."""


class _Sealed(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_ANCHOR)]
    signature: Signature


def anchor_bytes(body: bytes) -> bytes:
    """What the owner signs; ``body`` is the anchor's encoding."""
    return b"atoll anchor 1\0" + body


def seal_anchor(anchor: Anchor, owner: Signer) -> bytes:
    """The anchor, signed: at most :data:`MAX_ANCHOR` bytes. Raises ValueError for one before the first commit."""
    if anchor.head.height < 1:
        raise ValueError("there is no commit to be anchored: the head is that before the first one")
    body = encode(anchor)
    return encode(_Sealed(body, owner.sign(anchor_bytes(body))))


def open_anchor(data: bytes, verifier: Verifier, run_id: bytes, owner: str, sender: str | None = None) -> Anchor:
    """The anchor in ``data``, verified.

    Raises :class:`PeerMisbehaved`, attributed to ``sender``, for anything wrong: too long, malformed, not in canonical
    form, of another run, of no commit, not signed by the run's owner.
    """
    anchor, sealed = _parse(data, sender)
    if anchor.run != run_id:
        raise PeerMisbehaved(f"an anchor of another run ({anchor.run.hex()[:12]}…)", sender)
    if anchor.head.height < 1:
        raise PeerMisbehaved("an anchor of no commit", sender)
    if not owner or not verifier.verify(PeerId(owner), anchor_bytes(sealed.body), sealed.signature):
        raise PeerMisbehaved("an anchor that the run's owner did not sign", sender)
    return anchor


def peek(data: bytes, sender: str | None = None) -> Anchor:
    """What an anchor says of itself, its signature unchecked. Raises :class:`PeerMisbehaved` when it is malformed."""
    return _parse(data, sender)[0]


def _parse(data: bytes, sender: str | None) -> tuple[Anchor, _Sealed]:
    if len(data) > MAX_ANCHOR:
        raise PeerMisbehaved(f"an anchor of {len(data)} bytes, {MAX_ANCHOR} are allowed", sender)
    sealed = decode(data, _Sealed, sender)
    anchor = decode(sealed.body, Anchor, sender)
    if encode(sealed) != data or encode(anchor) != sealed.body:
        raise PeerMisbehaved("an anchor that is not in canonical form", sender)
    return anchor, sealed


def newer(a: Anchor, b: Anchor | None) -> bool:
    """Whether ``a`` replaces ``b``: the greater number. An owner should never give one number twice; so that all agree
    even then, the better head counts, and the greater encoding where none is."""
    if b is None or a.number != b.number:
        return b is None or a.number > b.number
    if better(a.head, b.head) or better(b.head, a.head):
        return better(a.head, b.head)
    return encode(a) > encode(b)


def could_hold(anchor: Anchor, head: Head) -> bool:
    """Whether a chain with this head may have the anchored commit in it, for all that the two say themselves."""
    return head.id == anchor.head.id or head.height > anchor.head.height


def next_number(known: Anchor | None, now: float) -> int:
    """The number of the next anchor. It follows the clock (``now``: seconds since 1970), so that an organiser who has
    lost sight of the last one still signs a greater number; a clock that was wrong once is only passed by one."""
    return max(int(now), known.number + 1 if known is not None else 1)
