"""Control messages: small typed frames, one way each, from peer to peer (protocol name ``control/1``)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .messages import (
    MAX_MEMBERS,
    Body,
    Commit,
    Digest,
    Head,
    Member,
    Natural,
    Part,
    Peer,
    Ratio,
    Seal,
    Signature,
    Vote,
)

Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Report(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="report"):
    """How far a peer is: sent to the first candidates every two seconds, and at once when it becomes ready."""

    head: Head
    steps: Natural
    tokens: Natural
    leased: Natural
    """Sample units leased and unused."""
    ready: bool
    """H inner steps done, or no samples left to do more."""
    eta: Ratio
    """Seconds until it is ready, by its own estimate; 0 when ready or unknown."""
    step_time: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    round: Natural
    """Highest round number it saw on this head, void ones included."""


class Heard(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="heard"):
    """Answer to a report: alive, and at this head."""

    head: Head
    round: Natural


class Call(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="call"):
    """The coordinator calls a peer into a round."""

    call: Nonce
    round: Natural
    fragment: Natural
    base: Head
    leases: bool
    """Leases alone: nobody freezes, everybody enters with weight 0. So a joiner need not wait for the next round."""


class Ballot(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="ballot"):
    """A body that is proposed, with the votes for it that the sender holds (none: a bare proposal)."""

    roster: Digest
    body: Body
    votes: Annotated[list[Vote], msgspec.Meta(max_length=MAX_MEMBERS)]


class Enter(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="enter"):
    """Answer to a call: frozen, and in."""

    call: Nonce
    member: Member
    seen: Annotated[list[Ballot], msgspec.Meta(max_length=8)]
    """Bodies with this base that the peer has seen votes for in void rosters."""


class Busy(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="busy"):
    """Answer to a call: already entered another's."""

    call: Nonce
    coordinator: Peer


class Refuse(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="refuse"):
    """Answer to a call: not at that base, or the island cannot. From the coordinator to those who entered: its own
    cannot."""

    call: Nonce
    head: Head


class Release(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="release"):
    """The coordinator gives up a call, or seals without this peer."""

    call: Nonce


class Sealed(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="sealed"):
    """The roster, signed by its coordinator."""

    seal: Seal
    signature: Signature


class Ping(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="ping"):
    """A sign of life within a round."""

    roster: Digest


class Reassign(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="reassign"):
    """Whoever leads the round gives a silent reducer's chunks to others."""

    roster: Digest
    generation: Natural
    parts: Annotated[list[Part], msgspec.Meta(max_length=4096)]


class Voided(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="voided"):
    """The sender takes no further part in that roster; it signed nothing for it that it has not sent."""

    roster: Digest
    reason: Annotated[str, msgspec.Meta(max_length=200)]


class Committed(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="committed"):
    """A commit, sent to everyone by whoever completes it."""

    commit: Commit


Control = (
    Report | Heard | Call | Enter | Busy | Refuse | Release | Sealed | Ping | Reassign | Ballot | Voided | Committed
)
"""What a control stream carries."""
