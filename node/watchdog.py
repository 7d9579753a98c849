"""Notices a trainer child that hangs: it ought to train, and makes no step.

A child that dies closes its channel. One that is stopped, deadlocked, or waits for a device that answers no more says
nothing, and its peer never becomes ready; where the run needs that peer for a quorum, the run stands still. What the
child writes into the shared counters at each step is its sign of life. The limit on its silence follows from the
longest of its recent steps, so nobody has to set it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

LOOK = 1.0
"""Seconds between two looks at the child."""
LATE = 2.5
"""Seconds by which a look may be late: later than that, this process itself stood still, and nothing counts."""
SLACK = 20.0
"""Seconds of silence that are allowed beyond ``STEPS`` steps: disks that wait, drivers that restart."""
STEPS = 8
"""Longest steps that a silence may take. A step that runs out of memory is made again with half of the micro-batch, six
times at most for a batch of 64."""
RECENT = 64
"""Looks at which another step had ended, of which the longest step is taken."""
FIRST = 60.0
"""Seconds for the first step of a child beyond what ``SLOWEST`` says: libraries are loaded and kernels chosen in it."""
SLOWEST = {"cpu": 5e9, "cuda": 5e11}
"""Operations a second that any device makes: a core, or an old GPU, that others use as well."""
UNSEEN = 3.0
"""Seconds of silence after which it is asked whether the child was given a processor."""
MAX_DOUBLINGS = 6


class Seen(NamedTuple):
    """What is to be seen of a child at one moment."""

    writes: int
    """How often the shared counters have been written."""
    ought: bool
    """Whether it has to be making steps: told to train, with samples, below its limit, and with no order to answer,
    which has a limit of its own."""
    stepping: float
    """Seconds of all steps that have ended."""
    took: float
    """Seconds of the last of them."""


class Share(NamedTuple):
    """What a process has of the processors."""

    used: float
    """Processor seconds, all threads together, since it began."""
    wants: bool
    """Whether a thread of it wants to run at this moment, or runs."""


def first_limit(device: str, parameters: int, tokens: int) -> float:
    """Seconds that the first step of a child may take: so many ``tokens`` through a model of so many parameters, at
    six operations each (2001.08361)."""
    return FIRST + 6 * parameters * tokens / SLOWEST.get(device.partition(":")[0], SLOWEST["cpu"])


class Watchdog:
    """Counts how long a child has been silent that ought to train. One for all lives of a trainer."""

    def __init__(self) -> None:
        self.silent = 0.0
        """Seconds without a sign of life, as far as they count."""
        self._first = FIRST
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._stepped = False
        """Whether the present child has made a step."""
        self._fruitless = 0
        """Children in a row that hung before they had made one."""
        self._looked = 0.0
        self._seen: Seen | None = None
        self._share: Share | None = None
        self._disturbed = False
        """Whether the step that runs has been interrupted: its length tells nothing."""

    @property
    def longest(self) -> float:
        """Seconds of the longest of the recent steps, 0 before the first."""
        return max(self._recent, default=0.0)

    @property
    def limit(self) -> float:
        """Seconds of silence after which the present child counts as hung. Until its first step there is more time,
        and twice as much after each child that came to none: being slow must not end a node."""
        limit = SLACK + STEPS * self.longest
        if self._stepped and self._recent:
            return limit
        return float(max(limit, self._first) * 2 ** min(self._fruitless, MAX_DOUBLINGS))

    def begin(self, now: float, seen: Seen, first: float) -> None:
        """A child is ready. first: seconds that its first step may take."""
        self._first, self._stepped, self.silent = first, False, 0.0
        self._looked, self._seen, self._share, self._disturbed = now, seen, None, False

    def look(self, now: float, seen: Seen, share: Callable[[], Share | None]) -> bool:
        """Look at the child; whether it hangs. now: seconds of a clock. share: what the child has of the processors,
        None where that cannot be known; called only when it is silent."""
        passed, self._looked = now - self._looked, now
        before, self._seen = self._seen or seen, seen
        if passed > LOOK + LATE:
            self.silent, self._share, self._disturbed = 0.0, None, self._disturbed or before.ought
        if seen.stepping != before.stepping:
            if not self._disturbed:
                self._recent.append(max(seen.took, self.silent))
            self._stepped, self._fruitless, self._disturbed = True, 0, False
        if seen.writes != before.writes or not seen.ought or passed > LOOK + LATE:
            self.silent, self._share = 0.0, None
            return False
        self.silent += self._counted(passed, share)
        if self.silent <= self.limit:
            return False
        if not self._stepped:
            self._fruitless += 1
        return True

    def _counted(self, passed: float, share: Callable[[], Share | None]) -> float:
        """Of so many seconds, those that count: not those in which the child would have run, and others had the
        processors. A child that is stopped, or waits, wants none."""
        if self.silent < UNSEEN:
            return passed
        before, self._share = self._share, share()
        if before is None or self._share is None or not self._share.wants:
            return passed
        return min(max(self._share.used - before.used, 0.0), passed)


def share_of(pid: int) -> Share | None:
    """What a process has of the processors (Linux); None elsewhere, or when there is none."""
    try:
        fields = _stat(f"/proc/{pid}/stat")
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return Share(used, any(_stat(f"/proc/{pid}/task/{task}/stat")[0] == "R" for task in _threads(pid)))
    except (OSError, IndexError, ValueError):
        return None


def _threads(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/task")


def _stat(path: str) -> list[str]:
    """The fields of a stat file from the state on; the name before it may hold blanks and brackets."""
    with open(path) as file:
        return file.read().rpartition(")")[2].split()
