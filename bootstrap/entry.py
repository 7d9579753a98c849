"""A well-known peer: it serves the signed manifest, holds its part of the DHT, and lends the run an address.

It trains nothing and decides nothing: the run goes on while it is away, and meets it again at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import atoll
from atoll.protocol.address import Multiaddr, RunAddress
from atoll.protocol.disk import replace_file
from atoll.protocol.errors import ResourceError, SignatureError, TransportError
from atoll.protocol.eventlog import EVENT_FILE, EventLog
from atoll.protocol.identity import Ed25519Signer, load_or_create_identity
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import GENESIS
from atoll.protocol.ports import reserve
from atoll.protocol.records import Record, RecordGate, bucket_of, dht_key, seal_record
from atoll.protocol.shutdown import ending, on_signals
from atoll.protocol.statefolder import StateFolder, default_state, folder_error

from .anchors import AnchorKeeper

if TYPE_CHECKING:
    from atoll.protocol.hivemind_transport import HivemindTransport

IDENTITY_FILE = "identity.key"
PORT_FILE = "port"
"""The port of the last start: asked for any port, a bootstrap peer takes the one its address was published with."""
PUBLISH_EVERY = 20.0
EXPIRES_IN = 60.0
PROGRESS_EVERY = 5.0
PORT_PATIENCE = 20.0
"""Seconds to wait for the port of the last start: what was killed there may hold it for a moment longer."""
PORT_RETRY = 0.5


@dataclass(frozen=True)
class Run:
    """A run to be served."""

    manifest: Manifest
    toml: bytes
    """The manifest as it is given to others."""
    folder: Path
    """State folder of this bootstrap peer."""


@dataclass(frozen=True)
class BootstrapOptions:
    run: Run
    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    """Other bootstrap peers of the run, multiaddresses with ``/p2p/``."""
    address_file: Path | None = None
    as_json: bool = False


def load_run(path: Path, state: Path | None = None) -> Run:
    """Read a manifest that is to be served.

    Raises :class:`ManifestError` when it is malformed, :class:`SignatureError` when it is unsigned or its signature
    does not verify, :class:`VersionError` when it is of another protocol version.
    """
    manifest = Manifest.load(path)
    try:
        manifest.check_signature(path)
    except SignatureError as error:
        raise SignatureError(f"{path}: {error}") from None
    folder = state if state is not None else default_state(manifest.run_id, "bootstrap-")
    return Run(manifest, manifest.to_toml().encode(), folder)


async def run_bootstrap(options: BootstrapOptions) -> int:
    """Serve until a signal: SIGTERM ends with code 0, Ctrl-C with 130. Raises AtollError when it cannot start."""
    run = options.run
    for text in (*options.announce, *options.peers):
        Multiaddr.parse(text)
    for text in options.listen:
        Multiaddr.parse(text, listen=True)
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(StateFolder(run.folder))
        signer = load_or_create_identity(run.folder / IDENTITY_FILE)
        log = EventLog(run.folder / EVENT_FILE, signer.peer_id)
        stack.callback(log.close)
        transport = await _open_transport(options, signer, log)
        stack.push_async_callback(transport.close)
        stack.enter_context(on_signals(stop.set))
        from atoll.protocol.clock import ClockWatch
        from atoll.protocol.transfer import serve_manifest

        await serve_manifest(transport, run.toml)
        keeper = AnchorKeeper(transport, signer, run.manifest, run.folder, log)
        await keeper.start()
        clock = ClockWatch(
            transport, lonely=keeper.lonely, corrected=lambda: None, warn=lambda message: _warn(log, message),
            admits=run.manifest.admits,
        )  # fmt: skip
        await clock.start()
        address = run_address(run, signer, transport.addresses(), options)
        log.write(
            "start",
            run=run.manifest.run_id,
            name="bootstrap",
            run_name=run.manifest.name,
            version=atoll.__version__,
            pid=os.getpid(),
            addresses=transport.addresses(),
            device="none",
        )
        log.write("state", state="serving")
        _tell(options, address, signer)
        if _only_here(transport.addresses()) and not _only_here(list(options.listen)):
            _warn(log, "nobody but this machine can reach this address; say how others do with --announce")
        tasks = [
            asyncio.create_task(_publish(run, signer, transport, keeper, log)),
            asyncio.create_task(_progress(transport, log)),
            asyncio.create_task(clock.run()),
            asyncio.create_task(_look_after_anchor(keeper)),
            asyncio.create_task(stop.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for result in ended:
            if isinstance(result, Exception):
                raise result
        log.write("exit", code=ending().code, reason=ending().reason)
        return ending().code


async def _open_transport(options: BootstrapOptions, signer: Ed25519Signer, log: EventLog) -> HivemindTransport:
    from atoll.protocol.hivemind_transport import HivemindTransport

    run = options.run
    gate = RecordGate(run.manifest.run_id, signer, admits=lambda peer: _admits(run.manifest, signer, peer))

    listen = _same_port(run.folder, options.listen)
    if listen != options.listen:
        await wait_for_port(listen[0], lambda text: _warn(log, text))
    transport = await HivemindTransport.create(
        identity_path=run.folder / IDENTITY_FILE,
        run_id=run.manifest.run_id,
        listen=list(listen),
        announce=list(options.announce) or None,
        seeds=list(options.peers),
        validator=gate,
    )
    try:
        _keep_port(run.folder, transport.addresses())
    except OSError as error:
        _warn(log, f"the port could not be noted ({error.strerror}): started again, this peer may have another address")
    return transport


async def wait_for_port(address: str, warn: Callable[[str], None], patience: float = PORT_PATIENCE) -> None:
    """Wait until the port of the published address is free. Another one would do for us, and for nobody else.

    Raises :class:`ResourceError` when it is not free within ``patience`` seconds.
    """
    loop = asyncio.get_running_loop()
    deadline, warned = loop.time() + patience, False
    while True:
        try:
            reserve([address]).release()
            return
        except ResourceError as error:
            if loop.time() >= deadline:
                raise ResourceError(
                    f"{error}. It is the port that this run's address was published with; end who has it, or choose "
                    "another one with --listen and publish the new address"
                ) from None
            if not warned:
                warned = True
                warn(f"{error}; waiting for it, at most {patience:.0f} s")
        await asyncio.sleep(PORT_RETRY)


def _warn(log: EventLog, message: str) -> None:
    log.write("warning", message=message)
    print(f"atoll: warning: {message}", file=sys.stderr, flush=True)


def _admits(manifest: Manifest, signer: Ed25519Signer, peer: str) -> bool:
    return manifest.admits(peer) or peer == signer.peer_id


def _same_port(folder: Path, listen: tuple[str, ...]) -> tuple[str, ...]:
    """``listen`` with the port of the last start in the place of "any"."""
    try:
        port = int((folder / PORT_FILE).read_text())
    except (OSError, ValueError):
        return listen
    if len(listen) != 1 or not 0 < port < 65536:
        return listen
    return (listen[0].replace("/tcp/0", f"/tcp/{port}") if listen[0].endswith("/tcp/0") else listen[0],)


def _keep_port(folder: Path, addresses: list[str]) -> None:
    ports = {found.port for found in map(Multiaddr.parse, addresses) if found.transport == ("tcp",)}
    if len(ports) == 1:
        replace_file(folder / PORT_FILE, f"{ports.pop()}\n".encode())


def run_address(run: Run, signer: Ed25519Signer, own: list[str], options: BootstrapOptions) -> str:
    """What volunteers paste. Loopback addresses are left out when there are others: nobody else could dial them."""
    if not own:
        raise ResourceError(
            "the bootstrap peer found no address under which others could reach it; give one with --announce"
        )
    parsed = [Multiaddr.parse(text) for text in own]
    outside = [found for found in parsed if not _loopback(found)] or parsed
    outside.sort(key=lambda found: (found.host == "ip6", found.transport != ("tcp",)))
    mine = [str(found.at(signer.peer_id)) for found in outside[:4]]
    return str(RunAddress(run.manifest.run_id, [*mine, *options.peers]))


def _only_here(addresses: list[str]) -> bool:
    return all(_loopback(Multiaddr.parse(text, listen=True)) for text in addresses)


def _loopback(address: Multiaddr) -> bool:
    return address.name.startswith("127.") or address.name == "::1"


def _tell(options: BootstrapOptions, address: str, signer: Ed25519Signer) -> None:
    if options.address_file is not None:
        try:
            options.address_file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(options.address_file, f"{address}\n".encode())
        except OSError as error:
            fault = folder_error(options.address_file, error)
            raise type(fault)(str(fault).replace("--state", "--address-file")) from error
    manifest = options.run.manifest
    if options.as_json:
        fields = {"address": address, "run_id": manifest.run_id.hex(), "name": manifest.name, "peer": signer.peer_id}
        print(json.dumps(fields | {"state": str(options.run.folder)}), flush=True)
    else:
        # The address alone on standard output: scripts read it there.
        print(address, flush=True)
        for line in _invitation(manifest, address, options.address_file):
            print(f"atoll: {line}", file=sys.stderr, flush=True)


def _invitation(manifest: Manifest, address: str, file: Path | None) -> list[str]:
    """What an organiser wants to know beside the address: which run this is, and what others type to join it."""
    begins = manifest.round.quorum
    lines = [
        f"this is the address of run {manifest.run_id.hex()[:12]} ({manifest.name}, {manifest.budget.rounds} rounds); "
        f"training begins when {begins} {'nodes are' if begins > 1 else 'node is'} there",
        f"to join: atoll node {address}",
    ]
    if file is not None:
        lines.append(f"to join on this machine: atoll node {shlex.quote(f'@{file.absolute()}')}")
    return [*lines, f"to see who is there: atoll status {address}"]


async def _publish(
    run: Run, signer: Ed25519Signer, transport: HivemindTransport, keeper: AnchorKeeper, log: EventLog
) -> None:
    """Keep a record in the DHT, so that others see who serves the run."""
    key = dht_key(run.manifest.run_id, bucket_of(signer.peer_id))
    while True:
        now = transport.wall()
        record = Record(
            run=run.manifest.run_id,
            peer=signer.peer_id,
            issued=now,
            expires=now + EXPIRES_IN,
            addresses=tuple(transport.addresses()),
            state="serving",
            head=GENESIS,
            version=atoll.__version__,
            reachable=True,
            name="bootstrap",
            anchor=keeper.sealed,
        )
        try:
            await transport.dht.publish(key, seal_record(record, signer), EXPIRES_IN)
        except TransportError as error:
            log.write("warning", message=f"the own record was not published: {error}")
        await asyncio.sleep(PUBLISH_EVERY)


async def _look_after_anchor(keeper: AnchorKeeper) -> None:
    """Beside the record, which must not wait for peers that are slow."""
    while True:
        await keeper.turn()
        await asyncio.sleep(PUBLISH_EVERY)


async def _progress(transport: HivemindTransport, log: EventLog) -> None:
    while True:
        log.write(
            "progress",
            state="serving",
            bytes_sent=transport.bytes_sent,
            bytes_received=transport.bytes_received,
            peers=len(transport.neighbours()),
        )
        await asyncio.sleep(PROGRESS_EVERY)
