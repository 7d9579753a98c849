"""What a node says while no peer of the run answers, and what peers say of the run they serve."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from atoll.node import looking
from atoll.node.looking import Reasons, in_words, tell_reasons
from atoll.protocol.errors import PeerMisbehaved
from atoll.protocol.messages import encode
from atoll.protocol.simulation import SimNetwork, SimTransport
from atoll.protocol.transport import Stream
from atoll.protocol.which import NOT_SERVED, STREAMS, Serves, ask_which, which_handler

REFUSED = {"a": "/ip4/127.0.0.1/tcp/9: connection refused"}


class Link:
    """A transport that finds nobody until it is told otherwise."""

    def __init__(self) -> None:
        self.joined = False
        self.reasons = dict(REFUSED)

    def unreached(self) -> dict[str, str]:
        return dict(self.reasons)


@pytest.mark.usefixtures("_quick")
def test_reasons_are_told_when_they_are_new_and_taken_back_at_the_end() -> None:
    async def body() -> list[Reasons]:
        link, told = Link(), cast(list[Reasons], [])
        news = asyncio.Event()

        def tell(reasons: Reasons) -> None:
            told.append(reasons)
            news.set()

        task = asyncio.create_task(tell_reasons(cast(Any, link), tell))
        for reason in ("no answer within 8 s", ""):
            await news.wait()
            news.clear()
            link.reasons["a"] = reason
            link.joined = not reason
        await task
        return told

    with asyncio.Runner() as runner:
        told = runner.run(asyncio.wait_for(body(), 10))
    assert told == [REFUSED, {"a": "no answer within 8 s"}, {}]


@pytest.mark.usefixtures("_quick")
def test_a_run_that_answers_is_worth_no_word() -> None:
    link, told = Link(), cast(list[Reasons], [])
    link.joined = True
    asyncio.run(tell_reasons(cast(Any, link), told.append))
    assert told == []


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AFTER", "PAUSE"):
        monkeypatch.setattr(looking, name, 0.01)


def test_reasons_in_one_line() -> None:
    assert in_words(REFUSED) == ("no peer of the run answers yet, trying on: /ip4/127.0.0.1/tcp/9: connection refused")


OWN = "ab" * 8


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (encode(Serves(STREAMS, "cd" * 8)), f"another run answers: the peer there serves run {'cd' * 8}…, "),
        (encode(Serves(STREAMS + 1, OWN)), "another version of atoll answers: its streams are of version 4"),
        (encode(Serves(STREAMS, OWN)), NOT_SERVED),
        (encode(Serves(STREAMS, "run\x1b[31m")), None),
        (b"\x93\xa3run\x03\xb0" + b"A" * 16, None),
        (b"", None),
    ],
)
def test_what_another_peer_says_that_it_serves(answer: bytes, words: str | None) -> None:
    network, heard = SimNetwork(seed=1), cast(list[str], [])
    there, here = network.host("there"), network.host("here")

    async def serve(transport: SimTransport) -> None:
        async def handle(stream: Stream) -> None:
            await stream.send(answer)
            await stream.receive(64)

        await transport.serve("which", handle)
        await asyncio.Event().wait()

    async def ask(transport: SimTransport) -> None:
        stream = await transport.open(there.peer_id, "which", timeout=5)
        try:
            heard.append(await ask_which(stream, OWN))
        except PeerMisbehaved as error:
            heard.append(f"misbehaved: {error.peer}")

    async def main() -> None:
        there.run(serve)
        await asyncio.sleep(1)
        here.run(ask)
        await asyncio.sleep(5)

    network.run(main())
    assert heard[0].startswith(words or f"misbehaved: {there.peer_id}")


def test_a_peer_says_which_run_it_serves_and_waits_for_nobody_for_long() -> None:
    network, heard = SimNetwork(seed=1), cast(list[str], [])
    there, here = network.host("there"), network.host("here")

    async def serve(transport: SimTransport) -> None:
        handler = which_handler("cd" * 8)

        async def handle(stream: Stream) -> None:
            await handler(stream)
            heard.append(f"ended after {transport.now() - began:.0f} s")

        began = transport.now()
        await transport.serve("which", handle)
        await asyncio.Event().wait()

    async def ask(transport: SimTransport) -> None:
        silent = await transport.open(there.peer_id, "which", timeout=5)
        stream = await transport.open(there.peer_id, "which", timeout=5)
        heard.append(await ask_which(stream, OWN))
        await asyncio.sleep(20)
        await silent.close()

    async def main() -> None:
        there.run(serve)
        here.run(ask)
        await asyncio.sleep(30)

    network.run(main())
    assert "the peer there serves run cdcdcdcdcdcdcdcd…" in " ".join(heard)
    assert len([line for line in heard if line.startswith("ended")]) == 2
