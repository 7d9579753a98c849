"""What a chaos run came to, from what its nodes wrote: event logs, commits, exported parameters."""

from __future__ import annotations

import json
import statistics
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.node import checkpoint
from atoll.node.config import DataConfig, ModelConfig
from atoll.node.events import Event
from atoll.node.specs import tensor_specs
from atoll.protocol.averaged import hash_chunk
from atoll.protocol.codecs import get_codec
from atoll.protocol.commits import START, check_child, contributed, verify_commit
from atoll.protocol.errors import PeerMisbehaved
from atoll.protocol.identity import Signer
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Commit, decode, hash_of
from atoll.protocol.replica import Replica
from atoll.protocol.state import GlobalState
from atoll.protocol.theta0 import theta0

from .field import Life, Slot, Strike
from .schedule import AWAY, LEAVING

STEADY = 120.0
"""Seconds after its start from which a process's memory should not grow any more."""
LONG = 420.0
"""Seconds that a process must have lived for its memory to be compared."""
GROWTH = 0.05
SLACK_BYTES = 8 << 20
"""What a process may grow by in any case: allocators keep what they once had."""


@dataclass
class Chain:
    """The commits of the best head, oldest first, with their averaged chunks."""

    ids: list[bytes]
    commits: list[Commit]
    chunks: list[list[bytes]]
    forks: int = 0
    """Commits that are on no way to the best head."""


def read_commit(path: Path) -> tuple[Commit, list[bytes]]:
    """A file of a node's commit log; its form is described in atoll.protocol.commitlog."""
    data = path.read_bytes()
    _, size, count = struct.unpack_from(">8sII", data)
    lengths = struct.unpack_from(f">{count}I", data, 16)
    at = 16 + 4 * count
    commit = decode(data[at : at + size], Commit)
    at += size
    chunks = []
    for length in lengths:
        chunks.append(data[at : at + length])
        at += length
    return commit, chunks


def read_chain(folder: Path, head: bytes) -> Chain:
    """The chain below ``head`` from the commit files in ``folder``; ValueError when one is missing."""
    found = {}
    for path in folder.glob("*.commit"):
        commit, chunks = read_commit(path)
        found[hash_of(commit.body)] = commit, chunks
    chain = Chain([], [], [])
    at = head
    while at != START.head.id:
        if at not in found:
            raise ValueError(f"no node's log was seen to hold commit {at.hex()[:16]}")
        commit, chunks = found[at]
        chain.ids.append(at)
        chain.commits.append(commit)
        chain.chunks.append(chunks)
        at = commit.body.parent
    for part in (chain.ids, chain.commits, chain.chunks):
        part.reverse()
    chain.forks = len(found) - len(chain.ids)
    return chain


def first_params(manifest: Manifest) -> NDArray[np.float32]:
    """What a run of this manifest starts from."""
    model = ModelConfig.from_table(manifest.model)
    return theta0(model.seed, tensor_specs(model))


def replay(
    manifest: Manifest, chain: Chain, start: NDArray[np.float32], signer: Signer
) -> tuple[list[str], dict[bytes, str]]:
    """Check every commit and apply it to the initial parameters, as a peer does: signatures of a majority, averaged
    chunks with exactly the contributors and weights that the commit says, the state that it attests at its parent.
    Returns what is wrong, and the state digest after each commit."""
    layout = manifest.layout
    state, codec = GlobalState.fresh(layout, start), get_codec(manifest.codec.name)
    replica = Replica(manifest, layout, codec, state)
    digests: dict[bytes, str] = {}
    for commit_id, commit, chunks in zip(chain.ids, chain.commits, chain.chunks, strict=True):
        body = commit.body
        try:
            verify_commit(commit, manifest, layout, signer)
            check_child(body, replica.position, manifest, layout)
            if state.digest() != body.state:
                raise PeerMisbehaved("it attests another state of its parent than the replay has")
            if [hash_chunk(chunk) for chunk in chunks] != [entry.hash for entry in body.chunks]:
                raise PeerMisbehaved("its chunks are not those that it names")
            replica.apply(body, commit_id, chunks)
        except PeerMisbehaved as error:
            return [f"commit of round {body.round}: {error}"], digests
        digests[commit_id] = state.digest().hex()
    return [], digests


