from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.protocol.errors import PeerMisbehaved, UsageError
from atoll.protocol.identity import Ed25519Signer, FastSigner, peer_id_of
from atoll.protocol.messages import GENESIS, Head, encode
from atoll.protocol.records import (
    BUCKETS,
    CLOCK_SLACK,
    MAX_LIFETIME,
    MAX_RECORD,
    Record,
    RecordGate,
    bucket_of,
    check_name,
    dht_id,
    dht_key,
    expiry_of,
    open_record,
    record_bytes,
    seal_record,
)
from atoll.protocol.transport import PeerId

RUN = bytes(range(32))
NOW = 1_760_000_000.25
SIGNER = Ed25519Signer.from_seed(bytes(range(32)))
OTHER = Ed25519Signer.from_seed(bytes(range(1, 33)))
RELAY = f"/ip4/203.0.113.7/tcp/31337/p2p/{OTHER.peer_id}/p2p-circuit"


def make(**changes: Any) -> Record:
    fields: dict[str, Any] = {
        "run": RUN,
        "peer": SIGNER.peer_id,
        "issued": NOW,
        "expires": NOW + 60,
        "addresses": ("/ip4/127.0.0.1/tcp/31337", "/ip6/::1/tcp/31337", RELAY),
        "state": "training",
        "head": Head(bytes(32), 7, 123_456, 8, 6),
        "step_time": 0.25,
        "tokens": 987_654,
        "upload": 1e6,
        "download": 2e6,
        "version": "0.1.0",
        "reachable": True,
        "name": "Ünïcode",
    }
    return Record(**(fields | changes))


def forged(record: Record, signer: Ed25519Signer = SIGNER) -> bytes:
    """Sealed without any check."""
    body = encode(record)
    return encode([body, signer.sign(record_bytes(body))])


def opened(data: bytes, now: float = NOW, subkey: PeerId = SIGNER.peer_id) -> Record:
    return open_record(data, SIGNER, RUN, now=now, subkey=subkey)


SEALED = seal_record(make(), SIGNER)


records = st.builds(
    make,
    issued=st.floats(0, 4e9),
    addresses=st.lists(
        st.one_of(
            st.builds("/ip4/{}/tcp/{}".format, st.ip_addresses(v=4), st.integers(1, 65535)),
            st.builds("/ip6/{}/udp/{}/quic-v1".format, st.ip_addresses(v=6), st.integers(1, 65535)),
            st.sampled_from([RELAY, "/dns4/" + "a." * 100 + "b/tcp/1", "/memory/1", "nonsense"]),
        ),
        max_size=12,
    ).map(tuple),
    state=st.sampled_from(
        ["starting", "joining", "training", "averaging", "waiting", "finished", "leaving", "serving"]
    ),
    head=st.builds(Head, st.binary(min_size=32, max_size=32), *[st.integers(0, 2**63 - 1)] * 4),
    step_time=st.floats(0, 1e6),
    tokens=st.integers(0, 2**63 - 1),
    upload=st.floats(0, 1e12),
    download=st.floats(0, 1e12),
    version=st.text("0123456789.abc+", max_size=32),
    reachable=st.booleans(),
    name=st.text(max_size=32).filter(str.isprintable),
    anchor=st.binary(max_size=256),
    anchored=st.booleans(),
).map(lambda record: msgspec.structs.replace(record, expires=record.issued + 60))


@given(records)
def test_round_trip(record: Record) -> None:
    sealed = seal_record(record, SIGNER)
    assert len(sealed) <= MAX_RECORD
    back = open_record(sealed, OTHER, RUN, now=record.issued + 30, subkey=SIGNER.peer_id)
    assert msgspec.structs.replace(back, addresses=record.addresses) == record
    kept = iter(record.addresses)
    assert all(address in kept for address in back.addresses)  # a subsequence
    assert len(back.addresses) <= 8
    assert expiry_of(sealed) == record.expires


