"""A well-known peer: it serves the signed manifest, holds its part of the DHT, and lends the run an address.

It trains nothing and decides nothing: the run goes on while it is away, and meets it again at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import atoll
from atoll.protocol.address import Multiaddr, RunAddress
from atoll.protocol.errors import ResourceError, SignatureError, TransportError
from atoll.protocol.eventlog import EVENT_FILE, EventLog
from atoll.protocol.identity import Ed25519Signer, load_or_create_identity
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import GENESIS
from atoll.protocol.records import Record, RecordGate, bucket_of, dht_key, seal_record
from atoll.protocol.statefolder import StateFolder, default_state, folder_error

if TYPE_CHECKING:
    from atoll.protocol.hivemind_transport import HivemindTransport

IDENTITY_FILE = "identity.key"
PORT_FILE = "port"
"""The port of the last start: asked for any port, a bootstrap peer takes the one its address was published with."""
PUBLISH_EVERY = 20.0
EXPIRES_IN = 60.0
PROGRESS_EVERY = 5.0
INTERRUPTED = 130


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
        manifest.check_signature()
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
        signals = stack.enter_context(_on_signals(stop))
        transport = await _open_transport(options, signer)
        stack.push_async_callback(transport.close)
        from atoll.protocol.transfer import serve_manifest

        await serve_manifest(transport, run.toml)
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
        tasks = [
            asyncio.create_task(_publish(run, signer, transport, log)),
            asyncio.create_task(_progress(transport, log)),
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
        code = 0 if signals == [signal.SIGTERM] else INTERRUPTED
        log.write("exit", code=code, reason="asked to end")
        return code


async def _open_transport(options: BootstrapOptions, signer: Ed25519Signer) -> HivemindTransport:
    from atoll.protocol.hivemind_transport import HivemindTransport

    run = options.run
    gate = RecordGate(run.manifest.run_id, signer, admits=lambda peer: _admits(run.manifest, signer, peer))

    async def create(listen: tuple[str, ...]) -> HivemindTransport:
        return await HivemindTransport.create(
            identity_path=run.folder / IDENTITY_FILE,
            run_id=run.manifest.run_id,
            listen=list(listen),
            announce=list(options.announce) or None,
            seeds=list(options.peers),
            validator=gate,
        )

    again = _same_port(run.folder, options.listen)
    if again != options.listen:
        try:
            return await create(again)
        except ResourceError:
            # Somebody else has the port now; any other will do, as was asked for.
            pass
    transport = await create(options.listen)
    _keep_port(run.folder, transport.addresses())
    return transport


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
        (folder / PORT_FILE).write_text(f"{ports.pop()}\n")


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


def _loopback(address: Multiaddr) -> bool:
    return address.name.startswith("127.") or address.name == "::1"


def _tell(options: BootstrapOptions, address: str, signer: Ed25519Signer) -> None:
    if options.address_file is not None:
        try:
            options.address_file.parent.mkdir(parents=True, exist_ok=True)
            temporary = options.address_file.with_name(f".{options.address_file.name}.{os.getpid()}.part")
            temporary.write_text(address + "\n")
            temporary.replace(options.address_file)
        except OSError as error:
            fault = folder_error(options.address_file, error)
            raise type(fault)(str(fault).replace("--state", "--address-file")) from error
    manifest = options.run.manifest
    if options.as_json:
        fields = {"address": address, "run_id": manifest.run_id.hex(), "name": manifest.name, "peer": signer.peer_id}
        print(json.dumps(fields | {"state": str(options.run.folder)}), flush=True)
    else:
        print(address, flush=True)


async def _publish(run: Run, signer: Ed25519Signer, transport: HivemindTransport, log: EventLog) -> None:
    """Keep a record in the DHT, so that others see who serves the run."""
    key = dht_key(run.manifest.run_id, bucket_of(signer.peer_id))
    while True:
        now = time.time()
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
        )
        try:
            await transport.dht.publish(key, seal_record(record, signer), EXPIRES_IN)
        except TransportError as error:
            log.write("warning", message=f"the own record was not published: {error}")
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


@contextlib.contextmanager
def _on_signals(stop: asyncio.Event) -> Iterator[list[int]]:
    """Set ``stop`` at SIGINT or SIGTERM; the list holds the first signal that came."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def heard(number: int) -> None:
        if not seen:
            seen.append(number)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, heard, number)
    try:
        yield seen
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
