"""The events of a node, and a reader that follows a growing event log.

Every line has ``t``, ``event`` and ``peer`` (see :mod:`atoll.protocol.eventlog`).

Rounds and outer steps: ``outer_step`` is how far the run is, 0 before the first and at its end what ``start`` calls
``rounds``. ``round`` is the number of an attempt, from 1 on; a void one and one that only hands out samples
(``averaged`` false) take no outer step, so it runs ahead.

The events:

``looking``     run, at (multiaddresses of the run's address); the first event of a start
``unreached``   reasons ({peer: what was tried and what came of it}): no peer of the run answers yet; again when that
                changes, and without any once one answers
``start``       run, name, version, pid, addresses, device, rounds (outer steps of the run)
``trainer``     pid, device, name, threads, precision, micro_batch, encode: a trainer child is ready
``ended``       reason, hung (whether it was ended for its silence; then silent, limit: seconds), lost_steps,
                lost_tokens, lost_units: a trainer child has ended, and another is being started; what was trained and
                went with it, and the samples of that and of the step that was cut off
``state``       state: starting | joining | training | averaging | waiting | finished | leaving;
                reason: why it waits, or trains in vain for now
``progress``    state, round, outer_step, steps, tokens, contributed, loss, tokens_per_s, bytes_sent, bytes_received,
                peers, trained, held, waited; about every second. steps and tokens since the last contribution;
                contributed: tokens averaged since the process began; bytes: payload bytes of streams since then; the
                last three: seconds from when the trainer was ready to the end of the run, in inner steps, kept from
                them by rounds (frozen, at the limit of the overlap, to copy or move parameters; also to save what it
                has done, and to begin anew at another head), and without samples or a trainer
``seal``        round, roster, members, deadline, coordinator; with overlap stopped: seconds for which training stood
                still to copy its parameters
``void``        round, roster, reason
``commit``      round, outer_step, id, parent, members (peer ids), contributors ({peer: share 0 … 1}), tokens and weight
                (along the chain), seconds (from the seal on), bytes_sent (by this peer, in this round), lone, took_part
                (false: made without this process, which has only caught up with it), averaged (false: of leases alone,
                outer_step stays), trained, held, waited (as in progress); with
                overlap stopped: seconds for which training has stood still since the seal, at the limit of the overlap
                and to move its parameters; with overwrite lost_tokens: of the steps made since the freeze
``digest``      round, outer_step, commit, digest: the state digest after that commit, hex
``resync``      round, outer_step, left (commit), left_round: the node has gone over to another chain, or to a head from
                which what is between is kept no more; lost_commits: those it had followed that are not in that chain
                (lost_more: as many at least),
                lost_averaged: its own tokens in them, lost_tokens: those that it had not brought yet
``restored``    inner steps saved before a restart were taken up
``anchor``      number, commit, round, outer_step, height: the organiser's newest anchor; held: whether it is in this
                peer's chain (a bootstrap peer has none); again when that changes
``evaluation``  round, outer_step, tokens, bytes, val_loss (nats per token); an observer's
``probe``       upload, download: bytes per second that the link alone was found to carry, stated: the two that the
                node states now, partners (peer ids) that it was measured with
``refused``     from, reason, fault (hostile, slow, gone): a peer that was not listened to
``warning``     message
``exit``        code, reason

Unknown events and unknown fields are to be ignored by readers: newer nodes may write more.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from atoll.protocol.eventlog import EVENT_FILE, EventLog

__all__ = ["EVENT_FILE", "EventLog", "EventTail", "last_events", "last_head_time", "read_events"]

Event = dict[str, Any]

_MAX_LINE = 1 << 20
_BLOCK = 1 << 16
_DECODER = msgspec.json.Decoder(dict[str, Any])


class EventTail:
    """Follows one event log: :meth:`poll` returns what was appended since the last call.

    The file may not exist yet, may be rotated (another inode) or truncated; half a line waits for its rest. Lines
    that are no JSON objects are counted in ``malformed`` and skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.malformed = 0
        self._file: Any = None
        self._identity: tuple[int, int] | None = None
        self._rest = b""

    def poll(self) -> list[Event]:
        """New events, oldest first; empty when there are none. Never blocks on a regular file, never raises."""
        events: list[Event] = []
        try:
            stat = self.path.stat()
            identity: tuple[int, int] | None = (stat.st_dev, stat.st_ino)
            size = stat.st_size
        except OSError:
            identity, size = None, 0
        if self._file is not None and identity != self._identity:
            events += self._drain()  # the last lines of the file that was rotated away
            self.close()
        if identity is None:
            return events
        try:
            if self._file is None:
                self._file = open(self.path, "rb")  # noqa: SIM115 - stays open between polls
                self._identity = identity
            elif size < self._file.tell():
                self._file.seek(0)
                self._rest = b""
        except OSError:
            return events
        return events + self._drain()

    def _drain(self) -> list[Event]:
        try:
            data = self._rest + self._file.read()
        except OSError:
            return []
        *lines, self._rest = data.split(b"\n")
        if len(self._rest) > _MAX_LINE:
            self._rest = b""
            self.malformed += 1
        events: list[Event] = []
        for line in lines:
            if not line.strip():
                continue
            try:
                event = _DECODER.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self.malformed += 1
                continue
            if isinstance(event.get("event"), str):
                events.append(event)
            else:
                self.malformed += 1
        return events

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._identity, self._rest = None, None, b""


def read_events(path: Path) -> Iterator[Event]:
    """All events of a log, the rotated part first."""
    for part in (path.with_name(path.name + ".1"), path):
        tail = EventTail(part)
        try:
            yield from tail.poll()
        finally:
            tail.close()


def last_events(path: Path, kinds: Collection[str]) -> dict[str, Event]:
    """The newest event of each of these kinds, as far as the log has them, read from its end."""
    wanted = {kind: b'"%s"' % kind.encode() for kind in kinds}
    found: dict[str, Event] = {}
    for line in _lines_backwards(path):
        # Most lines are of no interest, and looking is a hundred times cheaper than decoding.
        if not any(word in line for word in wanted.values()):
            continue
        try:
            event = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        kind = event.get("event")
        if isinstance(kind, str) and wanted.pop(kind, None) is not None:
            found[kind] = event
            if not wanted:
                break
    return found


def last_head_time(path: Path) -> float | None:
    """When (seconds since 1970) the log last tells of a commit or a digest; None when it never does."""
    for line in _lines_backwards(path):
        if b'"commit"' in line or b'"digest"' in line:
            try:
                event = _DECODER.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if event.get("event") in ("commit", "digest") and isinstance(event.get("t"), int | float):
                return float(event["t"])
    return None


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """The lines of a log, the newest first, then those of its rotated part. Holds a block in memory, not the file."""
    for part in (path, path.with_name(path.name + ".1")):
        try:
            file = part.open("rb")
        except OSError:
            continue
        with file:
            at, rest = file.seek(0, os.SEEK_END), b""
            while at:
                length = min(at, _BLOCK)
                at -= length
                file.seek(at)
                first, *lines = (file.read(length) + rest).split(b"\n")
                yield from reversed(lines)
                rest = first if len(first) <= _MAX_LINE else b""
            yield rest
