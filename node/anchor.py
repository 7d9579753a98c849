"""What ``atoll anchor`` does: finds the commit, checks it, signs for it, and brings the anchor to the run's peers."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.protocol.address import RunAddress
from atoll.protocol.anchor import Anchor, newer, next_number, open_anchor, seal_anchor
from atoll.protocol.errors import NetworkError, PeerMisbehaved, TransportError, UsageError
from atoll.protocol.identity import Signer, load_identity
from atoll.protocol.messages import Head, better
from atoll.protocol.transport import PeerId

from .status import RunClient, Snapshot

if TYPE_CHECKING:
    from atoll.protocol.manifest import Manifest
    from atoll.protocol.transport import Transport

ASKED = 8
"""Peers who are asked for their heads, and whose logs are looked through for a commit."""
NOTHING = "nothing has been committed yet; anchor a commit once there is one"
AT_ONCE = 16
"""Peers who are brought the anchor at once."""


@dataclass(frozen=True)
class Found:
    """A commit to be anchored."""

    head: Head
    reported: int
    """Those of the peers asked whose head it is."""
    asked: int
    """Peers who said what head they have."""


async def anchor_run(text: str, key: Path, commit: str | None, *, as_json: bool, timeout: float) -> int:
    """The command. Raises :class:`UsageError` (exit code 2), :class:`StateError` for a key file that cannot be used
    (6), :class:`NetworkError` when nobody answers or takes the anchor (4)."""
    address = RunAddress.parse(text)
    owner = load_identity(key)
    with tempfile.TemporaryDirectory(prefix="atoll-anchor-") as folder:
        client = await RunClient.open(address, Path(folder), timeout, quiet=as_json)
        try:
            manifest = await client.manifest(timeout)
            if owner.peer_id != manifest.owner:
                raise UsageError(
                    f"{key} is the key of {owner.peer_id}, and the run {manifest.name} belongs to {manifest.owner}; "
                    "only its owner can anchor a commit"
                )
            snapshot = await client.read(timeout)
            for record in snapshot.records:
                client.transport.learn(PeerId(record.peer), list(record.addresses))
            found = await find(client.transport, manifest, owner, snapshot, commit, timeout)
            everyone = list(dict.fromkeys([*address.peer_ids, *(PeerId(r.peer) for r in snapshot.records)]))
            known = await _newest_of(client.transport, manifest, owner, snapshot, address)
            anchor = Anchor(manifest.run_id, next_number(known, time.time()), found.head)
            given = await bring(client.transport, seal_anchor(anchor, owner), everyone, timeout)
        finally:
            await client.close()
    if not given:
        raise NetworkError(
            f"none of {len(everyone)} peers took the anchor; check that the bootstrap peer is up, and try again"
        )
    _tell(anchor, found, given, snapshot, len(everyone), as_json)
    return 0


async def find(
    transport: Transport, manifest: Manifest, signer: Signer, snapshot: Snapshot, commit: str | None,
    timeout: float,
) -> Found:  # fmt: skip
    """The commit whose id begins with ``commit``, or the head that most of those asked have, out of a verified log.

    In a run that admits only listed peers nobody gives its log to this one; the listed peers' own records must do.
    Raises :class:`UsageError` when there is no such commit, :class:`NetworkError` when nobody can be asked.
    """
    from atoll.protocol.fetch import Fetcher
    from atoll.protocol.transfer import GetHeads, Heads, ask

    records = [record for record in snapshot.records if record.state != "serving" and manifest.admits(record.peer)]
    if not manifest.admits(transport.peer_id):
        heads = Counter(record.head for record in records if record.head.height)
        if not heads:
            raise UsageError(NOTHING)
        wanted = commit if commit is not None else _first(heads).id.hex()
        fits = [head for head in heads if head.id.hex().startswith(wanted)]
        return _only(fits, heads, wanted, "is the head of none of the run's peers")

    reasons: list[str] = []

    async def head_of(peer: PeerId) -> tuple[PeerId, Head] | None:
        try:
            answer = await ask(transport, peer, GetHeads(), Heads, limit=1 << 16, patience=timeout)
        except TransportError as error:
            reasons.append(str(error))
            return None
        return peer, answer.best

    # Records are some seconds old; in a quick run what they name may have left the logs, or be less than there is.
    asked = [PeerId(record.peer) for record in records if record.reachable][:ASKED]
    found = [answer for answer in await asyncio.gather(*map(head_of, asked)) if answer is not None]
    if not found:
        why = "; ".join(reasons) or "none that can be reached takes part"
        raise NetworkError(f"no peer says what head it has: {why}")
    heads = Counter(head for _, head in found if head.height)
    if not heads:
        raise UsageError(NOTHING)
    wanted = commit if commit is not None else _first(heads).id.hex()
    fetcher = Fetcher(transport, manifest, manifest.layout, signer)
    logs = 0
    for peer, head in sorted(
        (item for item in found if item[1].height), key=lambda item: not item[1].id.hex().startswith(wanted)
    ):
        try:
            async with asyncio.timeout(timeout):
                steps = await fetcher.log(peer, head)
        except (TransportError, TimeoutError) as error:
            reasons.append(str(error) or f"{peer} does not answer in time")
            continue
        logs += 1
        fits = [step.position.head for step in steps if step.position.head.id.hex().startswith(wanted)]
        if fits:
            return _only(fits, heads, wanted, "")
    if not logs:
        raise NetworkError(f"no peer gave its log, so the commit cannot be checked: {'; '.join(reasons)}")
    raise UsageError(
        f"commit {wanted} is not in the logs of {logs} peers, which reach back to the older of two checkpoints; "
        "anchor a newer one, or check the id"
    )


def _first(heads: Counter[Head]) -> Head:
    """The head that most have, of those as frequent the better one."""
    return min(heads, key=lambda head: (-heads[head], -head.weight, -head.height, head.id))


def _only(fits: list[Head], reported: Counter[Head], wanted: str, otherwise: str) -> Found:
    if not fits:
        raise UsageError(f"commit {wanted} {otherwise}; check the id")
    if len(fits) > 1:
        raise UsageError(f"{len(fits)} commits begin with {wanted}; give more digits")
    return Found(fits[0], reported[fits[0]], reported.total())


async def _newest_of(
    transport: Transport, manifest: Manifest, signer: Signer, snapshot: Snapshot, address: RunAddress
) -> Anchor | None:
    """The newest anchor that records and well-known peers tell of: the new one has to have a greater number."""
    from atoll.protocol.anchoring import exchange

    newest = snapshot.anchor
    for peer in address.peer_ids:
        try:
            sealed = await exchange(transport, peer, b"")
            anchor = open_anchor(sealed, signer, manifest.run_id, manifest.owner) if sealed else None
        except (TransportError, PeerMisbehaved):
            continue
        if anchor is not None and newer(anchor, newest):
            newest = anchor
    return newest


async def bring(transport: Transport, sealed: bytes, peers: list[PeerId], timeout: float) -> int:
    """Bring an anchor to peers; how many have it then."""
    from atoll.protocol.anchoring import exchange

    places = asyncio.Semaphore(AT_ONCE)

    async def one(peer: PeerId) -> bool:
        async with places:
            try:
                return await exchange(transport, peer, sealed, timeout=min(timeout, 10.0)) == sealed
            except TransportError:
                return False  # others bring it

    return sum(await asyncio.gather(*(one(peer) for peer in peers)))


def _tell(anchor: Anchor, found: Found, given: int, snapshot: Snapshot, peers: int, as_json: bool) -> None:
    head = anchor.head
    if as_json:
        fields = {
            "run_id": anchor.run.hex(), "number": anchor.number, "commit": head.id.hex(), "round": head.round,
            "outer_step": head.outer_step, "height": head.height, "reported_by": found.reported, "given_to": given,
            "peers": peers,
        }  # fmt: skip
        print(json.dumps(fields), flush=True)
        return
    print(
        f"anchored commit {head.id.hex()[:12]} (outer step {head.outer_step}), the head of "
        f"{found.reported} of {found.asked} peers asked; {given} of {peers} have the anchor, and pass it on",
        flush=True,
    )
    best = snapshot.best
    if better(best, head) and best.height > head.height + 5:
        print(f"note: a peer reports a head of outer step {best.outer_step}; this commit is older", flush=True)


__all__ = ["anchor_run"]
