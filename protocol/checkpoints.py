"""Checkpoints of the global state: the same bytes at every peer that holds one of the same commit.

A checkpoint is two files. ``<height>-<id>.safetensors`` holds ``params`` and ``momentum`` (float32, one element a
model parameter) and can be read by any safetensors library; ``<height>-<id>.json`` says what it is, in canonical JSON
with a hash over itself, and is written last: without it there is no checkpoint. Blobs (see
:class:`~atoll.protocol.state.GlobalState`) are read straight from the file, so that a donor needs no memory for what
it serves.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Collection, Iterator

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from .commitlog import set_aside
from .commits import Position
from .disk import Buffer, Disk
from .errors import CheckpointError, PeerMisbehaved
from .layout import ChunkLayout
from .messages import Head
from .state import GlobalState

FORMAT = 1
_HASH = 32
_PIECE = 1 << 24
"""Bytes written at once."""


class Meta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the JSON file says. Digests and ids in hex; ``hashes`` are those of the blobs, concatenated."""

    format: int
    run: str
    commit: str
    height: int
    round: int
    outer_step: int
    weight: int
    cursor: int
    tokens: int
    parameters: int
    chunk: int
    digest: str
    hashes: str
    rank: int | msgspec.UnsetType = msgspec.UNSET
    """Of the round that led here, in a run that re-estimates it."""
    check: str = ""
    """BLAKE3 over this file with ``check`` empty."""


class Checkpoint:
    """A checkpoint that stands on disk: where the chain stood, and how to get at its blobs."""

    def __init__(self, position: Position, digest: bytes, hashes: bytes, name: str, data_at: int) -> None:
        self.position = position
        self.digest = digest
        self.hashes = hashes
        self.name = name
        """The state file."""
        self.data_at = data_at
        """Where the tensors begin in it."""

    @property
    def id(self) -> bytes:
        return self.position.head.id

    @property
    def head(self) -> Head:
        return self.position.head

    @property
    def meta_name(self) -> str:
        return _meta_name(self.name)


