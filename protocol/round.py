"""One round after its seal: reduce, sign, until a commit or a void roster (design: "One round", 3 and 4)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .averaged import check_all, hash_chunk, unpack
from .candidates import rank
from .codecs import averages_codec
from .commits import check_body, check_child, check_vote, majority, make_body
from .control import Ballot, Committed, Control, Ping, Reassign, Voided
from .deadline import slowest_link, transfer_seconds
from .digest import BytesLike
from .encoder import Encoded
from .errors import Fault, PeerMisbehaved, PeerSlow, RoundVoid, TransportError
from .identity import Signer
from .layout import ChunkLayout
from .manifest import Manifest
from .messages import Body, ChunkEntry, Commit, Part, Seal, Vote, hash_of, vote_bytes
from .messenger import Messenger
from .places import place_of
from .rates import Account
from .reduce import PROTOCOL as REDUCE
from .reduce import Hello, Progress, Reducer, exchange
from .refusals import Events
from .replica import Replica
from .transport import PeerId, Stream, Transport
from .wakeup import Wakeup

MAX_PROPOSALS = 2
"""Bodies looked at for one roster from one member: each may lead, and once more after reducers were replaced."""
MAX_WORK = 8
"""Parts a member that this peer works on at once; an honest leader's reassignments leave a few."""
HERALDS = 3
"""Members that send the commit to everyone: those who lead first."""
CHUNK_RETRY = 0.2
"""Share of T between two attempts to reach a reducer or a donor."""


@dataclass
class Surroundings:
    """What a round needs of its peer."""

    transport: Transport
    messenger: Messenger
    signer: Signer
    manifest: Manifest
    layout: ChunkLayout
    replica: Replica
    events: Events
    fetch: Callable[[Body, list[PeerId], Callable[[bytes], bytes | None]], Awaitable[list[bytes]]]
    """Get the averaged chunks of a body from several peers, but those that are here. Raises TransportError."""
    everyone: Callable[[], Iterable[PeerId]]
    obsolete: Callable[[], bool]
    """Whether a better head than the round's base is known: then nothing is signed."""
    afterwards: Callable[[Coroutine[Any, Any, None]], object] = asyncio.ensure_future
    """Runs what a round that has committed still has to do, a few seconds at most."""
    carried: Callable[[], tuple[int, int]] | None = None
    """Bytes sent and received by all rounds of this peer so far; None where there is one at a time."""


@dataclass
class Proposal:
    """A body for this roster, with the votes seen for it."""

    body: Body
    by: PeerId
    """Who sent it first."""
    refused: bool = False
    """Whether this peer does not sign it, as things stand."""
    votes: dict[int, bytes] = field(default_factory=dict)


