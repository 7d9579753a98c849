"""Peers of the run that this node has met, kept on disk, so that it finds the run again without its well-known peers.

A text file with one multiaddress a line. What stands there is dialled besides the address's own peers; whether who
answers is that peer, and of this run, is seen then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.protocol.address import Multiaddr
from atoll.protocol.disk import replace_file
from atoll.protocol.errors import AddressError
from atoll.protocol.transport import PeerId

FILE = "peers"
KEPT = 8
"""Peers that are kept: each is greeted every few seconds as long as the node runs."""
_MAX_BYTES = 1 << 16


class PeerBook:
    """The file in the state folder ``folder``. Neither a damaged file nor a full disk is an error."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._kept: dict[str, list[str]] = {}

        for text in self.load():
            address, _, peer = text.rpartition("/p2p/")
            self._kept.setdefault(peer, []).append(address)

    def load(self) -> list[str]:
        """Multiaddresses with ``/p2p/`` of an earlier start."""
        found: list[str] = []
        with contextlib.suppress(OSError):
            with self._path.open("rb") as file:
                data = file.read(_MAX_BYTES)
            for line in data.decode("utf-8", "replace").split():
                with contextlib.suppress(AddressError):
                    if Multiaddr.parse(line).peer is not None:
                        found.append(line)
        return found

    def note(self, reachable: Mapping[str, Sequence[str]]) -> None:
        """Keep some of these peers (id to addresses). Who was kept stays, until somebody who is there needs the place:

        in an outage most are away, and they are those to be found again afterwards.
        """
        there = {peer: list(addresses) for peer, addresses in reachable.items() if addresses}
        kept = {peer: there.get(peer, addresses) for peer, addresses in self._kept.items()}
        away = [peer for peer in kept if peer not in there]
        for peer, addresses in there.items():
            if peer in kept:
                continue
            if len(kept) >= KEPT:
                if not away:
                    break
                del kept[away.pop(0)]
            kept[peer] = addresses
        if kept == self._kept:
            return
        self._kept = kept
        lines = []
        for peer, addresses in kept.items():
            for address in addresses[:4]:
                with contextlib.suppress(AddressError):
                    lines.append(f"{Multiaddr.parse(address).at(PeerId(peer))}\n")
        with contextlib.suppress(OSError):
            replace_file(self._path, "".join(lines).encode())
