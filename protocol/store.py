"""What a peer keeps of a run on disk, and how it finds its way back from it.

A folder of its own (mode 0700, locked while in use) holds ``run.json`` (which run this is), ``log/`` (commits with
their averaged chunks, :mod:`atoll.protocol.commitlog`), ``checkpoints/`` (two, :mod:`atoll.protocol.checkpoints`),
``incoming/`` (a checkpoint being downloaded), ``residual.safetensors`` (the error-feedback residual at one commit),
``progress.safetensors`` (what an island had trained beyond one commit),
``head`` (the best head ever logged here), ``anchor`` and ``lineage/`` (the organiser's newest anchor and what stands on
it, :mod:`atoll.protocol.lineage`) and ``damaged/``. Everything is written atomically, so a crash at any moment
leaves a store that loads; whatever is damaged later is found by its hash, set aside and reported.

Methods block on the disk: call them through :meth:`Transport.offload`. They may be called from any thread, but
appends, checkpoints and loads by one owner at a time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from .checkpoints import (
    Checkpoint,
    Checkpoints,
    float32_pieces,
    read_blob,
    safetensors_header,
    split,
    state_header,
    write_blob,
)
from .commitlog import CommitLog, LogEntry, set_aside
from .commits import START, Position
from .disk import Buffer, Disk, FolderDisk
from .errors import CheckpointError, PeerMisbehaved, ResourceError, StateError
from .layout import ChunkLayout
from .lineage import Lineage, keep_quietly
from .messages import GENESIS, NO_DIGEST, Body, Commit, Head, better, decode, encode
from .state import GlobalState

RUN_FILE = "run.json"
HEAD_FILE = "head"
RESIDUAL_FILE = "residual.safetensors"
PROGRESS_FILE = "progress.safetensors"
LOST = Head(b"\xff" * 32, 1, 0, 0, 0)
"""Below every head of a commit, above genesis: what had been seen is not known any more, only that something was."""
_HASH = 32


@dataclass(frozen=True)
class Loaded:
    """Where the disk lets a peer go on from."""

    position: Position
    """Where ``state`` stands in the chain."""
    state: GlobalState | None
    """Parameters and momentum there; None at the run's beginning, where θ₀ is built from the manifest."""
    replay: list[LogEntry]
    """The commits above it, in order, to be applied with :meth:`Store.chunks` of each."""

    @property
    def head(self) -> Head:
        """Where the peer stands after the replay."""
        return self.replay[-1].head if self.replay else self.position.head


