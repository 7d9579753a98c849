"""``atoll status``: what the DHT says about a run, or what an event log says about a node of this machine."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.protocol.address import RunAddress
from atoll.protocol.errors import NetworkError, PeerMisbehaved, StateError
from atoll.protocol.messages import GENESIS, Head, better

from .console import short
from .events import EVENT_FILE, last_events, last_head_time
from .looking import Reasons, in_words, tell_reasons

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.protocol.anchor import Anchor
    from atoll.protocol.hivemind_transport import HivemindTransport
    from atoll.protocol.identity import Signer
    from atoll.protocol.manifest import Manifest
    from atoll.protocol.records import Record

TRAINERS = ("joining", "training", "averaging", "waiting", "finished", "leaving", "starting")
"""States of peers that train; the others are bootstrap peers and observers."""

OVERDUE = 25.0
"""Seconds after which a peer that is alive has published its record anew."""


@dataclass(frozen=True)
class Snapshot:
    """Who takes part in a run, by their own signed records, and the best head among them."""

    address: RunAddress
    records: tuple[Record, ...]
    refused: int
    """Records that were found and not believed."""
    anchor: Anchor | None = None
    """The organiser's newest anchor among them, checked."""
    sealed: bytes = b""
    """That anchor as it travels."""

    def holds(self, record: Record) -> bool:
        """Whether a peer says that the anchor is behind its head."""
        return self.anchor is not None and record.anchored and record.anchor == self.sealed

    @property
    def best(self) -> Head:
        best = GENESIS
        for record in self.records:
            if better(record.head, best):
                best = record.head
        return best

    def to_json(self, now: float) -> dict[str, Any]:
        best = self.best
        return {
            "run_id": self.address.run_id.hex(),
            "best": _head(best),
            "anchor": self.anchor and {"number": self.anchor.number, "head": _head(self.anchor.head)},
            "peers": [
                {
                    "peer": record.peer,
                    "name": record.name,
                    "state": record.state,
                    "head": _head(record.head),
                    "behind": best.height - record.head.height,
                    "anchored": self.holds(record),
                    "step_time": record.step_time,
                    "tokens": record.tokens,
                    "reachable": record.reachable,
                    "addresses": list(record.addresses),
                    "version": record.version,
                    "age": round(now - record.issued, 1),
                }
                for record in self.records
            ],
            "refused": self.refused,
        }


def _head(head: Head) -> dict[str, Any]:
    return {
        "id": head.id.hex(),
        "round": head.round,
        "outer_step": head.outer_step,
        "height": head.height,
        "weight": head.weight,
    }


