"""Named sizes of the model, and the default inner optimizer of the demonstration.

The counts are parameters with a byte vocabulary. ``demo`` and the defaults of ``INNER`` were chosen by
``bench/learning_sweep.py``; docs/study-default.md has the table.
"""

from __future__ import annotations

from typing import Any

DEFAULT_PRESET = "demo"


def _size(width: int, layers: int, heads: int, kv_heads: int, ffn: int, context: int) -> dict[str, Any]:
    return {
        "vocab": 256,
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "context": context,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "demo": _size(96, 2, 3, 3, 256, 128),
    "tiny": _size(128, 4, 4, 4, 344, 128),
    "10m": _size(320, 8, 5, 5, 864, 512),
    "60m": _size(640, 12, 10, 10, 1728, 1024),
    "150m": _size(896, 15, 14, 14, 2432, 1024),
    "400m": _size(1280, 20, 20, 10, 3584, 2048),
    "1b": _size(2048, 20, 16, 8, 5632, 2048),
}

INNER: dict[str, Any] = {
    "optimizer": "muon",
    "lr": 0.02,
    "adamw_lr": 3e-3,
    "weight_decay": 0.0,
    "batch": 4,
    "warmup": 0.03,
    "decay": "cosine",
    "final_lr": 0.1,
}
"""Defaults of :class:`atoll.node.config.InnerConfig`."""
