"""What a contribution weighs, and that a statement cannot make it weigh more than the rule allows."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.manifest import Manifest
from atoll.protocol.merging import Merging

CAP, H = 8 * 50 * 64, 50


class Member(NamedTuple):
    weight: int
    steps: int


def manifest(**rules: Any) -> Manifest:
    return Manifest.make("merging", parameters=1000, theta0="00" * 32, round={"inner_steps": H, **rules})


def test_weights() -> None:
    usual, slow, none = Member(H * 64, H), Member(20 * 64, 20), Member(0, 7)
    large = Member(H * 64, H // 2)
    """As many tokens in half as many steps."""
    weights = {
        rule: [manifest(weights=rule, weight_cap=CAP).merging.weight(m) for m in (usual, slow, large, none)]
        for rule in ("tokens", "tokens2/steps", "equal")
    }
    assert weights == {
        "tokens": [3200, 1280, 3200, 0], "tokens2/steps": [3200 * 64, 1280 * 64, 3200 * 128, 0], "equal": [1, 1, 1, 0],
    }  # fmt: skip
    assert manifest().merging.weights == "tokens"
    assert manifest(weights="equal").merging.total([usual, none, slow], [0, 2]) == 2


@given(st.integers(1, 2**53), st.integers(1, 10**6), st.integers(0, 2**63 - 1), st.data())
def test_a_statement_of_steps_is_bounded(cap: int, steps: int, stated: int, data: st.DataObject) -> None:
    """Whatever is stated, a step counts for cap / H tokens at most, and who has tokens weighs something."""
    steps = min(steps, cap)
    tokens = data.draw(st.integers(1, cap))
    weight = Merging("tokens2/steps", cap, steps).weight(Member(tokens, stated))
    assert 1 <= weight <= max(tokens * cap // steps, 1)
    assert weight == 1 or weight <= tokens * tokens // max(stated, 1)


def test_the_largest_weight_fits() -> None:
    """256 of the heaviest contributions that a manifest allows sum to less than 2^64, which the header holds."""
    heaviest = manifest(weights="tokens2/steps", weight_cap=671088640).merging.weight(Member(671088640, 0))
    assert heaviest <= 2**53
    assert 256 * heaviest < 2**64


@pytest.mark.parametrize("rule", ["tokens", "tokens2/steps", "equal"])
def test_the_usual_rule_is_not_written(rule: str) -> None:
    """So that whoever does not know of rules can read the manifests of before, and these keep their run ids."""
    ruled, plain = manifest(weights=rule), manifest()
    assert (ruled.run_id == plain.run_id) == (rule == "tokens")
    assert (b"weights" in ruled.canonical()) == ("weights =" in ruled.to_toml()) == (rule != "tokens")
    assert Manifest.from_toml(ruled.to_toml()) == ruled
