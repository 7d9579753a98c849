"""A whole reduction on this machine's loopback, beside hivemind's averager: ``python -m bench.reduction``.

Real processes, one a peer, each with a p2p daemon of its own. One run measures, on the same data,
- the raw limit: all pairs push as many bytes as a round does over raw streams of the same transport, nothing else;
- atoll: from the seal to all averaged chunks at every peer, and to the commit; then applying it;
- hivemind's DecentralizedAverager with the closest codec: from the assembled group to the end of the all-reduce,
  without its matchmaking.

Memory is what a peer's processes take above what they had before (without the p2p daemons, whose code is the same on
both sides). Bytes are what the streams carry, control messages included, against 2(n-1)/n of the encoded fragment.

Without --peers the whole grid runs, row by row; with --json FILE rows that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from . import _peer
from ._common import (
    Crew,
    Failed,
    Memory,
    Row,
    cpu,
    descendants,
    gaussian,
    is_daemon,
    read_rows,
    squared_error,
    table,
    write_rows,
)

LOOPBACK = "127.0.0.1"
CLOSEST = {"float32": ["none"], "float16": ["float16"], "int8": ["uniform8", "blockwise"]}
"""Which of hivemind's codecs a codec is compared with; the closest that it has for those not named."""
COLUMNS = [
    ("system", "system", "s"), ("codec", "codec", "s"), ("peers", "peers", "d"), ("millions", "M params", ".0f"),
    ("seconds", "s", ".2f"), ("commit_seconds", "to commit", ".2f"), ("apply_seconds", "apply", ".2f"),
    ("mb_per_s", "MB/s", ".0f"), ("bytes_ratio", "bytes/ideal", ".4f"), ("memory_mb", "extra MB", ".0f"),
    ("memory_ratio", "of encoded", ".2f"), ("apply_memory_mb", "in apply", ".0f"), ("error", "rel. error", ".2e"),
    ("identical", "identical", ""), ("times_raw", "x raw", ".2f"), ("speedup", "faster", ".2f"),
    ("memory_share", "memory", ".2f"), ("cpu", "CPU s", ".2f"), ("loop_cpu", "of it loop", ".2f"),
    ("daemon_cpu", "p2pd", ".2f"), ("load", "load", ".1f"),
]  # fmt: skip


def need(system: str, peers: int, params: int) -> float:
    """GiB that a measurement takes, roughly."""
    each = 0.35 + (4 * 4 + 4 if system == "atoll" else 4 * 5.5) * params / 2**30
    return peers * each


