"""The swarm's children end when asked, when killed, and when the swarm itself is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.node.swarm.processes import Family, Interrupts, child_environment, descendants

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and prctl")

MODULE = """
import json, os, signal, subprocess, sys, time
folder, mode = sys.argv[1], sys.argv[2]
if mode == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "parent":
    # A grandchild in a session of its own, as a p2p daemon is.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    print("grandchild", child.pid, flush=True)
if mode == "fails":
    print("chatter", file=sys.stderr)
    print("atoll: error: the reason", file=sys.stderr)
    print("more chatter", file=sys.stderr)
    sys.exit(5)
with open(folder + "/events.jsonl", "a") as log:
    log.write(json.dumps({"event": "start", "pid": os.getpid()}) + "\\n")
try:
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "swarm_test_child.py").write_text(MODULE)
    return child_environment(1) | {"PYTHONPATH": str(tmp_path / "modules")}


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def start(family: Family, tmp_path: Path, env: dict[str, str], mode: str, name: str = "node-0") -> Path:
    folder = tmp_path / name
    child = family.start(name, folder, ["swarm_test_child", str(folder), mode], env)
    until(lambda: (folder / "events.jsonl").exists() or child.code is not None)
    return folder


def test_a_child_ends_as_with_ctrl_c_and_its_events_are_read(tmp_path: Path, env: dict[str, str]) -> None:
    with Interrupts() as interrupts, Family() as family:
        start(family, tmp_path, env, "obedient")
        child = family.children["node-0"]
        events = []
        until(lambda: bool(events.extend(child.events()) or events))
        assert events[0]["pid"] == child.process.pid
        assert os.getsid(child.process.pid) == child.process.pid
        family.stop(["node-0"], interrupts)
        assert family.exit_codes() == {"node-0": 130}


def test_a_stubborn_child_is_killed_after_the_patience(tmp_path: Path, env: dict[str, str]) -> None:
    with Interrupts() as interrupts, Family() as family:
        start(family, tmp_path, env, "stubborn")
        began = time.monotonic()
        family.stop(["node-0"], interrupts, patience=0.3)
        assert 0.3 <= time.monotonic() - began < 3
        assert family.exit_codes() == {"node-0": -signal.SIGKILL}


def test_a_second_ctrl_c_ends_the_patience(tmp_path: Path, env: dict[str, str]) -> None:
    with Interrupts() as interrupts, Family() as family:
        start(family, tmp_path, env, "stubborn")
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.wait(1)
        killer = subprocess.Popen(
            [sys.executable, "-c", f"import os, time; time.sleep(0.2); os.kill({os.getpid()}, 2)"]
        )
        began = time.monotonic()
        family.stop(["node-0"], interrupts, patience=30)
        assert time.monotonic() - began < 5
        killer.wait()


@linux
def test_what_a_killed_child_leaves_behind_is_ended_too(tmp_path: Path, env: dict[str, str]) -> None:
    before = descendants(os.getpid())
    with Interrupts(), Family() as family:
        folder = start(family, tmp_path, env, "parent")
        grandchild = int((folder / "output.log").read_text().split()[1])
        family.children["node-0"].process.kill()
        family.children["node-0"].process.wait()
        os.kill(grandchild, 0)
    assert descendants(os.getpid()) <= before
    with pytest.raises(ProcessLookupError):
        os.kill(grandchild, 0)


@linux
def test_children_end_when_the_swarm_is_killed(tmp_path: Path, env: dict[str, str]) -> None:
    folder = tmp_path / "node-0"
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from atoll.node.swarm.processes import Family, child_environment\n"
        "family = Family().__enter__()\n"
        "child = family.start('node-0', Path(sys.argv[1]), ['swarm_test_child', sys.argv[1], 'obedient'], "
        "child_environment(1))\n"
        "print(child.process.pid, flush=True)\ntime.sleep(60)"
    )
    swarm = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, env=env)
    assert swarm.stdout is not None
    pid = int(swarm.stdout.readline())
    until((folder / "events.jsonl").exists)
    swarm.kill()
    swarm.wait()
    swarm.stdout.close()

    def gone() -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        return stat.rpartition(")")[2].split()[0] in "ZX"

    until(gone)


def test_the_reason_of_a_failure_is_found_in_the_output(tmp_path: Path, env: dict[str, str]) -> None:
    with Interrupts(), Family() as family:
        start(family, tmp_path, env, "fails")
        until(lambda: family.children["node-0"].code is not None)
        assert family.children["node-0"].code == 5
        assert family.children["node-0"].last_words() == "the reason"


def test_children_do_not_inherit_the_settings_meant_for_the_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_STATE", "/somewhere")
    env = child_environment(3)
    assert not any(key.startswith("ATOLL_") for key in env)
    assert env["OMP_NUM_THREADS"] == "3"


def test_interrupts_are_waited_for_not_raised() -> None:
    with Interrupts() as interrupts:
        assert not interrupts.wait(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.wait(5)
        assert interrupts.count == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
