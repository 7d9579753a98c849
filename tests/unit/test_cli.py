"""The command line: quick help, one-line errors with documented exit codes, nothing lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atoll import __main__ as command_line
from atoll import __version__
from atoll.protocol.errors import DataError
from atoll.protocol.identity import Ed25519Signer
from atoll.protocol.manifest import Manifest
from atoll.protocol.statefolder import StateFolder

COMMANDS = ("node", "swarm", "status", "generate", "observe", "anchor", "bootstrap", "manifest")
PEER = Ed25519Signer.from_seed(bytes(32)).peer_id
ADDRESS = f"atoll:{'ab' * 32}@/ip4/127.0.0.1/tcp/9/p2p/{PEER}"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key in list(os.environ):
        if key.startswith("ATOLL_"):
            monkeypatch.delenv(key)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and message of a command that must fail in one line, without a traceback."""
    code = command_line.run(list(arguments))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("atoll: error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return code, err


def signed_manifest(path: Path) -> Manifest:
    manifest = Manifest.make("test", parameters=1000, theta0="00" * 32).sign(Ed25519Signer.from_seed(bytes(32)))
    path.write_text(manifest.to_toml())
    return manifest


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from atoll.__main__ import run; code = run(['--help']);"
        "heavy = {'torch', 'hivemind', 'matplotlib', 'numba', 'safetensors'} & set(sys.modules);"
        "print('HEAVY', sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    elapsed = time.monotonic() - began
    assert done.returncode == 0
    assert done.stderr.strip() == "HEAVY []"
    assert all(command in done.stdout for command in COMMANDS)
    # About 0.25 s on an idle core; the bound leaves room for a busy machine.
    assert elapsed < 5


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"atoll {command}" in text
    assert "xample" in text or command == "manifest"


def test_help_shows_what_stands_in_brackets(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """rich takes [words] for its markup, and the defaults that are told in words were gone."""
    monkeypatch.setenv("COLUMNS", "200")
    for command, default in (
        ("node", "[default: one per run in ~/.local/state/atoll]"),
        ("swarm", "[default: as many as fit into --minutes]"),
        ("bootstrap", "[default: /ip4/0.0.0.0/tcp/0]"),
        ("compare", "[default: one a core]"),
        ("anchor", "[default: the head that most peers have]"),
    ):
        assert command_line.run([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert default in " ".join(text.replace("│", " ").split()), text
        assert "\\[" not in text
        assert "[[" not in text


def test_no_arguments_show_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run([]) == 0
    assert "Usage: atoll" in capsys.readouterr().out


def test_a_group_of_commands_alone_shows_its_help_and_no_empty_error(capsys: pytest.CaptureFixture[str]) -> None:
    code = command_line.run(["manifest"])
    out, err = capsys.readouterr()
    assert code in (0, 2)  # as the version of click has it
    assert "Usage: atoll manifest" in out + err
    assert "error" not in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"atoll {__version__}"


def test_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "atoll", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, f"atoll {__version__}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nod"], "nod"),
        (["node"], "ADDRESS"),
        (["swarm", "--nodse", "4"], "--nod"),
        (["swarm", "--nodes", "0"], "--nodes"),
        (["swarm", "--nodes", "many"], "--nodes"),
        (["node", ADDRESS, "--log", "loud"], "--log"),
        (["bootstrap"], "--manifest"),
        (["status"], "address"),
        (["status", "--max-age", "3"], "--state"),
        (["node", "@/nowhere/address"], "there is no file /nowhere/address; @FILE reads the run address"),
        (["status", "@"], "no file name after the @"),
        (["observe", "@/"], "/ is a folder, not a file; @FILE"),
        (["anchor", ADDRESS], "--key"),
        (["anchor", ADDRESS, "--key", "k", "--commit", "abc"], "64 hex digits"),
        (["anchor", ADDRESS, "--key", "k", "--commit", "nothexnothex"], "64 hex digits"),
    ],
)
def test_usage_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = failure(capsys, *arguments)
    assert code == 2
    assert words in message


@pytest.mark.parametrize("command", ["node", "observe", "status"])
@pytest.mark.parametrize("address", ["nonsense", "/ip4/1.2.3.4/tcp/1", "atoll:ab@/ip4/1.2.3.4/tcp/1", ADDRESS[:-9]])
def test_malformed_addresses(command: str, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = failure(capsys, command, address)
    assert code == 4
    assert "address" in message
    assert not (tmp_path / "xdg").exists(), "a bad address must not create a state folder"


def test_anchor_needs_the_owners_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = failure(capsys, "anchor", "nonsense", "--key", "k")
    assert code == 4
    code, message = failure(capsys, "anchor", ADDRESS, "--key", str(tmp_path / "none"))
    assert code == 6
    assert "no identity file" in message
    assert not (tmp_path / "none").exists(), "a new key would be nobody's"
    (tmp_path / "bad").write_bytes(b"not a key")
    code, message = failure(capsys, "anchor", ADDRESS, "--key", str(tmp_path / "bad"))
    assert code == 6
    assert "cannot be used" in message


def test_address_file_with_too_much_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "address").write_text("one two")
    code, message = failure(capsys, "node", f"@{tmp_path / 'address'}")
    assert code == 2
    assert "2 words" in message


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ATOLL_ADDRESS", "from-the-environment")
    code, message = failure(capsys, "node")
    assert code == 4
    assert "from-the-environment" in message