@settings(max_examples=500)
@given(st.integers(0, len(SEALED) - 1), st.integers(1, 255))
def test_any_flipped_byte_is_refused(at: int, flip: int) -> None:
    bad = SEALED[:at] + bytes([SEALED[at] ^ flip]) + SEALED[at + 1 :]
    with pytest.raises(PeerMisbehaved) as caught:
        opened(bad)
    assert caught.value.peer == SIGNER.peer_id


@given(st.binary(max_size=MAX_RECORD + 10))
@example(b"")
@example(b"\x92" * 1000)
@example(b"\x80\x04\x95.")
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PeerMisbehaved):
        opened(data)


@given(st.integers(1, 200), st.binary(min_size=1, max_size=50))
def test_cut_or_lengthened_is_refused(cut: int, more: bytes) -> None:
    for bad in (SEALED[:-cut], SEALED + more):
        with pytest.raises(PeerMisbehaved):
            opened(bad)


def test_sealed_as_large_as_allowed() -> None:
    long = tuple(f"/dns4/{'a' * 63}.{'b' * 63}.example/tcp/{30000 + i}" for i in range(8))
    back = opened(seal_record(make(addresses=long, name="ü" * 32), SIGNER))
    assert 0 < len(back.addresses) < 8
    assert back.addresses == long[: len(back.addresses)]
    # the largest of everything else fits
    full = make(name="\U0001f600" * 32, version="v" * 32, tokens=2**63 - 1, head=Head(bytes(32), *[2**63 - 1] * 4))
    assert opened(seal_record(full, SIGNER)).name == full.name


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (make(run=bytes(32)), "another run"),
        (make(peer=OTHER.peer_id), "under another peer's name"),
        (make(expires=NOW - 1), "lives -1 s"),
        (make(expires=NOW + MAX_LIFETIME + 1), "not 0 to an hour"),
        (make(expires=math.inf), "malformed"),
        (make(step_time=math.inf), "malformed"),
        (make(step_time=math.nan), "malformed"),
        (make(upload=-1.0), "malformed"),
        (make(tokens=-1), "malformed"),
        (make(tokens=2**63), "malformed"),
        (make(name="x" * 33), "malformed"),
        (make(name="a\nb"), "not printable"),
        (make(version="\x1b[31m"), "not printable"),
        (make(state="dancing"), "malformed"),
        (make(addresses=("/ip4/1.2.3.4/tcp/1",) * 9), "malformed"),
        (make(addresses=("nonsense",)), "no multiaddress"),
        (make(addresses=("/ip4/0.0.0.0/tcp/1",)), "no multiaddress"),
        (make(addresses="/ip4/1.2.3.4/tcp/1"), "malformed"),
        (make(reachable=1), "malformed"),
        (make(issued=int(NOW), expires=NOW + 1), "canonical"),
        (make(head=Head(b"x", 0, 0, 0, 0)), "malformed"),
        (make(addresses=tuple(f"/dns4/{'a' * 63}.{'b' * 63}.example/tcp/{i + 1}" for i in range(8))), "are allowed"),
    ],
)
def test_refused_though_signed(record: Record, reason: str) -> None:
    with pytest.raises(PeerMisbehaved, match=reason):
        opened(forged(record))


def test_refused_wrappers() -> None:
    body = encode(make())
    signature = SIGNER.sign(record_bytes(body))
    assert opened(encode([body, signature])) == make()
    for bad in (
        [body, signature, b""],
        [body],
        [body.hex(), signature],
        {"body": body, "signature": signature},
        [body, OTHER.sign(record_bytes(body))],
        [body, SIGNER.sign(body)],
        [body, b""],
    ):
        with pytest.raises(PeerMisbehaved):
            opened(encode(bad))
    assert body.startswith(b"\xdc\x00\x10")
    longer = b"\xdc\x00\x11" + body[3:] + b"\xc0"
    with pytest.raises(PeerMisbehaved):
        opened(encode([longer, SIGNER.sign(record_bytes(longer))]))
    shorter = b"\xdc\x00\x0f" + body[3:-1]
    with pytest.raises(PeerMisbehaved):
        opened(encode([shorter, SIGNER.sign(record_bytes(shorter))]))
    # the same values in another MessagePack form: array32 instead of array16
    loose = b"\xdd\x00\x00\x00\x10" + body[3:]
    with pytest.raises(PeerMisbehaved, match="canonical"):
        opened(encode([loose, SIGNER.sign(record_bytes(loose))]))


