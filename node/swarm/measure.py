"""``python -m atoll.node.swarm.measure MANIFEST``: how fast inner steps are here. Prints one JSON object.

A process of its own, so that the swarm's never imports torch, and so that as many as there are cores can measure at
the same time: the steps of the run will share caches and memory in the same way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

EVALUATION_SHARE = 0.4
"""Scoring a token costs about a third of training on it; the rest is a margin for small batches."""


def measure(path: str, seconds: float, device: str, data: str | None, ngram: bool) -> dict[str, object]:
    """``step``: seconds of an inner step; ``evaluation``: of scoring the held-out text, estimated; ``imports``: of
    getting ready; ``tokens_per_step``; with ``ngram`` the scores of n-gram tables, nats per byte."""
    began = time.monotonic()
    import numpy as np

    from atoll.node.config import DataConfig, InnerConfig, ModelConfig
    from atoll.node.data import load
    from atoll.node.learner import Learner
    from atoll.node.specs import tensor_specs
    from atoll.protocol.manifest import Manifest
    from atoll.protocol.theta0 import theta0

    manifest = Manifest.load(path)
    model = ModelConfig.from_table(manifest.model)
    config = DataConfig.from_table(manifest.data)
    inner = InnerConfig.from_table(manifest.inner)
    corpus = load(config.model_copy(update={"path": data}) if data else config, model.context)
    host = theta0(model.seed, tensor_specs(model))
    learner = Learner(
        model, inner, manifest.round.inner_steps, manifest.budget.rounds, corpus.train, host, device=device
    )
    units = np.arange(inner.batch, dtype=np.int64)
    for step in range(3):
        learner.step(units + step * inner.batch, 0, step)
    imports = time.monotonic() - began

    steps, started = 0, time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds:
        learner.step(units + (steps + 3) * inner.batch, 0, steps)
        steps += 1
    step_time = elapsed / steps
    learner.store()
    tokens = inner.batch * model.context
    found: dict[str, object] = {
        "step": step_time,
        "evaluation": step_time * len(corpus.validation) / tokens * EVALUATION_SHARE,
        "imports": imports,
        "tokens_per_step": tokens,
        "validation": len(corpus.validation),
    }
    if ngram:
        from atoll.node.ngram import ngram_losses

        found["ngram"] = ngram_losses(corpus.train, corpus.validation)
    return found


def main() -> int:
    from atoll.protocol.errors import AtollError

    parser = argparse.ArgumentParser(prog="atoll.node.swarm.measure", description=__doc__)
    parser.add_argument("manifest")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data")
    parser.add_argument("--ngram", action="store_true")
    arguments = parser.parse_args()
    try:
        found = measure(arguments.manifest, arguments.seconds, arguments.device, arguments.data, arguments.ngram)
    except AtollError as error:
        print(f"atoll: error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
