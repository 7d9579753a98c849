"""The trainer child as a real process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.node import trainer as module
from atoll.node import watchdog
from atoll.node.config import DataConfig, InnerConfig, ModelConfig
from atoll.node.specs import tensor_specs
from atoll.node.trainer import TrainerProcess
from atoll.node.worker import NICENESS
from atoll.protocol.errors import DataError, ResourceError
from atoll.protocol.island import Run
from atoll.protocol.messages import Span
from atoll.protocol.theta0 import theta0

from .leaks import below

pytestmark = pytest.mark.real

MODEL = ModelConfig.from_table({"width": 32, "heads": 2, "kv_heads": 2, "ffn": 64, "layers": 1, "context": 32})
H = 20


class Events(list[tuple[str, dict[str, Any]]]):
    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        self.append((event, fields))

    def named(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self if name == event]


async def start(**options: Any) -> tuple[TrainerProcess, Events]:
    events = Events()
    inner = InnerConfig.from_table({"batch": 4})
    island = await TrainerProcess.start(
        options.pop("model", MODEL), options.pop("data", DataConfig()), inner, H, 10, log=events, **options
    )
    island.local[:] = theta0(0, tensor_specs(MODEL))
    return island, events


def run(body: Callable[[TrainerProcess, Events], Awaitable[None]], **options: Any) -> None:
    """Run ``body`` with a child, and see that none is left."""

    async def whole() -> int:
        island, events = await start(**options)
        try:
            await body(island, events)
        finally:
            pid = island.pid
            begun = time.monotonic()
            await island.close()
            assert time.monotonic() - begun < 3
        return pid or 0

    pid = asyncio.run(whole())
    assert not pid or not os.path.exists(f"/proc/{pid}")


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def niceness_of_session(pid: int | None) -> int | None:
    """None where sessions are no groups of the scheduler."""
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split("nice")[1])
    except (OSError, IndexError):
        return None


def test_it_trains_on_its_lease_and_stands_still_when_frozen() -> None:
    async def body(island: TrainerProcess, events: Events) -> None:
        theta = island.local.copy()
        island.lease([Span(0, 60), Span(100, 61)])
        assert island.progress().leased == 120, "in whole steps"
        await asyncio.sleep(0.3)
        assert island.progress().steps == 0, "it was not told of global parameters yet"
        await island.resume(reload=True, spent=1, outer_step=0)
        # units count as used before their step begins, so wait for the step as well
        await until(lambda: island.progress().steps == 30)
        progress = island.progress()
        assert progress.leased == 0, "the rest is too small for a step"
        assert (progress.steps, progress.units, progress.tokens) == (30, 120, 120 * 32)
        assert progress.loss is not None
        assert progress.loss < 5.5
        assert progress.step_time > 0
        island.lease([Span(200, 100_000)])
        await until(lambda: island.progress().steps > 40)
        snapshot = await island.freeze()
        frozen = island.local.copy()
        assert not np.array_equal(frozen, theta)
        assert snapshot.units == 4 * snapshot.steps
        assert snapshot.leased == 121 + 100_000 - snapshot.units
        await asyncio.sleep(0.2)
        assert np.array_equal(frozen, island.local)
        assert island.progress().steps == snapshot.steps

        await island.resume(reload=False, spent=0.25, outer_step=1)
        assert island.progress().steps >= round(snapshot.steps * 0.75)
        await until(lambda: island.progress().steps > snapshot.steps)
        await island.freeze()
        island.local[:] = theta
        await island.resume(reload=True, spent=1, outer_step=2)
        assert island.progress().steps <= 2
        island.revoke()
        await until(lambda: island.progress().leased == 0)
        steps = (await island.freeze()).steps
        await island.resume(reload=False, spent=0, outer_step=2)
        await asyncio.sleep(0.2)
        assert island.progress().steps == steps, "nothing is leased"
        island.lease([Span(7, 8)])
        await until(lambda: island.progress().steps == steps + 2)
        assert events.named("trainer")[0]["device"] == "cpu"
        # It must not starve its own supervisor, which lives in another session: where Linux groups processes by
        # session, the group has to be nice.
        assert niceness_of_session(island.pid) in (None, NICENESS)

    run(body, device="cpu")


def test_it_trains_on_from_a_snapshot_and_is_moved_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_limit(island: TrainerProcess, steps: int) -> np.ndarray:
        await until(lambda: island.progress().steps == steps)
        await asyncio.sleep(0.1)
        assert island.progress().steps == steps, "it is as far ahead as it may be"
        return island.local.copy()

    async def body(island: TrainerProcess, events: Events) -> None:
        assert island.frozen is not None
        half, n = len(island.local) // 2, len(island.local)
        shift = np.linspace(-1, 1, n, dtype=np.float32)

        def moved(theta: np.ndarray) -> np.ndarray:
            return np.concatenate([theta[:half] + shift[:half], shift[half:]])

        whole = [slice(0, half), slice(half, n)]
        runs = [Run(0, half, 1.0), Run(half, n, 0.0)]
        island.lease([Span(0, 100_000)])
        await island.resume(reload=True, spent=1, outer_step=0)
        await until(lambda: island.progress().steps > 10)
        snapshot = await island.snapshot(5, whole)
        assert 0 < snapshot.stopped < 1
        theta = await at_limit(island, snapshot.steps + 5)
        assert not np.array_equal(island.frozen, theta)
        assert np.abs(island.frozen - theta).max() < 1, "they are five steps apart"
        assert snapshot.leased == 100_000 - snapshot.units
        # Without samples it stays where it is put.
        island.revoke()
        island.frozen[:] = shift
        counted = await island.move(runs, spent=0.5, outer_step=1, of=snapshot)
        assert counted.stopped > 0.1, "it has waited at its limit"
        assert counted.steps == snapshot.steps + 5
        np.testing.assert_array_equal(island.local, moved(theta))
        assert island.progress().steps == snapshot.steps + 5 - round(snapshot.steps / 2)

        # A limit is lifted when the round comes to nothing; a pause at a limit survives the child.
        island.lease([Span(0, 100_000)])
        island.frozen[:] = 7
        before = (await island.snapshot(3, whole[1:])).steps
        assert (island.frozen[:half] == 7).all(), "of a fragment, no more than that is copied"
        assert (island.frozen[half:] != 7).all()
        await at_limit(island, before + 3)
        await island.resume(reload=False, spent=0, outer_step=1)
        await until(lambda: island.progress().steps > before + 10)
        snapshot = await island.snapshot(4, whole)
        theta = await at_limit(island, snapshot.steps + 4)
        os.kill(island.pid or 0, signal.SIGKILL)
        await until(lambda: island.failed is not None)
        await until(lambda: island.failed is None)
        np.testing.assert_array_equal(await at_limit(island, snapshot.steps + 4), theta)

        # With another round in flight the limit is that of the older one, whatever is handed over meanwhile.
        await island.resume(reload=False, spent=0, outer_step=1)
        await until(lambda: island.progress().steps > snapshot.steps + 10)
        older = await island.snapshot(9, whole[:1])
        newer = await island.snapshot(9, whole[1:], older.steps + 9)
        assert older.steps <= newer.steps <= older.steps + 9
        await at_limit(island, older.steps + 9)
        island.frozen[:half] = 0
        counted = await island.move([Run(0, half, 1.0)], spent=1, outer_step=2, of=older, until=newer.steps + 9)
        assert counted.steps == older.steps + 9
        await at_limit(island, newer.steps - older.steps + 9)
        await island.resume(reload=False, spent=0, outer_step=2, until=newer.steps - older.steps + 12)
        await at_limit(island, newer.steps - older.steps + 12)
        await island.resume(reload=False, spent=0, outer_step=2)
        await until(lambda: island.progress().steps > 40)
        snapshot = await island.snapshot(4, whole)
        theta = await at_limit(island, snapshot.steps + 4)

        # While there is no child, this side does its work; one that does not answer is ended first.
        monkeypatch.setattr(module, "FREEZE_TIMEOUT", 0.5)
        for kind in (signal.SIGKILL, signal.SIGSTOP):
            os.kill(island.pid or 0, kind)
            if kind is signal.SIGKILL:
                await until(lambda: island.failed is not None)
            island.frozen[:] = shift
            island.revoke()
            counted = await island.move(runs, spent=1, outer_step=2, of=snapshot)
            assert (counted.steps, counted.stopped) == (snapshot.steps + 4, 0)
            np.testing.assert_array_equal(island.local, moved(theta))
            await until(lambda: island.failed is None)
            island.lease([Span(0, 100_000)])
            snapshot = await island.snapshot(4, whole)
            theta = await at_limit(island, snapshot.steps + 4)

        # If it has begun, nobody knows what it has left.
        os.kill(island.pid or 0, signal.SIGSTOP)
        counters = island._memory.read()
        counters.moved = island._asked + 1
        island._memory.write(counters)
        with pytest.raises(ResourceError, match="while its parameters were being moved"):
            await island.move(runs, spent=1, outer_step=3, of=snapshot)
        island.local[:] = theta
        await island.resume(reload=True, spent=1, outer_step=3)
        await until(lambda: island.progress().steps > 5)

    run(body, device="cpu", overlap=True)


def test_it_tells_what_its_time_went_into() -> None:
    async def spent(island: TrainerProcess, seconds: float) -> dict[str, float]:
        """What is added to each account while nothing is changed for so long."""
        before, now = island.progress().fields, time.monotonic()
        await asyncio.sleep(seconds)
        after, passed = island.progress().fields, time.monotonic() - now
        added = {name: after[name] - before[name] for name in ("trained", "held", "waited")}
        assert abs(sum(added.values()) - passed) < 0.1, "every moment is in one account"
        return added

    async def body(island: TrainerProcess, events: Events) -> None:
        assert (await spent(island, 0.3))["waited"] > 0.2, "no round keeps it before the first"
        island.lease([Span(0, 100_000)])
        await island.resume(reload=True, spent=1, outer_step=0)
        await until(lambda: island.progress().steps > 5)
        assert (await spent(island, 0.5))["trained"] > 0.25
        snapshot = await island.snapshot(2, [slice(0, len(island.local))])
        await until(lambda: island.progress().steps == snapshot.steps + 2)
        assert (await spent(island, 0.3))["held"] > 0.15, "it is as far ahead as it may be"
        await island.freeze()
        assert (await spent(island, 0.3))["held"] > 0.25, "nothing runs that could end"
        # A child that dies takes nothing of it along, and the time without one is nobody's.
        before = island.progress().fields
        os.kill(island.pid or 0, signal.SIGKILL)
        await until(lambda: island.failed is not None)
        await until(lambda: island.failed is None)
        after = island.progress().fields
        assert after["trained"] == before["trained"]
        assert after["held"] < before["held"] + 0.5
        await island.resume(reload=True, spent=1, outer_step=1)
        await until(lambda: island.progress().steps > 5)
        island.revoke()
        await until(lambda: island.progress().leased == 0)
        assert (await spent(island, 0.3))["waited"] > 0.15, "there is nothing to train on"
        assert island.progress().fields["trained"] > before["trained"]

    run(body, device="cpu", overlap=True)


def test_what_the_child_counts_meanwhile_is_never_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this side takes from reading the counters to doing something with them: a generation of leases
    that the child was told of in the same breath stays known, or its samples would seem unused for ever."""

    async def body(island: TrainerProcess, events: Events) -> None:
        island.lease([Span(0, 40)])
        await island.resume(reload=True, spent=1, outer_step=0)
        await until(lambda: island.progress().steps == 10)
        for generation in range(1, 4):
            await island.freeze()
            read = island._memory.read

            def slowly(read: Any = read, generation: int = generation) -> Any:
                counters = read()
                end = time.monotonic() + 1
                while read().epoch < generation and time.monotonic() < end:
                    time.sleep(0.001)
                return counters

            island.revoke()
            with monkeypatch.context() as patch:
                patch.setattr(island._memory, "read", slowly)
                await island.resume(reload=True, spent=1, outer_step=0)
            assert island.progress().steps == 0
            island.lease([Span(100 * generation, 40)])
            await until(lambda: island.progress().steps == 10)
            assert island.progress().leased == 0
            assert island.progress().units == 40

    run(body, device="cpu")