def test_clocks() -> None:
    assert opened(SEALED, NOW - CLOCK_SLACK)
    assert opened(SEALED, NOW + 60 + CLOCK_SLACK)
    with pytest.raises(PeerMisbehaved, match="in the future"):
        opened(SEALED, NOW - CLOCK_SLACK - 1)
    with pytest.raises(PeerMisbehaved, match="expired 11 s ago"):
        opened(SEALED, NOW + 60 + CLOCK_SLACK + 1)


def test_sealing_refuses_what_nobody_accepts() -> None:
    for bad in (make(peer=OTHER.peer_id), make(name="a\nb"), make(expires=NOW - 1), make(state="x"), make(tokens=-1)):
        with pytest.raises(ValueError, match="record"):
            seal_record(bad, SIGNER)


def test_the_simulations_signer_works() -> None:
    signer = FastSigner(PeerId("peer-3"))
    sealed = seal_record(make(peer="peer-3", addresses=(), head=GENESIS), signer)
    assert open_record(sealed, FastSigner(PeerId("peer-4")), RUN, NOW, PeerId("peer-3")).peer == "peer-3"


def test_names() -> None:
    assert check_name("Émile's box") == "Émile's box"
    for bad in ("x" * 33, "a\tb", "\u202egnirts"):
        with pytest.raises(UsageError, match="the name may have"):
            check_name(bad)


# ------------------------------------------------------------------------------------ the DHT's gate


def entry(signer: Ed25519Signer = SIGNER, **changes: Any) -> tuple[bytes, bytes, bytes, float]:
    """key, subkey, value and expiration as hivemind shows them to a validator."""
    record = make(peer=signer.peer_id, **changes)
    key = dht_id(dht_key(RUN, bucket_of(signer.peer_id)))
    return key, encode(signer.peer_id), encode(seal_record(record, signer)), record.expires


def test_ids_of_keys() -> None:
    """As ``hivemind.dht.routing.DHTID.generate(source=key).to_bytes()`` gave it (1.1.12)."""
    assert dht_id("ab" * 32 + "/peers/3").hex() == "4b0c8ab4b56c57bded07923658673993412f1085"
    assert dht_key(bytes.fromhex("ab" * 32), 3) == "ab" * 32 + "/peers/3"


SPECIFICATION = Path(__file__).parents[2] / "docs/wire/records.md"


@pytest.mark.skipif(not SPECIFICATION.exists(), reason="the documents are not beside the tests")
def test_vectors_of_the_specification() -> None:
    record = make(
        addresses=("/ip4/127.0.0.1/tcp/31337",), head=GENESIS, step_time=0.0, tokens=0, upload=0.0, download=0.0,
        reachable=False, name="reef",
    )  # fmt: skip
    vectors = "".join(SPECIFICATION.read_text(encoding="utf-8").split())
    sealed = seal_record(record, SIGNER)
    assert len(sealed) == 295
    assert sealed.hex() in vectors
    assert SIGNER.peer_id in vectors
    assert SIGNER.marshal().hex() in vectors
    assert bucket_of(SIGNER.peer_id) == 2


