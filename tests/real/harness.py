"""Real processes of a small run on 127.0.0.1: started, followed by their event logs, killed, counted.

Nothing here waits by the clock: :func:`until` waits for something that is named, with a limit that is generous
because the machine may be busy; what the tests assert about durations comes from the events' own times.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bench._network import enter

from atoll.node.events import EVENT_FILE, Event, EventTail
from atoll.node.run_defaults import new_manifest
from atoll.protocol.identity import Ed25519Signer
from atoll.protocol.manifest import Manifest

from . import leaks

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START = 60.0
"""Seconds within which a process should have begun; importing torch twice takes half of it on a busy machine."""
SILENCE = 2.0
"""T of the small runs, in seconds."""
STEPS = 60
"""H of the small runs."""
MODEL = {"width": 32, "heads": 2, "kv_heads": 2, "ffn": 64, "layers": 1, "context": 32}
OWNER = Ed25519Signer.from_seed(bytes([7]) * 32)

T = TypeVar("T")
_PRCTL = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else lambda *_: 0


QUIET = ("progress", "digest", "checkpoint", "state")
"""Events that tell little of what went wrong."""


class TooLate(AssertionError):
    """Something that was waited for did not come."""


def until(what: str, condition: Callable[[], T], seconds: float, *, state: Callable[[], str] = lambda: "") -> T:
    """Wait until ``condition`` is true and return its value; fails naming what did not come, and how things are."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TooLate(f"not within {seconds:.0f} s: {what}\n{state()}")
        time.sleep(0.02)
    return value


def text_folder(folder: Path) -> Path:
    """Some text to train on: enough that no unit is needed twice in a short run."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(4):
        lines = (f"line {i} of part {index}: {i * 7919 % 1009} and {i * 104729 % 8191}\n" for i in range(12_000))
        (folder / f"part-{index}.txt").write_text("".join(lines))
    return folder


def small_manifest(data: Path, **sections: Any) -> Manifest:
    """A signed manifest of a run whose rounds take a second or two."""
    rules = {"inner_steps": STEPS, "silence": SILENCE, **sections.pop("round", {})}
    state = {"chunk": 4096, "checkpoint_every": 4, **sections.pop("state", {})}
    manifest = new_manifest("small", data=data, model=MODEL, inner={"batch": 2}, round=rules, state=state, **sections)
    return manifest.sign(OWNER)


@dataclass
class Place:
    """Where the processes of one test live: state folders, outputs, and a temporary folder of their own."""

    folder: Path
    temporary: Path
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    processes: list[Process] = field(default_factory=list)

    def environment(self, mark: str | None = None) -> dict[str, str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
        # Compiled kernels are shared by all test runs; each state folder is named on the command line.
        home = Path(__file__).resolve().parents[2] / ".pytest_cache" / "atoll-state"
        env |= {"XDG_STATE_HOME": str(home), "TMPDIR": str(self.temporary), leaks.MARK: mark or self.mark}
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
            env[name] = "1"
        return env | {"COLUMNS": "100"}


@contextlib.contextmanager
def place(folder: Path) -> Iterator[Place]:
    """A place that is empty at the end, whatever happened."""
    # Short, since unix sockets lie in it, whose paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="atest-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        here = Place(folder, Path(temporary))
        try:
            yield here
        finally:
            leaks.kill(here.mark)
            for process in here.processes:
                process.popen.wait()
                process.close()


def _prepare(network: str | None) -> None:
    """Runs between fork and exec: a test run that is killed must not leave swarms behind."""
    _PRCTL(1, signal.SIGKILL, 0, 0, 0)
    if network is not None:
        enter(network)


class Process:
    """One ``atoll`` process in a session of its own, with what it wrote and logged.

    network: a network namespace of ``ip netns`` to live in.
    """

    def __init__(
        self, here: Place, name: str, arguments: Iterable[str], state: Path | None = None, *,
        network: str | None = None,
    ) -> None:  # fmt: skip
        self.name, self.state = name, state if state is not None else here.folder / name
        here.folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = here.folder / f"{name}.out", here.folder / f"{name}.err"
        self.events: list[Event] = []
        self._closed = False
        self.began = time.time()
        self._tail = EventTail(self.state / EVENT_FILE)
        self._tail.poll()  # what an earlier process of this folder wrote is not this one's
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "atoll", *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=here.environment(), start_new_session=True, preexec_fn=partial(_prepare, network),
            )  # fmt: skip
        here.processes.append(self)
        self.held = leaks.Sockets({})

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def code(self) -> int | None:
        return self.popen.poll()

    def poll(self) -> list[Event]:
        """All events of this process so far."""
        if not self._closed:
            self.events += self._tail.poll()
        return self.events

    def all(self, event: str, **fields: Any) -> list[Event]:
        """Its events of that name and with those fields so far."""
        return [
            found for found in self.poll()
            if found["event"] == event and all(found.get(key) == value for key, value in fields.items())
        ]  # fmt: skip

    def last(self, event: str) -> Event | None:
        found = self.all(event)
        return found[-1] if found else None

    @property
    def peer(self) -> str:
        """Its peer id, once it has logged anything."""
        return str(self.poll()[0]["peer"])

    @property
    def round(self) -> int:
        """The newest round that it knows to be committed."""
        return max((int(event["round"]) for event in self.all("digest")), default=0)

    def digests(self) -> dict[int, tuple[str, str]]:
        """Commit id and state digest of each round, from its own log."""
        return {event["round"]: (event["commit"], event["digest"]) for event in self.all("digest")}

    def wait(self, what: str, condition: Callable[[], T], seconds: float = START) -> T:
        """Wait for something in this process, which must be alive until then."""

        def held_or_dead() -> T | bool:
            value = condition()
            if not value and self.code is not None:
                raise TooLate(f"{self.name} ended with code {self.code} before: {what}\n{self.story()}")
            return value

        return until(f"{self.name}: {what}", held_or_dead, seconds, state=self.story)  # type: ignore[return-value]

    def wait_for(self, event: str, seconds: float = START, **fields: Any) -> Event:
        """Wait for such an event, one that was logged already included."""
        return self.wait(f"event {event} {fields or ''}", lambda: self.all(event, **fields), seconds)[0]

    def next(self, event: str, seconds: float = START, **fields: Any) -> Event:
        """Wait for such an event that has not been logged yet."""
        before = len(self.all(event, **fields))
        return self.wait(f"another {event} {fields or ''}", lambda: self.all(event, **fields)[before:], seconds)[0]

    def ended(self, seconds: float) -> int:
        """Wait for its end; the exit code."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TooLate(f"{self.name} did not end within {seconds:.0f} s\n{self.story()}") from None

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def below(self) -> dict[int, str]:
        """The processes that it has started."""
        return leaks.below(self.pid)

    def trainer(self) -> int:
        return next(pid for pid, command in self.below().items() if "atoll.node.worker" in command)

    def p2pd(self) -> int:
        return next(pid for pid, command in self.below().items() if "p2pd" in command.partition(" ")[0])

    def close(self) -> None:
        """Read its event log no further: whoever uses its folder now has events of its own."""
        self._closed = True
        self._tail.close()

    def note_sockets(self) -> leaks.Sockets:
        """Take down the sockets that it and its children hold now, to see later that they are closed."""
        self.held = leaks.sockets([self.pid, *self.below()])
        return self.held

    def story(self) -> str:
        """The end of what it said, for a failed test."""
        lines = [f"--- {self.name}, code {self.code}, round {self.round}, state {self.state}"]
        lines += [str(event)[:300] for event in self.poll() if event["event"] not in QUIET][-12:]
        progress = self.last("progress")
        lines += [str(progress)] if progress else []
        return "\n".join([*lines, self.err.read_text(errors="replace")[-2000:]])