def test_a_revoke_between_two_children_is_known_to_the_next() -> None:
    async def body(island: TrainerProcess, events: Events) -> None:
        island.lease([Span(0, 40)])
        await island.resume(reload=True, spent=1, outer_step=0)
        await until(lambda: island.progress().steps == 10)
        assert island.pid is not None
        os.kill(island.pid, signal.SIGKILL)
        await until(lambda: island.restarts == 1)
        island.revoke()
        island.lease([Span(100, 20)])
        assert island.progress().leased == 20
        await until(lambda: island.progress().steps == 15)
        assert island.progress().leased == 0, "used samples count as used"

    run(body, device="cpu")


@pytest.mark.parametrize("heard", [True, False], ids=["heard", "unheard"])
def test_what_a_commit_took_is_off_once_though_the_child_dies(heard: bool) -> None:
    async def body(island: TrainerProcess, events: Events) -> None:
        island.lease([Span(0, 40)])
        await island.resume(reload=True, spent=1, outer_step=0)
        await until(lambda: island.progress().steps == 10)
        snapshot = await island.freeze()
        assert snapshot.steps == 10
        child = island.pid
        assert child is not None
        if not heard:
            os.kill(child, signal.SIGSTOP)
        await island.resume(reload=False, spent=0.5, outer_step=1)
        assert island.progress().steps == 5
        if heard:
            await until(lambda: island._memory.read().steps == 5)
        os.kill(child, signal.SIGKILL)
        await until(lambda: island.restarts == 1)
        # Between two children, too, and while the next one starts.
        assert island.progress().steps == 5
        await island.resume(reload=False, spent=0, outer_step=1)
        island.lease([Span(100, 8)])
        await until(lambda: island.progress().steps == 7)
        assert (await island.freeze()).units == 28
        await island.resume(reload=False, spent=1, outer_step=2)
        assert island.progress().steps == 0
        await until(lambda: island._memory.read().steps == 0)

    run(body, device="cpu")


