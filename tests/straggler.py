"""A member that still lacks averaged chunks when the others commit: on the simulated network and over libp2p."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from atoll.protocol import reduce
from atoll.protocol.messages import Seal
from atoll.protocol.reduce import Hello, Progress
from atoll.protocol.transport import PeerId, Stream, Transport


class Straggler:
    """In one roster, one member that is not its coordinator reads no more than one averaged chunk of each part, until
    :attr:`go_on` is set.

    peers: who may be it.
    """

    def __init__(self, peers: Collection[PeerId], patch: pytest.MonkeyPatch) -> None:
        self._peers = peers
        self._exchange = reduce.exchange
        self.peer = PeerId("")
        self.roster = b""
        self.held = 0
        """Streams on which it waits."""
        self.go_on = asyncio.Event()
        patch.setattr("atoll.protocol.round.exchange", self._take_part)

    def _pick(self, seal: Seal, roster: bytes) -> None:
        able = [PeerId(m.peer) for m in seal.members if m.peer in self._peers and m.peer != seal.coordinator]
        if not self.roster and len(seal.members) > 2 and able:
            self.peer, self.roster = able[-1], roster

    async def _take_part(
        self, stream: Stream, hello: Hello, roster: bytes, progress: Progress, *, transport: Transport, **more: Any
    ) -> None:
        self._pick(hello.seal, roster)
        receive = stream.receive_view

        async def late(limit: int) -> memoryview:
            if progress.due > hello.first and not self.go_on.is_set():
                self.held += 1
                await self.go_on.wait()
            return await receive(limit)

        if (transport.peer_id, roster) == (self.peer, self.roster):
            stream.receive_view = late  # type: ignore[method-assign,assignment]
        await self._exchange(stream, hello, roster, progress, transport=transport, **more)
