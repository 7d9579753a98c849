"""Noticing that the own process did not run."""

from __future__ import annotations

import asyncio

from atoll.protocol.holdups import HoldUps
from atoll.protocol.simloop import SimLoop, run


def test_a_process_that_was_stopped_is_told_for_how_long_once_each_time() -> None:
    loop, told = SimLoop(), []
    process = loop.process("p")
    watch = HoldUps(loop.time, lambda late: told.append((loop.time(), late)), every=1.0, most=2.5)

    async def main() -> None:
        process.create_task(begin())
        for stopped in (2.0, 5.0, 7.0):  # the first is short enough
            await asyncio.sleep(3.25)
            process.freeze()
            await asyncio.sleep(stopped)
            process.thaw()
        await asyncio.sleep(10)
        watch.stop()
        process.freeze()
        await asyncio.sleep(20)
        process.thaw()
        await asyncio.sleep(5)

    async def begin() -> None:
        watch.start()

    run(main(), loop)
    assert [round(at, 9) for at, _ in told] == [13.5, 23.75]
    assert all(2.5 < late <= stopped for (_, late), stopped in zip(told, (5.0, 7.0), strict=True))
