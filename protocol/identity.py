"""Who a peer is, and what it signs with.

A peer is a libp2p identity with an Ed25519 key. Its peer id is the base58 text of the identity multihash of the
protobuf-encoded public key, so whatever a peer signs is checked from its id alone (docs/wire/records.md).
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from .errors import AtollError, ResourceError, StateError, why_unreadable
from .transport import PeerId

log = logging.getLogger(__name__)

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = {letter: value for value, letter in enumerate(_ALPHABET)}
_MAX_BASE58 = 128
"""Longest base58 text that is read at all: decoding costs the square of the length."""

_ID_PREFIX = bytes.fromhex("002408011220")
"""Identity multihash (0x00), 36 bytes; protobuf: field 1 (key type) = 1 (Ed25519), field 2 (data), 32 bytes."""
_RSA_ID_PREFIX = bytes.fromhex("1220")
"""SHA2-256 multihash, 32 bytes: how libp2p names peers whose keys are too long to inline."""
_FILE_PREFIX = bytes.fromhex("08011240")
"""Protobuf PrivateKey: field 1 (key type) = 1 (Ed25519), field 2 (data), 64 bytes: seed and public key."""
_OLD_FILE_PREFIX = bytes.fromhex("08011260")
"""The same with the public key repeated (96 bytes), as libp2p wrote it before 2019."""

_FIELD = 2**255 - 19
_SMALL_ORDER_8 = int.from_bytes(
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
)
_SMALL_ORDER = frozenset({0, 1, _FIELD - 1, _SMALL_ORDER_8, _FIELD - _SMALL_ORDER_8})
"""y coordinates of the points of order 1, 2, 4 and 8: under such a "key" one signature fits many messages."""


class Signer(ABC):
    """A peer's key. Signs as that peer, checks what any peer signed."""

    peer_id: PeerId

    @abstractmethod
    def sign(self, message: bytes) -> bytes:
        """This peer's signature under ``message``; deterministic."""

    @abstractmethod
    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """Whether ``signature`` is ``peer``'s under ``message``; False, never an exception, for anything wrong."""


class Ed25519Signer(Signer):
    """Ed25519 (RFC 8032), as libp2p uses it. A signature is 64 bytes."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.peer_id = peer_id_of(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    @classmethod
    def generate(cls) -> Ed25519Signer:
        """A new key from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Ed25519Signer:
        """The key of a 32-byte seed."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return verify(peer, message, signature)

    def marshal(self) -> bytes:
        """The key as libp2p stores it: a protobuf PrivateKey (what ``identity_path`` of a p2p daemon holds)."""
        seed = self._key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        return _FILE_PREFIX + seed + self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @classmethod
    def unmarshal(cls, data: bytes) -> Ed25519Signer:
        """The opposite of :meth:`marshal`. Raises ValueError, saying what is wrong, for anything else."""
        if not data:
            raise ValueError("it is empty")
        if data[:2] == b"\x08\x00":
            raise ValueError("it holds an RSA key (hivemind's default), and atoll needs an Ed25519 key")
        if data.startswith(b"-----BEGIN"):
            raise ValueError("it holds a PEM file, and atoll needs a libp2p Ed25519 key")
        if data[:2] != b"\x08\x01":
            raise ValueError("it is not a libp2p private key")
        if not data.startswith((_FILE_PREFIX, _OLD_FILE_PREFIX)):
            raise ValueError("its Ed25519 key is not in libp2p's form")
        size = len(_FILE_PREFIX) + data[3]
        if len(data) != size:
            raise ValueError(f"it is {'truncated' if len(data) < size else 'too long'}: {len(data)} bytes, not {size}")
        signer = cls.from_seed(data[4:36])
        if _FILE_PREFIX + data[4:68] != signer.marshal() or data[68:] not in (b"", data[36:68]):
            raise ValueError("its public key does not belong to its private key")
        return signer


class FastSigner(Signer):
    """INSECURE, FOR SIMULATION ONLY: anyone who knows a peer's id signs as that peer.

    Keyed BLAKE3 with a key derived from the peer id. It is some forty times cheaper than Ed25519 and catches
    what simulations look for: signatures under other bytes, or of other peers. Any text serves as a peer id.
    """

    def __init__(self, peer_id: PeerId) -> None:
        self.peer_id = peer_id

    def sign(self, message: bytes) -> bytes:
        return blake3(message, key=_simulation_key(self.peer_id)).digest()

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return signature == blake3(message, key=_simulation_key(peer)).digest()


@lru_cache(maxsize=4096)
def _simulation_key(peer: PeerId) -> bytes:
    return blake3(peer.encode(), derive_key_context="atoll 2025 insecure simulation signer").digest()


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    """Whether ``signature`` is an Ed25519 signature of ``peer`` under ``message``. Never raises.

    Refuses keys of small order and non-canonical encodings of keys; RFC 8032 itself refuses those of signatures.
    """
    key = _public_key(peer)
    if key is None:
        return False
    try:
        key.verify(signature, message)
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


@lru_cache(maxsize=4096)
def _public_key(peer: PeerId) -> Ed25519PublicKey | None:
    try:
        raw = public_key_of(peer)
        y = int.from_bytes(raw, "little") & (2**255 - 1)
        return None if y >= _FIELD or y in _SMALL_ORDER else Ed25519PublicKey.from_public_bytes(raw)
    except ValueError:
        return None


def peer_id_of(public_key: bytes) -> PeerId:
    """The libp2p peer id of a raw 32-byte Ed25519 public key."""
    if len(public_key) != 32:
        raise ValueError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
    return PeerId(base58_encode(_ID_PREFIX + public_key))


def public_key_of(peer: str) -> bytes:
    """The raw public key in an Ed25519 peer id. Raises ValueError, saying what is wrong, for any other text."""
    raw = base58_decode(peer)
    if raw.startswith(_RSA_ID_PREFIX) and len(raw) == 34:
        raise ValueError("it is the hash of a key (an RSA identity), and atoll needs Ed25519 identities (12D3KooW…)")
    if not raw.startswith(_ID_PREFIX) or len(raw) != len(_ID_PREFIX) + 32:
        raise ValueError("it is not an Ed25519 peer id (12D3KooW…, 52 characters)")
    return raw[len(_ID_PREFIX) :]


def is_peer_id(text: str, *, any_key: bool = False) -> bool:
    """Whether ``text`` has the form of an Ed25519 peer id; with ``any_key`` also that of a hashed (RSA) one."""
    try:
        raw = base58_decode(text)
    except ValueError:
        return False
    inlined = raw.startswith(_ID_PREFIX) and len(raw) == len(_ID_PREFIX) + 32
    return inlined or (any_key and raw.startswith(_RSA_ID_PREFIX) and len(raw) == 34)


def base58_encode(data: bytes) -> str:
    """Base58 with Bitcoin's alphabet; each leading zero byte is a leading ``1``."""
    number = int.from_bytes(data, "big")
    letters = []
    while number:
        number, digit = divmod(number, 58)
        letters.append(_ALPHABET[digit])
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + "".join(reversed(letters))


