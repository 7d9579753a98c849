"""Take the ports of a peer before its p2p daemon does.

libp2p listens with SO_REUSEPORT, so a second daemon on the same port starts without a word and the kernel hands
each of the two half of the connections. Therefore the port is bound here first, without that option, which fails
when anybody listens there. The bound socket is kept until the daemon listens itself (SO_REUSEPORT is set on it
after the bind, which lets the daemon in and nobody else who binds the plain way), so that of two nodes started at
once on one port exactly one gets it, and so that a port chosen by the kernel (``/tcp/0``) stays ours.
"""

from __future__ import annotations

import errno
import socket
from types import TracebackType

from .errors import AddressError, ResourceError


class Reservation:
    """Ports held for a daemon that is about to start. Use as a context manager; leaving it lets them go."""

    addresses: list[str]
    """The multiaddresses as asked for, with ``0`` replaced by the port that was chosen."""

    def __init__(self) -> None:
        self.addresses = []
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Let the ports go (the daemon listens by now, or never will)."""
        while self._sockets:
            self._sockets.pop().close()


def reserve(listen: list[str]) -> Reservation:
    """Bind every port in ``listen`` (multiaddresses such as ``/ip4/0.0.0.0/tcp/4001``).

    Raises:
        AddressError: not a multiaddress of an IP address and a TCP or UDP port.
        ResourceError: a port is taken, or may not be used, or the IP address is not this machine's.
    """
    reservation = Reservation()
    try:
        for address in listen:
            family, host, kind, port, rest = _parse(address)
            sock = socket.socket(family, kind)
            reservation._sockets.append(sock)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                _bind(sock, kind, host, port)
            except OSError as error:
                raise ResourceError(_explain(address, host, port, error)) from None
            if hasattr(socket, "SO_REUSEPORT"):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            version = "ip6" if family == socket.AF_INET6 else "ip4"
            layer = "tcp" if kind == socket.SOCK_STREAM else "udp"
            reservation.addresses.append("/".join(["", version, host, layer, str(sock.getsockname()[1]), *rest]))
    except BaseException:
        reservation.release()
        raise
    return reservation


def _bind(sock: socket.socket, kind: socket.SocketKind, host: str, port: int) -> None:
    """Bind; past connections of a daemon that died (they keep a port for a minute) are no obstacle."""
    try:
        sock.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE or kind != socket.SOCK_STREAM:
            raise
        # Only now: of two who both set it from the start, both would get the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))


def _parse(address: str) -> tuple[socket.AddressFamily, str, socket.SocketKind, int, list[str]]:
    parts = address.split("/")
    try:
        empty, version, host, layer, port = parts[:5]
        family = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}[version]
        kind = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}[layer]
        socket.inet_pton(family, host)
        number = int(port)
        if empty or not 0 <= number <= 65535:
            raise ValueError
    except (ValueError, KeyError, OSError):
        raise AddressError(
            f"cannot listen at {address!r}: expected a multiaddress such as /ip4/0.0.0.0/tcp/4001 "
            "(ip4 or ip6, then tcp or udp and a port from 0 to 65535)"
        ) from None
    return family, host, kind, number, parts[5:]


def _explain(address: str, host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is taken by another process (a node or bootstrap already running here?); "
            "stop that one, or listen on another port"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"may not listen on port {port}; choose a port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen at {address}: {host} is not an address of this machine; use one of its own, or 0.0.0.0"
    return f"cannot listen at {address}: {error.strerror or error}"
