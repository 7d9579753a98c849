"""What a trainer keeps on its device, on CPU tensors (and on CUDA where there is one), bit for bit against a peer that
encodes on the host."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from atoll.node import codecs_torch, device_replica
from atoll.node.device_replica import DeviceReplica
from atoll.node.encoder import SUPPORTED, coding_of, encoded_bytes
from atoll.protocol.averaged import hash_chunk, pack
from atoll.protocol.codecs import averages_codec, get_codec
from atoll.protocol.commits import bitmap, make_body
from atoll.protocol.encoder import averaged, share_of
from atoll.protocol.errors import ConfigError
from atoll.protocol.fragments import make_layout
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Body, ChunkEntry, Member, Seal, hash_of
from atoll.protocol.overlap import Merge, Overlap, move
from atoll.protocol.parts import split_parts
from atoll.protocol.replica import CARRY, Replica
from atoll.protocol.stale import shorten
from atoll.protocol.state import GlobalState

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CHUNK, LAYERS = 128, [[300], [40, 200], [60, 260], [140]]
PARAMETERS = 1000
ME = 1


class Pair:
    """One peer's state twice: as a replica with its θ on the host, and on a device."""

    def __init__(self, codec: str, fragments: int, device: str, decay: float, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        layout = make_layout(PARAMETERS, CHUNK, LAYERS, fragments, "balanced")
        start = (self.rng.standard_normal(PARAMETERS) * 0.1).astype(np.float32)
        state = GlobalState.fresh(layout, start)
        rules: dict[str, Any] = {"fragments": fragments, "inner_steps": 12} if fragments > 1 else {"inner_steps": 12}
        self.manifest = Manifest.make(
            "pair", parameters=PARAMETERS, theta0=state.digest().hex(), round=rules,
            state={"chunk": CHUNK, **({"layers": LAYERS} if fragments > 1 else {})},
            codec={"name": codec, "error_feedback": decay},
        )  # fmt: skip
        lossy = not get_codec(codec).lossless
        self.host = Replica(
            self.manifest, layout, get_codec(codec), state, residual=np.zeros(PARAMETERS, np.float32) if lossy else None
        )
        self.theta = start.copy()
        flat = torch.from_numpy(start.copy()).to(device)
        beta = decay if lossy else None
        memory = DeviceReplica.allocate(PARAMETERS, torch.device(device), beta)
        self.device = DeviceReplica(flat, layout, codec, beta, memory)
        self.device.reset()
        part = map(layout.fragment, range(fragments))
        self.out = torch.zeros(max(sum(get_codec(codec).encoded_size(p.size(i)) for i in range(p.count)) for p in part),
                               dtype=torch.uint8)  # fmt: skip
        self.number = 0

    @property
    def fragment(self) -> int:
        return self.host.layout.due(self.host.position.head.outer_step)

    def train(self) -> None:
        """Some steps: the same change of θ on both sides."""
        step = (self.rng.standard_normal(PARAMETERS) * 0.02).astype(np.float32)
        step[self.rng.integers(0, PARAMETERS, 20)] *= 50
        self.theta += step
        self.device.flat += torch.from_numpy(step).to(self.device.flat.device)
        self.device.go_on()

    def freeze(self, *, ahead: bool) -> int:
        self.number += 1
        part = self.host.layout.fragment(self.fragment)
        if ahead:
            self.device.snapshot(self.number, [(stretch.start, stretch.stop) for stretch in part.stretches()])
        else:
            self.device.freeze(self.number)
        return self.number

    def check_encoding(self, number: int, theta: np.ndarray) -> None:
        """The very bytes, and nothing but them crosses."""
        part, fragment = self.host.layout.fragment(self.fragment), self.fragment
        sound, moved = self.device.encode(number, fragment, self.out)
        assert sound
        expected = b"".join(bytes(self.host.encode(i, theta, fragment)) for i in range(part.count))
        assert self.out[: len(expected)].numpy().tobytes() == expected
        assert len(expected) <= moved <= len(expected) + part.count

    def body(self) -> tuple[Body, list[bytes]]:
        """A commit whose chunks were averaged with this peer, without it, or by nobody."""
        members = [Member(f"peer-{i}", bytes(16), 10, 4, 3, 0.0, 0.0, True) for i in range(3)]
        position, part = self.host.position, self.host.layout.fragment(self.fragment)
        seal = Seal(
            self.manifest.run_id, position.head.round + 1, self.fragment, position.head, members[0].peer, bytes(16),
            members, split_parts([(True, 0.0, 0.0)] * 3, part.count), False, 10.0,
        )  # fmt: skip
        entries, chunks = [], []
        for i in range(part.count):
            inside: list[int] = [[0, ME, 2], [ME], [0, 2], [0, ME], []][(i + position.head.height) % 5]
            mean = (self.rng.standard_normal(part.size(i)) * 0.05).astype(np.float32)
            if self.manifest.codec.name == "sparse":
                mean[np.arange(mean.size) % 64 > 0] = 0  # no more than one contribution has kept
            payload = averages_codec(self.manifest.codec.name).encode(mean) if inside else b""
            chunks.append(pack(i, bitmap(inside, 3), 10 * len(inside), payload))
            entries.append(ChunkEntry(hash_chunk(chunks[-1]), bitmap(inside, 3)))
        digest = self.host.state.digest()
        return make_body(seal, hash_of(seal), position, digest, entries, self.manifest, self.host.layout), chunks

    def commit(
        self, body: Body, number: int | None, rule: Overlap = CARRY, *, lost: bool = False, dropped: bool = False
    ) -> bool:
        mine, others = averaged(body, ME if number is not None else None)
        return self.device.commit(
            body.fragment, mine, others, torch.from_numpy(self.host.params), source=number, rule=rule, lost=lost,
            dropped=dropped, head=hash_of(body).hex(),
        )  # fmt: skip

    def check(self) -> None:
        assert self.device.flat.cpu().numpy().tobytes() == self.theta.tobytes()
        assert self.device.params.cpu().numpy().tobytes() == self.host.params.tobytes()
        if self.host.residual is not None:
            assert self.device.residual is not None
            assert self.device.residual.cpu().numpy().tobytes() == self.host.residual.tobytes()
        else:
            assert self.device.residual is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("codec", SUPPORTED)
def test_rounds_leave_the_same_bits_as_on_the_host(codec: str, fragments: int, device: str) -> None:
    assert SUPPORTED == codecs_torch.SUPPORTED
    pair = Pair(codec, fragments, device, 0.9, seed=fragments)
    rules = [Overlap(Merge.CARRY), Overlap(Merge.MIX, alpha=0.3), Overlap(Merge.OVERWRITE)]
    for number in range(12):
        pair.train()
        kind = number % 6
        ahead = kind in (1, 2, 3)
        freeze = pair.freeze(ahead=ahead)
        frozen = pair.theta.copy()
        pair.check_encoding(freeze, frozen)
        pair.check_encoding(freeze, frozen)  # again, as often as reducers are replaced
        body, chunks = pair.body()
        if kind == 0:  # training waits for the commit
            applied = pair.host.apply(body, hash_of(body), chunks, me=ME, frozen=pair.theta, local=pair.theta)
            assert pair.commit(body, freeze)
            mine = averaged(body, ME)[0]
            assert applied.share == share_of(mine, pair.host.layout.fragment(body.fragment))
        elif ahead:  # it goes on meanwhile
            pair.train()
            pair.check_encoding(freeze, frozen)
            applied = pair.host.apply(
                body, hash_of(body), chunks, me=ME, frozen=frozen, shift=frozen, rule=rules[kind - 1]
            )
            for run in applied.runs:
                move(pair.theta[run.start : run.stop], run.keep, frozen[run.start : run.stop])
            assert pair.commit(body, freeze, rules[kind - 1])
        elif kind == 4:  # the round ends void, two others come to nothing, and it is committed after all
            pair.device.hold([freeze])
            for again in (False, True):
                pair.train()
                later = pair.freeze(ahead=again)
                pair.check_encoding(later, pair.theta.copy())
                pair.device.hold([freeze, later] if again else [freeze])
            pair.train()
            pair.host.apply(body, hash_of(body), chunks, me=ME, frozen=frozen, local=pair.theta)
            assert pair.commit(body, freeze)
        else:  # another roster's
            pair.train()
            pair.host.apply(body, hash_of(body), chunks, local=pair.theta)
            assert pair.commit(body, None)
        pair.check()
        assert pair.device.head == hash_of(body).hex()


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_frozen_for_a_void_roster_and_is_gone_takes_the_fragment_along(device: str) -> None:
    pair = Pair("int8", 3, device, 1.0, seed=5)
    pair.train()
    first = pair.freeze(ahead=False)
    pair.check_encoding(first, pair.theta)
    pair.device.hold([first])
    pair.train()
    second = pair.freeze(ahead=True)
    pair.check_encoding(second, pair.theta)
    pair.device.hold([second])  # which drops the first
    body, chunks = pair.body()
    part = pair.host.layout.fragment(body.fragment)
    pair.host.apply(body, hash_of(body), chunks)
    assert not pair.commit(body, first)
    for index in range(part.count):
        pair.theta[part.span(index)] = pair.host.params[part.span(index)]
    pair.check()
    # So does what the peer says is lost.
    pair.train()
    body, chunks = pair.body()
    part = pair.host.layout.fragment(body.fragment)
    pair.host.apply(body, hash_of(body), chunks)
    assert pair.commit(body, None, lost=True)
    for index in range(part.count):
        pair.theta[part.span(index)] = pair.host.params[part.span(index)]
    pair.check()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_too_old_is_dropped_and_the_residual_stays(device: str) -> None:
    pair = Pair("int8", 3, device, 1.0, seed=6)
    for _ in range(3):
        pair.train()
        freeze = pair.freeze(ahead=False)
        pair.check_encoding(freeze, pair.theta)
        body, chunks = pair.body()
        part = pair.host.layout.fragment(body.fragment)
        pair.host.apply(body, hash_of(body), chunks, me=ME, frozen=pair.theta)
        for index in range(part.count):
            pair.theta[part.span(index)] = pair.host.params[part.span(index)]
        assert pair.commit(body, freeze, dropped=True)
        pair.check()
    assert pair.device.residual is not None
    assert pair.device.residual.any()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_late_is_shortened_to_the_same_bits(device: str) -> None:
    pair = Pair("int8", 3, device, 1.0, seed=6)
    for number in range(4):
        pair.train()
        freeze = pair.freeze(ahead=False)
        body, chunks = pair.body()
        part = pair.host.layout.fragment(body.fragment)
        for stretch in part.stretches():
            shorten(pair.theta[stretch], pair.host.params[stretch], 0.3)
        sound, _ = pair.device.encode(freeze, body.fragment, pair.out, 0.3)
        assert sound
        pair.check_encoding(freeze, pair.theta)
        if number != 2:  # and once it has come to nothing
            pair.host.apply(body, hash_of(body), chunks, me=ME, frozen=pair.theta, local=pair.theta)
            assert pair.commit(body, freeze)
        pair.check()
    pair.device.snapshot(77, [(0, 5)])
    with pytest.raises(LookupError, match="stand still"):
        pair.device.encode(77, 0, pair.out, 0.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", SUPPORTED)
@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1.9e19])
def test_numbers_that_no_codec_takes_do_not_leave_the_device(codec: str, device: str, bad: float) -> None:
    pair = Pair(codec, 1, device, 1.0, seed=1)
    pair.train()
    pair.device.flat[777] = bad
    pair.out.fill_(85)
    sound, _ = pair.device.encode(pair.freeze(ahead=False), 0, pair.out)
    assert not sound


