"""The tasks of one peer: the first that fails ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """Tasks that live as long as their peer at most."""

    def __init__(self) -> None:
        self._all: dict[asyncio.Task[None], None] = {}
        self.failure: BaseException | None = None
        """What the first of them failed with: a defect, or something that the peer cannot go on with."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._all[task] = None
        task.add_done_callback(self._reaped)
        return task

    def _reaped(self, task: asyncio.Task[None]) -> None:
        self._all.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and self.failure is None:
            self.failure = error
            for other in list(self._all):
                other.cancel()

    async def end(self) -> None:
        """Cancel all, and what they start meanwhile."""
        while tasks := list(self._all):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
