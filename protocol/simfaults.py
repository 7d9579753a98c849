"""Faults in a simulated network, as data: at a time, or when an event is seen; single, or drawn from a seed.

::

    inject(network, Fault("crash", "n3", event="proposed", delay=0.01, duration=20.0))  # back after 20 s
    inject(network, *random_faults(random.Random(1), list(network.hosts), until=3600.0, every=60.0))
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from .errors import SimulationError
from .simulation import SimHost, SimNetwork

Kind = Literal["crash", "power", "freeze", "isolate", "deaf", "mute", "cut", "slow", "clock"]


@dataclass(frozen=True)
class Fault:
    """One fault.

    kind: ``crash`` (connections reset at once) and ``power`` (silence), undone by a restart; ``freeze``; ``isolate``
    (cut off all others), ``deaf`` (hears nobody), ``mute`` (heard by nobody), ``cut`` (off ``others``, or only what it
    sends with ``one_way``); ``slow`` (bandwidths divided by ``amount``); ``clock`` (the wall clock jumps by
    ``amount`` seconds, and back).
    at: virtual second. Or event: when ``by`` (the host itself unless named, ``*`` for any) reports it for the
    ``count``-th time with these fields (``where``), ``delay`` seconds later, None for within the code that reports.
    duration: seconds until it is undone; None: never.
    """

    kind: Kind
    host: str
    at: float | None = None
    event: str | None = None
    by: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    delay: float | None = None
    duration: float | None = None
    others: tuple[str, ...] = ()
    one_way: bool = False
    amount: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise SimulationError(f"unknown kind of fault {self.kind!r}; there are {', '.join(get_args(Kind))}")
        if (self.at is None) == (self.event is None):
            raise SimulationError("a fault happens at a time or upon an event: give exactly one of at and event")
        if self.kind == "cut" and not self.others:
            raise SimulationError("a cut needs the names of others")
        if self.kind == "slow" and self.amount <= 0:
            raise SimulationError("slow needs an amount above 0 to divide the bandwidths by")


def inject(network: SimNetwork, *faults: Fault) -> None:
    """Arrange for the faults to happen."""
    for fault in faults:
        host = network.hosts.get(fault.host)
        if host is None:
            raise SimulationError(f"there is no host {fault.host}; add it by .host() before the faults")
        _arrange(network, host, fault)


def _arrange(network: SimNetwork, host: SimHost, fault: Fault) -> None:
    def strike() -> None:
        undo = _strike(network, host, fault)
        if undo is not None and fault.duration is not None:
            network.at(network.loop.clock + fault.duration, undo)

    if fault.at is not None:
        network.at(fault.at, strike)
    elif fault.event is not None:
        by = None if fault.by == "*" else host if fault.by is None else fault.by
        network.when(
            fault.event,
            lambda _: strike(),
            host=by,
            where=lambda fields: all(fields.get(key) == value for key, value in fault.where.items()),
            count=fault.count,
            delay=fault.delay,
        )


def _strike(network: SimNetwork, host: SimHost, fault: Fault) -> Callable[[], object] | None:
    """Do it; returns what undoes it, None when there was nothing to do."""
    transport = host.transport
    others = [name for name in network.hosts if name != host.name]
    if fault.kind in ("crash", "power"):
        if host.dead:
            return None
        host.crash(power_cut=fault.kind == "power")
        return lambda: host.restart() if host.transport is transport else None
    if fault.kind == "freeze":
        if not host.running:
            return None
        host.freeze()
        return lambda: host.thaw() if host.transport is transport else None
    if fault.kind == "isolate":
        return network.isolate(host).heal
    if fault.kind == "deaf":
        return network.cut(others, host, one_way=True).heal
    if fault.kind == "mute":
        return network.cut(host, others, one_way=True).heal
    if fault.kind == "cut":
        return network.cut(host, fault.others, one_way=fault.one_way).heal
    if fault.kind == "slow":
        host.bandwidth(upload=host.upload / fault.amount, download=host.download / fault.amount)
        return lambda: host.bandwidth(upload=host.upload * fault.amount, download=host.download * fault.amount)
    host.clock_offset += fault.amount

    def back() -> None:
        host.clock_offset -= fault.amount

    return back


def random_faults(
    rng: random.Random,
    hosts: Sequence[str],
    *,
    until: float,
    every: float,
    start: float = 0.0,
    kinds: Sequence[Kind] = ("crash", "power", "freeze", "isolate", "deaf", "mute"),
    down: tuple[float, float] = (1.0, 60.0),
) -> list[Fault]:
    """Faults of ``kinds`` on random hosts, ``every`` seconds on average, each undone after ``down`` seconds.

    How long they last is log-uniform. ``slow`` divides by 2 to 50, ``clock`` jumps by up to an hour either way,
    ``cut`` splits a random half off.
    """
    faults = []
    now = start + rng.expovariate(1 / every)
    while now < until:
        kind = rng.choice(list(kinds))
        host = rng.choice(list(hosts))
        rest = [name for name in hosts if name != host]
        faults.append(
            Fault(
                kind,
                host,
                at=now,
                duration=down[0] * (down[1] / down[0]) ** rng.random(),
                others=tuple(sorted(rng.sample(rest, max(1, len(rest) // 2)))) if kind == "cut" else (),
                amount=rng.uniform(2, 50) if kind == "slow" else rng.uniform(-3600, 3600) if kind == "clock" else 0.0,
            )
        )
        now += rng.expovariate(1 / every)
    return faults
