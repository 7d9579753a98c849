"""Validation loss of a parameter vector on the whole held-out set, at fixed windows."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .config import DataConfig, ModelConfig

BATCH_TOKENS = 4096
"""Tokens that go through the model at once; larger batches are no faster on a CPU."""


class Evaluator:
    """Scores parameters on the held-out bytes of ``data``, read once.

    The windows are the text cut into pieces of ``context`` bytes, each predicted from what precedes it in its window:
    every byte but the very first is scored exactly once, so losses of different rounds and peers compare.
    """

    def __init__(self, model: ModelConfig, data: DataConfig, device: str = "cpu") -> None:
        import torch

        from .data import load
        from .learner import choose_device
        from .model import Transformer
        from .specs import count_parameters

        self._device = choose_device(device)
        self.corpus = load(data, model.context)
        self.bytes = len(self.corpus.validation) - 1
        """Bytes that are scored."""
        self._flat = torch.empty(count_parameters(model), device=self._device)
        self._model = Transformer(model, self._flat)
        context, text = model.context, torch.from_numpy(self.corpus.validation.astype(np.int64))
        windows = text.unfold(0, context + 1, context)
        batch = max(BATCH_TOKENS // context, 1)
        self._batches = list(windows.split(batch))
        rest = text[len(windows) * context :][None]
        if rest.shape[1] > 1:
            self._batches.append(rest)

    def loss(self, params: NDArray[np.float32], every: int = 1) -> float:
        """Nats per byte of the parameters, float32 in flat order; with ``every`` > 1 on that share of the text only."""
        import torch

        chosen = self._batches[::every]
        with torch.inference_mode():
            self._flat.copy_(torch.from_numpy(params))
            total = sum(float(self._model.loss(b.to(self._device), "sum")) for b in chosen)
        return total / sum(len(b) * (b.shape[1] - 1) for b in chosen)

    def ngrams(self) -> dict[str, float]:
        """What tables of one, two and three bytes score on the same bytes (:mod:`atoll.node.ngram`)."""
        from .ngram import ngram_losses

        return ngram_losses(self.corpus.train, self.corpus.validation)


@lru_cache(maxsize=2)
def _evaluator(model: ModelConfig, data: DataConfig) -> Evaluator:
    return Evaluator(model, data)


def evaluate(params: NDArray[np.float32], model: ModelConfig, data: DataConfig) -> float:
    """Nats per byte of ``params`` on the whole held-out set of ``data`` (CPU). The corpus is kept between calls."""
    return _evaluator(model, data).loss(params)