def test_only_what_is_frozen_is_encoded() -> None:
    pair = Pair("int8", 1, "cpu", 1.0, seed=1)
    with pytest.raises(LookupError):
        pair.device.encode(1, 0, pair.out)
    number = pair.freeze(ahead=False)
    with pytest.raises(LookupError):
        pair.device.encode(number + 1, 0, pair.out)
    pair.train()
    with pytest.raises(LookupError, match="not what is frozen"):
        pair.device.encode(number, 0, pair.out)
    number = pair.freeze(ahead=True)
    pair.train()
    assert pair.device.encode(number, 0, pair.out)[0], "a copy is at hand while training goes on"
    pair.device.reset()
    with pytest.raises(LookupError):
        pair.device.encode(number, 0, pair.out)


@pytest.mark.parametrize("piece", [128, 300, 1 << 22])
def test_the_size_of_the_pieces_changes_nothing(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_replica, "PIECE", piece)
    pair = Pair("int4", 1, "cpu", 1.0, seed=2)
    for _ in range(3):
        pair.train()
        freeze = pair.freeze(ahead=False)
        pair.check_encoding(freeze, pair.theta)
        body, chunks = pair.body()
        pair.host.apply(body, hash_of(body), chunks, me=ME, frozen=pair.theta, local=pair.theta)
        assert pair.commit(body, freeze)
        pair.check()


