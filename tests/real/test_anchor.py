"""``atoll anchor`` against a run of real processes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.bootstrap.anchors import ANCHOR_FILE
from atoll.protocol.address import Multiaddr, RunAddress
from atoll.protocol.anchor import open_anchor
from atoll.protocol.identity import Ed25519Signer

from .harness import OWNER, Place, Swarm, place, small_manifest, text_folder, until

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc"),
]

STRANGER = Ed25519Signer.from_seed(bytes([9]) * 32)


def atoll(here: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "atoll", *arguments], env=here.environment(), capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip


def key(path: Path, signer: Ed25519Signer) -> str:
    path.write_bytes(signer.marshal())
    path.chmod(0o600)
    return str(path)


def test_the_owner_anchors_a_commit_and_everybody_keeps_it(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        swarm = Swarm(here, small_manifest(text_folder(tmp_path / "text"), budget={"rounds": 100_000}))
        owner = key(tmp_path / "owner.key", OWNER)
        nodes = [swarm.start("a"), swarm.start("b")]
        for node in nodes:
            node.wait("a commit with an outer step", lambda node=node: node.all("commit", outer_step=1))  # type: ignore[misc]
        done = atoll(here, "anchor", swarm.address, "--key", owner, "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["given_to"] == 3, "the bootstrap peer and both nodes"
        for node in nodes:
            assert node.wait_for("anchor", 10, commit=said["commit"])["held"]
            commit = node.all("commit", id=said["commit"])[0]
            assert (said["round"], said["outer_step"]) == (commit["round"], commit["outer_step"])
        kept = (tmp_path / "bootstrap" / ANCHOR_FILE).read_bytes()
        assert open_anchor(kept, OWNER, swarm.manifest.run_id, OWNER.peer_id).number == said["number"]

        done = atoll(here, "anchor", swarm.address, "--key", key(tmp_path / "other.key", STRANGER))
        assert (done.returncode, done.stdout) == (2, "")
        assert OWNER.peer_id in done.stderr
        assert STRANGER.peer_id in done.stderr

        def shown() -> bool:
            found = json.loads(atoll(here, "status", swarm.address, "--json").stdout)
            held = [peer for peer in found["peers"] if peer["anchored"]]
            return bool(found["anchor"]) and found["anchor"]["number"] == said["number"] and len(held) == 2

        until("the anchor in the records of both nodes", shown, 40, state=swarm.story)


def test_nobody_answers(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        dead = Multiaddr.parse(f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER.peer_id}")
        address = str(RunAddress(bytes(32), [str(dead)]))
        done = atoll(here, "anchor", address, "--key", key(tmp_path / "owner.key", OWNER), "--timeout", "2")
        assert done.returncode == 4, done.stderr
        assert "Traceback" not in done.stderr
