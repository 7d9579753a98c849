"""Text from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .checkpoint import load
from .config import ModelConfig


def generate(
    checkpoint: Path,
    prompt: str,
    tokens: int = 400,
    temperature: float = 0.8,
    seed: int = 0,
    device: str = "auto",
) -> str:
    """``prompt`` continued by ``tokens`` bytes, from the newest checkpoint in a folder, or the one at a file.

    temperature: 0 takes the likeliest byte each time. Bytes that are no
    UTF-8 come out as U+FFFD. Raises :class:`CheckpointError` and :class:`ResourceError` (device).
    """
    found = load(checkpoint)
    return sample(found.params, found.model, prompt, tokens, temperature, seed, device)


def sample(
    params: NDArray[np.float32],
    model: ModelConfig,
    prompt: str,
    tokens: int = 400,
    temperature: float = 0.8,
    seed: int = 0,
    device: str = "cpu",
) -> str:
    """The same from a parameter vector, float32 in flat order."""
    import torch

    from .learner import choose_device
    from .model import Transformer

    where = choose_device(device)
    transformer = Transformer(model, torch.from_numpy(params).to(where))
    # drawn on the CPU, so that a seed gives one text on every device
    generator = torch.Generator().manual_seed(seed)
    # a document begins after the NUL that ends the one before
    text = list(prompt.encode()) or [0]
    first = len(text) if prompt else 1
    with torch.inference_mode():
        for _ in range(tokens):
            window = torch.tensor([text[-model.context :]], device=where)
            logits = transformer(window)[0, -1, :256].float().cpu()
            if temperature > 0:
                following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                following = logits.argmax()
            text.append(int(following))
    return prompt + bytes(text[first:]).decode("utf-8", "replace")
