"""AdamW with its state in 8 bits (arXiv:2110.02861), by bitsandbytes, which is optional.

It saves 6 bytes of the device's memory a parameter. It is made for CUDA; on a CPU it works, slowly.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from atoll.protocol.errors import ResourceError

from .config import InnerConfig

LEAST = 4096
"""Elements below which bitsandbytes keeps a tensor's state in 32 bits."""


class AdamW8bit:
    """As :class:`.optim.AdamW`, with the two averages of tensors of :data:`LEAST` elements and more in 8 bits.

    Raises :class:`ResourceError` when bitsandbytes is not installed or does not work here.
    """

    def __init__(self, parameters: list[nn.Parameter], config: InnerConfig, weight_decay: float) -> None:
        self.optimizer = _library().optim.AdamW8bit(
            parameters,
            lr=config.adamw_lr,
            betas=(config.beta1, config.beta2),
            eps=1e-8,
            weight_decay=weight_decay,
            min_8bit_size=LEAST,
        )

    def step(self, lr: float) -> None:
        """One update from the parameters' ``grad`` at rate ``lr``."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()


def _library() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ResourceError(
            f'inner.optimizer = "adamw8bit" needs the library bitsandbytes, which cannot be used here ({error}); '
            "install it with: pip install 'atoll[bitsandbytes]'"
        ) from None
    return bitsandbytes
