"""A small study of the demonstration's defaults: one factor at a time, at equal CPU time.

Peers of a simulated swarm take turns in this process: each does H inner steps, then the mean of their encoded
pseudo-gradients makes one outer step (DiLoCo, arXiv:2311.08105), with the codecs and the outer kernel of the
protocol. For every variant the speed is measured first, and the number of rounds chosen so that it trains for the same
CPU time; schedules end with the run. ::

    python -m bench.learning_sweep --cpu-seconds 60 --write docs/study-default.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# one thread here and everywhere: the figures are per CPU second

import numpy as np
import torch
from bench._common import Row, stamp, write_rows

from atoll.node.config import DataConfig, InnerConfig, ModelConfig
from atoll.node.evaluate import Evaluator
from atoll.node.learner import Learner
from atoll.node.specs import count_parameters, tensor_specs
from atoll.protocol.codecs import get_codec
from atoll.protocol.outer import outer_step
from atoll.protocol.theta0 import theta0

PEERS = 4


@dataclass
class Variant:
    """What differs from the defaults of presets.py."""

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    inner: dict[str, Any] = field(default_factory=dict)
    inner_steps: int = 50
    outer_lr: float = 0.7
    momentum: float = 0.6
    codec: str = "int8"
    share: float = 1.0
    """Of the CPU time that the others get."""


VARIANTS = [
    Variant("default"),
    Variant("width 64", {"width": 64, "heads": 2, "kv_heads": 2, "ffn": 176}),
    Variant("3 layers", {"layers": 3}),
    Variant("context 64", {"context": 64}),
    Variant("batch 8", inner={"batch": 8}),
    Variant("adamw alone", inner={"optimizer": "adamw"}),
    Variant("lr 0.01", inner={"lr": 0.01}),
    Variant("lr 0.04", inner={"lr": 0.04}),
    Variant("linear decay to 0", inner={"decay": "linear", "final_lr": 0.0}),
    Variant("H = 100", inner_steps=100),
    Variant("outer lr 1.0", outer_lr=1.0),
    Variant("outer momentum 0.9", momentum=0.9),
    Variant("float32", codec="float32"),
    Variant("four times the CPU time", share=4.0),
]


def run(variant: Variant, cpu_seconds: float, evaluator_data: DataConfig) -> dict[str, Any]:
    """Train one variant for ``cpu_seconds``; what it reached."""
    model = ModelConfig.from_table(variant.model)
    inner = InnerConfig.from_table(variant.inner)
    evaluator = Evaluator(model, evaluator_data)
    text = evaluator.corpus.train
    specs = tensor_specs(model)
    size = count_parameters(model)
    codec = get_codec(variant.codec)
    start = theta0(model.seed, specs)

    def learner(rounds: int) -> Learner:
        return Learner(model, inner, variant.inner_steps, rounds, text, start.copy(), device="cpu")

    probe, units, speed = learner(1), np.arange(inner.batch), 0.0
    for _ in range(3):
        # the best of three: a slow moment of the machine must not shorten the run
        begun = time.process_time()
        for _ in range(20):
            probe.step(units, 0, 0)
        speed = max(speed, 20 / (time.process_time() - begun))
    rounds = max(round(cpu_seconds * variant.share * speed / (PEERS * variant.inner_steps)), 2)

    peers = [learner(rounds) for _ in range(PEERS)]
    world, momentum = start.copy(), np.zeros(size, np.float32)
    residuals = [np.zeros(size, np.float32) for _ in peers]
    cursor, begun = 0, time.process_time()
    for outer in range(rounds):
        mean, decoded = np.zeros(size, np.float32), np.empty(size, np.float32)
        for peer, residual in zip(peers, residuals, strict=True):
            for step in range(variant.inner_steps):
                peer.step(np.arange(cursor, cursor + inner.batch), outer, step)
                cursor += inner.batch
            sent = world - peer.host.numpy() + residual
            codec.decode(codec.encode(sent), size, decoded)
            residual[:] = sent - decoded
            mean += decoded * np.float32(1 / PEERS)
        outer_step(world, momentum, mean, variant.outer_lr, variant.momentum)
        for peer in peers:
            peer.host.copy_(torch.from_numpy(world))
    took = time.process_time() - begun
    begun = time.process_time()
    loss = evaluator.loss(world)
    return {
        "name": variant.name,
        "parameters": size,
        "context": model.context,
        "rounds": rounds,
        "tokens": cursor * model.context,
        "cpu_seconds": round(took, 1),
        "tokens_per_cpu_second": round(cursor * model.context / took),
        "loss": round(loss, 4),
        "scoring_seconds": round(time.process_time() - begun, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu-seconds", type=float, default=60.0, help="training time of each variant")
    parser.add_argument("--only", help="only variants whose name matches this")
    parser.add_argument("--variants", help="instead: a JSON list of variants")
    parser.add_argument("--write", type=Path, help="append the table to this file")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    variants = [Variant(**v) for v in json.loads(arguments.variants)] if arguments.variants else VARIANTS
    rows: list[str] = []
    found: list[Row] = []
    header = "| variant | parameters | context | rounds | tokens | CPU s | tokens/CPU s | nats/byte |"
    print(header, "|---|---|---|---|---|---|---|---|", sep="\n", flush=True)
    for variant in variants:
        if arguments.only and not re.search(arguments.only, variant.name):
            continue
        r = run(variant, arguments.cpu_seconds, DataConfig())
        found.append(asdict(variant) | r | {"asked_cpu_seconds": arguments.cpu_seconds} | stamp())
        write_rows(arguments.json, found)
        rows.append(
            f"| {r['name']} | {r['parameters']:,} | {r['context']} | {r['rounds']} | {r['tokens'] / 1e6:.2f}M | "
            f"{r['cpu_seconds']} | {r['tokens_per_cpu_second']:,} | {r['loss']} |"
        )
        print(rows[-1], f"(scored in {r['scoring_seconds']} s)", flush=True)
    if arguments.write:
        made = f"\nPython {platform.python_version()}, torch {torch.__version__}, {PEERS} peers, one thread.\n\n"
        with arguments.write.open("a") as file:
            file.write(made + "\n".join([header, "|---|---|---|---|---|---|---|---|", *rows]) + "\n")


if __name__ == "__main__":
    main()