def test_every_option_of_a_container_has_a_variable(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {
        "node": "ADDRESS STATE NAME DEVICE THREADS DATA LISTEN ANNOUNCE CLIENT SEED TIMEOUT FINISH LOG",
        "bootstrap": "MANIFEST STATE LISTEN ANNOUNCE PEERS ADDRESS_FILE",
    }
    for command, names in wanted.items():
        assert command_line.run([command, "--help"]) == 0
        text = re.sub(r"[\s│]+", "", capsys.readouterr().out)
        for name in names.split():
            assert f"ATOLL_{name}" in text, (command, name)


def test_bootstrap_refuses_bad_manifests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    code, message = failure(capsys, "bootstrap", "--manifest", str(path))
    assert code == 3
    assert "no manifest" in message

    manifest = signed_manifest(path)
    text = manifest.to_toml()
    unsigned = manifest.replace(name="other")
    path.write_text(unsigned.to_toml())
    code, message = failure(capsys, "bootstrap", "--manifest", str(path))
    assert code == 3
    assert "not signed" in message

    path.write_text(text.replace("momentum = 0.6", "momentum = 0.7"))
    code, message = failure(capsys, "bootstrap", "--manifest", str(path))
    assert code == 3
    assert "signature" in message

    path.write_text(text.replace("inner_steps", "inner_stepz"))
    code, message = failure(capsys, "bootstrap", "--manifest", str(path))
    assert code == 3
    assert "inner_steps" in message

    path.write_text(text.replace("protocol = 1", "protocol = 99"))
    code, message = failure(capsys, "bootstrap", "--manifest", str(path))
    assert code == 8
    assert "99" in message


def test_bootstrap_refuses_bad_addresses_and_a_folder_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, state = tmp_path / "run.toml", tmp_path / "state"
    signed_manifest(path)
    common = ["bootstrap", "--manifest", str(path), "--state", str(state)]
    code, message = failure(capsys, *common, "--listen", "/ip4/127.0.0.1/tpc/0")
    assert code == 4
    assert "tpc" in message
    code, message = failure(capsys, *common, "--announce", "example.org:31337")
    assert code == 4
    with StateFolder(state):
        code, message = failure(capsys, *common)
    assert code == 6
    assert "in use" in message


def test_swarm_refuses_before_it_starts_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    signed_manifest(path)
    code, message = failure(capsys, "swarm", "--nodes", "1", "--manifest", str(path), "--out", str(tmp_path / "out"))
    assert code == 3
    assert "quorum" in message
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("")
    code, message = failure(capsys, "swarm", "--manifest", str(path), "--out", str(tmp_path / "full"))
    assert code == 6
    assert "not empty" in message
    code, message = failure(capsys, "swarm", "--manifest", str(path), "--out", str(path))
    assert code == 6
    assert "--out" in message


def test_generate_refuses_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = failure(capsys, "generate", str(tmp_path))
    assert code == 6
    (tmp_path / "step-00000001.safetensors").write_bytes(b"12345")
    (tmp_path / "step-00000001.json").write_text("{}")
    code, message = failure(capsys, "generate", str(tmp_path / "step-00000001.safetensors"))
    assert code == 6
    assert "step-00000001" in message


def test_health_follows_the_age_of_the_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["status", "--state", str(tmp_path), "--max-age", "60"]
    assert command_line.run(arguments) == 1
    assert "unhealthy" in capsys.readouterr().out
    log = tmp_path / "events.jsonl"
    log.write_text(json.dumps({"t": time.time() - 30, "event": "commit", "round": 1}) + "\n")
    assert command_line.run(arguments) == 0
    log.write_text(json.dumps({"t": time.time() - 90, "event": "commit", "round": 1}) + "\n")
    assert command_line.run(arguments) == 1
    capsys.readouterr()
    assert command_line.run([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is False
    assert 89 < found["head_age"] < 100


def test_local_status_tells_the_last_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = failure(capsys, "status", "--state", str(tmp_path))
    assert code == 6
    assert "events.jsonl" in message
    events = [
        {"t": time.time(), "event": "progress", "state": "training", "outer_step": 7, "steps": 11, "loss": 2.5},
        {"t": time.time(), "event": "digest", "round": 8, "digest": "feed" * 16},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert command_line.run(["status", "--state", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "outer step 7" in out
    assert "feedfeed" in out


# ---------------------------------------------------------------------- the one place that handles errors


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr("atoll.node.status.show_local", fail)


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert command_line.run(["status", "--state", str(tmp_path)]) == 130
    assert capsys.readouterr().err == ""


def test_errors_of_atoll_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, DataError("no text\nin this folder"))
    code, message = failure(capsys, "status", "--state", str(tmp_path))
    assert code == 5
    assert message == "atoll: error: no text in this folder\n"


def test_a_full_disk_is_a_resource_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, OSError(28, "No space left on device", "/var/x"))
    code, message = failure(capsys, "status", "--state", str(tmp_path))
    assert code == 7
    assert "/var/x" in message


def test_a_defect_leaves_its_traceback_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, ZeroDivisionError("oops"))
    code, message = failure(capsys, "status", "--state", str(tmp_path))
    assert code == 1
    assert "defect" in message
    assert "ZeroDivisionError: oops" in message
    path = Path(message.split()[-1])
    assert path.parent == tmp_path / "xdg" / "atoll"
    assert "Traceback" in path.read_text()


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = f"{sys.executable} -m atoll swarm --help | head -c 10 >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "mps", "", "CUDA"])
def test_a_device_that_no_machine_has_is_refused_at_once(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["node", "atoll:00@/ip4/127.0.0.1/tcp/1/p2p/x", "--device", name]) == 2
    assert f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N" in capfd.readouterr().err