class Store:
    """Commits, checkpoints and residual of one run on one disk.

    warn: called with a sentence for everything found damaged. Raises :class:`StateError` when the disk holds another
    run.
    """

    def __init__(
        self, disk: Disk, run_id: bytes, layout: ChunkLayout, *, warn: Callable[[str], None] | None = None
    ) -> None:
        self.disk = disk
        self.run_id = run_id
        self.layout = layout
        self._warn = warn or (lambda message: None)
        self._guard_run()
        self.seen = self._read_head()
        """The best head ever logged here; :data:`LOST` when that is damaged. Who has seen one never starts from θ₀,
        whatever is left on disk."""
        self.log = CommitLog(disk, run_id, self._warn)
        self.lineage = Lineage(disk, self.log.entries, self._warn)
        self.checkpoints = Checkpoints(disk, run_id, layout, self._warn)

    @classmethod
    def open(
        cls, folder: Path, run_id: bytes, layout: ChunkLayout, *, warn: Callable[[str], None] | None = None
    ) -> Store:
        """Open or make the store in ``folder``, which should hold nothing else.

        Raises :class:`~atoll.protocol.errors.StateLocked` when another process uses it, :class:`StateError` when it
        belongs to another run or cannot be used, :class:`~atoll.protocol.errors.ResourceError` when the disk is full
        or read-only.
        """
        disk = FolderDisk(folder)
        try:
            return cls(disk, run_id, layout, warn=warn)
        except BaseException:
            disk.close()
            raise

    def close(self) -> None:
        """Let the folder go. Idempotent."""
        self.disk.close()

    def _guard_run(self) -> None:
        mine = self.run_id.hex()
        if self.disk.size(RUN_FILE) >= 0:
            try:
                data = self.disk.read(RUN_FILE)
                found = json.loads(data)["run"]
                # One flipped bit must not read as "another run" and lock the owner out of the folder.
                if data != _run_file(found):
                    raise ValueError("the hash does not match")
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                # Every file names its run too, so a lost guard lets nothing of another run in.
                set_aside(self.disk, RUN_FILE, str(error), self._warn)
            else:
                if found != mine:
                    raise StateError(
                        f"{self.disk} holds the state of run {found[:12]}, this is run {mine[:12]}; "
                        "choose another folder with --state"
                    )
                return
        self.disk.write(RUN_FILE, [_run_file(mine)])

    def _read_head(self) -> Head:
        if self.disk.size(HEAD_FILE) < 0:
            return GENESIS
        try:
            data = self.disk.read(HEAD_FILE)
            if blake3(data[:-_HASH]).digest() != data[-_HASH:]:
                raise CheckpointError("the hash does not match")
            return decode(data[:-_HASH], Head)
        except (OSError, CheckpointError, PeerMisbehaved) as error:
            set_aside(self.disk, HEAD_FILE, str(error), self._warn)
        with contextlib.suppress(ResourceError, StateError):  # then only the next start does not know it
            self._write_head(LOST)
        return LOST

    def _write_head(self, head: Head) -> None:
        data = encode(head)
        self.disk.write(HEAD_FILE, [data, blake3(data).digest()])

    # -- the log

    def append(self, commit: Commit, chunks: Sequence[Buffer]) -> LogEntry:
        """Log a commit with its averaged chunks; see :meth:`CommitLog.append`."""
        entry = self.log.append(commit, chunks)
        self.lineage.link(entry.id, entry.parent)
        self.see(entry.head)
        return entry

    def see(self, head: Head) -> None:
        """This head has been reached: below it, the peer takes part in nothing any more."""
        if self.prefers(head, self.seen):
            self._write_head(head)
            self.seen = head

    # -- the organiser's anchor

    def prefers(self, a: Head, b: Head) -> bool:
        """Whether ``a`` is to be preferred: the organiser's newest anchor behind it, else as :func:`better` says."""
        holds = self.lineage.holds(a.id), self.lineage.holds(b.id)
        return holds[0] if holds[0] != holds[1] else better(a, b)

    def _best_of(self, heads: Iterable[Head], start: Head) -> Head:
        for head in heads:
            if self.prefers(head, start):
                start = head
        return start

    def bodies(self, commit_id: bytes, above: int) -> Iterator[bytes]:
        """The canonical bodies of a commit and those before it, down to height ``above`` + 1 or as far as they are
        kept: what shows that an anchor is behind it."""
        while True:
            data = self.lineage.body(commit_id)
            if data is None:
                commit = self.log.commit(commit_id)
                if commit is None:
                    return
                data = encode(commit.body)
            body = decode(data, Body)
            if body.height <= above:
                return
            yield data
            commit_id = body.parent

    def commit(self, commit_id: bytes) -> Commit | None:
        """A logged commit, or None."""
        return self.log.commit(commit_id)

    def commit_bytes(self, commit_id: bytes) -> bytes | None:
        """The canonical encoding of a logged commit, or None."""
        return self.log.commit_bytes(commit_id)

    def chunk(self, chunk_hash: bytes) -> bytes | None:
        """A logged averaged chunk by its hash, verified, or None."""
        return self.log.chunk(chunk_hash)

    def chunks(self, commit_id: bytes) -> list[bytes]:
        """All averaged chunks of a logged commit, verified. Raises :class:`CheckpointError` when damaged: then the
        state is as good as before this commit, and the rest comes from peers, or from :meth:`load` again."""
        return self.log.chunks(commit_id)

    def commits(self, head_id: bytes | None = None) -> list[LogEntry]:
        """The logged chain, oldest first, that ends in the given commit or in the best one."""
        return self.log.chain(self.best().id if head_id is None else head_id)

    def chain(self, head_id: bytes, first: int) -> list[LogEntry]:
        """The logged chain from height ``first``, or as low as the log reaches, up to ``head_id``."""
        return self.log.chain(head_id, first)

    def _bases(self) -> list[tuple[Head, dict[bytes, LogEntry], Checkpoint | None]]:
        """Everything that a state can be had at, newest first, with the commits above each."""
        held = self.checkpoints.all()[::-1]
        bases: list[tuple[Head, dict[bytes, LogEntry], Checkpoint | None]] = [
            (checkpoint.head, self.log.above([checkpoint.id]), checkpoint) for checkpoint in held
        ]
        bases.append((GENESIS, self.log.above([NO_DIGEST]), None))
        return bases

    def best(self) -> Head:
        """The best head whose state can be had from this disk (:data:`GENESIS` when there is nothing)."""
        best = GENESIS
        for head, above, _ in self._bases():
            best = self._best_of((entry.head for entry in above.values()), self._best_of([head], best))
        return best

    def restorable(self) -> dict[bytes, Head]:
        """All commits whose state :meth:`load` can bring back, θ₀ included, unless damage is found on the way."""
        found = {}
        for head, above, _ in self._bases():
            found[head.id] = head
            found.update((entry.id, entry.head) for entry in above.values())
        return found

    # -- checkpoints

    def save_checkpoint(self, position: Position, state: GlobalState, keep: Collection[bytes] = ()) -> Checkpoint:
        """Keep the state at a commit. Two are kept, this one and the newest below it on its chain, besides those of
        the commits in ``keep`` (a donor's clients are downloading them), and the log since the oldest of them.

        Raises :class:`~atoll.protocol.errors.DiskFull`; what was there before still is.
        """
        saved = self.checkpoints.save(position, state)
        others = [held for held in self.checkpoints.all() if held.id != saved.id]
        chain = {entry.parent for entry in self.log.chain(saved.id)}
        if others:
            lower = saved.head.height
            older = max(others, key=lambda held: (held.id in chain, held.head.height < lower, held.head.height))
            self.checkpoints.keep({saved.id, older.id, *keep})
            # Where a checkpoint stands in the chain follows from the commit after it, so its own is not needed.
            self._prune(min(held.head.height for held in self.checkpoints.all()) + 1)
        return saved

    def _prune(self, below: int) -> None:
        """Remove the commits of heights below ``below``. Of those that stand on the anchor the bodies stay."""
        anchor = self.lineage.anchor
        if anchor is not None:
            leaving = [
                entry for entry in self.log.entries()
                if anchor.head.height < entry.head.height < below and self.lineage.holds(entry.id)
            ]  # fmt: skip
            commits = [self.log.commit(entry.id) for entry in leaving]
            bodies = [encode(commit.body) for commit in commits if commit is not None]
            if bodies:
                keep_quietly(self.lineage, bodies)
        self.log.prune(below)

    def checkpoint_heads(self) -> list[Head]:
        """The commits of the checkpoints held, oldest first."""
        return [held.head for held in self.checkpoints.all()]

    def checkpoint_hashes(self, commit_id: bytes) -> bytes | None:
        """The hashes of a checkpoint's blobs, 32 bytes each; None when it is not held."""
        held = self.checkpoints.get(commit_id)
        return None if held is None else held.hashes

    def checkpoint_blob(self, commit_id: bytes, index: int) -> bytes | None:
        """One blob of a checkpoint, read from disk and verified; None when it is not held, or damaged."""
        held = self.checkpoints.get(commit_id)
        if held is None or not 0 <= index < 2 * self.layout.count:
            return None
        try:
            blob = self.checkpoints.blob(held, index)
            if blake3(blob).digest() == held.hashes[index * _HASH : (index + 1) * _HASH]:
                return blob
            reason = f"blob {index} does not match its hash"
        except OSError as error:
            reason = str(error)
        self.checkpoints.drop(held, reason)
        return None

    def load(self, target: bytes | None = None) -> Loaded | None:
        """The way to the best head that can be had from this disk, or to the commit ``target`` (on another fork, say):
        the newest checkpoint on the way that verifies, and the commits above it.

        None when there is no way, or nothing but θ₀. A damaged checkpoint is set aside and an older one taken.
        """
        ways = []
        for head, above, checkpoint in self._bases():
            if target is None:
                end = self._best_of((entry.head for entry in above.values()), head)
            elif target == head.id:
                end = head
            elif target in above:
                end = above[target].head
            else:
                continue
            ways.append((end, head, checkpoint))
        holds = self.lineage.holds
        ways.sort(key=lambda way: (not holds(way[0].id), -way[0].weight, -way[0].height, way[0].id, -way[1].height))
        for end, head, checkpoint in ways:
            replay = [entry for entry in self.log.chain(end.id) if entry.head.height > head.height]
            if checkpoint is None:
                return Loaded(START, None, replay) if replay or target == NO_DIGEST else None
            if replay and replay[0].state != checkpoint.digest:
                self.checkpoints.drop(checkpoint, "the commit after it attests another state")
                continue
            try:
                state = self.checkpoints.read(checkpoint)
            except CheckpointError:
                continue
            return Loaded(checkpoint.position, state, replay)
        return None

    def download(self, position: Position, digest: bytes, hashes: bytes) -> Download:
        """Begin, or go on with, the download of a checkpoint. Blobs that an earlier attempt brought are kept.

        Raises :class:`~atoll.protocol.errors.DiskFull` when the whole of it would not fit.
        """
        return Download(self, position, digest, hashes)

    # -- the residual

    def save_residual(self, commit_id: bytes, residual: NDArray[np.float32]) -> None:
        """Keep the error-feedback residual that belongs to a head; it replaces the one kept before."""
        hasher = blake3()
        for piece in float32_pieces(residual):
            hasher.update(piece)
        header = self._residual_header(commit_id, hasher.hexdigest())

        def pieces() -> Iterator[Buffer]:
            yield header
            yield from float32_pieces(residual)

        self.disk.write(RESIDUAL_FILE, pieces())

    def load_residual(self, commit_id: bytes) -> NDArray[np.float32] | None:
        """The residual kept with this very head; None with any other, or when it is damaged."""
        try:
            data = self.disk.read(RESIDUAL_FILE)
        except OSError:
            return None
        front = len(data) - 4 * self.layout.parameters
        payload = memoryview(data)[max(front, 0) :]
        if front > 0 and data[:front] == self._residual_header(commit_id, blake3(payload).hexdigest()):
            return np.frombuffer(payload, "<f4").astype(np.float32)
        return None

    # -- uncommitted progress

    def save_progress(self, commit_id: bytes, theta: NDArray[np.float32], island: str) -> None:
        """Keep local parameters θ (float32, one element a parameter) trained from a head, and what their island says
        of them; they replace those kept before."""
        hasher = blake3(island.encode())
        for piece in float32_pieces(theta):
            hasher.update(piece)
        header = self._progress_header(commit_id, island, hasher.hexdigest())

        def pieces() -> Iterator[Buffer]:
            yield header
            yield from float32_pieces(theta)

        self.disk.write(PROGRESS_FILE, pieces())

    def load_progress(self, commit_id: bytes) -> tuple[NDArray[np.float32], str] | None:
        """What was kept of the progress beyond this very head; None with any other, or when it is damaged."""
        try:
            data = self.disk.read(PROGRESS_FILE)
        except OSError:
            return None
        front = len(data) - 4 * self.layout.parameters
        payload = memoryview(data)[max(front, 0) :]
        try:
            island = json.loads(data[8 : max(front, 8)])["__metadata__"]["island"]
            check = blake3(island.encode()).update(payload).hexdigest()
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
        if data[: max(front, 0)] != self._progress_header(commit_id, island, check):
            return None
        return np.frombuffer(payload, "<f4").astype(np.float32), island

    def _progress_header(self, commit_id: bytes, island: str, check: str) -> bytes:
        metadata = {"format": "atoll progress 1", "commit": commit_id.hex(), "island": island, "blake3": check}
        size = 4 * self.layout.parameters
        theta = {"dtype": "F32", "shape": [self.layout.parameters], "data_offsets": [0, size]}
        return safetensors_header({"__metadata__": metadata, "theta": theta})

    def _residual_header(self, commit_id: bytes, check: str) -> bytes:
        return safetensors_header(
            {
                "__metadata__": {"format": "atoll residual 1", "commit": commit_id.hex(), "blake3": check},
                "residual": {
                    "dtype": "F32",
                    "shape": [self.layout.parameters],
                    "data_offsets": [0, 4 * self.layout.parameters],
                },
            }
        )


