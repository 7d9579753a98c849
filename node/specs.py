"""The layout of a model's parameters: names, shapes and initial distributions, in flat order. Imports no torch."""

from __future__ import annotations

import math

from atoll.protocol.theta0 import TensorSpec, elements

from .config import ModelConfig

ONE_THREAD_BELOW = 2_000_000
"""Parameters below which one thread is faster than several on a CPU."""


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """The parameters in the order in which they lie in the flat float32 vector.

    Layer by layer, so that a fragment or a stage is a contiguous range. Matrices are [out, in]. Norm gains start at
    one; matrices start normal with deviation 1/√in, those that write into the residual stream smaller by √(2·layers).
    """
    width, dim = config.width, config.width // config.heads
    inner = config.heads * dim
    into_residual = 1.0 / math.sqrt(2 * config.layers)
    specs = [TensorSpec("embedding", (config.vocab, width), "normal", EMBEDDING_STD)]
    for i in range(config.layers):
        specs += [
            TensorSpec(f"layers.{i}.attention_norm", (width,), "ones"),
            TensorSpec(f"layers.{i}.qkv", ((config.heads + 2 * config.kv_heads) * dim, width), "normal", width**-0.5),
            TensorSpec(f"layers.{i}.out", (width, inner), "normal", inner**-0.5 * into_residual),
            TensorSpec(f"layers.{i}.ffn_norm", (width,), "ones"),
            TensorSpec(f"layers.{i}.gate_up", (2 * config.ffn, width), "normal", width**-0.5),
            TensorSpec(f"layers.{i}.down", (width, config.ffn), "normal", config.ffn**-0.5 * into_residual),
        ]
    specs.append(TensorSpec("norm", (width,), "ones"))
    if not config.tied:
        specs.append(TensorSpec("head", (config.vocab, width), "normal", 0.5 * width**-0.5))
    return specs


def layer_sizes(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Elements of the tensors of each layer, in flat order. The embedding is a layer, and norm with head."""
    sizes: dict[str, list[int]] = {}
    for spec in tensor_specs(config):
        layer = ".".join(spec.name.split(".")[:2]) if spec.name.startswith("layers.") else spec.name
        sizes.setdefault("head" if layer == "norm" else layer, []).append(spec.size)
    return tuple(map(tuple, sizes.values()))


def embeddings(config: ModelConfig) -> tuple[int, ...]:
    """Numbers of the tensors, in flat order, that are looked up by token or that score tokens."""
    return tuple(i for i, spec in enumerate(tensor_specs(config)) if spec.name in ("embedding", "head"))


def tensor_columns(config: ModelConfig) -> tuple[int, ...]:
    """Columns of each tensor in flat order; a vector is one row."""
    return tuple(spec.shape[-1] for spec in tensor_specs(config))


EMBEDDING_STD = 0.02
"""Deviation of the initial embedding; RMSNorm makes its size matter only against what the blocks add."""


def count_parameters(config: ModelConfig) -> int:
    """Elements of the flat vector."""
    return elements(tensor_specs(config))


def matrices(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """What Muon takes: (name, row counts of the matrices that are stacked in that tensor)."""
    dim = config.width // config.heads
    found: list[tuple[str, tuple[int, ...]]] = []
    for i in range(config.layers):
        kv = config.kv_heads * dim
        found += [
            (f"layers.{i}.qkv", (config.heads * dim, kv, kv)),
            (f"layers.{i}.out", (config.width,)),
            (f"layers.{i}.gate_up", (config.ffn, config.ffn)),
            (f"layers.{i}.down", (config.width,)),
        ]
    return found
