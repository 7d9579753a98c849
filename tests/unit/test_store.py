from __future__ import annotations

import errno
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from atoll.protocol.commits import START
from atoll.protocol.disk import Disk, FolderDisk, MemoryDisk
from atoll.protocol.errors import CheckpointError, DiskFull, ResourceError, StateError, StateLocked
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.messages import GENESIS, NO_DIGEST
from atoll.protocol.store import LOST, Loaded, Store

from .runchain import Run

RUN = Run()
CHAIN = RUN.chain(12)
POSITIONS = [position for _, _, position in CHAIN]


@pytest.fixture(params=["folder", "memory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return FolderDisk(tmp_path / "run") if request.param == "folder" else MemoryDisk()


def opened(disk: Disk, warn: Callable[[str], None] | None = None) -> Store:
    return Store(disk, RUN.run_id, RUN.layout, warn=warn)


def filled(disk: Disk, commits: int = 12, checkpoints: tuple[int, ...] = (4, 8)) -> Store:
    store = opened(disk)
    for commit, chunks, position in CHAIN[:commits]:
        store.append(commit, chunks)
        if position.head.height in checkpoints:
            store.save_checkpoint(position, RUN.states[position.head.id])
    return store


def replayed(store: Store, loaded: Loaded | None) -> bytes:
    """The state digest after what was loaded, checked on the way; the id reached."""
    assert loaded is not None
    state = loaded.state or RUN.states[NO_DIGEST]
    assert state.digest() == RUN.states[loaded.position.head.id].digest()
    assert loaded.position == RUN.positions[loaded.position.head.id]
    parent = loaded.position.head.id
    for entry in loaded.replay:
        assert entry.parent == parent
        chunks = {position.head.id: chunks for _, chunks, position in CHAIN}.get(entry.id)
        assert chunks is None or store.chunks(entry.id) == chunks
        parent = entry.id
    assert parent == loaded.head.id
    return parent


def test_a_fresh_store_has_nothing(disk: Disk) -> None:
    store = opened(disk)
    assert store.load() is None
    assert store.best() == store.seen == GENESIS
    assert store.commits() == []
    assert set(store.restorable()) == {NO_DIGEST}
    at_start = store.load(NO_DIGEST)
    assert at_start == Loaded(START, None, [])


def test_commits_come_back_after_a_restart(disk: Disk) -> None:
    filled(disk, checkpoints=())
    store = opened(disk)
    assert [entry.position for entry in store.commits()] == POSITIONS
    assert [entry.head.height for entry in store.chain(POSITIONS[5].head.id, 3)] == [3, 4, 5, 6]
    for commit, chunks, position in CHAIN:
        assert store.commit(position.head.id) == commit
        assert store.chunks(position.head.id) == chunks
        for entry, data in zip(commit.body.chunks, chunks, strict=True):
            assert store.chunk(entry.hash) == data
    assert store.chunk(bytes(32)) is None
    assert store.commit(bytes(32)) is None
    loaded = store.load()
    assert loaded is not None
    assert loaded.state is None
    assert replayed(store, loaded) == POSITIONS[-1].head.id
    assert store.seen == POSITIONS[-1].head


def test_appending_again_changes_nothing_and_wrong_chunks_are_refused(disk: Disk) -> None:
    store = filled(disk, 1, ())
    commit, chunks, _ = CHAIN[0]
    before = {name: disk.read(name) for name in disk.names("log")}
    store.append(commit, chunks)
    assert {name: disk.read(name) for name in disk.names("log")} == before
    with pytest.raises(ValueError, match="chunks"):
        store.append(CHAIN[1][0], chunks[:-1])


def test_two_checkpoints_and_the_log_since_the_older_are_kept(disk: Disk) -> None:
    store = filled(disk, checkpoints=(2, 4, 8))
    assert [head.height for head in store.checkpoint_heads()] == [4, 8]
    assert [entry.head.height for entry in store.commits()] == list(range(5, 13))
    assert len(disk.names("checkpoints")) == 4
    loaded = opened(disk).load()
    assert loaded is not None
    assert loaded.position == POSITIONS[7]
    assert replayed(store, loaded) == POSITIONS[-1].head.id


def test_a_checkpoint_in_use_is_kept(disk: Disk) -> None:
    store = filled(disk, checkpoints=(2, 4))
    store.save_checkpoint(POSITIONS[7], RUN.states[POSITIONS[7].head.id], keep=[POSITIONS[1].head.id])
    assert [head.height for head in store.checkpoint_heads()] == [2, 4, 8]
    assert store.commits()[0].head.height == 3


def test_checkpoints_are_read_in_pieces_and_by_safetensors(tmp_path: Path) -> None:
    store = filled(FolderDisk(tmp_path), checkpoints=(4,))
    commit_id = POSITIONS[3].head.id
    state = RUN.states[commit_id]
    assert store.checkpoint_hashes(commit_id) == b"".join(state.hashes())
    assert [store.checkpoint_blob(commit_id, i) for i in range(state.blob_count)] == [
        state.blob(i) for i in range(state.blob_count)
    ]
    assert store.checkpoint_blob(commit_id, state.blob_count) is None
    assert store.checkpoint_blob(bytes(32), 0) is None
    assert store.checkpoint_hashes(bytes(32)) is None
    (path,) = (tmp_path / "checkpoints").glob("*.safetensors")
    tensors = load_file(path)
    np.testing.assert_array_equal(tensors["params"], state.params)
    np.testing.assert_array_equal(tensors["momentum"], state.momentum)


def test_checkpoints_of_one_commit_are_the_same_bytes_everywhere() -> None:
    one, other = MemoryDisk(), MemoryDisk()
    filled(one, 5, (4,))
    filled(other, 12, (2, 4))
    names = one.names("checkpoints")
    assert {name: one.read(name) for name in names} == {name: other.read(name) for name in names}


def test_a_fork_is_followed_by_weight_and_left_again(disk: Disk) -> None:
    store = filled(disk, 10, (4, 8))
    branch = RUN.chain(3, POSITIONS[4], salt=1)
    heavy = RUN.commit(branch[-1][2], weight=100)
    for commit, chunks, _ in [*branch, heavy]:
        store.append(commit, chunks)
    assert store.best() == heavy[2].head
    loaded = opened(disk).load()
    assert loaded is not None
    assert loaded.position == POSITIONS[3]
    assert replayed(store, loaded) == heavy[2].head.id
    # And back to a commit on the other side, from the checkpoint there.
    back = store.load(POSITIONS[9].head.id)
    assert back is not None
    assert back.position == POSITIONS[7]
    assert replayed(store, back) == POSITIONS[9].head.id
    below = store.load(POSITIONS[4].head.id)
    assert below is not None
    assert below.position == POSITIONS[3]
    assert store.load(bytes(31) + b"x") is None
    assert heavy[2].head.id in store.restorable()
    # The next checkpoint is kept with its own ancestor, not with the one that was left.
    store.save_checkpoint(heavy[2], RUN.states[heavy[2].head.id])
    assert [head.id for head in store.checkpoint_heads()] == [POSITIONS[3].head.id, heavy[2].head.id]


def test_a_checkpoint_that_its_child_does_not_attest_is_not_used() -> None:
    disk, warnings = MemoryDisk(), list[str]()
    store = opened(disk, warnings.append)
    for commit, chunks, _ in CHAIN[:6]:
        store.append(commit, chunks)
    store.save_checkpoint(POSITIONS[1], RUN.states[POSITIONS[1].head.id])
    store.save_checkpoint(POSITIONS[3], RUN.states[POSITIONS[2].head.id])
    loaded = store.load()
    assert loaded is not None
    assert loaded.position == POSITIONS[1]
    assert "attests another state" in warnings[0]


def damage(disk: MemoryDisk, name: str, at: int, mask: int) -> None:
    data = bytearray(disk.files[name])
    if mask:
        data[at % len(data)] ^= mask
    else:
        del data[at % len(data) :]
    disk.files[name] = bytes(data)


FULL = MemoryDisk()
filled(FULL)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FULL.files)), st.integers(0, 1 << 16), st.integers(0, 255))
def test_any_damage_is_found_and_survived(name: str, at: int, mask: int) -> None:
    disk, warnings = MemoryDisk(), list[str]()
    disk.files = dict(FULL.files)
    damage(disk, name, at, mask)
    store = opened(disk, warnings.append)
    for _ in range(3):
        loaded = store.load()
        try:
            reached = replayed(store, loaded)
        except CheckpointError:
            continue
        break
    else:
        pytest.fail("loading again does not get around the damage")
    assert loaded is not None
    if name.startswith("log/"):
        # The chain ends below the damaged commit, or begins above it.
        height = int(name[4:16])
        assert loaded.head.height == (height - 1 if height > 8 else 12)
    else:
        assert reached == POSITIONS[-1].head.id
        if name.startswith("checkpoints/000000000008"):
            assert loaded.position == POSITIONS[3]
            assert store.checkpoint_hashes(POSITIONS[7].head.id) is None
        else:
            assert loaded.position == POSITIONS[7]
    # Chunks below the newest checkpoint are not read by a load.
    above = name.startswith("log/") and int(name[4:16]) > 8
    assert warnings or not (above or name.startswith("checkpoints/000000000008") or name in ("head", "run.json"))
    if name == "head":
        assert store.seen == opened(disk).seen == LOST, "that a head had been seen is not forgotten"
        assert all(store.prefers(position.head, LOST) for position in POSITIONS)
        store.see(POSITIONS[0].head)
        assert opened(disk).seen == POSITIONS[0].head


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 16), st.integers(0, 255), st.booleans())
def test_damage_found_while_serving_is_never_served(at: int, mask: int, blob: bool) -> None:
    disk, warnings = MemoryDisk(), list[str]()
    disk.files = dict(FULL.files)
    store = opened(disk, warnings.append)
    kind = "checkpoints/000000000008" if blob else "log/000000000010"
    name = next(name for name in disk.files if name.startswith(kind) and not name.endswith(".json"))
    damage(disk, name, at, mask)
    checkpoint, (commit, chunks, position) = POSITIONS[7].head.id, CHAIN[9]
    state = RUN.states[checkpoint]
    for index in range(state.blob_count):
        assert store.checkpoint_blob(checkpoint, index) in (None, state.blob(index))
    for entry, data in zip(commit.body.chunks, chunks, strict=True):
        assert store.chunk(entry.hash) in (None, data)
    assert store.commit(position.head.id) in (None, commit)


