"""What the command line hands to the daemon and to the observer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class LogStyle(StrEnum):
    """What a process prints while it runs; the event log is written in any case."""

    auto = "auto"
    """console on a terminal, plain elsewhere."""
    console = "console"
    plain = "plain"
    json = "json"
    """The events themselves, one JSON object a line, on standard output."""
    quiet = "quiet"


class Finish(StrEnum):
    """What a node does when the run's budget of rounds is used up."""

    exit = "exit"
    """Write the last checkpoint, stay long enough for the others to fetch the last commit, end with code 0."""
    stay = "stay"
    """Go on serving the run's state to others."""


class Encode(StrEnum):
    """Where contributions are encoded. The bytes are the same."""

    auto = "auto"
    """On the device, where that is CUDA and the run's codec and rules allow for it."""
    host = "host"
    """On the host: parameters leave the device as float32."""
    device = "device"
    """On the trainer's device, whatever it is."""


@dataclass(frozen=True)
class NodeOptions:
    """A node's options; the defaults are those of the command line."""

    address: str
    """Run address, as ``atoll bootstrap`` prints it."""
    state: Path | None = None
    """State folder; None: one per run under the user's state folder."""
    name: str | None = None
    """Public name shown to others; None: two words that follow from the peer id. Empty: no name."""
    device: str = "auto"
    """auto | cpu | cuda | cuda:N"""
    threads: int = 0
    """CPU threads of the trainer; 0: chosen by the node."""
    encode: Encode = Encode.auto
    data: Path | None = None
    """Where the run's text lies on this machine, for runs that train on a folder or file of text."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    client_mode: bool = False
    """Never accept connections from outside (behind a NAT without forwarding)."""
    seed: int | None = None
    """Seed of what is random in this process; None: the system's."""
    timeout: float = 60.0
    """Seconds within which the run must have answered once."""
    finish: Finish = Finish.exit
    keep_every: float = 900.0
    """Seconds after which the inner steps since the last commit are saved to the disk; 0: never."""
    log: LogStyle = LogStyle.auto


@dataclass(frozen=True)
class ObserverOptions:
    """Options of a peer that follows commits and evaluates them, and never trains."""

    address: str
    state: Path | None = None
    device: str = "auto"
    threads: int = 1
    data: Path | None = None
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    seed: int | None = None
    timeout: float = 60.0
    every: int = 1
    """Evaluate every so many commits (of each fragment, where there are several); the last one always."""
    log: LogStyle = LogStyle.auto
