"""What a round in flight costs the trainer: ``python -m bench.overlap``.

A node's own trainer child (one thread, AdamW) trains a model of some 10M parameters while its peer goes through real
rounds over libp2p with another one, which brings numbers but does not train: its processes are bound to the last core
and give way to all others, since in a run they would be on another machine. The trainer has the first core, and its
peer and p2p daemon the others (``--free`` binds none of these): the scheduler of a machine with a core to spare finds
that by itself, but not beside the second peer.

Inner steps that a round in flight touches (from the copy at the freeze until the digest after the commit is known) are
compared with all others of the same run: the ratio of the medians, of the means, and of the medians of the processor
time that a step took, which other load on the machine changes least. A machine drifts while it is measured, so there
are several ``--windows``, runs of their own: each ratio is the mean over them, beside it half of its 95 % interval
(Student's t, the windows taken as independent), and all other figures are the windows' medians.

``busy`` is what the bare presence of work costs on this machine: the same steps, with no round, while the last core
runs a loop that touches no memory, over those while it rests. ``peer CPU s`` is what the peer and its p2p daemon used
in a whole round, training not included. ``copy`` is one copy of the parameters between the same two memories, measured
after the run, each time after other memory has been through the caches, as inner steps do; ``freeze`` and ``move`` are
how long training stood still in a round, at the contribution and at the commit. With ``--device cuda`` the trainer
computes there, and encodes there as a node's does; ``CPU`` is then the processor's time alone.

With ``--fragments`` the model is averaged in so many parts, in turn; ``peak MB`` is what a peer sends in the largest
round. First on loopback, where a round is as dense as it can be, then behind links of so many Mbit/s (needs root).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from atoll.node.compare.statistics import interval
from atoll.node.trainer import TrainerProcess
from atoll.node.worker import die_with_parent
from atoll.protocol.island import Island, Progress, Run, Snapshot
from atoll.protocol.messages import Span

from ._common import Crew, Row, cpu, end_on_sigterm, stamp, table, write_rows
from ._network import Network, Unavailable, enter

BATCH, CONTEXT = 1, 64
COLUMNS = [
    ("mbit", "Mbit/s", ".0f"), ("device", "device", "s"), ("millions", "M params", ".1f"), ("codec", "codec", "s"),
    ("fragments", "fragments", "d"), ("rounds", "rounds", "d"), ("peak_mb", "peak MB", ".2f"),
    ("flight", "in flight s", ".2f"), ("inside", "steps in", "d"), ("outside", "steps out", "d"),
    ("step_ms", "step ms", ".1f"), ("windows", "windows", "d"), ("ratio", "in/out, median", ".3f"),
    ("ratio_half", "±", ".3f"), ("mean_ratio", "mean", ".3f"), ("mean_ratio_half", "±", ".3f"),
    ("cpu_ratio", "CPU", ".3f"), ("cpu_ratio_half", "±", ".3f"), ("busy_ratio", "busy", ".3f"),
    ("peer_cpu", "peer CPU s", ".2f"),
    ("copy_ms", "copy ms", ".1f"), ("freeze_ms", "freeze ms", ".1f"), ("move_ms", "move ms", ".1f"),
]  # fmt: skip
POLL = 0.004
"""Seconds between two looks at the trainer's counters."""
RATIOS = ("ratio", "mean_ratio", "cpu_ratio")
BESIDE = 4.0
"""Seconds of each turn with and without a loop on the last core."""


