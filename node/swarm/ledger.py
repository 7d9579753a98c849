"""What the event logs of a swarm add up to: fed event by event, read by the live table and by the report.

Every log is a *source* (``node-0``, ``bootstrap``, ``observer``). Peers that no source belongs to, nodes started by
hand say, are known from the rosters of commits only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]


def _number(value: Any) -> float | None:
    """A finite number, or None: logs may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        return None
    return value


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


@dataclass
class Counter:
    """A counter that starts anew with each process, summed over the processes."""

    before: int = 0
    current: int = 0

    def restart(self) -> None:
        self.before, self.current = self.before + self.current, 0

    def set(self, value: int) -> None:
        self.current = max(self.current, value)

    @property
    def total(self) -> int:
        return self.before + self.current


@dataclass
class NodeRow:
    """One source as last heard of."""

    source: str
    peer: str = ""
    name: str = ""
    state: str = "starting"
    round: int | None = None
    outer_step: int | None = None
    steps: int = 0
    tokens: Counter = field(default_factory=Counter)
    loss: float | None = None
    tokens_per_s: float | None = None
    sent: Counter = field(default_factory=Counter)
    sent_before: int = 0
    """What ``sent`` was at the last commit."""
    received: Counter = field(default_factory=Counter)
    digest: str = ""
    starts: int = 0
    commits: int = 0
    refused: int = 0
    lone: int = 0
    warning: str = ""
    exit_code: int | None = None
    exit_reason: str = ""
    last_event: float = 0.0


@dataclass
class Commit:
    """One round that committed, merged from the logs of those who applied it."""

    round: int
    id: str
    outer_step: int
    members: list[str]
    tokens: int
    lone: bool
    seen: float
    """When the first source told of it, seconds since 1970."""
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_sent: dict[str, int] = field(default_factory=dict)
    contributors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    round: int
    outer_step: int
    tokens: int
    bytes: int
    """Stream payload bytes that the sources had sent by then, all together."""
    val_loss: float
    t: float


