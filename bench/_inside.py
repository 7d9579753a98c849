"""Run a module in a network namespace: ``python -m bench._inside NAMESPACE MODULE ARGUMENT…``, as the same process."""

from __future__ import annotations

import os
import sys

from ._network import enter

if __name__ == "__main__":
    enter(sys.argv[1])
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])
