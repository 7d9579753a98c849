"""The judge of the chaos runs finds what is wrong, when something is."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from bench._network import Unavailable, round_trip
from blake3 import blake3

from atoll.protocol.identity import FastSigner
from atoll.protocol.messages import Commit

from ..chaos import judge
from ..chaos.field import Life, Slot, Strike, keep_export
from ..chaos.hosts import Hosts
from ..chaos.schedule import KINDS, NAMED, schedule
from ..simulated.swarm import Swarm, manifest, start_params


def life(events: list[dict[str, Any]], peer: str, began: float = 0.0, ended: float | None = None) -> Life:
    process: Any = SimpleNamespace(events=events, peer=peer, began=began, state=Path(f"/{peer}"))
    return Life(process, ended)


def slot(name: str, *lives: Life) -> Slot:
    return Slot(name, 1, Path(name), list(lives))


def seal(t: float, number: int, members: str) -> dict[str, Any]:
    return {"t": t, "event": "seal", "round": number, "members": list(members), "bound": 17.0, "roster": str(number)}


def commit(t: float, number: int, members: str, *, without: str = "") -> dict[str, Any]:
    shares = {member: 0.0 if member in without else 1.0 for member in members}
    return {"t": t, "event": "commit", "round": number, "members": list(members), "id": f"{number:02x}",
            "contributors": shares}  # fmt: skip


def test_a_schedule_follows_from_its_seed() -> None:
    first, again = (list(schedule(7, 3600, 20, 10)) for _ in range(2))
    assert first == again != list(schedule(8, 3600, 20, 10))
    assert 120 < len(first) < 240
    assert {fault.kind for fault in first} == set(KINDS)
    assert {fault.kind for fault in islice(schedule(7, 3600, 20, 10, ["stop"]), 5)} == {"stop"}
    assert list(schedule(7, 3600, 20, 10, [])) == []
    assert not set(KINDS) & set(NAMED), "a seed's faults stay what they were"
    assert {fault.kind for fault in islice(schedule(7, 3600, 20, 10, NAMED), 5)} == set(NAMED)


def test_a_commit_that_comes_too_late_is_found() -> None:
    strike = Strike(0, "kill", "n1", 100.0, "b", until=130.0)

    def look(at: float, members: str = "ac") -> list[str]:
        before = [commit(50 + 10 * number, number, "abc") for number in range(1, 5)]
        events = [*before, seal(at - 1, 5, members), commit(at, 5, members)]
        return judge.waits([slot("n0", life(events, "a")), slot("n1", life([], "b"))], [strike], 2)[0]

    assert look(110) == []
    assert len(look(150)) == 1, "(v + 1)·17 s and three rounds of 10 s"
    assert look(170, "abc") != []
    assert look(110, "abc") == [], "it had come back"


def test_a_commit_that_a_node_only_catches_up_with_ends_no_wait() -> None:
    strike = Strike(0, "kill", "n1", 100.0, "b", until=130.0)
    made = [commit(50 + 10 * number, number, "abc") for number in range(1, 5)]
    replayed = [commit(105 + number, number, "ac") for number in range(1, 5)]
    late = [seal(149, 5, "ac"), commit(150, 5, "ac")]
    slots = [slot("n0", life([*made, *late], "a")), slot("n1", life([], "b")), slot("n2", life(replayed, "c"))]
    wrong, found = judge.waits(slots, [strike], 2)
    assert found["all"]["max"] == 50
    assert len(wrong) == 1


def test_an_export_is_kept_when_its_two_files_belong_together(tmp_path: Path) -> None:
    """Of two nodes on two forks, or of one that is just writing, the files of one step must not be mixed."""
    source, kept = tmp_path / "n0", tmp_path / "kept"
    source.mkdir()
    kept.mkdir()

    def write(step: int, data: bytes, said: bytes) -> Path:
        path = source / f"step-{step:08d}.json"
        path.write_text(json.dumps({"blake3": blake3(said).hexdigest(), "step": step}))
        path.with_suffix(".safetensors").write_bytes(data)
        return path

    keep_export(write(1, b"new", b"old"), kept)
    assert not list(kept.iterdir())
    for _ in range(2):
        keep_export(write(1, b"one", b"one"), kept)
    for path in source.glob("*"):
        path.unlink()
    keep_export(write(1, b"other", b"other"), kept)
    pairs = sorted(kept.glob("*.json"))
    assert len(pairs) == 2
    for path in pairs:
        data = path.with_suffix(".safetensors").read_bytes()
        assert json.loads(path.read_text())["blake3"] == blake3(data).hexdigest()


def test_data_of_the_dead_is_found() -> None:
    strike = Strike(0, "kill", "n1", 100.0, "b", until=130.0)
    for sealed, without, count in ((99.0, "", 0), (101.0, "b", 0), (101.0, "", 1), (131.0, "", 0)):
        events = [seal(sealed, 3, "abc"), commit(sealed + 1, 3, "abc", without=without)]
        assert len(judge.dead_contributors([slot("n0", life(events, "a"))], [strike])) == count


def test_who_begins_at_nothing_again_is_found() -> None:
    def digest(number: int, text: str = "d") -> dict[str, Any]:
        return {"t": 1.0, "event": "digest", "round": number, "commit": f"{number:02x}", "digest": text}

    good = slot("n0", life([digest(0), digest(5)], "a"), life([digest(5), digest(6)], "a"))
    bad = slot("n1", life([digest(0), digest(5)], "b"), life([digest(0), digest(6)], "b"))
    assert judge.back_to_nothing([good]) == []
    assert len(judge.back_to_nothing([bad])) == 1
    assert judge.disagreements([*good.lives, *bad.lives], {}) == []
    assert len(judge.disagreements([*good.lives, life([digest(5, "e")], "c")], {})) == 1
    assert len(judge.disagreements(good.lives, {b"\5": "other"})) == 1


def test_the_time_is_divided_without_a_rest() -> None:
    def progress(t: float, state: str, steps: int) -> dict[str, Any]:
        return {"t": t, "event": "progress", "state": state, "steps": steps, "tokens": steps, "contributed": 0}

    first = [progress(t, "training" if t < 40 else "averaging", int(min(t, 40))) for t in range(51)]
    first.append(commit(50.5, 1, "ab"))
    again = life([{"t": 62.0, "event": "state"}, *(progress(70 + t, "training", t) for t in range(31))], "a", 60.0)
    slots = [slot("n0", life(first, "a", 0.0, 50.6), again)]
    slots[0].lives[1].stopped.append((80.0, 85.0))
    spent = judge.account(slots, {"01"}, 0.0, 100.0)
    shares = spent.goodput, spent.averaging, spent.joining, spent.lost, spent.down
    assert shares == pytest.approx((0.40, 0.10, 0.10, 0.25, 0.15), abs=0.011)
    assert spent.goodput + spent.lost + spent.averaging + spent.waiting + spent.joining + spent.down == pytest.approx(1)
    assert judge.account(slots, set(), 0.0, 100.0).goodput == 0, "a commit that is not in the chain counts for nothing"
    # In a round from 40 s on, killed at 50.6 s, trains again at 70 s, is stopped from 80 to 85 s.
    assert spent.pauses == [(40.0, 30.0, {"no sign": 1}), (80.0, 5.0, {"no sign": 1})]
    other = slot("n1", life([progress(t, "waiting", 0) for t in range(101)], "b", 0.0, 101.0))
    assert judge.account([*slots, other], {"01"}, 0.0, 100.0).pauses[0] == (40.0, 30.0, {"waiting": 1, "no sign": 1})
    assert spent.uptime == pytest.approx(0.65)


def test_with_overlap_a_commit_brings_what_was_trained_before_its_seal() -> None:
    def progress(t: int) -> dict[str, Any]:
        state = "averaging" if 40 <= t < 60 else "training"
        return {"t": float(t), "event": "progress", "state": state, "steps": t, "tokens": t, "contributed": 0}

    events = [progress(t) for t in range(101)]
    events = [*events[:41], seal(40.5, 1, "ab"), *events[41:61], commit(60.5, 1, "ab"), *events[61:]]
    slots = [slot("n0", life(events, "a", 0.0, 100.0))]
    spent = judge.account(slots, {"01"}, 0.0, 100.0, overlap=True)
    assert (spent.goodput, spent.lost, spent.averaging) == pytest.approx((0.40, 0.60, 0.0), abs=0.011)
    events += [seal(100.1, 2, "ab"), commit(100.2, 2, "ab")]
    slots = [slot("n0", life(events, "a", 0.0, 100.3))]
    spent = judge.account(slots, {"01", "02"}, 0.0, 100.3, overlap=True)
    assert spent.goodput == pytest.approx(1, abs=0.011), "the rest, once"


def restarted(commit: Commit) -> Commit:
    """The same, with other nonces."""
    seal = commit.body.seal
    members = [msgspec.structs.replace(member, nonce=bytes(len(member.nonce))) for member in seal.members]
    body = msgspec.structs.replace(commit.body, seal=msgspec.structs.replace(seal, members=members))
    return msgspec.structs.replace(commit, body=body)


def test_a_replay_finds_every_change() -> None:
    swarm = Swarm(manifest(budget={"rounds": 4}))
    for name in ("p0", "p1"):
        swarm.add(name)

    async def main() -> None:
        while not all(swarm.life(name).done for name in ("p0", "p1")):  # noqa: ASYNC110
            await asyncio.sleep(0.5)

    swarm.network.run(main())
    peer = swarm.life("p0").peer
    commits = swarm.chain(peer.head.id)
    ids = [commit.body.parent for commit in commits[1:]] + [peer.head.id]
    chunks = [peer.store.chunks(commit_id) for commit_id in ids]
    signer = FastSigner("judge")

    def replay(chunks: list[list[bytes]], commits: Any = commits) -> list[str]:
        return judge.replay(swarm.manifest, judge.Chain(ids, commits, chunks), start_params(), signer)[0]

    assert replay(chunks) == []
    assert judge.samples(swarm.manifest, judge.Chain(ids, commits, chunks), 10)[0] == []
    assert judge.samples(swarm.manifest, judge.Chain(ids, commits, chunks), 5)[0] != [], "twice as many samples"
    changed = [list(row) for row in chunks]
    changed[2][0] = changed[2][0][:-1] + bytes([changed[2][0][-1] ^ 1])
    assert len(replay(changed)) == 1
    assert len(replay(chunks, [*commits[:-1], commits[-2]])) == 1
    # A node that starts again goes on with the lease of the process before it, and with no more.
    again = [*commits[:2], *(restarted(commit) for commit in commits[2:])]
    assert judge.samples(swarm.manifest, judge.Chain(ids, again, chunks), 10)[0] == []
    assert judge.samples(swarm.manifest, judge.Chain(ids, [*again, again[-1]], chunks), 10)[0] != []
    doubled = [*commits, commits[-1]]
    assert judge.samples(swarm.manifest, judge.Chain(ids, doubled, chunks), 10)[0] != []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="network namespaces need root")
def test_hosts_are_built_hurt_mended_and_gone() -> None:
    try:
        with Hosts(2) as hosts:
            names = list(hosts.names)
            hosts.cut(0)
            hosts.mute(1, hears=True)
            hosts.slow(1, 5.0)
            for host in range(2):
                hosts.mend(host)
            assert reaches(hosts)
            assert all(Path("/run/netns", name).exists() for name in names)
    except Unavailable as error:
        pytest.skip(f"no network namespaces here: {error}")
    assert not any(Path("/run/netns", name).exists() for name in names)


LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    server.settimeout(10)
    for _ in range(5):
        server.accept()[0].close()
"""


def reaches(hosts: Hosts) -> bool:
    """Whether host 0 can connect to host 1."""
    within = ["ip", "netns", "exec"]
    command = [*within, hosts.names[1], sys.executable, "-c", LISTEN, hosts.addresses[1]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        return round_trip(hosts, 0, f"/ip4/{hosts.addresses[1]}/tcp/{port}") < 5
