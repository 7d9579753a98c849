"""Islands that encode on their own device, among others and alone, on the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from atoll.node.device_replica import DeviceReplica
from atoll.protocol import encoder as protocol
from atoll.protocol.codecs import get_codec
from atoll.protocol.errors import ResourceError, RoundVoid
from atoll.protocol.island import Snapshot
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Commit
from atoll.protocol.round import Round
from atoll.protocol.transport import Transport

from .faults import Chaos
from .island import SimulatedIsland
from .swarm import Life, Swarm, manifest
from .test_overlap import PLAIN, trained
from .test_swarm import run

Floats = NDArray[np.float32]
ON_DEVICE = ("p0", "p2")


class DeviceIsland(SimulatedIsland):
    """A simulated island with the trainer's own device replica behind it, on CPU tensors. Its θ is ``local`` here."""

    def __init__(self, rules: Manifest, **options: Any) -> None:
        super().__init__(rules.layout.parameters, **options)
        self.rules, self.frees = rules, 0
        self.died_at: int | None = None
        """Units ever used when it died, until its peer has noticed."""
        self.encoder: SimulatedEncoder | None = SimulatedEncoder(self)

    async def freeze(self) -> Snapshot:
        snapshot = await super().freeze()
        if self.encoder is not None:
            self.frees += 1
            self.encoder.replica.freeze(self.frees)
        return snapshot

    async def snapshot(self, ahead: int, parts: Sequence[slice], until: int | None = None) -> Snapshot:
        snapshot = await super().snapshot(ahead, parts, until)
        if self.encoder is not None:
            self.frees += 1
            self.encoder.replica.snapshot(self.frees, [(part.start, part.stop) for part in parts])
        return snapshot

    async def resume(self, *, reload: bool, **options: Any) -> None:
        if self.encoder is not None:
            if reload:
                self.encoder.given[:] = self.local
                self.encoder.replica.reset()
            self.encoder.replica.go_on()
        await super().resume(reload=reload, **options)

    def die(self, *, for_good: bool = False) -> None:
        """As a trainer child that is killed while it stands still or trains: the next one begins from g."""
        assert self.encoder is not None
        self._advance()
        self.local[:] = self.encoder.given
        self.encoder.replica.reset()
        self.life += 1
        self.died_at = self.count
        self._steps = self._units = 0
        self._limit(self._ahead or None)
        self.pending.clear()
        if for_good:
            self.encoder = None


class SimulatedEncoder(protocol.Encoder):
    def __init__(self, island: DeviceIsland) -> None:
        self.island = island
        codec, layout = island.rules.codec, island.rules.layout
        self.codec, self.layout = get_codec(codec.name), layout
        lossy = not self.codec.lossless and codec.error_feedback > 0
        decay = codec.error_feedback if lossy else None
        flat = torch.from_numpy(island.local)
        memory = DeviceReplica.allocate(layout.parameters, flat.device, decay)
        self.replica = DeviceReplica(flat, layout, codec.name, decay, memory)
        self.given = island.local.copy()
        parts = [layout.fragment(f) for f in range(layout.fragments)]
        size = max(sum(self.codec.encoded_size(part.size(i)) for i in range(part.count)) for part in parts)
        self.out = torch.zeros(size, dtype=torch.uint8)
        self.made: list[protocol.Encoded] = []
        self.fail_next = self.fail_reads = False

    async def begin(self, params: Floats, *, commit_id: bytes, residual: Floats | None, theta: Floats | None) -> None:
        self.given[:] = self.island.local[:] = params
        self.replica.reset(commit_id.hex())
        for what, values in (("residual", residual), ("theta", theta)):
            if values is not None:
                self.replica.place(what, torch.from_numpy(values))

    async def encode(self, fragment: int, share: float = 1.0) -> protocol.Encoded | None:
        await asyncio.sleep(0.0)  # as a peer that encodes on the host does at this point
        sound, moved = self.replica.encode(self.island.frees, fragment, self.out, share)
        if not sound:
            return None
        part, data, at = self.layout.fragment(fragment), self.out.numpy().tobytes(), 0
        payloads = []
        for index in range(part.count):
            payloads.append(data[at : at + self.codec.encoded_size(part.size(index))])
            at += len(payloads[-1])
        if share < 1:
            self.island.brought = self.island.local.copy(), self.island.brought[1]
        self.made.append(
            protocol.Encoded(fragment, payloads.__getitem__, moved, self.island.frees, self.island.life)
        )  # fmt: skip
        return self.made[-1]

    def hold(self, wanted: Sequence[protocol.Encoded]) -> None:
        self.replica.hold([one.freeze for one in wanted if one.life == self.island.life])

    async def commit(
        self, outcome: protocol.Outcome, params: Floats, *, spent: float, of: Snapshot | None, outer_step: int,
        ahead: int | None,
    ) -> tuple[Snapshot, bool]:  # fmt: skip
        island = self.island
        self.given[:] = params
        if self.fail_next:
            self.fail_next = False
            island.die()
            island.paused = True
            raise ResourceError("the trainer died")
        island._advance()
        known = self.replica.commit(
            outcome.fragment, outcome.mine, outcome.others, torch.from_numpy(params),
            source=outcome.source.freeze if outcome.source is not None else None, rule=outcome.rule, lost=outcome.lost,
            dropped=outcome.dropped, head=outcome.commit_id.hex(),
        )  # fmt: skip
        before = (island._steps, island._units * island.tokens_per_unit, island._units, island._leased)
        if not island.paused:
            island._spend(spent if known else 1.0, of if known else None)
            return Snapshot(*before, island._limit(None)), known
        island._begun = 0.0  # a step that a commit has cut off begins anew, as with a reload
        await island.resume(
            reload=False,
            spent=spent if known else 1.0,
            outer_step=outer_step,
            of=of if known else None,
            ahead=ahead if known else None,
        )
        return Snapshot(*before), known

    async def residual(self, commit_id: bytes) -> Floats | None:
        self._check_reads()
        out = torch.zeros(self.layout.parameters)
        return out.numpy() if self.replica.read("residual", 0, out) == commit_id.hex() else None

    async def theta(self) -> Floats:
        self._check_reads()
        return self.island.local.copy()

    def _check_reads(self) -> None:
        if self.fail_reads:
            raise ResourceError("the device did not give it")


