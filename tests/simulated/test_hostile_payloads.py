"""One hostile peer of four that sends, in a round of each codec, what no encoder of it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.protocol.codecs import CODECS, averages_codec

from ..hostile import Case
from ..malformed import MALFORMED, NORMS, norms_of_a_member, of_a_member, of_a_reducer
from .test_hostile_reduce import Attacked, completed_without

MEMBER = [(codec, what) for codec in CODECS for what in MALFORMED[codec]]
REDUCER = [(codec, what) for codec in CODECS for what in MALFORMED[averages_codec(codec).name]]
ODD = 1021
"""Parameters of a model whose last chunk has filling."""


def play(case: Case, swarm: Attacked, what: str) -> None:
    completed_without(case, swarm)
    if what == "filling":
        sizes = [wire.size(wire.part.first + 1) for current in swarm.attack.rounds for wire in current.wires]
        assert any(size % 2 for size in sizes), sizes


def rules(codec: str) -> dict[str, Any]:
    # The matrices that low rank is for are those of another size.
    return {"codec": {"name": codec}} | ({} if codec == "lowrank" else {"parameters": ODD})


@pytest.mark.parametrize(("codec", "what"), MEMBER)
def test_a_contribution(codec: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if what != "filling":
        swarm = Attacked(tmp_path, monkeypatch, **rules(codec))
    else:
        # The last part would be its own, and the last chunk is the one with filling: two chunks for each of three.
        swarm = Attacked(tmp_path, monkeypatch, reduces=False, **rules(codec) | {"parameters": 6 * 128 - 3})
    play(of_a_member(codec, what), swarm, what)


@pytest.mark.parametrize(("codec", "what"), REDUCER)
def test_an_average(codec: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(of_a_reducer(codec, what), Attacked(tmp_path, monkeypatch, **rules(codec)), what)


@pytest.mark.parametrize("what", NORMS)
def test_norms(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some tensor in every chunk.
    radial = {"round": {"average": "radial"}, "state": {"embeddings": [1]}}
    completed_without(norms_of_a_member(what), Attacked(tmp_path, monkeypatch, **radial))
