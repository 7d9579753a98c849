"""The swarm under fire: slots for nodes, each with one process after another, and the faults that strike them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from atoll.node.events import Event
from atoll.protocol.manifest import Manifest

from ..real import leaks
from ..real.harness import Place, Process, signal_all, stop_tree
from .hosts import Hosts
from .relay import Relays
from .schedule import AWAY, LEAVING, OUT, Fault

AGAIN = 90.0
"""Seconds within which a child that was killed must have been started again."""
NOTICED = 90.0
"""Those that a node may take beside to notice that its trainer hangs: much more than it allows for as a rule."""
LEAVE = 10.0
"""Seconds within which a process must have ended after Ctrl-C or SIGTERM."""
CHILDREN = {"trainer": "trainer", "stop-trainer": "trainer", "p2pd": "p2pd"}
"""Faults of a child alone, and which one."""


@dataclass
class Life:
    """One process of a slot, from its start to its end."""

    process: Process
    ended: float | None = None
    why: str = ""
    """What ended it; empty while it lives."""
    stopped: list[tuple[float, float]] = field(default_factory=list)
    """Spans of time under SIGSTOP."""
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """(time, resident bytes) of the daemon and of its p2p daemon."""

    @property
    def began(self) -> float:
        return self.process.began


@dataclass
class Slot:
    """One volunteer's machine."""

    name: str
    host: int
    folder: Path
    lives: list[Life] = field(default_factory=list)
    busy: str = ""
    """The fault that it suffers from."""

    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def up(self) -> bool:
        return bool(self.lives) and self.life.ended is None


@dataclass
class Strike:
    """A fault that happened. peer: whom the next commit is to do without, if anybody."""

    number: int
    kind: str
    victim: str
    t: float
    peer: str = ""
    until: float = float("inf")


@dataclass
class Asked:
    """A process was asked to leave."""

    kind: str
    code: int
    state: str
    t: float = field(default_factory=time.time)


