"""Memory shared with the trainer child."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.sharedmem import Counters, SharedMemory
from atoll.protocol.errors import ResourceError
from atoll.protocol.overlap import left


def test_a_child_sees_and_changes_the_same_memory() -> None:
    memory = SharedMemory.create(1000)
    memory.array[:] = np.arange(1000)
    code = f"""
import os
from atoll.node.sharedmem import Counters, SharedMemory
m = SharedMemory({memory.fd}, 1000)
assert m.read().steps == 3 and m.array.sum() == 499500
m.array *= 2
m.write(Counters(steps=4, loss=1.5))
m.close()
m.array[0] = 7
"""
    memory.write(Counters(steps=3))
    subprocess.run([sys.executable, "-c", code], pass_fds=[memory.fd], check=True)
    assert memory.array[0] == 7
    assert memory.array[999] == 1998
    counters = memory.read()
    assert (counters.steps, counters.loss) == (4, 1.5)
    assert isinstance(counters.steps, int)
    memory.close()
    memory.close()


def test_it_is_zero_nameless_and_gone_after_close() -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    memory = SharedMemory.create(10)
    assert not memory.array.any()
    if before:
        assert set(os.listdir("/dev/shm")) <= before
    fd = memory.fd
    memory.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    # the mapping outlives the descriptor
    memory.array[3] = 1


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ResourceError, match="no memory for"):
        SharedMemory.create(1 << 60)


def test_counters_are_read_whole() -> None:
    memory = SharedMemory.create(1)
    stop = threading.Event()

    def write() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            memory.write(Counters(steps=n, tokens=n, units=n, step_time=float(n)))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(2000):
            c = memory.read()
            assert c.steps == c.tokens == c.units == c.step_time
    finally:
        stop.set()
        writer.join()
    memory.close()


@pytest.mark.parametrize("before", [1, 2])
def test_a_writer_that_died_halfway_has_changed_nothing(before: int) -> None:
    memory = SharedMemory.create(1)
    for steps in range(before):
        memory.write(Counters(steps=5 + steps))
    memory._slots[(before + 2) % 2][:3] = 77  # the next write, until just before its end
    assert (memory.read().steps, memory.read().tokens) == (4 + before, 0)
    memory.write(Counters(steps=8))
    assert memory.read().steps == 8
    memory.close()


@given(
    st.integers(0, 1 << 40), st.floats(0, 1), st.none() | st.tuples(*[st.integers(0, 1 << 40)] * 3), st.integers(1, 9)
)
def test_what_a_commit_took_is_off_once(count: int, share: float, of: tuple[int, int, int] | None, number: int) -> None:
    counters = Counters(steps=count, tokens=count, units=count)
    counters.spend(number, share, of)
    assert counters.spent == number
    expected = [left(count, share, part) for part in of or (None, None, None)]
    assert [counters.steps, counters.tokens, counters.units] == expected
    assert all(0 <= value <= count for value in expected)