def test_leftovers_of_a_crash_go(tmp_path: Path) -> None:
    filled(FolderDisk(tmp_path), 6, (2, 4)).close()
    (tmp_path / "log" / "000000000007-00.commit.tmp").write_bytes(b"half")
    (tmp_path / "checkpoints" / "000000000006-00.safetensors").write_bytes(b"a state without its description")
    store = opened(FolderDisk(tmp_path))
    assert replayed(store, store.load()) == POSITIONS[5].head.id
    assert not list(tmp_path.glob("*/*.tmp"))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4


def test_damaged_files_do_not_pile_up() -> None:
    disk = MemoryDisk()
    disk.files = dict(FULL.files)
    for name in disk.names("log"):
        damage(disk, name, 3, 1)
    opened(disk)
    assert disk.names("log") == []
    assert len(disk.names("damaged")) == 4


def test_progress_belongs_to_one_head(disk: Disk) -> None:
    store = opened(disk)
    assert store.load_progress(NO_DIGEST) is None
    theta = np.arange(RUN.layout.parameters, dtype=np.float32)
    store.save_progress(POSITIONS[0].head.id, theta, '{"steps": 3, "text": "\u00e4\\""}')
    assert store.load_progress(POSITIONS[1].head.id) is None
    found = opened(disk).load_progress(POSITIONS[0].head.id)
    assert found is not None
    np.testing.assert_array_equal(found[0], theta)
    assert found[1] == '{"steps": 3, "text": "\u00e4\\""}'
    store.save_progress(POSITIONS[1].head.id, theta, "")
    assert opened(disk).load_progress(POSITIONS[0].head.id) is None