class Checkpoints:
    """The checkpoints on one disk. Methods may be called from any thread.

    warn: called with a sentence for everything that was found damaged.
    """

    def __init__(self, disk: Disk, run_id: bytes, layout: ChunkLayout, warn: Callable[[str], None]) -> None:
        self._disk = disk
        self._run = run_id
        self._layout = layout
        self._warn = warn
        self._held: dict[bytes, Checkpoint] = {}
        self._guard = threading.RLock()
        names = disk.names("checkpoints")
        for name in names:
            if name.endswith(".json"):
                try:
                    checkpoint = self._read_meta(name)
                except (OSError, CheckpointError) as error:
                    set_aside(disk, name, str(error), warn)
                else:
                    self._held[checkpoint.id] = checkpoint
        known = {checkpoint.name for checkpoint in self._held.values()}
        for name in names:
            # A state file whose description was never written, or is gone: nobody can use it.
            if name.endswith(".safetensors") and name not in known:
                disk.remove(name)

    def _read_meta(self, name: str) -> Checkpoint:
        data = self._disk.read(name)
        try:
            meta = msgspec.json.decode(data, type=Meta)
            if data != _meta_bytes(meta):
                raise CheckpointError("the description does not match its hash")
            head = Head(bytes.fromhex(meta.commit), meta.height, meta.weight, meta.round, meta.outer_step)
            digest, hashes = bytes.fromhex(meta.digest), bytes.fromhex(meta.hashes)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise CheckpointError(f"unreadable description: {error}") from None
        if meta.format != FORMAT:
            raise CheckpointError(f"format {meta.format}, this atoll reads {FORMAT}")
        if meta.run != self._run.hex():
            raise CheckpointError(f"a checkpoint of run {meta.run[:12]}, this is {self._run.hex()[:12]}")
        if (meta.parameters, meta.chunk) != (self._layout.parameters, self._layout.chunk):
            raise CheckpointError(f"{meta.parameters} parameters, the run's model has {self._layout.parameters}")
        if len(hashes) != 2 * self._layout.count * _HASH or digest_of(self._layout, hashes) != digest:
            raise CheckpointError("the hashes do not make the digest")
        if name != f"checkpoints/{_stem(head)}.json":
            raise CheckpointError("named for another commit")
        state = f"checkpoints/{_stem(head)}.safetensors"
        front = state_header(self._run, head.id, self._layout)
        if self._disk.size(state) != len(front) + 8 * self._layout.parameters:
            raise CheckpointError(f"its state has {self._disk.size(state)} bytes")
        if self._disk.read(state, 0, len(front)) != front:
            raise CheckpointError("its state begins with another header")
        return Checkpoint(Position(head, meta.cursor, meta.tokens, meta.rank or 0), digest, hashes, state, len(front))

    def save(self, position: Position, state: GlobalState) -> Checkpoint:
        """Write the state at a commit, atomically and durably. Writing the same one again changes nothing.

        Raises :class:`~atoll.protocol.errors.DiskFull` when there is no space; what was there before still is.
        """
        known = self.get(position.head.id)
        if known is not None:
            return known
        hashes = b"".join(state.hashes())
        front = state_header(self._run, position.head.id, self._layout)
        name = f"checkpoints/{_stem(position.head)}.safetensors"
        self._disk.write(name, _pieces(front, state.params, state.momentum))
        return self.describe(position, state.digest(), hashes, name)

    def describe(self, position: Position, digest: bytes, hashes: bytes, name: str) -> Checkpoint:
        """Write the description of a state file that is complete, which makes it a checkpoint."""
        checkpoint = Checkpoint(
            position, digest, hashes, name, len(state_header(self._run, position.head.id, self._layout))
        )
        try:
            self._disk.write(checkpoint.meta_name, [self.description(position, digest, hashes)])
        except BaseException:
            self._disk.remove(name)
            raise
        with self._guard:
            self._held[checkpoint.id] = checkpoint
        return checkpoint

    def description(self, position: Position, digest: bytes, hashes: bytes) -> bytes:
        """The bytes of the JSON file."""
        head = position.head
        return _meta_bytes(
            Meta(
                format=FORMAT,
                run=self._run.hex(),
                commit=head.id.hex(),
                height=head.height,
                round=head.round,
                outer_step=head.outer_step,
                weight=head.weight,
                cursor=position.cursor,
                tokens=position.tokens,
                parameters=self._layout.parameters,
                chunk=self._layout.chunk,
                digest=digest.hex(),
                hashes=hashes.hex(),
                rank=position.rank or msgspec.UNSET,
            )
        )

    def get(self, commit_id: bytes) -> Checkpoint | None:
        with self._guard:
            return self._held.get(commit_id)

    def all(self) -> list[Checkpoint]:
        """The checkpoints, lowest first."""
        with self._guard:
            return sorted(self._held.values(), key=lambda held: (held.head.height, held.id))

    def blob(self, checkpoint: Checkpoint, index: int) -> bytes:
        """One blob, as it stands on disk (whoever gets it checks its hash). Raises :class:`OSError`."""
        return read_blob(self._disk, checkpoint.name, checkpoint.data_at, self._layout, index)

    def read(self, checkpoint: Checkpoint) -> GlobalState:
        """The whole state, verified. Raises :class:`CheckpointError`; the checkpoint has been set aside then."""
        params = np.empty(self._layout.parameters, np.float32)
        momentum = np.empty(self._layout.parameters, np.float32)
        state = GlobalState(self._layout, params, momentum)
        wanted = split(checkpoint.hashes)
        try:
            for index in range(state.blob_count):
                blob = self.blob(checkpoint, index)
                if blake3(blob).digest() != wanted[index]:
                    raise CheckpointError(f"blob {index} does not match its hash")
                state.set_blob(index, blob)
        except (OSError, CheckpointError, PeerMisbehaved) as error:
            self.drop(checkpoint, str(error))
            raise CheckpointError(f"checkpoint {checkpoint.name} is damaged: {error}") from None
        return state

    def drop(self, checkpoint: Checkpoint, reason: str) -> None:
        """Set a checkpoint aside as damaged."""
        with self._guard:
            if self._held.get(checkpoint.id) is not checkpoint:
                return
            del self._held[checkpoint.id]
        set_aside(self._disk, checkpoint.meta_name, reason, self._warn)
        self._disk.remove(checkpoint.name)

    def keep(self, wanted: Collection[bytes]) -> None:
        """Remove all checkpoints but those of the given commits."""
        with self._guard:
            old = [held for held in self._held.values() if held.id not in wanted]
            for held in old:
                del self._held[held.id]
        for held in old:
            # The description first: a state file alone is no checkpoint and goes at the next start.
            self._disk.remove(held.meta_name)
            self._disk.remove(held.name)


