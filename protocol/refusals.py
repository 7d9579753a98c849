"""Bounds what refused peers cost the log: who breaks rules in a loop must not drown what else happens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import Fault

WINDOW = 60.0
"""Seconds over which events are counted."""
OF_A_PEER, OF_ALL = 30, 300
"""``refused`` events of one peer, and of all, that are passed on in a window."""
MAX_PEERS = 4096


class Events(Protocol):
    """Where the protocol reports what happens: ``events(name, **fields)``."""

    def __call__(self, event: str, /, **fields: Any) -> None: ...


@dataclass
class _Count:
    since: float
    passed: int = 0
    unlogged: int = 0

    def renew(self, now: float) -> None:
        if now - self.since >= WINDOW:
            self.since, self.passed = now, 0


class Refusals:
    """Passes every event on, but of ``refused`` only so many; the next of that peer then says how many were not
    (field ``unlogged``)."""

    def __init__(self, events: Events, now: Callable[[], float]) -> None:
        self._events = events
        self._now = now
        self._all = _Count(now())
        self._peers: OrderedDict[str, _Count] = OrderedDict()

    def forget(self) -> None:
        """Begin a new window for everybody."""
        self._all = _Count(self._now())
        self._peers.clear()

    def __call__(self, event: str, /, **fields: Any) -> None:
        if event != "refused":
            self._events(event, **fields)
            return
        now, peer = self._now(), str(fields["peer"])
        count = self._peers.setdefault(peer, _Count(now))
        self._peers.move_to_end(peer)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        count.renew(now)
        self._all.renew(now)
        if count.passed >= OF_A_PEER or self._all.passed >= OF_ALL:
            count.unlogged += 1
            return
        count.passed += 1
        self._all.passed += 1
        if count.unlogged:
            fields["unlogged"], count.unlogged = count.unlogged, 0
        self._events(event, **fields)

    def refuse(self, peer: str, reason: str, fault: Fault = Fault.HOSTILE) -> None:
        """A peer has broken a rule, or is out of reach."""
        self("refused", peer=peer, reason=reason, fault=fault.value)