@dataclass
class Swarm:
    """A bootstrap peer and nodes of one run."""

    here: Place
    manifest: Manifest
    bootstrap: Process = field(init=False)
    address: str = field(init=False)
    nodes: dict[str, Process] = field(default_factory=dict)
    past: list[Process] = field(default_factory=list)
    """Processes that have ended and whose folder others use now."""

    def __post_init__(self) -> None:
        (self.here.folder / "run.toml").write_text(self.manifest.to_toml())
        self.start_bootstrap()

    def start_bootstrap(self) -> None:
        """Start the bootstrap peer, or start it again on its folder; its address is what it prints."""
        if hasattr(self, "bootstrap"):
            self.past.append(self.bootstrap)
        self.bootstrap = Process(
            self.here, "bootstrap",
            ["bootstrap", "--manifest", str(self.here.folder / "run.toml"), "--state",
             str(self.here.folder / "bootstrap"), "--listen", LOOPBACK],
        )  # fmt: skip
        self.address = self.bootstrap.wait("the printed address", lambda: self.bootstrap.out.read_text().strip())

    def start(self, name: str, *more: str, state: Path | None = None) -> Process:
        """Start a node, or start it again on its folder."""
        if name in self.nodes:
            self.past.append(self.nodes[name])
        folder = state if state is not None else self.here.folder / name
        node = self.nodes[name] = Process(
            self.here, name,
            ["node", self.address, "--state", str(folder), "--name", name, "--device", "cpu", "--threads", "1",
             "--listen", LOOPBACK, "--log", "quiet", *more],
            folder,
        )  # fmt: skip
        return node

    def story(self) -> str:
        return "\n".join(node.story() for node in [self.bootstrap, *self.nodes.values()])


def disagreements(nodes: Iterable[Process]) -> list[str]:
    """Rounds after which two nodes logged different commits or digests; empty when all agree."""
    seen: dict[int, dict[tuple[str, str], list[str]]] = {}
    for node in nodes:
        for number, state in node.digests().items():
            seen.setdefault(number, {}).setdefault(state, []).append(node.name)
    return [f"round {number}: {states}" for number, states in sorted(seen.items()) if len(states) > 1]


def common_round(nodes: Iterable[Process]) -> int:
    """The newest round after which every one of these has logged its digest; 0 when there is none."""
    rounds = [set(node.digests()) for node in nodes]
    return max(set.intersection(*rounds), default=0) if rounds else 0


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def stop_tree(process: Process, *, but: Iterable[int] = ()) -> list[int]:
    """SIGSTOP a process and all below it, except ``but``; returns those stopped."""
    pids = [pid for pid in [process.pid, *process.below()] if pid not in set(but)]
    signal_all(pids, signal.SIGSTOP)
    return pids
