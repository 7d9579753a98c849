"""Four peers start together with one seed: each must list all four within 30 s, again and again."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from .people import Person, small

LIMIT = 30.0


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--peers", type=int, default=4)


def run(args: argparse.Namespace) -> dict[str, Any]:
    times, failed = [], []
    with tempfile.TemporaryDirectory(prefix="gather-") as folder:
        manifest = small(Path(folder))
        for number in range(args.repeat):
            took = asyncio.run(_once(Path(folder) / str(number), manifest, args.peers))
            times.append(took)
            if took is None:
                failed.append(f"repeat {number}: not everyone was listed within {LIMIT:.0f} s")
            print(f"{number}: {'too late' if took is None else f'{took:.2f} s'}", flush=True)
    good = sorted(took for took in times if took is not None)
    return {
        "repeats": args.repeat, "peers": args.peers, "median_s": good[len(good) // 2], "max_s": good[-1],
        "violations": failed,
    }  # fmt: skip


async def _once(folder: Path, manifest: Any, count: int) -> float | None:
    """Seconds from the start of all until each lists the ``count`` that started together; the seed is one of them."""
    folder.mkdir(parents=True)
    seed = await Person.come(folder, "seed", manifest, [])
    people = [seed]
    try:
        began = time.monotonic()
        people += await asyncio.gather(
            *(Person.come(folder, f"p{i}", manifest, [seed.address]) for i in range(count - 1))
        )
        for person in people:
            person.live()
        everyone = {person.peer_id for person in people}
        while time.monotonic() - began < LIMIT:
            if all(everyone <= {person.peer_id, *person.directory.known} for person in people):
                return time.monotonic() - began
            await asyncio.sleep(0.02)
        return None
    finally:
        await asyncio.gather(*(person.go() for person in people))
