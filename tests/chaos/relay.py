"""Links in user space, where network namespaces are not allowed: a TCP relay in front of every host on 127.0.0.1.

A host listens on a port that it tells nobody, and announces its relay's. Who dials is found out by the port that it
dials from, so a relay knows both ends of every connection, and holds back what a cut or narrow link would.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..real.leaks import below

PIECE = 1 << 15
TICK = 0.02


@dataclass(eq=False)
class _Way:
    """One direction of one connection: bytes of ``source`` for ``target``, host numbers or None where unknown."""

    source: int | None
    target: int | None
    reads: socket.socket
    writes: socket.socket
    held: bytes = b""
    ended: bool = False


@dataclass
class _State:
    """A host's link now."""

    sends: bool = True
    hears: bool = True
    rate: float = float("inf")
    """Bytes a second in either direction."""
    credit: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})


class Relays:
    """``count`` hosts on 127.0.0.1 whose links can be cut."""

    def __init__(self, count: int) -> None:
        self.pids: Callable[[int], list[int]] = lambda host: []
        """The processes of a host, to tell who dials."""
        self._links = [_State() for _ in range(count)]
        self._behind = [_free_port() for _ in range(count)]
        self._ways: list[_Way] = []
        self._stop = threading.Event()
        self._doors: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Relays:
        for _ in self._links:
            door = socket.create_server(("127.0.0.1", 0))
            door.setblocking(False)
            self._doors.append(door)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for way in self._ways:
            way.reads.close()
            way.writes.close()
        for door in self._doors:
            door.close()

    # As Hosts

    def network(self, host: int) -> str | None:
        return None

    def listen(self, host: int) -> list[str]:
        return ["--listen", f"/ip4/127.0.0.1/tcp/{self._behind[host]}",
                "--announce", f"/ip4/127.0.0.1/tcp/{self._doors[host].getsockname()[1]}"]  # fmt: skip

    def cut(self, host: int) -> None:
        self._links[host].sends = self._links[host].hears = False

    def mute(self, host: int, *, hears: bool) -> None:
        self._links[host].sends, self._links[host].hears = not hears, hears

    def slow(self, host: int, mbit: float) -> None:
        self._links[host].rate = mbit * 125_000

    def mend(self, host: int) -> None:
        self._links[host] = _State()

    # The relaying thread

    def _serve(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(TICK):
            now = time.monotonic()
            for link in self._links:
                for way in link.credit:
                    most = link.rate * 0.1  # a tenth of a second's worth waits in a router
                    link.credit[way] = min(link.credit[way] + link.rate * (now - before), most)
            before = now
            for host, door in enumerate(self._doors):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        self._connect(host, door.accept()[0])
            self._ways = [way for way in self._ways if self._move(way)]

    def _connect(self, host: int, caller: socket.socket) -> None:
        who = self._whose(caller.getpeername()[1])
        try:
            called = socket.create_connection(("127.0.0.1", self._behind[host]), timeout=1)
        except OSError:
            caller.close()
            return
        for end in (caller, called):
            end.setblocking(False)
        self._ways += [_Way(who, host, caller, called), _Way(host, who, called, caller)]

    def _whose(self, port: int) -> int | None:
        """The host that has this local port."""
        inodes = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].split(":")[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
        for host in range(len(self._links)):
            for pid in [each for first in self.pids(host) for each in (first, *below(first))]:
                with contextlib.suppress(OSError):
                    for link in Path(f"/proc/{pid}/fd").iterdir():
                        with contextlib.suppress(OSError):
                            if os.readlink(link) in inodes:
                                return host
        return None

    def _move(self, way: _Way) -> bool:
        """Carry what may pass; False when the connection is over."""
        source = self._links[way.source] if way.source is not None else _State()
        target = self._links[way.target] if way.target is not None else _State()
        if not source.sends or not target.hears:
            return way.reads.fileno() >= 0 and way.writes.fileno() >= 0
        try:
            while True:
                if way.held:
                    allowed = int(min(source.credit["up"], target.credit["down"], PIECE))
                    if allowed <= 0:
                        return True
                    sent = way.writes.send(way.held[:allowed])
                    way.held = way.held[sent:]
                    source.credit["up"] -= sent
                    target.credit["down"] -= sent
                    continue
                if way.ended:
                    with contextlib.suppress(OSError):
                        way.writes.shutdown(socket.SHUT_WR)
                    return False
                way.held = way.reads.recv(PIECE)
                way.ended = not way.held
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            for end in (way.reads, way.writes):
                end.close()
            return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