@given(at=st.integers(0, 1 << 16), mask=st.integers(0, 255))
def test_damaged_progress_is_void(at: int, mask: int) -> None:
    disk = MemoryDisk()
    store = opened(disk)
    store.save_progress(NO_DIGEST, np.ones(RUN.layout.parameters, np.float32), "7 steps")
    damage(disk, "progress.safetensors", at, mask)
    assert store.load_progress(NO_DIGEST) is None


def test_the_residual_belongs_to_one_head(disk: Disk) -> None:
    store = opened(disk)
    assert store.load_residual(NO_DIGEST) is None
    residual = np.arange(RUN.layout.parameters, dtype=np.float32)
    store.save_residual(POSITIONS[0].head.id, residual)
    assert store.load_residual(POSITIONS[1].head.id) is None
    found = opened(disk).load_residual(POSITIONS[0].head.id)
    assert found is not None
    np.testing.assert_array_equal(found, residual)
    assert found.flags.writeable


@given(st.integers(0, 1 << 16), st.integers(0, 255))
def test_a_damaged_residual_is_void(at: int, mask: int) -> None:
    disk = MemoryDisk()
    store = opened(disk)
    store.save_residual(NO_DIGEST, np.ones(RUN.layout.parameters, np.float32))
    damage(disk, "residual.safetensors", at, mask)
    assert store.load_residual(NO_DIGEST) is None


def test_a_download_survives_a_restart_and_becomes_a_checkpoint(disk: Disk) -> None:
    position = POSITIONS[7]
    state = RUN.states[position.head.id]
    facts = (position, state.digest(), b"".join(state.hashes()))
    first = opened(disk).download(*facts)
    for index in (0, 3):
        first.write(index, state.blob(index))
    with pytest.raises(ValueError, match="missing"):
        first.finish()
    store = opened(disk)
    second = store.download(*facts)
    assert [index for index in range(state.blob_count) if second.have(index)] == [0, 3]
    for index in range(state.blob_count):
        if not second.have(index):
            second.write(index, state.blob(index))
    second.finish()
    assert disk.names("incoming") == []
    loaded = opened(disk).load()
    assert replayed(store, loaded) == position.head.id
    fresh = MemoryDisk()
    filled(fresh, 8, (8,))
    for name in disk.names("checkpoints"):
        assert disk.read(name) == fresh.read(name)


