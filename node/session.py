"""What a node and an observer have in common: folder, identity, network, manifest, store, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import atoll
from atoll.protocol.address import RunAddress
from atoll.protocol.disk import replace_file
from atoll.protocol.errors import AtollError, ManifestError, NetworkError, WrongRun
from atoll.protocol.eventlog import EVENT_FILE, EventLog
from atoll.protocol.identity import Ed25519Signer, load_or_create_identity
from atoll.protocol.manifest import Manifest
from atoll.protocol.shutdown import aside, ending
from atoll.protocol.statefolder import StateFolder, default_state

from .config import DataConfig, InnerConfig, ModelConfig, to_toml
from .looking import tell_reasons
from .peerbook import PeerBook

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.protocol.hivemind_transport import HivemindTransport
    from atoll.protocol.store import Store

IDENTITY_FILE = "identity.key"
MANIFEST_FILE = "manifest.toml"


@dataclass
class Session:
    """An open state folder with everything that a peer of the run needs; made by :func:`open_session`."""

    folder: Path
    run_id: bytes
    manifest: Manifest
    model: ModelConfig
    data: DataConfig
    inner: InnerConfig
    signer: Ed25519Signer
    transport: HivemindTransport
    store: Store
    log: EventLog

    def event(self, event: str, /, **fields: Any) -> None:
        """Write an event; a field called ``peer`` is about another peer and is logged as ``from``."""
        self.log.write(event, **fields)


@asynccontextmanager
async def open_session(
    *, address: str, state: Path | None, prefix: str, listen: tuple[str, ...], announce: tuple[str, ...],
    client_mode: bool, seed: int | None, timeout: float, data: Path | None,
    echo: Callable[[dict[str, Any]], None] | None,
) -> AsyncIterator[Session]:  # fmt: skip
    """Lock the folder, join the network, fetch and check the manifest, open the store; undo all of it at the end.

    Raises the errors of each step; nothing that was there before is lost by any of them.
    """
    run = RunAddress.parse(address)
    folder = state if state is not None else default_state(run.run_id, prefix)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(StateFolder(folder))
        signer = load_or_create_identity(folder / IDENTITY_FILE)
        log = EventLog(folder / EVENT_FILE, signer.peer_id, echo=echo)
        stack.callback(log.close)
        log.write("looking", run=run.run_id, at=list(run.peers))
        # Seconds, in which Ctrl-C must be heard.
        await aside(partial(importlib.import_module, "atoll.protocol.hivemind_transport"))
        from atoll.protocol.hivemind_transport import HivemindTransport
        from atoll.protocol.records import RecordGate
        from atoll.protocol.store import Store

        manifest = _kept_manifest(folder, run.run_id)
        admitted: list[Manifest] = [manifest] if manifest is not None else []
        gate = RecordGate(run.run_id, signer, admits=lambda peer: not admitted or admitted[0].admits(peer))
        transport = await HivemindTransport.create(
            identity_path=folder / IDENTITY_FILE, run_id=run.run_id, listen=list(listen),
            announce=list(announce) or None, seeds=[*run.peers, *PeerBook(folder).load()], validator=gate,
            client_mode=client_mode, seed=seed, threads=2, require_seed=False,
        )  # fmt: skip
        stack.push_async_callback(transport.close)
        # With the manifest of an earlier start nothing below waits for the network, and this goes on beside.
        looking = asyncio.create_task(
            tell_reasons(transport, lambda reasons: log.write("unreached", reasons=dict(reasons)))
        )
        stack.callback(looking.cancel)
        if manifest is None:
            await transport.wait_joined(timeout)
            manifest = await manifest_of(transport, run, timeout)
            admitted.append(manifest)
            _keep_manifest(folder, manifest)
        if not manifest.admits(signer.peer_id):
            raise NetworkError(
                f"the run {manifest.name} admits only listed peers, and {signer.peer_id} is not among them; "
                "ask its organiser to add this peer id"
            )
        model = ModelConfig.from_table(manifest.model)
        source = DataConfig.from_table(manifest.data)
        if data is not None:
            source = source.model_copy(update={"path": str(data)})
        store = Store.open(
            folder / "store", run.run_id, manifest.layout, warn=lambda message: log.write("warning", message=message)
        )
        stack.callback(store.close)
        yield Session(
            folder, run.run_id, manifest, model, source, InnerConfig.from_table(manifest.inner), signer, transport,
            store, log,
        )  # fmt: skip


def _kept_manifest(folder: Path, run_id: bytes) -> Manifest | None:
    """The manifest of an earlier start, if it is there, whole and this run's."""
    try:
        manifest = Manifest.load(folder / MANIFEST_FILE)
        manifest.check_signature()
    except ManifestError:
        return None
    return manifest if manifest.run_id == run_id else None


def _keep_manifest(folder: Path, manifest: Manifest) -> None:
    replace_file(folder / MANIFEST_FILE, to_toml(manifest).encode())


async def manifest_of(transport: HivemindTransport, run: RunAddress, timeout: float) -> Manifest:
    """The signed manifest from a peer of the address. Its hash must be the run id, so any peer may give it."""
    from atoll.protocol.transfer import fetch_manifest

    reasons: list[str] = []
    wrong: WrongRun | None = None
    for peer in run.peer_ids:
        try:
            return Manifest.from_toml(await fetch_manifest(transport, peer, run.run_id, timeout=min(timeout, 20.0)))
        except WrongRun as error:
            wrong = error  # the next one may be of this run all the same
        except NetworkError as error:
            reasons.append(str(error))
    if wrong is not None and not reasons:
        raise wrong
    reasons += [str(wrong)] if wrong is not None else []
    raise NetworkError(f"no peer of the address gave the run's manifest: {'; '.join(reasons)}")


def started(session: Session, name: str, device: str) -> None:
    """Log the ``start`` event."""
    session.event(
        "start", run=session.run_id.hex(), name=name, run_name=session.manifest.name, version=atoll.__version__,
        pid=os.getpid(), addresses=session.transport.addresses(), device=device, rounds=session.manifest.outer_steps,
    )  # fmt: skip


def exit_reason(error: BaseException) -> tuple[int, str]:
    """The documented exit code and a sentence for the ``exit`` event."""
    if isinstance(error, AtollError):
        return error.exit_code, str(error)
    if isinstance(error, asyncio.CancelledError):
        return ending().code, ending().reason
    return 1, f"{type(error).__name__}: {error}"
