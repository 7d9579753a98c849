"""The known-answer test that runs when a node starts: does this machine compute the protocol's bits?"""

from __future__ import annotations

import numpy as np

from .codecs import AVERAGES, CODECS
from .digest import blake3_digest
from .errors import ResourceError
from .kernels import probe, results, subnormals_on, table
from .layout import ChunkLayout
from .outer import outer_step
from .state import GlobalState
from .theta0 import TensorSpec, theta0

KNOWN: dict[str, str] = {
    "kernel largest": "535c24d779aaab7b",
    "kernel outer_nesterov": "22309355046a982e",
    "kernel outer_delayed": "82d2dbbd9784ed86",
    "kernel outer_sgd": "c22bdc3239100905",
    "kernel contribution": "0a518131ef232d87",
    "kernel float32_add": "7bd40f198c0cb779",
    "kernel int8_encode": "d858a17205722f5d",
    "kernel int8_valid": "48fc721fbbc172e0",
    "kernel int8_decode": "c39b2a995442adcc",
    "kernel int8_add": "cd7699f28992d21e",
    "kernel int4_encode": "10cf9c36953f3ed4",
    "kernel int4_valid": "48fc721fbbc172e0",
    "kernel int4_decode": "109f5ed92d71c83b",
    "kernel int4_add": "05f38ab0c74b81c6",
    "kernel sparse_encode": "864bfbd380eb1164",
    "kernel sparse_valid": "48fc721fbbc172e0",
    "kernel sparse_decode": "0372536f9466cc86",
    "kernel sparse_add": "303fa33d05c6fe5a",
    "kernel union_encode": "2048f4d30ecd74b4",
    "kernel union_valid": "48fc721fbbc172e0",
    "kernel union_decode": "dc1c1708e561e009",
    "kernel float16_encode": "ea09aecdd47792c5",
    "kernel float16_valid": "48fc721fbbc172e0",
    "kernel float16_decode": "9e001c8815162492",
    "kernel float16_add": "5297e90a49697eb8",
    "kernel theta0_normal": "8161672cc718e34e",
    "kernel matrix_times": "dd8ec54111cdcdfd",
    "kernel times_matrix": "f88b6477d404ac3c",
    "kernel outer_add": "00a5459d616218e1",
    "kernel orthonormal": "0158f50f9898a900",
    "theta0": "5a9edd26a46b467d",
    "state at theta0": "31cfae416faca064",
    "state after three outer steps": "5c463bdccf8a5b58",
    "codec float32": "bcf8580a2a904ed9",
    "codec float16": "3371b4e56a020b1f",
    "codec int8": "4fa2eb6e2e83b85b",
    "codec int4": "57fc5947e72750fd",
    "codec sparse": "7cbcb6550f05425f",
    "codec lowrank": "57fc5947e72750fd",
    "codec union": "bb7cc92c3fef0775",
}
"""The first 8 bytes of each digest, in hex."""


def answers() -> dict[str, bytes]:
    """What this machine computes: a digest for each thing that :func:`self_test` looks at."""
    subnormals_on()
    found = {f"kernel {name}": blake3_digest(data) for name, data in results(table()).items()}

    specs = (
        TensorSpec("embedding", (256, 16), "normal", 0.02),
        TensorSpec("norm", (16,), "ones"),
        TensorSpec("bias", (7,), "zeros"),
        TensorSpec("matrix", (3, 5, 7), "normal", 1e-39),
    )
    params = theta0(20240229, specs)
    found["theta0"] = blake3_digest(params.astype("<f4").tobytes())

    state = GlobalState.fresh(ChunkLayout(params.size, 1024), params)
    found["state at theta0"] = state.digest()
    for step in range(3):
        for i in range(state.layout.count):
            if i == step:
                continue  # a chunk that nobody contributed to
            span = state.layout.span(i)
            mean = probe(state.layout.size(i), step) * np.float32(2.0**-62)
            outer_step(state.params[span], state.momentum[span], mean, 0.7, 0.6)
    state.forget()
    found["state after three outer steps"] = state.digest()

    values = probe(1000, 9)
    for name, codec in {**CODECS, **AVERAGES}.items():
        payload = codec.encode(values)
        out = np.zeros(values.size, np.float32)
        codec.accumulate(payload, 3.0, out)
        found[f"codec {name}"] = blake3_digest(payload, out.astype("<f4").tobytes())
    return found


def self_test() -> None:
    """Compute the protocol's test vectors with the kernels in use, subnormals included, and compare.

    Takes milliseconds; call it after :func:`.kernels.warm_up`. Raises :class:`ResourceError` when any bit differs.
    """
    found = answers()
    wrong = [name for name, digest in KNOWN.items() if found.get(name, b"").hex()[:16] != digest]
    if wrong:
        raise ResourceError(
            f"this machine computes other bits than the protocol demands ({', '.join(wrong)}; kernels: {table().name}, "
            f"numpy {np.__version__}); its parameters would differ from everyone else's. Try another version of numpy "
            "or a machine with another processor"
        )
