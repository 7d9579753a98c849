"""Peers of a small run that do nothing but know each other: the real transport, gate and directory, no training."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from atoll.node.run_defaults import new_manifest
from atoll.protocol.directory import Directory
from atoll.protocol.hivemind_transport import HivemindTransport
from atoll.protocol.identity import load_or_create_identity
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import GENESIS
from atoll.protocol.records import Record, RecordGate
from atoll.protocol.transport import PeerId

from ..real.harness import MODEL, OWNER, text_folder


def small(folder: Path) -> Manifest:
    return new_manifest("soak", data=text_folder(folder / "text"), model=MODEL).sign(OWNER)


class Person:
    """One peer, with its own p2p daemon. Made by :meth:`come`."""

    def __init__(self, transport: HivemindTransport, signer: Any, manifest: Manifest) -> None:
        self.transport = transport

        def record(expires: float) -> Record:
            return Record(
                run=manifest.run_id, peer=transport.peer_id, issued=transport.wall(), expires=expires,
                addresses=tuple(transport.addresses()), state="training", head=GENESIS, reachable=True,
            )  # fmt: skip

        self.refused: list[str] = []
        self.directory = Directory(
            transport, signer, manifest, record=record, refused=lambda peer, reason: self.refused.append(reason),
            changed=lambda: None, told=lambda peer, head: None, forgotten=lambda peer: None,
        )  # fmt: skip
        self.tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def come(cls, folder: Path, name: str, manifest: Manifest, seeds: list[str], **options: Any) -> Person:
        identity = folder / f"{name}.key"
        signer = await asyncio.to_thread(load_or_create_identity, identity)
        gate = RecordGate(manifest.run_id, signer)
        transport = await HivemindTransport.create(
            identity_path=identity, run_id=manifest.run_id, seeds=seeds, validator=gate, **options
        )
        return cls(transport, signer, manifest)

    @property
    def peer_id(self) -> PeerId:
        return self.transport.peer_id

    @property
    def address(self) -> str:
        return f"{self.transport.addresses()[0]}/p2p/{self.peer_id}"

    def live(self) -> None:
        """Publish the own record, and read those of others."""
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self.directory.publish()), loop.create_task(self.directory.read())]

    async def go(self, *, killed: bool = False) -> None:
        """Leave; ``killed``: as a process that got SIGKILL, without a word."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if killed and (pid := self.transport.daemon_pid) is not None:
            for task in self.transport._tasks:  # or it would start another daemon
                task.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.transport.close()


def resident(pid: int) -> float:
    """Megabytes in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
