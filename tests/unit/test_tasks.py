"""The tasks of a peer, and when its main task looks again."""

from __future__ import annotations

import asyncio

from atoll.protocol.simloop import run
from atoll.protocol.tasks import Tasks
from atoll.protocol.wakeup import Agenda


def test_the_first_task_that_fails_ends_all_others() -> None:
    async def fail(after: float, what: str) -> None:
        try:
            await asyncio.sleep(after)
        finally:
            raise ValueError(what)

    async def main() -> None:
        tasks = Tasks()
        others = [tasks.spawn(asyncio.sleep(100)), tasks.spawn(fail(50, "later"), name="second")]
        first = tasks.spawn(fail(1, "first"))
        await asyncio.wait([first, *others])
        assert asyncio.get_running_loop().time() == 1.0
        assert others[0].cancelled()
        assert others[1].get_name() == "second"
        assert str(tasks.failure) == "first"

    run(main())


def test_ending_waits_for_what_tasks_start_while_they_are_cancelled() -> None:
    async def main() -> None:
        tasks, ended = Tasks(), []

        async def last() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                ended.append("last")

        async def first() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                tasks.spawn(last())
                await asyncio.sleep(0)
                ended.append("first")

        tasks.spawn(first())
        await asyncio.sleep(1)
        await tasks.end()
        assert ended == ["first", "last"]
        assert len(asyncio.all_tasks()) == 1
        assert tasks.failure is None

    run(main())


def test_an_agenda_wakes_at_the_first_moment_that_was_not_reached_or_by_news() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        agenda = Agenda(loop.time)
        agenda.begin(10.0)
        assert agenda.reached(0.0)
        assert not agenda.reached(3.0)
        assert not agenda.reached(7.0)
        await agenda.wait()
        assert loop.time() == 3.0
        agenda.begin(10.0)
        assert agenda.reached(3.0)
        loop.call_later(1.0, agenda.wake.set)
        await agenda.wait()
        assert loop.time() == 4.0
        agenda.begin(2.0)
        await agenda.wait()
        assert loop.time() == 6.0

    run(main())