@dataclass
class Field:
    """Bootstrap peer, nodes, links. All times are unix times."""

    here: Place
    hosts: Hosts | Relays
    manifest: Manifest
    nodes: int
    core: int | None
    say: Callable[[str], None]
    slots: list[Slot] = field(default_factory=list)
    boot: Slot = field(init=False)
    address: str = ""
    strikes: list[Strike] = field(default_factory=list)
    skipped: int = 0
    violations: list[str] = field(default_factory=list)
    pending: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    logs: dict[bytes, Path] = field(default_factory=dict)
    leaving: dict[str, Asked] = field(default_factory=dict)
    left: list[tuple[str, str, float]] = field(default_factory=list)
    """Who has left when asked to: how it was asked, its state then, the seconds that it took."""

    def start(self) -> None:
        """The bootstrap peer first: its address is what everyone else needs."""
        self.here.folder.mkdir(parents=True, exist_ok=True)
        self.boot = Slot("bootstrap", 0, self.here.folder / "bootstrap")
        if isinstance(self.hosts, Relays):
            self.hosts.pids = lambda host: [
                slot.life.process.pid for slot in [self.boot, *self.slots] if slot.host == host and slot.lives
            ]
        (self.here.folder / "run.toml").write_text(self.manifest.to_toml())
        self.start_bootstrap()
        life = self.boot.life.process
        self.address = life.wait("the printed address", lambda: life.out.read_text().strip())
        for index in range(self.nodes):
            slot = Slot(f"n{index}", index + 1, self.here.folder / f"n{index}")
            self.slots.append(slot)
            self.start_node(slot)

    def start_bootstrap(self) -> None:
        arguments = ["bootstrap", "--manifest", str(self.here.folder / "run.toml"), "--state", str(self.boot.folder),
                     *self.hosts.listen(0)]  # fmt: skip
        self._begin(self.boot, arguments)

    def start_node(self, slot: Slot) -> None:
        arguments = ["node", self.address, "--state", str(slot.folder), "--name", slot.name, "--device", "cpu",
                     "--threads", "1", *self.hosts.listen(slot.host), "--log", "quiet"]  # fmt: skip
        self._begin(slot, arguments)

    def _begin(self, slot: Slot, arguments: list[str]) -> None:
        process = Process(
            self.here, f"{slot.name}-{len(slot.lives)}", arguments, slot.folder,
            network=self.hosts.network(slot.host),
        )  # fmt: skip
        slot.lives.append(Life(process))

    # Watching

    def look(self) -> None:
        """Read the logs, and see who has ended without being asked to."""
        now = time.time()
        for slot in [self.boot, *self.slots]:
            if not slot.up:
                continue
            life = slot.life
            seen = len(life.process.events)
            for event in life.process.poll()[seen:]:
                if event["event"] == "trainer" and self.core is not None:
                    keep_to(int(event["pid"]), self.core)
            if (code := life.process.code) is not None:
                self._over(slot, now, f"ended with code {code}")
                if slot.name in self.leaving:
                    asked = self.leaving.pop(slot.name)
                    life.why = "left"
                    self.left.append((asked.kind, asked.state, now - asked.t))
                    if code != asked.code:
                        self.wrong(f"{slot.name} left with code {code} after {asked.kind}\n{life.process.story()}")
                else:
                    self.wrong(f"{slot.name} ended by itself with code {code}\n{life.process.story()}")
                    self.later(5.0, lambda slot=slot: self.again(slot))  # type: ignore[misc]
            elif slot.name in self.leaving and now - self.leaving[slot.name].t > LEAVE:
                asked = self.leaving.pop(slot.name)
                self.wrong(f"{slot.name} had not left {LEAVE:.0f} s after {asked.kind}\n{life.process.story()}")
                os.kill(life.process.pid, signal.SIGKILL)
                life.process.ended(5)
                self._over(slot, now, "did not leave")
        due = [item for item in self.pending if item[0] <= now]
        self.pending = [item for item in self.pending if item[0] > now]
        for _, action in due:
            action()

    def sample(self) -> None:
        """Take down how much memory is in use, and keep links to new commit files, which nodes throw away in time."""
        now = time.time()
        for slot in [self.boot, *self.slots]:
            if not slot.up:
                continue
            pids = {"daemon": slot.life.process.pid}
            with contextlib.suppress(StopIteration, IndexError):
                pids["p2pd"] = slot.life.process.p2pd()
            for what, pid in pids.items():
                if (size := resident(pid)) is not None:
                    slot.life.memory.setdefault(f"{what} {pid}", []).append((now, size))
        self.keep()

    def keep(self) -> None:
        """Hard links to the commits and exported checkpoints of all nodes."""
        commits, exports = self.here.folder / "commits", self.here.folder / "exports"
        commits.mkdir(exist_ok=True)
        exports.mkdir(exist_ok=True)
        for slot in self.slots:
            for path in slot.folder.glob("store/log/*.commit"):
                with contextlib.suppress(OSError):
                    os.link(path, commits / path.name)
            for path in slot.folder.glob("checkpoints/step-*.json"):
                keep_export(path, exports)

    def wrong(self, what: str) -> None:
        self.violations.append(what)
        self.say(f"VIOLATED: {what}")

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.pending.append((time.time() + seconds, action))

    def _over(self, slot: Slot, when: float, why: str) -> None:
        slot.life.ended, slot.life.why = when, why
        slot.life.process.poll()
        slot.life.process.close()

    # Faults

    def strike(self, fault: Fault, down: int) -> None:
        """Let it happen; whoever suffers already is spared. ``down``: nodes that may be out at once."""
        free = [slot for slot in self.slots if slot.up and not slot.busy and (fault.kind not in AWAY or slot.host > 1)]
        if fault.kind == "bootstrap":
            free = [self.boot] if self.boot.up and not self.boot.busy else []
        elif fault.kind in CHILDREN:
            free = [slot for slot in free if _child(slot.life.process, CHILDREN[fault.kind])]
        out = sum(slot.busy in OUT or not slot.up for slot in self.slots)
        if not free or (fault.kind in OUT and out >= down):
            self.skipped += 1
            return
        slot = free[int(fault.who * len(free))]
        strike = Strike(len(self.strikes), fault.kind, slot.name, time.time())
        if fault.kind in OUT and slot.life.process.events:
            strike.peer = slot.life.process.peer
        self.strikes.append(strike)
        self.say(f"{fault.kind} {slot.name}" + (f" for {fault.lasts:.0f} s" if fault.kind not in CHILDREN else ""))
        getattr(self, "_" + fault.kind.replace("-", "_"))(slot, fault, strike)

    def _end(self, slot: Slot, strike: Strike) -> None:
        process = slot.life.process
        below = [process.pid, *process.below()]
        held = process.note_sockets() if not isinstance(self.hosts, Hosts) else leaks.Sockets({})
        process.signal(signal.SIGKILL)
        process.ended(5)
        self._over(slot, time.time(), strike.kind)

        def orphans() -> None:
            left = [f"process {pid}" for pid in below if leaks.alive(pid)] + held.still_open()
            if left:
                self.wrong(f"3 s after SIGKILL of {slot.name} there still were {', '.join(left)}")

        self.later(3.0, orphans)

    def _returns(self, slot: Slot, strike: Strike, seconds: float) -> None:
        slot.busy = strike.kind

        def back() -> None:
            if slot.up:  # Ctrl-C takes its time
                self.later(0.5, back)
                return
            slot.busy = ""
            strike.until = time.time()
            self.again(slot)

        self.later(seconds, back)

    def again(self, slot: Slot) -> None:
        if slot is self.boot:
            self.start_bootstrap()
        elif not slot.up:
            self._remember(slot)
            self.start_node(slot)

    def _remember(self, slot: Slot) -> None:
        """Copy the store at a start: what "old" brings back."""
        old = self.here.folder / "old" / slot.name
        if not old.exists() and (slot.folder / "store").exists():
            shutil.copytree(slot.folder / "store", old)

    def _kill(self, slot: Slot, fault: Fault, strike: Strike) -> None:
        self._end(slot, strike)
        self._returns(slot, strike, fault.lasts)

    _bootstrap = _kill

    def _wipe(self, slot: Slot, fault: Fault, strike: Strike) -> None:
        self._kill(slot, fault, strike)
        self.keep()
        slot.folder = self.here.folder / f"{slot.name}-{len(slot.lives)}"
        shutil.rmtree(self.here.folder / "old" / slot.name, ignore_errors=True)

    def _old(self, slot: Slot, fault: Fault, strike: Strike) -> None:
        self._kill(slot, fault, strike)
        self.keep()
        old = self.here.folder / "old" / slot.name
        if old.exists():
            shutil.rmtree(slot.folder / "store")
            old.rename(slot.folder / "store")

    def _ctrl_c(self, slot: Slot, fault: Fault, strike: Strike) -> None:
        self.ask(slot, strike.kind)
        self._returns(slot, strike, fault.lasts)

    _term = _ctrl_c

    def ask(self, slot: Slot, kind: str) -> None:
        """Ask a process to leave; see that it does (:meth:`look`)."""
        last = slot.life.process.last("state")
        self.leaving[slot.name] = Asked(kind, LEAVING[kind], str(last["state"]) if last else "starting")
        with contextlib.suppress(ProcessLookupError):
            if kind == "ctrl-c":
                os.killpg(slot.life.process.pid, signal.SIGINT)
            else:
                os.kill(slot.life.process.pid, signal.SIGTERM)

    def _trainer(self, slot: Slot, fault: Fault, strike: Strike) -> None:
        self._kill_child(slot, "trainer")

    def _p2pd(self, slot: Slot, fault: Fault, strike: Strike) -> None:
        self._kill_child(slot, "p2pd")

    def _stop_trainer(self, slot: Slot, fault: Fault, strike: Strike) -> None:
        self._kill_child(slot, "trainer", signal.SIGSTOP, AGAIN + NOTICED)

    def _kill_child(self, slot: Slot, kind: str, how: int = signal.SIGKILL, limit: float = AGAIN) -> None:
        process = slot.life.process
        before = _child(process, kind)
        signal_all([before], how)
        tried = time.time()

        def again() -> None:
            if slot.life.process is not process or not slot.up or slot.busy:
                return
            now = _child(process, kind)
            if (not now or now == before) and time.time() - tried < limit:
                self.later(1.0, again)
            elif not now or now == before:
                self.wrong(f"the {kind} of {slot.name} was not started again within {limit:.0f} s\n{process.story()}")

        self.later(1.0, again)

    def _stop(self, slot: Slot, fault: Fault, strike: Strike, but: tuple[str, ...] = ()) -> None:
        process = slot.life.process
        pids = stop_tree(process, but=[_child(process, kind) for kind in but])
        slot.busy, began = strike.kind, time.time()

        def go_on() -> None:
            signal_all(pids, signal.SIGCONT)
            slot.busy = ""
            slot.life.stopped.append((began, time.time()))
            strike.until = time.time()

        self.later(fault.lasts, go_on)

    def _stop_daemon(self, slot: Slot, fault: Fault, strike: Strike) -> None:
        self._stop(slot, fault, strike, ("p2pd",))

    def _link(self, slot: Slot, fault: Fault, strike: Strike, action: Callable[[Hosts | Relays], None]) -> None:
        hosts = self.hosts
        action(hosts)
        slot.busy = strike.kind

        def mend() -> None:
            hosts.mend(slot.host)
            slot.busy = ""
            strike.until = time.time()

        self.later(fault.lasts, mend)

    def _cut(self, slot: Slot, fault: Fault, strike: Strike) -> None:
        self._link(slot, fault, strike, lambda hosts: hosts.cut(slot.host))

    def _deaf(self, slot: Slot, fault: Fault, strike: Strike) -> None:
        self._link(slot, fault, strike, lambda hosts: hosts.mute(slot.host, hears=False))

    def _dumb(self, slot: Slot, fault: Fault, strike: Strike) -> None:
        self._link(slot, fault, strike, lambda hosts: hosts.mute(slot.host, hears=True))

    def _slow(self, slot: Slot, fault: Fault, strike: Strike) -> None:
        self._link(slot, fault, strike, lambda hosts: hosts.slow(slot.host, fault.mbit))

    # The end

    def quiet(self) -> bool:
        """Whether no fault is under way and everyone is up."""
        return all(slot.up and not slot.busy for slot in [self.boot, *self.slots])

    def leave(self) -> float:
        """Ctrl-C to every node at once, then SIGTERM to the bootstrap peer; the seconds until the last had ended."""
        began = time.time()
        for slot in self.slots:
            if slot.up:
                self.ask(slot, "ctrl-c")
        self._until_gone(self.slots)
        took = max((slot.life.ended or began) - began for slot in self.slots)
        self.ask(self.boot, "term")
        self._until_gone([self.boot])
        return took

    def _until_gone(self, slots: list[Slot]) -> None:
        while any(slot.up for slot in slots):
            self.look()
            time.sleep(0.05)


