"""Averaged chunks of sparse contributions, whose length depends on what they hold."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.protocol.averaged import check, pack, size_limit
from atoll.protocol.codecs import averages_codec, get_codec
from atoll.protocol.commits import bitmap
from atoll.protocol.deadline import deadline_seconds, encoded_size
from atoll.protocol.errors import PeerMisbehaved, VersionError
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.manifest import Manifest, with_version
from atoll.protocol.messages import Member

SIZE, MEMBERS = 10_000, 5
SPARSE, UNION = get_codec("sparse"), averages_codec("sparse")


def manifest(codec: str = "sparse", **more: object) -> Manifest:
    return Manifest.make(
        "averages", parameters=SIZE, theta0="00" * 32, state={"chunk": 16384},
        codec={"name": codec, "error_feedback": 0.9, **more},
    )  # fmt: skip


def members(weights: list[int]) -> list[Member]:
    return [Member(f"peer-{i}", bytes(16), weight, 1, 1, 0.0, 0.0, True) for i, weight in enumerate(weights)]


def average(contributions: int) -> np.ndarray:
    total = np.zeros(SIZE, np.float32)
    for seed in range(contributions):
        x = np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)
        SPARSE.accumulate(SPARSE.encode(x), 10.0, total)
    return total / np.float32(10 * contributions)


@pytest.mark.parametrize("inside", [[0], [1, 4], [0, 1, 2, 3, 4]])
def test_an_averaged_chunk_is_bounded_by_those_in_it(inside: list[int]) -> None:
    run, roster = manifest(), members([10] * MEMBERS)
    contributors, weight = bitmap(inside, MEMBERS), 10 * len(inside)
    data = pack(0, contributors, weight, UNION.encode(average(len(inside))))
    assert len(data) <= size_limit(SPARSE, SIZE, len(inside), run.merging)
    assert size_limit(SPARSE, SIZE, len(inside), run.merging) <= size_limit(SPARSE, SIZE, MEMBERS, run.merging)
    assert len(check(data, 0, roster, SPARSE, SIZE, run.merging).payload) < SIZE // 2
    # more places than they can have kept, in a chunk that the frame's limit lets through
    more = pack(0, contributors, weight, UNION.encode(average(len(inside) + 1)))
    assert len(more) <= size_limit(SPARSE, SIZE, MEMBERS + 1, run.merging)
    for wrong in (more, data + b"\0", data[:-1], data[:30], pack(0, contributors, weight, b"")):
        with pytest.raises(PeerMisbehaved):
            check(wrong, 0, roster, SPARSE, SIZE, run.merging)
    # and one that says of itself that it is of another codec's kind
    with pytest.raises(PeerMisbehaved):
        check(pack(0, contributors, weight, get_codec("int8").encode(average(1))), 0, roster, SPARSE, SIZE, run.merging)


def test_d_allows_for_the_averages_of_all_who_contribute() -> None:
    layout = ChunkLayout(SIZE, 16384)
    for count in (1, 2, 4):
        weighed = members([10] * count + [0] * 3)
        assert encoded_size(layout, "sparse", weighed) == UNION.average_size(SIZE, count)
        assert encoded_size(layout, "int8", weighed) == get_codec("int8").encoded_size(SIZE)
    few, many = (deadline_seconds(members([10] * n + [0] * (8 - n)), layout, "sparse", 5.0) for n in (2, 8))
    assert few < many < deadline_seconds(members([10] * 8), layout, "int4", 5.0)
    assert deadline_seconds(members([0] * 8), layout, "sparse", 5.0) == 20.0


def test_a_manifest_names_the_version_of_its_codec() -> None:
    """Peers of which one writes averages in int8 have other manifests, and so other run ids."""
    run = manifest()
    assert run.codec.version == 2
    assert b'"version":2' in run.canonical()
    assert "version = 2" in run.to_toml()
    assert Manifest.from_toml(run.to_toml()) == run
    raw = run.written()
    with pytest.raises(VersionError, match=r"version = 3 .* update atoll"):
        Manifest.from_dict({**raw, "codec": {**raw["codec"], "version": 3}})
    # as it was written before there were versions
    del raw["codec"]["version"]
    with pytest.raises(VersionError, match=r"version = 1 .* an older atoll .* set codec.version to 2"):
        Manifest.from_dict(raw)
    # nothing changes where the bytes are those of ever
    plain = manifest("int8")
    assert plain.codec.version == 1
    assert b"version" not in plain.canonical()
    assert "version =" not in plain.to_toml()
    with pytest.raises(VersionError, match="update atoll"):
        manifest("int8", version=2)


def test_a_change_of_the_codec_changes_the_version_with_it() -> None:
    assert manifest("int8").replace(codec={"name": "sparse"}).codec.version == 2
    assert manifest().replace(codec={"name": "int4"}).codec.version == 1
    assert manifest().replace(codec={"error_feedback": 0.5}).codec.version == 2
    assert manifest().replace(name="other").codec.version == 2
    assert with_version({"name": "sparse", "version": 1}) == {"name": "sparse", "version": 1}
    assert with_version({"name": ["sparse"]}) == {"name": ["sparse"]}
