"""Is the bootstrap peer of this container well? Ends with 0 if so, with 1 and the reason if not.

An open port alone says little: a stuck daemon's still accepts connections. A libp2p listener greets with the name of
its protocol, and atoll's own process writes to its event log every few seconds; both must be so. Standard library only
and no import of atoll, since a health check runs often.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from pathlib import Path

GREETING = b"/multistream/1.0.0\n"


def silent(host: str, port: int, timeout: float = 5.0) -> str | None:
    """Why no libp2p peer answers there, or None if one does."""
    try:
        with socket.create_connection((host, port), timeout=timeout) as connection:
            # Multistream: either side names the protocol, behind its length in one byte.
            connection.sendall(bytes([len(GREETING)]) + GREETING)
            received = b""
            while len(received) <= len(GREETING):
                data = connection.recv(1 + len(GREETING) - len(received))
                if not data:
                    break
                received += data
    except OSError as error:
        return f"{host}:{port} does not answer: {error}"
    return None if received[1:] == GREETING else f"{host}:{port} is not a libp2p peer: it says {received!r}"


def empty(file: Path) -> str | None:
    """Why a file holds nothing, or None."""
    try:
        return None if file.stat().st_size else f"{file} is empty"
    except OSError as error:
        return f"cannot see {file}: {error.strerror}"


def stale(file: Path, seconds: float) -> str | None:
    """Why a file counts as old, or None if it was written within so many seconds."""
    try:
        age = time.time() - file.stat().st_mtime
    except OSError as error:
        return f"cannot see {file}: {error.strerror}"
    return None if age <= seconds else f"{file} was last written {age:.0f} s ago; at most {seconds:.0f} s are well"


def main() -> int:
    parser = argparse.ArgumentParser(description="Health check of a bootstrap peer.")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--written", type=Path, metavar="FILE", help="must have content")
    parser.add_argument("--fresh", type=Path, metavar="FILE", help="must have been written lately")
    parser.add_argument("--within", type=float, default=60.0, metavar="SECONDS", help="what is lately")
    options = parser.parse_args()
    reasons = [
        silent(options.host, options.port),
        empty(options.written) if options.written else None,
        stale(options.fresh, options.within) if options.fresh else None,
    ]
    found = [reason for reason in reasons if reason]
    for reason in found:
        print(reason, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