def test_what_was_kept_is_taken_up_by_another_process() -> None:
    """Of one trainer's θ, counters and leases another goes on: it counts on, and uses no sample again."""

    async def whole() -> None:
        first, _ = await start(device="cpu")
        try:
            first.lease([Span(0, 42), Span(100, 1000)])
            await first.resume(reload=True, spent=1, outer_step=0)
            await until(lambda: first.progress().steps >= 12)
            snapshot = await first.freeze()
            kept, theta = first.keep(), first.local.copy()
        finally:
            await first.close()
        second, _ = await start(device="cpu")
        try:
            for wrong in ("", "{}", kept.replace('"steps":', '"steps":-'), kept.replace('"units"', '"unit"')):
                with pytest.raises(ValueError, match="unreadable"):
                    second.restore(wrong)
            second.restore(kept)
            progress = second.progress()
            assert (progress.steps, progress.tokens, progress.units) == (
                snapshot.steps, snapshot.tokens, snapshot.units
            )  # fmt: skip
            assert progress.leased == snapshot.leased // 4 * 4
            second.local[:] = theta
            await second.resume(reload=True, spent=0, outer_step=0)
            await until(lambda: second.progress().steps >= snapshot.steps + 5)
            again = await second.freeze()
            assert again.units == 4 * again.steps
            assert again.units + again.leased == 1042
            left = json.loads(second.keep())["spans"]
            used = [unit for start, count in ((0, 42), (100, 1000)) for unit in range(start, start + count)]
            assert [unit for start, count in left for unit in range(start, start + count)] == used[again.units :]
            assert not np.array_equal(second.local, theta)
            with pytest.raises(ValueError, match="orders"):
                second.restore(kept)
        finally:
            await second.close()

    asyncio.run(whole())


