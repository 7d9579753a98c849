"""A trainer child that hangs is noticed in bounded time, and one that is only slow is not taken for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from atoll.node.watchdog import FIRST, LATE, LOOK, SLACK, STEPS, Seen, Share, Watchdog, first_limit, share_of

FOREVER = 10_000


class Child:
    """A child under a clock of its own, and a watchdog that looks at it."""

    def __init__(self, first: float = FIRST) -> None:
        self.now, self.writes, self.stepping, self.took = 100.0, 0, 0.0, 0.0
        self.ought = True
        self.share: Share | None = None
        self.dog = Watchdog()
        self.begin(first)

    def begin(self, first: float = FIRST) -> None:
        self.dog.begin(self.now, self.seen(), first)

    def seen(self) -> Seen:
        return Seen(self.writes, self.ought, self.stepping, self.took)

    def look(self, after: float = LOOK) -> bool:
        self.now += after
        return self.dog.look(self.now, self.seen(), lambda: self.share)

    def step(self, took: float) -> bool:
        """One that takes so long, with looks meanwhile; whether it was taken for a hang."""
        self.writes += 1
        rest = took
        while rest > LOOK:
            if self.look():
                return True
            rest -= LOOK
        self.writes, self.stepping, self.took = self.writes + 1, self.stepping + took, took
        return self.look(rest)

    def hang(self) -> float:
        """Seconds until it is noticed."""
        began = self.now
        while not self.look():
            assert self.now < began + FOREVER, "never noticed"
        return self.now - began


def test_a_hang_is_noticed_by_the_longest_of_recent_steps() -> None:
    child = Child()
    for took in (0.1, 3.0, 0.1):
        assert not child.step(took)
    assert child.dog.limit == SLACK + STEPS * 3.0
    assert child.dog.limit < child.hang() <= child.dog.limit + 2 * LOOK
    # Another child is watched anew, and what is long ago is forgotten.
    child.begin()
    for _ in range(100):
        assert not child.step(0.1)
    assert child.dog.limit == pytest.approx(SLACK + STEPS * 0.1)
    assert child.hang() <= child.dog.limit + 2 * LOOK


def test_a_first_step_whose_length_is_not_known_leaves_the_time_of_a_first_one() -> None:
    """This process was late once in it: the next may take as long."""
    child = Child()
    child.writes += 1
    assert not child.look(LOOK + LATE + 1)
    child.writes, child.stepping, child.took = child.writes + 1, 30.0, 30.0
    assert not child.look()
    assert child.dog.longest == 0
    assert not child.step(0.8 * FIRST)


def test_being_late_while_the_child_has_nothing_to_do_makes_no_step_unknown() -> None:
    child = Child()
    child.ought = False
    assert not child.look()
    assert not child.look(LOOK + LATE + 60)
    child.ought = True
    assert not child.look()
    assert not child.step(3.0)
    assert child.dog.longest == 3.0


def test_steps_may_become_much_slower() -> None:
    child = Child()
    for took in (0.05, 5.0, 40.0, 200.0, 1500.0):
        assert not child.step(took), took


def test_a_step_that_runs_out_of_memory_again_and_again_is_none() -> None:
    child = Child()
    child.step(30.0)
    assert not child.step(7 * 30.0)


def test_the_first_step_has_more_time_and_twice_as_much_after_each_child_that_came_to_none() -> None:
    child = Child()
    assert FIRST < child.hang() <= FIRST + 2 * LOOK
    child.begin()
    assert 2 * FIRST < child.hang() <= 2 * FIRST + 2 * LOOK
    child.begin()
    assert not child.step(3.5 * FIRST)
    assert child.dog.limit == SLACK + STEPS * 3.5 * FIRST
    child.begin()
    assert not child.step(3.5 * FIRST), "the next one's first step is known to be slow"


def test_a_large_model_on_a_small_device_has_the_time_that_it_takes() -> None:
    tiny, large = first_limit("cpu", 20_000, 128), first_limit("cpu", 10**9, 8192)
    assert FIRST <= tiny < FIRST + 1
    assert large > 2 * 3600
    assert first_limit("cuda:0", 10**9, 8192) < 200
    assert first_limit("something", 10**6, 1000) == first_limit("cpu", 10**6, 1000)


def test_who_has_nothing_to_do_does_not_hang() -> None:
    child = Child()
    child.step(0.1)
    child.ought = False
    for _ in range(500):
        assert not child.look()
    child.ought = True
    assert child.hang() > SLACK, "counted from when it ought to train again"


def test_whatever_it_writes_is_a_sign_of_life() -> None:
    child = Child()
    child.step(0.1)
    for _ in range(20):
        for _ in range(int(SLACK) - 1):
            assert not child.look()
        child.writes += 1
        assert not child.look()


def test_a_look_that_is_late_begins_anew() -> None:
    """The machine was suspended, or so busy that nothing here ran: the child's silence proves nothing."""
    child = Child()
    child.step(0.1)
    for _ in range(10):
        for _ in range(int(SLACK) - 1):
            assert not child.look()
        assert not child.look(LOOK + LATE + 600)
    assert child.hang() > SLACK - 1
    # The step that was interrupted tells nothing of the next ones.
    child.begin()
    child.step(0.1)
    child.look(600)
    child.writes, child.stepping, child.took = child.writes + 1, child.stepping + 600, 600.0
    child.look()
    assert child.dog.limit < SLACK + STEPS


def test_a_child_that_gets_no_processor_is_waited_for() -> None:
    child = Child()
    child.step(0.1)
    used = 0.0
    child.share = Share(used, True)
    for _ in range(int(5 * SLACK)):
        used += 0.1
        child.share = Share(used, True)
        assert not child.look()
    # One that computes all the time and comes to no end hangs, and so does one that wants nothing.
    before = child.now
    while not child.look():
        used += 1.0
        child.share = Share(used, True)
    assert child.now - before < SLACK
    child.begin()
    child.step(0.1)
    child.share = Share(used, False)
    assert child.hang() <= child.dog.limit + 2 * LOOK


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_what_a_process_has_of_the_processors() -> None:
    def sees(wants: bool) -> Share:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            share = share_of(process.pid)
            if share is not None and share.wants is wants and (not wants or share.used > 0.05):
                return share
            time.sleep(0.01)
        raise AssertionError(f"not seen: wants={wants}")

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            assert sees(True).used > 0
            os.kill(process.pid, signal.SIGSTOP)
            stopped = sees(False)
            assert share_of(process.pid) == stopped
        finally:
            process.kill()
    assert share_of(process.pid) is None
