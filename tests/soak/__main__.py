"""Long looks at single promises: ``python -m tests.soak NAME``. Each prints what it measured, and ends with exit code 1
when the promise did not hold. They start real p2p daemons on 127.0.0.1, or in network namespaces of their own."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import failed_rounds, gather, payload, short_lived

KINDS = {"gather": gather, "short-lived": short_lived, "failed-rounds": failed_rounds, "payload": payload}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    commands = parser.add_subparsers(dest="kind", required=True)
    for name, module in KINDS.items():
        command = commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0], description=module.__doc__)
        command.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
        module.options(command)
    args = parser.parse_args(arguments)
    result = KINDS[args.kind].run(args)
    print(json.dumps(result, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
