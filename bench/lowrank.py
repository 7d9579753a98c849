"""Which way of low rank for ``lowrank``: ``python -m bench.lowrank``.

Loss of short runs of four simulated peers (a byte model of 0.13M parameters, as :mod:`bench.codec_levels`) whose
pseudo-gradients travel as factors, packed by int4, with error feedback, and the bytes of a contribution and of the
averages. The ways differ in who chooses the directions, and in what is averaged:

  two phases  PowerSGD (arXiv 1905.13727): all share Q; the mean of M·Q, made orthonormal, is P; the mean of Mᵀ·P is
              the next Q. Two averages a round.
  own         each peer sends the best factors of its own matrix; the reducer sends the mean whole, as int8.
  turns       ACP-SGD (arXiv 2306.08881): all share one side, in one round the right, in the next the left one, and send
              the other.
  momentum    ``lowrank``: both sides' directions are those of the outer momentum (:mod:`atoll.protocol.lowrank`).
"""

from __future__ import annotations

import argparse
import os
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from bench._common import Row, stamp, table, write_rows
from bench.codec_levels import MODEL, PEERS, STEPS
from numpy.typing import NDArray

from atoll.node.config import DataConfig, InnerConfig, ModelConfig
from atoll.node.evaluate import Evaluator
from atoll.node.learner import Learner
from atoll.node.specs import tensor_specs
from atoll.protocol import lowrank
from atoll.protocol.codecs import get_codec
from atoll.protocol.outer import outer_step
from atoll.protocol.theta0 import theta0

Floats = NDArray[np.float32]


def through(name: str, values: Floats) -> tuple[Floats, int]:
    codec = get_codec(name)
    flat = np.ascontiguousarray(values.T if values.ndim == 2 else values).reshape(-1)
    payload = codec.encode(flat)
    out = np.empty_like(flat)
    codec.decode(payload, flat.size, out)
    return (out.reshape(values.T.shape).T if values.ndim == 2 else out), len(payload)


class Way:
    """One matrix in one round: what each peer sends, decoded, and the mean as all decode it."""

    def __init__(self, rank: int, back: str) -> None:
        self.rank, self.back = rank, back
        self.kept: dict[str, Any] = {}
        self.sent = self.received = 0

    def pack(self, values: Floats) -> Floats:
        out, size = through("int4", values)
        self.sent += size
        return out

    def mean(self, values: Sequence[Floats]) -> Floats:
        out, size = through(self.back, np.mean(values, axis=0, dtype=np.float32))
        self.received += size
        return out

    def reduce(self, name: str, xs: list[Floats], momentum: Floats) -> tuple[list[Floats], Floats]:
        raise NotImplementedError


def basis(matrix: Floats) -> Floats:
    return np.linalg.qr(matrix.astype(np.float64))[0].astype(np.float32)


class TwoPhases(Way):
    def reduce(self, name: str, xs: list[Floats], momentum: Floats) -> tuple[list[Floats], Floats]:
        if name not in self.kept:
            self.kept[name] = np.random.default_rng(0).standard_normal((xs[0].shape[1], self.rank)).astype(np.float32)
        p = basis(self.mean([self.pack(x @ self.kept[name]) for x in xs]))
        right = [self.pack(x.T @ p) for x in xs]
        mean = self.mean(right)
        self.kept[name] = mean
        return [p @ q.T for q in right], p @ mean.T


class Own(Way):
    def reduce(self, name: str, xs: list[Floats], momentum: Floats) -> tuple[list[Floats], Floats]:
        sent = []
        for x in xs:
            u, s, v = np.linalg.svd(x, full_matrices=False)
            a, c = self.pack(u[:, : self.rank]), self.pack((s[: self.rank, None] * v[: self.rank]).T)
            sent.append(a @ c.T)
        return sent, self.mean([np.ascontiguousarray(s) for s in sent])


class Turns(Way):
    def reduce(self, name: str, xs: list[Floats], momentum: Floats) -> tuple[list[Floats], Floats]:
        if name not in self.kept:
            first = np.random.default_rng(0).standard_normal((xs[0].shape[1], self.rank)).astype(np.float32)
            self.kept[name] = (True, basis(first))
        right, q = self.kept[name]
        sent = [self.pack(x @ q if right else x.T @ q) for x in xs]
        mean = self.mean(sent)
        self.kept[name] = (not right, basis(mean))
        both = [s @ q.T if right else q @ s.T for s in [*sent, mean]]
        return both[:-1], both[-1]


class TurnsMomentum(Way):
    """Turns with the direction taken from the momentum."""

    def reduce(self, name: str, xs: list[Floats], momentum: Floats) -> tuple[list[Floats], Floats]:
        right = self.kept[name] = not self.kept.get(name, False)
        m, n = xs[0].shape
        part = lowrank.Segment(lowrank.Piece(0, m, n, 1), self.rank, 0, 0, 0)
        found = lowrank.directions([part], np.ascontiguousarray(momentum).reshape(-1))[0]
        assert found is not None
        u, q = found
        q = (q if right else u).reshape(self.rank, -1).T
        sent = [self.pack(x @ q if right else x.T @ q) for x in xs]
        mean = self.mean(sent)
        both = [s @ q.T if right else q @ s.T for s in [*sent, mean]]
        return both[:-1], both[-1]