class Watched(TrainerProcess):
    """A trainer that writes down its inner steps, and when rounds were in flight."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps: list[tuple[float, float, float]] = []
        """Beginning and end of each step, by the monotonic clock, and its processor seconds."""
        self.departed: list[float] = []
        self.froze: list[float] = []
        self.moved: list[float] = []

    async def watch_steps(self) -> None:
        drawn, begun = 0, 0.0
        while True:
            counters = self._memory.read()
            if counters.begun and counters.drawn != drawn:
                if counters.drawn - drawn == self._batch and begun:
                    self.steps.append((begun, begun + counters.took, counters.cpu))
                drawn, begun = counters.drawn, counters.begun
            await asyncio.sleep(POLL)

    async def snapshot(self, ahead: int, parts: Sequence[slice], until: int | None = None) -> Snapshot:
        snapshot = await super().snapshot(ahead, parts, until)
        self.departed.append(time.monotonic())
        self.froze.append(snapshot.stopped)
        return snapshot

    async def move(
        self, runs: list[Run], *, spent: float, outer_step: int, of: Snapshot | None, until: int | None = None
    ) -> Snapshot:
        moved = await super().move(runs, spent=spent, outer_step=outer_step, of=of, until=until)
        self.moved.append(moved.stopped)
        return moved


class Idle(Island):
    """It claims a round's steps as soon as it has samples, and moves by a little noise."""

    def __init__(self, parameters: int, steps: int) -> None:
        self.local = np.zeros(parameters, np.float32)
        self._noise = np.random.default_rng(1).standard_normal(parameters, np.float32) * np.float32(1e-4)
        self._steps, self._leased, self._used = steps, 0, 0

    def progress(self) -> Progress:
        wanted = self._steps * BATCH
        if not self._used and self._leased >= wanted:
            self._used, self._leased = wanted, self._leased - wanted
        return Progress(self._steps if self._used else 0, self._used * CONTEXT, self._used, self._leased, 0.01)

    def lease(self, spans: list[Span]) -> None:
        self._leased += sum(span.count for span in spans)

    def revoke(self) -> None:
        self._leased = 0

    def keep(self) -> str:
        raise NotImplementedError("nothing is saved here")

    def restore(self, kept: str) -> None:
        raise NotImplementedError("nothing is saved here")

    async def freeze(self) -> Snapshot:
        progress = self.progress()
        if progress.steps:
            self.local += self._noise
        return Snapshot(progress.steps, progress.tokens, progress.units, progress.leased)

    async def resume(
        self, *, reload: bool, spent: float, outer_step: int, of: Snapshot | None = None, ahead: int | None = None,
        until: int | None = None,
    ) -> None:  # fmt: skip
        self._used = 0 if spent else self._used

    async def snapshot(self, ahead: int, parts: Sequence[slice], until: int | None = None) -> Snapshot:
        raise NotImplementedError("it has no second memory, so it is never asked")

    async def move(
        self, runs: list[Run], *, spent: float, outer_step: int, of: Snapshot | None, until: int | None = None
    ) -> Snapshot:
        raise NotImplementedError("it has no second memory, so it is never asked")

    async def close(self) -> None:
        pass


def peer_main(connection: Connection, index: int, options: dict[str, Any]) -> None:
    """Entry of a peer's process: 0 trains, 1 does not. Answers its addresses, then takes the other's and runs."""
    die_with_parent()
    cores = _cores()
    if index and cores:
        os.setsid()
        os.sched_setaffinity(0, cores[-1:])
        give_way(os.getpid())
    elif options["bind"]:
        os.sched_setaffinity(0, cores[1:])  # and so whatever it starts, the trainer for a moment included
    if options["namespaces"]:
        enter(options["namespaces"][index])  # before any thread is started
    asyncio.run(_peer(connection, index, options))


