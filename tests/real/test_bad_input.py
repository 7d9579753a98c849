"""What users get wrong: each with one line that says what to do, a documented exit code, and nothing lost.

All through the real command line, in processes of its own, with a temporary folder of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from atoll.node import checkpoint
from atoll.node.config import ModelConfig
from atoll.node.events import read_events
from atoll.node.specs import count_parameters
from atoll.protocol.address import Multiaddr, RunAddress
from atoll.protocol.identity import Ed25519Signer, load_identity
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.manifest import Manifest
from atoll.protocol.statefolder import StateFolder
from atoll.protocol.store import Store

from . import leaks
from .harness import LOOPBACK, MODEL, OWNER, Place, Swarm, place, small_manifest, text_folder

pytestmark = [pytest.mark.real, pytest.mark.slow]

USAGE, MANIFEST, NETWORK, DATA, STATE, RESOURCE, VERSION = 2, 3, 4, 5, 6, 7, 8
"""The documented exit codes (protocol/errors.py)."""
PATIENCE = 60.0
"""Seconds within which an error must have been said on a busy machine."""
STRANGER = Ed25519Signer.from_seed(bytes([9]) * 32)


@dataclass
class World:
    """A running bootstrap peer, its run, and a place to be wrong in."""

    here: Place
    swarm: Swarm
    manifest: Manifest

    @property
    def folder(self) -> Path:
        return self.here.folder

    def seed(self) -> Multiaddr:
        """Where the bootstrap peer listens."""
        return Multiaddr.parse(RunAddress.parse(self.swarm.address).peers[0])

    def run(self, arguments: Sequence[str], *, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. before: words in front of the interpreter (to enter a namespace)."""
        env = self.here.environment()
        return subprocess.run(
            [*before, sys.executable, "-m", "atoll", *arguments], env=env, cwd=self.folder, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False,
        )  # fmt: skip

    def refused(self, code: int, words: Sequence[str], *arguments: str, before: Sequence[str] = ()) -> str:
        """Run a command that must fail with this code and one line that has these words; that line."""
        temporary = set(self.here.temporary.iterdir())
        done = self.run(arguments, before=before)
        told = f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == code, told
        assert done.stderr.startswith("atoll: error: "), told
        assert done.stderr.count("\n") == 1, told
        # Swarms and nodes say what they do; whatever is meant for scripts says nothing but its result.
        speaks = arguments[0] == "swarm" or (arguments[0] in ("node", "observe") and "quiet" not in arguments)
        assert done.stdout == "" or speaks, told
        for word in words:
            assert word in done.stderr, told
        assert set(self.here.temporary.iterdir()) <= temporary
        return done.stderr

    def node(self, address: str, *more: str, state: str | Path = "node") -> list[str]:
        return ["node", address, "--state", str(self.folder / state), "--listen", LOOPBACK, "--log", "quiet",
                "--device", "cpu", *more]  # fmt: skip

    def with_manifest(self, name: str, manifest: Manifest) -> tuple[str, Path]:
        """An address and a state folder in which the manifest lies already, as after an earlier start."""
        state = self.folder / name
        state.mkdir()
        (state / "manifest.toml").write_text(manifest.to_toml())
        return str(RunAddress(manifest.run_id, [str(self.seed())])), state


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("wrong")
    with place(folder) as here:
        manifest = small_manifest(text_folder(folder / "text"))
        yield World(here, Swarm(here, manifest), manifest)


# ---------------------------------------------------------------------- manifests


WRONG: list[tuple[str, str, int, list[str]]] = [
    ("inner_steps = ", "inner_stepz = ", MANIFEST, ["inner_stepz", "unknown key", "'inner_steps'"]),
    ("[codec]", "[codek]", MANIFEST, ["codek", "'codec'"]),
    ("quorum = 2", 'quorum = "two"', MANIFEST, ["round.quorum", "an integer", "two"]),
    ("momentum = 0.6", "momentum = 1.5", MANIFEST, ["outer.momentum", "less than 1", "1.5"]),
    ("silence = 2.0", "silence = nan", MANIFEST, ["round.silence", "finite"]),
    ("quorum = 2", "quorum = 20", MANIFEST, ["quorum = 20", "max_group = 16"]),
    ("momentum = 0.6", "momentum = 0.5", MANIFEST, ["signature", "changed after signing"]),
    ("protocol = 1", "protocol = 2", VERSION, ["version 2", "speaks 1", "update atoll"]),
    ("[round]", "[round", MANIFEST, ["not a TOML file"]),
]
IN_THE_NODES_TABLES: list[tuple[str, str, int, list[str]]] = [
    ("width = ", "widht = ", MANIFEST, ["model.widht", "unknown key", "'width'"]),
    ("heads = 2", 'heads = "two"', MANIFEST, ["model.heads", "an integer", "two"]),
    ("heads = 2", "heads = 3", MANIFEST, ["width = 32", "heads = 3"]),
]


