"""Where peers are: multiaddresses, and the one-line address of a run that people copy and paste.

A run address is ``atoll:<run id>@<multiaddr>[,<multiaddr>…]``: the run id in 64 hex digits, and well-known peers, each
with its peer id. It needs no quoting in a shell.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache

from .errors import AddressError
from .identity import is_peer_id, public_key_of
from .transport import PeerId

MAX_MULTIADDR = 256
"""Characters of the longest multiaddress."""
MAX_PEERS = 16
"""Well-known peers in a run address."""
MAX_ADDRESS = 8192
SCHEME = "atoll:"

_HOSTS = ("ip4", "ip6", "dns4", "dns6", "dns")
_EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…"
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_WITHOUT_VALUE = ("ws", "wss", "tls", "quic", "quic-v1", "p2p-circuit")
_TRANSPORTS = {
    ("tcp",),
    ("tcp", "ws"),
    ("tcp", "wss"),
    ("tcp", "tls", "ws"),
    ("udp", "quic"),
    ("udp", "quic-v1"),
}


@dataclass(frozen=True)
class Multiaddr:
    """A multiaddress of the few forms that peers of a run use (docs/wire/records.md)."""

    host: str
    """``ip4``, ``ip6``, ``dns4``, ``dns6`` or ``dns``."""
    name: str
    """IP address or host name."""
    port: int
    transport: tuple[str, ...]
    """``("tcp",)``, ``("udp", "quic-v1")``, …"""
    relay: str | None = None
    """Peer id of the relay, for an address through one (``/p2p/RELAY/p2p-circuit``)."""
    peer: PeerId | None = None
    """Peer id at the end, who is reached."""

    @classmethod
    def parse(cls, text: str, *, listen: bool = False) -> Multiaddr:
        """Read a multiaddress. Raises :class:`AddressError`, saying which part is malformed.

        listen: port 0 and unspecified hosts (0.0.0.0, ::) are fine, for they are to be listened on, not dialled.
        """
        where = f"multiaddress {text[:80]!r}"
        if not text.startswith("/"):
            raise AddressError(f"{where}: expected a slash at the beginning, as in {_EXAMPLE}")
        if len(text) > MAX_MULTIADDR:
            raise AddressError(f"{where}…: expected at most {MAX_MULTIADDR} characters, found {len(text)}")
        words = text[1:].split("/")
        host, name = words[0], words[1] if len(words) > 1 else ""
        if host not in _HOSTS:
            raise AddressError(f"{where}: expected {', '.join(_HOSTS[:-1])} or {_HOSTS[-1]} first, found {host!r}")
        _check_host(where, host, name, listen)

        transport: list[str] = []
        port = -1
        at = 2
        while at < len(words) and words[at] not in ("p2p", "ipfs", "p2p-circuit"):
            word = words[at]
            transport.append(word)
            at += 1
            if word in ("tcp", "udp"):
                port = _port(where, word, words[at] if at < len(words) else "", listen)
                at += 1
            elif word not in _WITHOUT_VALUE:
                raise AddressError(
                    f"{where}: {word!r} is not a transport that atoll knows (tcp, udp, quic-v1, ws, wss)"
                )
        if tuple(transport) not in _TRANSPORTS:
            known = "/tcp/PORT, /tcp/PORT/ws or /udp/PORT/quic-v1"
            raise AddressError(f"{where}: expected {known} after the host, found {'/' + '/'.join(transport)!r}")

        relay: str | None = None
        peer: str | None = None
        if at < len(words) and words[at] == "p2p":
            peer = _peer(where, words[at + 1] if at + 1 < len(words) else "")
            at += 2
        if at < len(words) and words[at] == "p2p-circuit":
            if peer is None:
                raise AddressError(f"{where}: expected the relay's /p2p/ID before /p2p-circuit")
            relay, peer = peer, None
            at += 1
            if at < len(words) and words[at] == "p2p":
                peer = _peer(where, words[at + 1] if at + 1 < len(words) else "")
                at += 2
        if at < len(words):
            raise AddressError(f"{where}: expected nothing after the peer id, found {'/'.join(words[at:])[:40]!r}")
        if peer is not None:
            try:
                public_key_of(peer)
            except ValueError as error:
                raise AddressError(f"{where}: peer id {peer[:60]!r}: {error}") from None
        return cls(host, name, port, tuple(transport), relay, None if peer is None else PeerId(peer))

    def __str__(self) -> str:
        first, *rest = self.transport
        text = f"/{self.host}/{self.name}/{first}/{self.port}" + "".join(f"/{word}" for word in rest)
        if self.relay is not None:
            text += f"/p2p/{self.relay}/p2p-circuit"
        return text if self.peer is None else f"{text}/p2p/{self.peer}"

    def at(self, peer: PeerId | None) -> Multiaddr:
        """The same place with another peer id at the end, or with none: what transports dial and announce."""
        return Multiaddr(self.host, self.name, self.port, self.transport, self.relay, peer)


def _check_host(where: str, host: str, name: str, listen: bool) -> None:
    if host in ("ip4", "ip6"):
        kind = ipaddress.IPv4Address if host == "ip4" else ipaddress.IPv6Address
        try:
            ip = kind(name)
        except ValueError:
            raise AddressError(f"{where}: expected an IPv{host[2]} address after /{host}/, found {name!r}") from None
        if "%" in name:
            raise AddressError(f"{where}: expected an IPv6 address without a zone, found {name!r}")
        if ip.is_unspecified and not listen:
            raise AddressError(f"{where}: {name} means every interface of a machine; expected the address to dial")
        if ip.is_multicast:
            raise AddressError(f"{where}: {name} is a multicast address; expected the address of one machine")
    elif len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.removesuffix(".").split(".")):
        raise AddressError(f"{where}: expected a host name after /{host}/, found {name!r}")


def _port(where: str, kind: str, text: str, listen: bool) -> int:
    if re.fullmatch(r"0|[1-9][0-9]{0,4}", text) is None or int(text) > 65535:
        raise AddressError(f"{where}: expected a port (1 to 65535) after /{kind}/, found {text!r}")
    if text == "0" and not listen:
        raise AddressError(f"{where}: port 0 means any free port; expected the port to dial")
    return int(text)


def _peer(where: str, text: str) -> str:
    if not text:
        raise AddressError(f"{where}: expected a peer id after /p2p/")
    if not is_peer_id(text, any_key=True):
        raise AddressError(f"{where}: expected a peer id (12D3KooW…, 52 characters) after /p2p/, found {text[:60]!r}")
    return text


@dataclass(frozen=True)
class RunAddress:
    """Which run, and where to find it."""

    run_id: bytes
    """32 bytes."""
    peers: tuple[str, ...]
    """Multiaddresses of well-known peers, each with ``/p2p/ID`` at the end."""

    def __init__(self, run_id: bytes, peers: list[str] | tuple[str, ...]) -> None:
        if len(run_id) != 32:
            raise AddressError(f"run address: expected a run id of 32 bytes, found {len(run_id)}")
        if not peers:
            raise AddressError(f"run address: expected at least one multiaddress, as in {_EXAMPLE}")
        found = []
        for text in peers:
            parsed = Multiaddr.parse(text)
            if parsed.peer is None:
                raise AddressError(
                    f"run address: expected the peer's id at the end of {text[:80]!r}, as in {_EXAMPLE}; "
                    "without it another machine could answer"
                )
            found.append(str(parsed))
        distinct = tuple(dict.fromkeys(found))
        if len(distinct) > MAX_PEERS:
            raise AddressError(f"run address: expected at most {MAX_PEERS} multiaddresses, found {len(distinct)}")
        object.__setattr__(self, "run_id", run_id)
        object.__setattr__(self, "peers", distinct)

    @classmethod
    def parse(cls, text: str) -> RunAddress:
        """Read a run address; blanks around it are ignored. Raises :class:`AddressError`, naming the bad part."""
        text = text.strip()
        form = f"{SCHEME}<run id>@<multiaddress>"
        if not text:
            raise AddressError(f"run address: expected {form}, found nothing")
        if len(text) > MAX_ADDRESS:
            raise AddressError(f"run address: expected at most {MAX_ADDRESS} characters, found {len(text)}")
        if text.startswith("/"):
            raise AddressError(
                f"run address: {text[:60]!r} is a multiaddress; expected {form}, as atoll bootstrap prints it"
            )
        if not text.startswith(SCHEME):
            raise AddressError(
                f"run address: expected it to begin with {SCHEME!r}, found {text[:40]!r}; it is what atoll "
                "bootstrap prints, or @FILE for one that stands in a file"
            )
        run, at, rest = text[len(SCHEME) :].partition("@")
        if not at:
            raise AddressError(f"run address: expected {form}; there is no '@' after the run id: is it cut short?")
        if re.fullmatch(r"[0-9a-fA-F]{64}", run) is None:
            found = f"{len(run)} characters" if len(run) != 64 else repr(run)
            raise AddressError(f"run address: expected a run id of 64 hex digits before '@', found {found}")
        return cls(bytes.fromhex(run), [part.strip() for part in rest.split(",")])

    def __str__(self) -> str:
        return f"{SCHEME}{self.run_id.hex()}@{','.join(self.peers)}"

    @property
    def peer_ids(self) -> tuple[PeerId, ...]:
        """The well-known peers, each once."""
        ids = (Multiaddr.parse(text).peer for text in self.peers)
        return tuple(dict.fromkeys(peer for peer in ids if peer is not None))


@lru_cache(maxsize=512)
def is_multiaddr(text: str) -> bool:
    """Whether ``text`` is a multiaddress that peers of a run dial."""
    try:
        Multiaddr.parse(text)
    except AddressError:
        return False
    return True