def state_header(run_id: bytes, commit_id: bytes, layout: ChunkLayout) -> bytes:
    """The first bytes of a state file: safetensors' header of two float32 vectors."""
    size = 4 * layout.parameters
    header = {
        "__metadata__": {"format": "atoll state 1", "run": run_id.hex(), "commit": commit_id.hex()},
        "params": {"dtype": "F32", "shape": [layout.parameters], "data_offsets": [0, size]},
        "momentum": {"dtype": "F32", "shape": [layout.parameters], "data_offsets": [size, 2 * size]},
    }
    return safetensors_header(header)


def safetensors_header(header: dict[str, object]) -> bytes:
    """Length and JSON, padded so that the tensors begin at a multiple of 8 bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def digest_of(layout: ChunkLayout, hashes: bytes) -> bytes:
    """The state digest that concatenated hashes of blobs make. Raises :class:`PeerMisbehaved` for a wrong number."""
    return GlobalState.digest_of(layout, split(hashes))


def blob_span(layout: ChunkLayout, index: int) -> tuple[int, int]:
    """Where a blob stands behind the header of a state file, and how long it is, in bytes."""
    span = layout.span(index // 2)
    return 4 * (span.start + (index % 2) * layout.parameters), 4 * (span.stop - span.start)


def read_blob(disk: Disk, name: str, data_at: int, layout: ChunkLayout, index: int) -> bytes:
    """One blob out of a state file."""
    start, size = blob_span(layout, index)
    return disk.read(name, data_at + start, size)


def write_blob(disk: Disk, name: str, data_at: int, layout: ChunkLayout, index: int, blob: Buffer) -> None:
    """Put one blob into a state file."""
    start, size = blob_span(layout, index)
    if len(blob) != size:
        raise ValueError(f"{len(blob)} bytes for a blob of {size}")
    disk.patch(name, data_at + start, blob)


def split(hashes: bytes) -> list[bytes]:
    """Concatenated hashes, one by one."""
    return [hashes[at : at + _HASH] for at in range(0, len(hashes), _HASH)]


def float32_pieces(array: NDArray[np.float32]) -> Iterator[memoryview]:
    """A float32 vector as little-endian bytes, a bounded piece at a time."""
    flat = np.ascontiguousarray(array, dtype="<f4").view(np.uint8).reshape(-1)
    for at in range(0, len(flat), _PIECE):
        yield flat[at : at + _PIECE].data


def _pieces(front: bytes, *arrays: NDArray[np.float32]) -> Iterator[Buffer]:
    yield front
    for array in arrays:
        yield from float32_pieces(array)


def _stem(head: Head) -> str:
    return f"{head.height:012d}-{head.id.hex()[:16]}"


def _meta_name(name: str) -> str:
    return name.removesuffix(".safetensors") + ".json"


def _meta_bytes(meta: Meta) -> bytes:
    check = blake3(msgspec.json.encode(msgspec.structs.replace(meta, check=""))).hexdigest()
    return msgspec.json.encode(msgspec.structs.replace(meta, check=check))