class Round:
    """A sealed roster on its way to a commit. ``run`` ends with the commit, or raises :class:`RoundVoid`.

    theta: this peer's frozen local parameters (float32, all of them; those of the fragment are read), or what the
    island has encoded of them; None when its weight is 0.
    """

    def __init__(
        self, around: Surroundings, seal: Seal, signature: bytes, roster_id: bytes,
        theta: NDArray[np.float32] | Encoded | None,
    ) -> None:  # fmt: skip
        self.around = around
        self.seal = seal
        self.signature = signature
        self.roster_id = roster_id
        self.peers = [PeerId(member.peer) for member in seal.members]
        self.me = self.peers.index(around.transport.peer_id)
        coordinator = self.peers.index(PeerId(seal.coordinator))
        rest = sorted(
            (m for m in range(len(self.peers)) if m != coordinator),
            key=lambda m: rank(seal.run, seal.base.id, self.peers[m]),
        )
        self._order = [coordinator, *rest]
        """Who leads, and who after them: the coordinator, then the others by rank."""
        self.theta = theta if seal.members[self.me].weight else None
        self._chunks = around.layout.wire(seal.fragment, seal.rank)
        """The chunks of the round's fragment as they travel."""
        self._merging = around.manifest.merging.of(seal.fragment)
        self._sends: Callable[[int], BytesLike] | None = None
        self.silence = around.manifest.round.silence
        self.started = around.transport.now()
        self.ends = self.started + seal.deadline
        self.place = place_of(seal, around.layout)
        """The outer step of the head that its commit has to stand on."""
        self._single = around.manifest.round.in_flight == 1
        self.outcome: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()
        self.proposals: dict[bytes, Proposal] = {}
        self.signed: bytes | None = None
        self.held: dict[bytes, bytes] = {}
        """Averaged chunks by hash; two reducers may have averaged the same chunk."""
        self.chunks: list[bytes | None] = [None] * sum(part.count for part in seal.parts)
        """Hash of the version of each chunk that this peer would propose."""
        self._generation = 0
        self._given: list[Reassign] = []
        """What this peer gave to others as the leader, repeated since a message may be lost."""
        self._serving: dict[tuple[int, int], Reducer] = {}
        self._work: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._reducer_of: dict[tuple[int, int], int] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._over = False
        """Whether :meth:`run` is ending, or has: votes for a void roster are still counted, and nothing is begun."""
        self._progress: dict[tuple[int, int], float] = {}
        """When each part last brought a new average."""
        self._exchanges: dict[asyncio.Task[None], Progress] = {}
        self._distrusted: set[int] = set()
        """Reducers that broke the protocol towards this peer."""
        self.failed_reducers: dict[PeerId, None] = {}
        """Members whose parts had to be given to others, or that told two stories."""
        self.faulty: dict[PeerId, None] = {}
        """Reducers that failed as far as this peer saw itself, whatever others say of them."""
        self._gone: set[int] = set()
        self._streams: dict[int, Stream] = {}
        self._sent = self._received = 0
        self._before = around.carried() if around.carried is not None else None
        self._whole: Account | None = None
        self._changed = Wakeup()

    @property
    def reducing(self) -> bool:
        """Whether averages are still missing here."""
        return None in self.chunks

    @property
    def has_commit(self) -> bool:
        """Whether a commit of this roster is known, with or without its chunks."""
        outcome = self.outcome
        return outcome.done() and not outcome.cancelled() and outcome.exception() is None

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes sent and received for this round so far."""
        streams = self._streams.values()
        return (
            self._sent + sum(stream.bytes_sent for stream in streams),
            self._received + sum(stream.bytes_received for stream in streams),
        )

    def stay(self, until: float) -> None:
        """Last until that moment of ``Transport.now()`` at least, since an earlier round is in flight; before
        :meth:`run`."""
        self.ends = max(self.ends, until)

    def news(self) -> None:
        """The head is another: it may be this round's turn."""
        self._changed.pulse()

    # --- the whole -----------------------------------------------------------------------------------------------

    async def run(self) -> Commit:
        """Reduce and sign. Raises :class:`RoundVoid`; all tasks have ended when it returns."""
        try:
            for part in self.seal.parts:
                self._take(part)
            self._spawn(self._ping())
            self._spawn(self._lead())
            async with asyncio.timeout(max(self.ends - self.around.transport.now(), 0)):
                commit = await self.outcome
            await self._complete(commit)
            return commit
        except TimeoutError:
            reason = f"no commit within {self.seal.deadline:.1f} s"
            if self.outcome.done() and not self.outcome.cancelled():
                reason = "the commit's chunks did not arrive in time"
            self._say_void(reason)
            raise RoundVoid(reason) from None
        except RoundVoid as void:
            self._say_void(str(void))
            raise
        except PeerMisbehaved as error:
            self._say_void(str(error))
            raise RoundVoid(str(error)) from None
        finally:
            await self._end()

    def _say_void(self, reason: str) -> None:
        self.around.messenger.post_all(self.peers, Voided(self.roster_id, reason[:200]))

    async def _end(self) -> None:
        self._over = True
        committed = self.has_commit
        # Where only the explicit end of a stream is missing, it is waited for: nobody needs it, but its lack is told.
        ending = [t for t, p in self._exchanges.items() if committed and p.whole and p.written and not t.done()]
        if ending:
            self.around.afterwards(self._see_off(ending))
        tasks = [task for task in self._tasks if task not in ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for reducer in self._serving.values():
            # After a commit others may still be reading their averages; after a void round nobody wants them.
            asyncio.get_running_loop().call_later(self.silence if committed else 0.0, reducer.close)
        if not self.outcome.done():
            self.outcome.cancel()

    async def _see_off(self, tasks: list[asyncio.Task[None]]) -> None:
        try:
            # An end within T of the last average, and a close within T of that.
            await asyncio.wait(tasks, timeout=2 * self.silence)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._reaped)
        return task

    def _reaped(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self.outcome.done():
            self.outcome.set_exception(error)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self.silence / 3)
            self.around.messenger.post_all(self.peers, Ping(self.roster_id))

    # --- reduce --------------------------------------------------------------------------------------------------

    def _own(self) -> Callable[[int], BytesLike] | None:
        theta, replica = self.theta, self.around.replica
        if theta is None:
            return None
        if self._sends is None:
            self._sends = replica.sender(theta, self.seal.fragment)
        return self._sends

    def _take(self, part: Part) -> None:
        """Begin to work on a part, as its reducer or as one of its contributors."""
        key = (part.first, part.count)
        self._reducer_of[key] = part.reducer
        self._progress[key] = self.around.transport.now()
        if part.reducer == self.me:
            around, cutoff = self.around, self.ends - 2 * self.silence
            reducer = Reducer(
                around.transport, self._chunks, around.replica.codec, self.seal.members, self.me, part,
                merging=self._merging, silence=self.silence, cutoff=cutoff, sink=self._hold,
                refused=self._refused,
                floor=lambda: max(self.started, around.messenger.epoch), silent=self._silent,
            )  # fmt: skip
            self._serving[key] = reducer
            self._work[key] = self._spawn(reducer.run(self._own()))
        else:
            progress = Progress.of(part)
            task = self._work[key] = self._spawn(self._exchange(part, progress))
            self._exchanges[task] = progress
        self._changed.pulse()

    def _refused(self, member: int, reason: str, fault: Fault = Fault.HOSTILE) -> None:
        if fault is Fault.LOCAL:
            self.around.events(
                "warning", message=f"round {self.seal.round} goes on without {self.peers[member]}: {reason}"
            )
            return
        self.around.events(
            "refused", peer=self.peers[member], reason=reason, fault=fault.value, round=self.seal.round
        )  # fmt: skip

    def _hold(self, index: int, data: bytes, digest: bytes | None = None) -> None:
        """An averaged chunk is here. digest: its hash, where that is known."""
        digest = hash_chunk(data) if digest is None else digest
        self.held[digest] = data
        for first, count in self._progress:
            if first <= index < first + count:
                self._progress[(first, count)] = self.around.transport.now()
        if self.chunks[index] is None:
            self.chunks[index] = digest
            if None not in self.chunks:
                self._whole = self.account()
        self._changed.pulse()

    def account(self) -> Account:
        """What this peer's link carried, up to the last average, or until now without it."""
        if self._whole is not None:
            return self._whole
        layout, codec = self._chunks, self.around.replica.codec
        averages = averages_codec(codec.name)
        weighed = sum(member.weight > 0 for member in self.seal.members)
        sizes = [layout.size(i) for i in range(layout.count)]
        contribution = sum(map(codec.encoded_size, sizes)) / layout.count
        average = sum(averages.average_size(size, weighed) for size in sizes) / layout.count
        here = [len(self.held[digest]) for digest in self.chunks if digest is not None]
        if here and not averages.fixed:
            average = sum(here) / len(here)
        (sent, received), load = self.carried, 1.0
        if self.around.carried is not None and self._before is not None:
            # What the link carried in this time, of all rounds together.
            own, total = sent + received, self.around.carried()
            sent, received = total[0] - self._before[0], total[1] - self._before[1]
            load = max((sent + received) / max(own, 1), 1.0)
        return Account(
            self.seal, self.me, contribution, average,
            seconds=self.around.transport.now() - self.started, sent=sent, received=received,
            whole=bool(self.chunks) and None not in self.chunks, load=load,
        )  # fmt: skip

    def _open(self, stream: Stream) -> None:
        self.around.messenger.watch(stream)
        self._streams[id(stream)] = stream

    def _shut(self, stream: Stream) -> None:
        self.around.messenger.unwatch(stream)
        if self._streams.pop(id(stream), None) is not None:
            self._sent += stream.bytes_sent
            self._received += stream.bytes_received

    async def _exchange(self, part: Part, progress: Progress) -> None:
        """Contribute to another's part until all its averages are here; reconnects as long as the round lasts."""
        around, reducer = self.around, self.peers[part.reducer]
        while True:
            stream: Stream | None = None
            try:
                stream = await around.transport.open(reducer, REDUCE, timeout=self.silence)
                self._open(stream)
                hello = Hello(self.seal, self.signature, part.first, part.count, progress.due)
                await exchange(
                    stream, hello, self.roster_id, progress, transport=around.transport, layout=self._chunks,
                    codec=around.replica.codec, members=self.seal.members, me=self.me, merging=self._merging,
                    silence=self.silence, own=self._own(), sink=self._hold,
                )  # fmt: skip
                return
            except (PeerMisbehaved, PeerSlow) as error:
                self._distrusted.add(part.reducer)
                self.faulty[reducer] = None
                self._refused(part.reducer, str(error), error.fault)
                self._changed.pulse()
                return
            except (TransportError, TimeoutError):
                if progress.whole:  # all that this peer wants, even if the end never came
                    return
            finally:
                if stream is not None:
                    self._shut(stream)
                    await stream.close()
            await asyncio.sleep(self.silence * CHUNK_RETRY)

    async def serve(self, stream: Stream, hello: Hello) -> None:
        """A member opened a reduce stream to this peer. Raises TransportError."""
        member = self.peers.index(stream.peer)
        key = (hello.first, hello.count)
        waited = self.around.transport.now() + self.silence
        # The part may be one that has just been reassigned to this peer, and the news is still under way.
        while key not in self._serving and self.around.transport.now() < waited:
            await self._changed.wait(self.silence / 4)
        reducer = self._serving.get(key)
        if reducer is None:
            # It may follow a leader that this peer does not.
            raise PeerSlow(f"part {hello.first}+{hello.count} is not this peer's, for all that it was told")
        self._open(stream)
        try:
            await reducer.accept(member, stream, hello, self.roster_id)
        finally:
            self._shut(stream)

    # --- messages ------------------------------------------------------------------------------------------------

    def receive(self, peer: PeerId, message: Control) -> None:
        """A message of this roster from one of its members."""
        if peer not in self.peers:
            return
        if isinstance(message, Reassign):
            if not self._over and self._entitled(self.peers.index(peer)):
                self._reassigned(message)
        elif isinstance(message, Ballot):
            self.learn(message, peer)
        elif isinstance(message, Voided):
            self._gone.add(self.peers.index(peer))
        self._changed.pulse()

    def learn(self, ballot: Ballot, sender: PeerId | None = None) -> None:
        """A body for this roster, and votes for it. Raises :class:`PeerMisbehaved` when it is unsound."""
        commit_id = hash_of(ballot.body)
        proposal = self.proposals.get(commit_id)
        if proposal is None:
            check_body(ballot.body, self.around.manifest, self.around.layout)
            if hash_of(ballot.body.seal) != self.roster_id:
                raise PeerMisbehaved("a ballot with another roster's body")
            by = sender or self.around.transport.peer_id
            # Where rounds are in flight beside one another the head may change under a proposal.
            most = MAX_PROPOSALS if self._single else 2 * MAX_PROPOSALS
            if sum(proposal.by == by for proposal in self.proposals.values()) >= most:
                raise PeerMisbehaved(f"more than {most} bodies for one roster from one member", by)
            proposal = self.proposals[commit_id] = Proposal(ballot.body, by)
            if not self._over:
                self._spawn(self._consider(commit_id, proposal))
        for vote in ballot.votes:
            if vote.member not in proposal.votes and check_vote(
                ballot.body, commit_id, vote.member, vote.signature, self.around.signer
            ):
                proposal.votes[vote.member] = vote.signature
        unheard = self.signed == commit_id and all(vote.member != self.me for vote in ballot.votes)
        if unheard and sender is not None and sender == self.peers[self.leader()]:
            # The own vote has not reached who leads: a stream broke, or a daemon died with it.
            vote = Vote(self.me, proposal.votes[self.me])
            self.around.messenger.post(sender, Ballot(self.roster_id, ballot.body, [vote]))
        self._count(proposal)

    def _count(self, proposal: Proposal) -> None:
        if len(proposal.votes) < majority(len(self.peers)) or self.outcome.done():
            return
        votes = [Vote(member, proposal.votes[member]) for member in sorted(proposal.votes)]
        self.committed(Commit(proposal.body, votes))

    def committed(self, commit: Commit) -> None:
        """A verified commit of this roster: completed here, or sent by a peer. The first members in order tell all."""
        if not self.outcome.done():
            self.outcome.set_result(commit)
            # All members count votes, so three who tell everyone are enough; who misses it asks by its pings.
            if self.me in self._order[:HERALDS]:
                self.around.messenger.post_all(self.around.everyone(), Committed(commit))

    # --- lead ----------------------------------------------------------------------------------------------------

    def _silent(self, member: int) -> float:
        """Seconds since anything came from a member, counted from the seal at the earliest."""
        if member == self.me:
            return 0.0
        return self.around.messenger.silent_for(self.peers[member], self.started)

    def _alive(self, member: int) -> bool:
        return member not in self._gone and self._silent(member) <= self.silence

    def leader(self) -> int:
        """The member that leads now: the first in order that is not silent."""
        return next(member for member in self._order if self._alive(member))

    def _entitled(self, sender: int) -> bool:
        """Whether that member may lead, as far as can be seen from here: all before it have been silent for a while.
        Half of T, since others may have heard them last a little earlier."""
        for member in self._order:
            if member == sender:
                return True
            silent = self.around.messenger.silent_for(self.peers[member], self.started)
            if member == self.me or (member not in self._gone and silent < self.silence / 2):
                return False
        return False

    async def _lead(self) -> None:
        """Lead while it is this member's turn: replace silent reducers, then propose; end what cannot be won."""
        proposed_at, repeated_at = float("-inf"), self.around.transport.now()
        while not self.outcome.done():
            if self.around.transport.now() >= self.ends:
                # Timers may stand still while a machine is suspended; the round's end does not move.
                self.outcome.set_exception(RoundVoid(f"no commit within {self.seal.deadline:.1f} s"))
                return
            self._give_up_if_hopeless()
            if self.leader() == self.me:
                now = self.around.transport.now()
                if now - repeated_at > self.silence / 2:
                    repeated_at = now
                    for message in self._given:
                        self.around.messenger.post_all(self.peers, message)
                if None in self.chunks:
                    self._replace_silent()
                elif now - proposed_at > self.silence / 2 and self._in_turn():
                    proposed_at = now
                    await self._propose()
            await self._changed.wait(self.silence / 5)

    def _give_up_if_hopeless(self) -> None:
        """End early when no body can win any more (silence, split signatures, members that gave up)."""
        if self.outcome.done():
            return
        count, needed = len(self.peers), majority(len(self.peers))
        floor, messenger = self.started, self.around.messenger
        lost = set(self._gone)
        if self.around.transport.now() - floor > 2 * self.silence:
            lost |= {
                member for member in range(count)
                if member != self.me and messenger.silent_for(self.peers[member], floor) > 2 * self.silence
            }  # fmt: skip
        voted = {member for proposal in self.proposals.values() for member in proposal.votes}
        free = count - len(voted | lost)
        best = max((len(proposal.votes) for proposal in self.proposals.values()), default=0)
        if best + free < needed:
            self.outcome.set_exception(RoundVoid(f"{len(lost)} of {count} members are gone, {needed} are needed"))

    def _replace_silent(self) -> None:
        """Give the missing chunks of silent reducers to live members; contributors encode again from x."""
        missing = [index for index, digest in enumerate(self.chunks) if digest is None]
        parts = list(self._parts())
        working = [part for part in parts if self._works(part)]
        orphaned = [i for i in missing if not any(p.first <= i < p.first + p.count for p in working)]
        if not orphaned:
            return
        for part in parts:
            if part not in working and any(part.first <= i < part.first + part.count for i in orphaned):
                self.failed_reducers[self.peers[part.reducer]] = None
                self.faulty[self.peers[part.reducer]] = None
                if part.reducer not in self._distrusted:  # else it has been named already
                    fault = Fault.SLOW if self._alive(part.reducer) else Fault.GONE
                    self._refused(part.reducer, f"its part {part.first}+{part.count} stands still, or nearly", fault)
        members = self.seal.members
        able = [
            m for m in range(len(members))
            if m == self.me
            or (self._alive(m) and members[m].reachable and self.peers[m] not in self.failed_reducers)
        ]  # fmt: skip
        runs: list[list[int]] = []
        for index in orphaned:
            if runs and runs[-1][-1] == index - 1:
                runs[-1].append(index)
            else:
                runs.append([index])
        # Oneself first: the leader is the one of whom everybody knows that it is alive.
        able.sort(key=lambda member: member != self.me)
        given = [Part(able[i % len(able)], run[0], len(run)) for i, run in enumerate(runs)]
        message = Reassign(self.roster_id, self._generation + 1, given)
        told = [[self.peers[part.reducer], part.first, part.count] for part in given]
        self.around.events("reassign", round=self.seal.round, parts=told)
        self.around.messenger.post_all(self.peers, message)
        self._given.append(message)
        self._reassigned(message)

    def _works(self, part: Part) -> bool:
        """Whether a reducer may still deliver: it is not silent, and it has not stood still for long. A process whose
        threads or disk hang goes on answering, so life alone proves nothing."""
        if part.reducer == self.me:
            return True
        if part.reducer in self._distrusted:
            return False
        around = self.around
        size = sum(
            around.replica.codec.encoded_size(self._chunks.size(i)) for i in range(part.first, part.first + part.count)
        )
        # A reducer may wait T for a member; beyond that, another must still have the time to average the part anew.
        patience = 1.5 * self.silence + transfer_seconds(size, len(self.peers), slowest_link(self.seal.members))
        still = around.transport.now() - max(self._progress[(part.first, part.count)], around.messenger.epoch)
        return self._alive(part.reducer) and still <= patience and part not in self._late()

    def _late(self) -> list[Part]:
        """Parts of which averages come, but so slowly that nobody else could average the rest in time; none when it is
        half of all parts or more, which says something about this member or the links."""
        now, budget = self.around.transport.now(), max(self.seal.deadline - 4 * self.silence, 0.0)
        began = max(self.started, self.around.messenger.epoch)

        def late(part: Part) -> bool:
            done = sum(self.chunks[i] is not None for i in range(part.first, part.first + part.count))
            # Three times the ideal transfer, since a reducer lets its members take twice that.
            due = began + 2 * self.silence + 0.75 * budget * (done + 1) / part.count
            return done < part.count and now > due

        parts = [part for part in self.seal.parts if late(part)]
        return parts if 2 * len(parts) <= max(len(self.seal.parts), 2) else []

    def _parts(self) -> Iterable[Part]:
        for first, count in self._work:
            yield Part(self._reducer_of[(first, count)], first, count)

    def _reassigned(self, message: Reassign) -> None:
        if not self._generation < message.generation <= self._generation + len(self.peers):
            return
        at = 0
        for part in message.parts:
            if part.reducer >= len(self.peers) or part.count == 0 or part.first < at:
                raise PeerMisbehaved("a reassignment whose parts overlap, or are not in order")
            at = part.first + part.count
        if at > len(self.chunks):
            raise PeerMisbehaved("a reassignment outside the fragment")
        if len(self._work) + len(message.parts) > MAX_WORK * len(self.peers):
            # Each is a task and a stream, to whomever the leader names.
            raise PeerMisbehaved(f"a reassignment of {len(message.parts)} parts, with {len(self._work)} in work")
        self._generation = message.generation
        for part in message.parts:
            for old in [k for k in self._work if k[0] < part.first + part.count and part.first < k[0] + k[1]]:
                # Its reducer is silent to the leader; what it still sends would only make a second version.
                whole = all(i in range(part.first, part.first + part.count) for i in range(old[0], old[0] + old[1]))
                if old in self._reducer_of and self._reducer_of[old] != self.me:
                    replaced = self.peers[self._reducer_of[old]]
                    self.failed_reducers[replaced] = None
                    if self.around.transport.now() - self._progress[old] > self.silence:
                        self.faulty[replaced] = None
                if whole:
                    self._work.pop(old).cancel()
                    self._progress.pop(old, None)
                    if (reducer := self._serving.pop(old, None)) is not None:
                        reducer.close()
            self._take(part)

    async def _propose(self) -> None:
        """Propose the body: one seen already if there is any, else the one that follows from the chunks held."""
        around = self.around
        position = around.replica.position
        seen = [
            proposal for proposal in self.proposals.values()
            if proposal.votes and not proposal.refused and self._stands(proposal.body)
        ]  # fmt: skip
        if self.signed is not None and self._stands(self.proposals[self.signed].body):
            proposal = self.proposals[self.signed]
        elif seen:
            proposal = max(seen, key=lambda p: (len(p.votes), hash_of(p.body)))
        else:
            entries: list[ChunkEntry] = []
            for digest in self.chunks:
                assert digest is not None
                pieces = self._merging.pieces(len(entries))
                entries.append(ChunkEntry(digest, unpack(self.held[digest], pieces).contributors))
            state = await around.replica.digest(around.transport)
            if around.replica.position != position:
                return  # another commit came first; the next proposal stands on that
            body = make_body(
                self.seal, self.roster_id, position, state, entries, around.manifest, around.layout
            )  # fmt: skip
            self.learn(Ballot(self.roster_id, body, []))
            proposal = self.proposals[hash_of(body)]
        votes = [Vote(member, signature) for member, signature in sorted(proposal.votes.items())]
        around.messenger.post_all(self.peers, Ballot(self.roster_id, proposal.body, votes))

    # --- sign ----------------------------------------------------------------------------------------------------

    def _in_turn(self) -> bool:
        """Whether the commits before this round's are all there. Signing waits for that, and nothing else does."""
        return self._single or self.around.replica.position.head.outer_step == self.place

    def _stands(self, body: Body) -> bool:
        """Whether a body stands on this peer's head."""
        return self._single or body.parent == self.around.replica.position.head.id

    async def _until_it_stands(self, body: Body) -> bool:
        """Wait until this peer's head is what a body stands on; False when it will not be any more."""
        while not self._stands(body):
            if self.around.replica.position.head.outer_step > self.place or self.outcome.done():
                return False
            await self._changed.wait(self.silence * CHUNK_RETRY)
        return True

    async def _consider(self, commit_id: bytes, proposal: Proposal) -> None:
        """Sign a body once everything that its signature claims is true here."""
        around = self.around
        body = proposal.body
        try:
            if not await self._until_it_stands(body):
                proposal.refused = True
                return
            check_child(body, around.replica.position, around.manifest, around.layout)
            if body.state != await around.replica.digest(around.transport):
                raise PeerMisbehaved("a body that attests another state than this peer's", self.seal.coordinator)
            await self._compare(body, proposal)
            await self._gather(body, proposal)
            await self._compare(body, proposal)
        except PeerMisbehaved as error:
            # Whoever made it, this is who passed it on, or voted for it, without having checked.
            proposal.refused = True
            self._refused(self.peers.index(proposal.by), str(error))
            return
        late = around.transport.now() >= self.ends
        if self.signed is not None or self.outcome.done() or around.obsolete() or late or not self._stands(body):
            return
        # One signature per roster, ever: after a restart the nonce in the roster is no longer this process's.
        self.signed = commit_id
        signature = around.signer.sign(vote_bytes(commit_id))
        around.messenger.post_all(self.peers, Ballot(self.roster_id, body, [Vote(self.me, signature)]))
        proposal.votes[self.me] = signature
        self._count(proposal)

    async def _compare(self, body: Body, proposal: Proposal) -> None:
        """While no reducer has been replaced there is one average of each chunk: wait while a body has another.

        Then either the proposer lies, or the reducer told two stories. It is the reducer when others, of whom each
        signs only what its reducer sent it, have voted for the body and this vote decides; otherwise the body is not
        signed, unless news of a replaced reducer comes.
        """
        began = self.around.transport.now()
        while (index := self._foreign(body)) is not None:
            reducer = next(part.reducer for part in self.seal.parts if part.first <= index < part.first + part.count)
            proposer = self.peers.index(proposal.by)
            others = set(proposal.votes) - {self.me, reducer}
            if others - {proposer} and len(others) >= majority(len(self.peers)) - 1:
                self._two_stories(reducer, f"another average of chunk {index} than the others have from it")
                break
            if not proposal.refused and self.around.transport.now() - began > self.silence / 2:
                proposal.refused = True
                reason = f"chunk {index} is not proposed as its reducer sent it, and one of the two lies:"
                self._refused(proposer, f"{reason} this peer, or {self.peers[reducer]}")
                if proposer == self.leader() or others - {proposer}:
                    self._two_stories(reducer, f"{reason} this reducer, or {proposal.by}")
            await self._changed.wait(self.silence * CHUNK_RETRY)
        proposal.refused = False

    def _two_stories(self, reducer: int, reason: str) -> None:
        if self.peers[reducer] not in self.failed_reducers:
            self.failed_reducers[self.peers[reducer]] = None
            self._refused(reducer, reason)

    def _foreign(self, body: Body) -> int | None:
        """The first chunk of a body that is another than the one and only average that its reducer sent here."""
        if self._generation > 0:
            return None
        pairs = enumerate(zip(self.chunks, body.chunks, strict=True))
        return next((index for index, (held, entry) in pairs if held is not None and held != entry.hash), None)

    async def _gather(self, body: Body, proposal: Proposal | None) -> None:
        """Hold every chunk of a body, fetching what is lacking from members, those who signed it first.

        Raises :class:`PeerMisbehaved` when what was signed for is not sound.
        """
        around, began = self.around, self.around.transport.now()
        while missing := [i for i, entry in enumerate(body.chunks) if entry.hash not in self.held]:
            # What its reducer is about to send anyway is not fetched beside it.
            coming = all(self.chunks[i] is None for i in missing) and all(
                self._alive(part.reducer) and part.reducer not in self._distrusted for part in self._parts()
            )
            if coming and around.transport.now() - began < self.silence / 2:
                await self._changed.wait(self.silence * CHUNK_RETRY)
                continue
            voters = list(proposal.votes) if proposal is not None else []
            ordered = [*voters, *(m for m in range(len(self.peers)) if m not in voters)]
            donors = [self.peers[m] for m in ordered if m != self.me and self._alive(m)]
            try:
                for entry, data in zip(body.chunks, await around.fetch(body, donors, self.held.get), strict=True):
                    self.held[entry.hash] = data
            except TransportError:
                await self._changed.wait(self.silence * CHUNK_RETRY)
        chunks = [self.held[entry.hash] for entry in body.chunks]
        await around.transport.offload(
            check_all, body, chunks, around.layout, around.replica.codec, around.manifest.merging
        )  # fmt: skip

    async def _complete(self, commit: Commit) -> None:
        """After the majority: hold all of the commit's chunks. Bounded by the deadline and T beyond it."""
        limit = max(self.ends - self.around.transport.now(), 0) + self.silence
        async with asyncio.timeout(limit):
            await self._gather(commit.body, self.proposals.get(hash_of(commit.body)))

    def ballots(self) -> list[Ballot]:
        """What this peer has seen signed for the roster; shown when it enters the next call."""
        return [
            Ballot(self.roster_id, proposal.body, [Vote(m, s) for m, s in sorted(proposal.votes.items())])
            for proposal in self.proposals.values()
            if proposal.votes
        ]

    def averaged(self, commit: Commit) -> list[bytes]:
        """The averaged chunks of a commit of this roster, all of which are held."""
        return [self.held[entry.hash] for entry in commit.body.chunks]
