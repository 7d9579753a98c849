"""A decoder-only transformer in the style of today's, small enough to be read in one go.

Pre-norm blocks of RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), grouped-query attention
(arXiv:2305.13245) and SwiGLU (arXiv:2002.05202), without biases. Query, key and value are one matrix, and so are gate
and up, because on a CPU a small model spends its time on calls, not on arithmetic.

All parameters are views into ONE flat float32 vector, in the order of :func:`atoll.node.specs.tensor_specs`: what the
peer averages is that vector, and freezing a CPU island copies nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .specs import tensor_specs


class RMSNorm(nn.Module):
    def __init__(self, gain: nn.Parameter) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain.to(x.dtype), 1e-5)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, qkv: nn.Parameter, out: nn.Parameter) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.qkv, self.out = qkv, out

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = F.linear(x, self.qkv).view(batch, time, self.heads + 2 * self.kv_heads, -1).transpose(1, 2)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(qk, turn).split([self.heads, self.kv_heads], dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return F.linear(y.transpose(1, 2).reshape(batch, time, width), self.out)


class SwiGLU(nn.Module):
    def __init__(self, gate_up: nn.Parameter, down: nn.Parameter) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, p: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(p["attention_norm"])
        self.attention = Attention(config, p["qkv"], p["out"])
        self.ffn_norm = RMSNorm(p["ffn_norm"])
        self.ffn = SwiGLU(p["gate_up"], p["down"])

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """The model over ``flat``: float32, ``count_parameters(config)`` elements, kept as views, never copied."""

    turn: Tensor

    def __init__(self, config: ModelConfig, flat: Tensor) -> None:
        super().__init__()
        self.config = config
        named = parameter_views(config, flat)
        self.names = list(named)
        self.embedding = named["embedding"]
        self.blocks = nn.ModuleList(
            Block(config, {name.rsplit(".", 1)[1]: p for name, p in named.items() if name.startswith(f"layers.{i}.")})
            for i in range(config.layers)
        )
        self.norm = RMSNorm(named["norm"])
        self.head = named["embedding"] if config.tied else named["head"]
        turn = rotations(config.width // config.heads, config.context, config.rope_theta)
        self.register_buffer("turn", turn.to(flat.device), persistent=False)
        self.named = named

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits float [batch, time, vocab] of integer tokens [batch, time], time ≤ context."""
        x = F.embedding(tokens, self.embedding)
        turn = self.turn[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, turn)
        return F.linear(self.norm(x), self.head)

    def loss(self, tokens: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy in nats of every next token in ``tokens`` [batch, time + 1] (``mean`` or ``sum``)."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)


def parameter_views(config: ModelConfig, flat: Tensor) -> dict[str, nn.Parameter]:
    """The parameters by name, in flat order, as views into ``flat``."""
    views: dict[str, nn.Parameter] = {}
    at = 0
    for spec in tensor_specs(config):
        views[spec.name] = nn.Parameter(flat[at : at + spec.size].view(spec.shape))
        at += spec.size
    if at != flat.numel():
        raise ValueError(f"expected a flat vector of {at} elements, got {flat.numel()}")
    return views


def rotations(dim: int, context: int, theta: float) -> Tensor:
    """Cosines and sines of the rotary angles: float32 [2, context, dim] (both halves of the dimension alike)."""
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the pairs (i, i + dim/2) of ``x`` [..., time, dim] by position."""
    # float32 even where autocast makes x bfloat16: a rounded angle is a wrong position
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin
