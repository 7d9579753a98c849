"""What stands in the way while no peer of the run answers, told within seconds: the wait itself may be a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.protocol.hivemind_transport import HivemindTransport

AFTER = 3.0
"""Seconds after which a run that does not answer is worth a word."""
PAUSE = 10.0
"""Seconds between two words at least; the reasons may change with every try."""
SHOWN = 4
"""Reasons in one line: a node that was away for long knows many peers."""

Reasons = Mapping[str, str]
"""Peer id to the addresses that were tried, and what came of it."""


async def tell_reasons(transport: HivemindTransport, tell: Callable[[Reasons], None]) -> None:
    """Until a peer of the run answers, tell at most every :data:`PAUSE` seconds what is in the way, when that is new.
    Once one answers, what was told is taken back: by no reasons."""
    told: Reasons = {}
    await asyncio.sleep(AFTER)
    while not transport.joined:
        reasons = {str(peer): why for peer, why in transport.unreached().items()}
        if reasons and reasons != told:
            tell(reasons)
            told = reasons
            await asyncio.sleep(PAUSE)
        else:
            await asyncio.sleep(0.5)
    if told:
        tell({})


def in_words(reasons: Reasons) -> str:
    """One line for people."""
    if not reasons:
        return "a peer of the run answers"
    shown = list(reasons.values())[:SHOWN]
    more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    return f"no peer of the run answers yet, trying on: {'; '.join(shown)}{more}"