class RunClient:
    """A client of the run's DHT, with an identity that lives as long as it does."""

    def __init__(self, address: RunAddress, transport: HivemindTransport, signer: Signer) -> None:
        self._address = address
        self._transport = transport
        self._signer = signer
        self._manifest: Manifest | None = None

    @property
    def transport(self) -> HivemindTransport:
        return self._transport

    async def manifest(self, timeout: float) -> Manifest:
        """The run's manifest, checked. Raises :class:`NetworkError` when no peer of the address gives it."""
        from .session import manifest_of

        if self._manifest is None:
            manifest = await manifest_of(self._transport, self._address, timeout)
            manifest.check_signature()
            self._manifest = manifest
        return self._manifest

    @classmethod
    async def open(cls, address: RunAddress, folder: Path, timeout: float, *, quiet: bool = False) -> RunClient:
        """Raises :class:`NetworkError` when no peer of the run answers in time. quiet: say nothing while waiting."""
        from atoll.protocol.hivemind_transport import HivemindTransport
        from atoll.protocol.identity import load_or_create_identity
        from atoll.protocol.records import RecordGate

        signer = load_or_create_identity(folder / "identity.key")
        gate = RecordGate(address.run_id, signer)
        transport = await HivemindTransport.create(
            identity_path=folder / "identity.key",
            run_id=address.run_id,
            seeds=list(address.peers),
            validator=gate,
            client_mode=True,
        )
        looking = None if quiet else asyncio.create_task(tell_reasons(transport, _say))
        try:
            await transport.wait_joined(timeout)
        except BaseException:
            await transport.close()
            raise
        finally:
            if looking is not None:
                looking.cancel()
        return cls(address, transport, signer)

    async def read(self, timeout: float) -> Snapshot:
        """All believable records; waits up to ``timeout`` seconds for the first."""
        from atoll.protocol.records import BUCKETS, dht_key, open_record

        deadline = time.monotonic() + timeout
        while True:
            found = await asyncio.gather(
                *(self._transport.dht.read(dht_key(self._address.run_id, bucket)) for bucket in range(BUCKETS))
            )
            records: dict[str, Record] = {}
            refused = 0
            for bucket in found:
                for peer, data in bucket.items():
                    try:
                        records[peer] = open_record(
                            data, self._signer, self._address.run_id, self._transport.wall(), peer
                        )
                    except PeerMisbehaved:
                        refused += 1
            if records or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        if not records:
            raise NetworkError(
                f"no peer of run {self._address.run_id.hex()[:12]} answered within {timeout:.0f} s; "
                "check that the bootstrap peer is up and the address is current"
            )
        order = sorted(records.values(), key=lambda r: (r.state not in TRAINERS, -r.tokens, r.name, r.peer))
        anchor, sealed = await self._newest(order, timeout)
        return Snapshot(self._address, tuple(order), refused, anchor, sealed)

    async def _newest(self, records: Sequence[Record], timeout: float) -> tuple[Anchor | None, bytes]:
        """The newest anchor that these peers tell of. Who its owner is only the manifest says, so without it there is
        none to be believed."""
        from atoll.protocol.anchor import newer, open_anchor

        newest: tuple[Anchor | None, bytes] = None, b""
        told = {record.anchor for record in records if record.anchor}
        if not told:
            return newest
        try:
            owner = (await self.manifest(timeout)).owner
        except NetworkError as error:
            print(f"atoll: warning: the run's anchor cannot be checked: {error}", file=sys.stderr, flush=True)
            return newest
        for sealed in sorted(told):
            try:
                anchor = open_anchor(sealed, self._signer, self._address.run_id, owner)
            except PeerMisbehaved:
                continue
            if newer(anchor, newest[0]):
                newest = anchor, sealed
        return newest

    async def close(self) -> None:
        await self._transport.close()


def _say(reasons: Reasons) -> None:
    """On standard error: what the command has found out is all that belongs on the other."""
    if reasons:
        print(f"atoll: {in_words(reasons)}", file=sys.stderr, flush=True)


async def show_status(text: str, *, as_json: bool, watch: bool, every: float, timeout: float) -> int:
    """The command with an address. Raises :class:`NetworkError` (exit code 4) when nobody answers."""
    address = RunAddress.parse(text)
    with tempfile.TemporaryDirectory(prefix="atoll-status-") as folder:
        session = await RunClient.open(address, Path(folder), timeout, quiet=as_json)
        try:
            snapshot = await session.read(timeout)
            if not watch:
                _print(snapshot, as_json)
                return 0
            if as_json:
                while True:
                    _print(snapshot, as_json)
                    await asyncio.sleep(every)
                    snapshot = await session.read(timeout)
            from rich.live import Live

            with Live(render(snapshot, time.time()), auto_refresh=False) as live:
                while True:
                    await asyncio.sleep(every)
                    snapshot = await session.read(timeout)
                    live.update(render(snapshot, time.time()), refresh=True)
        finally:
            await session.close()


def _print(snapshot: Snapshot, as_json: bool) -> None:
    if as_json:
        print(json.dumps(snapshot.to_json(time.time())), flush=True)
    else:
        from rich.console import Console

        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 160  # nobody's window: do not cut columns off
        console.print(render(snapshot, time.time()))


