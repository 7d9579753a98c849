"""Anchors: the record, what a disk knows of it, and which heads it makes worth a look."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.anchor import (
    MAX_ANCHOR,
    Anchor,
    anchor_bytes,
    could_hold,
    newer,
    next_number,
    open_anchor,
    peek,
    seal_anchor,
)
from atoll.protocol.disk import MemoryDisk
from atoll.protocol.errors import PeerMisbehaved
from atoll.protocol.identity import Ed25519Signer
from atoll.protocol.lineage import ANCHOR_FILE
from atoll.protocol.messages import GENESIS, Head, encode
from atoll.protocol.store import Store

from .runchain import Run

OWNER = Ed25519Signer.from_seed(bytes(range(32)))
STRANGER = Ed25519Signer.from_seed(bytes(range(1, 33)))
RUN_ID = bytes(range(32))
HEAD = Head(b"\5" * 32, 7, 1000, 9, 6)

heads = st.builds(
    Head, st.binary(min_size=32, max_size=32), st.integers(1, 2**63 - 1), *[st.integers(0, 2**63 - 1)] * 3
)
anchors = st.builds(Anchor, st.just(RUN_ID), st.integers(0, 2**63 - 1), heads)


def opened(data: bytes, owner: str = OWNER.peer_id, run: bytes = RUN_ID) -> Anchor:
    return open_anchor(data, STRANGER, run, owner, "somebody")


# ------------------------------------------------------------------ the record


@settings(max_examples=60)
@given(anchors)
def test_round_trip_within_the_bound(anchor: Anchor) -> None:
    sealed = seal_anchor(anchor, OWNER)
    assert len(sealed) <= MAX_ANCHOR
    assert opened(sealed) == anchor == peek(sealed)


def resealed(body: Any, signer: Ed25519Signer = OWNER) -> bytes:
    encoded = encode(body)
    return encode([encoded, signer.sign(anchor_bytes(encoded))])


GOOD = Anchor(RUN_ID, 3, HEAD)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "malformed"),
        (bytes(MAX_ANCHOR + 1), "257 bytes"),
        (seal_anchor(GOOD, STRANGER), "did not sign"),
        (resealed(msgspec.structs.replace(GOOD, run=bytes(32))), "another run"),
        (resealed(msgspec.structs.replace(GOOD, head=GENESIS)), "no commit"),
        (resealed([RUN_ID, 3]), "malformed"),
        (resealed([RUN_ID, 3, HEAD, 1]), "malformed"),
        (resealed([RUN_ID, -1, HEAD]), "malformed"),
        (resealed([RUN_ID[:31], 3, HEAD]), "malformed"),
        (encode([encode(GOOD), OWNER.sign(encode(GOOD))]), "did not sign"),
        (encode([encode(GOOD), bytes(64)]), "did not sign"),
        # The same values in another form of MessagePack.
        (b"\xdc\x00\x02" + seal_anchor(GOOD, OWNER)[1:], "canonical"),
    ],
)
def test_what_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(PeerMisbehaved, match=words) as caught:
        opened(data)
    assert caught.value.peer == "somebody"


def test_a_run_without_an_owner_has_no_anchors() -> None:
    with pytest.raises(PeerMisbehaved, match="did not sign"):
        opened(seal_anchor(GOOD, OWNER), owner="")
    with pytest.raises(ValueError, match="before the first"):
        seal_anchor(Anchor(RUN_ID, 1, GENESIS), OWNER)


@settings(max_examples=200)
@given(st.data())
def test_a_changed_byte_is_never_accepted(data: st.DataObject) -> None:
    sealed = bytearray(seal_anchor(GOOD, OWNER))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PeerMisbehaved):
        opened(bytes(sealed))


@given(st.lists(anchors, min_size=2, max_size=5), st.randoms())
def test_all_come_to_the_same_anchor_whatever_the_order(some: list[Anchor], chance: Any) -> None:
    def last(order: list[Anchor]) -> Anchor:
        known: Anchor | None = None
        for anchor in order:
            if newer(anchor, known):
                known = anchor
        assert known is not None
        return known

    # Half of the time with one number, so that ties are tried.
    some = [msgspec.structs.replace(a, number=1) for a in some] if chance.random() < 0.5 else some
    shuffled = chance.sample(some, len(some))
    assert last(some) == last(shuffled)
    assert last(some).number == max(a.number for a in some)


def test_numbers_grow_whatever_the_clock_says() -> None:
    assert next_number(None, 1.76e9) == 1_760_000_000
    assert next_number(Anchor(RUN_ID, 1_760_000_000, HEAD), 1.76e9) == 1_760_000_001
    assert next_number(Anchor(RUN_ID, 9_000_000_000, HEAD), 1.76e9) == 9_000_000_001
    assert next_number(None, -5.0) == 1


def test_which_heads_could_have_it_behind_them() -> None:
    assert could_hold(GOOD, HEAD)
    assert could_hold(GOOD, Head(b"\1" * 32, 8, 0, 10, 7))
    assert not could_hold(GOOD, Head(b"\1" * 32, 7, 10**6, 9, 6)), "another commit of that height"
    assert not could_hold(GOOD, Head(b"\1" * 32, 6, 10**6, 8, 5)), "one before it"


# ------------------------------------------------------------------ on disk


RUN = Run()
TRUNK = RUN.chain(4)
LIGHT = RUN.chain(8, TRUNK[-1][2])
HEAVY = RUN.chain(8, TRUNK[-1][2], salt=1)


def heavier(chain: list[Any]) -> list[Any]:
    """The same number of commits with more weight."""
    parent, made = TRUNK[-1][2], []
    for _ in chain:
        made.append(RUN.commit(parent, salt=1, weight=50))
        parent = made[-1][2]
    return made


HEAVY = heavier(HEAVY)


def store_on(disk: MemoryDisk, warned: Callable[[str], None] = lambda message: None) -> Store:
    return Store(disk, RUN.run_id, RUN.layout, warn=warned)


def with_both(disk: MemoryDisk) -> Store:
    store = store_on(disk)
    for commit, chunks, _ in [*TRUNK, *LIGHT, *HEAVY]:
        store.append(commit, chunks)
    return store


def adopt(store: Store, head: Head, number: int = 1) -> None:
    anchor = Anchor(RUN.run_id, number, head)
    store.lineage.adopt(anchor, seal_anchor(anchor, OWNER))
    store.lineage.save()


def test_the_anchored_fork_is_the_best_also_after_a_restart() -> None:
    disk = MemoryDisk()
    store = with_both(disk)
    heavy, light = HEAVY[-1][2].head, LIGHT[-1][2].head
    assert store.best() == store.seen == heavy
    adopt(store, LIGHT[2][2].head)
    assert store.best() == light
    store.see(light)
    again = store_on(disk)
    assert again.best() == again.seen == light
    loaded = again.load()
    assert loaded is not None
    assert loaded.head == light
    adopt(again, HEAVY[0][2].head, 2)
    assert again.best() == heavy, "a later anchor may stand elsewhere"


def test_every_head_is_placed_as_its_chain_says() -> None:
    store = with_both(MemoryDisk())
    chains = [[*TRUNK, *LIGHT], [*TRUNK, *HEAVY]]
    for chain in chains:
        for _, _, anchored in chain:
            adopt(store, anchored.head)
            for other in chains:
                ids = [position.head.id for _, _, position in other]
                for at, commit_id in enumerate(ids):
                    assert store.lineage.holds(commit_id) == (anchored.head.id in ids[: at + 1])


@given(st.permutations(range(len(TRUNK) + len(LIGHT) + len(HEAVY))))
@settings(max_examples=30, deadline=None)
def test_one_head_is_preferred_by_all_whatever_came_first(order: list[int]) -> None:
    """``prefers`` orders heads totally, so the best of them does not depend on the order in which they are seen."""
    store = with_both(MemoryDisk())
    adopt(store, LIGHT[2][2].head)
    every = [position.head for _, _, position in [*TRUNK, *LIGHT, *HEAVY]]
    best = GENESIS
    for at in order:
        if store.prefers(every[at], best):
            best = every[at]
    assert best == LIGHT[-1][2].head
    for a, b in itertools.pairwise(every):
        assert store.prefers(a, b) != store.prefers(b, a)


def test_what_leaves_the_log_is_still_shown() -> None:
    disk = MemoryDisk()
    store = store_on(disk)
    chain = RUN.chain(14)
    for commit, chunks, position in chain:
        store.append(commit, chunks)
        if position.head.height == 3:
            adopt(store, chain[1][2].head)
        if position.head.height % 4 == 0:
            store.save_checkpoint(position, RUN.states[position.head.id])
    assert min(entry.head.height for entry in store.log.entries()) > 8
    for opened_again in (store, store_on(disk)):
        assert opened_again.lineage.holds(chain[-1][2].head.id)
        bodies = list(opened_again.bodies(chain[-1][2].head.id, 2))
        assert bodies == [encode(commit.body) for commit, _, _ in reversed(chain[2:])]
    # A newer anchor makes the older bodies useless; they go with the next that is kept.
    adopt(store, chain[-1][2].head, 2)
    store.lineage.keep([])
    assert disk.names("lineage") == []
    assert store.lineage.holds(chain[-1][2].head.id)


def test_a_proof_that_grows_too_long_is_cut_from_below_and_what_is_known_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.protocol.lineage.MAX_LINEAGE", 3)
    disk, warned = MemoryDisk(), list[str]()
    store = store_on(disk, warned.append)
    chain = RUN.chain(14)
    for commit, chunks, position in chain:
        store.append(commit, chunks)
        if position.head.height == 1:
            adopt(store, position.head)
        if position.head.height % 3 == 0:
            store.save_checkpoint(position, RUN.states[position.head.id])
    assert len(disk.names("lineage")) == 3
    assert len(warned) == 1
    assert "a new one is due" in warned[0]
    for opened_again in (store, store_on(disk)):
        assert opened_again.lineage.holds(chain[-1][2].head.id)
        last = msgspec.msgpack.decode(list(opened_again.bodies(chain[-1][2].head.id, 1))[-1])
        assert last[3] > 2, "it does not reach down to the anchor any more"


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:20] + b"\xff" + data[21:], lambda _: b""]
)
def test_damage_is_set_aside(damage: Callable[[bytes], bytes]) -> None:
    disk, warned = MemoryDisk(), list[str]()
    store = store_on(disk)
    chain = RUN.chain(8)
    for commit, chunks, position in chain:
        store.append(commit, chunks)
        if position.head.height == 1:
            adopt(store, position.head)
        if position.head.height % 3 == 0:
            store.save_checkpoint(position, RUN.states[position.head.id])
    body = disk.names("lineage")[0]
    for name in (ANCHOR_FILE, body):
        disk.write(name, [damage(disk.read(name))])
    again = store_on(disk, warned.append)
    assert len(warned) == 2
    assert again.lineage.anchor is None
    assert again.best() == chain[-1][2].head
    assert not again.lineage.holds(chain[-1][2].head.id)
    store_on(disk)  # what is damaged does not come back


def test_bodies_that_stand_on_nothing_are_not_kept() -> None:
    disk = MemoryDisk()
    store = store_on(disk)
    for commit, chunks, _ in [*TRUNK, *LIGHT[:1]]:
        store.append(commit, chunks)
    adopt(store, TRUNK[1][2].head)
    store.lineage.keep([encode(commit.body) for commit, _, _ in HEAVY[1:]])
    assert disk.names("lineage") == []
    store.lineage.keep([encode(commit.body) for commit, _, _ in HEAVY])
    assert len(disk.names("lineage")) == len(HEAVY), "with the missing link they do"
    assert store.lineage.holds(HEAVY[-1][2].head.id)


class _Slow(MemoryDisk):
    """Lets something happen in the middle of a write."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] | None = None

    def write(self, name: str, pieces: Any) -> None:
        super().write(name, pieces)
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()