def test_buckets() -> None:
    peers = [peer_id_of(i.to_bytes(32, "little")) for i in range(400)]
    sizes = [sum(bucket_of(peer) == bucket for peer in peers) for bucket in range(BUCKETS)]
    assert sum(sizes) == 400
    assert min(sizes) > 400 / BUCKETS / 2
    assert bucket_of(SIGNER.peer_id, 1) == 0


def test_gate_accepts_a_peers_own_record() -> None:
    gate = RecordGate(RUN, OTHER)
    key, subkey, value, expires = entry()
    for _ in range(2):  # the second time from the cache
        assert gate.acceptable(key, subkey, value, expires, NOW)
        assert gate.acceptable(key, subkey, value, expires + 1, NOW)
        assert not gate.acceptable(key, subkey, value, expires + 100, NOW)
        assert not gate.acceptable(key, subkey, value, math.inf, NOW)
        assert not gate.acceptable(key, subkey, value, math.nan, NOW)
        assert not gate.acceptable(key, subkey, value, expires, NOW - MAX_LIFETIME)
        # expired: not worth hiding a whole dictionary for
        assert gate.acceptable(key, subkey, value, expires, NOW + 1000)


def test_gate_refuses() -> None:
    gate = RecordGate(RUN, OTHER)
    key, subkey, value, expires = entry()
    nil = b"\xc0"  # hivemind's subkey of plain values
    other = next(id for id in gate.protected if id != key)
    _, other_subkey, other_value, _ = entry(OTHER)
    for bad in (
        (key, nil, value),
        (key, b"", value),
        (other, subkey, value),
        (bytes(20), subkey, value),
        (b"", subkey, value),
        (key, other_subkey, value),
        (key, subkey, other_value),
        (key, subkey, value[2:]),
        (key, subkey, encode("text")),
        (key, subkey, b""),
        (key, subkey, value + b"\0"),
        (key, subkey, encode(bytes(2000))),
        (key, subkey, bytes(10**6)),
        (key, encode("x" * 1000), value),
        (key, b"\xda" + len(SIGNER.peer_id).to_bytes(2, "big") + SIGNER.peer_id.encode(), value),
    ):
        assert not gate.acceptable(*bad, expires, NOW)
    assert gate.acceptable(key, subkey, value, expires, NOW)


@settings(max_examples=300)
@given(st.binary(max_size=60), st.binary(max_size=200), st.floats(), st.sampled_from(range(BUCKETS)))
def test_gate_never_raises(subkey: bytes, value: bytes, expiration: float, bucket: int) -> None:
    assert not RecordGate(RUN, OTHER).acceptable(dht_id(dht_key(RUN, bucket)), subkey, value, expiration, NOW)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_gate_refuses_any_flipped_byte(at: int, flip: int) -> None:
    gate = RecordGate(RUN, OTHER)
    parts = list(entry()[:3])
    which, at = at % 3, at // 3
    at %= len(parts[which])
    parts[which] = parts[which][:at] + bytes([parts[which][at] ^ flip]) + parts[which][at + 1 :]
    assert not gate.acceptable(*parts, NOW + 60, NOW)


def test_gate_obeys_the_access_rule() -> None:
    gate = RecordGate(RUN, OTHER, admits=lambda peer: peer == OTHER.peer_id)
    assert not gate.acceptable(*entry(), NOW)
    assert gate.acceptable(*entry(OTHER), NOW)


def test_gates_cache_is_bounded_and_saves_work() -> None:
    class Counting:
        checks = 0

        def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
            self.checks += 1
            return SIGNER.verify(peer, message, signature)

    verifier = Counting()
    gate = RecordGate(RUN, verifier, cache=4)
    entries = [entry(tokens=i) for i in range(6)]
    for _ in range(3):
        assert gate.acceptable(*entries[0], NOW)
    assert verifier.checks == 1
    for one in entries:
        assert gate.acceptable(*one, NOW)
    assert verifier.checks == 6
    assert len(gate._verified) == 4
    assert gate.acceptable(*entries[0], NOW)
    assert verifier.checks == 7
