"""How contributions become one: the protocol's weighted mean, or the mean of norms times the mean direction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.protocol.theta0 import TensorSpec

Floats = NDArray[np.float32]
EMBEDDINGS = ("embedding", "head")


def radial(contributions: Sequence[Floats], weights: Sequence[float], specs: Sequence[TensorSpec]) -> Floats:
    """Radial-directional averaging (arXiv 2604.21428) of flat vectors, tensor by tensor.

    With φ(x) = x/‖x‖ and w the weights as shares: Σw‖v‖ · φ(Σ w·φ(v)); embeddings by the weighted mean. A
    mean direction of zero gives zero. ``specs``: the tensors in flat order.
    """
    shares = [weight / sum(weights) for weight in weights]
    out = np.empty_like(contributions[0])
    at = 0
    for spec in specs:
        part = slice(at, at + spec.size)
        at += spec.size
        vectors = [contribution[part].astype(np.float64) for contribution in contributions]
        if spec.name in EMBEDDINGS:
            out[part] = sum(share * vector for share, vector in zip(shares, vectors, strict=True))
            continue
        norms = [float(np.linalg.norm(vector)) for vector in vectors]
        norm = sum(share * size for share, size in zip(shares, norms, strict=True))
        direction = sum(s * v / n for s, v, n in zip(shares, vectors, norms, strict=True) if n > 0)
        length = float(np.linalg.norm(direction))
        out[part] = norm / length * direction if length > 0 else 0.0
    return out
