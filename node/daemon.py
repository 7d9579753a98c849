"""The daemon: owns the peer and its global state, starts the trainer child, writes the event log."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import atoll
from atoll.protocol.commits import Position
from atoll.protocol.errors import AtollError
from atoll.protocol.island import Island
from atoll.protocol.peer import Peer
from atoll.protocol.shutdown import aside, ending, on_signals
from atoll.protocol.theta0 import theta0

from . import checkpoint
from .console import ConsoleEcho
from .names import public_name
from .options import Finish, NodeOptions, ObserverOptions
from .peerbook import PeerBook
from .prepare import prepare
from .session import Session, exit_reason, open_session, started
from .specs import tensor_specs

PROGRESS_EVERY = 1.0
"""Seconds between two ``progress`` events."""


async def run_node(options: NodeOptions) -> int:
    """Take part in a run until its end or a signal. Returns the exit code; raises AtollError."""
    echo = ConsoleEcho(options.log)
    try:
        async with open_session(
            address=options.address, state=options.state, prefix="", listen=options.listen,
            announce=options.announce, client_mode=options.client_mode, seed=options.seed, timeout=options.timeout,
            data=options.data, echo=echo,
        ) as session:  # fmt: skip
            name = options.name if options.name is not None else public_name(session.signer.peer_id)
            return await _logged(session, _train(session, options, name))
    finally:
        echo.close()


async def run_observer(options: ObserverOptions) -> int:
    """Follow a run's commits and score them until its end or a signal. Returns the exit code; raises AtollError."""
    echo = ConsoleEcho(options.log)
    try:
        async with open_session(
            address=options.address, state=options.state, prefix="observer-", listen=options.listen, announce=(),
            client_mode=False, seed=options.seed, timeout=options.timeout, data=options.data, echo=echo,
        ) as session:  # fmt: skip
            return await _logged(session, _observe(session, options))
    finally:
        echo.close()


async def _logged(session: Session, work: Coroutine[Any, Any, None]) -> int:
    """Await the work; whatever its end, the event log tells it. Returns the exit code."""
    try:
        await work
    except BaseException as error:
        number, reason = exit_reason(error)
        session.event("exit", code=number, reason=reason)
        raise
    session.event("exit", code=ending().code, reason=ending().reason)
    return ending().code


async def _train(session: Session, options: NodeOptions, name: str) -> None:
    from .encoder import coding_of
    from .trainer import TrainerProcess

    manifest = session.manifest
    session.event("state", state="starting")
    coding, why = coding_of(manifest, options.encode, options.device)
    if why:
        session.event("warning", message=f"contributions are encoded on the host: {why}")
    prepared = asyncio.create_task(aside(prepare))
    try:
        island = await TrainerProcess.start(
            session.model, session.data, session.inner, manifest.round.inner_steps, manifest.budget.rounds,
            device=options.device, threads=options.threads or None, overlap=manifest.round.overlap > 0,
            fragments=manifest.round.fragments, coding=coding, several=manifest.round.in_flight > 1,
            log=lambda event, fields: session.event(event, **fields),
        )  # fmt: skip
    except BaseException:
        prepared.cancel()
        raise
    try:
        await prepared
        if manifest.round.overlap and island.device == "cpu":
            # A round in flight must not take the cores on which training goes on.
            session.transport.use_threads(min((os.cpu_count() or 1) - island.threads, 2))
        started(session, name, island.device)
        await _live(
            session,
            island,
            island.watch(),
            name=name,
            export=session.folder / "checkpoints",
            finish=options.finish,
            reachable=not options.client_mode,
            keep_every=options.keep_every,
        )
    finally:
        await island.close()


async def _live(
    session: Session, island: Island | None, *beside: Coroutine[Any, Any, None], name: str, export: Path | None = None,
    finish: Finish = Finish.exit, reachable: bool = True, keep_every: float = 0.0,
    on_head: Callable[[Position, NDArray[np.float32]], None] | None = None,
) -> None:  # fmt: skip
    """Run the peer, with its events, progress and exports, until the end of the run or a signal.

    beside: work without which the peer must not go on; it leaves when one fails, and that error is raised.
    """
    manifest = session.manifest
    exporter = _Exporter(session, export) if export is not None else None
    counted, use = 0, UseOfTime()

    def events(event: str, /, **fields: Any) -> None:
        nonlocal counted
        if event == "commit":
            # What this peer has sent since its last commit: nearly all of it is this round's.
            sent = session.transport.bytes_sent
            fields["bytes_sent"], counted = sent - counted, sent
            fields |= use.of(peer)
        session.event(event, **fields)
        if event == "digest" and exporter is not None:
            exporter.digest(fields["commit"], fields["digest"])

    def head(position: Position) -> None:
        if exporter is not None:
            exporter.head(position, peer.replica.params)
        if on_head is not None:
            on_head(position, peer.replica.params)

    seed = session.model.seed
    peer = Peer(
        transport=session.transport, signer=session.signer, manifest=manifest, store=session.store,
        theta0=partial(theta0, seed, tensor_specs(session.model)), events=events, island=island, name=name,
        version=atoll.__version__, reachable=reachable, on_head=head,
        linger=float("inf") if finish is Finish.stay else 30.0, keep_every=keep_every,
    )  # fmt: skip

    failure: BaseException | None = None

    def ended(task: asyncio.Task[None]) -> None:
        nonlocal failure
        # With the run over, all that is left to do is to serve its state, for which no trainer is needed.
        over = island is not None and peer.finished
        if not task.cancelled() and task.exception() is not None and failure is None and not over:
            failure = task.exception()
            peer.stop()

    tasks = [asyncio.create_task(work) for work in (_progress(session, peer, use), *beside)]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        with on_signals(peer.stop):
            await peer.run()
            if exporter is not None:
                await exporter.close()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        _tell_progress(session, peer, use)  # the last second's bytes and tokens
    if failure is not None:
        raise failure


