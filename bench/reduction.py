"""A whole reduction on this machine's loopback, beside hivemind's averager: ``python -m bench.reduction``.

Real processes, one a peer, each with a p2p daemon of its own. One run measures, on the same data and in turns, so that
what the machine does meanwhile is in both,
- ``libp2p`` and ``streams``: all pairs push as many bytes as a round does and nothing else, over bare streams of the
  p2p daemons, and over the streams of this project, which bound what is under way;
- atoll: from the seal to all averaged chunks at every peer, and to the commit; then applying it;
- hivemind's DecentralizedAverager with the closest codec: from the assembled group to the end of the all-reduce,
  without its matchmaking.
``faster`` is hivemind's time over atoll's of the same turn, the median; beside it the least and the most. Where memory
does not suffice for both at once (``turns`` says so) it is the ratio of the medians.

Memory is what a peer's processes take above what they had before anything was sent, without the p2p daemons, whose
code is the same on both sides. Bytes are what the streams carry, control messages included, against (n-1) times the
fragment as it is encoded as a contribution and as averages: 2(n-1) times where that is the same. ``of encoded`` is the
memory beyond 64 MiB against the encoded contribution.

Without --peers the whole grid runs, row by row; with --json FILE rows that are there already are not measured again:
of the same settings, commit and machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
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
    end_on_sigterm,
    gaussian,
    is_daemon,
    read_rows,
    same,
    squared_error,
    stamp,
    table,
    write_rows,
)
from ._push import BARE, STREAMS

LOOPBACK = "127.0.0.1"
CLOSEST = {"float32": ["none"], "float16": ["float16"], "int8": ["uniform8", "blockwise"]}
"""Which of hivemind's codecs a codec is compared with; the closest that it has for those not named."""
COLUMNS = [
    ("system", "system", "s"), ("codec", "codec", "s"), ("peers", "peers", "d"), ("millions", "M params", ".0f"),
    ("seconds", "s", ".2f"), ("commit_seconds", "to commit", ".2f"), ("apply_seconds", "apply", ".2f"),
    ("mb_per_s", "MB/s", ".0f"), ("bytes_ratio", "bytes/ideal", ".4f"), ("memory_mb", "extra MB", ".0f"),
    ("memory_ratio", "of encoded", ".2f"), ("apply_memory_mb", "in apply", ".0f"), ("error", "rel. error", ".2e"),
    ("identical", "identical", ""), ("times_libp2p", "x libp2p", ".2f"), ("speedup", "faster", ".2f"),
    ("speedup_least", "least", ".2f"), ("speedup_most", "most", ".2f"), ("turns", "turns", "s"),
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


class Atoll:
    """Peers of this project's, for any number of rounds. Leaving the context ends them."""

    def __init__(self, peers: int, params: int, codec: str, options: argparse.Namespace) -> None:
        self._peers = peers
        setup = {
            "peers": peers, "params": params, "codec": codec, "chunk": options.chunk, "hosts": [LOOPBACK] * peers,
            "profile": options.profile,
        }  # fmt: skip
        self._crew = Crew(_peer.main, peers, setup)
        self.alone: dict[str, list[float]] = {BARE: [], STREAMS: []}
        """Seconds of as many bytes alone."""
        self.rounds: list[Row] = []
        self.memory: list[int] = []

    def __enter__(self) -> Atoll:
        self._crew.__enter__()
        try:
            self.contribution, self.averages, self.chunk = self._crew.ask("meet", self._crew.greetings())[0]
        except BaseException as error:
            self._crew.__exit__(type(error), error, None)
            raise
        self.ideal = (self._peers - 1) * (self.contribution + self.averages)
        self._trees = [[pid] for pid in self._crew.pids]
        self._before = Memory(self._trees)
        return self

    def __exit__(self, *error: object) -> None:
        self._crew.__exit__(*error)

    def push(self) -> None:
        """As many bytes alone, over bare streams and over ours."""
        self._crew.ask("let_go")
        for over, seconds in self.alone.items():
            spans = self._crew.ask("push", round(self.ideal / self._peers / (self._peers - 1) / 2), over)
            seconds.append(max(end for _, end in spans) - min(begin for begin, _ in spans))

    def round(self) -> float:
        """One round; its seconds."""
        self._crew.ask("let_go")
        with Memory(self._trees, self._before) as watch:
            answers = self._crew.ask("round", len(self.rounds) + 1)
            self.memory.append(max(watch.extra))
        began = min(answer["began"] for answer in answers)
        self.rounds.append({
            "seconds": max(answer["whole"] for answer in answers) - began,
            "commit_seconds": max(answer["committed"] for answer in answers) - began,
            "sent": sum(self._crew.ask("sent")), "cpu": sum(answer["cpu"] for answer in answers),
            "daemon_cpu": sum(answer["daemon_cpu"] for answer in answers),
            "loop_cpu": sum(answer["loop_cpu"] for answer in answers),
            "identical": len({answer["commit"] for answer in answers}) == 1,
        })  # fmt: skip
        return float(self.rounds[-1]["seconds"])

    def judge(self) -> list[Row]:
        """Apply the last round; the rows."""
        with Memory(self._trees) as watch:
            applied = self._crew.ask("apply")
            apply_memory = max(watch.extra)
        judged = self._crew.ask("judge")
        median = sorted(self.rounds, key=lambda r: r["seconds"])[(len(self.rounds) - 1) // 2]
        alone = {over: statistics.median_low(seconds) for over, seconds in self.alone.items()}
        most = max(self.memory)
        rows: list[Row] = [
            {"system": name, "seconds": alone[over], "all": self.alone[over],
             "mb_per_s": self.ideal / 1e6 / alone[over], "times_libp2p": alone[over] / alone[BARE]}
            for name, over in (("libp2p", BARE), ("streams", STREAMS))
        ]  # fmt: skip
        rows.append({
            "system": "atoll", "seconds": median["seconds"], "commit_seconds": median["commit_seconds"],
            "all": [r["seconds"] for r in self.rounds], "contribution": self.contribution, "averages": self.averages,
            "apply_seconds": max(answer["seconds"] for answer in applied),
            "mb_per_s": self.ideal / 1e6 / median["seconds"],
            "bytes_ratio": max(r["sent"] for r in self.rounds) / self.ideal,
            "memory_mb": most / 1e6, "memory_ratio": max(0, most - (64 << 20)) / self.contribution,
            "apply_memory_mb": apply_memory / 1e6, "all_memory": self.memory,
            "error": (sum(j["wrong"] for j in judged) / sum(j["norm"] for j in judged)) ** 0.5,
            "identical": "yes" if len({j["digest"] for j in judged}) == 1 and all(r["identical"] for r in self.rounds)
            else "NO",
            "times_libp2p": median["seconds"] / alone[BARE], "cpu": median["cpu"],
            "daemon_cpu": median["daemon_cpu"], "loop_cpu": median["loop_cpu"],
        })  # fmt: skip
        return rows


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


class Hivemind:
    """Peers with hivemind's averager, for any number of steps. Leaving the context ends them."""

    def __init__(self, peers: int, params: int, compression: str) -> None:
        self._peers = peers
        self._crew = Crew(hivemind_peer, peers, peers, params, compression)
        self._system = f"hivemind {compression}"
        self.seconds: list[float] = []
        self.memory: list[int] = []
        self.used = 0.0

    def __enter__(self) -> Hivemind:
        self._crew.__enter__()
        try:
            first = self._crew.tell(0, None)
            for index in range(1, self._peers):
                self._crew.tell(index, first)
            self._trees = [[pid for pid in tree if not is_daemon(pid)] for tree in self._crew.ask("prepare")]
        except BaseException as error:
            self._crew.__exit__(type(error), error, None)
            raise
        self._before = Memory(self._trees)
        return self

    def __exit__(self, *error: object) -> None:
        self._crew.__exit__(*error)

    def step(self) -> float:
        """One all-reduce; its seconds. Raises :class:`Failed`."""
        if self.seconds:
            self._crew.ask("refill")
        with Memory(self._trees, self._before) as watch:
            before = sum(cpu(pid) for tree in self._trees for pid in tree)
            spans = self._crew.ask("step", patience=400)
            self.used = sum(cpu(pid) for tree in self._trees for pid in tree) - before
            self.memory.append(max(watch.extra))
        self.seconds.append(max(end for _, end in spans) - min(begin for begin, _ in spans))
        return self.seconds[-1]

    def judge(self) -> Row:
        judged = self._crew.ask("judge")
        return {
            "system": self._system, "seconds": statistics.median_low(self.seconds), "all": self.seconds,
            "memory_mb": max(self.memory) / 1e6, "cpu": self.used,
            "error": (sum(j["wrong"] for j in judged) / sum(j["norm"] for j in judged)) ** 0.5,
            "identical": "yes" if len({j["digest"] for j in judged}) == 1 else "NO",
        }  # fmt: skip


# The table


def settings(peers: int, params: int, codec: str, options: argparse.Namespace) -> Row:
    """What makes rows of one cell of the grid."""
    from atoll.protocol.manifest import suggested_chunk

    chunk = options.chunk or suggested_chunk(params)
    return {"peers": peers, "params": params, "codec": codec, "chunk": chunk, "repeats": options.repeats}


def measure(peers: int, params: int, codec: str, options: argparse.Namespace, done: list[Row]) -> None:
    """Measure one cell of the grid and add its rows."""
    cell = settings(peers, params, codec, options)

    def found(system: str) -> Row | None:
        return next((row for row in done if same(row, cell | {"system": system})), None)

    def skip(system: str, reason: str) -> None:
        print(f"skipped: {system}, {peers} peers x {params / 1e6:.0f}M, {codec}: {reason}", flush=True)

    def room(*systems: str) -> bool:
        return sum(need(system, peers, params) for system in systems) <= min(available(), options.memory)

    def add(row: Row) -> None:
        done.append(cell | {"millions": params / 1e6} | row | stamp())
        write_rows(options.json, done)

    missing = []
    for compression in CLOSEST.get(codec, ["uniform8"]) if options.hivemind else ():
        if found(f"hivemind {compression}") is not None:
            continue
        if compression == "blockwise" and find_spec("bitsandbytes") is None:
            skip("hivemind blockwise", "needs bitsandbytes")
        else:
            missing.append(compression)
    if found("atoll") is None or (missing and room("atoll", "hivemind")):
        if not room("atoll"):
            skip("atoll", f"takes {need('atoll', peers, params):.0f} GiB, {available():.0f} are there")
            return
        missing = _in_turns(peers, params, codec, options, missing, room, skip, add, found("atoll") is None)
    mine = found("atoll")
    assert mine is not None
    for compression in missing:
        if not room("hivemind"):
            skip(f"hivemind {compression}", f"takes {need('hivemind', peers, params):.0f} GiB")
            continue
        try:
            with Hivemind(peers, params, compression) as theirs:
                for _ in range(options.repeats):
                    theirs.step()
                row = theirs.judge()
        except Failed as error:
            skip(f"hivemind {compression}", str(error).strip().splitlines()[-1])
            continue
        add(row | {"turns": "no", "speedup": row["seconds"] / mine["seconds"],
                   "memory_share": mine["memory_mb"] / row["memory_mb"]})  # fmt: skip


def _in_turns(
    peers: int, params: int, codec: str, options: argparse.Namespace, missing: list[str],
    room: Callable[..., bool], skip: Callable[[str, str], None], add: Callable[[Row], None], new: bool,
) -> list[str]:  # fmt: skip
    """atoll, and hivemind's averager with one codec after another beside it. new: whether atoll's own rows are wanted.
    Answers the codecs for which there was no room."""
    left, rows = [], []
    with Atoll(peers, params, codec, options) as ours:
        for compression in missing:
            if not room("hivemind"):  # atoll's peers have their memory already
                left.append(compression)
                continue
            first = len(ours.rounds)
            try:
                with Hivemind(peers, params, compression) as theirs:
                    for repeat in range(options.repeats):
                        ours.push()
                        # Neither is always the one that comes second.
                        for work in (ours.round, theirs.step)[:: -1 if repeat % 2 else 1]:
                            work()
                    row = theirs.judge()
            except Failed as error:
                skip(f"hivemind {compression}", str(error).strip().splitlines()[-1])
                continue
            beside = [r["seconds"] for r in ours.rounds[first:]]
            ratios = [their / own for their, own in zip(theirs.seconds, beside, strict=True)]
            rows.append(row | {
                "turns": "yes", "atoll_beside": beside, "ratios": ratios, "speedup": statistics.median(ratios),
                "speedup_least": min(ratios), "speedup_most": max(ratios),
                "memory_share": max(ours.memory[first:]) / 1e6 / row["memory_mb"],
            })  # fmt: skip
        while len(ours.rounds) < options.repeats:
            ours.push()
            ours.round()
        for row in [*(ours.judge() if new else ()), *rows]:
            add(row)
    return left


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
    parser.add_argument("--json", type=Path, help="write the rows there, and leave out what it has of this commit")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    end_on_sigterm()

    rows = read_rows(options.json)
    shown: list[Row] = []
    for params in options.params:
        for peers in options.peers:
            for codec in options.codec:
                measure(peers, params, codec, options, rows)
                shown += [row for row in rows if same(row, settings(peers, params, codec, options))]
    print(table(shown, COLUMNS))


if __name__ == "__main__":
    main()
