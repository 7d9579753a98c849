"""``python -m atoll.node.compare.worker JOB``: one run in a process of its own.

JOB is a JSON file as :meth:`.study.Job.describe` makes it. Prints lines of JSON: ``{"done": n, "of": m}`` now and then,
at the end ``{"result": …}``; ``{"diverged": reason}`` when the numbers are beyond what can be sent or scored.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

EVERY = 0.5
"""Seconds between two lines of progress."""


def main(path: str) -> int:
    from atoll.node.swarm.launch import Interrupted
    from atoll.protocol.errors import AtollError, NonFinite
    from atoll.protocol.manifest import Manifest

    from .scenario import Scenario

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line, allow_nan=False), flush=True)

    last = 0.0

    def progress(done: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            say({"done": done, "of": of})

    raw = json.loads(Path(path).read_text())
    try:
        manifest = Manifest.from_dict({"name": "compare", "access": {"admit": "open", "peers": []}, **raw["manifest"]})
        scenario = Scenario.of(raw["scenario"], "scenario")
        if scenario.real:
            from .real import run_real

            result = run_real(manifest, scenario, Path(path).parent, progress)
        else:
            from atoll.node.prepare import prepare

            from .simulate import simulate

            prepare()
            result = simulate(manifest, scenario, raw["seed"], progress)
        if not math.isfinite(result["loss"]):
            raise NonFinite("the loss is not finite")
        say({"result": result})
    except NonFinite as error:
        say({"diverged": str(error)})
    except Interrupted:
        return 130
    except AtollError as error:
        print(f"atoll: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
