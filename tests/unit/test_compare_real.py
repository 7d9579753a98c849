"""How ``atoll compare`` watches over real nodes; no process is started here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from atoll.node import checkpoint
from atoll.node.compare import real
from atoll.node.compare.real import _Nodes
from atoll.node.compare.runner import _take
from atoll.node.compare.scenario import Scenario
from atoll.node.compare.study import Job, Row
from atoll.node.run_defaults import new_manifest
from atoll.node.swarm.launch import relayed
from atoll.node.swarm.ledger import Ledger
from atoll.node.swarm.processes import Child, Family, Interrupts
from atoll.protocol.errors import AtollError, NetworkError, ResourceError
from atoll.protocol.manifest import Manifest

SMALL = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32, "context": 32}
EVERY = 900


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("text")
    for number in range(24):
        (folder / f"{number}.txt").write_text("a reef around a lagoon " * 20 + str(number))
    return new_manifest("small", data=folder, model=SMALL, inner_steps=10, batch=2, codec="int8", rounds=3)


@dataclass
class Node:
    """What a child is to whoever watches it."""

    name: str
    code: int | None = None
    output: Path = Path("output.log")
    told: list[dict[str, Any]] = field(default_factory=list)

    def events(self) -> list[dict[str, Any]]:
        told, self.told = self.told, []
        return told

    def last_words(self) -> str:
        return "the words" if self.code else ""

    def tell(self, event: str, **fields: Any) -> None:
        self.told.append({"event": event, "t": 0.0, **fields})


class Watched:
    """Nodes under a clock of which ``happens`` decides every look what they do."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[list[Node], float], None]):
        self.now, self.happens = 0.0, happens
        self.nodes = [Node("node-0"), Node("node-1")]
        monkeypatch.setattr(real.time, "monotonic", lambda: self.now)
        self.watched = _Nodes(cast(Family, None), cast(Interrupts, self), folder, cast(list[Child], self.nodes))
        self.watched.ledger = Ledger(node.name for node in self.nodes)

    def wait(self, seconds: float) -> bool:
        self.now += 10.0
        self.happens(self.nodes, self.now)
        return False

    def watch(self, manifest: Manifest) -> None:
        self.watched.watch(manifest, lambda done, of: None)


def commit(node: Node, number: int) -> None:
    node.tell("commit", round=number, outer_step=number, id=f"{number}", members=["a", "b"], tokens=number)


@pytest.mark.parametrize(("code", "kind"), [(4, NetworkError), (-9, ResourceError), (0, ResourceError)])
def test_a_node_that_ends_before_the_run_does_fails_it_at_once(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[AtollError]
) -> None:
    def happens(nodes: list[Node], now: float) -> None:
        commit(nodes[0], 1)
        nodes[1].code = code

    watched = Watched(tmp_path, monkeypatch, happens)
    with pytest.raises(kind, match=r"node-1 ended \((exit \d|SIGKILL)\) after 1 of 3 outer steps") as error:
        watched.watch(manifest)
    assert watched.now == 10
    assert ("the words" in str(error.value)) == (code != 0)


def test_nodes_that_end_with_the_run_are_fine(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def happens(nodes: list[Node], now: float) -> None:
        commit(nodes[0], int(now) // 10)
        if now == 30:
            nodes[0].code = 0
        if now == 50:
            nodes[1].code = 0

    watched = Watched(tmp_path, monkeypatch, happens)
    watched.watch(manifest)
    assert watched.now == 50


def test_a_run_is_stuck_when_nobody_makes_steps(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def happens(nodes: list[Node], now: float) -> None:
        nodes[1].tell("progress", steps=int(min(now, 5000)) // 500, state="training")

    watched = Watched(tmp_path, monkeypatch, happens)
    with pytest.raises(ResourceError, match="no commit and no inner step"):
        watched.watch(manifest)
    assert 5000 + real.PATIENCE < watched.now < 5050 + real.PATIENCE
    # without samples until a round by time is due
    watched = Watched(tmp_path, monkeypatch, lambda nodes, now: None)
    with pytest.raises(ResourceError, match="no commit and no inner step"):
        watched.watch(manifest.replace(round={"by": "time", "every": EVERY, "grace": 0.0}))
    assert EVERY + real.PATIENCE < watched.now < EVERY + real.PATIENCE + 50


def test_a_child_s_failure_keeps_its_code(tmp_path: Path) -> None:
    for code in (2, 3, 4, 5, 6, 7, 8):
        assert relayed(cast(Child, Node("a", code)), "why").exit_code == code
    for code in (-9, 130, 0):
        assert relayed(cast(Child, Node("a", code)), "why").exit_code == 7
    with pytest.raises(RuntimeError, match=r"digests differ .all of its output"):
        relayed(cast(Child, Node("a", 1)), "digests differ")


def test_real_nodes_run_alone(manifest: Manifest) -> None:
    simulated, alone = Row("a", manifest, Scenario()), Row("b", manifest, Scenario(real=True))
    jobs = [Job(row, seed, manifest) for seed in (0, 1) for row in (simulated, alone, simulated)]
    queue, running, order = list(jobs), list[Job](), []
    while queue:
        job = _take(queue, running)
        if job is None:
            order.append([(each.row.name, each.seed) for each in running])
            running = []
        else:
            running.append(job)
    assert order == [[("a", 0), ("a", 0)], [("b", 0)], [("a", 1), ("a", 1)]]
    assert [job.row.name for job in running] == ["b"]


def test_checkpoints_are_kept_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "step-1.safetensors", tmp_path / "kept"
    path.write_bytes(b"parameters")
    assert checkpoint.keep(path, folder) is None, "its metadata is gone"
    assert list(folder.iterdir()) == []
    path.with_suffix(".json").write_text("{}")

    def no_links(source: Path, target: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", no_links)
    kept = checkpoint.keep(path, folder)
    assert kept is not None
    assert kept.read_bytes() == b"parameters"
    assert kept.with_suffix(".json").read_text() == "{}"
