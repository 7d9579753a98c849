"""Encoding in the trainer child, as real processes: on CPU tensors, and on a GPU where there is one."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from atoll.node import codecs_torch, pinned
from atoll.node import encoder as encoding
from atoll.node import trainer as trainer_module
from atoll.node import worker as worker_module
from atoll.node.channel import Failed, Ready, line, to_parent
from atoll.node.config import DataConfig, InnerConfig, ModelConfig
from atoll.node.device_replica import DeviceReplica
from atoll.node.encoder import TrainerEncoder, coding_of, layout_of
from atoll.node.run_defaults import new_manifest
from atoll.node.specs import count_parameters, tensor_specs
from atoll.node.trainer import TrainerProcess
from atoll.protocol.codecs import get_codec
from atoll.protocol.encoder import Encoded, Outcome
from atoll.protocol.errors import ResourceError
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Span
from atoll.protocol.overlap import Overlap
from atoll.protocol.replica import Replica
from atoll.protocol.state import GlobalState
from atoll.protocol.theta0 import theta0

from .harness import MODEL, Process, Swarm, disagreements, place, small_manifest, text_folder
from .test_trainer import Events, shorten, until

pytestmark = pytest.mark.real

CONFIG = ModelConfig.from_table(MODEL)
COUNT = count_parameters(CONFIG)
DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]
HEADS = [bytes([number]) * 32 for number in range(8)]


def signed(**rules: Any) -> Manifest:
    made = new_manifest(
        "device", model=MODEL, inner={"batch": 4}, round={"inner_steps": 20, **rules}, state={"chunk": 4096}
    )
    return made.replace(codec={"name": "int8", "error_feedback": 0.9})


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Bench:
    """A trainer whose children encode, and beside it what a peer that encodes on the host would hold."""

    def __init__(self, island: TrainerProcess, manifest: Manifest, events: Events) -> None:
        self.island, self.events, self.manifest = island, events, manifest
        assert island.encoder is not None
        self.encoder: TrainerEncoder = island.encoder
        setup = island._setup
        assert setup.coding is not None
        layout = layout_of(setup.parameters, setup.fragments, setup.coding)
        state = GlobalState.fresh(layout, theta0(0, tensor_specs(CONFIG)))
        self.host = Replica(manifest, layout, get_codec("int8"), state, residual=np.zeros(COUNT, np.float32))
        self.outer_step = 0

    async def begin(self, **kept: Any) -> None:
        await self.encoder.begin(
            self.host.params, commit_id=HEADS[0], residual=kept.get("residual"), theta=kept.get("theta")
        )
        self.island.lease([Span(0, 1_000_000)])
        await self.island.resume(reload=False, spent=1, outer_step=0)

    async def trained(self, steps: int = 5) -> None:
        before = self.island.progress().steps
        await until(lambda: self.island.progress().steps >= before + steps)

    def check(self, encoded: Encoded | None, theta: np.ndarray) -> Encoded:
        assert encoded is not None
        part = self.host.layout.fragment(encoded.fragment)
        sent = [bytes(self.host.encode(index, theta, encoded.fragment)) for index in range(part.count)]
        for _ in range(2):  # as often as reducers are replaced
            assert [bytes(encoded.payload(index)) for index in range(part.count)] == sent
        assert len(b"".join(sent)) <= encoded.moved <= 1.05 * len(b"".join(sent))
        return encoded

    def outer(self, encoded: Encoded | None, mine: list[int], theta: np.ndarray) -> Outcome:
        """Another g; e of the chunks in which this peer was, as the host has it."""
        self.outer_step += 1
        residual = self.host.residual
        assert residual is not None
        for index in mine:
            span = self.host.layout.span(index)
            x = self.host.contribution(index, theta)
            decoded = np.empty_like(x)
            self.host.codec.decode(self.host.codec.encode(x), len(x), decoded)
            residual[span] = x - decoded
        rng = np.random.default_rng(self.outer_step)
        self.host.params[:] += rng.standard_normal(COUNT).astype(np.float32) * np.float32(0.001)
        others = [index for index in range(self.host.layout.count) if index not in mine]
        return Outcome(0, HEADS[self.outer_step], mine, others, encoded, False, False, Overlap())

    async def commit(self, outcome: Outcome, spent: float, ahead: int | None = None) -> Any:
        return await self.encoder.commit(
            outcome, self.host.params, spent=spent, of=None, outer_step=self.outer_step, ahead=ahead
        )


def run(body: Callable[[Bench], Awaitable[None]], device: str, **rules: Any) -> None:
    async def whole() -> int:
        manifest, events = signed(**rules), Events()
        coding, why = coding_of(manifest, "device", device)
        assert not why
        island = await TrainerProcess.start(
            CONFIG, DataConfig(), InnerConfig.from_table({"batch": 4}), 20, 10, device=device, threads=1,
            overlap=manifest.round.overlap > 0, coding=coding, log=events,
        )  # fmt: skip
        try:
            assert events.named("trainer")[0]["encode"] == "device"
            assert events.named("trainer")[0]["device"] == device
            await body(Bench(island, manifest, events))
            return island.pid or 0
        finally:
            await island.close()

    pid = asyncio.run(whole())
    assert not pid or not os.path.exists(f"/proc/{pid}")


def test_a_round_without_overlap(device: str) -> None:
    async def body(bench: Bench) -> None:
        island, encoder = bench.island, bench.encoder
        await bench.begin()
        for turn in range(3):
            await bench.trained()
            snapshot = await island.freeze()
            theta = await encoder.theta()
            assert not np.array_equal(theta, bench.host.params)
            encoded = bench.check(await encoder.encode(0), theta)
            mine = list(range(0, bench.host.layout.count, 1 + turn % 2))
            outcome = bench.outer(encoded, mine, theta)
            old = island.local.copy()  # the global parameters: no θ has crossed to the host
            moved, known = await bench.commit(outcome, 1.0, ahead=0)
            assert known
            assert (moved.steps, moved.tokens) == (snapshot.steps, snapshot.tokens)
            assert island.progress().steps == 0
            np.testing.assert_array_equal(island.local, bench.host.params)
            await island.freeze()
            now = await encoder.theta()
            for index in range(bench.host.layout.count):
                span = bench.host.layout.span(index)
                expected = theta[span] + (bench.host.params[span] - old[span])
                np.testing.assert_array_equal(now[span], bench.host.params[span] if index in mine else expected)
            residual = await encoder.residual(outcome.commit_id)
            assert residual is not None
            np.testing.assert_array_equal(residual, bench.host.residual)
            assert residual.any()
            assert await encoder.residual(HEADS[7]) is None, "it belongs to one head only"
            await island.resume(reload=False, spent=0, outer_step=bench.outer_step)

    run(body, device)


def test_a_round_in_flight_a_void_one_and_one_that_was_committed_late(device: str) -> None:
    async def body(bench: Bench) -> None:
        island, encoder = bench.island, bench.encoder
        parts = bench.host.layout.stretches()
        await bench.begin()
        await bench.trained()
        snapshot = await island.snapshot(5, parts)
        await until(lambda: island.progress().steps == snapshot.steps + 5)
        first = await encoder.encode(0)
        assert first is not None
        sent = [bytes(first.payload(index)) for index in range(bench.host.layout.count)]
        encoder.hold([first])
        await island.resume(reload=False, spent=0, outer_step=0)
        await bench.trained(10)
        # The next round, without overlap, gives θ away; the one before is committed meanwhile.
        await island.freeze()
        theta = await encoder.theta()
        bench.check(await encoder.encode(0), theta)
        assert sent != [bytes(first.payload(index)) for index in range(bench.host.layout.count)], "memory is used again"
        await island.resume(reload=False, spent=0, outer_step=0, ahead=0)
        await island.freeze()
        theta = await encoder.theta()
        outcome = bench.outer(None, [], theta)
        outcome = Outcome(0, outcome.commit_id, outcome.others, [], first, False, False, Overlap())
        _, known = await bench.commit(outcome, 0.5, ahead=0)
        assert known
        await island.freeze()
        shift = bench.host.params - (await encoder.theta() - theta)  # what was frozen: g − x without a residual
        decoded = np.empty(COUNT, np.float32)
        for index, payload in enumerate(sent):
            span = bench.host.layout.span(index)
            bench.host.codec.decode(payload, span.stop - span.start, decoded[span])
        start = theta0(0, tensor_specs(CONFIG))
        assert np.abs((start - shift) - decoded).max() < 0.02 * np.abs(decoded).max()

    run(body, device, overlap=5)


def test_a_child_that_dies_begins_anew_and_what_it_encoded_stays(device: str) -> None:
    async def body(bench: Bench) -> None:
        island, encoder = bench.island, bench.encoder
        await bench.begin()
        await bench.trained()
        await island.freeze()
        theta = await encoder.theta()
        encoded = bench.check(await encoder.encode(0), theta)
        life = island.life
        os.kill(island.pid or 0, signal.SIGKILL)
        await until(lambda: island.failed is not None)
        with pytest.raises(ResourceError):
            await encoder.encode(0)
        bench.check(encoded, theta)
        await until(lambda: island.failed is None)
        assert island.life == life + 1
        assert island.encoder is encoder
        assert island.progress().steps == 0, "what it had learnt died with it"
        for late in (encoder.encode(0), encoder.theta()):
            with pytest.raises(ResourceError, match="died since"):
                await late
        # The commit finds a child that knows nothing of the round.
        outcome = bench.outer(None, [], theta)
        await bench.commit(outcome, 0.0, ahead=0)
        await island.freeze()
        np.testing.assert_array_equal(await encoder.theta(), bench.host.params)
        residual = await encoder.residual(outcome.commit_id)
        assert residual is not None
        assert not residual.any()
        await island.resume(reload=False, spent=0, outer_step=1)
        await bench.trained()

        # Killed while it trains, nobody asking: it goes on from the global parameters by itself.
        os.kill(island.pid or 0, signal.SIGKILL)
        await until(lambda: island.life == life + 2)
        await bench.trained()
        await island.freeze()
        bench.host.residual[:] = 0  # type: ignore[index]
        bench.check(await encoder.encode(0), await encoder.theta())
        # Killed while it should take over a commit: the next one begins with that commit's parameters.
        outcome = bench.outer(None, [], theta)
        os.kill(island.pid or 0, signal.SIGSTOP)
        committing = asyncio.create_task(bench.commit(outcome, 0.0))
        await asyncio.sleep(0.2)
        os.kill(island.pid or 0, signal.SIGKILL)
        with pytest.raises(ResourceError):
            await committing
        np.testing.assert_array_equal(island.local, bench.host.params)
        await island.resume(reload=True, spent=1, outer_step=2)
        await until(lambda: island.failed is None)
        await bench.trained()

    run(body, device)


def test_a_child_that_hangs_is_ended_in_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "ENCODE_TIMEOUT", 0.5)
    monkeypatch.setattr(encoding, "READ_TIMEOUT", 0.5)

    async def body(bench: Bench) -> None:
        await bench.begin()
        await bench.trained()
        await bench.island.freeze()
        os.kill(bench.island.pid or 0, signal.SIGSTOP)
        with pytest.raises(ResourceError, match="did not give what goes to the disk within"):
            await bench.encoder.residual(HEADS[0])
        assert bench.island.failed is None, "that alone is no reason to end it"
        with pytest.raises(ResourceError, match="did not encode a contribution within"):
            await bench.encoder.encode(0)
        monkeypatch.undo()
        await until(lambda: bench.island.failed is None)
        await bench.island.resume(reload=False, spent=0, outer_step=0)
        await bench.trained()

    run(body, device)


def test_what_went_with_one_that_hung_is_said(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)

    async def body(bench: Bench) -> None:
        await bench.begin()
        await bench.trained(10)
        os.kill(bench.island.pid or 0, signal.SIGSTOP)
        await until(lambda: bench.events.named("ended") != [])
        (ended,) = bench.events.named("ended")
        assert ended["hung"]
        assert ended["lost_steps"] >= 10, "what was trained since the last commit was on the device alone"
        assert ended["lost_tokens"] == ended["lost_steps"] * 4 * MODEL["context"]
        assert ended["lost_units"] - 4 * ended["lost_steps"] in (0, 4)
        assert bench.island.life == 1
        await until(lambda: bench.island.failed is None)
        await bench.trained(3)

    run(body, device)


def test_what_was_saved_is_taken_up(device: str) -> None:
    async def body(bench: Bench) -> None:
        rng = np.random.default_rng(0)
        residual = rng.standard_normal(COUNT).astype(np.float32) * np.float32(0.01)
        theta = bench.host.params + residual
        bench.island.restore('{"steps":7,"tokens":70,"units":28,"spans":[]}')
        await bench.encoder.begin(bench.host.params, commit_id=HEADS[3], residual=residual, theta=theta)
        await bench.island.resume(reload=False, spent=0, outer_step=0)
        snapshot = await bench.island.freeze()
        assert snapshot.steps == 7
        np.testing.assert_array_equal(await bench.encoder.theta(), theta)
        np.testing.assert_array_equal(await bench.encoder.residual(HEADS[3]), residual)
        np.testing.assert_array_equal(bench.island.local, bench.host.params)
        bench.host.residual[:] = residual  # type: ignore[index]
        bench.check(await bench.encoder.encode(0), theta)
        # A re-synchronisation begins anew, with no residual.
        await bench.island.resume(reload=True, spent=1, outer_step=0)
        await bench.island.freeze()
        assert await bench.encoder.residual(HEADS[3]) is None

    run(body, device)


def test_a_child_that_keeps_failing_to_encode_leaves_it_to_the_host(device: str) -> None:
    """Else the peer would have nothing to bring, round after round. Once costs it no more than that round."""

    async def body(bench: Bench) -> None:
        island = bench.island
        await bench.begin()
        await bench.trained()
        await island.freeze()
        froze, pid, life = island._froze, island.pid, island.life
        for _ in range(2):
            island._froze = (999, life)
            with pytest.raises(ResourceError, match="could not encode on its device: LookupError"):
                await bench.encoder.encode(0)
            island._froze = froze
            bench.check(await bench.encoder.encode(0), await bench.encoder.theta())
        assert (island.pid, island.life, island.failed) == (pid, life, None)
        island._froze = (999, life)
        for _ in range(2):
            with pytest.raises(ResourceError, match="could not encode on its device: LookupError"):
                await bench.encoder.encode(0)
        await until(lambda: island.life == life + 1)
        await until(lambda: island.failed is None)
        assert island.encoder is None
        assert island._memory.read().micro_batch == 4, "that is not what was too large"
        assert any("encoded on the host" in fields["message"] for fields in bench.events.named("warning"))
        assert bench.events.named("trainer")[-1]["encode"] == "host"
        # From here on it is an island like others: θ in the shared memory, room for snapshots.
        np.testing.assert_array_equal(island.local, bench.host.params)
        await island.resume(reload=True, spent=1, outer_step=0)
        await bench.trained()
        snapshot = await island.snapshot(3, bench.host.layout.stretches())
        await until(lambda: island.progress().steps == snapshot.steps + 3)
        assert island.frozen is not None
        assert np.abs(island.frozen - bench.host.params).max() > 0

    run(body, device, overlap=5)


def sabotage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Trainer children on whose device there is no memory for this method of the replica."""
    child = tmp_path / "python"
    child.write_text(
        f"#!{sys.executable}\nimport torch\nfrom atoll.node import device_replica, worker\n"
        "def full(*_):\n    raise torch.OutOfMemoryError('CUDA out of memory')\n"
        f"device_replica.DeviceReplica.{method} = full\nimport sys\nsys.argv[1:] = sys.argv[-1:]\nworker.main()\n"
    )
    child.chmod(0o700)
    monkeypatch.setattr(trainer_module, "sys", SimpleNamespace(executable=str(child)))


