"""A coordinator's call: who answers, who enters, and the roster that follows (design: "One round", 2)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from .control import Ballot, Enter
from .deadline import deadline_seconds
from .layout import ChunkLayout
from .manifest import Manifest
from .messages import Head, Limit, Member, Seal, hash_of
from .parts import split_parts
from .transport import PeerId


@dataclass
class Calling:
    """One call in progress. ``expected``: those whose answer is waited for, as they were heard a moment ago."""

    nonce: bytes
    round: int
    base: Head
    expected: set[PeerId]
    leases: bool = False
    """For leases alone: nobody brings a weight."""
    entered: dict[PeerId, Member] = field(default_factory=dict)
    answered: set[PeerId] = field(default_factory=set)
    """Who entered or refused; the busy are asked again."""
    busy: dict[PeerId, PeerId] = field(default_factory=dict)
    """Who has entered another's call, and whose."""
    seen: list[Ballot] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    fragment: int | None = None
    """What the round is of; None: whose turn it is at the base."""

    def enter(self, peer: PeerId, message: Enter) -> None:
        """A peer enters, once; what it says of another than itself is ignored."""
        if message.member.peer == peer and peer not in self.entered:
            self.entered[peer] = message.member
            self.seen.extend(message.seen)
        self.busy.pop(peer, None)
        self.answer(peer)

    def answer(self, peer: PeerId) -> None:
        self.answered.add(peer)
        self.changed.set()

    def complete(self) -> bool:
        """Whether everyone who is waited for has answered."""
        return self.expected <= self.answered


def unite(ballots: Iterable[Ballot]) -> list[Ballot]:
    """One ballot for each body, with all votes that were shown for it: two members may know two votes each."""
    united: dict[bytes, Ballot] = {}
    for ballot in ballots:
        key = hash_of(ballot.body)
        known = united.get(key)
        votes = list(known.votes) if known is not None else []
        votes += [vote for vote in ballot.votes if vote not in votes]
        united[key] = Ballot(ballot.roster, ballot.body, votes)
    return list(united.values())


def make_seal(
    calling: Calling, own: Member, *, coordinator: PeerId, manifest: Manifest, layout: ChunkLayout,
    unfit: Collection[PeerId] = (), leases: bool = False, rank: int = 0,
) -> Seal:  # fmt: skip
    """The roster of those who entered, the own included, for the fragment called for: most uncommitted tokens first
    when there are too many.

    unfit: members that get no part to reduce, since they failed at one on this base. rank: of the factors, where the
    manifest's is estimated anew.
    """
    cap = 0 if leases else manifest.round.weight_cap
    fragment = layout.due(calling.base.outer_step) if calling.fragment is None else calling.fragment
    wire = layout.wire(fragment, rank)
    able = [m for m in calling.entered.values() if m.weight <= cap and manifest.admits(m.peer)]
    able.sort(key=lambda member: (-member.weight, member.peer))
    members = sorted([own, *able[: manifest.round.max_group - 1]], key=lambda member: member.peer)
    weighed = any(member.weight for member in members)
    fit = [(m.reachable and m.peer not in unfit, m.upload, m.download) for m in members]
    if not any(reachable for reachable, _, _ in fit):
        fit = [(m.peer == coordinator, m.upload, m.download) for m in members]
    rules = manifest.round
    deadline = deadline_seconds(members, wire, manifest.codec.name, rules.silence, rules.in_flight)
    return Seal(
        run=manifest.run_id,
        round=calling.round,
        fragment=fragment,
        base=calling.base,
        coordinator=coordinator,
        nonce=calling.nonce,
        members=members,
        parts=split_parts(fit, wire.count) if weighed else [],
        leases=leases,
        limit=Limit(deadline, rank) if rank else deadline,
    )
