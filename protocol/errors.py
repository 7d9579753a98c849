"""The one exception tree of atoll.

::

    AtollError                      exit code
    ├── UsageError                  2   the command was called wrongly
    ├── ConfigError                 3   a manifest or a config is wrong
    │   ├── NonFinite               3   NaN or infinite numbers: the training diverged
    │   ├── ManifestError           3
    │   │   └── SignatureError      3   a manifest whose signature does not verify
    ├── NetworkError                4   an address is wrong or nobody answers
    │   ├── AddressError            4   a run address that cannot be read
    │   ├── TransportError          4   (see below; normally handled inside the protocol)
    │   │   ├── PeerUnreachable         nobody answers there                                    gone
    │   │   ├── StreamClosed            the stream ended before its explicit end                gone
    │   │   ├── PeerSlow                it lives, and does not do its part in time              slow
    │   │   ├── PeerMisbehaved          the peer broke the protocol (attributed to it)          hostile
    │   │   │   └── FrameTooLarge       a frame above the reader's limit                        hostile
    │   │   └── NetworkDown             this machine's own way out is down                      local
    │   └── WrongRun                4   the other side serves another run
    ├── DataError                   5   training data missing, empty or different
    ├── StateError                  6   a state folder or a checkpoint is unusable
    │   ├── CheckpointError         6   truncated, of another run or of another model
    │   └── StateLocked             6   a second node on the same state folder
    ├── ResourceError               7   port, disk, memory or device
    │   └── DiskFull                7   no space left; a run goes on without checkpoints
    ├── VersionError                8   the run speaks another protocol version
    ├── SimulationError             1   a simulated run cannot go on (tests and tools only)
    └── RoundVoid                   -   a round ended without a commit (never reaches the user)

Exit codes are stable: 0 done, 1 a defect in atoll, 130 Ctrl-C; the others stand above. A message says what was
expected, what was found and what to do.

Whose fault an error is (:class:`Fault`) stands at the right; where nothing stands it is local, and no peer is blamed.
"""

from __future__ import annotations

import errno
import os
from enum import Enum
from typing import ClassVar


class Fault(Enum):
    """Where the cause of a failure between two peers lies. Only the first three are the other peer's."""

    GONE = "gone"
    """It cannot be reached, or the stream to it broke: it, or something on the way, is no longer there."""
    SLOW = "slow"
    """It lives, and does not do in time what it owes."""
    HOSTILE = "hostile"
    """It broke the protocol."""
    LOCAL = "local"
    """This machine: its disk, its memory, its own way to the network."""


class AtollError(Exception):
    """Root of every error that atoll raises on purpose. ``exit_code`` is what the command line ends with."""

    exit_code = 1
    fault: ClassVar[Fault] = Fault.LOCAL


def fault_of(error: BaseException) -> Fault:
    """Whose fault a failure is that came up while something was done with a peer.

    A wait that ran out is the peer's slowness; what is not atoll's own error (a full disk, no memory) is local.
    """
    if isinstance(error, AtollError):
        return error.fault
    return Fault.SLOW if isinstance(error, TimeoutError) else Fault.LOCAL


def why_unreadable(path: str | os.PathLike[str], error: OSError) -> str:
    """Why a file that a user has named cannot be read, in words: a message begins with it and says what to do."""
    kinds = {
        errno.ENOENT: f"there is no file {path}",
        errno.EISDIR: f"{path} is a folder, not a file",
        errno.ENOTDIR: f"there is no file {path}: a part of that path is a file, not a folder",
        errno.EACCES: f"no permission to read {path}",
        errno.EPERM: f"no permission to read {path}",
    }
    return kinds.get(error.errno or 0, f"cannot read {path}: {error.strerror or error}")


class UsageError(AtollError):
    """The command was called wrongly."""

    exit_code = 2


class ConfigError(AtollError):
    """A manifest or a config is wrong."""

    exit_code = 3


class NonFinite(ConfigError):
    """Parameters, gradients or an average hold NaN, infinities or absurd magnitudes: the training diverged."""


class ManifestError(ConfigError):
    """A manifest is wrong: unknown key, wrong type, out of range, contradiction."""


class SignatureError(ManifestError):
    """A manifest whose signature is missing or does not verify."""


class NetworkError(AtollError):
    """An address is wrong or nobody answers there."""

    exit_code = 4


class AddressError(NetworkError):
    """A run address or multiaddress that cannot be read."""


class WrongRun(NetworkError):
    """The other side serves another run than the one asked for."""


class TransportError(NetworkError):
    """Something between two peers failed; the protocol handles it."""

    fault = Fault.GONE


class PeerUnreachable(TransportError):
    """Nobody answers at that peer, in the time given."""


class StreamClosed(TransportError):
    """The stream ended before its explicit end, or was used after it."""


class PeerSlow(TransportError):
    """A peer lives, and does not do in time what it owes."""

    fault = Fault.SLOW


class NetworkDown(TransportError):
    """This machine's own way to the network is down (its p2p daemon restarts): says nothing about any peer."""

    fault = Fault.LOCAL


class PeerMisbehaved(TransportError):
    """A peer broke the protocol. ``peer`` names it."""

    fault = Fault.HOSTILE

    def __init__(self, message: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class FrameTooLarge(PeerMisbehaved):
    """A frame above the limit that the reader set; it was not read into memory."""


class DataError(AtollError):
    """Training data is missing, empty, too short or different from what the manifest pins."""

    exit_code = 5


class StateError(AtollError):
    """A state folder or a checkpoint is unusable."""

    exit_code = 6


class CheckpointError(StateError):
    """A checkpoint is truncated, of another run or of another model."""


class StateLocked(StateError):
    """Another process uses the state folder."""


class ResourceError(AtollError):
    """A port is taken, a disk full or read-only, a device absent, memory exhausted."""

    exit_code = 7


class DiskFull(ResourceError):
    """No space left for the state folder. What was there stays as it was; a run goes on without writing."""


class VersionError(AtollError):
    """The run speaks another protocol version than this atoll."""

    exit_code = 8


class RoundVoid(AtollError):
    """A round ended without a commit; everything in it is as if never sent."""


class SimulationError(AtollError):
    """A simulated run cannot go on: a deadlock, a task that spins, or its time is over."""