@pytest.mark.parametrize(
    ("command", "old", "new", "code", "words"),
    [
        *(("manifest check", *case) for case in WRONG + IN_THE_NODES_TABLES),
        # The bootstrap peer reads them in the same way; what the model's table means, it need not know.
        *(("bootstrap --state never --manifest", *case) for case in (WRONG[0], WRONG[5], WRONG[6], WRONG[7])),
    ],
)
def test_manifest(world: World, command: str, old: str, new: str, code: int, words: list[str]) -> None:
    text = world.manifest.to_toml()
    assert old in text
    path = world.folder / "wrong.toml"
    path.write_text(text.replace(old, new, 1))
    before = path.read_bytes()
    world.refused(code, [*words, "wrong.toml"], *command.split(), str(path))
    assert path.read_bytes() == before
    assert not (world.folder / "never").exists()


def test_manifest_of_a_run_that_a_node_cannot_do(world: World) -> None:
    """Signed, and sound for the protocol; the model's table is the node's to judge."""
    raw = world.manifest.model_dump() | {"signature": ""}
    manifest = Manifest.from_dict(raw | {"model": raw["model"] | {"widht": 7}}).sign(OWNER)
    address, state = world.with_manifest("model", manifest)
    world.refused(MANIFEST, ["model.widht", "'width'"], *world.node(address, state=state))


def test_manifest_that_is_missing_or_unsigned(world: World) -> None:
    world.refused(MANIFEST, ["no manifest", "manifest new"], "bootstrap", "--manifest", "nowhere.toml")
    path = world.folder / "unsigned.toml"
    path.write_text(world.manifest.replace(name="other").to_toml())
    world.refused(MANIFEST, ["not signed", f"manifest sign {path} --key"], "bootstrap", "--manifest", str(path))


def test_swarm_of_fewer_nodes_than_its_quorum(world: World) -> None:
    world.refused(
        MANIFEST, ["quorum = 2", "--nodes 1"], "swarm", "--nodes", "1", "--manifest", "run.toml", "--out", "o"
    )
    assert not (world.folder / "o").exists()


# ---------------------------------------------------------------------- addresses


def test_malformed_address(world: World) -> None:
    for address in (world.swarm.address[:-4], world.swarm.address.replace("atoll:", ""), "atoll:12@/ip4/1.2.3.4/tcp/1"):
        world.refused(NETWORK, ["address", "expected"], *world.node(address, state="malformed"))
        assert not (world.folder / "malformed").exists()