def test_a_child_without_memory_for_encoding_leaves_it_to_the_host_at_once(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(tmp_path, monkeypatch, "encode")

    async def body(bench: Bench) -> None:
        await bench.begin()
        await bench.trained()
        await bench.island.freeze()
        with pytest.raises(ResourceError, match="could not encode on its device: OutOfMemoryError: CUDA out of memory"):
            await bench.encoder.encode(0)
        await until(lambda: len(bench.events.named("trainer")) == 2)
        assert bench.events.named("trainer")[-1]["encode"] == "host"

    run(body, device)


def test_what_cannot_be_read_is_not_taken_for_what_lies_in_the_window(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(tmp_path, monkeypatch, "read")

    async def body(bench: Bench) -> None:
        await bench.begin()
        await bench.trained()
        await bench.island.freeze()
        bench.island._memory.window[:] = 85
        for read in (bench.encoder.theta, lambda: bench.encoder.residual(HEADS[0])):
            with pytest.raises(ResourceError, match="could not read what goes to the disk: OutOfMemoryError"):
                await read()
        assert bench.island.failed is None, "that alone is no reason to end it"
        await bench.island.resume(reload=False, spent=0, outer_step=0)
        await bench.trained()

    run(body, device)


def test_with_a_source_that_is_gone_goes_the_limit_of_what_was_to_be_handed_over(device: str) -> None:
    async def body(bench: Bench) -> None:
        island = bench.island
        await bench.begin()
        await bench.trained()
        await island.freeze()
        theta = await bench.encoder.theta()
        encoded = bench.check(await bench.encoder.encode(0), theta)
        outcome = bench.outer(encoded, [0], theta)
        gone = Encoded(0, encoded.payload, encoded.moved, 999, island.life)
        outcome = Outcome(0, outcome.commit_id, [0], outcome.others, gone, False, False, Overlap())
        before = island.progress().steps
        _, known = await bench.commit(outcome, 0.1, ahead=0)
        assert not known
        assert island._until is None
        await until(lambda: island.progress().steps > before + 5)

    run(body, device)


def test_a_dead_child_s_limit_is_not_the_next_one_s(device: str) -> None:
    """A limit counts what has not been handed over. Of that a death leaves nothing, so the next child stops as far
    ahead of a round as this one might have, or nowhere, where only what was to be handed over had stopped it."""

    async def body(bench: Bench) -> None:
        island = bench.island
        await bench.begin()
        await bench.trained(30)
        await island.snapshot(3, [slice(0, COUNT)])
        os.kill(island.pid or 0, signal.SIGKILL)
        await until(lambda: island.life == 1)
        await until(lambda: island.progress().steps == 3)
        await asyncio.sleep(0.5)
        assert island.progress().steps == 3, "and no more: the round is still in flight"
        await island.freeze()
        await island.resume(reload=False, spent=0, outer_step=0, ahead=0)
        await asyncio.sleep(0.2)
        assert island.progress().steps == 3
        os.kill(island.pid or 0, signal.SIGKILL)
        await until(lambda: island.life == 2)
        await bench.trained(10)

    run(body, device, overlap=5)


def test_what_a_child_had_that_was_ended_for_hanging_is_gone_before_that_is_told(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who decides by it what the next one may do must not take it for there."""
    monkeypatch.setattr(trainer_module, "FREEZE_TIMEOUT", 0.5)

    async def body(bench: Bench) -> None:
        await bench.begin()
        await bench.trained()
        os.kill(bench.island.pid or 0, signal.SIGSTOP)
        with pytest.raises(ResourceError, match="did not answer a freeze within"):
            await bench.island.freeze()
        assert bench.island.progress().tokens == 0
        monkeypatch.undo()
        await bench.island.resume(reload=False, spent=0, outer_step=0)
        await bench.trained()

    run(body, device)


def test_a_device_with_other_bits_or_without_room_is_told_at_the_start(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def child() -> tuple[Ready, bool]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            made = worker_module.Worker(setup, theirs, queue.SimpleQueue())
            ready = to_parent.decode(ours.recv(1 << 16))
        assert isinstance(ready, Ready)
        assert (made.replica is not None) == ready.encodes
        pinned.unlock([made.memory.array], made.learner.device)  # this process goes on
        return ready, made.learner.flat is made.learner.host

    monkeypatch.setattr(worker_module, "be_nice", lambda: None)
    coding, _ = coding_of(signed(), "device", device)
    assert coding is not None

    async def trainer() -> TrainerProcess:
        return TrainerProcess(
            CONFIG, DataConfig(), InnerConfig.from_table({"batch": 4}), 20, 10, device=device, threads=1, coding=coding
        )

    island = asyncio.run(trainer())
    setup = island._setup
    ready, shares = child()
    assert ready.encodes
    assert not shares
    encode = codecs_torch.encode_rows
    monkeypatch.setattr(
        codecs_torch, "encode_rows", lambda name, rows: (encode(name, rows)[0] ^ 1, encode(name, rows)[1])
    )
    ready, shares = child()
    assert not ready.encodes
    assert ready.note == f"{device} makes other bytes of int8 than the protocol"
    assert shares == (device == "cpu")
    monkeypatch.setattr(codecs_torch, "encode_rows", encode)
    monkeypatch.setattr(DeviceReplica, "allocate", full)
    ready, shares = child()
    assert not ready.encodes
    assert "no room to encode on it: CUDA out of memory" in ready.note
    assert shares == (device == "cpu")
    # Not asked for on a CPU, it is not worth a word.
    setup = msgspec.structs.replace(setup, device="cpu", coding=msgspec.structs.replace(coding, must=False))
    ready, shares = child()
    assert (ready.encodes, ready.note, shares) == (False, "", True)
    island._memory.close()


def test_a_child_that_runs_out_of_memory_while_it_trains_leaves_encoding_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first child says what one on a full device would say; the next one is a real one."""
    says = [
        Ready("cpu", "CPU", 1, "float32", 4, True),
        Failed("ResourceError", "one sequence does not fit into the memory of cuda:0", crowded=True),
    ]
    first = tmp_path / "python"
    first.write_text(
        f"#!{sys.executable}\nimport os, socket, sys\n"
        f"if not os.path.exists({str(tmp_path / 'was')!r}):\n"
        f"    open({str(tmp_path / 'was')!r}, 'w').close()\n"
        "    control = socket.socket(fileno=int(sys.argv[-1]))\n"
        "    control.makefile('rb').readline()\n"
        f"    control.sendall({b''.join(map(line, says))!r})\n"
        "    sys.exit(1)\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
    )
    first.chmod(0o700)
    monkeypatch.setattr(trainer_module, "sys", SimpleNamespace(executable=str(first)))

    async def whole() -> None:
        coding, _ = coding_of(signed(overlap=5), "device", "cpu")
        events = Events()
        island = await TrainerProcess.start(
            CONFIG, DataConfig(), InnerConfig.from_table({"batch": 4}), 20, 10, device="cpu", threads=1, overlap=True,
            coding=coding, log=events,
        )  # fmt: skip
        try:
            await until(lambda: len(events.named("trainer")) == 2)
            assert [event["encode"] for event in events.named("trainer")] == ["device", "host"]
            assert [event["micro_batch"] for event in events.named("trainer")] == [4, 4]
            assert island.encoder is None
            assert island.life == 1
            said = [fields["message"] for fields in events.named("warning")]
            assert any("on the host, not on the device: one sequence does not fit" in message for message in said)
        finally:
            await island.close()

    asyncio.run(whole())


def test_auto_is_the_host_on_a_cpu() -> None:
    async def whole() -> None:
        coding, _ = coding_of(signed(overlap=5), "auto", "auto")
        assert coding is not None
        events = Events()
        island = await TrainerProcess.start(
            CONFIG, DataConfig(), InnerConfig.from_table({"batch": 4}), 20, 10, device="cpu", threads=1, overlap=True,
            coding=coding, log=events,
        )  # fmt: skip
        try:
            assert events.named("trainer")[0]["encode"] == "host"
            assert not events.named("warning")
            assert island.encoder is None
            island.local[:] = theta0(0, tensor_specs(CONFIG))
            island.lease([Span(0, 1000)])
            await island.resume(reload=True, spent=1, outer_step=0)
            await until(lambda: island.progress().steps > 3)
            await island.snapshot(3, [slice(0, COUNT)])
            assert island.frozen is not None
            assert island.frozen.any()
        finally:
            await island.close()

    asyncio.run(whole())


# ---------------------------------------------------------------------- a swarm


def seals(process: Process) -> list[dict[str, Any]]:
    return [event for event in process.all("seal") if "device_bytes" in event]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_two_nodes_of_which_one_encodes_on_its_device(device: str, tmp_path: Path) -> None:
    with place(tmp_path) as here:
        manifest = small_manifest(text_folder(tmp_path / "text"), budget={"rounds": 100_000})
        layout, codec = manifest.layout, get_codec(manifest.codec.name)
        encoded = sum(codec.encoded_size(layout.size(index)) for index in range(layout.count))
        swarm = Swarm(here, manifest)
        encodes = ("--encode", "device", "--device", device)
        host, other = swarm.start("host", "--device", "cpu"), swarm.start("device", *encodes)

        def contributes(since: int) -> None:
            """Both, in the same rounds, after that one."""
            for process in (host, other):
                process.wait(
                    "two commits with both contributions",
                    lambda: sum(
                        event["round"] > since and min(event["contributors"].values(), default=0) == 1
                        and len(event["contributors"]) == 2
                        for event in host.all("commit")
                    ) >= 2,
                    90,
                )  # fmt: skip

        contributes(0)
        assert other.all("trainer")[0]["encode"] == "device"
        assert host.all("trainer")[0]["encode"] == "host"
        assert not seals(host)
        assert len(seals(other)) >= 2
        assert all(encoded <= event["device_bytes"] <= 1.05 * encoded for event in seals(other))

        # The trainer is killed in the middle of a round.
        before = len(seals(other))
        other.wait("a seal", lambda: len(seals(other)) > before)
        os.kill(other.trainer(), signal.SIGKILL)
        killed = max(host.round, other.round)
        other.wait("another trainer", lambda: len(other.all("trainer")) == 2)
        contributes(killed + 1)
        assert any("SIGKILL" in event["message"] for event in other.all("warning"))

        # It leaves in order and comes back, with what it had not handed over.
        other.signal(signal.SIGTERM)
        assert other.ended(20) == 0
        other = swarm.start("device", *encodes)
        other.wait_for("start")
        contributes(max(host.round, other.round))
        assert disagreements([host, other, *swarm.past]) == []
        assert not [event for process in (host, other) for event in process.all("refused")]