def samples(manifest: Manifest, chain: Chain, context: int) -> tuple[list[str], dict[str, int]]:
    """The ledger: leases are disjoint, and no process brought more than it had been leased until then, and than the
    process of its peer before it had been leased and had not brought: a node that starts again goes on from the steps
    that it has saved, with their lease.

    Of a contribution that was averaged in a share of the chunks the rest counts next time, in whole tokens
    (:func:`atoll.protocol.overlap.left`): half a token may be rounded up each time.

    context: tokens of a sample."""
    layout = manifest.layout
    leased: Counter[tuple[str, bytes]] = Counter()
    used: defaultdict[tuple[str, bytes], float] = defaultdict(float)
    rounded: Counter[tuple[str, bytes]] = Counter()
    last: dict[str, tuple[str, bytes]] = {}
    inherited: defaultdict[tuple[str, bytes], float] = defaultdict(float)
    spans, wrong = [], []
    for commit in chain.commits:
        body = commit.body
        members = body.seal.members
        for member, share in zip(members, contributed(body.seal, body.chunks, layout), strict=True):
            who = member.peer, member.nonce
            if (before := last.get(member.peer, who)) != who and who not in inherited:
                inherited[who] = inherited[before] + leased[before] - used[before]
            last[member.peer] = who
            part = share * layout.fragment(body.fragment).parameters / layout.parameters
            used[who] += member.weight * part / context
            rounded[who] += 0 < part < 1
            due = inherited[who] + leased[who]
            if used[who] > due + rounded[who] / 2 / context + 1e-6:
                wrong.append(f"round {body.round}: {member.peer} had brought {used[who]:.9g} samples of {due:.9g}")
        for lease in body.leases:
            leased[members[lease.member].peer, members[lease.member].nonce] += lease.span.count
            spans.append((lease.span.start, lease.span.start + lease.span.count))
    spans.sort()
    wrong += [f"samples {a} and {b} overlap" for a, b in pairwise(spans) if a[1] > b[0]]
    ledger = {
        "leased": sum(leased.values()), "averaged": round(sum(used.values())),
        "processes": len(leased), "cursor": chain.commits[-1].body.cursor if chain.commits else 0,
    }  # fmt: skip
    if chain.commits and abs(sum(used.values()) * context - chain.commits[-1].body.tokens) > len(chain.commits):
        wrong.append(
            f"{sum(used.values()) * context:.0f} tokens averaged, the chain says {chain.commits[-1].body.tokens}"
        )
    return wrong, ledger


def disagreements(lives: Iterable[Life], digests: dict[bytes, str]) -> list[str]:
    """State digests that differ for one commit, between nodes or from the replay's."""
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for commit_id, digest in digests.items():
        seen[commit_id.hex()].add(digest)
    for life in lives:
        for event in life.process.events:
            if event["event"] == "digest":
                seen[event["commit"]].add(event["digest"])
    return [f"commit {commit[:16]}: digests {sorted(found)}" for commit, found in seen.items() if len(found) > 1]


def dead_contributors(slots: Iterable[Slot], strikes: Iterable[Strike]) -> list[str]:
    """Commits whose averages have data of a node that had been killed before the roster was even sealed."""
    seals: dict[tuple[int, frozenset[str]], float] = {}
    commits: dict[str, Event] = {}
    for slot in slots:
        for life in slot.lives:
            for event in life.process.events:
                if event["event"] == "seal":
                    key = event["round"], frozenset(event["members"])
                    seals[key] = min(seals.get(key, event["t"]), event["t"])
                elif event["event"] == "commit":
                    commits[event["id"]] = event
    wrong = []
    for strike in strikes:
        if strike.kind not in AWAY or strike.kind in LEAVING or not strike.peer:
            continue
        for event in commits.values():
            sealed = seals.get((event["round"], frozenset(event["members"])))
            if sealed is not None and strike.t + 0.2 < sealed < strike.until and event["contributors"].get(strike.peer):
                wrong.append(f"round {event['round']} has data of {strike.victim}, which had been killed before")
    return wrong


def back_to_nothing(slots: Iterable[Slot]) -> list[str]:
    """Nodes that knew commits, and were at round 0 again after a restart on the same folder."""
    wrong = []
    for slot in slots:
        known: dict[Path, int] = {}
        for life in slot.lives:
            rounds = [event["round"] for event in life.process.events if event["event"] == "digest"]
            folder = life.process.state
            if rounds and known.get(folder, 0) > 0 and rounds[0] == 0:
                wrong.append(f"{slot.name} was at round {known[folder]} and began again at 0")
            known[folder] = 0 if life.why == "old" else max([known.get(folder, 0), *rounds])
    return wrong


