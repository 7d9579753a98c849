"""A network namespace for this process alone, whose loopback is as narrow as a link. Linux, root."""

from __future__ import annotations

import ctypes
import os
import subprocess

_NEWNET = 0x40000000


def narrow_loopback(mbit: float) -> None:
    """Move this process, and what it will start, into a fresh namespace with a loopback of ``mbit`` Mbit/s (both
    directions together). Raises OSError where that is not allowed."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"no network namespace of one's own: {os.strerror(error)}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # Segments as large as loopback makes them would never fit through a bucket of 32 KiB.
    subprocess.run(["ip", "link", "set", "lo", "mtu", "1500"], check=True)
    shape = ["tbf", "rate", f"{mbit:g}mbit", "burst", "128kb", "latency", "100ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *shape], check=True)
