"""The event loop under a virtual clock: plain asyncio on it, processes that freeze and die, one order of execution."""

# Tasks that nobody keeps and loops that poll are what is tested here.
# ruff: noqa: RUF006, ASYNC110

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator

import pytest

from atoll.protocol.errors import SimulationError
from atoll.protocol.simloop import SimLoop, SimProcess, current_process, run


def sim_loop() -> SimLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return loop


def test_hours_pass_at_once_and_exactly() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times = []
        for seconds in (0.25, 3600, 0, 86400):
            await asyncio.sleep(seconds)
            times.append(loop.time())
        return times

    started = time.process_time()
    assert run(main()) == [0.25, 3600.25, 3600.25, 90000.25]
    assert time.process_time() - started < 5


def test_the_clock_may_start_anywhere() -> None:
    async def main() -> float:
        await asyncio.sleep(1)
        return asyncio.get_running_loop().time()

    assert run(main(), SimLoop(start=500.0)) == 501.0


def test_timers_run_in_the_order_of_time_then_of_their_making() -> None:
    async def main() -> list[str]:
        loop, seen = sim_loop(), []
        loop.call_later(2, seen.append, "c")
        loop.call_later(1, seen.append, "a")
        loop.call_later(2, seen.append, "d")
        loop.call_later(1, seen.append, "b")
        loop.call_later(1.5, seen.append, "never").cancel()
        await asyncio.sleep(3)
        return seen

    assert run(main()) == ["a", "b", "c", "d"]


def test_timeouts_queues_events_locks_groups_and_waits() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        assert loop.time() == 5
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.create_future(), 1)
        queue: asyncio.Queue[int] = asyncio.Queue(1)

        async def produce() -> None:
            for number in range(5):
                await queue.put(number)
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            producer = group.create_task(produce())
            assert [await queue.get() for _ in range(5)] == [0, 1, 2, 3, 4]
        assert producer.done()
        assert await asyncio.gather(asyncio.sleep(1, "x"), asyncio.sleep(2, "y")) == ["x", "y"]
        tasks = [asyncio.create_task(asyncio.sleep(seconds, seconds)) for seconds in (3, 1, 2)]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [1]
        assert len(pending) == 2
        assert [await task for task in asyncio.as_completed(tasks)] == [1, 2, 3]
        with pytest.raises(ExceptionGroup):
            await grouped()
        assert await asyncio.to_thread(lambda a: a + 1, 1) == 2
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 // 0)

    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(100))
            group.create_task(fail())

    async def fail() -> None:
        raise ValueError("no")

    run(main())


def test_it_serves_asyncios_own_runner() -> None:
    async def main() -> float:
        await asyncio.sleep(1000)
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        assert runner.run(main()) == 1000


def test_a_call_from_another_thread_arrives() -> None:
    async def main() -> str:
        loop = sim_loop()
        future = loop.create_future()
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(future.set_result, "hello"))
        thread.start()
        thread.join()
        return await future

    assert run(main()) == "hello"


def test_a_deadlock_says_who_waits_where() -> None:
    async def worker() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        asyncio.create_task(worker(), name="the worker")
        await sim_loop().create_future()

    with pytest.raises(SimulationError, match=r"(?s)deadlock at 0.0.*main, main: waits in .*the worker: waits in .*py"):
        run(main())


def test_a_deadlock_names_frozen_processes() -> None:
    async def main() -> None:
        process = sim_loop().process("h")
        task = process.create_task(asyncio.sleep(1))
        process.freeze()
        await task

    with pytest.raises(SimulationError, match="h is frozen with 1 callbacks waiting"):
        run(main())


def test_a_limit_ends_what_never_ends() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(SimulationError, match="not done after 100 virtual seconds"):
        run(main(), limit=100)


def test_a_spinning_task_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.protocol.simloop._SPIN_LIMIT", 1000)

    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(SimulationError, match="the clock stands still"):
        run(main())