@pytest.mark.parametrize("command", ["node", "status --json", "observe"])
def test_unreachable_address(world: World, command: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: whoever dials is refused
        port = nobody.getsockname()[1]
        dead = Multiaddr("ip4", "127.0.0.1", port, ("tcp",), None, world.seed().peer)
        address = str(RunAddress(world.manifest.run_id, [str(dead)]))
        arguments = [*command.split(), address, "--timeout", "3"]
        if command != "status --json":
            arguments += ["--state", str(world.folder / command), "--listen", LOOPBACK]
        world.refused(NETWORK, [f"/ip4/127.0.0.1/tcp/{port}", "refused"], *arguments)


def test_address_with_another_peers_id(world: World) -> None:
    wrong = str(world.seed().at(STRANGER.peer_id))
    address = str(RunAddress(world.manifest.run_id, [wrong]))
    words = [STRANGER.peer_id, str(world.seed().peer), "another peer"]
    world.refused(NETWORK, words, *world.node(address, "--timeout", "5", state="peer"))


def test_address_of_another_run(world: World) -> None:
    other = small_manifest(world.folder / "text", outer={"momentum": 0.3})
    address = str(RunAddress(other.run_id, [str(world.seed())]))
    words = ["another run answers", world.manifest.run_id.hex()[:16], other.run_id.hex()[:16], "organiser"]
    message = world.refused(NETWORK, words, *world.node(address, "--timeout", "5", state="run"))
    assert "firewall" not in message
    # It was said long before, too.
    events = [e for e in read_events(world.folder / "run" / "events.jsonl") if e["event"] in ("looking", "unreached")]
    assert [e["event"] for e in events] == ["looking", "unreached"]
    assert events[0]["at"] == [str(world.seed())]
    assert "another run answers" in events[1]["reasons"][str(world.seed().peer)]


def test_address_in_a_file_that_is_not_there(world: World) -> None:
    for command in ("node", "status", "observe"):
        words = ["there is no file nofile", "atoll bootstrap --address-file"]
        line = world.refused(USAGE, words, command, "@nofile")
        assert "Errno" not in line
    (world.folder / "nothing").write_text("")
    world.refused(USAGE, ["nothing should hold one run address", "it is empty"], "status", "@nothing")


def test_what_status_tries_is_said_before_it_gives_up(world: World) -> None:
    wrong = str(world.seed().at(STRANGER.peer_id))
    done = world.run(["status", str(RunAddress(world.manifest.run_id, [wrong])), "--timeout", "8"])
    assert done.returncode == NETWORK
    said, error = done.stderr.splitlines()
    assert said.startswith("atoll: no peer of the run answers yet, trying on: ")
    assert "another peer id answers" in said
    assert error.startswith("atoll: error: ")


# ---------------------------------------------------------------------- data


def missing(folder: Path) -> Path:
    return folder


def no_text(folder: Path) -> Path:
    folder.mkdir()
    (folder / "picture.bin").write_bytes(bytes(4096))
    (folder / "empty.txt").write_bytes(b"")
    return folder


def other_text(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.txt").write_text("this is not what the organiser pinned\n" * 500)
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (missing, ["no folder or file", "--data"]),
        (no_text, ["no text", "2 files"]),
        (other_text, ["differs from the run's", "1 files", "the very files"]),
    ],
)
def test_data_of_a_node(world: World, make: Callable[[Path], Path], words: list[str]) -> None:
    data = make(world.folder / f"data-{make.__name__}")
    world.refused(DATA, words, *world.node(world.swarm.address, "--data", str(data), state="data"))
    assert (world.folder / "data" / "identity.key").exists(), "what it was is not lost"


def test_data_shorter_than_a_sequence(world: World) -> None:
    short = world.folder / "short.txt"
    short.write_text("too short for anything\n" * 4)
    manifest = small_manifest(short)
    address, state = world.with_manifest("short", manifest)
    world.refused(DATA, ["bytes", "sequence of 33"], *world.node(address, state=state))


def test_standard_library_that_differs(world: World) -> None:
    pinned = {"source": "stdlib", "files": "ab" * 32, "python": "3.11.99", "count": 700}
    raw = world.manifest.model_dump() | {"data": pinned, "signature": ""}
    manifest = Manifest.from_dict(raw).sign(OWNER)
    address, state = world.with_manifest("stdlib", manifest)
    words = ["differs from the run's", "abab", "Python 3.11.99", "run this node with Python"]
    world.refused(DATA, words, *world.node(address, state=state))


@pytest.mark.parametrize("command", ["manifest new", "swarm"])
def test_data_of_commands_that_make_runs(world: World, command: str) -> None:
    out = world.folder / "made"
    more = ["--data", "nowhere", "-o", str(out)]
    world.refused(DATA, ["no folder or file", "nowhere"], *command.split(), *more)
    assert not out.exists()


# ---------------------------------------------------------------------- checkpoints and state folders


def saved(folder: Path, run: str = "ab" * 32) -> Path:
    table = ModelConfig.from_table(MODEL)
    metadata = checkpoint.Metadata(run, "small", table.to_table(), 3, 2, 100, "cd" * 32)
    return checkpoint.save(folder, np.zeros(count_parameters(table), np.float32), metadata)


def truncated(folder: Path) -> Path:
    path = saved(folder)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def damaged(folder: Path) -> Path:
    path = saved(folder)
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(data)
    return path


