"""What others' wall clocks say, where this machine's is wrong.

Wall time serves the expiry of records in the DHT, and nothing else. But a peer whose clock is off by more than a
minute finds no record that it believes, and nobody believes its own: it would be alone for ever. So a peer that has
seen no valid record for a while asks those that it is connected to what time it is (``clock/1``, docs/wire/records.md),
and goes by the median of their answers when that is far from its own. That is no more to be trusted than they are, and
need not be: what it decides is only whose records are fresh.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from statistics import median

import msgspec

from .errors import PeerMisbehaved, StreamClosed, TransportError
from .messages import Ratio, decode, encode
from .transport import PeerId, Stream, Transport

PROTOCOL = "clock/1"
FRAME_LIMIT = 64
PATIENCE = 5.0
"""Seconds within which an answer has to come; its error is half the time it took."""
TOLERANCE = 5.0
"""Seconds by which clocks may differ without being put right: half of what records allow for."""
STEP = 1.0
"""Seconds by which a correction must change to be changed."""
ASKED = 8
PAUSE = (3.0, 60.0)
"""Seconds between two looks at whether this peer is alone: doubling from the first to the second while all is well."""


class Tell(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="clock"):
    """A wall clock's reading, seconds since 1970; asked with one's own, answered in the same form."""

    wall: Ratio


def correction(offsets: Sequence[float]) -> float:
    """What to add to this machine's clock. offsets: how far others' clocks are ahead of it, in seconds, one or more."""
    middle = median(offsets)
    return middle if abs(middle) > TOLERANCE else 0.0


class ClockWatch:
    """Watches one peer's wall clock, and tells others the time.

    lonely: whether no valid record has been seen for a while. corrected: called after a correction, to read and publish
    records anew. warn: told of it. admits: whom to ask at all.
    """

    def __init__(
        self, transport: Transport, *, lonely: Callable[[], bool], corrected: Callable[[], None],
        warn: Callable[[str], None], admits: Callable[[PeerId], bool],
    ) -> None:  # fmt: skip
        self._transport = transport
        self._lonely = lonely
        self._corrected = corrected
        self._warn = warn
        self._admits = admits
        self.applied = 0.0
        """Seconds that are added to this machine's clock."""

    async def start(self) -> None:
        """Tell others the time from now on."""
        await serve_clock(self._transport)

    async def run(self) -> None:
        """Look after the clock; runs until cancelled."""
        pause = PAUSE[0]
        while True:
            await asyncio.sleep(pause)
            lonely = self._lonely()
            if lonely or self.applied:
                await self.measure()
            # A clock that was put right is asked about now and then: somebody may set it.
            pause = PAUSE[1] if self.applied else min(2 * pause, PAUSE[1]) if lonely else PAUSE[0]

    async def measure(self) -> None:
        """Ask, and go by the answers, if there are any."""
        peers = [peer for peer in self._transport.contacts() if self._admits(peer)][:ASKED]
        offsets = [o for o in await asyncio.gather(*(self._ask(peer) for peer in peers)) if o is not None]
        if not offsets:
            return
        wanted = correction(offsets)
        if abs(wanted - self.applied) < STEP:
            return
        self.applied = wanted
        self._transport.correct(wanted)
        if wanted:
            self._warn(
                f"this machine's wall clock is {abs(wanted):.0f} s {'behind' if wanted > 0 else 'ahead of'} those of "
                f"{len(offsets)} peers; going by theirs. Set it (NTP does that by itself)"
            )
        else:
            self._warn("this machine's wall clock agrees with those of others again; going by it")
        self._corrected()

    async def _ask(self, peer: PeerId) -> float | None:
        """How far a peer's clock is ahead of this machine's; None when it does not say so in time."""
        transport = self._transport
        try:
            stream = await transport.open(peer, PROTOCOL, timeout=PATIENCE)
        except TransportError:
            return None
        try:
            async with asyncio.timeout(PATIENCE):
                began = transport.now()
                await stream.send(encode(Tell(transport.wall())))
                answer = decode(await stream.receive(FRAME_LIMIT), Tell, peer)
        except (TransportError, TimeoutError):
            return None
        finally:
            await stream.close()
        took = transport.now() - began
        return answer.wall + took / 2 - (transport.wall() - self.applied)


async def serve_clock(transport: Transport) -> None:
    """Tell whoever asks the time."""
    await transport.serve(PROTOCOL, _handler(transport))


def _handler(transport: Transport) -> Callable[[Stream], Awaitable[None]]:
    async def handle(stream: Stream) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                decode(await stream.receive(FRAME_LIMIT), Tell, stream.peer)
                await stream.send(encode(Tell(transport.wall())))
                await stream.receive(FRAME_LIMIT)  # the other side closes, or the answer could be lost
        except (StreamClosed, TimeoutError, PeerMisbehaved):
            pass

    return handle