def test_two_islands_with_the_same_units_learn_the_same() -> None:
    async def body(island: TrainerProcess, events: Events) -> None:
        other, _ = await start(device="cpu", micro_batch=2)
        try:
            for one in (island, other):
                one.lease([Span(0, 40)])
                await one.resume(reload=True, spent=1, outer_step=0)
            await until(lambda: island.progress().leased == other.progress().leased == 0)
            await island.freeze()
            await other.freeze()
            np.testing.assert_allclose(island.local, other.local, atol=5e-3)
        finally:
            await other.close()

    run(body, device="cpu")


def test_a_killed_child_is_replaced_and_loses_nothing() -> None:
    async def body(island: TrainerProcess, events: Events) -> None:
        island.lease([Span(0, 1_000_000)])
        await island.resume(reload=True, spent=1, outer_step=0)
        await until(lambda: island.progress().steps > 30)
        os.kill(island.pid or 0, signal.SIGKILL)
        await until(lambda: island.failed is not None)
        before = island.progress()
        assert before.steps > 30
        # nobody froze it: it trains on by itself
        await until(lambda: island.progress().steps > before.steps + 10)
        assert island.restarts == 1
        assert any("SIGKILL" in fields["message"] for fields in events.named("warning"))
        assert len(events.named("trainer")) == 2
        snapshot = await island.freeze()
        # the step that was cut off took units and gave nothing
        assert 1_000_000 - snapshot.leased - snapshot.units in (0, 4)

        await island.resume(reload=False, spent=1, outer_step=1)
        os.kill(island.pid or 0, signal.SIGKILL)
        await until(lambda: island.failed is not None)
        with pytest.raises(ResourceError, match="SIGKILL"):
            await island.freeze()
        theta = theta0(1, tensor_specs(MODEL))
        island.local[:] = theta
        await until(lambda: island.failed is None)
        await asyncio.sleep(0.2)
        assert np.array_equal(island.local, theta), "after a failed freeze it waits for resume"
        await island.resume(reload=True, spent=1, outer_step=1)
        await until(lambda: island.progress().steps > 5)

    run(body, device="cpu")


