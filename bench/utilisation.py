"""How much of the time machines compute on a slow link, and what they learn in it: ``python -m bench.utilisation``.

A real swarm, ``atoll node`` processes that train on Python's standard library, each in a network namespace behind a
link of so many Mbit/s up and as many down, with a round trip of so many milliseconds between any two (20 Mbit/s and
100 ms: the link of ``atoll compare --link 20mbit,50ms``, which says what one way takes). Two settings one after the
other, alike but for what is compared:

``plain``       DiLoCo, float16, the whole model at once, trainers stand still while a round is in flight
``overlapped``  fragments, int4, inner steps go on

``in steps`` is the share of the time that trainers spent in inner steps, by their own account (``trained`` in their
event logs), from a node's first commit (of leases: before it nobody has samples) to its last; the mean of the nodes,
``least`` the least of them. ``held``: kept from them by rounds, or to be saved; ``waited``: without samples. ``loss``:
nats per byte of the global parameters on the whole held-out text, as the last checkpoint within ``--seconds`` of the
first commit holds them; the curve (``--json``) is scored on an eighth of it. ``sent``: what a node sends, ``on the
wire`` with all headers; ``link busy``: the share of the uplinks' capacity that this is. The learning rate is constant,
so that runs of equal time compare, whatever they have got done.

All trainers share this machine's cores with one another, with the nodes and with the emulated links: a step takes as
long as that makes it (``step ms``), which is part of ``in steps``. So choose the model and H for which a round's steps
take about as long as its transfer. Needs root, and a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.node import checkpoint
from atoll.node.swarm.processes import Child, Family, Interrupts, child_environment
from atoll.protocol.errors import AtollError

from ._common import Failed, Row, end_on_sigterm, read_rows, same, stamp, table, write_rows
from ._network import Network, Unavailable, round_trip

SETTINGS = ("plain", "overlapped")
COLUMNS = [
    ("setting", "setting", "s"), ("codec", "codec", "s"), ("fragments", "P", "d"), ("overlap", "overlap", "d"),
    ("mbit", "Mbit/s", "g"), ("measured_ms", "round trip ms", ".0f"), ("millions", "M params", ".1f"),
    ("seconds", "s", ".0f"), ("trained", "in steps", ".1%"), ("least", "least", ".1%"), ("held", "held", ".1%"),
    ("waited", "waited", ".1%"), ("step_ms", "step ms", ".0f"), ("rounds", "rounds", ".1f"),
    ("round_seconds", "averaging s", ".1f"), ("tokens", "tokens", "d"), ("loss", "loss", ".4f"),
    ("sent_mb", "sent MB", ".0f"), ("wire_mb", "on the wire MB", ".0f"), ("busy", "link busy", ".2f"),
    ("voids", "void", "d"), ("load", "load", ".1f"),
]  # fmt: skip
TICK = 0.25
START_PATIENCE = 300.0
"""Seconds until all nodes have made their first commit."""
ROUNDS = 1000
"""Of the manifest: more than fit into the time."""
CURVE_SHARE = 8
"""The curve is scored on every eighth batch of the held-out text."""


@dataclass
class Account:
    """What a node's event log has told so far."""

    commits: list[dict[str, Any]] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    """By commit."""
    voids: int = 0

    def add(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "commit":
            self.commits.append(event)
        elif kind == "progress":
            self.progress = event
        elif kind == "digest":
            self.digests[event["commit"]] = event["digest"]
        elif kind == "void" and event.get("roster"):
            self.voids += 1

    def shares(self, until: float) -> dict[str, float]:
        """Of the time between the first commit and the last one until then."""
        first, last = self.commits[0], [commit for commit in self.commits if commit["t"] <= until][-1]
        seconds = last["t"] - first["t"]
        if seconds <= 0:
            raise Failed("there was no commit but the first one: give it more --seconds, or smaller rounds")
        return {name: (last[name] - first[name]) / seconds for name in ("trained", "held", "waited")}


@dataclass
class Swarm:
    """Node processes in their namespaces, and what they have told."""

    network: Network
    folder: Path
    interrupts: Interrupts
    family: Family
    nodes: list[Child] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    kept: list[tuple[float, int, Path]] = field(default_factory=list)
    """Time, tokens and parameters of the checkpoints that the first node has written."""
    round_trip: float = 0.0
    """Measured, in seconds, before there are nodes."""
    wire: list[int] = field(default_factory=list)
    """Bytes that each node had put on its link at the first commit."""

    def start(self, count: int) -> None:
        """The bootstrap peer in the last namespace, nodes in the others."""
        env, file = child_environment(1), self.folder / "address"
        host = len(self.network.names) - 1
        bootstrap = self._child("bootstrap", host, env, "bootstrap", "--manifest", str(self.folder / "run.toml"),
                                "--address-file", str(file))  # fmt: skip
        deadline = time.monotonic() + START_PATIENCE
        while not file.exists():
            self._look([bootstrap], deadline)
        self.round_trip = round_trip(self.network, 0, file.read_text().split("@", 1)[1].split(",")[0])
        for index in range(count):
            name = f"node-{index}"
            options = ["--name", name, "--device", "cpu", "--threads", "1", "--log", "plain", "--timeout", "120"]
            self.nodes.append(self._child(name, index, env, "node", f"@{file}", *options))
            self.accounts.append(Account())

    def _child(self, name: str, host: int, env: dict[str, str], *command: str) -> Child:
        folder, listen = self.folder / name, f"/ip4/{self.network.addresses[host]}/tcp/0"
        arguments = ["bench._inside", self.network.names[host], "atoll", *command]
        return self.family.start(name, folder, [*arguments, "--state", str(folder), "--listen", listen], env)

    def _look(self, children: list[Child], deadline: float) -> None:
        """Wait a moment. Raises when somebody has ended, or the time is over."""
        if self.interrupts.wait(TICK):
            raise KeyboardInterrupt
        for child in children:
            if child.code is not None:
                raise Failed(f"{child.name} ended with code {child.code}: {child.last_words()}")
        if time.monotonic() > deadline:
            raise Failed(f"no first commit within {START_PATIENCE:.0f} s; see the nodes' output")

    def follow(self) -> None:
        """Read what the nodes have told, and keep the first one's checkpoints, of which it keeps but the newest."""
        for child, account in zip(self.nodes, self.accounts, strict=True):
            for event in child.events():
                account.add(event)
                if event["event"] == "checkpoint" and account is self.accounts[0]:
                    self._keep(event)

    def _keep(self, event: dict[str, Any]) -> None:
        at = next(c for c in reversed(self.accounts[0].commits) if c["outer_step"] == event["outer_step"])
        kept = checkpoint.keep(Path(event["path"]), self.folder / "kept")
        if kept is not None:  # else it was gone already
            self.kept.append((at["t"], at["tokens"], kept))

    def run(self, seconds: float) -> tuple[float, float]:
        """Wait for the first commit, then so long; when they began and ended (wall clock)."""
        deadline = time.monotonic() + START_PATIENCE
        while not all(account.commits for account in self.accounts):
            self._look(self.nodes, deadline)
            self.follow()
        began, self.wire = self.accounts[0].commits[0]["t"], self.network.sent()
        while time.time() < began + seconds:
            self._look(self.nodes, float("inf"))
            self.follow()
        return began, began + seconds

    def stop(self) -> None:
        self.family.stop([child.name for child in self.nodes], self.interrupts, number=signal.SIGTERM, patience=30)
        self.follow()


def asked(setting: str, options: argparse.Namespace) -> Row:
    """What a row is measured with: the part of it by which it is found again, and beside which others may stand."""
    several = setting == "overlapped"
    return {
        "setting": setting, "codec": "int4" if several else "float16", "fragments": options.fragments if several else 1,
        "overlap": options.overlap if several else 0, "mbit": options.mbit, "rtt_ms": options.rtt,
        "peers": options.peers, "congestion": options.congestion, "preset": options.preset,
        "inner_steps": options.steps, "batch": options.batch, "context": options.context, "lr": options.lr,
        "asked_seconds": options.seconds,
    }  # fmt: skip


def found(rows: list[Row], wanted: Row) -> Row | None:
    """The newest row that was measured with all that, on this commit and machine."""
    return next((row for row in reversed(rows) if same(row, wanted)), None)


def fresh(place: Path, name: str) -> Path:
    """A folder that isn't there yet: an earlier run's may be."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(folder for each in names if not (folder := place / each).exists())


def measure(setting: str, options: argparse.Namespace, folder: Path) -> Row:
    from atoll.node.run_defaults import new_manifest
    from atoll.protocol.identity import load_or_create_identity

    row = asked(setting, options)
    codec, parts = row["codec"], row["fragments"]
    several = {"fragments": parts, "overlap": row["overlap"]} if setting == "overlapped" else {}
    manifest = new_manifest(
        f"utilisation-{setting}", preset=options.preset, model={"context": options.context}, batch=options.batch,
        optimizer="adamw", lr=options.lr, inner={"final_lr": 1.0, "warmup": 1 / ROUNDS}, inner_steps=options.steps,
        quorum=options.peers, codec=codec, rounds=ROUNDS, state={"checkpoint_every": parts}, **several,
    )  # fmt: skip
    folder.mkdir()
    manifest = manifest.sign(load_or_create_identity(folder / "owner.key"))
    (folder / "run.toml").write_text(manifest.to_toml())
    load = os.getloadavg()[0]
    links = [options.mbit] * (options.peers + 1)
    with (
        Network(links, options.rtt / 1000, options.congestion) as network,
        Interrupts() as interrupts,
        Family() as family,
    ):
        swarm = Swarm(network, folder, interrupts, family)
        swarm.start(options.peers)
        began, ended = swarm.run(options.seconds)
        wire = [now - before for now, before in zip(network.sent(), swarm.wire, strict=True)][: options.peers]
        row |= _row(swarm, began, ended)
        swarm.stop()
    step, curve = _scores(manifest, swarm, began, ended)
    seconds = ended - began
    return row | curve | {
        "measured_ms": 1000 * swarm.round_trip, "millions": manifest.state.parameters / 1e6,
        "wire_mb": statistics.fmean(wire) / 1e6, "load": load, "cores": os.cpu_count(), "last_step": step,
        "rounds": row["outer_steps"] / parts,
        "busy": statistics.fmean(wire) * 8 / (options.mbit * 1e6 * seconds),
    }  # fmt: skip


def _row(swarm: Swarm, began: float, ended: float) -> Row:
    shares = [account.shares(ended) for account in swarm.accounts]
    commits = [commit for commit in swarm.accounts[0].commits if commit["t"] <= ended]
    seconds = [commit["seconds"] for commit in commits if commit["outer_step"]]
    digests: dict[str, set[str]] = {}
    for account in swarm.accounts:
        for commit, digest in account.digests.items():
            digests.setdefault(commit, set()).add(digest)
    if unequal := [commit for commit, found in digests.items() if len(found) > 1]:
        raise Failed(f"the nodes' digests differ after {', '.join(unequal)}")
    return {
        "seconds": commits[-1]["t"] - began, "nodes": shares,
        **{name: statistics.fmean(share[name] for share in shares) for name in shares[0]},
        "least": min(share["trained"] for share in shares), "outer_steps": commits[-1]["outer_step"],
        "commits": len(commits), "tokens": commits[-1]["tokens"], "voids": max(a.voids for a in swarm.accounts),
        "members": statistics.fmean(len(commit["members"]) for commit in commits),
        "round_seconds": statistics.median(seconds) if seconds else None,
        "step_ms": 1000 * statistics.fmean(account.progress["step_time"] for account in swarm.accounts),
        "sent_mb": statistics.fmean(account.progress["bytes_sent"] for account in swarm.accounts) / 1e6,
    }  # fmt: skip


def _scores(manifest: Any, swarm: Swarm, began: float, ended: float) -> tuple[int, Row]:
    """Outer steps of the last checkpoint in time; its loss, and the curve: seconds, tokens, loss on a sample."""
    from atoll.node.evaluate import Evaluator
    from atoll.node.run_defaults import Tables
    from atoll.node.specs import tensor_specs
    from atoll.protocol.theta0 import theta0

    tables = Tables.of(manifest.model_dump())
    evaluator = Evaluator(tables.model, tables.data)
    start = theta0(tables.model.seed, tensor_specs(tables.model))
    curve: list[list[float]] = [[0.0, 0, evaluator.loss(start, CURVE_SHARE)]]
    last = start, 0
    for at, tokens, path in swarm.kept:
        if at <= ended:
            found = checkpoint.load(path)
            last = found.params, found.metadata.outer_step
            curve.append([at - began, tokens, evaluator.loss(found.params, CURVE_SHARE)])
    return last[1], {"loss": evaluator.loss(last[0]), "curve": curve}


def reached(curve: list[list[float]], loss: float) -> float | None:
    """Seconds at which a curve has come down to this loss, between its points along straight lines."""
    for (before, _, high), (after, _, low) in itertools.pairwise(curve):
        if low <= loss:
            return before + (after - before) * ((high - loss) / (high - low) if high > low else 1.0)
    return None


def _compared(plain: Row, other: Row) -> str:
    seconds = reached(other["curve"], plain["curve"][-1][2])
    return (
        f"after {plain['asked_seconds']:.0f} s: in inner steps {plain['trained']:.1%} plain, {other['trained']:.1%} "
        f"overlapped; loss {plain['loss']:.4f} plain, {other['loss']:.4f} overlapped"
        + (f", which was at plain's last loss after {seconds:.0f} s" if seconds is not None else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seconds", type=float, default=600, help="from the first commit, of each setting")
    parser.add_argument("--mbit", type=float, default=20)
    parser.add_argument("--rtt", type=float, default=100, help="milliseconds")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--preset", default="10m", help="size of the model")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=32, help="inner steps in a round (H)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--fragments", type=int, default=4, help="P, overlapped")
    parser.add_argument("--overlap", type=int, default=8, help="inner steps that may run ahead, overlapped")
    parser.add_argument("--congestion", default="", help="TCP's control of it (default: this machine's)")
    parser.add_argument("--folder", type=Path, help="where the nodes' folders go, and stay (default: none stays)")
    parser.add_argument("--json", type=Path, help="write the rows there, and leave out what it has of this commit")
    options = parser.parse_args()
    end_on_sigterm()
    rows = read_rows(options.json)
    with contextlib.ExitStack() as stack:
        if options.folder is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-utilisation-")))
        else:
            place = options.folder
            place.mkdir(parents=True, exist_ok=True)
        for setting in options.settings:
            if found(rows, asked(setting, options)) is not None:
                continue
            try:
                rows.append(measure(setting, options, fresh(place, setting)) | stamp())
            except Unavailable as error:
                print(f"links cannot be shaped on this machine: {error}", file=sys.stderr)
                return 7
            except Failed as error:
                print(f"{setting}: {error}", file=sys.stderr)
                return 1
            except AtollError as error:
                print(f"{setting}: {error}", file=sys.stderr)
                return error.exit_code
            except KeyboardInterrupt:
                return 130
            write_rows(options.json, rows)
    # Rows of other options may stand in the same file.
    own = {setting: row for setting in SETTINGS if (row := found(rows, asked(setting, options))) is not None}
    print(table([row for setting, row in own.items() if setting in options.settings], COLUMNS))
    if len(own) == len(SETTINGS):
        print(_compared(own["plain"], own["overlapped"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
