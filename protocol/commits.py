"""Rules that make a body and a commit valid. Pure functions: every peer must come to the same answer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .deadline import deadline_seconds
from .errors import PeerMisbehaved
from .identity import Signer
from .layout import ChunkLayout
from .manifest import Manifest
from .messages import (
    GENESIS,
    MAX_ROUND_GAP,
    Body,
    ChunkEntry,
    Commit,
    Head,
    Lease,
    Seal,
    Span,
    hash_of,
    head_of,
    vote_bytes,
)
from .places import place_of, reach
from .transport import PeerId


class Position(msgspec.Struct, array_like=True, frozen=True):
    """Where a chain stands after a commit: everything that the next body is checked against, but the tensors."""

    head: Head
    cursor: int
    tokens: int
    rank: int = 0
    """Of the round that led here; 0: the manifest's, or not known."""


START = Position(GENESIS, 0, 0)
"""Before the first commit."""


def position_of(body: Body, commit_id: bytes) -> Position:
    """The position that a commit makes."""
    return Position(head_of(body, commit_id), body.cursor, body.tokens, body.seal.rank)


def rank_before(seal: Seal, manifest: Manifest, layout: ChunkLayout) -> int:
    """The rank of the round before, as far as it follows from this one's: 0 where it was estimated anew between."""
    return 0 if estimates(seal.base.outer_step, manifest, layout) else seal.rank


def estimates(outer_step: int, manifest: Manifest, layout: ChunkLayout) -> bool:
    """Whether after so many outer steps the rank is estimated anew: every ``codec.window`` steps of each fragment."""
    window = manifest.codec.window * layout.fragments
    return window > 0 and outer_step % window == 0


def majority(members: int) -> int:
    """Signatures that a commit needs: more than half of the roster."""
    return members // 2 + 1


