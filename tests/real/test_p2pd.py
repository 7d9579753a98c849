"""The p2p daemon as a process: it starts, says why it does not, dies when it should and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.protocol.errors import AddressError, PeerUnreachable, ResourceError
from atoll.protocol.identity import load_or_create_identity
from atoll.protocol.p2pd import Daemon, DaemonOptions, PrivateFolder, explain, multiaddr_bytes, sweep
from atoll.protocol.pipes import Pipe
from atoll.protocol.ports import reserve
from atoll.protocol.transport import PeerId

pytestmark = pytest.mark.real

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_dead(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


async def start(folder: PrivateFolder, identity: Path) -> Daemon:
    load_or_create_identity(identity)
    with reserve([LOOPBACK]) as reserved:
        return await Daemon.start(DaemonOptions(identity, tuple(reserved.addresses)), folder)


def test_a_daemon_has_its_own_session_and_leaves_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        folder = PrivateFolder()
        daemon = await start(folder, tmp_path / "key")
        assert daemon.peer_id == load_or_create_identity(tmp_path / "key").peer_id
        assert os.getsid(daemon.pid) == daemon.pid != os.getsid(0)
        assert folder.path.stat().st_mode & 0o777 == 0o700
        [address] = daemon.addresses
        await daemon.stop(2.0)
        await daemon.stop(2.0)
        folder.remove()
        assert not alive(daemon.pid)
        assert not folder.path.exists()
        with reserve([address]) as again:  # the port is free
            assert again.addresses == [address]

    asyncio.run(run())


def test_a_daemon_that_stands_still_is_ended_all_the_same(tmp_path: Path) -> None:
    async def run() -> None:
        folder = PrivateFolder()
        daemon = await start(folder, tmp_path / "key")
        os.kill(daemon.pid, signal.SIGSTOP)
        began = time.monotonic()
        await daemon.stop(0.3)
        assert time.monotonic() - began < 2
        assert not alive(daemon.pid)
        folder.remove()

    asyncio.run(run())


ORPHAN = """
import asyncio, sys
from pathlib import Path
from atoll.protocol.pipes import Pipe
from atoll.protocol.p2pd import Daemon, DaemonOptions, PrivateFolder
from atoll.protocol.identity import load_or_create_identity
from atoll.protocol.ports import reserve

async def main():
    folder = PrivateFolder()
    load_or_create_identity(sys.argv[1])
    with reserve(["/ip4/127.0.0.1/tcp/0"]) as reserved:
        daemon = await Daemon.start(DaemonOptions(Path(sys.argv[1]), tuple(reserved.addresses)), folder)
    print(daemon.pid, folder.path, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_a_daemon_dies_with_its_owner_and_its_folder_is_swept(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path / "key")], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        assert alive(int(pid))
        assert Path(folder) not in sweep(Path(folder).parent)  # in use
        owner.kill()
        owner.wait()
        assert wait_until_dead(int(pid), 5)
        assert Path(folder) in sweep(Path(folder).parent)
        assert not Path(folder).exists()
    finally:
        owner.kill()
        owner.wait()
        if owner.stdout is not None:
            owner.stdout.close()


def test_a_taken_port_is_found_out(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port} of 127.0.0.1 is taken"):
            reserve([f"/ip4/127.0.0.1/tcp/{port}"])

    async def run() -> None:
        folder = PrivateFolder()
        daemon = await start(folder, tmp_path / "key")
        try:
            with pytest.raises(ResourceError, match="is taken"):  # p2pd itself would share it without a word
                reserve(daemon.addresses)
        finally:
            await daemon.stop(2.0)
            folder.remove()

    asyncio.run(run())


def test_of_two_at_once_one_gets_the_port() -> None:
    with reserve([LOOPBACK]) as first, pytest.raises(ResourceError, match="is taken"):
        reserve(first.addresses)


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:4001", "/ip4/127.0.0.1", "/ip4/999.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/70000"]
)
def test_malformed_listening_addresses(address: str) -> None:
    with pytest.raises(AddressError, match="expected a multiaddress"):
        reserve([address])


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ResourceError, match="not an address of this machine"):
        reserve(["/ip4/192.0.2.1/tcp/0"])


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def run() -> None:
        folder = PrivateFolder()
        (tmp_path / "key").write_bytes(b"no key")
        with pytest.raises(ResourceError, match=r"it said: (?!nothing)"):
            await Daemon.start(DaemonOptions(tmp_path / "key", (LOOPBACK,)), folder)
        folder.remove()

    asyncio.run(run())


def test_refused_and_wrong_peer_are_told_apart(tmp_path: Path) -> None:
    async def run() -> None:
        folders = [PrivateFolder(), PrivateFolder()]
        one, two = [await start(folder, tmp_path / str(index)) for index, folder in enumerate(folders)]
        stranger = load_or_create_identity(tmp_path / "stranger").peer_id
        nobody = load_or_create_identity(tmp_path / "nobody").peer_id
        with reserve([LOOPBACK]) as free:
            closed = free.addresses
        try:
            with pytest.raises(PeerUnreachable, match=f"another peer id answers: {one.peer_id}, not {stranger}"):
                await two.connect(stranger, one.addresses, 5)
            with pytest.raises(PeerUnreachable, match="refused: nobody listens there"):
                await two.connect(nobody, closed, 5)
            await two.connect(one.peer_id, one.addresses, 5)
            assert await two.peers() == [one.peer_id]
            with pytest.raises(PeerUnreachable, match="does not serve this run's protocol"):
                await two.open(one.peer_id, "/unknown", 5)
        finally:
            for daemon, folder in zip((one, two), folders, strict=True):
                await daemon.stop(2.0)
                folder.remove()

    asyncio.run(run())


def test_multiaddresses_in_binary() -> None:
    peer = "12D3KooWLsvdxcWCWPbutw8bNbvKM6zkEsMJjQ5Kx438Gw5FZMfQ"
    assert multiaddr_bytes("/ip4/127.0.0.1/tcp/1234").hex() == "047f0000010604d2"
    relayed = multiaddr_bytes(f"/ip4/127.0.0.1/tcp/1234/p2p/{peer}/p2p-circuit").hex()
    assert relayed.startswith("047f0000010604d2a50326002408011220")
    assert relayed.endswith("a202")
    for bad in ("", "nonsense", "/ip4/1.2.3/tcp/1", "/ip4/1.2.3.4/tcp/1/p2p/0OIl"):
        with pytest.raises(AddressError):
            multiaddr_bytes(bad)


def test_unknown_messages_are_passed_on_in_one_line() -> None:
    assert explain("first\nsecond", PeerId("X")) == "X: first second"


def test_streams_that_come_as_the_daemon_is_stopped_are_closed(tmp_path: Path) -> None:
    """None is lost between the socket that takes them in and the tasks that are cancelled."""

    async def never(protocol: str, peer: PeerId, pipe: Pipe) -> None:
        raise AssertionError("nobody has said who it is")

    async def test() -> None:
        folder = PrivateFolder()
        daemon = await start(folder, tmp_path / "identity")
        await daemon.listen(never)
        came = []
        for _ in range(3):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(daemon._listen_path)
            sock.settimeout(5)
            came.append(sock)
            await asyncio.sleep(0)
        for _ in range(100):
            if daemon._arrivals:
                break
            await asyncio.sleep(0)
        assert daemon._arrivals
        await daemon.stop(1.0)
        for sock in came:
            with sock, contextlib.suppress(ConnectionResetError):  # which is how the listener ends those left to it
                assert sock.recv(1) == b""
        folder.remove()

    asyncio.run(test())
    gc.collect()
