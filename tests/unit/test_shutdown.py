"""What a signal ends with, and how: in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, signal, sys
from atoll.protocol.shutdown import ending, on_signals, run_to_end

async def work():
    stop = asyncio.Event()
    try:
        if sys.argv[2] == "stops":
            with on_signals(stop.set):
                print("ready", flush=True)
                await stop.wait()
        else:
            print("ready", flush=True)
            await asyncio.sleep(60)
    finally:
        print(ending().code, ending().reason, flush=True)
    return ending().code

if sys.argv[3] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.exit(run_to_end(work(), service=sys.argv[1] == "service"))
"""


def ended(kind: str, how: str, *numbers: int, nohup: bool = False) -> tuple[int, str]:
    command = [sys.executable, "-c", PROGRAM, kind, how, "nohup" if nohup else ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in numbers:
            process.send_signal(number)
        said = process.stdout.read().strip()
        return process.wait(30), said


@pytest.mark.parametrize("how", ["stops", "is cancelled"])
def test_sigterm_is_the_good_end_of_a_service(how: str) -> None:
    assert ended("service", how, signal.SIGTERM) == (0, "0 asked to end")
    assert ended("service", how, signal.SIGINT) == (130, "130 interrupted")
    assert ended("command", how, signal.SIGTERM) == (130, "130 interrupted")


def test_a_closed_terminal_ends_it_in_order_unless_told_otherwise() -> None:
    assert ended("service", "stops", signal.SIGHUP) == (130, "130 interrupted")
    assert ended("service", "stops", signal.SIGHUP, signal.SIGTERM, nohup=True) == (0, "0 asked to end")


def test_with_heavy_modules_loaded_python_is_not_taken_apart_before_the_end() -> None:
    """Two seconds of a core for a node; five nodes that leave one busy machine together needed ten."""
    program = """
import atexit, sys, types
from atoll.__main__ import main
class Heavy:
    def __del__(self):
        print("taken apart")
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.heavy = kept = Heavy()
atexit.register(print, "handlers have run")
main(["--version"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "handlers have run" in done.stdout
    assert "taken apart" not in done.stdout