def keep_export(metadata: Path, folder: Path) -> None:
    """Keep links to an exported checkpoint, once its two files belong together: on two forks a step has two."""
    with contextlib.suppress(OSError):
        data = metadata.with_suffix(".safetensors")
        said, sizes = metadata.read_bytes(), (metadata.stat().st_ino, data.stat().st_ino)
        target = folder / f"{metadata.stem}-{blake3(said).hexdigest()[:8]}.json"
        if target.exists() or json.loads(said)["blake3"] != blake3(data.read_bytes()).hexdigest():
            return
        os.link(data, target.with_suffix(".safetensors"))
        if (metadata.stat().st_ino, target.with_suffix(".safetensors").stat().st_ino) != sizes:
            target.with_suffix(".safetensors").unlink()  # replaced meanwhile; it is seen again
            return
        target.write_bytes(said)


def keep_to(pid: int, core: int) -> None:
    """Let all threads of a process run on one core only."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


def resident(pid: int) -> int | None:
    """Resident bytes of a process; None when there is none."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def _child(process: Process, kind: str) -> int:
    with contextlib.suppress(StopIteration, IndexError):
        return process.trainer() if kind == "trainer" else process.p2pd()
    return 0


def commits_of(events: list[Event]) -> list[Event]:
    return [event for event in events if event["event"] == "commit"]