class Momentum(Way):
    def reduce(self, name: str, xs: list[Floats], momentum: Floats) -> tuple[list[Floats], Floats]:
        m, n = xs[0].shape
        parts = lowrank.segments((lowrank.Piece(0, m, n, zlib.crc32(name.encode()) % 1000),), self.rank)
        found = lowrank.directions(parts, np.ascontiguousarray(momentum).reshape(-1))

        def out(values: Floats) -> Floats:
            result = np.empty(m * n, np.float32)
            lowrank.expand(parts, found, values, result)
            return result.reshape(m, n)

        sent = [self.pack(lowrank.project(parts, found, np.ascontiguousarray(x).reshape(-1))) for x in xs]
        return [out(s) for s in sent], out(self.mean(sent))


class Exact(Momentum):
    """The same, without the codec (how much is the rank's)."""

    def pack(self, values: Floats) -> Floats:
        super().pack(values)
        return values

    def mean(self, values: Sequence[Floats]) -> Floats:
        super().mean(values)
        return np.mean(values, axis=0, dtype=np.float32)


class Whole(Way):
    def reduce(self, name: str, xs: list[Floats], momentum: Floats) -> tuple[list[Floats], Floats]:
        sent = [self.pack(x) for x in xs]
        return sent, self.mean(sent)


def train(way: Way, *, rounds: int, optimizer: str, lr: float, mu: float, beta: float) -> tuple[float, float]:
    model, inner = ModelConfig.from_table(MODEL), InnerConfig.from_table({"batch": 4, "optimizer": optimizer})
    evaluator = Evaluator(model, DataConfig())
    specs = tensor_specs(model)
    world = theta0(model.seed, specs)
    momentum = np.zeros_like(world)
    peers = [
        Learner(model, inner, STEPS, rounds, evaluator.corpus.train, world.copy(), device="cpu") for _ in range(PEERS)
    ]
    residuals = [np.zeros_like(world) for _ in peers]
    cursor = 0
    whole = Whole(0, way.back)
    share = []
    for outer in range(rounds):
        xs = []
        for peer, residual in zip(peers, residuals, strict=True):
            for step in range(STEPS):
                peer.step(np.arange(cursor, cursor + 4), outer, step)
                cursor += 4
            xs.append(world - peer.host.numpy() + np.float32(beta) * residual)
        mean, at = np.empty_like(world), 0
        before = np.mean(xs, axis=0)
        for spec in specs:
            part = slice(at, at + spec.size)
            at += spec.size
            low = len(spec.shape) == 2 and lowrank.gains(*spec.shape, way.rank)
            kind = way if low else whole
            shape = spec.shape if low else (spec.size,)
            sent, mean_ = kind.reduce(spec.name, [x[part].reshape(shape) for x in xs], momentum[part].reshape(shape))
            mean[part] = mean_.reshape(-1)
            for x, residual, s in zip(xs, residuals, sent, strict=True):
                residual[part] = x[part] - s.reshape(-1)
        share.append(1 - float(np.sum((before - mean) ** 2) / np.sum(before**2)))
        outer_step(world, momentum, mean, lr, mu)
        for peer in peers:
            peer.host.copy_(torch.from_numpy(world))
    way.sent += whole.sent
    way.received += whole.received
    return evaluator.loss(world), float(np.mean(share[rounds // 2 :]))


WAYS: dict[str, Callable[[int, str], Way]] = {
    "whole": Whole,
    "two phases": TwoPhases,
    "own": Own,
    "turns": Turns,
    "turns, momentum": TurnsMomentum,
    "momentum": Momentum,
    "momentum, float32": Exact,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each run (default: %(default)s)")
    parser.add_argument("--only", default="", help="comma-separated names of ways; none: all")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--back", default="int8", help="codec of averages (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.7)
    parser.add_argument("--mu", type=float, default=0.6)
    parser.add_argument("--beta", type=float, default=1.0)
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, make in WAYS.items():
        if options.only and name not in options.only.split(","):
            continue
        began = time.process_time()
        way = make(options.rank, options.back)
        loss, share = train(
            way, rounds=options.rounds, optimizer=options.optimizer, lr=options.lr, mu=options.mu, beta=options.beta
        )
        parameters = sum(spec.size for spec in tensor_specs(ModelConfig.from_table(MODEL)))
        sent, received = way.sent / options.rounds / PEERS, way.received / options.rounds
        settings = {key: value for key, value in vars(options).items() if key not in ("only", "json")}
        rows.append(
            {
                "way": name,
                **settings,
                "loss": loss,
                "taken": share,
                "sent": 4 * parameters / sent,
                "received": 4 * parameters / received,
                "seconds": time.process_time() - began,
                **stamp(),
            }
        )
        print(rows[-1], flush=True)
        write_rows(options.json, rows)
    print(
        table(
            rows,
            [
                ("way", "way", ""),
                ("loss", "nats/byte", ".3f"),
                ("taken", "taken of x", ".3f"),
                ("sent", "float32 / sent", ".1f"),
                ("received", "float32 / received", ".1f"),
                ("seconds", "CPU s", ".0f"),
            ],
        )
    )


if __name__ == "__main__":
    main()