def waits(slots: list[Slot], strikes: list[Strike], quorum: int) -> tuple[list[str], dict[str, Any]]:
    """Time from each fault to the next commit that the others have without its victim, against the bound.

    That is (v + 1)·(D + 3T) for v void rosters, and the inner phase, of which three are allowed: machines are shared.
    A roster sealed after the fault may have the victim again, when it has come back by then. What a node only catches
    up with was committed when the first of them had it.
    """
    commits, seals, voids, bounds = [], dict[Any, float](), defaultdict(list), []
    for slot in slots:
        for life in slot.lives:
            for event in life.process.events:
                match event["event"]:
                    case "commit":
                        commits.append((event["t"], slot.name, event))
                    case "seal":
                        key = event["round"], frozenset(event["members"])
                        seals[key] = min(seals.get(key, event["t"]), event["t"])
                        bounds.append((event["t"], event["bound"]))
                    case "void":
                        voids[slot.name].append(event["t"])
    commits.sort(key=lambda item: item[0])
    made = {event["id"]: t for t, _, event in reversed(commits)}
    firsts = sorted({event["round"]: t for t, _, event in reversed(commits)}.values())
    phase = statistics.median(b - a for a, b in pairwise(firsts)) if len(firsts) > 2 else 10.0
    wrong, took = [], defaultdict(list)
    end = max((t for t, _, _ in commits), default=0.0)
    for strike in strikes:
        for t, name, event in commits:
            if t <= strike.t or made[event["id"]] <= strike.t or name == strike.victim:
                continue
            sealed = seals.get((event["round"], frozenset(event["members"])), 0.0)
            if strike.peer and strike.peer in event["members"] and sealed <= strike.t:
                continue
            break
        else:
            if end - strike.t > 60:
                wrong.append(f"no commit after {strike.kind} of {strike.victim} (fault {strike.number})")
            continue
        void = sum(strike.t < at <= t for at in voids[name])
        bound = max((bound for at, bound in bounds if strike.t - 60 < at <= t), default=0.0)
        took[strike.kind].append(t - strike.t)
        if t - strike.t > (void + 1) * bound + 3 * phase:
            wrong.append(
                f"{t - strike.t:.1f} s from {strike.kind} of {strike.victim} (fault {strike.number}) to a commit; "
                f"{void} void rosters, D + 3T = {bound:.1f} s, a round {phase:.1f} s"
            )
    everything = [value for values in took.values() for value in values]
    table = {kind: _spread(values) for kind, values in sorted(took.items())}
    gaps = [b - a for a, b in pairwise(firsts)]
    return wrong, {"all": _spread(everything), "by_fault": table, "between_commits": _spread(gaps)}


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    pick = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    found = {name: round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2) for name, share in pick.items()}
    return {"count": len(ordered), **found}


@dataclass
class Time:
    """Where the node-seconds went; shares of all of them."""

    goodput: float = 0.0
    """Training whose tokens the chain has averaged."""
    lost: float = 0.0
    """Training that never was averaged: it died with its process, or was under way at the end."""
    averaging: float = 0.0
    """Paused for a round, from the call to the commit."""
    waiting: float = 0.0
    """Up, without samples."""
    joining: float = 0.0
    """A process that starts, looks for the run, catches up; a trainer that is started again."""
    down: float = 0.0
    """No process, or a stopped one."""
    uptime: float = 0.0
    """Share of the time in which at least one node trained."""
    pauses: list[tuple[float, float, dict[str, int]]] = field(default_factory=list)
    """When nobody did: seconds after the beginning, seconds, and how many nodes were doing what."""
    tokens: dict[str, int] = field(default_factory=dict)