async def _progress(session: Session, peer: Peer, use: UseOfTime) -> None:
    book = PeerBook(session.folder)
    while True:
        records = {name: known.record for name, known in peer.directory.known.items()}
        book.note({name: record.addresses for name, record in records.items() if record and record.reachable})
        _tell_progress(session, peer, use)
        await asyncio.sleep(PROGRESS_EVERY)


def _tell_progress(session: Session, peer: Peer, use: UseOfTime) -> None:
    progress = peer.progress
    head = peer.head
    session.event(
        "progress", state=peer.state, round=head.round, outer_step=head.outer_step, steps=progress.steps,
        tokens=progress.tokens, contributed=peer.contributed, loss=progress.loss,
        tokens_per_s=progress.fields.get("tokens_per_s", 0.0), step_time=progress.step_time,
        leased=progress.leased, bytes_sent=session.transport.bytes_sent,
        bytes_received=session.transport.bytes_received, peers=peer.company, **use.of(peer),
    )  # fmt: skip


class UseOfTime:
    """Seconds of a peer's trainer so far, by what it did with them. When the run is over they stand still: its trainer
    stays frozen, and no round is to blame."""

    def __init__(self) -> None:
        self._final: dict[str, float] | None = None

    def of(self, peer: Peer) -> dict[str, float]:
        """``trained``, ``held`` and ``waited``; empty where there is no trainer."""
        if self._final is not None and peer.finished:
            return self._final
        fields = peer.progress.fields
        now: dict[str, float] = {
            name: round(fields[name], 3) for name in ("trained", "held", "waited") if name in fields
        }
        self._final = now if peer.finished else None
        return now


class _Exporter:
    """Writes the global parameters as safetensors, every K-th commit and at the end of the run."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self._folder = folder
        self._waiting: dict[str, tuple[Position, NDArray[np.float32]]] = {}
        self._writing: set[asyncio.Task[None]] = set()

    def head(self, position: Position, params: NDArray[np.float32]) -> None:
        """A commit was applied; ``params`` are copied now, since the next one changes them in place."""
        manifest, step = self._session.manifest, position.head.outer_step
        if step and (step % manifest.state.checkpoint_every == 0 or step >= manifest.outer_steps):
            self._waiting[position.head.id.hex()] = (position, params.copy())

    def digest(self, commit: str, digest: str) -> None:
        """The digest of a head is known: what waits for it can be written."""
        waiting = self._waiting.pop(commit, None)
        if waiting is not None:
            task = asyncio.create_task(self._write(*waiting, digest))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write(self, position: Position, params: NDArray[np.float32], digest: str) -> None:
        session = self._session
        metadata = checkpoint.Metadata(
            run=session.run_id.hex(), name=session.manifest.name, model=session.model.to_table(),
            round=position.head.round, outer_step=position.head.outer_step, tokens=position.tokens, digest=digest,
        )  # fmt: skip
        try:
            path = await asyncio.to_thread(checkpoint.save, self._folder, params, metadata)
            session.event("checkpoint", round=position.head.round, outer_step=position.head.outer_step, path=str(path))
        except AtollError as error:
            session.event("warning", message=str(error))

    async def close(self) -> None:
        """Wait for what is being written."""
        await asyncio.gather(*self._writing, return_exceptions=True)


async def _observe(session: Session, options: ObserverOptions) -> None:
    await aside(prepare)
    evaluator = await aside(partial(_evaluator, session, options))
    started(session, "observer", options.device)
    session.event("ngrams", **await aside(evaluator.ngrams))
    rounds, every = session.manifest.outer_steps, options.every * session.manifest.round.fragments
    due: asyncio.Queue[tuple[Position, NDArray[np.float32]] | None] = asyncio.Queue()

    def head(position: Position, params: NDArray[np.float32]) -> None:
        step = position.head.outer_step
        if step % every == 0 or step >= rounds:
            # Evaluation lags behind a fast swarm; what is queued is bounded by dropping the oldest.
            while due.qsize() > 2:
                due.get_nowait()
            due.put_nowait((position, params.copy()))

    async def score() -> None:
        scored = -1
        while (item := await due.get()) is not None:
            position, params = item
            if position.head.outer_step == scored:
                continue
            scored = position.head.outer_step
            loss = await aside(partial(evaluator.loss, params))
            session.event(
                "evaluation", round=position.head.round, outer_step=scored, tokens=position.tokens, val_loss=loss
            )

    scoring = asyncio.create_task(score())
    try:
        await _live(session, None, _ends(scoring), name="observer", on_head=head)
        if ending().signal is None:
            due.put_nowait(None)
            await scoring
    finally:
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)


async def _ends(task: asyncio.Task[None]) -> None:
    """Wait for a task that goes on when the waiting is cancelled."""
    await asyncio.shield(task)


def _evaluator(session: Session, options: ObserverOptions) -> Any:
    import torch

    from .evaluate import Evaluator

    torch.set_num_threads(max(options.threads, 1))
    return Evaluator(session.model, session.data, options.device)
