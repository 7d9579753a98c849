"""What tables of one, two and three bytes score on the validation bytes: the bar that a model has to clear.

Counts come from the training bytes, the score from the very bytes that :mod:`atoll.node.evaluate` scores. Longer
contexts are interpolated with shorter ones (Witten–Bell), so unseen contexts cost no infinite surprise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

VALUES = 256


def ngram_losses(train: NDArray[np.uint8], validation: NDArray[np.uint8]) -> dict[str, float]:
    """Nats per byte of ``unigram``, ``bigram`` and ``trigram`` on ``validation``, its first byte not scored."""
    counts = np.bincount(train, minlength=VALUES).astype(np.float64) + 1.0
    unigram = counts / counts.sum()
    target = validation[1:].astype(np.int64)
    losses = {"unigram": _nats(unigram[target])}
    train64, context = train.astype(np.int64), validation[:-1].astype(np.int64)
    pairs = _counts(train64[:-1], train64[1:], VALUES)
    bigram = _blend(pairs, context, target, unigram[target])
    losses["bigram"] = _nats(bigram)
    triples = _counts(train64[:-2] * VALUES + train64[1:-1], train64[2:], VALUES * VALUES)
    # the second byte has only one byte before it: the bigram scores it
    before = context[:-1] * VALUES + context[1:]
    trigram = np.concatenate([bigram[:1], _blend(triples, before, target[1:], bigram[1:])])
    losses["trigram"] = _nats(trigram)
    return losses


def _counts(contexts: NDArray[np.int64], values: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return np.bincount(contexts * VALUES + values, minlength=size * VALUES).reshape(size, VALUES)


def _blend(
    counts: NDArray[np.int64], contexts: NDArray[np.int64], targets: NDArray[np.int64], lower: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Witten–Bell: (count + kinds · lower) / (total + kinds), kinds being the distinct bytes seen in that context."""
    total = counts.sum(axis=1)[contexts]
    kinds = np.maximum((counts > 0).sum(axis=1)[contexts], 1)
    return (counts[contexts, targets] + kinds * lower) / (total + kinds)


def _nats(probabilities: NDArray[np.float64]) -> float:
    return float(-np.log(probabilities).mean())
