"""A round over links of bounded rate, against bytes/bandwidth: ``python -m bench.link``.

Peers, each in a network namespace behind a link of so many Mbit/s up and as many down, with a round trip of so many
milliseconds between any two; the very Round, Reducer and Replica over libp2p. One round warms up and is not counted;
of the others the median counts. ``ideal`` is what the busiest link has to carry over its nominal rate, headers of
TCP, IP and Ethernet (about 5 %) not deducted: (n-1)/n of the fragment, encoded as contribution and as average, with
equal parts and links. ``of ideal`` is what the round took from the seal to all chunks at every peer, less two round
trips, against it. Beside it the same for as many bytes alone, pushed over the same links between the rounds: ``TCP``,
one plain connection a pair; ``libp2p``, bare streams of the p2p daemons; ``streams``, ours, which bound what is under
way. ``on the wire`` are the bytes that the links carried, headers and all, against the same bytes as ``bytes/ideal``;
``link busy`` is the share of the round's time that they take on the busiest uplink.

``--unequal 100 20 20`` gives every peer a link of its own and runs the same rounds three times: with equal parts, with
parts by the nominal bandwidth of the links, and by what the peers state when they have measured it themselves (a round
with equal parts, then each probes in turn; the rounds that count add what they see).

Needs root, and a machine that has nothing else to do: delays are made by processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import _peer
from ._common import Crew, Row, end_on_sigterm, read_rows, same, stamp, table, write_rows
from ._network import Network, Unavailable, round_trip
from ._push import BARE, STREAMS

MILLIONS = {20.0: 10, 100.0: 40, 500.0: 100}
COLUMNS = [
    ("links", "Mbit/s", "s"), ("rtt_ms", "round trip ms", ".0f"), ("measured_ms", "measured", ".1f"),
    ("congestion", "control", "s"), ("parts", "parts", "s"), ("millions", "M params", ".0f"), ("codec", "codec", "s"),
    ("ideal", "ideal s", ".2f"), ("seconds", "s", ".2f"), ("slowest", "slowest", ".2f"),
    ("commit_seconds", "to commit", ".2f"), ("ratio", "of ideal", ".3f"), ("tcp_ratio", "TCP", ".3f"),
    ("libp2p_ratio", "libp2p", ".3f"), ("streams_ratio", "streams", ".3f"),
    ("bytes_ratio", "bytes/ideal", ".4f"), ("wire_ratio", "on the wire", ".3f"), ("busy", "link busy", ".3f"),
    ("cpu", "CPU s", ".1f"), ("load", "load", ".1f"),
]  # fmt: skip


def name_of(links: Sequence[float]) -> str:
    """The links of a row: one number where they are equal."""
    return f"{len(links)} x {links[0]:g}" if len(set(links)) == 1 else "/".join(f"{mbit:g}" for mbit in links)


def settings(links: list[float], rtt: float, options: argparse.Namespace) -> Row:
    """What makes rows of one measurement; rtt in seconds."""
    from atoll.protocol.manifest import suggested_chunk

    params = options.params or int(MILLIONS.get(min(links), 10) * 1e6)
    return {
        "links": name_of(links), "rtt_ms": 1000 * rtt, "peers": len(links), "params": params, "codec": options.codec,
        "chunk": options.chunk or suggested_chunk(params), "congestion": options.congestion,
        "repeats": options.repeats,
    }  # fmt: skip


def measure(links: list[float], rtt: float, options: argparse.Namespace) -> list[Row]:
    peers = len(links)
    params = settings(links, rtt, options)["params"]
    equal = len(set(links)) == 1
    with Network(links, rtt, options.congestion) as network:
        setup: dict[str, Any] = {
            "peers": peers, "params": params, "codec": options.codec, "chunk": options.chunk,
            "hosts": network.addresses, "namespaces": network.names,
        }  # fmt: skip
        with Crew(_peer.main, peers, setup) as crew:
            book = crew.greetings()
            measured = round_trip(network, 0, book[-1][1][0])
            contribution, averages, _ = crew.ask("meet", book)[0]
            size = (peers - 1) * (contribution + averages) // peers
            ports = crew.ask("listen")
            alone: dict[str, list[float]] = {"tcp": [], "libp2p": [], "streams": []}
            rounds: dict[str, list[Row]] = {"equal": []} if equal else {"equal": [], "by rate": [], "as measured": []}
            number = 0
            for repeat in range(options.repeats + 1):
                if equal:
                    one = round(size / (peers - 1) / 2)
                    for way, order in (("tcp", ("push_tcp", one, ports)), ("libp2p", ("push", one, BARE)),
                                       ("streams", ("push", one, STREAMS))):  # fmt: skip
                        spans = crew.ask(*order)
                        alone[way].append(max(end for _, end in spans) - min(begin for begin, _ in spans))
                for parts, done in rounds.items():
                    number += 1
                    crew.ask("let_go")
                    own = parts == "as measured"
                    rates = [(mbit * 1e6 / 8, mbit * 1e6 / 8) for mbit in links] if parts == "by rate" else None
                    if own and repeat:
                        rates = crew.ask("stated")
                    before = network.sent()
                    answers = crew.ask("round", number, rates, own)
                    sent = sum(crew.ask("sent"))
                    wire = [after - at for after, at in zip(network.sent(), before, strict=True)]
                    if repeat:
                        done.append(_row(answers, links, (contribution, averages), sent, wire) | {"stated": rates})
                    elif own:
                        for index in range(peers):
                            crew.tell(index, ("probe",))
    rows = []
    for parts, done in rounds.items():
        median = sorted(done, key=lambda row: row["seconds"])[(len(done) - 1) // 2]
        row = settings(links, rtt, options) | median | {
            "measured_ms": 1000 * measured, "parts": parts, "millions": params / 1e6,
            "contribution": contribution, "averages": averages, "all": [one["seconds"] for one in done],
            "slowest": max(one["seconds"] for one in done), "ratio": (median["seconds"] - 2 * rtt) / median["ideal"],
        }  # fmt: skip
        for way, seconds in alone.items():
            if seconds:
                row[f"{way}_all"] = seconds
                row[f"{way}_ratio"] = (statistics.median_low(seconds[1:]) - 2 * rtt) / row["ideal"]
        rows.append(row | stamp())
    return rows


def _row(
    answers: list[dict[str, Any]], links: list[float], encoded: tuple[int, int], sent: int, wire: list[int]
) -> Row:
    """encoded: bytes of the fragment as a contribution and as averages."""
    began = min(answer["began"] for answer in answers)
    parts = dict(answers[0]["parts"])
    total, others = sum(parts.values()), len(links) - 1
    contribution, averages = encoded
    ideal_bytes = others * (contribution + averages)

    def least(share: float) -> float:
        """Bytes that a peer with this share of the parts sends or receives, whichever is more: the rest of one
        contribution, and its averages to all others; theirs, and the rest of the averages."""
        up = (1 - share) * contribution + others * share * averages
        return max(up, others * share * contribution + (1 - share) * averages)

    ideal = max(least(parts.get(index, 0) / total) / (mbit * 1e6 / 8) for index, mbit in enumerate(links))
    seconds = max(answer["whole"] for answer in answers) - began
    return {
        "ideal": ideal, "seconds": seconds, "wire_ratio": sum(wire) / ideal_bytes,
        "busy": max(8 * carried / (1e6 * mbit * seconds) for carried, mbit in zip(wire, links, strict=True)),
        "commit_seconds": max(answer["committed"] for answer in answers) - began,
        "bytes_ratio": sent / ideal_bytes,
        "cpu": sum(answer["cpu"] + answer["daemon_cpu"] for answer in answers),
    }  # fmt: skip


def _default() -> str:
    """TCP's congestion control on this machine."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return ""


