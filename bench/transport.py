"""What the libp2p transport does on this machine's loopback: ``python -m bench.transport``.

Prints a table: the throughput of one stream by frame size with the CPU time of the process (both ends live in it)
and of the two p2p daemons, the time to open a stream, and what a node costs that only takes part in the DHT.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from atoll.protocol.hivemind_transport import HivemindTransport
from atoll.protocol.transport import PeerId, Stream

from ._common import Row, cpu, stamp, write_rows

RUN = bytes(range(32))
KEYS = [f"peers/{bucket}" for bucket in range(4)]
TOTAL = 1 << 30


def memory(pid: int) -> float:
    """Resident MB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def anything(key: bytes, peer: PeerId, value: bytes, expires: float) -> bool:
    return True


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive(8 << 20))


async def sink(stream: Stream) -> None:
    count = 0
    while count < TOTAL:
        count += len(await stream.receive(8 << 20))
    await stream.send(b"done")


async def main(idle: float, file: Path | None) -> None:
    rows: list[Row] = []

    def note(**figures: Any) -> None:
        rows.append(figures | stamp())
        write_rows(file, rows)

    with tempfile.TemporaryDirectory() as folder:
        nodes: list[HivemindTransport] = []
        before = memory(os.getpid())
        seeds: list[str] = []
        for index in range(4):
            node = await HivemindTransport.create(
                identity_path=Path(folder) / str(index), run_id=RUN, seeds=seeds, validator=anything, keys=KEYS,
                require_seed=bool(seeds),
            )  # fmt: skip
            nodes.append(node)
            seeds = seeds or [f"{node.addresses()[0]}/p2p/{node.peer_id}"]
        server, client = nodes[:2]
        await server.serve("echo", echo)
        await server.serve("sink", sink)
        pids = [os.getpid(), *(node.daemon_pid or 0 for node in nodes)]

        print("one stream, 1 GiB\n  frame KiB    MB/s   CPU s: process, daemon, daemon")
        for size in (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22):
            stream = await client.open(server.peer_id, "sink", timeout=10)
            frame = bytes(size)
            used = [cpu(pid) for pid in pids[:3]]
            began = time.perf_counter()
            for _ in range(TOTAL // size):
                await stream.send(frame)
            await stream.receive()
            seconds = time.perf_counter() - began
            spent = [cpu(pid) - at for pid, at in zip(pids[:3], used, strict=True)]
            print(f"  {size >> 10:9d} {TOTAL / 1e6 / seconds:7.0f}   " + "  ".join(f"{value:.2f}" for value in spent))
            note(what="one stream", frame=size, bytes=TOTAL, seconds=seconds, mb_per_s=TOTAL / 1e6 / seconds, cpu=spent)
            await stream.close()

        opening, answering = [], []
        for _ in range(100):
            began = time.perf_counter()
            stream = await client.open(server.peer_id, "echo", timeout=10)
            opening.append(time.perf_counter() - began)
            await stream.send(b"x")
            await stream.receive()
            answering.append(time.perf_counter() - began)
            await stream.close()
        print(f"opening a stream: {1e3 * statistics.median(opening):.2f} ms, "
              f"with the first answer {1e3 * statistics.median(answering):.2f} ms")  # fmt: skip

        note(what="opening a stream", ms=1e3 * statistics.median(opening),
             answered_ms=1e3 * statistics.median(answering))  # fmt: skip
        print(f"memory: {(memory(os.getpid()) - before) / len(nodes):.1f} MB a transport in the process, "
              f"daemons {', '.join(f'{memory(pid):.0f}' for pid in pids[1:])} MB")  # fmt: skip

        note(
            what="memory",
            process_mb=(memory(os.getpid()) - before) / len(nodes),
            daemons_mb=list(map(memory, pids[1:])),
        )

        async def live(node: HivemindTransport) -> None:
            while True:
                await node.dht.publish(KEYS[0], node.peer_id.encode(), 60)
                for key in KEYS:
                    await node.dht.read(key)
                await asyncio.sleep(10)

        for name, work in (("only there", []), ("publishing and reading all keys every 10 s", nodes)):
            tasks = [asyncio.create_task(live(node)) for node in work]
            await asyncio.sleep(1)
            used = [cpu(pid) for pid in pids]
            await asyncio.sleep(idle)
            spent = [100 * (cpu(pid) - at) / idle for pid, at in zip(pids, used, strict=True)]
            print(f"{name}: {sum(spent) / len(nodes):.2f} % of a core a node "
                  f"(process {spent[0] / len(nodes):.2f}, daemon {sum(spent[1:]) / len(nodes):.2f})")  # fmt: skip
            note(what=name, idle=idle, nodes=len(nodes), percent_of_a_core=spent)
            for task in tasks:
                task.cancel()
        await asyncio.gather(*(node.close() for node in nodes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle", type=float, default=30.0, help="seconds to watch idle nodes, twice")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    asyncio.run(main(options.idle, options.json))