class Mixed(Swarm):
    """Some peers encode on their device."""

    on_device: tuple[str, ...] = ON_DEVICE

    def island_for(self, name: str) -> SimulatedIsland:
        if name not in self.on_device:
            return super().island_for(name)
        overlap = self.manifest.round.overlap > 0
        return DeviceIsland(self.manifest, step_time=self.steps.get(name, 0.1), overlap=overlap)

    def residual_of(self, life: Life) -> Floats | None:
        if life.island is None or life.island.encoder is None:
            return super().residual_of(life)
        assert isinstance(life.island, DeviceIsland)
        residual = life.island.encoder.replica.residual if life.island.encoder is not None else None
        return residual.numpy() if residual is not None else None

    def _life(self, name: str, transport: Transport, trains: bool) -> Life:
        life = super()._life(name, transport, trains)
        forget, island = life.peer._training.accounts.clear, life.island

        def clear(due: int) -> None:
            forget(due)
            if isinstance(island, DeviceIsland) and island.died_at is not None:
                # What it did since it died is not lost, though its peer notices the death only now.
                life.handed = [island.died_at] * self.layout.fragments
                island.died_at = None

        life.peer._training.accounts.clear = clear  # type: ignore[method-assign]
        return life

    def _hand_over(self, name: str, fields: dict[str, Any]) -> None:
        before = list(self.life(name).handed)
        super()._hand_over(name, fields)
        # Who died after it had entered has handed over nothing of what came since.
        life = self.life(name)
        life.handed = [max(pair) for pair in zip(before, life.handed, strict=True)]


class Hosts(Mixed):
    on_device = ()


def swarm_of(kind: type[Mixed], count: int = 3, *, seed: int = 0, keep_every: float = 0.0, **changes: Any) -> Mixed:
    swarm = kind(manifest(**changes), seed=seed, latency=0.05, keep_every=keep_every)
    for index in range(count):
        swarm.add(f"p{index}")
    return swarm


def device_of(swarm: Swarm, name: str) -> DeviceIsland:
    island = swarm.life(name).island
    assert isinstance(island, DeviceIsland)
    return island