def bitmap(indices: Sequence[int], members: int) -> bytes:
    """Contributors as bits, least significant first."""
    bits = bytearray((members + 7) // 8)
    for index in indices:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def members_in(contributors: bytes, members: int) -> list[int]:
    """The inverse of :func:`bitmap`. Raises :class:`PeerMisbehaved` for a wrong length or stray bits."""
    value = int.from_bytes(contributors, "little")
    if len(contributors) != (members + 7) // 8 or value >> members:
        raise PeerMisbehaved(f"a bitmap of {len(contributors)} bytes does not fit {members} members")
    return [i for i in range(members) if value >> i & 1]


def grant_leases(seal: Seal, cursor: int, max_lease: int) -> tuple[list[Lease], int]:
    """The leases that a commit of this roster grants, in member order, and the cursor after them."""
    leases = []
    for index, member in enumerate(seal.members):
        count = min(member.want, max_lease)
        if count:
            leases.append(Lease(index, Span(cursor, count)))
            cursor += count
    return leases, cursor


def contributed(seal: Seal, chunks: Sequence[ChunkEntry], layout: ChunkLayout) -> list[float]:
    """For each member, the share (0 … 1) of the fragment's elements that its contribution is in."""
    whole = layout.fragment(seal.fragment).parameters
    return [count / whole for count in _elements(seal, chunks, layout)]


def averaged_of(seal: Seal, chunks: Sequence[ChunkEntry], layout: ChunkLayout) -> list[int]:
    """Tokens of each member that a commit averages: its weight times the share of the whole model that it is in, so
    that a token that goes through the rounds of all fragments counts once."""
    shares = [count / layout.parameters for count in _elements(seal, chunks, layout)]
    return [int(member.weight * share) for member, share in zip(seal.members, shares, strict=True)]


def averaged_tokens(seal: Seal, chunks: Sequence[ChunkEntry], layout: ChunkLayout) -> int:
    """Tokens that a commit averages, of all members together."""
    return sum(averaged_of(seal, chunks, layout))


def _elements(seal: Seal, chunks: Sequence[ChunkEntry], layout: ChunkLayout) -> list[int]:
    part = layout.fragment(seal.fragment)
    elements = [0] * len(seal.members)
    for index, entry in enumerate(chunks):
        size = part.size(index)
        for member in members_in(entry.contributors, len(seal.members)):
            elements[member] += size
    return elements


def make_body(
    seal: Seal, roster_id: bytes, parent: Position, state: bytes, chunks: list[ChunkEntry], manifest: Manifest,
    layout: ChunkLayout,
) -> Body:  # fmt: skip
    """The one body that follows from a roster, its parent and its averaged chunks, whoever proposes it."""
    leases, cursor = grant_leases(seal, parent.cursor, manifest.round.max_lease)
    tokens = averaged_tokens(seal, chunks, layout)
    height = parent.head.height + 1
    return Body(
        run=seal.run,
        round=seal.round if manifest.round.in_flight == 1 else height,
        fragment=seal.fragment,
        height=height,
        outer_step=parent.head.outer_step + (1 if chunks else 0),
        parent=parent.head.id,
        state=state,
        seal=seal,
        chunks=chunks,
        leases=leases,
        cursor=cursor,
        tokens=parent.tokens + tokens,
        # A lone peer's steps are real, but they must never outweigh those of a swarm.
        weight=parent.head.weight + (tokens if len(seal.members) > 1 else 0),
    )


def check_seal(seal: Seal, manifest: Manifest, layout: ChunkLayout) -> None:
    """Raise :class:`PeerMisbehaved` unless the roster keeps the run's rules."""
    count = len(seal.members)
    if seal.run != manifest.run_id:
        raise PeerMisbehaved("a roster of another run", seal.coordinator)
    due, most = layout.due(seal.base.outer_step), reach(seal.base.outer_step, manifest) if not seal.leases else 1
    if seal.fragment >= layout.fragments or (seal.fragment - due) % layout.fragments >= most:
        others = f", or one of {most - 1} after it" if most > 1 else ""
        raise PeerMisbehaved(f"fragment {seal.fragment} where {due} is due{others}", seal.coordinator)
    part = layout.fragment(seal.fragment)
    if not seal.base.round < seal.round <= seal.base.round + MAX_ROUND_GAP:
        raise PeerMisbehaved(f"round {seal.round} on a base of round {seal.base.round}", seal.coordinator)
    if len({member.peer for member in seal.members}) != count:
        raise PeerMisbehaved("a member stands twice in a roster", seal.coordinator)
    if count < manifest.round.quorum:
        raise PeerMisbehaved(f"a roster of {count}, the manifest's quorum is {manifest.round.quorum}", seal.coordinator)
    if count > manifest.round.max_group:
        raise PeerMisbehaved(f"a roster of {count}, the manifest allows {manifest.round.max_group}", seal.coordinator)
    for member in seal.members:
        if not manifest.admits(member.peer):
            raise PeerMisbehaved(f"a roster with {member.peer}, whom the manifest does not admit", seal.coordinator)
        if member.weight > manifest.round.weight_cap:
            raise PeerMisbehaved(f"weight {member.weight} above the cap {manifest.round.weight_cap}", member.peer)
    if not any(member.peer == seal.coordinator for member in seal.members):
        raise PeerMisbehaved("a coordinator outside its roster", seal.coordinator)
    if seal.leases and any(member.weight for member in seal.members):
        raise PeerMisbehaved("a weight in a roster for leases alone", seal.coordinator)
    if bool(seal.rank) != bool(manifest.codec.window) or seal.rank > manifest.codec.rank:
        raise PeerMisbehaved(f"a rank of {seal.rank} where the manifest allows none such", seal.coordinator)
    rules, wire = manifest.round, layout.wire(seal.fragment, seal.rank)
    deadline = deadline_seconds(seal.members, wire, manifest.codec.name, rules.silence, rules.in_flight)
    if not 0.99 * deadline <= seal.deadline <= 1.01 * deadline:
        raise PeerMisbehaved(f"a deadline of {seal.deadline:.1f} s where {deadline:.1f} s follow", seal.coordinator)
    at = 0
    for piece in seal.parts:
        if piece.first != at or piece.count == 0 or piece.reducer >= count:
            raise PeerMisbehaved("parts that do not cover the fragment once", seal.coordinator)
        at += piece.count
    if at != (part.count if any(member.weight for member in seal.members) else 0):
        raise PeerMisbehaved(f"parts cover {at} of {part.count} chunks", seal.coordinator)


def check_body(body: Body, manifest: Manifest, layout: ChunkLayout) -> None:
    """Raise :class:`PeerMisbehaved` unless the body is sound in itself (its parent is not looked at)."""
    seal = body.seal
    check_seal(seal, manifest, layout)
    base, single = seal.base, manifest.round.in_flight == 1
    number = seal.round if single else body.height
    if (body.run, body.round, body.fragment) != (seal.run, number, seal.fragment) or (
        single and body.parent != base.id
    ):
        raise PeerMisbehaved("a body that does not fit its roster", seal.coordinator)
    weights = [member.weight for member in seal.members]
    count = layout.fragment(body.fragment).count
    if len(body.chunks) != (count if any(weights) else 0):
        raise PeerMisbehaved(f"a body of {len(body.chunks)} chunks, the fragment has {count}", seal.coordinator)
    for entry in body.chunks:
        if any(weights[i] == 0 for i in members_in(entry.contributors, len(weights))):
            raise PeerMisbehaved("a contributor of weight 0", seal.coordinator)
    tokens = averaged_tokens(seal, body.chunks, layout)
    parent = parent_of(body, manifest, layout)
    expected = (parent.height + 1, parent.outer_step + bool(body.chunks), parent.weight + tokens * (len(weights) > 1))
    if (body.height, body.outer_step, body.weight) != expected or not (single or _descends(parent, seal, layout)):
        raise PeerMisbehaved(
            "a body whose height, outer step or weight does not follow from its base", seal.coordinator
        )


def _descends(parent: Head, seal: Seal, layout: ChunkLayout) -> bool:
    """Whether a head may follow from a roster's base by the commits that were before this roster's turn."""
    base = seal.base
    steps = place_of(seal, layout) - base.outer_step
    if parent.outer_step != base.outer_step + steps:
        return False
    if parent.height == base.height:
        return parent == base
    return parent.height >= base.height + max(steps, 1) and parent.weight >= base.weight and parent.id != base.id


def parent_of(body: Body, manifest: Manifest, layout: ChunkLayout) -> Head:
    """The head that a body stands on: its roster's base where one round is in flight at a time, else what follows
    from the body itself. Raises :class:`PeerMisbehaved` where no head could be that."""
    if manifest.round.in_flight == 1:
        return body.seal.base
    alone = len(body.seal.members) == 1
    weight = body.weight - (0 if alone else averaged_tokens(body.seal, body.chunks, layout))
    height, outer_step = body.height - 1, body.outer_step - bool(body.chunks)
    if min(height, weight, outer_step) < 0:
        raise PeerMisbehaved(
            "a body whose height, outer step or weight does not follow from its base", body.seal.coordinator
        )
    # Heads count commits here: the numbers of rounds need not go up along the chain.
    return Head(body.parent, height, weight, height, outer_step)


def check_child(body: Body, parent: Position, manifest: Manifest, layout: ChunkLayout) -> None:
    """Raise :class:`PeerMisbehaved` unless the body follows from ``parent`` (state digest apart)."""
    if parent_of(body, manifest, layout) != parent.head:
        raise PeerMisbehaved("a body whose base is not the parent", body.seal.coordinator)
    kept = not estimates(parent.head.outer_step, manifest, layout)
    if kept and parent.rank and body.seal.rank != parent.rank:
        raise PeerMisbehaved(
            f"rank {body.seal.rank} after {parent.rank}, and no estimate between", body.seal.coordinator
        )
    leases, cursor = grant_leases(body.seal, parent.cursor, manifest.round.max_lease)
    tokens = parent.tokens + averaged_tokens(body.seal, body.chunks, layout)
    if (body.leases, body.cursor, body.tokens) != (leases, cursor, tokens):
        raise PeerMisbehaved(
            "a body whose leases, cursor or tokens do not follow from its parent", body.seal.coordinator
        )


def check_vote(body: Body, commit_id: bytes, member: int, signature: bytes, signer: Signer) -> bool:
    """Whether that member of the roster signed the commit."""
    members = body.seal.members
    return member < len(members) and signer.verify(PeerId(members[member].peer), vote_bytes(commit_id), signature)


def verify_commit(commit: Commit, manifest: Manifest, layout: ChunkLayout, signer: Signer) -> bytes:
    """Check a commit in itself: a sound body, and signatures of more than half of its roster.

    Returns the commit's id. Raises :class:`PeerMisbehaved`.
    """
    body = commit.body
    check_body(body, manifest, layout)
    commit_id = hash_of(body)
    voters = {vote.member for vote in commit.votes}
    if len(voters) != len(commit.votes) or len(voters) < majority(len(body.seal.members)):
        raise PeerMisbehaved(f"{len(voters)} distinct votes of {len(body.seal.members)} members are no majority")
    for vote in commit.votes:
        if not check_vote(body, commit_id, vote.member, vote.signature, signer):
            raise PeerMisbehaved(f"vote of member {vote.member} does not verify")
    return commit_id
