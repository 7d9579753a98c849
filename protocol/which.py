"""Which run a peer serves, for those who come with the address of another one.

All other streams bear the run's id in their names, so a peer that serves another run only says that it does not know
them. This one does not. It tells no more than any peer learns of libp2p from whom it connects to: the names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec

from .errors import PeerMisbehaved, StreamClosed
from .messages import decode, encode
from .transport import Stream

STREAMS = 3
"""The version in the names of all other streams."""
WHICH = "/atoll/run/1"
"""The name of this stream, whole."""
FRAME_LIMIT = 64
"""Bytes of the largest frame."""
PATIENCE = 5.0
"""Seconds that a peer waits for the one who asks."""
NOT_SERVED = "a peer answers, and does not serve this run: it serves another one, or is another version of atoll"


class Serves(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="run"):
    """The run that a peer serves, as in the names of its streams."""

    streams: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    """Their version."""
    run: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    """The first 16 hex digits of the run id."""


def which_handler(run: str) -> Callable[[Stream], Awaitable[None]]:
    """What answers whoever opens the stream."""

    async def handle(stream: Stream) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await stream.send(encode(Serves(STREAMS, run)))
                await stream.receive(FRAME_LIMIT)  # the other side closes, or the answer could be lost
        except (StreamClosed, TimeoutError, PeerMisbehaved):
            pass

    return handle


async def ask_which(stream: Stream, run: str) -> str:
    """Why the peer at the other end does not serve ``run`` (16 hex digits), in words; closes the stream.

    Raises :class:`~atoll.protocol.errors.TransportError` when it says nothing that can be read.
    """
    try:
        answer = decode(await stream.receive(FRAME_LIMIT), Serves, stream.peer)
    finally:
        await stream.close()
    if answer.run != run:
        return (
            f"another run answers: the peer there serves run {answer.run}…, and the address names run {run}…. Ask the "
            "organiser for the newest address"
        )
    if answer.streams != STREAMS:
        newer = answer.streams > STREAMS
        return (
            f"another version of atoll answers: its streams are of version {answer.streams}, and this one's of "
            f"{STREAMS}; " + ("update atoll" if newer else "the one there needs an update")
        )
    return NOT_SERVED