def test_a_stopped_child_fails_its_freeze_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FREEZE_TIMEOUT", 0.5)

    async def body(island: TrainerProcess, events: Events) -> None:
        island.lease([Span(0, 1_000_000)])
        await island.resume(reload=True, spent=1, outer_step=0)
        await until(lambda: island.progress().steps > 5)
        os.kill(island.pid or 0, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(ResourceError, match="did not answer a freeze within"):
            await island.freeze()
        assert time.monotonic() - begun < 3
        await until(lambda: island.failed is None)
        monkeypatch.undo()
        assert (await island.freeze()).steps > 5

    run(body, device="cpu")


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits on a child's silence for tests that wait for them."""
    monkeypatch.setattr(watchdog, "SLACK", 2.0)
    monkeypatch.setattr(watchdog, "FIRST", 5.0)


def test_a_child_that_hangs_is_noticed_though_nobody_asks_it_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)

    async def body(island: TrainerProcess, events: Events) -> None:
        island.lease([Span(0, 1_000_000)])
        await island.resume(reload=True, spent=1, outer_step=0)
        await until(lambda: island.progress().steps > 30)
        for count in (1, 2):
            os.kill(island.pid or 0, signal.SIGSTOP)
            stopped = time.monotonic()
            await until(lambda: island.failed is not None)
            # Its last step may have been slow on a busy machine.
            assert time.monotonic() - stopped < island._watchdog.limit + 5
            before = island.progress().steps
            assert before > 30
            await until(lambda count=count, before=before: (  # type: ignore[misc]
                island.restarts == count and island.progress().steps > before + 10
            ))  # fmt: skip
        assert [fields["message"] for fields in events.named("warning")] != []
        assert all("It hangs" in fields["message"] for fields in events.named("warning"))
        for ended in events.named("ended"):
            assert ended["hung"] is True
            assert ended["silent"] > ended["limit"] >= 2
            assert (ended["lost_steps"], ended["lost_tokens"]) == (0, 0), "its parameters are in shared memory"
            assert ended["lost_units"] in (0, 4), "a step that was cut off"
        lost = sum(ended["lost_units"] for ended in events.named("ended"))
        snapshot = await island.freeze()
        assert 1_000_000 - snapshot.leased - snapshot.units == lost

        # One that is hung when it is told to go on is noticed as well.
        os.kill(island.pid or 0, signal.SIGSTOP)
        await asyncio.sleep(3)
        assert island.failed is None, "a frozen one has nothing to do"
        await island.resume(reload=False, spent=1, outer_step=1)
        await until(lambda: island.restarts == 3 and island.progress().steps > 10)
        assert island.progress().units <= 4 * island.progress().steps

    run(body, device="cpu")