def render(snapshot: Snapshot, now: float) -> RenderableType:
    """The peers as a table."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    best = snapshot.best
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, right in (
        ("name", False),
        ("peer", False),
        ("state", False),
        ("outer step", True),
        ("head", False),
        ("step time", True),
        ("tokens", True),
        ("version", False),
        ("seen", True),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for record in snapshot.records:
        behind = best.height - record.head.height
        table.add_row(
            Text(record.name or "-"),
            short(record.peer),
            record.state,
            str(record.head.outer_step) if record.head.height or record.state in TRAINERS else "-",
            Text(record.head.id.hex()[:8] if record.head.height else "none", "" if not behind else "yellow"),
            f"{record.step_time * 1000:.0f} ms" if record.step_time else "-",
            f"{record.tokens:,}",
            Text(record.version),
            Text(f"{(age := max(0.0, now - record.issued)):.0f} s ago", "red" if age > OVERDUE else ""),
        )
    nodes = sum(record.state in TRAINERS for record in snapshot.records)
    training = sum(record.state == "training" for record in snapshot.records)
    head = (
        f"best head {best.id.hex()[:12]}, outer step {best.outer_step} (round {best.round}), {best.weight:,} tokens"
        if best.height
        else "nothing committed yet"
    )
    anchor = snapshot.anchor
    if anchor is not None:
        held = sum(snapshot.holds(record) for record in snapshot.records)
        of = sum(record.head.height > 0 for record in snapshot.records)
        head += (
            f"\nanchor: commit {anchor.head.id.hex()[:12]}, outer step {anchor.head.outer_step} (round "
            f"{anchor.head.round}), in the chains of {held} of {of}"
        )
    title = Text(f"run {snapshot.address.run_id.hex()[:12]}: {nodes} nodes, {training} of them training now, {head}")
    return Group(title, table)


# ---------------------------------------------------------------------- a node of this machine


def check_health(state: Path, max_age: float, *, as_json: bool) -> int:
    """0 when the node's event log shows a head newer than ``max_age`` seconds, else 1."""
    path = state / EVENT_FILE
    latest = last_head_time(path)
    age = None if latest is None else max(0.0, time.time() - latest)
    healthy = age is not None and age <= max_age
    if as_json:
        print(json.dumps({"healthy": healthy, "head_age": age, "max_age": max_age}))
    elif latest is None:
        print(f"unhealthy: {path} tells of no head yet" if path.exists() else f"unhealthy: there is no {path}")
    else:
        print(f"{'healthy' if healthy else 'unhealthy'}: the head is {age:.0f} s old, {max_age:.0f} s are allowed")
    return 0 if healthy else 1


def show_local(state: Path, *, as_json: bool) -> int:
    """What the event log of a node of this machine says last."""
    path = state / EVENT_FILE
    if not path.exists():
        raise StateError(f"there is no event log at {path}; expected the state folder of a node")
    kinds = ("start", "state", "progress", "commit", "digest", "exit")
    latest = last_events(path, kinds)
    now = time.time()
    fields = {kind: latest.get(kind) for kind in kinds}
    if as_json:
        print(json.dumps(fields))
        return 0
    for line in _local_lines(fields, now):
        print(line)
    return 0


def _local_lines(fields: dict[str, dict[str, Any] | None], now: float) -> Sequence[str]:
    from .console import describe, describe_progress, describe_use, outer_step

    lines = []
    of = (fields.get("start") or {}).get("rounds")
    for kind, event in fields.items():
        if event is None:
            continue
        text = describe_progress(event, of) if kind == "progress" else describe(event, of)
        if kind == "progress" and (use := describe_use(event)):
            text = f"{text}; {use}"
        if kind == "digest":
            text = f"state digest {str(event.get('digest'))[:16]}… after {outer_step(event, of)}"
        lines.append(f"{max(0.0, now - float(event.get('t') or now)):6.0f} s ago  {text}")
    return lines
