from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import identity
from atoll.protocol.errors import ResourceError, StateError
from atoll.protocol.identity import (
    Ed25519Signer,
    FastSigner,
    base58_decode,
    base58_encode,
    is_peer_id,
    load_identity,
    load_or_create_identity,
    peer_id_of,
    public_key_of,
    verify,
)
from atoll.protocol.transport import PeerId

# From libp2p's specification of peer ids: the Ed25519 test key and the id that belongs to it.
SPEC_PRIVATE = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)


def test_peer_id_of_the_specification() -> None:
    signer = Ed25519Signer.unmarshal(SPEC_PRIVATE)
    assert signer.marshal() == SPEC_PRIVATE
    assert signer.peer_id.startswith("12D3KooW")
    assert len(signer.peer_id) == 52
    assert public_key_of(signer.peer_id) == SPEC_PRIVATE[36:]
    # the id that libp2p's own documents use as an example decodes
    assert len(public_key_of("12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA")) == 32


@given(st.binary(max_size=60))
def test_base58_round_trip(data: bytes) -> None:
    if data:
        assert base58_decode(base58_encode(data)) == data


def test_base58_known_answers() -> None:
    assert base58_encode(b"Hello World!") == "2NEpo7TZRRrLZSi2U"
    assert base58_encode(bytes.fromhex("0000287fb4cd")) == "11233QC4"
    for bad in ("", "0", "O", "I", "l", "a b", "1" * 129, "é"):
        with pytest.raises(ValueError, match="base58"):
            base58_decode(bad)


@given(st.binary(max_size=200), st.integers(0, 63), st.integers(1, 255))
def test_signatures(message: bytes, at: int, flip: int) -> None:
    signer, other = Ed25519Signer.from_seed(bytes(32)), Ed25519Signer.from_seed(bytes([1] * 32))
    signature = signer.sign(message)
    assert signer.sign(message) == signature
    assert other.verify(signer.peer_id, message, signature)
    assert not other.verify(other.peer_id, message, signature)
    assert not verify(signer.peer_id, message + b"x", signature)
    assert not verify(signer.peer_id, message, signature[:at] + bytes([signature[at] ^ flip]) + signature[at + 1 :])


@pytest.mark.parametrize("peer", ["", "x", "12D3KooW", "l0O", "Qm" + "a" * 44, "1" * 52, "1" * 5000, "12D3" + "z" * 48])
def test_verify_never_raises_for_a_malformed_peer(peer: str) -> None:
    assert not verify(PeerId(peer), b"m", b"s" * 64)
    assert not is_peer_id(peer)


@pytest.mark.parametrize("signature", [b"", b"x", bytes(63), bytes(64), bytes(65), b"\xff" * 64])
def test_verify_never_raises_for_a_malformed_signature(signature: bytes) -> None:
    assert not verify(Ed25519Signer.generate().peer_id, b"m", signature)


def test_a_signature_has_one_form() -> None:
    """s + L is the same scalar and must be refused, or one message has two signatures."""
    signer = Ed25519Signer.generate()
    signature = signer.sign(b"m")
    order = 2**252 + 27742317777372353535851937790883648493
    again = int.from_bytes(signature[32:], "little") + order
    assert not verify(signer.peer_id, b"m", signature[:32] + again.to_bytes(32, "little"))


def test_keys_of_small_order_are_refused() -> None:
    p, d = 2**255 - 19, -121665 * pow(121666, -1, 2**255 - 19) % (2**255 - 19)

    def order(y: int) -> int:
        """Order of the points with that y, at most 8; 0 when it is more or there is none."""
        x2 = (y * y - 1) * pow(d * y * y + 1, -1, p) % p
        x = pow(x2, (p + 3) // 8, p)
        if (x * x - x2) % p:
            x = x * pow(2, (p - 1) // 4, p) % p
        if (x * x - x2) % p:
            return 0
        at, count = (x, y), 1
        while at != (0, 1) and count < 9:
            k = d * at[0] * x * at[1] * y % p
            at = (
                (at[0] * y + x * at[1]) * pow(1 + k, -1, p) % p,
                (at[1] * y + at[0] * x) * pow(1 - k, -1, p) % p,
            )
            count += 1
        return count if count < 9 else 0

    assert sorted(order(y) for y in identity._SMALL_ORDER) == [1, 2, 4, 8, 8]
    for y in (*identity._SMALL_ORDER, p, p + 1):  # p and p + 1 are second encodings of 0 and 1
        for sign in (0, 2**255):
            peer = peer_id_of((y | sign).to_bytes(32, "little"))
            assert not verify(peer, b"m", (1).to_bytes(32, "little") + bytes(32))


def test_fast_signer() -> None:
    a, b = FastSigner(PeerId("a")), FastSigner(PeerId("b"))
    assert b.verify(a.peer_id, b"m", a.sign(b"m"))
    assert not b.verify(b.peer_id, b"m", a.sign(b"m"))
    assert not b.verify(a.peer_id, b"n", a.sign(b"m"))
    assert not b.verify(a.peer_id, b"m", b"")


def test_rsa_ids_are_named() -> None:
    rsa = base58_encode(bytes.fromhex("1220") + bytes(32))
    assert rsa.startswith("Qm")
    assert is_peer_id(rsa, any_key=True)
    assert not is_peer_id(rsa)
    with pytest.raises(ValueError, match="RSA"):
        public_key_of(rsa)


def test_identity_file_is_created_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    signer = load_or_create_identity(path)
    data = path.read_bytes()
    assert len(data) == 68
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_identity(path).peer_id == signer.peer_id == load_identity(path).peer_id
    assert path.read_bytes() == data
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]


def test_many_at_once_get_one_identity(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        signers = list(pool.map(load_or_create_identity, [tmp_path / "key"] * 16))
    assert len({signer.peer_id for signer in signers}) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    signer = load_or_create_identity(tmp_path / "key")
    assert load_or_create_identity(tmp_path / "key").peer_id == signer.peer_id
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (SPEC_PRIVATE[:40], "truncated: 40 bytes, not 68"),
        (SPEC_PRIVATE[:2], "not in libp2p's form"),
        (SPEC_PRIVATE + b"\n", "too long"),
        (b"\x08\x00\x12\x40" + bytes(64), "RSA"),
        (b"-----BEGIN PRIVATE KEY-----", "PEM"),
        (b"hello", "not a libp2p private key"),
        (SPEC_PRIVATE[:36] + bytes(32), "does not belong"),
    ],
)
def test_foreign_files_are_refused_and_kept(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(StateError, match=reason) as caught:
        load_or_create_identity(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == data


def test_the_old_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"\x08\x01\x12\x60" + SPEC_PRIVATE[4:] + SPEC_PRIVATE[36:])
    path.chmod(0o600)
    assert load_identity(path).peer_id == Ed25519Signer.unmarshal(SPEC_PRIVATE).peer_id


def test_missing_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no identity file"):
        load_identity(tmp_path / "none")
    with pytest.raises(StateError, match="is a folder, not a file; expected an identity file"):
        load_or_create_identity(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StateError, match="cannot create"):
        load_or_create_identity(tmp_path / "file" / "key")


def test_a_full_disk_is_a_resource(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left"):
        load_or_create_identity(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []


def test_seed_is_rfc8032() -> None:
    """RFC 8032, section 7.1, test 1."""
    signer = Ed25519Signer.from_seed(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert public_key_of(signer.peer_id).hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert signer.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a")
    assert isinstance(signer._key, ed25519.Ed25519PrivateKey)