def account(slots: list[Slot], chain: set[str], begin: float, end: float, overlap: bool = False) -> Time:
    """Divide the time of all slots between ``begin`` and ``end``, by the nodes' progress events (one a second).

    overlap: nodes train on while a round is in flight; what they train since its seal is not in its commit yet.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    done: list[tuple[float, float, str, str]] = []
    good = 0.0
    for slot in slots:
        covered = 0.0
        for life in slot.lives:
            carried, sealed, before = 0.0, 0.0, None
            for event in life.process.events:
                t = event["t"]
                if event["event"] == "progress":
                    if before is not None and t > begin and before["t"] < end:
                        span = min(t, end) - max(before["t"], begin)
                        stopped = sum(max(min(t, b) - max(before["t"], a), 0.0) for a, b in life.stopped)
                        span = max(span - stopped, 0.0)
                        kind = _doing(before, event, overlap)
                        spent[kind] += span
                        covered += span
                        if span:
                            done.append((max(before["t"], begin), min(t, end), kind, slot.name))
                        if kind == "training":
                            carried += span
                    before = event
                elif event["event"] == "commit" and begin < t <= end:
                    share = event["contributors"].get(life.process.peer, 0.0)
                    if share and event["id"] in chain:
                        brought = sealed if overlap else carried
                        good += brought * share
                        carried -= brought * share
                        sealed -= brought * share
                elif event["event"] == "seal":
                    sealed = carried
                elif event["event"] == "resync":
                    carried = sealed = 0.0
            last = life.ended if life.ended is not None else end
            first = life.process.events[0]["t"] if life.process.events else last
            progress = [e["t"] for e in life.process.events if e["event"] == "progress"]
            # From the start of the process to its first sign of progress, it joins.
            joined = progress[0] if progress else last
            span = max(min(joined, end) - max(min(life.began, first), begin), 0.0)
            spent["joining"] += span
            covered += span
        spent["down"] += (end - begin) - covered
    total = len(slots) * (end - begin)
    pauses = _pauses(done, len(slots), begin, end)
    return Time(
        goodput=good / total, lost=(spent["training"] - good) / total, averaging=spent["averaging"] / total,
        waiting=spent["waiting"] / total, joining=spent["joining"] / total, down=spent["down"] / total,
        uptime=1 - sum(length for _, length, _ in pauses) / (end - begin), pauses=pauses,
    )  # fmt: skip


def _pauses(
    done: list[tuple[float, float, str, str]], nodes: int, begin: float, end: float
) -> list[tuple[float, float, dict[str, int]]]:
    """The stretches in which nobody trained, from what nodes were doing: from, to, what, and who."""
    found, at = [], begin
    for start, stop in [*sorted((a, b) for a, b, kind, _ in done if kind == "training"), (end, end)]:
        if start > at:
            middle = (at + start) / 2
            doing = {name: kind for a, b, kind, name in done if a <= middle < b}
            counts = Counter(doing.values())
            counts["no sign"] = nodes - len(doing)
            found.append((round(at - begin, 2), round(start - at, 2), dict(+counts)))
        at = max(at, stop)
    return found


def _doing(before: Event, after: Event, overlap: bool) -> str:
    """What a node did between two progress events."""
    state = before["state"]
    if state in ("starting", "joining"):
        return "joining"
    if state in ("training", "averaging"):
        moved = (before["steps"], before["tokens"], before["contributed"]) != (
            after["steps"], after["tokens"], after["contributed"],
        )  # fmt: skip
        # Without a step in a second it was frozen by a call, or has no trainer.
        return "training" if (state == "training" or overlap) and moved else "averaging"
    return "waiting"


def memory(slots: Iterable[Slot]) -> tuple[list[str], list[dict[str, Any]]]:
    """Resident memory of processes that lived long: after their first minutes against their last."""
    wrong, rows = [], []
    for slot in slots:
        for life in slot.lives:
            for what, points in life.memory.items():
                lived = points[-1][0] - points[0][0]
                if lived < LONG:
                    continue
                first = [size for t, size in points if STEADY <= t - points[0][0] < STEADY + 120]
                last = [size for t, size in points if points[-1][0] - t < 120]
                a, b = statistics.median(first), statistics.median(last)
                rows.append({"process": f"{slot.name} {what}", "minutes": round(lived / 60, 1),
                             "after_start_mb": round(a / 1e6, 1), "at_end_mb": round(b / 1e6, 1)})  # fmt: skip
                if b > a * (1 + GROWTH) + SLACK_BYTES:
                    wrong.append(f"{slot.name} {what}: memory grew from {a / 1e6:.1f} to {b / 1e6:.1f} MB")
    return wrong, rows


def losses(manifest: Manifest, exports: Path) -> list[tuple[int, float]]:
    """(tokens, validation loss in nats a byte) of every exported checkpoint, by tokens."""
    from atoll.node.evaluate import evaluate

    model, data = ModelConfig.from_table(manifest.model), DataConfig.from_table(manifest.data)
    found = []
    for path in sorted(exports.glob("step-*.json")):
        tokens = int(json.loads(path.read_text())["tokens"])
        found.append((tokens, evaluate(checkpoint.load(path, model=model).params, model, data)))
    return sorted(found)


def at_tokens(curve: list[tuple[int, float]], tokens: int) -> float | None:
    """A loss curve at so many tokens, linear between its points; None outside of them."""
    for (a, first), (b, second) in pairwise(curve):
        if a <= tokens <= b and a < b:
            return first + (second - first) * (tokens - a) / (b - a)
    return None