CASES = [
    ("int8", {}), ("int4", {}), ("sparse", {}), ("float16", {}), ("float32", {}), ("sparse", {"overlap": 8}),
    ("int8", {"overlap": 8}), ("int8", {"overlap": 8, "merge": "mix"}), ("int4", {"overlap": 8, "merge": "overwrite"}),
    ("int8", {"fragments": 3}), ("int8", {"fragments": 2, "overlap": 4}), ("int8", {"average": "radial"}),
    ("int8", {"stale": "drop", "max_group": 2}), ("int8", {"stale": "shorten", "max_group": 2}),
    ("int8", {"stale": "shorten", "max_group": 2, "overlap": 8}),
    ("int4", {"stale": "discount", "max_group": 2, "overlap": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "rules"), CASES)
def test_a_swarm_is_the_same_to_the_last_bit_wherever_its_peers_encode(codec: str, rules: dict[str, Any]) -> None:
    found = []
    for kind in (Hosts, Mixed):
        swarm = swarm_of(kind, codec={"name": codec, "error_feedback": 0.9}, round=rules, budget={"rounds": 6})
        run(swarm)
        assert len(set(swarm.heads().values())) == 1
        found.append((swarm.heads(), [(at, name, fields["digest"]) for at, name, fields in swarm.named("digest")]))
        for at, name, fields in swarm.named("commit"):
            assert fields["contributors"] or at < 5, name
        seals = [(name, fields) for _, name, fields in swarm.named("seal") if "device_bytes" in fields]
        assert bool(seals) == (kind is Mixed)
        for name, fields in seals:
            assert name in ON_DEVICE
            part = swarm.layout.fragment(fields["fragment"])
            encoded = sum(get_codec(codec).encoded_size(part.size(i)) for i in range(part.count))
            assert encoded <= fields["device_bytes"] <= 1.05 * encoded
    assert found[0] == found[1]


@pytest.mark.parametrize("overlap", [0, 5])
def test_one_trainer_with_a_plain_outer_step_equals_local_training(overlap: int) -> None:
    """Beside a peer that brings nothing, so that rounds take time."""
    rules = manifest(round={"quorum": 1, "overlap": overlap}, budget={"rounds": 8}, **PLAIN)
    swarm = Mixed(rules, latency=0.2, steps={"p1": 3000.0})
    for name in ("p0", "p1"):
        swarm.add(name)
    run(swarm)
    assert [f for _, name, f in swarm.named("seal") if name == "p0" and "device_bytes" in f]
    assert device_of(swarm, "p0").count > 8 * 10 * 4
    off = swarm.life("p0").peer.replica.params - trained(device_of(swarm, "p0"))
    # The sum of some hundred float32 steps, each rounded to 6e-8 of a parameter of size 1 to 2.
    assert np.abs(off).max() < 1e-5


@pytest.mark.parametrize("overlap", [0, 5])
def test_a_void_round_that_commits_after_all_takes_out_exactly_what_was_averaged(
    overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for kind in (Hosts, Mixed):
        swarm = swarm_of(kind, round={"overlap": overlap}, budget={"rounds": 8})
        finish, missed = Round.run, []
        thetas: list[tuple[str, int, bytes]] = []

        def note(name: str, event: str, fields: dict[str, Any], swarm: Mixed = swarm, to: Any = thetas) -> None:
            island = swarm.life(name).island
            # After the last commit there is nothing to train for, and a device is not told of it.
            if event == "commit" and fields["outer_step"] < 8 and island is not None:
                to.append((name, fields["outer_step"], island.local.tobytes()))

        swarm.hooks.append(note)

        async def miss(current: Round, finish: Any = finish, missed: list[Round] = missed) -> Commit:
            commit: Commit = await finish(current)
            if current.around.transport.peer_id == "sim-p2" and current.seal.round == 4:
                missed.append(current)
                raise RoundVoid("as if the commit had not come")
            return commit

        with monkeypatch.context() as patch:
            patch.setattr(Round, "run", miss)
            run(swarm)
        assert len(missed) == 1
        swarm.check_samples()
        assert swarm.violations == []
        assert len(thetas) >= 3 * 8
        found.append((swarm.heads(), thetas))
        if kind is Mixed:
            assert not device_of(swarm, "p2").life
    assert found[0] == found[1]


@pytest.mark.parametrize("overlap", [0, 5])
@pytest.mark.parametrize("for_good", [False, True], ids=["again", "for-good"])
@pytest.mark.parametrize("fragments", [1, 3])
def test_a_trainer_that_dies_in_a_round_costs_what_it_had_not_handed_over(
    overlap: int, for_good: bool, fragments: int
) -> None:
    """The contribution is with the peer and is averaged, once; the island begins anew from the global parameters."""
    swarm = swarm_of(Mixed, round={"overlap": overlap, "fragments": fragments}, budget={"rounds": 8})
    died: list[int] = []

    def die(name: str, event: str, fields: dict[str, Any]) -> None:
        if name == "p2" and event == "seal" and fields["round"] >= 4 and not died and not fields.get("leases"):
            died.append(fields["round"])
            loop = swarm.network.loop
            loop.kernel_at(loop.time() + 0.05, lambda: device_of(swarm, "p2").die(for_good=for_good))

    swarm.hooks.append(die)
    run(swarm)
    assert died
    swarm.check_samples()
    assert swarm.violations == []
    own = [f for _, name, f in swarm.named("commit") if name == "p0" and f["contributors"].get("sim-p2", 0) > 0]
    assert any(fields["round"] == died[0] for fields in own), "what it had encoded was averaged"
    assert any(fields["round"] > died[0] + 1 for fields in own), "and it contributes again"
    if for_good:
        assert swarm.life("p2").peer.replica.residual is not None
        assert swarm.life("p2").peer.replica.residual.any()


def test_what_is_too_old_is_dropped_on_the_device_while_training_goes_on() -> None:
    rules = {"stale": "drop", "max_group": 2, "overlap": 8}
    swarm = swarm_of(Mixed, 5, seed=9, round=rules, budget={"rounds": 16})
    run(swarm)
    dropped = [name for _, name, fields in swarm.named("commit") if fields.get("stale_tokens")]
    assert set(dropped) & set(ON_DEVICE)


def test_a_trainer_that_dies_while_it_takes_over_a_commit_begins_anew() -> None:
    swarm = swarm_of(Mixed, budget={"rounds": 8})

    def die(name: str, event: str, fields: dict[str, Any]) -> None:
        if name == "p2" and event == "seal" and fields["round"] == 4:
            encoder = device_of(swarm, "p2").encoder
            assert encoder is not None
            encoder.fail_next = True

    swarm.hooks.append(die)
    run(swarm)
    assert any("are lost" in fields["message"] for _, name, fields in swarm.named("warning") if name == "p2")
    swarm.check_samples()
    assert swarm.violations == []
    late = [f for _, name, f in swarm.named("commit") if name == "p2" and f["round"] > 6]
    assert late
    assert all(fields["contributors"].get("sim-p2") == 1 for fields in late)


@pytest.mark.parametrize("value", [np.nan, 1e30])
@pytest.mark.parametrize("who", ["p1", "p2"], ids=["host", "device"])
@pytest.mark.parametrize("overlap", [0, 8])
def test_parameters_that_are_not_finite_are_found_before_anything_is_sent(who: str, value: float, overlap: int) -> None:
    swarm = swarm_of(Mixed, budget={"rounds": 8}, round={"overlap": overlap})
    spoiled: list[int] = []

    def spoil(name: str, event: str, fields: dict[str, Any]) -> None:
        if name == who and event == "commit" and fields["round"] == 3 and not spoiled:
            spoiled.append(fields["round"])
            island().local[7] = value

    def island() -> SimulatedIsland:
        found = swarm.life(who).island
        assert found is not None
        return found

    swarm.hooks.append(spoil)
    run(swarm)
    warned = [name for _, name, fields in swarm.named("warning") if "not finite" in fields["message"]]
    assert warned == [who]
    assert swarm.named("refused") == []
    assert swarm.violations == []
    rounds = {commit.body.round: commit.body for commit in swarm.commits.values()}
    weights = {
        number: next((m.weight for m in body.seal.members if m.peer == f"sim-{who}"), 0)
        for number, body in rounds.items()
    }
    assert weights[min(number for number in rounds if number > 3)] == 0, "what it had trained is dropped"
    assert weights[max(rounds)] > 0, "it contributes again"
    assert np.isfinite(island().local).all()


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("codec", ["float16", "int8", "int4"])  # a manifest refuses sparse without error feedback
def test_without_error_feedback_there_is_no_residual(codec: str, beta: float) -> None:
    swarm = swarm_of(Mixed, budget={"rounds": 30}, codec={"name": codec, "error_feedback": beta})

    async def main() -> None:
        while any(swarm.life(name).peer.head.outer_step < 4 for name in swarm.hosts):
            await asyncio.sleep(0.05)
        assert await swarm.shut_down(10.0) == []

    swarm.network.run(main())
    swarm.check_samples()
    assert swarm.violations == []
    for name in swarm.hosts:
        residual = swarm.residual_of(swarm.life(name))
        kept = swarm.life(name).peer.store.load_residual(swarm.life(name).peer.head.id)
        assert (residual is None, kept is None) == (beta == 0, beta == 0)
        assert residual is None or residual.any()


def test_the_residual_goes_to_the_disk_with_its_commit_and_comes_back_with_no_other() -> None:
    swarm = swarm_of(Mixed, round={"quorum": 2}, budget={"rounds": 30}, keep_every=5.0)
    seen: dict[str, bytes] = {}

    async def main() -> None:
        loop = swarm.network.loop
        while swarm.life("p2").peer.head.outer_step < 6:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        swarm.life("p2").peer.stop()
        while not swarm.life("p2").done:
            await asyncio.sleep(0.05)
        encoder = device_of(swarm, "p2").encoder
        assert encoder is not None
        assert encoder.replica.residual is not None
        seen["before"] = encoder.replica.residual.numpy().tobytes()
        seen["head"] = encoder.replica.head.encode()
        swarm.restart("p2")
        began = loop.time()
        while len(swarm.lives["p2"]) < 2 or swarm.life("p2").peer.state == "joining":
            assert loop.time() < began + 60
            await asyncio.sleep(0.001)
        found = device_of(swarm, "p2").encoder
        assert found is not None
        assert found.replica.residual is not None
        seen["after"] = found.replica.residual.numpy().tobytes()
        seen["resumed"] = found.replica.head.encode()
        while not all(swarm.life(name).done for name in swarm.hosts) and loop.time() < 600:
            await asyncio.sleep(0.5)

    swarm.network.run(main())
    assert seen["before"] == seen["after"]
    assert np.frombuffer(seen["before"], np.float32).any()
    assert seen["head"] == seen["resumed"]
    assert any(name == "p2" for _, name, _ in swarm.named("restored")), "θ and the counters came back, too"
    swarm.check_samples()
    assert swarm.violations == []


def test_after_a_commit_of_leases_alone_the_residual_is_saved_as_on_the_host() -> None:
    """A newcomer's leases are a commit that an island is not told of, but no other state."""
    found = []
    for kind in (Hosts, Mixed):
        # Rounds so long that a newcomer is not let wait for the next one.
        swarm = swarm_of(kind, round={"inner_steps": 100, "first_lease": 640}, budget={"rounds": 30})

        async def main(swarm: Mixed = swarm) -> None:
            loop = swarm.network.loop
            while swarm.life("p2").peer.head.outer_step < 3:
                await asyncio.sleep(0.05)
            swarm.add("p3")
            peer = swarm.life("p2").peer
            step, height = peer.head.outer_step, peer.head.height
            while (peer.head.outer_step, peer.head.height) != (step, height + 1):
                step, height = peer.head.outer_step, peer.head.height
                assert loop.time() < 200
                await asyncio.sleep(0.01)
            residual = swarm.residual_of(swarm.life("p2"))
            assert residual is not None
            before, head = residual.tobytes(), peer.head.id
            peer.stop()
            while not swarm.life("p2").done:
                await asyncio.sleep(0.001)
            assert peer.head.id == head
            kept = peer.store.load_residual(head)
            assert kept is not None
            assert kept.any()
            assert kept.tobytes() == before
            found.append((head, before))

        swarm.network.run(main())
        assert swarm.violations == []
    assert found[0] == found[1]


def test_what_the_island_cannot_give_is_not_saved_and_the_peer_goes_on() -> None:
    swarm = swarm_of(Mixed, budget={"rounds": 12}, keep_every=1.0)
    saved: list[int] = []

    def fail(name: str, event: str, fields: dict[str, Any]) -> None:
        if name == "p2" and event == "commit" and fields["outer_step"] == 3:
            encoder = device_of(swarm, "p2").encoder
            assert encoder is not None
            encoder.fail_reads = True
            save = swarm.life("p2").peer.store.save_progress

            def note(commit_id: bytes, theta: Floats, told: str) -> None:
                saved.append(1)
                save(commit_id, theta, told)

            swarm.life("p2").peer.store.save_progress = note  # type: ignore[method-assign]

    swarm.hooks.append(fail)
    run(swarm)
    said = [fields["message"] for _, name, fields in swarm.named("warning") if name == "p2"]
    assert "the inner steps since the last commit were not saved: the device did not give it" in said
    assert "the residual was not saved: the device did not give it" in said
    assert not [message for message in said if "checkpoint" in message or "freeze" in message]
    assert not saved
    late = [f for _, name, f in swarm.named("commit") if name == "p2" and f["outer_step"] > 4]
    assert late
    assert all(fields["contributors"].get("sim-p2") == 1 for fields in late)


@pytest.mark.parametrize("seed", range(4))
def test_chaos(seed: int) -> None:
    swarm = swarm_of(Mixed, 4, seed=seed, round={"overlap": 4 * (seed % 2), "quorum": 2}, budget={"rounds": 10})
    chaos = Chaos(swarm, seed, every=4.0)
    run(swarm, limit=900)
    assert len(swarm.commits) >= 10
    assert chaos.log
    for name in ON_DEVICE:
        assert np.isfinite(device_of(swarm, name).local).all()