def of_another_model(folder: Path) -> Path:
    path = saved(folder)
    record = json.loads(path.with_suffix(".json").read_text())
    record["model"]["width"] = 64
    path.with_suffix(".json").write_text(json.dumps(record))
    return path


def of_another_run(folder: Path) -> Path:
    """The tensors of one checkpoint beside the metadata of another."""
    path = saved(folder)
    other = saved(folder.with_name(f"{folder.name}-2"), "ef" * 32)
    shutil.copy(other, path)
    return path


def not_there(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (truncated, ["truncated", "expected"]),
        (damaged, ["damaged"]),
        (of_another_model, ["other tensors than its model", "width 64"]),
        (of_another_run, ["is of run efefef", "of run ababab"]),
        (not_there, ["no checkpoint", "step-"]),
    ],
)
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_checkpoint(world: World, make: Callable[[Path], Path], words: list[str], more: list[str]) -> None:
    folder = world.folder / f"checkpoint-{make.__name__}{'-json' * len(more)}"
    path = make(folder)
    before = {file: file.read_bytes() for file in folder.iterdir()}
    world.refused(STATE, words, "generate", str(path), *more)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_state_folder_of_another_run(world: World) -> None:
    state = world.folder / "other-run"
    state.mkdir()
    Store.open(state / "store", bytes(32), ChunkLayout(1000, 64)).close()
    before = sorted((state / "store").rglob("*"))
    words = ["holds the state of run 0000", "--state"]
    world.refused(STATE, words, *world.node(world.swarm.address, state=state))
    assert sorted((state / "store").rglob("*")) == before


def test_state_folder_in_use(world: World) -> None:
    state = world.folder / "in-use"
    with StateFolder(state):
        words = ["in use", str(os.getpid()), "--state"]
        world.refused(STATE, words, *world.node(world.swarm.address, state=state))
    words = ["in use", str(world.swarm.bootstrap.pid)]
    world.refused(STATE, words, "bootstrap", "--manifest", "run.toml", "--state", str(world.folder / "bootstrap"))


def test_state_folder_that_is_a_file(world: World) -> None:
    (world.folder / "file").write_text("precious")
    world.refused(STATE, ["not a folder", "--state"], *world.node(world.swarm.address, state="file"))
    assert (world.folder / "file").read_text() == "precious"


def test_state_folder_without_permission(world: World) -> None:
    before = []
    if os.geteuid() == 0:
        # Root as everybody else, who may not write against a folder's mode.
        before = ["setpriv", "--bounding-set", "-dac_override"]
        if shutil.which("setpriv") is None:
            pytest.skip("root may write anywhere")
    closed = world.folder / "closed"
    closed.mkdir(mode=0o500)
    words = ["no permission", "--state"]
    world.refused(STATE, words, *world.node(world.swarm.address, state=closed / "state"), before=before)
    assert list(closed.iterdir()) == []


def test_identity_that_is_damaged(world: World) -> None:
    state = world.folder / "identity"
    state.mkdir()
    (state / "identity.key").write_bytes(b"not a key")
    world.refused(STATE, ["identity", "restore"], *world.node(world.swarm.address, state=state))
    assert (state / "identity.key").read_bytes() == b"not a key"


# ---------------------------------------------------------------------- ports, disks, devices


def test_port_taken_by_a_plain_socket(world: World) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        words = [f"port {taken.getsockname()[1]}", "taken"]
        arguments = world.node(world.swarm.address, state="port")
        arguments[arguments.index(LOOPBACK)] = listen
        world.refused(RESOURCE, words, *arguments)
        world.refused(RESOURCE, words, "bootstrap", "-m", "run.toml", "--state", "port-2", "--listen", listen)


def test_port_taken_by_another_p2p_daemon(world: World) -> None:
    """libp2p would share the port without a word, and each would get half of the connections."""
    port = world.seed().port
    arguments = world.node(world.swarm.address, state="shared")
    arguments[arguments.index(LOOPBACK)] = f"/ip4/127.0.0.1/tcp/{port}"
    world.refused(RESOURCE, [f"port {port}", "taken"], *arguments)


