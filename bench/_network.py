"""Several hosts on one machine for benchmarks: network namespaces on a bridge, with bounded rates and real delays.

Needs root, ``ip``, ``tc`` and ``iptables``. Names begin with ``atb`` and the process id, so that runs do not meet, and
what a killed run left is swept away by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PREFIX = "atb"
QUEUE = 7
BURST = "32kb"


class Unavailable(Exception):
    """Namespaces cannot be made here; the text says why."""


def enter(name: str) -> None:
    """Move this thread, and the threads and processes that it starts, into a network namespace of ``ip netns``."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000) != 0:  # CLONE_NEWNET
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter the network namespace {name}: {os.strerror(error)}")
    finally:
        os.close(descriptor)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def _quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True)


def sweep() -> None:
    """Remove the namespaces of runs that are over."""
    folder = Path("/run/netns")
    for path in folder.glob(f"{PREFIX}*x*") if folder.is_dir() else ():
        owner = path.name.removeprefix(PREFIX).split("x")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _quietly("ip", "netns", "del", path.name)


class Network:
    """Namespaces in one subnet, host i behind a link of ``mbit[i]`` Mbit/s in either direction, a round trip of
    ``rtt`` seconds between any two. Everything goes when the context is left.

    congestion: of TCP, as in ``tcp_congestion_control``; what the machine uses when empty."""

    def __init__(self, mbit: Sequence[float], rtt: float, congestion: str = "") -> None:
        hosts = len(mbit)
        self._own = f"{PREFIX}{os.getpid()}x"
        self.names = [f"{self._own}{i}" for i in range(hosts)]
        self.addresses = [f"10.99.0.{i + 1}" for i in range(hosts)]
        self._mbit, self._rtt, self._congestion = list(mbit), rtt, congestion
        self._delays: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        if os.geteuid() != 0:
            raise Unavailable("network namespaces need root")
        sweep()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        switch = f"{self._own}s"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for i, (name, address, mbit) in enumerate(zip(self.names, self.addresses, self._mbit, strict=True)):
            # A queue of 100 ms and no less than the delay: routers hold about a round trip's worth.
            latency = f"{max(100, 1000 * self._rtt):.0f}ms"
            shape = ["tbf", "rate", f"{mbit:g}mbit", "burst", BURST, "latency", latency]
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if self._congestion:
                setting = f"net.ipv4.tcp_congestion_control={self._congestion}"
                _run("ip", "netns", "exec", name, "sysctl", "-qw", setting)
            port = f"port{i}"
            _run("ip", "link", "add", "name", "eth0", "netns", name, "type", "veth", "peer", "name", port,
                 "netns", switch)  # fmt: skip
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shape)  # up
            _run("tc", "-n", switch, "qdisc", "add", "dev", port, "root", *shape)  # down
            if self._rtt:
                self._delay(name)

    def _delay(self, name: str) -> None:
        """Packets wait half a round trip on arrival."""
        process = subprocess.Popen(
            [sys.executable, "-m", "bench._delay", name, str(QUEUE), str(self._rtt / 2)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._delays.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline().strip() != "ready":
            raise Unavailable(f"packets cannot be delayed: {process.stderr.read().strip()}")
        _run("ip", "netns", "exec", name, "iptables", "-t", "raw", "-A", "PREROUTING", "-i", "eth0", "-j", "NFQUEUE",
             "--queue-num", str(QUEUE), "--queue-bypass")  # fmt: skip

    def sent(self) -> list[int]:
        """Bytes that each host has put on its link so far, headers included."""
        found = []
        for name in self.names:
            done = subprocess.run(
                ["ip", "-n", name, "-s", "-j", "link", "show", "eth0"], capture_output=True, check=True
            )
            found.append(int(json.loads(done.stdout)[0]["stats64"]["tx"]["bytes"]))
        return found

    def __exit__(self, *_: object) -> None:
        for name in [*self.names, f"{self._own}s"]:
            _quietly("ip", "netns", "del", name)
        for process in self._delays:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._delays.clear()


_CONNECT = """
import socket, sys, time
for _ in range(5):
    began = time.monotonic()
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 10).close()
    print(time.monotonic() - began)
"""


def round_trip(network: Network, host: int, address: str) -> float:
    """Measured seconds of a round trip from a host to a TCP multiaddress of another: the least of five connections."""
    _, _, to, _, port = address.split("/")[:5]
    done = subprocess.run(
        ["ip", "netns", "exec", network.names[host], sys.executable, "-c", _CONNECT, to, port],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return min(map(float, done.stdout.split()))
