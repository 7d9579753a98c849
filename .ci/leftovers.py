"""Processes that a run of .ci/run left over: those whose environment carries its mark, ATOLL_CI_MARK.

Prints them and ends with 1 if there are any after ten seconds; with ``--end`` it ends them first. Linux only (/proc).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

PROC = Path("/proc")


def ancestors(pid: int) -> set[int]:
    """``pid`` and everything above it."""
    found = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            # The name in parentheses may hold anything; the parent is the second field after it.
            pid = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            break
    return found


def marked(mark: str) -> dict[int, str]:
    """Command lines of the live processes with ``ATOLL_CI_MARK=mark``, by id, without this one and those above it."""
    wanted = f"ATOLL_CI_MARK={mark}".encode()
    own = ancestors(os.getpid())
    found = {}
    for folder in PROC.glob("[0-9]*"):
        if int(folder.name) in own:
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(folder.name)] = command.strip()
        except OSError:
            continue
    return found


def main() -> int:
    mark = os.environ.get("ATOLL_CI_MARK")
    if not mark or not PROC.is_dir():
        return 0
    end = "--end" in sys.argv[1:]
    deadline = time.monotonic() + 10
    while (found := marked(mark)) and time.monotonic() < deadline:
        for pid in found if end else ():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.2)
    for pid, command in found.items():
        print(f"still running: {pid} {command}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
