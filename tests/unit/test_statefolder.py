"""A state folder is held by one process, which finds in it what its predecessor left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.protocol.disk import replace_file
from atoll.protocol.errors import StateLocked
from atoll.protocol.statefolder import StateFolder

# Writes a file whole, and is killed while it replaces it.
KILLED = """
import os, signal, sys
from pathlib import Path
from atoll.protocol.disk import replace_file
target = Path(sys.argv[1])
replace_file(target, b"old")
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
replace_file(target, b"new", durable=True)
"""


@pytest.mark.parametrize("name", ["peers", "checkpoints/step-00000001.safetensors"])
def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    target.parent.mkdir(exist_ok=True)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(target)], env=dict(os.environ), timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(target.parent.glob(".*.tmp"))) == 1, "the test kills it too late or too early"
    with StateFolder(tmp_path):
        assert [path.name for path in target.parent.iterdir() if path.name != "lock"] == [target.name]
        assert target.read_bytes() == b"old"
        replace_file(target, b"new")
    assert target.read_bytes() == b"new"


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = ["notes.tmp", ".notes.tmp", ".swp", "a/.b.tmp", "a/b/.c.1.tmp", ".d.1.tmp.txt"]
    for name in others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"mine")
    with StateFolder(tmp_path):
        assert all((tmp_path / name).read_bytes() == b"mine" for name in others)


def test_a_folder_that_is_held_is_not_swept(tmp_path: Path) -> None:
    with StateFolder(tmp_path):
        (tmp_path / ".port.1.tmp").write_bytes(b"being written")
        with pytest.raises(StateLocked):
            StateFolder(tmp_path)
        assert (tmp_path / ".port.1.tmp").exists()
