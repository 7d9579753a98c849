"""Which levels for ``int4``, and what lossy codecs cost in loss: ``python -m bench.codec_levels``.

First the error (norm of what is lost over the norm of the values) of several sets of levels in blocks of 64 with the
scales of ``int8``, on normally distributed values, on Student's t with three degrees of freedom, and on
pseudo-gradients of a small byte model after its first and a later round. Then the loss of short runs of four simulated
peers in which contributions and means pass through each codec, with and without error feedback.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from bench._common import Row, stamp, table, write_rows
from numpy.typing import NDArray

from atoll.node.config import DataConfig, InnerConfig, ModelConfig
from atoll.node.evaluate import Evaluator
from atoll.node.learner import Learner
from atoll.node.specs import tensor_specs
from atoll.protocol.codecs import Codec, averages_codec, get_codec
from atoll.protocol.kernels_numba import INT4_LEVELS
from atoll.protocol.outer import outer_step
from atoll.protocol.theta0 import theta0

Floats = NDArray[np.float32]
PEERS, STEPS = 4, 20
MODEL = {"width": 64, "heads": 2, "kv_heads": 2, "ffn": 176, "context": 64}

LEVELS: dict[str, tuple[Any, bool]] = {
    "plain, 15 levels": (np.arange(-7, 8) / 7, False),
    "plain, 16 levels, signed scale": (np.arange(-8, 8) / 8, True),
    "E3M0": (np.concatenate([-(2.0 ** -np.arange(7)), [0], 2.0 ** -np.arange(7)]), False),
    "NF4 in 127ths (int4)": (INT4_LEVELS / 127, False),
    # Lloyd's algorithm on blocks of normally distributed values; with a signed scale -1 is not needed
    "fitted to normal": (
        np.array([-127, -95, -73, -55, -40, -26, -13, 0, 11, 22, 34, 47, 61, 78, 98, 127]) / 127, False,
    ),
    "fitted to normal, signed scale": (
        np.array([-109, -85, -67, -51, -38, -25, -12, 0, 12, 24, 36, 49, 63, 79, 100, 127]) / 127, True,
    ),
}  # fmt: skip
"""Levels as shares of the largest magnitude; with a signed scale that value itself always becomes the outermost."""


def quantized(values: Floats, levels: Any, signed: bool) -> Floats:
    """``values`` (any length) after one trip through these levels."""
    levels = np.sort(np.asarray(levels, np.float64))
    rows = np.pad(values, (0, -values.size % 64)).reshape(-1, 64)
    at = np.abs(rows).argmax(axis=1)
    worst = np.take_along_axis(rows, at[:, None], axis=1)[:, 0]
    bits = (np.abs(worst).view(np.uint32) + 0xFFFF) >> 16
    scales = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    scales[bits == 0] = 1
    if signed:
        scales *= np.where(worst < 0, -1, 1) * np.sign(levels[np.abs(levels).argmax()])
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, rows / scales[:, None])
    out: Floats = (levels[codes] * scales[:, None]).astype(np.float32).reshape(-1)[: values.size]
    return out


def through(name: str | Codec) -> Callable[[Floats], Floats]:
    codec = get_codec(name) if isinstance(name, str) else name

    def trip(values: Floats) -> Floats:
        out = np.empty_like(values)
        codec.decode(memoryview(codec.encode(values)), values.size, out)
        return out

    return trip


def train(
    send: Callable[[Floats], Floats],
    mean_through: Callable[[Floats], Floats],
    beta: float,
    *,
    rounds: int,
    optimizer: str = "muon",
    lr: float = 0.7,
    mu: float = 0.6,
    keep: dict[str, Floats] | None = None,
) -> float:
    """Loss (nats a byte) of the global parameters after ``rounds`` rounds. keep: gets pseudo-gradients."""
    model, inner = ModelConfig.from_table(MODEL), InnerConfig.from_table({"batch": 4, "optimizer": optimizer})
    evaluator = Evaluator(model, DataConfig())
    world = theta0(model.seed, tensor_specs(model))
    momentum = np.zeros_like(world)
    peers = [
        Learner(model, inner, STEPS, rounds, evaluator.corpus.train, world.copy(), device="cpu") for _ in range(PEERS)
    ]
    residuals = [np.zeros_like(world) for _ in peers]
    cursor = 0
    for outer in range(rounds):
        mean = np.zeros_like(world)
        for peer, residual in zip(peers, residuals, strict=True):
            for step in range(STEPS):
                peer.step(np.arange(cursor, cursor + 4), outer, step)
                cursor += 4
            delta = world - peer.host.numpy()
            if keep is not None and peer is peers[0]:
                keep[f"{optimizer}, round {outer + 1}"] = delta.copy()
            x = delta + np.float32(beta) * residual
            sent = send(x)
            residual[:] = x - sent
            mean += sent * np.float32(1 / PEERS)
        outer_step(world, momentum, mean_through(mean), lr, mu)
        for peer in peers:
            peer.host.copy_(torch.from_numpy(world))
    return evaluator.loss(world)


def errors(sets: dict[str, Callable[[Floats], Floats]]) -> list[Row]:
    """Print and return the error of each set of levels on each kind of data."""
    rng = np.random.default_rng(0)
    data: dict[str, Floats] = {
        "normal": rng.standard_normal(1 << 20).astype(np.float32),
        "t3": rng.standard_t(3, 1 << 20).astype(np.float32),
    }
    for optimizer in ("muon", "adamw"):
        kept: dict[str, Floats] = {}
        train(through("float32"), through("float32"), 0, rounds=4, optimizer=optimizer, keep=kept)
        data |= {name: delta for name, delta in kept.items() if name.endswith((" 1", " 4"))}
    rows: list[Row] = []
    for name, trip in {**sets, "int8": through("int8"), "sparse": through("sparse")}.items():
        row: Row = {"levels": name}
        for what, values in data.items():
            row[what] = float(np.linalg.norm(trip(values) - values) / np.linalg.norm(values))
        rows.append(row)
    print(table(rows, [("levels", "error", ""), *[(what, what, ".4f") for what in data]]), "\n", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each run (default: %(default)s); 0: none")
    parser.add_argument("--only", default="", help="train only with codecs whose name contains this, without errors")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(1)

    sets: dict[str, Callable[[Floats], Floats]] = {
        name: partial(quantized, levels=levels, signed=signed) for name, (levels, signed) in LEVELS.items()
    }
    rows = [] if options.only else [row | stamp() for row in errors(sets)]
    write_rows(options.json, rows)
    if not options.rounds:
        return

    exact = through("float32")
    plain, e3m0, int4 = sets["plain, 15 levels"], sets["E3M0"], through("int4")
    sparse, union = through("sparse"), through(averages_codec("sparse"))
    runs: list[tuple[str, Callable[[Floats], Floats], Callable[[Floats], Floats], float, float, float]] = [
        ("float32", exact, exact, 0, 0.7, 0.6),
        ("int8", through("int8"), through("int8"), 1, 0.7, 0.6),
        *[
            (name, trip, trip, beta, 0.7, 0.6)
            for name, trip in (("int4", int4), ("plain", plain), ("E3M0", e3m0))
            for beta in (0, 1)
        ],
        ("sparse, means union", sparse, union, 0, 0.7, 0.6),
        ("sparse, means union", sparse, union, 0.95, 0.7, 0.6),
        ("sparse, means union", sparse, union, 0.95, 1, 0),
        ("sparse, means sparse", sparse, sparse, 0.95, 1, 0),
    ]
    losses: list[Row] = []
    for name, send, back, beta, lr, mu in [run for run in runs if options.only in run[0]]:
        loss = train(send, back, beta, rounds=options.rounds, lr=lr, mu=mu)
        losses.append({"codec": name, "feedback": beta, "outer lr": lr, "momentum": mu, "loss": loss})
        losses[-1] |= {"rounds": options.rounds} | stamp()
        print(losses[-1], flush=True)
        write_rows(options.json, rows + losses)
    columns = [("codec", "codec", ""), ("feedback", "error feedback", ""), ("outer lr", "outer lr", "")]
    print(table(losses, [*columns, ("momentum", "momentum", ""), ("loss", "nats/byte", ".3f")]))


if __name__ == "__main__":
    main()
