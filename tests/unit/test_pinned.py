"""Page-locking of shared memory, with a CUDA runtime that is played."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from atoll.node import pinned
from atoll.node.sharedmem import PAGE, SharedMemory

CUDA = torch.device("cuda", 0)


class Runtime:
    """cudaHostRegister and what it leaves behind when it fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int = -1) -> None:
        self.locked: dict[int, int] = {}
        self.calls = 0
        self.fails_at = fails_at
        self.pending = 0
        """The error that the next launch raises."""
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr(torch, "zeros", self.launch)

    def launch(self, *_: Any, **__: Any) -> None:
        error, self.pending = self.pending, 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.calls - 1 == self.fails_at or not size or address in self.locked:
            self.pending = 2
            return 2
        assert address % PAGE == 0
        assert flags == pinned.PORTABLE
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if self.locked.pop(address, None) is None:
            self.pending = 713
            return 713
        return 0


def arrays(memory: SharedMemory) -> list[np.ndarray[Any, Any]]:
    assert memory.frozen is not None
    return [memory.array, memory.frozen, memory.window, memory.encoded]


def test_all_of_a_shared_memory_is_locked_and_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch)
    memory = SharedMemory.create(1003, frozen=True, encoded=777)
    everything = arrays(memory)
    assert pinned.lock(everything, CUDA) == ""
    assert runtime.locked == {array.ctypes.data: array.nbytes for array in everything}
    # No page twice: CUDA refuses that.
    pages = [range(start // PAGE, -(-(start + size) // PAGE)) for start, size in sorted(runtime.locked.items())]
    assert all(one.stop <= other.start for one, other in itertools.pairwise(pages))
    pinned.unlock(everything, CUDA)
    assert (runtime.locked, runtime.pending) == ({}, 0)
    memory.close()


def test_a_failure_is_told_and_harms_nothing_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch, fails_at=1)
    memory = SharedMemory.create(1 << 18, frozen=True, encoded=777)
    assert pinned.lock(arrays(memory), CUDA) == "cudaHostRegister of 1 MiB gave error 2"
    assert runtime.pending == 0, "else the next kernel would fail for it"
    assert list(runtime.locked) == [memory.array.ctypes.data]
    pinned.unlock(arrays(memory), CUDA)
    assert (runtime.locked, runtime.pending) == ({}, 0)
    memory.close()


def test_what_is_not_there_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch)
    memory = SharedMemory.create(1003)
    assert pinned.lock([memory.array, memory.window, memory.encoded], CUDA) == ""
    assert list(runtime.locked) == [memory.array.ctypes.data]
    memory.close()


def test_without_a_cuda_device_or_a_runtime_all_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.zeros(1000, np.float32)
    assert pinned.lock([array], torch.device("cpu")) == ""
    pinned.unlock([array], torch.device("cpu"))

    def none() -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "cudart", none)
    assert pinned.lock([array], CUDA) == "AssertionError: Torch not compiled with CUDA enabled"
    pinned.unlock([array], CUDA)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    memory = SharedMemory.create(1003, frozen=True, encoded=777)
    assert pinned.lock(arrays(memory), CUDA) == ""
    values = torch.from_numpy(memory.array)
    assert values.is_pinned()
    values.copy_(torch.arange(1003, device=CUDA))
    assert values.to(CUDA, non_blocking=True).cpu()[1000] == 1000
    assert pinned.lock([memory.array], CUDA) != "", "it is locked already"
    assert torch.ones(2, device=CUDA).sum().item() == 2
    pinned.unlock(arrays(memory), CUDA)
    memory.close()
