"""The swarm's children: started in sessions of their own, watched, and gone when the swarm is gone.

Ctrl-C reaches the swarm alone, which passes it on; a swarm that is killed takes its children along (Linux: the kernel
sends them SIGTERM); what a killed child leaves behind (its p2p daemon, its trainer) is adopted by the swarm and ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from atoll.node.events import EVENT_FILE, Event, EventTail

PATIENCE = 8.0
"""Seconds between asking a child to end and killing it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _load_prctl() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return None
    return function


_prctl = _load_prctl()


def child_environment(threads: int) -> dict[str, str]:
    """The environment of a child: no ATOLL_ variables (they are meant for us), libraries limited to ``threads``."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        env[name] = str(threads)
    env["PYTHONUNBUFFERED"] = "1"
    return env


class Child:
    """One child process with its folder: follows ``events.jsonl`` there and keeps its output in ``output.log``.

    arguments: what follows ``python -m``.
    """

    def __init__(self, name: str, folder: Path, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self.folder = folder
        self.output = folder / "output.log"
        self.tail = EventTail(folder / EVENT_FILE)
        folder.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()

        def die_with_parent() -> None:
            # Runs between fork and exec: nothing here may take locks or allocate much.
            if _prctl is not None:
                _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
                if os.getppid() != parent:
                    os._exit(130)

        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def code(self) -> int | None:
        """Exit code; negative for a signal; None while it runs."""
        return self.process.poll()

    def events(self) -> list[Event]:
        return self.tail.poll()

    def ask(self, number: int) -> None:
        """Send it a signal; nothing happens when it has ended."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def last_words(self) -> str:
        """The last line of its output that says something: the reason, when it ended badly."""
        try:
            lines = self.output.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        spoken = [line.strip() for line in lines if line.strip()]
        errors = [line for line in spoken if line.startswith("atoll: error: ")]
        return (errors or spoken or [""])[-1].removeprefix("atoll: error: ")


class Interrupts:
    """Ctrl-C and SIGTERM as something to wait for, instead of an exception anywhere. Main thread only."""

    def __init__(self) -> None:
        self.count = 0
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"!")

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long; True when an interrupt has come, now or before."""
        if not self.count:
            select.select([self._read], [], [], max(0.0, seconds))
        return bool(self.count)

    def wait_more(self, seconds: float) -> bool:
        """Like :meth:`wait` for one more interrupt than have come so far."""
        seen = self.count
        while select.select([self._read], [], [], 0)[0]:
            os.read(self._read, 64)
        if self.count == seen:
            select.select([self._read], [], [], max(0.0, seconds))
        return self.count > seen


class Family:
    """All children of a swarm. Leaving the context leaves no process behind."""

    def __init__(self) -> None:
        self.children: dict[str, Child] = {}
        self._strangers: set[int] = set()

    def __enter__(self) -> Family:
        self._strangers = descendants(os.getpid())
        if _prctl is not None:
            # Orphans of a killed child come to us instead of to init, so they can be found and ended.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        for child in self.children.values():
            child.tail.close()
        if _prctl is not None:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def start(self, name: str, folder: Path, arguments: Sequence[str], env: Mapping[str, str]) -> Child:
        child = self.children[name] = Child(name, folder, arguments, env)
        return child

    def stop(
        self,
        names: Iterable[str],
        interrupts: Interrupts,
        *,
        number: int = signal.SIGINT,
        patience: float = PATIENCE,
    ) -> None:
        """Ask these children to end, and kill who has not after ``patience`` seconds.

        number: SIGINT (as Ctrl-C in their own terminal, code 130) or SIGTERM (as a service manager, code 0). Another
        Ctrl-C here meanwhile shortens the patience to nothing.
        """
        chosen = [self.children[name] for name in names]
        for child in chosen:
            child.ask(number)
        deadline = time.monotonic() + patience
        while any(child.code is None for child in chosen) and time.monotonic() < deadline:
            if interrupts.wait_more(0.05):
                break
        for child in chosen:
            if child.code is None:
                kill_tree(child.process.pid)
                child.process.wait()

    def kill(self) -> None:
        """End every child and everything they started, at once. Bounded."""
        for child in self.children.values():
            if child.code is None:
                kill_tree(child.process.pid)
                child.process.wait()
        # What killed children left behind was adopted by us; it may have children itself.
        for _ in range(20):
            rest = descendants(os.getpid()) - self._strangers
            for pid in rest:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._reap(rest)
            if not rest:
                return

    @staticmethod
    def _reap(pids: Iterable[int]) -> None:
        for pid in pids:
            # Killed a moment ago, so waiting is short; those that are not our own children raise.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def exit_codes(self) -> dict[str, int | None]:
        return {name: child.code for name, child in self.children.items()}


def parents() -> dict[int, int]:
    """Process id to parent id of every process that can be seen; empty where there is no /proc."""
    found: dict[int, int] = {}
    try:
        entries = os.listdir("/proc")
    except OSError:
        return found
    for entry in entries:
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as stat:
                    # The name in parentheses may hold anything; the fields after it are numbers.
                    found[int(entry)] = int(stat.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
    return found


def descendants(pid: int) -> set[int]:
    """Children of ``pid``, their children and so on, zombies included."""
    children: dict[int, list[int]] = {}
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    found: set[int] = set()
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in found:
                found.add(child)
                queue.append(child)
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL ``pid``, its process group and everything below it."""
    below = descendants(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    for each in (pid, *below):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)
