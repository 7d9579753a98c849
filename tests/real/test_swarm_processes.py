"""A small run of real processes on 127.0.0.1, and everything that may happen to them.

Most tests share one run that goes on for ever: nodes ``a`` and ``b`` are never touched, the others are killed, stopped
and started again. Each test leaves the run as it found it, or with more nodes, so any of them can run alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from atoll.node.events import Event
from atoll.protocol.address import Multiaddr, RunAddress
from atoll.protocol.identity import load_identity
from atoll.protocol.manifest import Manifest
from atoll.protocol.store import Store

from . import leaks
from .harness import (
    MODEL,
    SILENCE,
    STEPS,
    Place,
    Process,
    Swarm,
    common_round,
    disagreements,
    place,
    signal_all,
    small_manifest,
    stop_tree,
    text_folder,
    until,
)

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc"),
]

LEAVE = 10.0
"""Seconds within which a process must have ended after Ctrl-C or SIGTERM."""
BACK = 40.0
"""Seconds within which a node contributes again: a start of its process and a round, on a busy machine."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A bootstrap peer and the nodes a, b, c of a run that does not end."""
    folder = tmp_path_factory.mktemp("swarm")
    with place(folder) as here:
        found = Swarm(here, small_manifest(text_folder(folder / "text"), budget={"rounds": 100_000}))
        for name in "abc":
            found.start(name)
        for name in "abc":
            found.nodes[name].wait_for("commit")
        yield found


def node(swarm: Swarm, name: str) -> Process:
    """The node of that name, started if it does not run."""
    if name not in swarm.nodes or swarm.nodes[name].code is not None:
        swarm.start(name)
    contributes(swarm, swarm.nodes[name])
    return swarm.nodes[name]


def contributes(swarm: Swarm, process: Process, seconds: float = BACK) -> Event:
    """Wait until a commit that ``a`` logs from now on has averaged something of this node; that commit."""
    a = swarm.nodes["a"]
    peer = process.wait("its first event", lambda: process.poll() and process.peer, seconds)
    before = len(a.all("commit"))

    def contributed() -> list[Event]:
        assert process.code is None, f"{process.name} ended\n{process.story()}"
        return [event for event in a.all("commit")[before:] if event["contributors"].get(peer, 0) > 0]

    try:
        return a.wait(f"a commit with a contribution of {process.name}", contributed, seconds)[0]
    except AssertionError as error:
        raise AssertionError(f"{error}\n{process.story()}") from None


def agree(swarm: Swarm) -> None:
    """Wait for a round after now that all running nodes have logged, and compare all that they ever logged."""
    running = [process for process in swarm.nodes.values() if process.code is None]
    newest = max(process.round for process in running)
    until("a round that all have", lambda: common_round(running) > newest, BACK, state=swarm.story)
    assert disagreements([*swarm.nodes.values(), *swarm.past]) == []


def next_commit(survivor: Process, since: float, without: str = "") -> float:
    """Wait for the survivor's first commit after ``since`` (whose roster lacks the peer ``without``), and hold it
    against the promised bound, (v + 1)·(D + 3T) and the inner phase; the seconds that it took."""

    def found() -> list[Event]:
        return [e for e in survivor.all("commit") if e["t"] > since and without not in e["members"]]

    commit = survivor.wait("the next commit", found, 60)[0]
    times = [event["t"] for event in survivor.all("commit") if event["t"] <= since]
    phase = statistics.median(b - a for a, b in pairwise(times[-8:])) if len(times) > 1 else 5.0
    voids = sum(since < event["t"] <= commit["t"] for event in survivor.all("void"))
    bound = max(event["bound"] for event in survivor.all("seal") if event["t"] <= commit["t"])
    took = commit["t"] - since
    assert took <= (voids + 1) * bound + 3 * phase, survivor.story()
    # Every roster ended within its own bound, too: void, or with a commit of its round or of a later one.
    now = survivor.poll()[-1]["t"]
    commits = survivor.all("commit") + survivor.all("resync")
    for seal in survivor.all("seal"):
        ends = [e["t"] for e in survivor.all("void") if e["roster"] == seal["roster"]]
        ends += [e["t"] for e in commits if e["t"] >= seal["t"] and e["round"] >= seal["round"]]
        assert min(ends, default=now) - seal["t"] <= seal["bound"], f"{seal}\n{survivor.story()}"
    print(f"next commit after {took:.1f} s, {voids} void rosters, bound {bound:.1f} s")
    return took


