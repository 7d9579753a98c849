"""Commits that have come in and are not applied yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .commits import check_vote, majority, verify_commit
from .control import Ballot, Committed
from .core import Core
from .engagement import Engagement
from .errors import PeerMisbehaved
from .flights import Flight
from .heads import Heads
from .messages import Body, Commit, Head, Vote, better, hash_of
from .places import place
from .transport import PeerId

COMMITS = 16
"""Commits on the head that are kept until one of them is followed."""


class Incoming:
    """Commits on the head, and a few above it, kept until one of them is followed."""

    def __init__(self, core: Core, heads: Heads, engagement: Engagement) -> None:
        self._core = core
        self._heads = heads
        self._engagement = engagement
        self._signer = core.signer
        self._manifest = core.manifest
        self._layout = core.layout
        self._messenger = core.messenger
        self._directory = core.directory
        self._flights = core.flights
        self._refuse = core.refuse
        self._wake = core.agenda.wake
        # Beside those on the head there is room for all that one identity alone may make up above it.
        self.commits: deque[tuple[bytes, Commit]] = deque(maxlen=COMMITS + core.flights.width - 1)
        self._spurned: deque[bytes] = deque(maxlen=64)
        """Commits with a majority's signatures that are false all the same."""

    def offer(self, peer: PeerId, commit: Commit) -> None:
        """A commit arrived: this round's, the next one for this head, or a sign that this peer is behind."""
        body = commit.body
        commit_id = hash_of(body)
        own = self._core.head
        if commit_id == own.id or commit_id in self._spurned or body.height <= 0:
            return
        if body.parent != own.id and not better(Head(commit_id, body.height, body.weight, 0, 0), own):
            return
        try:
            verify_commit(commit, self._manifest, self._layout, self._signer)
        except PeerMisbehaved as error:
            self._refuse(peer, str(error))
            return
        head = Head(commit_id, body.height, body.weight, body.round, body.outer_step)
        self._heads.learn(peer, head)
        if (flight := self._flights.of(hash_of(body.seal))) is not None:
            flight.round.committed(commit)
            return
        if all(commit_id != known for known, _ in self.commits):
            if body.parent != own.id:
                if self._flights.ahead(body, own) and not self._told_ahead(body):
                    self.commits.append((commit_id, commit))  # those before it are about to come, too
                return
            self.commits.append((commit_id, commit))
            rival = self.rival(commit)
            if rival is not None and len(body.seal.members) == 1 < len(rival.round.peers):
                return  # a peer alone does not end a group's round; its commit waits
            calling, awaited = self._engagement.calling, self._engagement.awaited
            if calling is not None and self.takes(commit, calling.base, calling.fragment):
                calling.changed.set()
            if rival is not None:
                rival.end("another roster committed on the same base")
            if awaited is not None and self.takes(commit, awaited.base, awaited.fragment):
                self._engagement.resolve(None)
            self._wake.set()

    def _told_ahead(self, body: Body) -> bool:
        """Whether another commit above the next one is kept that has the height and the coordinator of this one: of
        what an identity makes up by itself no more is kept than of what it may have led."""
        said = body.height, body.seal.coordinator
        return any((known.body.height, known.body.seal.coordinator) == said for _, known in self.commits)

    def _keep(self, kept: Callable[[bytes, Body], bool]) -> None:
        """Forget those of which that does not hold."""
        rest = [(commit_id, commit) for commit_id, commit in self.commits if kept(commit_id, commit.body)]
        self.commits = deque(rest, maxlen=self.commits.maxlen)

    def _forget(self, commit_id: bytes) -> None:
        self._keep(lambda known, _: known != commit_id)

    def spurn(self, commit_id: bytes) -> None:
        """Never to be looked at again."""
        self._spurned.append(commit_id)
        self._forget(commit_id)

    def again(self, commit_id: bytes, commit: Commit) -> None:
        """It is to be followed first."""
        self.commits.appendleft((commit_id, commit))

    def new_head(self) -> None:
        """Forget what stands neither on the head nor above it."""
        self._keep(lambda _, body: body.parent == self._core.head.id or self._flights.ahead(body, self._core.head))

    def rosters(self) -> set[bytes]:
        """The rosters of those that are kept."""
        return {hash_of(commit.body.seal) for _, commit in self.commits}

    def overtakes(self, base: Head, fragment: int | None, *, alone: bool = True) -> bool:
        """Whether one of them takes the place that a roster, or call, was for; unless ``alone``, by more than one
        member."""
        return any(
            self.takes(commit, base, fragment) and (alone or len(commit.body.seal.members) > 1)
            for _, commit in self.commits
        )

    def takes(self, commit: Commit, base: Head, fragment: int | None) -> bool:
        """Whether a commit on this head takes the place that another roster, or call, was for."""
        if not self._flights.several:
            return True
        # One of leases alone takes none.
        if not commit.body.chunks or fragment is None or commit.body.parent != self._core.head.id:
            return False
        return place(base, fragment, self._layout) == self._core.head.outer_step

    def rival(self, commit: Commit) -> Flight | None:
        """The round in flight whose place a commit on this head takes."""
        for flight in self._flights:
            # A frozen island is unfrozen by any commit, and must not train on while a round averages what it holds.
            if flight.paused or self.takes(commit, flight.round.seal.base, flight.round.seal.fragment):
                return flight
        return None

    def to_follow(self) -> tuple[bytes, Commit] | None:
        """The next commit on this head that is to be followed: a round whose place it takes has to end before."""
        for commit_id, commit in self.commits:
            if commit.body.parent != self._core.head.id:
                continue
            if (rival := self.rival(commit)) is None:
                self._forget(commit_id)
                return commit_id, commit
            if len(commit.body.seal.members) > 1 or len(rival.round.peers) == 1:
                rival.end("another roster committed on the same base")
        return None

    def merge(self, ballot: Ballot) -> bool:
        """Votes for a void roster of this base; True when they complete a commit."""
        body = ballot.body
        if body.parent != self._core.head.id or hash_of(body.seal) != ballot.roster:
            return False
        limbo = self._flights.limbo_of(ballot.roster)
        commit_id = hash_of(body)
        votes = {
            vote.member: vote for vote in ballot.votes
            if check_vote(body, commit_id, vote.member, vote.signature, self._signer)
        }  # fmt: skip
        if limbo is not None and commit_id in limbo.round.proposals:
            known = limbo.round.proposals[commit_id].votes
            known.update((member, vote.signature) for member, vote in votes.items() if member not in known)
            votes = {member: Vote(member, signature) for member, signature in known.items()}
        if len(votes) < majority(len(body.seal.members)):
            return False
        commit = Commit(body, [votes[member] for member in sorted(votes)])
        try:
            verify_commit(commit, self._manifest, self._layout, self._signer)
        except PeerMisbehaved:
            return False
        if all(commit_id != known_id for known_id, _ in self.commits):
            self.commits.append((commit_id, commit))
            self._messenger.post_all(self._directory.known, Committed(commit))
        self._wake.set()
        return True
