"""The files in docker/: what the entrypoint starts, what the health check sees, what the compose file promises."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

TREE = Path(__file__).resolve().parents[2]
DOCKER = TREE / "docker"
GREETING = b"\x13/multistream/1.0.0\n"

pytestmark = pytest.mark.skipif(not DOCKER.exists(), reason="needs the whole source tree, not a wheel")


def entrypoint(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the entrypoint with an `atoll` that says how it was called and leaves a manifest where it is asked to."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    fake = programs / "atoll"
    fake.write_text(
        "#!/bin/sh\n"
        'echo "atoll $*" >>"$0.calls"\n'
        'echo "atoll $* address=${ATOLL_ADDRESS:-} manifest=${ATOLL_MANIFEST:-}"\n'
        'if [ "$1 ${2:-}" = "manifest new" ]; then for last; do :; done; echo made >"$last"; fi\n'
    )
    fake.chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "ATOLL_STATE": str(tmp_path), **variables}
    return subprocess.run(
        [str(DOCKER / "entrypoint.sh"), *arguments], env=environment, capture_output=True, text=True, timeout=30
    )


def test_a_node_takes_the_address_it_is_given(tmp_path: Path) -> None:
    done = entrypoint(tmp_path, "node", "--log", "json", ATOLL_ADDRESS="/dns4/a/tcp/1/p2p/x")
    assert done.returncode == 0
    assert done.stdout == "atoll node --log json address=/dns4/a/tcp/1/p2p/x manifest=\n"


def test_node_is_the_default(tmp_path: Path) -> None:
    assert entrypoint(tmp_path, ATOLL_ADDRESS="x").stdout.startswith("atoll node address=x")


def test_a_node_takes_the_address_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text("/dns4/bootstrap/tcp/31330/p2p/x\n")
    done = entrypoint(tmp_path, "node", ATOLL_ADDRESS_FILE=str(file))
    assert done.stdout == f"atoll node address=@{file} manifest=\n"


def test_a_node_does_not_wait_for_ever(tmp_path: Path) -> None:
    done = entrypoint(tmp_path, "node", ATOLL_ADDRESS_FILE=str(tmp_path / "none"), ATOLL_ADDRESS_WAIT="0")
    assert done.returncode == 4
    assert "is the bootstrap peer up?" in done.stderr


def test_a_bootstrap_peer_makes_its_manifest_once(tmp_path: Path) -> None:
    first = entrypoint(tmp_path, "bootstrap")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"atoll bootstrap address= manifest={tmp_path / 'manifest.toml'}\n"
    calls = (tmp_path / "bin" / "atoll.calls").read_text().splitlines()
    assert [call.split()[1:3] for call in calls[:2]] == [["manifest", "new"], ["manifest", "sign"]]
    assert (tmp_path / "manifest.toml").read_text() == "made\n"
    (tmp_path / "manifest.toml").write_text("kept")
    second = entrypoint(tmp_path, "bootstrap", "--json")
    assert second.stdout == f"atoll bootstrap --json address= manifest={tmp_path / 'manifest.toml'}\n"
    assert (tmp_path / "manifest.toml").read_text() == "kept"


def test_a_bootstrap_peer_takes_the_manifest_it_is_given(tmp_path: Path) -> None:
    done = entrypoint(tmp_path, "bootstrap", ATOLL_MANIFEST="/run.toml")
    assert done.stdout == "atoll bootstrap address= manifest=/run.toml\n"


def test_other_commands_are_those_of_atoll(tmp_path: Path) -> None:
    assert entrypoint(tmp_path, "status", "--json").stdout.startswith("atoll status --json")
    assert entrypoint(tmp_path, "echo", "hello").stdout == "hello\n"


@contextmanager
def listener(answer: bytes) -> Iterator[int]:
    """A server on 127.0.0.1 that says ``answer`` to one connection; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(64)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join(10)


def probe(port: int, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DOCKER / "probe.py"), "127.0.0.1", str(port), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_probe_knows_a_libp2p_peer(tmp_path: Path) -> None:
    written, fresh = tmp_path / "address", tmp_path / "events.jsonl"
    written.write_text("address")
    fresh.write_text("{}")
    with listener(GREETING) as port:
        done = probe(port, "--written", str(written), "--fresh", str(fresh))
    assert done.returncode == 0, done.stderr
    os.utime(fresh, (0, 0))
    written.write_text("")
    with listener(GREETING) as port:
        done = probe(port, "--written", str(written), "--fresh", str(fresh))
    assert done.returncode == 1
    assert "is empty" in done.stderr
    assert "was last written" in done.stderr


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n"])
def test_probe_is_not_content_with_an_open_port(answer: bytes) -> None:
    with listener(answer) as port:
        done = probe(port)
    assert done.returncode == 1
    assert "is not a libp2p peer" in done.stderr


def test_probe_sees_a_closed_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = probe(port)
    assert done.returncode == 1
    assert "does not answer" in done.stderr


def services() -> dict[str, Any]:
    composed = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    found: dict[str, Any] = composed["services"]
    return found


def test_compose_has_one_bootstrap_and_three_nodes_with_state_of_their_own() -> None:
    found = services()
    assert sorted(found) == ["bootstrap", "node-1", "node-2", "node-3"]
    states = [volume for service in found.values() for volume in service["volumes"] if volume.endswith(":/state")]
    assert len(set(states)) == 4
    for name, service in found.items():
        assert "shm_size" not in service
        assert service["init"] is True
        assert service["read_only"] is True
        if name != "bootstrap":
            assert service["depends_on"]["bootstrap"]["condition"] == "service_healthy"
    assert "/dns4/bootstrap/tcp/31330" in found["bootstrap"]["environment"]["ATOLL_ANNOUNCE"]


def test_compose_gives_gpus_to_the_nodes_and_to_nothing_else() -> None:
    more = yaml.safe_load((DOCKER / "compose.cuda.yaml").read_text(encoding="utf-8"))["services"]
    assert sorted(more) == sorted(name for name in services() if name != "bootstrap")
    for service in more.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_compose_publishes_to_this_machine_only_by_default() -> None:
    assert services()["bootstrap"]["ports"] == ["${ATOLL_PUBLISH:-127.0.0.1}:31330:31330"]


def test_dockerfile_copies_only_what_the_build_context_has() -> None:
    allowed = {
        line[1:] for line in (TREE / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    copied: set[str] = set()
    for line in (DOCKER / "Dockerfile").read_text(encoding="utf-8").splitlines():
        if re.match(r"COPY (?!--from)", line):
            copied |= set(line.split()[1:-1])
    assert copied == allowed
    for name in copied:
        assert (TREE / name).exists(), f"the Dockerfile copies {name}, which is not there"


def test_the_image_runs_as_an_ordinary_user_and_checks_its_health() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    user = re.findall(r"^USER (\S+)", text, re.MULTILINE)
    assert user
    assert not user[-1].startswith("0")
    assert "atoll status" in text[text.index("HEALTHCHECK") :]
    for argument in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "TORCH_INDEX_URL", "CUDA"):
        assert set(re.findall(rf"^ARG {argument}=(.*)$", text, re.MULTILINE)) == {'""'}
