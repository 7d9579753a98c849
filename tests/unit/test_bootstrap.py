"""The bootstrap peer's own rules."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.bootstrap.anchors import ANCHOR_FILE, AnchorKeeper
from atoll.bootstrap.entry import PORT_FILE, BootstrapOptions, Run, _keep_port, _same_port, _tell, wait_for_port
from atoll.node.events import read_events
from atoll.protocol.anchor import Anchor, seal_anchor
from atoll.protocol.anchoring import exchange
from atoll.protocol.errors import ResourceError
from atoll.protocol.eventlog import EventLog
from atoll.protocol.identity import Ed25519Signer, FastSigner
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Head
from atoll.protocol.simulation import SimNetwork, SimTransport
from atoll.protocol.transport import PeerId


def holder() -> tuple[socket.socket, str]:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken, f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"


def test_the_published_port_is_waited_for() -> None:
    taken, address = holder()
    said: list[str] = []

    async def body() -> None:
        waiting = asyncio.create_task(wait_for_port(address, said.append, 20))
        while not said:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not waiting.done()
        taken.close()
        await waiting

    with taken:
        asyncio.run(asyncio.wait_for(body(), 10))
    assert len(said) == 1


def test_a_port_that_stays_taken_is_an_error_and_no_other_port() -> None:
    taken, address = holder()
    with taken, pytest.raises(ResourceError, match=r"address was published with.*--listen"):
        asyncio.run(wait_for_port(address, lambda text: None, 0))


OWNER = FastSigner(Ed25519Signer.from_seed(bytes(32)).peer_id)


def test_it_keeps_the_newest_anchor_over_restarts_and_hands_it_out(tmp_path: Path) -> None:
    unsigned = Manifest.make("kept", parameters=64, theta0="00" * 32, state={"chunk": 64})
    manifest = Manifest.from_dict(unsigned.model_dump(exclude={"signature"}) | {"owner": OWNER.peer_id})

    def sealed(number: int, signer: FastSigner = OWNER) -> bytes:
        return seal_anchor(Anchor(manifest.run_id, number, Head(b"\7" * 32, 3, 1, 4, 2)), signer)

    def life(log: EventLog, brought: list[bytes]) -> list[bytes]:
        """A bootstrap peer is started, brought these one after the other, and asked each time."""
        network, answers = SimNetwork(seed=1), []
        boot = network.host("boot")

        async def serve(transport: SimTransport) -> None:
            await AnchorKeeper(transport, FastSigner(transport.peer_id), manifest, tmp_path, log).start()
            await asyncio.Event().wait()

        async def visit(transport: SimTransport) -> None:
            answers.extend([await exchange(transport, boot.peer_id, anchor) for anchor in brought])

        async def main() -> None:
            boot.run(serve)
            await asyncio.sleep(1)
            network.host("visitor").run(visit)
            await asyncio.sleep(5)

        network.run(main())
        return answers

    log = EventLog(tmp_path / "events.jsonl", "boot")
    stranger = FastSigner(PeerId("stranger"))
    first = life(log, [b"", sealed(5), sealed(4), sealed(9, stranger), b""])
    assert first == [b"", sealed(5), sealed(5), sealed(5), sealed(5)]
    assert life(log, [b"", sealed(6)]) == [sealed(5), sealed(6)]
    (tmp_path / ANCHOR_FILE).write_bytes(sealed(7, stranger))
    assert life(log, [b""]) == [b""], "what stands there without the owner's signature is nothing"
    log.close()
    events = [(e["event"], e.get("number")) for e in read_events(tmp_path / "events.jsonl")]
    assert events == [("anchor", 5), ("refused", None), ("anchor", 6), ("warning", None)]


def test_the_address_stands_alone_and_beside_it_how_to_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts read the one, people want the other; a file with the address may have a blank in its name."""
    manifest = Manifest.make("reef", parameters=64, theta0="00" * 32, state={"chunk": 64})
    signer = Ed25519Signer.from_seed(bytes(32))
    file = tmp_path / "the address"
    options = BootstrapOptions(Run(manifest, b"", tmp_path), (), address_file=file)
    _tell(options, "atoll:ab@here", signer)
    out, err = capsys.readouterr()
    assert out == "atoll:ab@here\n"
    assert file.read_text() == out
    lines = err.splitlines()
    assert f"run {manifest.run_id.hex()[:12]} (reef, " in lines[0]
    assert "training begins when 2 nodes are there" in lines[0]
    assert lines[1] == "atoll: to join: atoll node atoll:ab@here"
    assert lines[2] == f"atoll: to join on this machine: atoll node '@{file}'"
    _tell(replace(options, as_json=True), "atoll:ab@here", signer)
    out, err = capsys.readouterr()
    assert (json.loads(out)["address"], err) == ("atoll:ab@here", "")


def test_the_port_is_kept(tmp_path: Path) -> None:
    anywhere = ("/ip4/0.0.0.0/tcp/0",)
    assert _same_port(tmp_path, anywhere) == anywhere
    _keep_port(tmp_path, ["/ip4/10.0.0.1/tcp/4001", "/ip4/127.0.0.1/tcp/4001"])
    assert [path.name for path in tmp_path.iterdir()] == [PORT_FILE]
    assert _same_port(tmp_path, anywhere) == ("/ip4/0.0.0.0/tcp/4001",)
    assert _same_port(tmp_path, ("/ip4/0.0.0.0/tcp/4002",)) == ("/ip4/0.0.0.0/tcp/4002",)
    (tmp_path / PORT_FILE).write_text("nonsense")
    assert _same_port(tmp_path, anywhere) == anywhere