def main() -> int:
    from atoll.protocol.codecs import CODECS

    # What is averaged here is a vector, without matrices in it.
    codecs = [name for name in CODECS if name != "lowrank"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="*", default=[20, 100, 500], help="a row each, all links alike")
    parser.add_argument("--unequal", type=float, nargs="+", help="Mbit/s of each peer's link, for three rows more")
    parser.add_argument("--rtt", type=float, nargs="+", default=[20, 100], help="milliseconds")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--params", type=int, default=0, help="default: 10, 40, 100 million at 20, 100, 500 Mbit/s")
    parser.add_argument("--codec", default="int8", choices=codecs)
    parser.add_argument("--chunk", type=int, default=0, help="elements in a chunk (default: as a new run would have)")
    parser.add_argument("--congestion", default=_default(), help="TCP's control of it (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds after the one that warms up; the median counts")
    parser.add_argument("--json", type=Path, help="write the rows there, and leave out what it has of this commit")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    end_on_sigterm()

    rows = read_rows(options.json)
    wanted = [[mbit] * options.peers for mbit in options.mbit] + ([options.unequal] if options.unequal else [])
    pairs = [(links, rtt) for links in wanted for rtt in options.rtt]
    shown: list[Row] = []
    for links, rtt in pairs:
        wanted_row = settings(links, rtt / 1000, options)
        if found := [row for row in rows if same(row, wanted_row)]:
            shown += found
            continue
        try:
            found = measure(links, rtt / 1000, options)
        except Unavailable as error:
            print(f"links cannot be shaped on this machine: {error}", file=sys.stderr)
            return 7
        rows += found
        shown += found
        write_rows(options.json, rows)
    print(table(shown, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