def test_no_room_for_a_void_roster_s_copy_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("int8", 1, "cpu", 1.0, seed=3)
    pair.train()
    freeze = pair.freeze(ahead=False)
    pair.check_encoding(freeze, pair.theta)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "cat", full)
    pair.device.hold([freeze])
    monkeypatch.undo()
    pair.train()
    body, chunks = pair.body()
    pair.host.apply(body, hash_of(body), chunks)
    assert not pair.commit(body, freeze), "it was not kept, and says so"


def test_what_is_saved_comes_back() -> None:
    pair = Pair("int8", 1, "cpu", 1.0, seed=4)
    values = torch.randn(PARAMETERS)
    pair.device.place("residual", values)
    pair.device.place("theta", 2 * values)
    pair.device.head = "ab"
    for what, factor in (("residual", 1), ("theta", 2)):
        out = torch.zeros(300)
        assert pair.device.read(what, 500, out) == "ab"
        assert torch.equal(out, factor * values[500:800])
    lossless = Pair("float32", 1, "cpu", 1.0, seed=4)
    lossless.device.head = "ab"
    assert lossless.device.read("residual", 0, torch.zeros(10)) == "", "there is none"


CUT: dict[str, Any] = {"state": {"chunk": CHUNK, "layers": LAYERS}}
FACTORS = {"chunk": CHUNK, "layers": LAYERS, "columns": [15, 40, 10, 60, 10, 10]}