def test_unhandled_exceptions_are_raised_at_the_end() -> None:
    async def fail(text: str) -> None:
        raise ValueError(text)

    async def one() -> None:
        asyncio.create_task(fail("alone"))
        await asyncio.sleep(1)

    async def two() -> None:
        sim_loop().call_later(0.5, lambda: 1 // 0)
        asyncio.create_task(fail("second"))
        await asyncio.sleep(1)

    async def own() -> None:
        asyncio.create_task(fail("meanwhile"))
        await asyncio.sleep(1)
        raise KeyError("main")

    async def kept() -> None:
        task = asyncio.create_task(fail("kept"))
        tasks.append(task)
        sim_loop().watch(task)
        await asyncio.sleep(1)

    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(ValueError, match="alone"):
        run(one())
    with pytest.raises(ExceptionGroup) as group:
        run(two())
    assert {type(error) for error in group.value.exceptions} == {ValueError, ZeroDivisionError}
    with pytest.raises(KeyError) as error:
        run(own())
    assert "meanwhile" in error.value.__notes__[0]
    with pytest.raises(ValueError, match="kept"):
        run(kept())


def test_tasks_that_outlive_main_are_cancelled() -> None:
    seen = []

    async def loose() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            seen.append("cleaned")

    async def main() -> None:
        asyncio.create_task(loose())
        await asyncio.sleep(1)

    run(main())
    assert seen == ["cleaned"]


def test_a_finished_loop_refuses_another_run() -> None:
    loop = SimLoop()
    run(asyncio.sleep(1), loop)
    assert loop.is_closed()
    again = asyncio.sleep(1)
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_until_complete(again)
    again.close()


def test_a_frozen_process_waits_and_goes_on_in_order() -> None:
    seen: list[tuple[str, float]] = []

    async def main() -> None:
        loop = sim_loop()
        process = loop.process("h")
        wake = asyncio.Event()

        async def ticks() -> None:
            for number in range(4):
                await asyncio.sleep(1)
                seen.append((f"tick {number}", loop.time()))

        async def waits() -> None:
            await wake.wait()
            seen.append(("woken", loop.time()))

        process.create_task(ticks())
        process.create_task(waits())
        await asyncio.sleep(1.5)
        process.freeze()
        await asyncio.sleep(0.25)
        wake.set()
        await asyncio.sleep(8.25)
        assert seen == [("tick 0", 1.0)]
        process.thaw()
        await asyncio.sleep(5)

    run(main())
    assert seen == [("tick 0", 1.0), ("woken", 10.0), ("tick 1", 10.0), ("tick 2", 11.0), ("tick 3", 12.0)]


def test_a_killed_process_runs_nothing_ever_again() -> None:
    seen: list[str] = []

    async def generate() -> AsyncIterator[int]:
        try:
            while True:
                await asyncio.sleep(1)
                yield 1
        finally:
            seen.append("generator closed")

    async def child() -> None:
        try:
            async for _ in generate():
                seen.append("item")
        finally:
            seen.append("child ended")
            await asyncio.sleep(1)
            seen.append("and waited")

    async def body(process: SimProcess) -> None:
        assert current_process() is process
        try:
            async with asyncio.timeout(100), asyncio.TaskGroup() as group:
                group.create_task(child())
                group.create_task(child())
        except BaseException as error:
            seen.append(repr(error))
            raise
        finally:
            seen.append("ended")

    async def main() -> None:
        process = sim_loop().process("h")
        process.create_task(body(process))
        await asyncio.sleep(2.5)
        process.kill()
        for _ in range(3):
            await asyncio.sleep(1000)
            gc.collect()
            assert seen == ["item"] * 4
        assert current_process() is None

    run(main())  # and no warning about tasks destroyed or coroutines never awaited


def test_the_end_of_a_run_does_not_look_like_an_error_to_the_dead() -> None:
    seen: list[str] = []

    async def child() -> None:
        await asyncio.Event().wait()

    async def awaits_in_its_finally() -> None:
        task = asyncio.create_task(child())
        try:
            await asyncio.Event().wait()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(1):
                await asyncio.sleep(0.5)
            await asyncio.create_task(child())

    async def body() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(awaits_in_its_finally())
                await awaits_in_its_finally()
        except Exception as error:
            seen.append(repr(error))

    async def main() -> None:
        process, killed = sim_loop().process("a"), sim_loop().process("b")
        process.create_task(body())
        killed.create_task(body())
        await asyncio.sleep(1)
        killed.kill()
        await asyncio.sleep(1)

    run(main())
    assert seen == []


def test_a_process_may_kill_itself_and_runs_to_its_next_suspension() -> None:
    seen: list[str] = []

    async def body(process: SimProcess) -> None:
        process.kill()
        seen.append("still here")
        asyncio.create_task(asyncio.sleep(1))
        await asyncio.sleep(0)
        seen.append("not here")

    async def main() -> None:
        process = sim_loop().process("h")
        process.create_task(body(process))
        await asyncio.sleep(5)

    run(main())
    assert seen == ["still here"]


def test_a_future_crosses_processes() -> None:
    async def main() -> None:
        loop = sim_loop()
        a, b = loop.process("a"), loop.process("b")
        future = loop.create_future()

        async def wait() -> SimProcess | None:
            await future
            return current_process()

        async def give() -> None:
            await asyncio.sleep(1)
            future.set_result(None)

        waiting = a.create_task(wait())
        b.create_task(give())
        assert await waiting is a

    run(main())


def test_many_cancelled_timers_do_not_pile_up() -> None:
    async def main() -> None:
        loop = sim_loop()
        for _ in range(20_000):
            async with asyncio.timeout(1e6):
                await asyncio.sleep(0)
        assert len(loop._timers) < 3000

    run(main())


PROGRAM = """
import asyncio, hashlib
from atoll.protocol.simloop import run

log = hashlib.sha256()

async def worker(number, depth):
    loop = asyncio.get_running_loop()
    for step in range(3):
        await asyncio.sleep((number * 7 + step) % 3)
        log.update(f"{loop.time()} {number} {step};".encode())
    if depth:
        async with asyncio.TaskGroup() as group:
            for child in range(4):
                group.create_task(worker(number * 4 + child, depth - 1))

async def main():
    tasks = {asyncio.create_task(worker(n, 1)) for n in range(20)}
    futures = {asyncio.get_running_loop().create_future() for _ in range(20)}
    for future in futures:
        asyncio.get_running_loop().call_soon(future.set_result, None)
    await asyncio.wait(futures)
    while tasks:
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            log.update(task.get_name().encode())
    try:
        async with asyncio.TaskGroup() as group:  # the failure cancels a set of tasks
            for n in range(20):
                group.create_task(cancelled(n))
            await asyncio.sleep(1)
            raise ValueError
    except ExceptionGroup:
        pass

async def cancelled(number):
    try:
        await asyncio.sleep(100)
    finally:
        log.update(b"%d" % number)

junk = [object() for _ in range(hash("anything") % 1000)]  # other addresses each time
run(main())
print(log.hexdigest())
"""


def test_sets_of_tasks_have_one_order_under_any_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1


def test_speed() -> None:
    count = 200_000

    async def main() -> None:
        loop = sim_loop()
        done = loop.create_future()

        def again(left: int) -> None:
            if left:
                loop.call_soon(again, left - 1)
            else:
                done.set_result(None)

        again(count)
        await done

    started = time.perf_counter()
    run(main())
    print(f"{count / (time.perf_counter() - started):,.0f} callbacks per second")
