"""A peer for benchmarks: the real transport, Round, Reducer and Replica; a roster written by hand; no training.

It runs in a process of its own and does what :class:`~bench._common.Crew` asks of it.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import os
import socket
import tempfile
import time
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ._common import cpu, gaussian, squared_error
from ._network import enter
from ._push import BARE, STREAMS, Pusher, bare_transport, receive_tcp, send_tcp, tcp_listener


def main(connection: Connection, index: int, options: dict[str, Any]) -> None:
    """Entry of the process. options: peers, params, codec, chunk (0: as suggested), hosts (address of each peer),
    namespaces (of each peer, or none), silence (seconds), profile (folder or none)."""
    if options.get("namespaces"):
        enter(options["namespaces"][index])  # before any thread is started
    asyncio.run(_serve(connection, index, options))


async def _serve(connection: Connection, index: int, options: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        peer = BenchPeer(index, options)
        try:
            connection.send((True, await peer.start(Path(folder))))
            while True:
                order, *arguments = await asyncio.to_thread(connection.recv)
                connection.send((True, await getattr(peer, order)(*arguments)))
        finally:
            await peer.close()


class BenchPeer:
    """See :func:`main`. Public coroutines are orders."""

    def __init__(self, index: int, options: dict[str, Any]) -> None:
        self.index = index
        self.options = options
        self.current: Any = None
        self.began = asyncio.Event()
        self.early: list[tuple[Any, Any]] = []
        self.book: list[tuple[str, list[str]]] = []
        self.commit: Any = None
        self.sent_before = 0
        self.quiet = True
        """Whether no round is in flight: then links may be measured."""
        self.listener: socket.socket | None = None

    async def start(self, folder: Path) -> Any:
        """Start the transport; answers (peer id, addresses, pid of the daemon)."""
        from atoll.protocol import kernels
        from atoll.protocol.codecs import averages_codec, get_codec
        from atoll.protocol.disk import MemoryDisk
        from atoll.protocol.fetch import Fetcher
        from atoll.protocol.identity import load_or_create_identity
        from atoll.protocol.layout import ChunkLayout
        from atoll.protocol.malloc import keep_freed_memory
        from atoll.protocol.manifest import Manifest, suggested_chunk
        from atoll.protocol.messenger import Messenger, message_limit
        from atoll.protocol.probe import Prober
        from atoll.protocol.rates import Rates
        from atoll.protocol.reduce import PROTOCOL as REDUCE
        from atoll.protocol.replica import Replica
        from atoll.protocol.state import GlobalState
        from atoll.protocol.store import Store
        from atoll.protocol.transfer import Donor
        from atoll.protocol.transport import PeerId

        keep_freed_memory()
        kernels.warm_up()
        options = self.options
        count, size = options["peers"], options["params"]
        self.signer = load_or_create_identity(folder / "key")
        layout = self.layout = ChunkLayout(size, options.get("chunk") or suggested_chunk(size))
        self.codec, self.averages = get_codec(options["codec"]), averages_codec(options["codec"])
        # Touched, so that the pages are there before the round: np.zeros would only promise them.
        self.theta, momentum = np.ones(size, np.float32), np.ones(size, np.float32)
        momentum[:] = 0
        params = np.ones(size, np.float32)
        params[:] = 0
        residual = None
        if not self.codec.lossless:
            residual = np.ones(size, np.float32)
            residual[:] = 0
        state = GlobalState(layout, params, momentum)
        gaussian(self.index, 0, self.theta)
        np.negative(self.theta, out=self.theta)
        self.manifest = Manifest.make(
            "benchmark", parameters=size, theta0=state.digest().hex(),
            codec={"name": self.codec.name, "error_feedback": 1.0}, outer={"optimizer": "nesterov", "lr": 1.0,
            "momentum": 0.0}, state={"chunk": layout.chunk},
            round={"silence": options.get("silence", 5.0), "max_group": max(count, 2), "quorum": count},
        )  # fmt: skip
        self.replica = Replica(self.manifest, layout, self.codec, state, residual=residual)
        self.transport = await bare_transport().create(
            identity_path=folder / "key", run_id=self.manifest.run_id, seeds=[],
            validator=lambda key, peer, value, expires: True,
            listen=[f"/ip4/{options['hosts'][self.index]}/tcp/0"],
        )  # fmt: skip
        await self.replica.digest(self.transport)
        self.messenger = Messenger(
            self.transport, self._receive, silence=self.manifest.round.silence, admits=lambda peer: True,
            refused=self._refused, limit=message_limit(layout.count),
        )  # fmt: skip
        await self.messenger.start()
        await self.transport.serve(REDUCE, self._serve_reduce)
        self.pusher = Pusher(self.transport)
        await self.transport.serve(STREAMS, self.pusher.serve)
        await self.transport.serve(BARE, self.pusher.serve)
        self.fetcher = Fetcher(self.transport, self.manifest, layout, self.signer, report=self._refused)
        donor = Donor(self.transport, Store(MemoryDisk(), self.manifest.run_id, layout), recent=self._recent)
        await donor.start()
        self.rates = Rates(self.transport.now())
        self.prober = Prober(
            self.transport, self.rates, room=lambda: 60.0 if self.quiet else 0.0,
            partners=lambda: [PeerId(peer) for peer, _ in self.book if peer != self.transport.peer_id],
            known=lambda peer: True, refused=self._refused, events=self._events,
        )  # fmt: skip
        await self.prober.start()
        return self.transport.peer_id, self.transport.addresses(), self.transport.daemon_pid

    async def close(self) -> None:
        if hasattr(self, "messenger"):
            await self.messenger.close()
        if hasattr(self, "transport"):
            await self.transport.close()

    async def meet(self, book: list[tuple[str, list[str], int]]) -> tuple[int, int, int]:
        """Learn everyone's addresses; answers the encoded bytes of the fragment as a contribution and as averages (with
        ``sparse`` the most that they can be), and the elements of a chunk."""
        from atoll.protocol.transport import PeerId

        self.book = [(peer, addresses) for peer, addresses, _ in book]
        for peer, addresses in self.book:
            self.transport.learn(PeerId(peer), addresses)
        for peer, _ in self.book[self.index + 1 :]:
            await self._greet(peer)
        sizes = [self.layout.size(i) for i in range(self.layout.count)]
        contribution = sum(map(self.codec.encoded_size, sizes))
        averages = sum(self.averages.average_size(size, len(book)) for size in sizes)
        return contribution, averages, self.layout.chunk

    async def _greet(self, peer: Any) -> None:
        """Have a connection. The daemons look for one another too, and dials of theirs that cross end in a pause."""
        from atoll.protocol.errors import PeerUnreachable

        for left in range(20, -1, -1):
            try:
                await self.pusher.push(peer, STREAMS, 0)
                break
            except PeerUnreachable:
                if not left:
                    raise
                await asyncio.sleep(1)

    # --- as many bytes alone

    async def push(self, size: int, over: str) -> tuple[float, float]:
        """Push ``size`` bytes to each other peer and take as many from each, on one stream a pair and direction of
        opening, as a reduction does. over: ``BARE`` or ``STREAMS``. Answers (start, end)."""
        began = time.monotonic()
        others = [peer for peer, _ in self.book if peer != self.transport.peer_id]
        await asyncio.gather(*(self.pusher.push(peer, over, size) for peer in others))
        return began, time.monotonic()

    async def listen(self) -> int:
        """Be ready for plain TCP connections; answers the port."""
        self.listener = tcp_listener(self.options["hosts"][self.index])
        return int(self.listener.getsockname()[1])

    async def push_tcp(self, size: int, ports: list[int]) -> tuple[float, float]:
        """The same over plain TCP, one connection a pair, as libp2p has: 2 x ``size`` bytes each way."""
        assert self.listener is not None
        began = time.monotonic()
        ends = list(zip(self.options["hosts"], ports, strict=True))
        accepted = receive_tcp(self.listener, self.index, 2 * size)
        await asyncio.gather(accepted, *(send_tcp(end, 2 * size) for end in ends[self.index + 1 :]))
        return began, time.monotonic()

    # --- a round

    def _refused(self, peer: Any, reason: str, fault: Any = None) -> None:
        print(f"peer {self.index}: refused {peer}: {reason}", flush=True)

    def _events(self, event: str, /, **fields: Any) -> None:
        if event in ("refused", "warning", "reassign", "probe"):
            print(f"peer {self.index}: {event} {fields}", flush=True)

    def _receive(self, peer: Any, message: Any) -> None:
        from atoll.protocol.control import Committed
        from atoll.protocol.messages import hash_of

        if isinstance(message, Committed):
            roster = hash_of(message.commit.body.seal)
            if self.current is not None and self.current.roster_id == roster:
                self.current.committed(message.commit)
        elif self.current is not None and getattr(message, "roster", None) == self.current.roster_id:
            self.current.receive(peer, message)
        else:
            self.early.append((peer, message))

    async def _serve_reduce(self, stream: Any) -> None:
        from atoll.protocol.messages import decode, hash_of
        from atoll.protocol.reduce import HELLO_LIMIT, Hello

        hello = decode(await stream.receive(HELLO_LIMIT), Hello, stream.peer)
        roster = hash_of(hello.seal)
        while self.current is None or self.current.roster_id != roster:
            await self.began.wait()
        await self.current.serve(stream, hello)

    def _recent(self, digest: bytes) -> bytes | None:
        return None if self.current is None else self.current.held.get(digest)

    async def probe(self) -> None:
        """Measure the own link, as a peer does between rounds."""
        await self.prober.measure(lenient=True)

    async def stated(self) -> tuple[float, float]:
        """What this peer would state of its link, up and down."""
        return self.rates.upload, self.rates.download

    async def round(
        self, number: int, rates: list[tuple[float, float]] | None = None, learn: bool = False
    ) -> dict[str, Any]:
        """One round with everyone, to its commit. The roster of a number is the same at every peer.

        rates: bytes per second of each peer's link, up and down, as the roster states them; unknown, and equal parts,
        without. learn: whether the peer takes what it sees of this round into account in what it states."""
        from atoll.protocol.calling import Calling, make_seal
        from atoll.protocol.messages import GENESIS, Member, hash_of
        from atoll.protocol.round import Round, Surroundings
        from atoll.protocol.transport import PeerId

        rates = rates or [(0.0, 0.0)] * len(self.book)
        members = [
            Member(peer, bytes([number] * 16), 1000, 50, 100, up, down, True)
            for (peer, _), (up, down) in zip(self.book, rates, strict=True)
        ]
        calling = Calling(bytes([number] * 16), number, GENESIS, set())
        calling.entered = {PeerId(member.peer): member for member in members[1:]}
        seal = make_seal(
            calling, members[0], coordinator=PeerId(members[0].peer), manifest=self.manifest, layout=self.layout
        )
        around = Surroundings(
            self.transport, self.messenger, self.signer, self.manifest, self.layout, self.replica, self._events,
            fetch=self.fetcher.chunks, everyone=lambda: [PeerId(m.peer) for m in members], obsolete=lambda: False,
        )  # fmt: skip

        whole = 0.0

        class Timed(Round):
            def _hold(self, index: int, data: bytes, digest: bytes | None = None) -> None:
                nonlocal whole
                super()._hold(index, data, digest)
                if None not in self.chunks and not whole:
                    whole = time.monotonic()

        profile = cProfile.Profile() if self.options.get("profile") and self.index == 1 else None
        self.sent_before = self.transport.bytes_sent
        used = cpu(os.getpid()), cpu(self.transport.daemon_pid or 0)
        began, loop = time.monotonic(), time.thread_time()
        current = Timed(around, seal, bytes(64), hash_of(seal), self.theta)
        self.current = current
        self.began.set()
        self.began = asyncio.Event()
        early, self.early = self.early, []
        for peer, message in early:
            self._receive(peer, message)
        if profile is not None:
            profile.enable()
        self.quiet = False
        commit = await current.run()
        self.quiet = True
        if learn:
            self.rates.round(current.account(), self.transport.now())
        if profile is not None:
            profile.disable()
            profile.dump_stats(self.options["profile"])
        committed = time.monotonic()
        self.commit = commit
        return {
            "parts": [(self._place(seal.members[part.reducer].peer), part.count) for part in seal.parts],
            # Who fetched the last averages from others than their reducers has had them since the commit.
            "began": began, "whole": whole or committed, "committed": committed, "commit": hash_of(commit.body).hex(),
            "contributors": len(commit.votes),
            "loop_cpu": time.thread_time() - loop,
            "cpu": cpu(os.getpid()) - used[0], "daemon_cpu": cpu(self.transport.daemon_pid or 0) - used[1],
        }  # fmt: skip

    async def sent(self) -> int:
        """Bytes that this peer has sent for the last round. To be asked when everyone has ended it: a majority makes
        the commit, and its members may still be sending averages to the others."""
        return self.transport.bytes_sent - self.sent_before

    def _place(self, peer: str) -> int:
        return next(index for index, (known, _) in enumerate(self.book) if known == peer)

    async def let_go(self) -> None:
        """Wait until nothing of an earlier round is left: its averages stay for T, for whoever still reads them."""
        before = None if self.current is None else weakref.ref(self.current)
        self.current = self.commit = None
        deadline = time.monotonic() + 2 * self.manifest.round.silence
        while before is not None and before() is not None and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            gc.collect()

    async def apply(self) -> dict[str, Any]:
        """Apply the last round's commit, as a peer that has paused since the freeze does."""
        from atoll.protocol.messages import hash_of

        chunks = self.current.averaged(self.commit)
        began = time.monotonic()
        share = await self.transport.offload(
            self.replica.apply, self.commit.body, hash_of(self.commit.body), chunks, me=self.current.me,
            frozen=self.theta, local=self.theta,
        )  # fmt: skip
        return {"seconds": time.monotonic() - began, "share": share}

    async def judge(self) -> dict[str, Any]:
        """After :meth:`apply` with learning rate 1 on parameters 0, the parameters are minus the mean."""
        from blake3 import blake3

        self.current = self.commit = None
        digest = blake3(self.replica.params.view(np.uint8).data).hexdigest()
        np.negative(self.replica.params, out=self.replica.params)
        wrong, norm = squared_error(self.index, self.options["peers"], self.replica.params)
        return {"digest": digest, "wrong": wrong, "norm": norm}
