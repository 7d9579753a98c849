"""The bootstrap peer's own rules."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from atoll.bootstrap.entry import PORT_FILE, _keep_port, _same_port, wait_for_port
from atoll.protocol.errors import ResourceError


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


def test_the_port_is_kept(tmp_path: Path) -> None:
    anywhere = ("/ip4/0.0.0.0/tcp/0",)
    assert _same_port(tmp_path, anywhere) == anywhere
    _keep_port(tmp_path, ["/ip4/10.0.0.1/tcp/4001", "/ip4/127.0.0.1/tcp/4001"])
    assert [path.name for path in tmp_path.iterdir()] == [PORT_FILE]
    assert _same_port(tmp_path, anywhere) == ("/ip4/0.0.0.0/tcp/4001",)
    assert _same_port(tmp_path, ("/ip4/0.0.0.0/tcp/4002",)) == ("/ip4/0.0.0.0/tcp/4002",)
    (tmp_path / PORT_FILE).write_text("nonsense")
    assert _same_port(tmp_path, anywhere) == anywhere
