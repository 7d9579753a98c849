"""A round over links of bounded rate, against bytes/bandwidth: ``python -m bench.link``.

Four peers, each in a network namespace behind a link of so many Mbit/s up and as many down, with a round trip of so
many milliseconds between any two; the very Round, Reducer and Replica over libp2p. ``ideal`` is 2(n-1)/n of the
encoded fragment over the nominal rate, headers of TCP and IP not deducted; ``of ideal`` is what the round took from
the seal to all chunks at every peer, less two round trips, against it. ``raw`` is the same for bare streams that push
as many bytes. Needs root, and a machine that has nothing else to do: delays are made by processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from . import _peer
from ._common import Crew, Row, read_rows, table, write_rows
from ._network import Network, Unavailable, round_trips

MILLIONS = {20.0: 10, 100.0: 40, 500.0: 100}
COLUMNS = [
    ("mbit", "Mbit/s", ".0f"), ("rtt_ms", "round trip ms", ".0f"), ("measured_ms", "measured", ".1f"),
    ("peers", "peers", "d"), ("millions", "M params", ".0f"), ("codec", "codec", "s"),
    ("ideal", "ideal s", ".2f"), ("seconds", "s", ".2f"), ("commit_seconds", "to commit", ".2f"),
    ("ratio", "of ideal", ".3f"), ("raw_ratio", "raw", ".3f"), ("bytes_ratio", "bytes/ideal", ".4f"),
    ("cpu", "CPU s", ".1f"),
]  # fmt: skip


def measure(mbit: float, rtt: float, options: argparse.Namespace) -> Row:
    peers = options.peers
    params = options.params or int(MILLIONS.get(mbit, 10) * 1e6)
    with Network(peers, mbit, rtt) as network:
        measured = max(round_trips(network, [(0, peers - 1)]), default=None)
        setup: dict[str, Any] = {
            "peers": peers, "params": params, "codec": options.codec, "chunk": options.chunk,
            "hosts": network.addresses, "namespaces": network.names,
        }  # fmt: skip
        with Crew(_peer.main, peers, setup) as crew:
            encoded = crew.ask("meet", crew.greetings())[0]
            size = 2 * (peers - 1) * encoded // peers
            raw_spans = crew.ask("raw", round(size / (peers - 1) / 2))
            raw = max(end for _, end in raw_spans) - min(begin for begin, _ in raw_spans)
            best: Row = {}
            for repeat in range(options.repeats):
                crew.ask("let_go")
                answers = crew.ask("round", repeat + 1)
                began = min(answer["began"] for answer in answers)
                row = {
                    "seconds": max(answer["whole"] for answer in answers) - began,
                    "commit_seconds": max(answer["committed"] for answer in answers) - began,
                    "bytes_ratio": sum(answer["sent"] for answer in answers) / (size * peers),
                    "cpu": sum(answer["cpu"] + answer["daemon_cpu"] for answer in answers),
                }
                best = row if not best or row["seconds"] < best["seconds"] else best
    ideal = size / (mbit * 1e6 / 8)
    return best | {
        "mbit": mbit, "rtt_ms": 1000 * rtt, "measured_ms": measured and 1000 * measured,
        "peers": peers, "params": params,
        "millions": params / 1e6, "codec": options.codec, "encoded": encoded, "ideal": ideal,
        "ratio": (best["seconds"] - 2 * rtt) / ideal, "raw_ratio": (raw - 2 * rtt) / ideal,
    }  # fmt: skip


def main() -> int:
    from atoll.protocol.codecs import CODECS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[20, 100, 500])
    parser.add_argument("--rtt", type=float, nargs="+", default=[20, 100], help="milliseconds")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--params", type=int, default=0, help="default: 10, 40, 100 million at 20, 100, 500 Mbit/s")
    parser.add_argument("--codec", default="int8", choices=list(CODECS))
    parser.add_argument("--chunk", type=int, default=0, help="elements in a chunk (default: as a new run would have)")
    parser.add_argument("--repeats", type=int, default=2, help="the best counts")
    parser.add_argument("--json", type=Path, help="write the rows there, and leave out what it has")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces go whatever ends us

    rows = read_rows(options.json)
    keys = [(mbit, rtt) for mbit in options.mbit for rtt in options.rtt]
    for mbit, rtt in keys:
        if any((row["mbit"], row["rtt_ms"], row["codec"], row["peers"]) == (mbit, rtt, options.codec, options.peers)
               for row in rows):  # fmt: skip
            continue
        try:
            rows.append(measure(mbit, rtt / 1000, options))
        except Unavailable as error:
            print(f"links cannot be shaped on this machine: {error}", file=sys.stderr)
            return 7
        write_rows(options.json, rows)
    print(table([row for row in rows if (row["mbit"], row["rtt_ms"]) in keys], COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
