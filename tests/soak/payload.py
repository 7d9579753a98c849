"""Heartbeats survive a payload that fills a slow link for minutes."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from atoll.protocol.control import Control, Ping
from atoll.protocol.messenger import Messenger
from atoll.protocol.transport import PeerId, Stream

from ..real.netspace import narrow_loopback
from .people import Person, small

CHUNK = 1 << 20


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mbit", type=float, default=10.0)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--silence", type=float, default=5.0, help="T in seconds")


def run(args: argparse.Namespace) -> dict[str, Any]:
    narrow_loopback(args.mbit)
    with tempfile.TemporaryDirectory(prefix="payload-") as folder:
        return asyncio.run(_run(args, Path(folder)))


async def _run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    manifest = small(folder)
    a = await Person.come(folder, "a", manifest, [])
    b = await Person.come(folder, "b", manifest, [a.address], require_seed=True)
    sent: dict[PeerId, list[float]] = {a.peer_id: [], b.peer_id: []}
    delays: list[float] = []
    messengers: dict[PeerId, Messenger] = {}

    def heard(peer: PeerId, message: Control) -> None:
        assert isinstance(message, Ping)
        delays.append(time.monotonic() - sent[peer][int.from_bytes(message.roster[:4], "big")])

    for person in (a, b):
        person.live()
        messengers[person.peer_id] = Messenger(
            person.transport, heard, silence=args.silence, admits=lambda peer: True,
            refused=lambda peer, reason: None, limit=1 << 16,
        )  # fmt: skip
        await messengers[person.peer_id].start()
    arrived = asyncio.Event()
    got = 0

    async def take(stream: Stream) -> None:
        nonlocal got
        messengers[b.peer_id].watch(stream)
        while got < args.megabytes * CHUNK:
            got += len(await stream.receive(CHUNK))
        await stream.send(b"thanks")
        arrived.set()
        messengers[b.peer_id].unwatch(stream)

    await b.transport.serve("bulk/1", take)
    a.transport.learn(b.peer_id, b.transport.addresses())
    silent = {"a of b": 0.0, "b of a": 0.0}
    beating = True

    async def beat() -> None:
        while beating:
            for person, other in ((a, b), (b, a)):
                number = len(sent[person.peer_id])
                sent[person.peer_id].append(time.monotonic())
                messengers[person.peer_id].post(other.peer_id, Ping(number.to_bytes(4, "big") + bytes(28)))
            await asyncio.sleep(args.silence / 5)

    async def watch(since: float) -> None:
        while beating:
            await asyncio.sleep(0.05)
            now = a.transport.now()
            for name, person, other in (("a of b", a, b), ("b of a", b, a)):
                waited = min(messengers[person.peer_id].silent_for(other.peer_id, since), now - since)
                silent[name] = max(silent[name], waited)

    beats = asyncio.create_task(beat())
    await asyncio.sleep(1)
    delays.clear()
    watching = asyncio.create_task(watch(a.transport.now()))
    began = time.monotonic()
    stream = await a.transport.open(b.peer_id, "bulk/1", timeout=20)
    messengers[a.peer_id].watch(stream)
    payload = bytes(CHUNK)
    for _ in range(args.megabytes):
        await stream.send(payload)
    await stream.receive(100)
    took = time.monotonic() - began
    beating = False
    await asyncio.gather(beats, watching)
    messengers[a.peer_id].unwatch(stream)
    await stream.close()
    for messenger in messengers.values():
        await messenger.close()
    await asyncio.gather(a.go(), b.go())
    wrong = [f"{name}: {value:.1f} s of silence" for name, value in silent.items() if value > args.silence]
    wrong += [] if arrived.is_set() and got == args.megabytes * CHUNK else [f"{got} bytes arrived"]
    beats_sent = sum(map(len, sent.values()))
    return {
        "mbit": args.mbit, "megabytes": args.megabytes, "seconds": round(took, 1),
        "mbit_reached": round(8 * got / took / 1e6, 2), "heartbeats": len(delays), "sent": beats_sent,
        "delay_median_s": round(sorted(delays)[len(delays) // 2], 2), "delay_max_s": round(max(delays), 2),
        "longest_silence_s": {name: round(value, 2) for name, value in silent.items()}, "violations": wrong,
    }  # fmt: skip