def _cores() -> list[int]:
    """The cores this process may use, where it can be bound to some of them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def give_way(pid: int) -> None:
    """What would be on another machine gives way to what is measured: the process, and on Linux its session."""
    os.setpriority(os.PRIO_PROCESS, pid, 10)
    with suppress(OSError), open(f"/proc/{pid}/autogroup", "w") as group:
        group.write("10")


async def _peer(connection: Connection, index: int, options: dict[str, Any]) -> None:
    from atoll.node.config import DataConfig, InnerConfig, ModelConfig
    from atoll.node.encoder import coding_of
    from atoll.node.run_defaults import new_manifest
    from atoll.node.specs import tensor_specs
    from atoll.protocol import kernels
    from atoll.protocol.hivemind_transport import HivemindTransport
    from atoll.protocol.identity import load_or_create_identity
    from atoll.protocol.peer import Peer
    from atoll.protocol.records import RecordGate
    from atoll.protocol.store import Store
    from atoll.protocol.theta0 import theta0

    steps = options["steps"]
    manifest = new_manifest(
        "overlap", preset="10m", model={"context": CONTEXT}, batch=BATCH, optimizer="adamw", inner_steps=steps,
        overlap=options["overlap"], fragments=options["fragments"], codec=options["codec"],
        rounds=options["rounds"], quorum=2,
        state={"checkpoint_every": 1000},
    )  # fmt: skip
    kernels.warm_up()
    model = ModelConfig.from_table(manifest.model)
    layout = manifest.layout
    flights: list[float] = []
    spent: list[float] = []
    sent: list[int] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        signer = load_or_create_identity(folder / "key")
        transport = await HivemindTransport.create(
            identity_path=folder / "key", run_id=manifest.run_id, seeds=options["seeds"],
            validator=RecordGate(manifest.run_id, signer), listen=[f"/ip4/{options['hosts'][index]}/tcp/0"],
            threads=2, require_seed=False,
        )  # fmt: skip
        if index and transport.daemon_pid:
            give_way(transport.daemon_pid)
        connection.send((True, [f"{address}/p2p/{transport.peer_id}" for address in transport.addresses()]))
        island: Watched | Idle = Idle(layout.parameters, steps)
        if index == 0:
            coding, why = coding_of(manifest, options["encode"], options["device"])
            if why:
                print(f"contributions are encoded on the host: {why}", file=sys.stderr, flush=True)
            trainer = await Watched.start(
                model, DataConfig.from_table(manifest.data), InnerConfig.from_table(manifest.inner), steps,
                options["rounds"], device=options["device"], threads=1, overlap=True,
                fragments=options["fragments"], coding=coding,
            )  # fmt: skip
            assert isinstance(trainer, Watched)
            island = trainer
            if options["bind"]:
                for thread in os.listdir(f"/proc/{trainer.pid}/task"):
                    os.sched_setaffinity(int(thread), options["bind"][:1])
            if trainer.device == "cpu":
                transport.use_threads(min((os.cpu_count() or 1) - trainer.threads, 2))  # as a node does
        store = Store.open(folder / "store", manifest.run_id, layout)

        def events(event: str, /, **fields: Any) -> None:
            if event == "digest":
                flights.append(time.monotonic())
                sent.append(transport.bytes_sent)
                spent.append(cpu(os.getpid()) + cpu(transport.daemon_pid or os.getpid()))
            elif event == "warning" or (event == "void" and fields["roster"]):
                print(f"peer {index}: {event} {fields}", file=sys.stderr, flush=True)

        peer = Peer(
            transport=transport, signer=signer, manifest=manifest, store=store, events=events, island=island,
            theta0=lambda: theta0(model.seed, tensor_specs(model)), linger=5.0,
        )  # fmt: skip
        order, addresses = await asyncio.to_thread(connection.recv)
        assert order == "run"
        watching = asyncio.create_task(island.watch_steps()) if isinstance(island, Watched) else None
        busy = await beside_a_loop(island) if isinstance(island, Watched) and options["bind"] else None
        if index:
            transport.learn(addresses[0].rsplit("/p2p/", 1)[1], [a.rsplit("/p2p/", 1)[0] for a in addresses])
        await peer.run()
        answer: Row = {}
        if isinstance(island, Watched) and watching is not None:
            watching.cancel()
            answer = judge(island, flights) | {
                "params": layout.parameters,
                "chunk": layout.chunk,
                "device": island.device,
                "busy_ratio": busy,
                "copy_ms": 1000 * copying(island),
                "peak_mb": max(b - a for a, b in pairwise(sent[2:])) / 1e6,
                "peer_cpu": (spent[-1] - spent[2]) / (len(spent) - 3),
            }
        await island.close()
        await transport.close()
        store.close()
        connection.send((True, answer))


async def beside_a_loop(island: Watched) -> float | None:
    """Inner steps while the last core runs a loop that touches no memory, over those while it rests; medians.
    None when no step was ended in them."""
    island.lease([Span(0, 1_000_000)])
    await island.resume(reload=True, spent=1.0, outer_step=0)
    found: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(6):
        loop = None
        if turn % 2:
            loop = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
            os.sched_setaffinity(loop.pid, _cores()[-1:])
        island.steps.clear()
        await asyncio.sleep(BESIDE)
        found[turn % 2 == 1] += [end - begin for begin, end, _ in island.steps[1:]]
        if loop is not None:
            loop.kill()
            await loop.wait()
    await island.freeze()
    island.revoke()
    island.steps.clear()
    return statistics.median(found[True]) / statistics.median(found[False]) if all(found.values()) else None


def copying(island: Watched) -> float:
    """Seconds of one copy of the parameters, the median of some."""
    assert island.frozen is not None
    times = []
    other = np.zeros(1 << 24, np.float32)
    for _ in range(15):
        other += np.float32(1)
        began = time.perf_counter()
        np.copyto(island.frozen, island.local)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def judge(island: Watched, digests: Sequence[float]) -> Row:
    """Steps with a round in flight against the others, from the second round on."""
    flights = [(begin, min((at for at in digests if at > begin), default=begin)) for begin in island.departed][2:]
    inside: list[tuple[float, float]] = []
    outside: list[tuple[float, float]] = []
    for begin, end, used in island.steps:
        if begin < flights[0][0]:
            continue
        touched = any(begin < stop and start < end for start, stop in flights)
        (inside if touched else outside).append((end - begin, used))
    ratios = [
        average(step[which] for step in inside) / average(step[which] for step in outside)
        for which, average in ((0, statistics.median), (0, statistics.mean), (1, statistics.median))
    ]
    return {
        "rounds": len(flights),
        "flight": statistics.median(stop - start for start, stop in flights),
        "inside": len(inside),
        "outside": len(outside),
        "step_ms": 1000 * statistics.median(wall for wall, _ in outside),
        "step_cpu_ms": 1000 * statistics.median(used for _, used in outside),
        "ratio": ratios[0],
        "mean_ratio": ratios[1],
        "cpu_ratio": ratios[2],
        "freeze_ms": 1000 * statistics.median(island.froze[2:]),
        "move_ms": 1000 * statistics.median(island.moved[2:]),
    }


def measure(mbit: float, options: argparse.Namespace) -> Row:
    """One run; ``mbit`` 0: loopback."""
    with ExitStack() as stack:
        network = stack.enter_context(Network([mbit] * 2, 0.0)) if mbit else None
        setup: dict[str, Any] = {
            "steps": options.steps, "overlap": options.overlap, "rounds": options.rounds, "codec": options.codec,
            "fragments": options.fragments, "hosts": network.addresses if network else ["127.0.0.1"] * 2, "seeds": [],
            "namespaces": network.names if network else [],
            "bind": [] if options.free or len(_cores()) < 2 else _cores(),
            "device": options.device, "encode": options.encode,
        }  # fmt: skip
        crew = stack.enter_context(Crew(peer_main, 2, setup))
        greetings = crew.greetings()
        patience = 600.0
        answers: list[Row] = crew.ask("run", each=[greetings[1], greetings[0]], patience=patience)
    return answers[0] | stamp()


def together(mbit: float, windows: Sequence[Row], options: argparse.Namespace) -> Row:
    """The row of several windows; they stand in it."""
    first = windows[0]
    row: Row = {
        "mbit": mbit or None, "codec": options.codec, "fragments": options.fragments, "steps": options.steps,
        "overlap": options.overlap, "asked_rounds": options.rounds, "encode": options.encode, "free": options.free,
        "windows": len(windows), "each": list(windows), "device": first["device"],
        "params": first["params"], "millions": first["params"] / 1e6, "chunk": first["chunk"],
    }  # fmt: skip
    for key, value in first.items():
        if key in RATIOS:
            ratios = [window[key] for window in windows if window[key] is not None]
            found = interval(ratios) if ratios else None
            row[key] = found.mean if found is not None else None
            row[f"{key}_half"] = found.half_width if found is not None and len(ratios) > 1 else None
        elif key not in row and isinstance(value, int | float):
            row[key] = statistics.median_low([window[key] for window in windows if window[key] is not None])
    return row | stamp()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="*", default=[0, 50], help="0: loopback")
    parser.add_argument("--steps", type=int, default=16, help="inner steps in a round (H)")
    parser.add_argument("--overlap", type=int, default=12, help="inner steps that may run ahead (τ)")
    parser.add_argument("--rounds", type=int, default=12, help="of each fragment")
    parser.add_argument("--fragments", type=int, default=1, help="parts of the model that are averaged in turn (P)")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--free", action="store_true", help="leave it to the scheduler where the trainer's peer runs")
    parser.add_argument("--windows", type=int, default=3, help="runs of each link (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where the trainer computes: cpu, cuda (default: %(default)s)")
    parser.add_argument("--encode", default="auto", choices=["auto", "host", "device"], help="as of a node")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    end_on_sigterm()
    rows: list[Row] = []
    found: dict[float, list[Row]] = {mbit: [] for mbit in options.mbit}
    for _ in range(options.windows):  # links in turns, so that what changes with time is in all of them
        for mbit, windows in found.items():
            try:
                windows.append(measure(mbit, options))
            except Unavailable as error:
                print(f"links cannot be shaped on this machine: {error}", file=sys.stderr)
                return 7
            rows = [together(link, those, options) for link, those in found.items() if those]
            write_rows(options.json, rows)
    print(table(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
