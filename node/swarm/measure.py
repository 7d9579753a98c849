"""``python -m atoll.node.swarm.measure MANIFEST``: how fast inner steps are here. Prints one JSON object.

A process of its own, so that the swarm's never imports torch, and so that as many as there are cores can measure at
the same time: the steps of the run will share caches and memory in the same way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time


def measure(path: str, seconds: float, device: str, data: str | None, evaluate: bool) -> dict[str, object]:
    """What was measured, in seconds: ``step`` is an inner step, ``imports`` getting ready.

    evaluate: also ``evaluation``, scoring the held-out text once, and ``ngram``, what n-gram tables score there
    (nats per byte).
    """
    began = time.monotonic()
    import numpy as np

    from atoll.node.config import DataConfig, InnerConfig, ModelConfig
    from atoll.node.data import load
    from atoll.node.learner import Learner
    from atoll.node.prepare import prepare
    from atoll.node.specs import tensor_specs
    from atoll.protocol.manifest import Manifest
    from atoll.protocol.theta0 import theta0

    manifest = Manifest.load(path)
    model = ModelConfig.from_table(manifest.model)
    config = DataConfig.from_table(manifest.data)
    if data is not None:
        config = config.model_copy(update={"path": data})
    inner = InnerConfig.from_table(manifest.inner)
    text = load(config, model.context).train
    host = theta0(model.seed, tensor_specs(model))
    learner = Learner(model, inner, manifest.round.inner_steps, manifest.budget.rounds, text, host, device=device)
    units = np.arange(inner.batch, dtype=np.int64)
    for step in range(3):
        learner.step(units + step * inner.batch, 0, step)
    imports = time.monotonic() - began

    steps, started = 0, time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds:
        learner.step(units + (steps + 3) * inner.batch, 0, steps)
        steps += 1
    found: dict[str, object] = {"step": elapsed / steps, "imports": imports}
    if evaluate:
        from atoll.node.evaluate import Evaluator

        evaluator = Evaluator(model, config, device)
        started = time.monotonic()
        evaluator.loss(host)
        found |= {"evaluation": time.monotonic() - started, "ngram": evaluator.ngrams()}
        # All nodes would compile the same kernels at the same time; they find them in the cache.
        prepare()
    return found


def main() -> int:
    from atoll.protocol.errors import AtollError

    parser = argparse.ArgumentParser(prog="atoll.node.swarm.measure", description=__doc__)
    parser.add_argument("manifest")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data")
    parser.add_argument("--evaluate", action="store_true")
    arguments = parser.parse_args()
    try:
        found = measure(arguments.manifest, arguments.seconds, arguments.device, arguments.data, arguments.evaluate)
    except AtollError as error:
        print(f"atoll: error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
