"""What processes leave behind: other processes, sockets, files in the temporary folder. Linux only (/proc).

Processes are found by a mark in their environment, which children inherit however deep and whoever adopted them, so
that other work on the machine is never taken for a leak, nor ever ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
MARK = "REAL_TEST_MARK"
"""Name of the variable. Not ``ATOLL_…``: a swarm takes those out of its children's environment."""
_LISTENING = "0A"
"""State of a listening TCP socket in /proc/net/tcp."""


@dataclass(frozen=True)
class Sockets:
    """Kernel inodes of sockets, which are never reused while a socket is open, with words for people."""

    found: dict[int, str]

    def still_open(self) -> list[str]:
        """Those that exist yet, whoever holds them."""
        now = _table()
        return sorted(text for inode, text in self.found.items() if now.get(inode) == text)


def marked(mark: str) -> dict[int, str]:
    """Live processes (no zombies) that carry ``mark``, by id, with their command lines."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command:
                    found[int(folder.name)] = command[:160]
        except OSError:
            continue
    found.pop(os.getpid(), None)
    return found


def below(pid: int) -> dict[int, str]:
    """Live descendants of a process, by id, with their command lines."""
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: dict[int, str] = {}
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            with contextlib.suppress(OSError):
                command = (PROC / str(child) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[child] = command.strip()
                queue.append(child)
    return found


def alive(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def sockets(pids: list[int]) -> Sockets:
    """Listening TCP, UDP and named unix sockets that these processes hold."""
    table, found = _table(), {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in (PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError, ValueError):
                    target = os.readlink(link)
                    if target.startswith("socket:["):
                        inode = int(target[8:-1])
                        if inode in table:
                            found[inode] = table[inode]
    return Sockets(found)


def _table() -> dict[int, str]:
    """All listening TCP, UDP and named unix sockets of this network namespace, by inode."""
    found: dict[int, str] = {}
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for fields in _rows(kind):
            if len(fields) > 9 and (kind.startswith("udp") or fields[3] == _LISTENING):
                found[int(fields[9])] = f"{kind} port {int(fields[1].rpartition(':')[2], 16)}"
    for fields in _rows("unix"):
        if len(fields) > 7:
            found[int(fields[6])] = f"unix {fields[7]}"
    return found


def _rows(kind: str) -> list[list[str]]:
    try:
        return [line.split() for line in (PROC / "net" / kind).read_text().splitlines()[1:]]
    except OSError:
        return []


def gone(mark: str, held: Sockets, *, seconds: float) -> list[str]:
    """Wait until no process carries ``mark`` and none of its sockets is open; what is left after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        left = [f"process {pid}: {command}" for pid, command in marked(mark).items()]
        left += [f"socket: {text}" for text in held.still_open()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def kill(mark: str) -> None:
    """End whatever still carries ``mark``, stopped ones too."""
    for _ in range(20):
        found = marked(mark)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.1)