def test_who_stands_still_for_a_reason_is_not_taken_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without samples, frozen, at its limit; and after this process itself has stood still."""
    shorten(monkeypatch)

    async def body(island: TrainerProcess, events: Events) -> None:
        await asyncio.sleep(4)
        island.lease([Span(0, 43)])
        await island.resume(reload=True, spent=1, outer_step=0)
        await until(lambda: island.progress().steps == 10)
        await asyncio.sleep(4)
        island.lease([Span(100, 1_000_000)])
        await until(lambda: island.progress().steps > 20)
        await island.freeze()
        await asyncio.sleep(4)
        await island.resume(reload=False, spent=0, outer_step=0)
        await until(lambda: island.progress().steps > 40)
        snapshot = await island.snapshot(3, [slice(0, len(island.local))])
        await until(lambda: island.progress().steps == snapshot.steps + 3)
        await asyncio.sleep(4)
        await island.resume(reload=False, spent=0, outer_step=0)
        await until(lambda: island.progress().steps > snapshot.steps + 20)
        child = island.pid or 0
        os.kill(child, signal.SIGSTOP)
        time.sleep(1 + watchdog.LOOK + watchdog.LATE + 2)  # noqa: ASYNC251 - this process stands still
        os.kill(child, signal.SIGCONT)
        await until(lambda: island.progress().steps > snapshot.steps + 40)
        assert island.restarts == 0
        assert events.named("warning") == events.named("ended") == []

    run(body, device="cpu", overlap=True)


def test_it_gives_up_after_too_many_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RESTARTS", 1)
    monkeypatch.setattr(module, "RESTART_DELAY", 0.0)

    async def body(island: TrainerProcess, events: Events) -> None:
        for expected in (0, 1):
            await until(lambda: island.failed is None)
            assert island.restarts == expected
            os.kill(island.pid or 0, signal.SIGKILL)
            await until(lambda: island.failed is not None)
        await until(lambda: island.failed is not None and "failed again" in str(island.failed))
        with pytest.raises(ResourceError, match="failed again"):
            await island.freeze()
        with pytest.raises(ResourceError, match="failed again"):
            await asyncio.wait_for(island.watch(), 5)
        await island.resume(reload=True, spent=1, outer_step=0)

    run(body, device="cpu")


def test_a_child_killed_while_it_starts_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that it found speaks against another one: the kernel's killer, as a rule."""
    monkeypatch.setattr(module, "RESTART_DELAY", 0.0)

    def child() -> int:
        return next((pid for pid, command in below(os.getpid()).items() if "atoll.node.worker" in command), 0)

    async def body() -> None:
        starting = asyncio.create_task(start(device="cpu"))
        await until(lambda: child() != 0)
        os.kill(child(), signal.SIGKILL)
        island, events = await starting
        try:
            assert island.restarts == 1
            assert island.failed is None
            assert events.named("warning")[0]["message"] == "the trainer was ended by SIGKILL"
            assert events.named("trainer")[0]["micro_batch"] == 2, "half of the batch"
        finally:
            await island.close()

    asyncio.run(body())


def test_data_that_are_gone_end_it_at_once_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_DELAY", 0.0)
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes a dull text\n" * 500)

    async def body(island: TrainerProcess, events: Events) -> None:
        text.unlink()
        os.kill(island.pid or 0, signal.SIGKILL)
        with pytest.raises(DataError, match="failed again"):
            await asyncio.wait_for(island.watch(), 60)
        with pytest.raises(ResourceError, match="there is no trainer"):
            await island.freeze()
        assert island.restarts == 1

    run(body, device="cpu", data=DataConfig(source="text", path=str(text)))


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    async def refused(kind: type[Exception], match: str, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            await start(**options)

    asyncio.run(refused(ResourceError, "cuda:63", device="cuda:63"))
    asyncio.run(refused(DataError, "differs from the run's", data=DataConfig(files="0" * 64)))


PARENT = """
import asyncio, sys
from atoll.node.config import DataConfig, InnerConfig, ModelConfig
from atoll.node.trainer import TrainerProcess
from atoll.protocol.island import Run
from atoll.protocol.messages import Span
async def main():
    island = await TrainerProcess.start(ModelConfig.from_table({}), DataConfig(), InnerConfig(), 50, 10, device="cpu")
    island.lease([Span(0, 10**9)])
    await island.resume(reload=True, spent=1, outer_step=0)
    print(island.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_the_child_ends_when_its_parent_is_killed(stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(PARENT)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert os.getsid(child) == child
        os.kill(child, signal.SIGINT)
        if stopped:
            os.kill(child, signal.SIGSTOP)
        assert _alive(child), "Ctrl-C is the parent's business"
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while _alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
