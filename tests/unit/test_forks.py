"""What is lost in going over to another chain."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.protocol import forks
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.messages import GENESIS, NO_DIGEST, Head
from atoll.protocol.transport import PeerId

LAYOUT = ChunkLayout(10, 5)


def chain(*names: str, parent: bytes = NO_DIGEST, height: int = 0) -> dict[bytes, Any]:
    """Commits by id, one upon another; of each, ten tokens of a's and one of b's."""
    found: dict[bytes, Any] = {}
    for name in names:
        height += 1
        members = [SimpleNamespace(peer="a"), SimpleNamespace(peer="b")]
        body = SimpleNamespace(height=height, parent=parent, seal=SimpleNamespace(members=members), chunks=[])
        parent = name.encode()
        found[parent] = SimpleNamespace(body=body)
    return found


@pytest.fixture(autouse=True)
def _tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "averaged_of", lambda seal, chunks, layout: [10, 1])


def head(name: str, height: int) -> Head:
    return Head(name.encode(), height, 0, height, height)


def lost(
    kept: dict[bytes, Any], left: Head, taken: Head, peer: str = "a", path: Sequence[Head] = ()
) -> tuple[int, int, bool]:
    chain, commit_id, height = [taken, *path], taken.id, taken.height
    while commit_id in kept:
        chain.append(Head(commit_id, height, 0, height, height))
        commit_id, height = kept[commit_id].body.parent, height - 1
    return tuple(forks.lost_between(left, chain, kept.get, PeerId(peer), LAYOUT))  # type: ignore[arg-type]


def test_commits_beside_and_above_the_new_chain_are_lost() -> None:
    common = chain("1", "2")
    kept = common | chain("3x", "4x", "5x", parent=b"2", height=2) | chain("3y", "4y", parent=b"2", height=2)
    assert lost(kept, head("5x", 5), head("4y", 4)) == (3, 30, False)
    assert lost(kept, head("5x", 5), head("4y", 4), "b") == (3, 3, False)
    assert lost(kept, head("4y", 4), head("5x", 5)) == (2, 20, False)
    assert lost(kept, head("4y", 4), head("2", 2)) == (2, 20, False)


def test_nothing_is_lost_along_one_chain_or_from_the_beginning() -> None:
    kept = chain("1", "2", "3")
    assert lost(kept, head("1", 1), head("3", 3)) == (0, 0, False)
    assert lost(kept, GENESIS, head("3", 3)) == (0, 0, False)
    assert lost(kept, head("3", 3), head("3", 3)) == (0, 0, False)


def test_below_what_is_kept_nothing_counts() -> None:
    new = chain("8", "9", parent=b"7", height=7)
    assert lost(chain("1", "2", "3") | new, head("3", 3), head("9", 9)) == (0, 0, False)
    assert lost(new, head("gone", 5), head("9", 9)) == (0, 0, False)
    path = [head("8", 8), *(head(str(height), height) for height in range(7, 0, -1))]
    assert lost(chain("1", "2x", "3x") | new, head("3x", 3), head("9", 9), path=path) == (2, 20, False)
    assert lost(chain("1", "2x", "3x") | new, head("3x", 3), head("9", 9), path=path[:-1]) == (2, 20, True)
    assert lost(chain("3x", parent=b"2x", height=2) | new, head("3x", 3), head("9", 9), path=path) == (1, 10, True)
