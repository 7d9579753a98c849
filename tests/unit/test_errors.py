"""The exception tree says whose fault an error is; what is local is held against nobody."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from atoll.protocol import errors
from atoll.protocol.control import Control, Ping
from atoll.protocol.errors import AtollError, Fault, NetworkDown, fault_of
from atoll.protocol.messenger import Messenger
from atoll.protocol.simulation import SimNetwork, SimTransport
from atoll.protocol.transfer import Declined
from atoll.protocol.transport import PeerId, Stream

PEERS = {
    "TransportError": Fault.GONE,
    "PeerUnreachable": Fault.GONE,
    "StreamClosed": Fault.GONE,
    "PeerSlow": Fault.SLOW,
    "PeerMisbehaved": Fault.HOSTILE,
    "FrameTooLarge": Fault.HOSTILE,
}
"""Errors that are another peer's fault; all others are this machine's, or its user's."""
TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, AtollError)]


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_each_error_is_of_one_of_four_kinds(kind: type[AtollError]) -> None:
    assert fault_of(kind("what happened")) is PEERS.get(kind.__name__, Fault.LOCAL)
    assert kind.__name__ in (errors.__doc__ or "")


def test_errors_that_are_not_atolls() -> None:
    assert fault_of(TimeoutError()) is Fault.SLOW
    for local in (OSError(28, "no space left"), MemoryError(), ValueError("a defect")):
        assert fault_of(local) is Fault.LOCAL
    assert fault_of(Declined("busy")) is Fault.SLOW


def test_a_network_that_is_down_here_makes_no_peer_unreachable_and_loses_no_message() -> None:
    """Whoever cannot be reached comes last in the order of candidates; that must not be everybody, because of an own
    p2p daemon that restarts. Nor does the silence of that time count."""
    network = SimNetwork(seed=1)
    got: list[tuple[PeerId, Control]] = []

    async def main() -> None:
        def messenger(transport: SimTransport) -> Messenger:
            return Messenger(
                transport, lambda peer, message: got.append((peer, message)), silence=2.0, admits=lambda peer: True,
                refused=lambda peer, reason: None, limit=4096,
            )  # fmt: skip

        other, mine = network.host("other"), network.host("mine")
        await messenger(other.transport).start()
        opening = mine.transport.open

        async def down(*_: Any, **__: Any) -> Stream:
            raise NetworkDown("the own p2p daemon is restarting")

        async def program(transport: SimTransport) -> None:
            sender = messenger(transport)
            mine.transport.open = down  # type: ignore[method-assign]
            sender.post(other.peer_id, Ping(b"r" * 32))
            await asyncio.sleep(5)
            assert not sender.failing(other.peer_id)
            assert sender.silent_for(other.peer_id, 0.0) < 1.0
            mine.transport.open = opening  # type: ignore[method-assign]
            await asyncio.sleep(2)
            assert not sender.failing(other.peer_id)
            await sender.close()

        await mine.run(program)

    network.run(main())
    assert got == [(PeerId("sim-mine"), Ping(b"r" * 32))]