def elsewhere(script: str) -> list[str]:
    """Words that run a command after ``script``, in a mount namespace of its own, so that nobody else sees it."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--mount", "sh", "-c", f'{script} && exec "$@"', "-"]


def can_mount(folder: Path) -> bool:
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None:
        return False
    command = [*elsewhere(f"mount -t tmpfs none {folder}"), "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-o size=16k none {0} && (cat /dev/zero >{0}/full 2>/dev/null || true)", ["no space left"]),
        ("-o ro none {0}", ["read-only"]),
    ],
    ids=["full", "read-only"],
)
@pytest.mark.parametrize("command", ["node", "bootstrap", "manifest new", "swarm"])
def test_disk(world: World, options: str, words: list[str], command: str) -> None:
    disk = world.folder / "disk"
    disk.mkdir(exist_ok=True)
    if not can_mount(disk):
        pytest.skip("this user may not mount")
    before = elsewhere(f"mount -t tmpfs {options.format(disk)}")
    arguments = {
        "node": world.node(world.swarm.address, state=disk / "state"),
        "bootstrap": ["bootstrap", "-m", "run.toml", "--state", str(disk / "state"), "--listen", LOOPBACK],
        "manifest new": ["manifest", "new", "--data", str(world.folder / "text"), "-o", str(disk / "new.toml")],
        "swarm": ["swarm", "--nodes", "2", "--manifest", "run.toml", "--out", str(disk / "out")],
    }
    line = world.refused(RESOURCE, [str(disk)], *arguments[command], before=before)
    assert any(word in line.lower() for word in words), line


def test_a_disk_that_fills_later_does_not_stop_a_node(world: World) -> None:
    """Room for some commits: the node goes on with the run, warns, and leaves in order."""
    manifest = small_manifest(world.folder / "text", round={"quorum": 1})
    address, state = world.with_manifest("fills", manifest)
    if not can_mount(state):
        pytest.skip("this user may not mount")
    kept = world.folder / "fills.toml"
    kept.write_text(manifest.to_toml())
    before = elsewhere(f"mount -t tmpfs -o size=192k none {state} && cp {kept} {state}/manifest.toml")
    arguments = world.node(address, state=state)
    arguments[arguments.index("quiet")] = "json"
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "atoll", *arguments], env=world.here.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        full, rounds, words = "", 0, []
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "warning":
                words.append(event["message"])
                full = full or ("not logged" in event["message"] and event["message"]) or ""
            rounds += bool(full) and event["event"] == "commit"
            if rounds == 3:
                break
        assert rounds == 3, words
        assert "no space left" in full.lower(), full
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=15)
        assert process.returncode == 130, out + err
        assert err == ""
    finally:
        process.kill()
        process.communicate()


def cuda() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


@pytest.mark.skipif(cuda(), reason="there is a GPU")
def test_gpu_that_is_absent(world: World) -> None:
    arguments = world.node(world.swarm.address, state="gpu")
    arguments[arguments.index("cpu")] = "cuda"
    world.refused(RESOURCE, ["'cuda'", "0 usable CUDA devices", "--device auto or cpu"], *arguments)
    path = saved(world.folder / "gpu-checkpoint")
    world.refused(RESOURCE, ["'cuda:3'", "--device auto or cpu"], "generate", str(path), "--device", "cuda:3")
    world.refused(RESOURCE, ["'cuda'"], "swarm", "--nodes", "2", "--device", "cuda", "-m", "run.toml", "-o", "gpu-out")


# ---------------------------------------------------------------------- for scripts


def test_json_is_one_object(world: World) -> None:
    done = world.run(["status", world.swarm.address, "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run_id"] == world.manifest.run_id.hex()
    assert done.stderr == ""
    done = world.run(["manifest", "show", "run.toml", "--json"])
    assert json.loads(done.stdout)["run_id"] == world.manifest.run_id.hex()
    done = world.run(["generate", str(saved(world.folder / "json")), "--json", "--length", "5"])
    assert json.loads(done.stdout)["text"].startswith("def ")


def test_zz_nothing_was_left(world: World) -> None:
    """Last: after all of that, one bootstrap peer runs, unharmed, and nothing else."""
    expected = {world.swarm.bootstrap.pid, *world.swarm.bootstrap.below()}
    assert set(leaks.marked(world.here.mark)) == expected
    said = world.swarm.bootstrap.err.read_text()
    assert f"to join: atoll node {world.swarm.address}" in said
    assert not any(word in said for word in ("warning", "error"))
    identity = load_identity(world.folder / "bootstrap" / "identity.key")
    assert identity.peer_id == world.seed().peer
