"""Speed of the codecs and of what else touches every parameter: ``python -m bench.codecs``.

Chunks of 65,536 values out of a vector too large for the caches, as in a round; gigabytes are of float32 values, not
of payload. Threads are Python threads on different chunks, which is how a peer runs the kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from atoll.protocol import kernels
from atoll.protocol.codecs import CODECS
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.outer import outer_step
from atoll.protocol.state import GlobalState
from atoll.protocol.theta0 import TensorSpec, fill

CHUNK = 65536


def measure(work: Callable[[int], object], layout: ChunkLayout, threads: int, repeats: int) -> float:
    """Gigabytes of float32 per second, the best of ``repeats`` passes over all chunks."""

    def strand(first: int) -> None:
        for i in range(first, layout.count, threads):
            work(i)

    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats + 1):  # the first one warms up
            start = time.perf_counter()
            list(pool.map(strand, range(threads)))
            best = min(best, time.perf_counter() - start)
    return 4e-9 * layout.parameters / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 24, help="length of the vector (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    layout = ChunkLayout(options.elements, CHUNK)
    spec = TensorSpec("vector", (layout.parameters,), "normal", 1e-3)
    values, into, momentum = (np.empty(layout.parameters, np.float32) for _ in range(3))
    fill(1, 0, spec, values)
    into[:], momentum[:] = values, 0
    state = GlobalState(layout, into, momentum)

    jobs: dict[str, Callable[[int], object]] = {}
    for name, codec in CODECS.items():
        sizes = [codec.encoded_size(layout.size(i)) for i in range(layout.count)]
        buffers = [bytearray(size) for size in sizes]
        jobs[f"{name} encode"] = lambda i, c=codec, b=buffers: c.encode(values[layout.span(i)], b[i])
        jobs[f"{name} decode"] = lambda i, c=codec, b=buffers: c.decode(b[i], layout.size(i), into[layout.span(i)])
        jobs[f"{name} accumulate"] = lambda i, c=codec, b=buffers: c.accumulate(b[i], 3.0, into[layout.span(i)])
    jobs["outer step"] = lambda i: outer_step(
        into[layout.span(i)], momentum[layout.span(i)], values[layout.span(i)], 0.7, 0.6
    )
    jobs["hash a blob"] = lambda i: state._hash(2 * i)
    jobs["theta0, normal"] = lambda i: fill(1, 0, spec, into[layout.span(i)], layout.span(i).start)

    start = time.perf_counter()
    backend = kernels.warm_up()
    print(f"{layout.parameters} values; kernels compiled or loaded in {time.perf_counter() - start:.2f} s ({backend})")
    print(
        f"{'GB/s of float32':20}"
        + "".join(f"{f'numba, {n} thr.':>15}{f'numpy, {n} thr.':>15}" for n in options.threads)
    )
    implementations = (kernels.table(), kernels.NUMPY)
    for job, work in jobs.items():
        row = ""
        for threads in options.threads:
            for implementation in implementations:
                with kernels.using(implementation):
                    row += f"{measure(work, layout, threads, options.repeats):15.2f}"
        print(f"{job:20}{row}", flush=True)


if __name__ == "__main__":
    main()
