"""Hundreds of rounds that fail over a narrow link: nobody's memory grows."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from atoll.protocol.disk import MemoryDisk
from atoll.protocol.hivemind_transport import HivemindTransport
from atoll.protocol.identity import load_or_create_identity
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.manifest import Manifest
from atoll.protocol.peer import Peer
from atoll.protocol.records import RecordGate
from atoll.protocol.state import GlobalState
from atoll.protocol.store import Store

from ..real.netspace import narrow_loopback
from ..simulated.island import SimulatedIsland
from .people import resident

CHUNK = 65536
GROWTH = 1.05
WARM = 0.2
"""Share of the rounds after which memory should not grow any more."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--parameters", type=int, default=200_000)
    parser.add_argument("--silence", type=float, default=0.4, help="T in seconds")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    narrow_loopback(args.mbit)
    with tempfile.TemporaryDirectory(prefix="failed-") as folder:
        return asyncio.run(_Sabotage(args, Path(folder)).run())


class _Sabotage:
    """Three peers in this process, each with its p2p daemon. Some moment after each seal two of the daemons are stopped
    until the roster is void, or has committed all the same."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.draw = args, folder, random.Random(args.seed)
        start = np.linspace(-1, 1, args.parameters, dtype=np.float32)
        layout = ChunkLayout(args.parameters, CHUNK)
        self.start, self.layout = start, layout
        self.manifest = Manifest.make(
            "failed", parameters=args.parameters, theta0=GlobalState.fresh(layout, start).digest().hex(),
            round={"inner_steps": 4, "quorum": 2, "max_group": 16, "silence": args.silence, "grace": 0.25,
                   "weight_cap": 10**6, "first_lease": 10**6, "max_lease": 10**6},
            outer={"optimizer": "nesterov", "lr": 0.7, "momentum": 0.6},
            codec={"name": "int8", "error_feedback": 1.0},
            state={"chunk": CHUNK, "checkpoint_every": 5}, budget={"rounds": 10**6},
        )  # fmt: skip
        self.transports: list[HivemindTransport] = []
        self.void: set[str] = set()
        self.sealed: set[str] = set()
        self.commits: set[str] = set()
        self.committed: set[int] = set()
        self.reasons: dict[str, int] = {}
        self.now: asyncio.Task[None] | None = None

    def events(self, event: str, /, **fields: Any) -> None:
        if event == "seal" and fields["roster"] not in self.sealed:
            self.sealed.add(fields["roster"])
            # The first commit brings samples; nothing can be averaged before.
            if self.commits and (self.now is None or self.now.done()):
                self.now = asyncio.create_task(self.stop(fields["roster"], fields["round"]))
        elif event == "void" and fields["roster"]:
            if fields["roster"] not in self.void:
                self.reasons[fields["reason"][:60]] = self.reasons.get(fields["reason"][:60], 0) + 1
            self.void.add(fields["roster"])
        elif event == "commit":
            self.commits.add(fields["id"])
            self.committed.add(fields["round"])

    async def stop(self, roster: str, number: int) -> None:
        await asyncio.sleep(self.draw.uniform(0, 0.15))
        if number in self.committed:
            return  # it was quicker
        pids = [pid for t in self.draw.sample(self.transports, 2) if (pid := t.daemon_pid) is not None]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(30 * self.args.silence):
                while roster not in self.void and number not in self.committed:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pass
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    async def run(self) -> dict[str, Any]:
        args = self.args
        seeds: list[str] = []
        peers = []
        for index in range(3):
            identity = self.folder / f"{index}.key"
            signer = load_or_create_identity(identity)
            transport = await HivemindTransport.create(
                identity_path=identity, run_id=self.manifest.run_id, seeds=seeds,
                validator=RecordGate(self.manifest.run_id, signer),
            )  # fmt: skip
            seeds = seeds or [f"{transport.addresses()[0]}/p2p/{transport.peer_id}"]
            store = Store(MemoryDisk(), self.manifest.run_id, self.layout, warn=print)
            island = SimulatedIsland(args.parameters, step_time=0.1)
            peers.append(Peer(
                transport=transport, signer=signer, manifest=self.manifest, store=store, theta0=self.start.copy,
                events=self.events, island=island, linger=0.0,
            ))  # fmt: skip
            self.transports.append(transport)
        tasks = [asyncio.create_task(peer.run()) for peer in peers]
        began, points, told, every = time.monotonic(), [], -1, 10
        while len(self.void) < args.rounds:
            await asyncio.sleep(0.5)
            for task in tasks:
                if task.done():
                    task.result()
            if len(self.void) // every != told:
                told = len(self.void) // every
                gc.collect()
                daemons = [resident(pid) for t in self.transports if (pid := t.daemon_pid) is not None]
                points.append((len(self.void), resident(os.getpid()), sum(daemons)))
                print(f"{points[-1][0]} void, {len(self.commits)} commits, {time.monotonic() - began:.0f} s, "
                      f"{points[-1][1]:.1f} MB, daemons {points[-1][2]:.1f} MB", flush=True)  # fmt: skip
        for peer in peers:
            peer.stop()
        await asyncio.gather(*tasks)
        await asyncio.gather(*(transport.close() for transport in self.transports))
        first = [point for point in points if point[0] >= WARM * args.rounds][:5]
        wrong, rows = [], {}
        for index, name in ((1, "process"), (2, "daemons")):
            a = sum(point[index] for point in first) / len(first)
            b = sum(point[index] for point in points[-5:]) / len(points[-5:])
            rows[name] = [round(a, 1), round(b, 1)]
            if b > a * GROWTH:
                wrong.append(f"the memory of the {name} grew from {a:.1f} to {b:.1f} MB")
        minutes = round((time.monotonic() - began) / 60, 1)
        return {
            "failed_rounds": len(self.void), "commits": len(self.commits), "minutes": minutes,
            "mb_after_warming_up_and_at_end": rows, "reasons": self.reasons, "violations": wrong,
        }  # fmt: skip
