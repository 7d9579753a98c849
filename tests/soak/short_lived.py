"""A bootstrap peer that sees a thousand peers come and go keeps answering, and forgets those that went."""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from .people import Person, resident, small

LIMIT = 30.0


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="short-") as folder:
        return asyncio.run(_run(args, Path(folder)))


async def _run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    manifest, draw = small(folder), random.Random(args.seed)
    seed = await Person.come(folder, "seed", manifest, [])
    stayers = [await Person.come(folder, f"stay{i}", manifest, [seed.address]) for i in range(3)]
    for person in (seed, *stayers):
        person.live()
    wrong: list[str] = []
    looks: list[float] = []
    memory: list[float] = []
    kills = [draw.random() < 0.5 for _ in range(args.peers)]
    free = asyncio.Semaphore(args.at_once)

    async def visit(number: int) -> None:
        async with free:
            visitor = await Person.come(folder, f"v{number}", manifest, [seed.address], require_seed=True)
            visitor.live()
            try:
                async with asyncio.timeout(LIMIT):
                    while not {person.peer_id for person in stayers} <= set(visitor.directory.known):
                        await asyncio.sleep(0.05)
            except TimeoutError:
                wrong.append(f"visitor {number} did not find those who stay within {LIMIT:.0f} s")
            await visitor.go(killed=kills[number])
            (folder / f"v{number}.key").unlink()

    began = time.monotonic()
    for first in range(0, args.peers, 50):
        await asyncio.gather(*(visit(number) for number in range(first, min(first + 50, args.peers))))
        pid = seed.transport.daemon_pid
        memory.append(resident(pid) if pid is not None else 0.0)
        print(
            f"{min(first + 50, args.peers)} came and went in {time.monotonic() - began:.0f} s; the seed's neighbours "
            f"{len(seed.transport.neighbours())}, its p2pd {memory[-1]:.0f} MB", flush=True,
        )  # fmt: skip
    for number in range(5):
        at = time.monotonic()
        newcomer = await Person.come(folder, f"new{number}", manifest, [seed.address], require_seed=True)
        newcomer.live()
        while not {person.peer_id for person in stayers} <= set(newcomer.directory.known):
            if time.monotonic() - at > LIMIT:
                wrong.append(f"newcomer {number} did not find those who stayed within {LIMIT:.0f} s")
                break
            await asyncio.sleep(0.02)
        looks.append(time.monotonic() - at)
        await newcomer.go()
    # Records live a minute; after two everyone has forgotten who is gone.
    at = time.monotonic()
    while any(len(person.directory.known) > len(stayers) + 1 for person in stayers):
        if time.monotonic() - at > 240:
            wrong.append(f"after 240 s some still list {max(len(p.directory.known) for p in stayers)} peers")
            break
        await asyncio.sleep(1)
    forgotten = time.monotonic() - at
    neighbours = len(seed.transport.neighbours())
    await asyncio.gather(*(person.go() for person in (seed, *stayers)))
    return {
        "peers": args.peers, "killed": sum(kills), "newcomer_s": [round(look, 2) for look in looks],
        "forgotten_after_s": round(forgotten), "neighbours_of_seed": neighbours,
        "p2pd_mb": [round(memory[0], 1), round(memory[-1], 1)], "violations": wrong,
    }  # fmt: skip