def available() -> float:
    """GiB of memory that can be had now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return 0.0


# atoll


def measure_atoll(peers: int, params: int, codec: str, options: argparse.Namespace) -> list[Row]:
    setup = {
        "peers": peers, "params": params, "codec": codec, "chunk": options.chunk, "hosts": [LOOPBACK] * peers,
        "profile": options.profile,
    }  # fmt: skip
    with Crew(_peer.main, peers, setup) as crew:
        book = crew.ask("meet", crew.greetings())
        encoded = book[0]
        ideal = 2 * (peers - 1) * encoded
        raw, rounds, memory = [], [], []
        start: Memory | None = None
        for repeat in range(options.repeats):
            crew.ask("let_go")
            size = round(ideal / peers / (peers - 1) / 2)
            answers = crew.ask("raw", size)
            raw.append(max(end for _, end in answers) - min(begin for begin, _ in answers))
            with Memory([[pid] for pid in crew.pids], start) as watch:
                start = start or watch
                answers = crew.ask("round", repeat + 1)
                memory.append(max(watch.extra))
            began = min(answer["began"] for answer in answers)
            rounds.append({
                "seconds": max(answer["whole"] for answer in answers) - began,
                "commit_seconds": max(answer["committed"] for answer in answers) - began,
                "sent": sum(crew.ask("sent")), "cpu": sum(answer["cpu"] for answer in answers),
                "daemon_cpu": sum(answer["daemon_cpu"] for answer in answers),
                "loop_cpu": sum(answer["loop_cpu"] for answer in answers),
                "identical": len({answer["commit"] for answer in answers}) == 1,
            })  # fmt: skip
        with Memory([[pid] for pid in crew.pids]) as watch:
            applied = crew.ask("apply")
            apply_memory = max(watch.extra)
        judged = crew.ask("judge")
    median = sorted(rounds, key=lambda r: r["seconds"])[(len(rounds) - 1) // 2]
    raw_seconds = statistics.median_low(raw)
    common = {
        "load": os.getloadavg()[0],
        "peers": peers,
        "params": params,
        "millions": params / 1e6,
        "encoded": encoded,
    }
    return [
        common | {"system": "raw streams", "codec": codec, "seconds": raw_seconds, "all": raw,
                  "mb_per_s": ideal / 1e6 / raw_seconds, "times_raw": 1.0},
        common | {
            "system": "atoll", "codec": codec, "seconds": median["seconds"], "commit_seconds": median["commit_seconds"],
            "all": [r["seconds"] for r in rounds],
            "apply_seconds": max(answer["seconds"] for answer in applied),
            "mb_per_s": ideal / 1e6 / median["seconds"], "bytes_ratio": max(r["sent"] for r in rounds) / ideal,
            "memory_mb": max(memory) / 1e6, "memory_ratio": max(0, max(memory) - (64 << 20)) / encoded,
            "apply_memory_mb": apply_memory / 1e6, "all_memory": memory,
            "error": (sum(j["wrong"] for j in judged) / sum(j["norm"] for j in judged)) ** 0.5,
            "identical": "yes" if len({j["digest"] for j in judged}) == 1 and all(r["identical"] for r in rounds)
            else "NO",
            "times_raw": median["seconds"] / raw_seconds, "cpu": median["cpu"], "daemon_cpu": median["daemon_cpu"],
            "loop_cpu": median["loop_cpu"],
        },
    ]  # fmt: skip


# hivemind


def hivemind_peer(connection: Connection, index: int, peers: int, params: int, compression: str) -> None:
    """A process with one DecentralizedAverager; answers orders like :class:`bench._peer.BenchPeer`."""
    import multiprocessing as mp

    os.environ["HIVEMIND_LOGLEVEL"] = "ERROR"
    import hivemind
    import hivemind.compression as compression_of
    import torch
    from blake3 import blake3

    codec = {
        "none": compression_of.NoCompression, "float16": compression_of.Float16Compression,
        "uniform8": compression_of.Uniform8BitQuantization, "blockwise": compression_of.BlockwiseQuantization,
    }[compression]()  # fmt: skip
    mp.set_start_method("fork", force=True)  # hivemind cannot be started in any other way
    span = mp.Array("d", 2)

    class Timed(hivemind.DecentralizedAverager):  # type: ignore[misc]
        async def _aggregate_with_group(self, *arguments: Any, **more: Any) -> Any:
            span[0] = time.monotonic()
            try:
                return await super()._aggregate_with_group(*arguments, **more)
            finally:
                span[1] = time.monotonic()

    seed = connection.recv()
    dht = hivemind.DHT(initial_peers=seed or [], start=True, host_maddrs=[f"/ip4/{LOOPBACK}/tcp/0"])
    connection.send((True, [str(address) for address in dht.get_visible_maddrs()]))
    tensor = torch.empty(params)
    averager: Any = None
    try:
        while True:
            order = connection.recv()[0]
            answer: Any = None
            if order == "prepare":
                gaussian(index, 0, tensor.numpy())
                averager = Timed(
                    [tensor], dht, prefix="bench", target_group_size=peers, min_group_size=peers, start=True,
                    compression=codec, min_matchmaking_time=4.0, request_timeout=3.0, allreduce_timeout=240.0,
                    next_chunk_timeout=60.0, sender_timeout=60.0, reducer_timeout=120.0, bandwidth=1e8,
                    min_vector_size=0, allow_state_sharing=False,
                )  # fmt: skip
                answer = [*descendants(os.getpid())]
            elif order == "refill":
                with averager.get_tensors() as tensors:
                    gaussian(index, 0, tensors[0].numpy())
            elif order == "step":
                span[0] = span[1] = 0.0
                averager.step(timeout=300)
                answer = (span[0], span[1])
            elif order == "judge":
                with averager.get_tensors() as tensors:
                    mean = tensors[0].numpy()
                    wrong, norm = squared_error(index, peers, mean)
                    answer = {"digest": blake3(mean.view(np.uint8)).hexdigest(), "wrong": wrong, "norm": norm}
            connection.send((True, answer))
    finally:
        if averager is not None:
            averager.shutdown()
        dht.shutdown()


def measure_hivemind(peers: int, params: int, compression: str, codec: str, options: argparse.Namespace) -> Row:
    with Crew(hivemind_peer, peers, peers, params, compression) as crew:
        first = crew.tell(0, None)
        for index in range(1, peers):
            crew.tell(index, first)
        trees = [[pid for pid in tree if not is_daemon(pid)] for tree in crew.ask("prepare")]
        seconds, memory, used = [], [], 0.0
        start: Memory | None = None
        for repeat in range(options.repeats):
            if repeat:
                crew.ask("refill")
            with Memory(trees, start) as watch:
                start = start or watch
                before = sum(cpu(pid) for tree in trees for pid in tree)
                spans = crew.ask("step", patience=400)
                used = sum(cpu(pid) for tree in trees for pid in tree) - before
                memory.append(max(watch.extra))
            seconds.append(max(end for _, end in spans) - min(begin for begin, _ in spans))
        judged = crew.ask("judge")
    median = statistics.median_low(seconds)
    return {
        "load": os.getloadavg()[0], "system": f"hivemind {compression}",
        "codec": codec, "peers": peers, "params": params,
        "millions": params / 1e6, "seconds": median, "all": seconds, "memory_mb": max(memory) / 1e6, "cpu": used,
        "error": (sum(j["wrong"] for j in judged) / sum(j["norm"] for j in judged)) ** 0.5,
        "identical": "yes" if len({j["digest"] for j in judged}) == 1 else "NO",
    }  # fmt: skip


# The table


def measure(peers: int, params: int, codec: str, options: argparse.Namespace, done: list[Row]) -> None:
    """Measure one cell of the grid and add its rows."""

    def has(system: str) -> bool:
        return any(
            (row["system"], row["peers"], row["params"], row["codec"]) == (system, peers, params, codec) for row in done
        )

    def skip(system: str, reason: str) -> None:
        print(f"skipped: {system}, {peers} peers x {params / 1e6:.0f}M, {codec}: {reason}", flush=True)

    if not has("atoll"):
        if need("atoll", peers, params) > min(available(), options.memory):
            skip("atoll", f"takes {need('atoll', peers, params):.0f} GiB, {available():.0f} are there")
            return
        done += measure_atoll(peers, params, codec, options)
        write_rows(options.json, done)
    for compression in CLOSEST.get(codec, ["uniform8"]) if options.hivemind else ():
        if has(f"hivemind {compression}"):
            continue
        if compression == "blockwise" and find_spec("bitsandbytes") is None:
            skip("hivemind blockwise", "needs bitsandbytes")
            continue
        if need("hivemind", peers, params) > min(available(), options.memory):
            skip(f"hivemind {compression}", f"takes {need('hivemind', peers, params):.0f} GiB")
            continue
        try:
            done.append(measure_hivemind(peers, params, compression, codec, options))
        except Failed as error:
            skip(f"hivemind {compression}", str(error).strip().splitlines()[-1])
            continue
        write_rows(options.json, done)
    mine = next(row for row in done if (row["system"], row["peers"], row["params"], row["codec"])
                == ("atoll", peers, params, codec))  # fmt: skip
    for row in done:
        if row["system"].startswith("hivemind") and (row["peers"], row["params"], row["codec"]) == (
            peers, params, codec,
        ):  # fmt: skip
            row["speedup"] = row["seconds"] / mine["seconds"]
            row["memory_share"] = mine["memory_mb"] / row["memory_mb"]
    write_rows(options.json, done)


def main() -> None:
    from atoll.protocol.codecs import CODECS

    # What is averaged here is a vector, without matrices in it.
    codecs = [name for name in CODECS if name != "lowrank"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--params", type=int, nargs="+", default=[10_000_000, 100_000_000])
    parser.add_argument("--codec", nargs="+", default=codecs, choices=codecs)
    parser.add_argument("--chunk", type=int, default=0, help="elements in a chunk (default: as a new run would have)")
    parser.add_argument("--repeats", type=int, default=3, help="the median counts, and the most memory")
    parser.add_argument("--memory", type=float, default=24.0, help="GiB that may be used (default: %(default)s)")
    parser.add_argument("--no-hivemind", dest="hivemind", action="store_false")
    parser.add_argument("--profile", help="write one peer's profile (cProfile) of the last round to this file")
    parser.add_argument("--json", type=Path, help="write the rows there, and leave out what it has")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left

    rows = read_rows(options.json)
    for params in options.params:
        for peers in options.peers:
            for codec in options.codec:
                measure(peers, params, codec, options, rows)
    wanted = [row for row in rows if row["peers"] in options.peers and row["params"] in options.params
              and row["codec"] in options.codec]  # fmt: skip
    print(table(wanted, COLUMNS))


if __name__ == "__main__":
    main()