def nothing_left(process: Process, pids: list[int], held: leaks.Sockets, seconds: float = 3.0) -> None:
    """None of these processes lives, and what they listened on is closed."""

    def left() -> list[str]:
        return [f"process {pid}" for pid in pids if leaks.alive(pid)] + held.still_open()

    until(f"the end of all that {process.name} was", lambda: not left(), seconds, state=lambda: str(left()))


def half_written(folder: Path) -> list[str]:
    """Temporary names in a state folder."""
    return [str(p) for p in folder.rglob("*") if any(part in p.name for part in (".tmp", ".part", ".new"))]


# ---------------------------------------------------------------------- a whole run


def test_commits_tell_what_the_trainers_time_went_into(swarm: Swarm) -> None:
    a = node(swarm, "a")
    before = len(a.all("commit"))
    a.wait("three more commits", lambda: len(a.all("commit")) >= before + 3, BACK)
    first, last = a.all("commit")[before - 1], a.all("commit")[-1]
    spent = {name: last[name] - first[name] for name in ("trained", "held", "waited")}
    assert spent["trained"] > 0
    assert spent["held"] > 0, "without overlap trainers stand still from the freeze on"
    assert abs(sum(spent.values()) - (last["t"] - first["t"])) < 0.5, spent


def test_four_rounds(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        manifest = small_manifest(
            text_folder(tmp_path / "text"), budget={"rounds": 4}, state={"checkpoint_every": 50}, round={"overlap": 20}
        )
        swarm = Swarm(here, manifest)
        nodes = [swarm.start(name) for name in "abc"]
        assert {process.name: process.ended(90) for process in nodes} == dict.fromkeys("abc", 0), swarm.story()
        assert all(process.err.read_text() == "" for process in nodes)

        # One state: every node logged every outer step, and all logged the same digest for it.
        assert disagreements(nodes) == []
        for process in nodes:
            assert {event["outer_step"] for event in process.all("digest")} == {0, 1, 2, 3, 4}
            assert process.all("exit", code=0)
            assert (process.state / "checkpoints" / "step-00000004.safetensors").exists()

        # The mean over those whose data arrived, as the commits say: on an idle network, everybody's.
        names = {process.peer: process.name for process in nodes}
        for process in nodes:
            commits = process.all("commit")
            assert {event["outer_step"] for event in commits} >= {1, 2, 3, 4}
            for event in commits:
                assert set(event["contributors"]) == set(event["members"]) <= set(names)
                assert all(0 <= share <= 1 for share in event["contributors"].values())
        assert {peer for event in nodes[0].all("commit") for peer, share in event["contributors"].items() if share} == {
            *names
        }
        no_sample_twice(manifest, nodes)
        # While rounds were in flight they trained on; in the last there was nothing to run ahead for.
        for process in nodes:
            assert {event["outer_step"] for event in process.all("commit") if "stopped" in event} >= {2, 3}
            assert all("stopped" not in event for event in process.all("commit") if event["outer_step"] == 4)

        swarm.bootstrap.signal(signal.SIGTERM)
        assert swarm.bootstrap.ended(LEAVE) == 0
        assert leaks.gone(here.mark, leaks.Sockets({}), seconds=2) == []
        assert list(here.temporary.iterdir()) == []


def test_rounds_by_time_with_norms_and_directions(tmp_path: Path) -> None:
    """The manifest's other rules with real trainers: the same bits everywhere, and no sample twice."""
    every = 3.0
    rules = {"by": "time", "every": every, "grace": 0.0, "weights": "equal", "average": "radial", "stale": "drop"}
    with place(tmp_path) as here:
        manifest = small_manifest(text_folder(tmp_path / "text"), budget={"rounds": 4}, round=rules)
        swarm = Swarm(here, manifest)
        nodes = [swarm.start(name) for name in "ab"]
        assert {process.name: process.ended(90) for process in nodes} == dict.fromkeys("ab", 0), swarm.story()
        assert disagreements(nodes) == []
        for process in nodes:
            steps = {event["outer_step"]: event["t"] for event in process.all("commit")}
            assert set(steps) >= {1, 2, 3, 4}
            assert all(steps[n + 1] - steps[n] >= every - 0.1 for n in (1, 2, 3)), steps
            shares = [s for event in process.all("commit") for s in event["contributors"].values()]
            assert shares.count(1.0) >= 6
        no_sample_twice(manifest, nodes)


def no_sample_twice(manifest: Manifest, nodes: list[Process]) -> None:
    """The commits' leases are disjoint, and no node took more than it was leased."""
    leased: dict[str, int] = dict.fromkeys((process.peer for process in nodes), 0)
    spans: list[tuple[int, int]] = []
    layout = manifest.layout
    store = Store.open(nodes[0].state / "store", manifest.run_id, layout)
    try:
        bodies = [commit.body for entry in store.commits() if (commit := store.commit(entry.id)) is not None]
    finally:
        store.close()
    assert len(bodies) == len(nodes[0].all("commit"))
    used = dict.fromkeys(leased, 0)
    for body in bodies:
        for member in body.seal.members:
            used[member.peer] += member.weight // int(MODEL["context"])
            assert used[member.peer] <= leased[member.peer], "more than it had been leased until then"
        for lease in body.leases:
            leased[body.seal.members[lease.member].peer] += lease.span.count
            spans.append((lease.span.start, lease.span.start + lease.span.count))
    spans.sort()
    assert all(first[1] <= second[0] for first, second in pairwise(spans))
    assert sum(used.values()) * int(MODEL["context"]) == bodies[-1].tokens


# ---------------------------------------------------------------------- coming and going


def test_a_late_joiner_catches_up_and_contributes(swarm: Swarm) -> None:
    a = swarm.nodes["a"]
    a.wait("a few rounds", lambda: a.round >= 3)
    late = swarm.start("d")
    late.wait_for("start")
    contributes(swarm, late)
    # From the others' state, or, a few rounds behind only, by their commits and averages one by one.
    assert late.all("resync") or min(event["height"] for event in late.all("commit")) == 1
    assert late.digests()[0] == a.digests()[0], "and knew where the run began"
    agree(swarm)


def test_a_killed_node_leaves_nothing_and_the_others_go_on(swarm: Swarm) -> None:
    a, victim = swarm.nodes["a"], node(swarm, "d")
    victim.next("state", state="training")
    pids, held = [victim.pid, *victim.below()], victim.note_sockets()
    assert len(pids) == 3
    assert len(held.found) >= 3
    peer, since = victim.peer, time.time()
    victim.signal(signal.SIGKILL)
    victim.ended(5)
    nothing_left(victim, pids, held)
    next_commit(a, since, without=peer)
    agree(swarm)


def test_a_killed_node_resumes_on_its_folder(swarm: Swarm) -> None:
    before = node(swarm, "d")
    before.wait("a checkpoint or commits to resume from", lambda: before.round > 0)
    before.signal(signal.SIGKILL)
    before.ended(5)
    known = before.round
    after = swarm.start("d")
    resumed = after.wait_for("resumed")
    assert after.peer == before.peer
    assert resumed["round"] >= known - 1, "what it had logged as committed is there"
    contributes(swarm, after)
    assert min(after.digests()) >= known - 1, "it never was at the beginning again"
    agree(swarm)
    # What the killed process left in the temporary folder was swept up by the next one.
    running = 1 + sum(process.code is None for process in swarm.nodes.values())
    assert len(list(swarm.here.temporary.iterdir())) == running


@pytest.mark.parametrize("daemon", [True, False], ids=["with p2pd", "without p2pd"])
def test_a_stopped_node_comes_back(swarm: Swarm, daemon: bool) -> None:
    a, victim = swarm.nodes["a"], node(swarm, "c")
    peer = victim.peer
    since = time.time()
    stopped = stop_tree(victim, but=[] if daemon else [victim.p2pd()])
    try:
        next_commit(a, since, without=peer)
        # Longer than T, so that it counts as dead and knows so itself.
        until("more than T", lambda: time.time() - since > 1.6 * SILENCE, 10)
        count = len(a.all("commit"))
        a.wait("two more rounds without it", lambda: len(a.all("commit")) >= count + 2, 60)
        assert all(peer not in event["members"] for event in a.all("commit")[count:])
    finally:
        signal_all(stopped, signal.SIGCONT)
    contributes(swarm, victim)
    assert any("held up" in event["message"] for event in victim.all("warning"))
    agree(swarm)


def test_a_killed_p2pd_is_started_again(swarm: Swarm) -> None:
    victim = node(swarm, "c")
    before = victim.p2pd()
    ports = {text for text in victim.note_sockets().found.values() if "tcp" in text}
    os.kill(before, signal.SIGKILL)

    def again() -> int:
        return next((p for p, c in victim.below().items() if "p2pd" in c.partition(" ")[0] and p != before), 0)

    victim.wait("another p2pd", again, 15)
    contributes(swarm, victim)
    assert {text for text in victim.note_sockets().found.values() if "tcp" in text} == ports
    assert victim.code is None
    agree(swarm)


def test_a_killed_trainer_is_started_again(swarm: Swarm) -> None:
    victim = node(swarm, "c")
    before = victim.trainer()
    os.kill(before, signal.SIGKILL)
    assert victim.next("trainer", 40)["pid"] != before
    contributes(swarm, victim)
    assert any("SIGKILL" in event["message"] for event in victim.all("warning"))
    agree(swarm)


def test_a_node_whose_trainer_cannot_be_started_again_ends_and_says_so(swarm: Swarm) -> None:
    data = text_folder(swarm.here.folder / "text-of-g")
    victim = swarm.start("g", "--data", str(data))
    contributes(swarm, victim)
    shutil.rmtree(data)
    os.kill(victim.trainer(), signal.SIGKILL)
    assert victim.ended(BACK) == 5, victim.story()
    (said,) = victim.err.read_text().splitlines()
    assert said.startswith("atoll: error: the trainer was started 2 times in a row and failed again:")
    assert victim.all("exit", code=5)
    agree(swarm)


def test_the_run_goes_on_without_its_bootstrap_and_meets_it_again(swarm: Swarm) -> None:
    a, other = swarm.nodes["a"], node(swarm, "d")
    other.wait("peers on disk", lambda: (other.state / "peers").exists())
    pids, held = [swarm.bootstrap.pid, *swarm.bootstrap.below()], swarm.bootstrap.note_sockets()
    address, since = swarm.address, time.time()
    try:
        swarm.bootstrap.signal(signal.SIGKILL)
        swarm.bootstrap.ended(5)
        nothing_left(swarm.bootstrap, pids, held)
        next_commit(a, since)
        count = len(a.all("commit"))
        a.wait("three rounds without it", lambda: len(a.all("commit")) >= count + 3)
        # Who has been there before needs it as little.
        other.signal(signal.SIGKILL)
        other.ended(5)
        contributes(swarm, swarm.start("d"))
    finally:
        swarm.start_bootstrap()
    assert swarm.address == address, "on its folder it has the same identity and port"
    contributes(swarm, swarm.start("e"))
    agree(swarm)


# ---------------------------------------------------------------------- leaving


def leaves(swarm: Swarm, process: Process, number: int, before: set[Path]) -> None:
    """Signal a process, and see that it ends in time, as documented, and leaves nothing."""
    pids, held = [process.pid, *process.below()], process.note_sockets()
    began = time.monotonic()
    process.signal(number)
    left(swarm, process, began, pids, held, before, number)


def left(
    swarm: Swarm, process: Process, began: float, pids: list[int], held: leaks.Sockets, before: set[Path], number: int
) -> None:
    code = process.ended(LEAVE)
    took = time.monotonic() - began
    expected = 0 if number == signal.SIGTERM else 130
    assert code == expected, process.story()
    assert all(event["code"] == expected for event in process.all("exit"))
    assert took < LEAVE
    nothing_left(process, pids, held, 1.0)
    assert set(swarm.here.temporary.iterdir()) <= before
    assert half_written(process.state) == []
    assert process.err.read_text() == ""
    print(f"{process.name} left after {took:.1f} s")


def others(swarm: Swarm, process: Process) -> set[Path]:
    """The sockets' folders of all others."""
    texts = process.note_sockets().found.values()
    own = {text.split()[1].rsplit("/", 1)[0] for text in texts if text.startswith("unix")}
    return {path for path in swarm.here.temporary.iterdir() if str(path) not in own}


def test_sigint_while_training(swarm: Swarm) -> None:
    a, victim = swarm.nodes["a"], node(swarm, "d")
    before, since = others(swarm, victim), time.time()
    victim.next("state", state="training")
    leaves(swarm, victim, signal.SIGINT, before)
    assert victim.all("exit", code=130)
    next_commit(a, since, without=victim.peer)
    agree(swarm)


def test_sigterm_while_averaging(swarm: Swarm) -> None:
    a, victim = swarm.nodes["a"], node(swarm, "d")
    before = others(swarm, victim)
    pids, held = [victim.pid, *victim.below()], victim.note_sockets()
    # Stopped between seal and commit, it finds the signal when it goes on, in the very middle of the round.
    for _ in range(20):
        victim.next("seal")
        victim.signal(signal.SIGSTOP)
        events = [event["event"] for event in victim.poll() if event["event"] in ("seal", "commit", "void")]
        if events[-1] == "seal":
            break
        victim.signal(signal.SIGCONT)
    else:
        pytest.fail("could not stop it within a round")
    since, began = time.time(), time.monotonic()
    victim.signal(signal.SIGTERM)
    victim.signal(signal.SIGCONT)
    left(swarm, victim, began, pids, held, before, signal.SIGTERM)
    next_commit(a, since, without=victim.peer)
    agree(swarm)


def test_leaving_twice_is_leaving(swarm: Swarm) -> None:
    """Whoever presses Ctrl-C again, because leaving takes a second or two, must not break the leaving."""
    victim = node(swarm, "d")
    before = others(swarm, victim)
    pids, held = [victim.pid, *victim.below()], victim.note_sockets()
    began = time.monotonic()
    victim.signal(signal.SIGINT)
    victim.wait_for("state", LEAVE, state="leaving")
    while victim.code is None and time.monotonic() - began < LEAVE:
        victim.signal(signal.SIGINT)
        victim.signal(signal.SIGTERM)
        victim.poll()
        time.sleep(0.05)  # the rhythm of the keys, not a synchronisation
    left(swarm, victim, began, pids, held, before, signal.SIGINT)


@pytest.mark.parametrize(
    ("when", "number"),
    [("starting", signal.SIGINT), ("looking for the run", signal.SIGTERM)],
    ids=["starting", "looking"],
)
def test_leaving_while_joining(swarm: Swarm, when: str, number: int) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: whoever dials is refused
        before = set(swarm.here.temporary.iterdir())
        address = swarm.address
        if when == "looking for the run":
            peer = load_identity(swarm.here.folder / "bootstrap" / "identity.key").peer_id
            dead = Multiaddr("ip4", "127.0.0.1", nobody.getsockname()[1], ("tcp",), None, peer)
            address = str(RunAddress(swarm.manifest.run_id, [str(dead)]))
        name = f"f-{when.split()[0]}"
        state = swarm.here.folder / name
        process = Process(
            swarm.here, name,
            ["node", address, "--state", str(state), "--listen", "/ip4/127.0.0.1/tcp/0", "--log", "quiet"], state,
        )  # fmt: skip
        if when == "starting":
            process.wait_for("state", state="starting")
            process.wait("its trainer", lambda: any("atoll.node.worker" in c for c in process.below().values()))
        else:
            process.wait("its p2pd", lambda: any("p2pd" in c.partition(" ")[0] for c in process.below().values()))
        leaves(swarm, process, number, before)


# ---------------------------------------------------------------------- the swarm command


def swarm_command(here: Place, name: str, **sections: Mapping[str, Any]) -> Process:
    """``atoll swarm`` of two nodes and an endless run."""
    manifest = small_manifest(text_folder(here.folder / "text"), **{"budget": {"rounds": 100_000}, **sections})
    (here.folder / "swarm.toml").write_text(manifest.to_toml())
    return Process(
        here, name,
        ["swarm", "--nodes", "2", "--manifest", str(here.folder / "swarm.toml"), "--out", str(here.folder / name)],
    )  # fmt: skip


def child_events(process: Process, node: str) -> str:
    try:
        return (process.state / node / "events.jsonl").read_text()
    except OSError:
        return ""


def swarm_story(process: Process) -> str:
    return process.out.read_text() + process.err.read_text()


def test_ctrl_c_to_the_group_of_a_swarm(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        process = swarm_command(here, "whole")
        until("commits", lambda: '"commit"' in child_events(process, "node-1") or process.code is not None, 90,
              state=lambda: swarm_story(process))  # fmt: skip
        assert process.code is None, swarm_story(process)
        held = process.note_sockets()
        assert len(process.below()) >= 9
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        assert process.ended(LEAVE) == 130, swarm_story(process)
        took = time.monotonic() - began
        assert leaks.gone(here.mark, held, seconds=max(LEAVE - took, 0.5)) == []
        assert list(here.temporary.iterdir()) == []
        assert (process.state / "report.json").exists()
        print(f"the swarm left after {took:.1f} s")


def test_a_swarm_of_three_fragments(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        process = swarm_command(here, "fragments", round={"fragments": 3, "overlap": 10}, budget={"rounds": 3})
        assert process.ended(120) == 0, swarm_story(process)
        assert f"3 rounds of {STEPS} steps in 3 fragments" in process.out.read_text()
        report = json.loads((process.state / "report.json").read_text())
        assert report["rounds"] == report["planned_rounds"] == 3 * 3 + 2
        assert report["digests_equal"]
        events = [json.loads(line) for line in child_events(process, "node-0").splitlines()]
        commits = [event for event in events if event["event"] == "commit" and event["outer_step"] > 0]
        steps = {event["outer_step"]: event for event in commits if any(event["contributors"].values())}
        assert [steps[step]["fragment"] for step in sorted(steps)] == [(step - 1) % 3 for step in sorted(steps)]
        # Two nodes, three rounds, two samples a step; more, since they train until a round is called. A token goes
        # through the rounds of all fragments, and counts once: there are not more of them than have been leased.
        context = int(MODEL["context"])
        assert 0.9 * (2 * 3 * STEPS * 2) < commits[-1]["tokens"] / context <= commits[-1]["cursor"]
        assert any(event.get("stopped", 9) < 1 for event in commits)
        checkpoint = process.state / report["files"]["checkpoint"]
        assert checkpoint.stat().st_size > 1000


def test_a_swarm_with_rounds_of_three_fragments_in_flight_at_once(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        # A step from round to round, which is less than a round takes here.
        rules = {"inner_steps": 3, "fragments": 3, "overlap": 3}
        process = swarm_command(here, "flights", round=rules, budget={"rounds": 12})
        assert process.ended(120) == 0, swarm_story(process)
        report = json.loads((process.state / "report.json").read_text())
        assert report["rounds"] == report["planned_rounds"] == 12 * 3 + 2
        assert report["digests_equal"]
        events = [json.loads(line) for line in child_events(process, "node-0").splitlines()]
        commits = [event for event in events if event["event"] == "commit" and any(event["contributors"].values())]
        assert [event["outer_step"] for event in commits] == list(range(1, 12 * 3 + 3))
        assert [event["fragment"] for event in commits] == [step % 3 for step in range(12 * 3 + 2)]
        aloft, most = set[int](), 0
        for event in events:
            if event["event"] == "seal":
                aloft.add(event["round"])
            elif event["event"] in ("commit", "void"):
                aloft.discard(event["round"])
            most = max(most, len(aloft))
        assert most >= 2
        context = int(MODEL["context"])
        assert 0.9 * (2 * 12 * 3 * 2) < commits[-1]["tokens"] / context <= commits[-1]["cursor"]


def test_a_killed_swarm_takes_its_children_along(tmp_path: Path) -> None:
    with place(tmp_path) as here:
        process = swarm_command(here, "killed")
        until("a node with a trainer", lambda: any("atoll.node.worker" in c for c in process.below().values()), 90,
              state=lambda: swarm_story(process))  # fmt: skip
        held = process.note_sockets()
        process.signal(signal.SIGKILL)
        process.ended(5)
        assert leaks.gone(here.mark, held, seconds=LEAVE) == []
        assert list(here.temporary.iterdir()) == []
