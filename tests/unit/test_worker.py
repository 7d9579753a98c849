"""What a trainer child does before anybody has told it anything."""

from __future__ import annotations

from atoll.node.channel import Grant
from atoll.node.sharedmem import Counters
from atoll.node.worker import Worker


class Memory:
    def __init__(self) -> None:
        self.counters, self.writes = Counters(epoch=2), 0

    def read(self) -> Counters:
        return Counters(epoch=self.counters.epoch)

    def write(self, counters: Counters) -> None:
        self.counters = counters
        self.writes += 1


def test_a_child_writes_no_counters_before_its_first_order() -> None:
    """Its parent may be writing them at that moment, a revoke that came while there was no child among them: one that
    is lost makes used samples count as leased for ever."""
    worker = Worker.__new__(Worker)
    memory = Memory()
    worker.memory = memory  # type: ignore[assignment]
    worker.told = worker.resumed = worker.training = False
    worker.spans, worker.leased, worker.until = [], 0, None  # type: ignore[assignment]
    worker.rest()
    assert memory.writes == 0
    memory.counters.epoch = 3
    worker.handle(Grant([(0, 8)]))
    worker.rest()
    assert memory.writes == 1
    assert memory.counters.epoch == 3