class Download:
    """A checkpoint that is being fetched, blob by blob, in any order. It survives a restart: the next
    :meth:`Store.download` of the same checkpoint finds, by their hashes, the blobs that are there already."""

    def __init__(self, store: Store, position: Position, digest: bytes, hashes: bytes) -> None:
        self._store, self._disk, self._layout = store, store.disk, store.layout
        self._position, self._digest, self._all = position, digest, hashes
        self._hashes = split(hashes)
        self._count = 2 * self._layout.count
        if len(self._hashes) != self._count:
            raise ValueError(f"{len(self._hashes)} hashes for {self._count} blobs")
        front = state_header(store.run_id, position.head.id, self._layout)
        self._data_at = len(front)
        stem = f"{position.head.height:012d}-{position.head.id.hex()[:16]}"
        self._name, self._note = f"incoming/{stem}.safetensors", f"incoming/{stem}.json"
        self._here = [False] * self._count
        description = store.checkpoints.description(position, digest, hashes)
        if self._note in self._disk.names("incoming") and self._disk.read(self._note) == description:
            for index in range(self._count):
                blob = read_blob(self._disk, self._name, self._data_at, self._layout, index)
                self._here[index] = blake3(blob).digest() == self._hashes[index]
        else:
            for name in self._disk.names("incoming"):
                self._disk.remove(name)
            self._disk.allocate(self._name, len(front) + 8 * self._layout.parameters)
            self._disk.patch(self._name, 0, front)
            self._disk.write(self._note, [description])

    def have(self, index: int) -> bool:
        """Whether a blob is here already."""
        return self._here[index]

    def write(self, index: int, blob: Buffer) -> None:
        """Take a blob, whose hash the caller has checked."""
        write_blob(self._disk, self._name, self._data_at, self._layout, index, blob)
        self._here[index] = True

    def finish(self) -> Checkpoint:
        """Make a checkpoint of it. Raises :class:`ValueError` when blobs are missing."""
        missing = self._here.count(False)
        if missing:
            raise ValueError(f"{missing} of {self._count} blobs are missing")
        self._disk.sync(self._name)
        target = self._name.replace("incoming/", "checkpoints/")
        self._disk.rename(self._name, target)
        checkpoint = self._store.checkpoints.describe(self._position, self._digest, self._all, target)
        self._disk.remove(self._note)
        return checkpoint


def _run_file(run: str) -> bytes:
    check = blake3(run.encode()).hexdigest()
    return json.dumps({"format": 1, "run": run, "check": check}).encode() + b"\n"
