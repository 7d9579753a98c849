"""Scores of byte tables."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.node.config import DataConfig
from atoll.node.data import load
from atoll.node.ngram import ngram_losses


def test_a_cycle_is_known_from_the_byte_before() -> None:
    text = np.frombuffer(b"abcd" * 2000, np.uint8)
    losses = ngram_losses(text, text[:401])
    assert losses["unigram"] == pytest.approx(np.log(4), abs=0.05)
    assert losses["bigram"] < 0.01
    assert losses["trigram"] < 0.01


def test_two_bytes_tell_more_than_one() -> None:
    text = np.frombuffer(b"aabb" * 2000, np.uint8)
    losses = ngram_losses(text, text[:401])
    assert losses["bigram"] == pytest.approx(np.log(2), abs=0.05)
    assert losses["trigram"] < 0.02


def test_noise_is_noise_and_unseen_bytes_cost_something_finite() -> None:
    random = np.random.default_rng(0)
    train, validation = random.integers(0, 256, (2, 50_000), dtype=np.uint8)
    losses = ngram_losses(train, validation)
    assert all(np.log(256) - 0.01 < loss < 6.5 for loss in losses.values())
    losses = ngram_losses(np.zeros(100, np.uint8), validation[:100])
    assert all(np.isfinite(loss) for loss in losses.values())


def test_the_standard_library_scores_about_what_it_should() -> None:
    corpus = load(DataConfig(), 64)
    losses = ngram_losses(corpus.train, corpus.validation)
    assert losses["unigram"] == pytest.approx(3.2, abs=0.15)
    assert losses["bigram"] == pytest.approx(2.48, abs=0.1)
    assert losses["trigram"] == pytest.approx(1.88, abs=0.1)
