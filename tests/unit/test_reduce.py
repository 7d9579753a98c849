"""The two directions of a reduce stream."""

from __future__ import annotations

import asyncio

import pytest

from atoll.protocol.errors import StreamClosed
from atoll.protocol.reduce import both


def test_a_cancellation_at_the_moment_of_a_failure_is_not_lost() -> None:
    """Seed 22149 of tests.churn: a member took a stream that broke for news, and its round never ended."""

    async def main() -> None:
        gate, over = asyncio.Event(), asyncio.Event()

        async def breaks() -> None:
            await gate.wait()
            raise StreamClosed("it broke")

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                over.set()

        task = asyncio.create_task(both(breaks(), waits()))
        await asyncio.sleep(0.01)
        gate.set()
        await asyncio.sleep(0)  # the one direction has failed, and who waits for both has not been told
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert over.is_set()

    asyncio.run(main())


def test_a_failure_ends_the_other_direction_and_is_raised() -> None:
    async def main() -> None:
        over = asyncio.Event()

        async def breaks() -> None:
            raise StreamClosed("it broke")

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                over.set()

        with pytest.raises(StreamClosed, match="it broke"):
            await both(waits(), breaks())
        assert over.is_set()

    asyncio.run(main())