def test_a_commit_that_is_logged_while_bodies_are_written_stands_on_the_anchor() -> None:
    disk = _Slow()
    store = store_on(disk)
    for commit, chunks, _ in [*TRUNK, *LIGHT[:2]]:
        store.append(commit, chunks)
    adopt(store, TRUNK[0][2].head)
    late = LIGHT[2]
    disk.meanwhile = lambda: list(map(store.append, [late[0]], [late[1]])).clear()
    store.lineage.keep([encode(commit.body) for commit, _, _ in TRUNK[1:]])
    assert store.lineage.holds(late[2].head.id)


def test_an_anchor_that_comes_while_a_commit_is_written_is_behind_it() -> None:
    disk = _Slow()
    store = store_on(disk)
    for commit, chunks, _ in TRUNK:
        store.append(commit, chunks)
    disk.meanwhile = lambda: adopt(store, TRUNK[1][2].head)
    store.append(LIGHT[0][0], LIGHT[0][1])
    assert store.lineage.holds(LIGHT[0][2].head.id)
    assert store.best() == store.seen == LIGHT[0][2].head


def test_a_fork_above_the_anchor_does_not_push_out_what_is_known_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.protocol.lineage.MAX_LINEAGE", 5)
    disk = MemoryDisk()
    store = store_on(disk)
    adopt(store, TRUNK[-1][2].head)
    store.lineage.keep([encode(commit.body) for commit, _, _ in LIGHT[:4]])
    store.lineage.keep([encode(commit.body) for commit, _, _ in HEAVY])
    for opened_again in (store, store_on(disk)):
        for commit, chunks, _ in LIGHT[4:]:
            opened_again.append(commit, chunks)
        for chain in (LIGHT, HEAVY):
            assert opened_again.lineage.holds(chain[-1][2].head.id)
