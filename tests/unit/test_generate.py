"""Text from parameters and checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.node.checkpoint import Metadata, save
from atoll.node.config import InnerConfig, ModelConfig
from atoll.node.generate import generate, sample
from atoll.node.learner import Learner
from atoll.node.specs import tensor_specs
from atoll.protocol.errors import CheckpointError
from atoll.protocol.theta0 import theta0

MODEL = ModelConfig.from_table({"width": 32, "heads": 2, "kv_heads": 2, "ffn": 64, "layers": 1, "context": 16})


@pytest.fixture(scope="module")
def params() -> np.ndarray:
    """Trained on one sentence for a moment."""
    text = np.frombuffer(b"spam and eggs. " * 200, np.uint8)
    flat = theta0(0, tensor_specs(MODEL))
    learner = Learner(MODEL, InnerConfig(), 100, 1, text, flat, device="cpu")
    for i in range(80):
        learner.step(np.arange(i * 4, i * 4 + 4), 0, i)
    return flat


def test_it_says_what_it_has_learnt(params: np.ndarray) -> None:
    assert sample(params, MODEL, "spam and", 22, temperature=0) == "spam and eggs. spam and eggs. "


def test_a_seed_gives_one_text(params: np.ndarray) -> None:
    texts = [sample(params, MODEL, "", 40, 2.0, seed=s) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_from_a_checkpoint(params: np.ndarray, tmp_path: Path) -> None:
    save(tmp_path, params, Metadata("00" * 32, "t", MODEL.to_table(), 1, 1, 1, "11" * 32))
    assert generate(tmp_path, "spam a", 5, 0, device="cpu") == "spam and egg"[:11]
    with pytest.raises(CheckpointError):
        generate(tmp_path / "nothing.safetensors", "x")


def test_bytes_that_are_no_text_do_not_break_it() -> None:
    assert "�" in sample(theta0(0, tensor_specs(MODEL)), MODEL, "é", 200, 3.0)