def test_another_download_replaces_the_first(disk: Disk) -> None:
    for position in (POSITIONS[3], POSITIONS[7]):
        state = RUN.states[position.head.id]
        download = opened(disk).download(position, state.digest(), b"".join(state.hashes()))
        assert not any(download.have(index) for index in range(state.blob_count))
    assert len(disk.names("incoming")) == 2


# --- folders that cannot be used


def test_a_folder_of_another_run_is_refused_and_unharmed(tmp_path: Path) -> None:
    filled(FolderDisk(tmp_path), 3, ()).close()
    with pytest.raises(StateError, match=f"{RUN.run_id.hex()[:12]}.*616161.*--state"):
        Store.open(tmp_path, b"a" * 32, RUN.layout)
    assert Store.open(tmp_path, RUN.run_id, RUN.layout).best() == POSITIONS[2].head


def test_a_checkpoint_of_another_model_is_not_taken(tmp_path: Path) -> None:
    filled(FolderDisk(tmp_path), 5, (4,)).close()
    warnings = list[str]()
    store = Store.open(tmp_path, RUN.run_id, ChunkLayout(601, 256), warn=warnings.append)
    assert store.checkpoint_heads() == []
    assert "the run's model has 601" in warnings[0]


def test_the_folder_is_private_and_for_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    store = Store.open(folder, RUN.run_id, RUN.layout)
    assert folder.stat().st_mode & 0o777 == 0o700
    script = (
        "import sys; from pathlib import Path; from atoll.protocol.disk import FolderDisk\n"
        "from atoll.protocol.errors import StateLocked\n"
        "try: FolderDisk(Path(sys.argv[1]))\n"
        "except StateLocked as error: print(error); sys.exit(6)\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 6, second.stderr
    assert "in use by another atoll process" in second.stdout
    with pytest.raises(StateLocked):
        Store.open(folder, RUN.run_id, RUN.layout)
    store.close()
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StateError, match="--state"):
            Store.open(folder, RUN.run_id, RUN.layout)


def test_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ResourceError, match="read-only"):
        Store.open(tmp_path / "run", RUN.run_id, RUN.layout)


def test_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    store = filled(FolderDisk(tmp_path), 6, (4,))
    before = {name: store.disk.read(name) for folder in ("log", "checkpoints") for name in store.disk.names(folder)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        with pytest.raises(DiskFull):
            store.append(*CHAIN[6][:2])
        with pytest.raises(DiskFull):
            store.save_checkpoint(POSITIONS[5], RUN.states[POSITIONS[5].head.id])
        state = RUN.states[POSITIONS[5].head.id]
        with pytest.raises(DiskFull):
            store.download(POSITIONS[5], state.digest(), b"".join(state.hashes()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    after = {name: store.disk.read(name) for folder in ("log", "checkpoints") for name in store.disk.names(folder)}
    assert after == before
    assert not list(tmp_path.glob("*/*.tmp"))
    store.append(*CHAIN[6][:2])
    assert store.best() == POSITIONS[6].head


@given(st.integers(0, 40_000))
@settings(max_examples=60, deadline=None)
def test_a_disk_that_fills_at_any_moment(capacity: int) -> None:
    disk = MemoryDisk(capacity)
    try:
        store = opened(disk)
    except DiskFull:
        return
    last = GENESIS
    for commit, chunks, position in CHAIN:
        try:
            store.append(commit, chunks)
            last = position.head
        except DiskFull:
            pass
        if position.head.height % 4 == 0:
            try:
                store.save_checkpoint(position, RUN.states[position.head.id])
            except DiskFull:
                pass
    disk.capacity = None
    store = opened(disk)
    loaded = store.load()
    if loaded is not None:
        replayed(store, loaded)
    assert (loaded is None) == (store.best() == GENESIS)
    assert last == GENESIS or store.seen.height >= 0


def test_a_chain_with_a_hole_is_joined_again_by_the_next_checkpoint() -> None:
    disk = MemoryDisk()
    store = opened(disk)
    for commit, chunks, position in CHAIN:
        if position.head.height != 3:
            store.append(commit, chunks)
    assert store.best() == POSITIONS[1].head
    assert store.seen == POSITIONS[-1].head
    store.save_checkpoint(POSITIONS[3], RUN.states[POSITIONS[3].head.id])
    assert replayed(store, store.load()) == POSITIONS[-1].head.id