def manifest(**sections: Any) -> Manifest:
    return Manifest.make(
        "run", parameters=PARAMETERS, theta0="0" * 64, **({"state": {"chunk": CHUNK}} | sections)
    )  # fmt: skip


def test_where_a_node_encodes() -> None:
    rules: dict[str, Any] = {"inner_steps": 12}
    for mode, device, made in [
        ("auto", "cpu", False), ("auto", "auto", True), ("auto", "cuda:1", True), ("host", "cuda", False),
        ("device", "cpu", True),
    ]:  # fmt: skip
        coding, why = coding_of(manifest(round=rules), mode, device)
        assert (coding is not None, why) == (made, "")
        assert coding is None or coding.must == (mode == "device")
    coding, _ = coding_of(manifest(round=rules, codec={"name": "float32"}), "device", "cpu")
    assert coding is not None
    assert coding.decay is None
    assert encoded_bytes(PARAMETERS, 1, coding) == 4 * PARAMETERS
    departs = {"inner_steps": 12, "overlap": 4, "merge": "eager"}
    for sections, reason in [
        ({"round": rules, "codec": {"name": "lowrank", "rank": 2}, "state": FACTORS}, "lowrank"),
        ({"round": departs}, "eager"),
    ]:  # fmt: skip
        coding, why = coding_of(manifest(**sections), "auto", "cuda")
        assert coding is None
        assert reason in why
        with pytest.raises(ConfigError, match=reason):
            coding_of(manifest(**sections), "device", "cuda")
    # Of two fragments one has a round every six steps.
    several = manifest(round={"inner_steps": 12, "fragments": 2, "overlap": 6}, **CUT)
    assert coding_of(several, "auto", "cuda")[0] is not None
    more = SimpleNamespace(
        codec=several.codec, state=several.state, round=SimpleNamespace(**{**dict(several.round), "overlap": 7})
    )
    coding, why = coding_of(cast(Manifest, more), "auto", "cuda")
    assert coding is None
    assert "in flight" in why
