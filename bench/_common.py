"""What the benchmarks share: rows and tables, real processes that take orders, memory of other processes, test data."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
BLOCK = 1 << 20
"""Values that test data is made in at a time."""


# Rows


def read_rows(path: Path | None) -> list[Row]:
    """The rows of an earlier run; none when there is no such file."""
    if path is None or not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text())
    return rows


def write_rows(path: Path | None, rows: Sequence[Row]) -> None:
    """Write all rows, whole or not at all."""
    if path is not None:
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(json.dumps(list(rows), indent=1) + "\n")
        temporary.replace(path)


def stamp() -> Row:
    """What every row says besides its figures: the commit (with a plus where the files differ from it; none outside of
    a clone), the machine, the time in UTC, and the load average of the last minute."""
    return {
        "commit": commit(), "machine": machine(), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load": round(os.getloadavg()[0], 2),
    }  # fmt: skip


@functools.cache
def commit() -> str | None:
    """The commit that is measured, as it was at the first call."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def machine() -> str:
    """The processor and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def same(row: Row, wanted: Row) -> bool:
    """Whether a row of an earlier run is what would be measured now: all these settings, this commit, this machine."""
    wanted = {"commit": commit(), "machine": machine()} | wanted
    return all(key in row and row[key] == value for key, value in wanted.items())


def table(rows: Sequence[Row], columns: Sequence[tuple[str, str, str]]) -> str:
    """Text of a table; columns: (key, title, format). What a row lacks shows as a dash."""
    body = [[title for _, title, _ in columns]]
    for row in rows:
        body.append(["-" if row.get(key) is None else format(row[key], style) for key, _, style in columns])
    widths = [max(len(line[i]) for line in body) for i in range(len(columns))]
    lines = []
    for line in body:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# Processes


class Failed(Exception):
    """A process of the benchmark failed; the text is its traceback."""


def end_on_sigterm() -> None:
    """Leave all contexts when asked to end, so that neither processes nor namespaces stay; once, for whoever asks twice
    (as ``timeout`` does) would interrupt just that."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(143)

    signal.signal(signal.SIGTERM, end)


class Crew:
    """Processes that run ``target(connection, index, *arguments)`` and answer one message for each that they get.

    They are new processes, not forks, so that none inherits memory; and not daemonic, since hivemind forks in them.
    Leaving the context ends those that are left.
    """

    def __init__(self, target: Callable[..., None], count: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for index in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_run, args=(target, theirs, index, arguments))
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def greetings(self, patience: float = 120) -> list[Any]:
        """What every process says first."""
        return [self._answer(index, "the start", patience) for index in range(len(self._ends))]

    def tell(self, index: int, message: Any, patience: float = 120) -> Any:
        """Send one process a message and return its answer."""
        self._ends[index].send(message)
        return self._answer(index, "a message", patience)

    def ask(self, order: str, *arguments: Any, each: Sequence[Any] | None = None, patience: float = 600) -> list[Any]:
        """Give everyone an order at once and wait for all answers. ``each``: one more argument for every process."""
        for index, end in enumerate(self._ends):
            end.send((order, *arguments, *(() if each is None else (each[index],))))
        return [self._answer(index, order, patience) for index in range(len(self._ends))]

    def _answer(self, index: int, order: str, patience: float) -> Any:
        if not self._ends[index].poll(patience):
            raise Failed(f"process {index} did not answer {order!r} within {patience:.0f} s")
        try:
            good, answer = self._ends[index].recv()
        except EOFError:
            raise Failed(f"process {index} died over {order!r}") from None
        if not good:
            raise Failed(f"process {index} failed over {order!r}:\n{answer}")
        return answer

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.close()  # whoever waits for an order ends
        deadline = time.monotonic() + 20
        try:
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:  # also when asked to end meanwhile: who is left would be waited for at the end, for ever
            for process in self._processes:
                if process.is_alive():
                    for pid in [*descendants(process.pid or 0)]:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, 9)
                    process.kill()
                    process.join(5)


def _run(target: Callable[..., None], connection: Connection, index: int, arguments: tuple[Any, ...]) -> None:
    import traceback

    try:
        target(connection, index, *arguments)
    except EOFError:
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send((False, traceback.format_exc()))
        raise


# Memory and CPU of processes


def descendants(pid: int) -> Iterator[int]:
    """The process and all below it."""
    yield pid
    try:
        children = [int(child) for thread in os.listdir(f"/proc/{pid}/task")
                    for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]  # fmt: skip
    except OSError:
        return
    for child in children:
        yield from descendants(child)


def cpu(pid: int) -> float:
    """Seconds of CPU time that a process has used; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_daemon(pid: int) -> bool:
    """Whether it is a p2p daemon: they are the same on both sides of the comparison and are counted apart."""
    try:
        return b"p2pd" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _status(pid: int) -> tuple[int, int]:
    """Bytes of (private, shared) resident memory."""
    private = shared = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                private = int(line.split()[1]) * 1024
            elif line.startswith("RssShmem:"):
                shared = int(line.split()[1]) * 1024
    except OSError:
        pass
    return private, shared


class Memory:
    """Peak resident memory of peers above where it stood at the start, while the context lasts.

    A peer is a list of processes. Private memory is added up; shared memory is taken from the process that has most
    of it, since the same pages show up in each. Looks every 10 ms.
    """

    def __init__(self, peers: Sequence[Sequence[int]], base: Memory | None = None) -> None:
        """base: one whose start counts instead of now."""
        self._peers = [list(pids) for pids in peers]
        self._base: list[int] = [self._now(pids) for pids in self._peers] if base is None else base._base
        self._peak = list(self._base)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @staticmethod
    def _now(pids: Sequence[int]) -> int:
        found = [_status(pid) for pid in pids]
        return sum(private for private, _ in found) + max(shared for _, shared in found)

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            for index, pids in enumerate(self._peers):
                self._peak[index] = max(self._peak[index], self._now(pids))

    @property
    def extra(self) -> list[int]:
        """Bytes of each peer."""
        return [peak - base for peak, base in zip(self._peak, self._base, strict=True)]

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


# Data


def gaussian(peer: int, first: int, out: NDArray[np.float32]) -> None:
    """Pseudo-gradients of a peer, elements from ``first`` on (a multiple of ``BLOCK``): normal, deviation 1e-3."""
    for start in range(0, out.size, BLOCK):
        part = out[start : start + BLOCK]
        generator = np.random.Generator(np.random.SFC64([peer, (first + start) // BLOCK]))
        generator.standard_normal(dtype=np.float32, out=part)
        part *= np.float32(1e-3)


def squared_error(index: int, count: int, mean: NDArray[np.float32]) -> tuple[float, float]:
    """Squares of (error, exact mean) of every ``count``-th block of a mean over ``count`` peers' :func:`gaussian`."""
    wrong = norm = 0.0
    for start in range(index * BLOCK, mean.size, count * BLOCK):
        part = mean[start : start + BLOCK]
        exact = np.zeros(part.size, np.float64)
        scratch = np.empty(part.size, np.float32)
        for peer in range(count):
            gaussian(peer, start, scratch)
            exact += scratch
        exact /= count
        wrong += float(np.square(part - exact).sum())
        norm += float(np.square(exact).sum())
    return wrong, norm