def base58_decode(text: str) -> bytes:
    """The opposite of :func:`base58_encode`; one text for one value. Raises ValueError."""
    if not 0 < len(text) <= _MAX_BASE58:
        raise ValueError(f"expected 1 to {_MAX_BASE58} base58 characters, found {len(text)}")
    number = 0
    for letter in text:
        if letter not in _DIGITS:
            raise ValueError(f"{letter!r} is not a base58 character")
        number = number * 58 + _DIGITS[letter]
    zeros = len(text) - len(text.lstrip("1"))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")


def load_identity(path: str | os.PathLike[str]) -> Ed25519Signer:
    """Read an identity file. Raises :class:`StateError` when it is missing, unreadable or not an Ed25519 identity."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            data = file.read(4096)
            mode = os.fstat(file.fileno()).st_mode
    except FileNotFoundError:
        raise StateError(f"there is no identity file at {path}; check the path") from None
    except OSError as error:
        raise StateError(f"{why_unreadable(path, error)}; expected an identity file, a private key") from None
    try:
        signer = Ed25519Signer.unmarshal(data)
    except ValueError as error:
        raise StateError(
            f"the identity file {path} cannot be used: {error}; restore it from a copy, "
            "or move it away to begin with a new identity"
        ) from None
    if mode & 0o077 and os.name == "posix":
        log.warning("the identity file %s can be read by others; chmod 600 protects it", path)
    return signer


def load_or_create_identity(path: str | os.PathLike[str]) -> Ed25519Signer:
    """The identity kept in the file ``path``, made there with mode 0600 when there is none.

    The file is libp2p's marshalled private key, which a p2p daemon takes as it is. It appears whole or not at
    all, is never overwritten, and of two processes that make it at once both get the same one.

    Raises:
        StateError: the file is truncated, holds something else, or may not be read or written.
        ResourceError: the disk is full or read-only.
    """
    path = Path(path)
    if not os.path.lexists(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _create(path, Ed25519Signer.generate().marshal())
        except OSError as error:
            raise _storage_error(f"cannot create the identity file {path}", error) from None
    return load_identity(path)


def _create(path: Path, data: bytes) -> None:
    """Let ``path`` appear with ``data`` in it, unless it exists already."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike a rename it never replaces
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                return
            os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            pass


def _sync_folder(folder: Path) -> None:
    """Make a new name in ``folder`` survive a power cut, where folders can be synced."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _storage_error(what: str, error: OSError) -> AtollError:
    message = f"{what}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return ResourceError(f"{message}; free some space or name another folder")
    return StateError(f"{message}; make its folder writable or name another one")
