"""Hold packets back: ``python -m bench._delay NAMESPACE QUEUE SECONDS``.

The kernel's own means (netem) is missing on many machines, so packets are queued to this process (NFQUEUE over
netlink, headers only) and released in order when they are due. Ends with its namespace or its parent.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import sys
import time
from collections import deque

from ._network import enter

NETFILTER, QUEUE_SYSTEM = 12, 3
PACKET, CONFIG, VERDICTS = 0, 2, 3
BIND, ACCEPT = 1, 1


def _attribute(kind: int, data: bytes) -> bytes:
    size = 4 + len(data)
    return struct.pack("=HH", size, kind) + data + bytes(-size % 4)


def _message(kind: int, queue: int, body: bytes, flags: int = 1) -> bytes:
    header = struct.pack("=IHHII", 20 + len(body), QUEUE_SYSTEM << 8 | kind, flags, 0, 0)
    return header + struct.pack("!BBH", 0, 0, queue) + body


def _open(queue: int) -> socket.socket:
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER)
    link.bind((0, 0))
    link.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
    link.setsockopt(270, 5, 1)  # NETLINK_NO_ENOBUFS: under pressure a packet is lost, not the queue
    link.send(_message(CONFIG, queue, _attribute(1, struct.pack("!BBH", BIND, 0, socket.AF_INET)), flags=5))
    error = struct.unpack("=i", link.recv(4096)[16:20])[0]
    if error:
        raise SystemExit(f"queue {queue}: error {-error}")
    link.send(_message(CONFIG, queue, _attribute(2, struct.pack("!IB", 0, 1))))  # the headers only
    link.send(_message(CONFIG, queue, _attribute(3, struct.pack("!I", 200_000))))  # packets held at most
    open_and_large = struct.pack("!I", 1 | 4)  # let through when full; take unsegmented packets
    link.send(_message(CONFIG, queue, _attribute(5, open_and_large) + _attribute(4, open_and_large)))
    return link


def _packets(data: bytes) -> list[int]:
    """Ids of the packets that the kernel announces."""
    found, at = [], 0
    while at + 20 <= len(data):
        size, kind = struct.unpack_from("=IH", data, at)
        if kind == QUEUE_SYSTEM << 8 | PACKET:
            inside = at + 20
            while inside + 4 <= at + size:
                length, name = struct.unpack_from("=HH", data, inside)
                if name & 0x3FFF == 1:
                    found.append(struct.unpack_from("!I", data, inside + 4)[0])
                    break
                inside += (length + 3) & ~3
        at += (size + 3) & ~3
    return found


def main(name: str, queue: int, delay: float) -> None:
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG
    enter(name)
    link = _open(queue)
    link.setblocking(False)
    poll = select.epoll()
    poll.register(link, select.EPOLLIN)
    held: deque[tuple[float, int]] = deque()
    print("ready", flush=True)
    while True:
        poll.poll(max(0.0, held[0][0] - time.monotonic()) if held else None)
        due = time.monotonic() + delay
        for _ in range(64):
            try:
                data = link.recv(65536)
            except BlockingIOError:
                break
            held.extend((due, packet) for packet in _packets(data))
        last, now = None, time.monotonic() + 0.0005
        while held and held[0][0] <= now:
            last = held.popleft()[1]
        if last is not None:  # one verdict for all up to this one
            link.send(_message(VERDICTS, queue, _attribute(2, struct.pack("!II", ACCEPT, last))))


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    except KeyboardInterrupt:
        pass