class Ledger:
    """Folds events. Order matters within a source only."""

    def __init__(self, sources: Iterable[str] = ()) -> None:
        self.rows: dict[str, NodeRow] = {source: NodeRow(source) for source in sources}
        self.commits: dict[int, Commit] = {}
        self.forks: dict[int, set[str]] = defaultdict(set)
        """Rounds with more than one commit id, and the ids."""
        self.digests: dict[int, list[tuple[str, str]]] = defaultdict(list)
        """By round: (source, digest), every digest that any source ever logged."""
        self.evaluations: list[Evaluation] = []
        self.voids: list[tuple[int, str]] = []
        self._void_rosters: set[str] = set()

    def add(self, source: str, event: Event) -> None:
        """Fold one event in; unknown events and malformed fields are ignored."""
        row = self.rows.setdefault(source, NodeRow(source))
        t = _number(event.get("t")) or 0.0
        row.last_event = max(row.last_event, t)
        if isinstance(event.get("peer"), str) and event["peer"]:
            row.peer = event["peer"]
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            handler(row, event, t)

    def _on_start(self, row: NodeRow, event: Event, t: float) -> None:
        row.starts += 1
        row.name = str(event.get("name") or row.name)
        row.state, row.exit_code, row.exit_reason = "starting", None, ""
        for counter in (row.tokens, row.sent, row.received):
            counter.restart()

    def _on_state(self, row: NodeRow, event: Event, t: float) -> None:
        row.state = str(event.get("state", row.state))

    def _on_progress(self, row: NodeRow, event: Event, t: float) -> None:
        row.state = str(event.get("state") or row.state)
        for name in ("round", "outer_step", "steps"):
            if (value := _whole(event.get(name))) is not None:
                setattr(row, name, value)
        for name in ("loss", "tokens_per_s"):
            if (number := _number(event.get(name))) is not None:
                setattr(row, name, number)
        # Tokens of the current contribution start anew with every commit; those averaged so far only grow.
        tokens = "contributed" if "contributed" in event else "tokens"
        for key, counter in ((tokens, row.tokens), ("bytes_sent", row.sent), ("bytes_received", row.received)):
            if (value := _whole(event.get(key))) is not None:
                counter.set(value)

    def _on_commit(self, row: NodeRow, event: Event, t: float) -> None:
        number, id = _whole(event.get("round")), str(event.get("id", ""))
        if number is None:
            return
        row.commits += 1
        row.lone += bool(event.get("lone"))
        row.round = max(row.round or 0, number)
        row.outer_step = _whole(event.get("outer_step")) or row.outer_step
        listed = event.get("members")
        members = [str(peer) for peer in listed] if isinstance(listed, list) else []
        commit = self.commits.get(number)
        tokens = _whole(event.get("tokens")) or 0
        if commit is not None and commit.id != id:
            self.forks[number] |= {commit.id, id}
            if len(members) <= len(commit.members):
                return
            commit = None
        if commit is None:
            commit = Commit(
                number, id, _whole(event.get("outer_step")) or 0, members, tokens, bool(event.get("lone")), t
            )
            self.commits[number] = commit
        commit.seen = min(commit.seen, t)
        if (seconds := _number(event.get("seconds"))) is not None:
            commit.seconds[row.source] = seconds
        sent = _whole(event.get("bytes_sent"))
        commit.bytes_sent[row.source] = row.sent.total - row.sent_before if sent is None else sent
        row.sent_before = row.sent.total
        shares = event.get("contributors")
        if isinstance(shares, dict):
            commit.contributors = {str(peer): _number(share) or 0.0 for peer, share in shares.items()}

    def _on_digest(self, row: NodeRow, event: Event, t: float) -> None:
        number, digest = _whole(event.get("round")), event.get("digest")
        if number is not None and isinstance(digest, str) and digest:
            row.digest = digest
            self.digests[number].append((row.source, digest))

    def _on_evaluation(self, row: NodeRow, event: Event, t: float) -> None:
        number, loss = _whole(event.get("round")), _number(event.get("val_loss"))
        if number is None or loss is None:
            return
        self.evaluations.append(
            Evaluation(
                number,
                _whole(event.get("outer_step")) or 0,
                _whole(event.get("tokens")) or 0,
                _whole(event.get("bytes")) or 0,
                loss,
                t,
            )
        )

    def _on_void(self, row: NodeRow, event: Event, t: float) -> None:
        number, reason = _whole(event.get("round")) or 0, str(event.get("reason", ""))
        # Every member logs it; a group that was never sealed has no roster id.
        name = str(event.get("roster") or f"{number} {reason}")
        if name not in self._void_rosters:
            self._void_rosters.add(name)
            self.voids.append((number, reason))

    def _on_refused(self, row: NodeRow, event: Event, t: float) -> None:
        row.refused += 1

    def _on_warning(self, row: NodeRow, event: Event, t: float) -> None:
        row.warning = str(event.get("message", ""))

    def _on_exit(self, row: NodeRow, event: Event, t: float) -> None:
        row.state = "finished" if _whole(event.get("code")) == 0 else "gone"
        row.exit_code = _whole(event.get("code"))
        row.exit_reason = str(event.get("reason", ""))

    # What the table and the report ask.

    def ended(self, source: str, code: int) -> None:
        """The process of ``source`` has ended with ``code`` (negative: by a signal), whatever its log says."""
        row = self.rows.setdefault(source, NodeRow(source))
        row.exit_code = code
        row.state = "finished" if code == 0 else "dead"

    @property
    def round(self) -> int | None:
        """The newest round that committed."""
        return max(self.commits, default=None)

    @property
    def outer_step(self) -> int:
        """Outer steps taken, by the newest commit."""
        return max((commit.outer_step for commit in self.commits.values()), default=0)

    @property
    def tokens(self) -> int:
        """Averaged tokens along the chain."""
        return max((commit.tokens for commit in self.commits.values()), default=0)

    def outside(self) -> dict[str, int]:
        """Peers in rosters that no source belongs to, with the last round of theirs."""
        known = {row.peer for row in self.rows.values()}
        last: dict[str, int] = {}
        for number, commit in sorted(self.commits.items()):
            last |= {peer: number for peer in commit.members if peer not in known}
        return last

    def digests_equal(self) -> bool:
        """Whether at every round all digests that were logged are equal. False when none was logged."""
        return bool(self.digests) and all(len({d for _, d in logged}) == 1 for logged in self.digests.values())

    def unequal_rounds(self) -> list[int]:
        return sorted(n for n, logged in self.digests.items() if len({digest for _, digest in logged}) > 1)

    def bytes_by_round(self) -> dict[int, int]:
        """Bytes that the sources sent in each round, all together."""
        return {number: sum(commit.bytes_sent.values()) for number, commit in sorted(self.commits.items())}

    def curve(self) -> list[Evaluation]:
        """The last evaluation of each round, in round order, with the bytes sent up to that round filled in."""
        by_round = self.bytes_by_round()
        latest = {evaluation.round: evaluation for evaluation in self.evaluations}
        points: list[Evaluation] = []
        for number, found in sorted(latest.items()):
            sent = sum(count for n, count in by_round.items() if n <= number)
            points.append(
                Evaluation(number, found.outer_step, found.tokens, sent or found.bytes, found.val_loss, found.t)
            )
        return points
