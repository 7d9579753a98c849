"""Speed and error of the codecs, and speed of what else touches every parameter: ``python -m bench.codecs``.

Chunks of 65,536 values out of a vector too large for the caches, as in a round; gigabytes are of float32 values, not
of payload. Threads are Python threads on different chunks, which is how a peer runs the kernels; torch and
bitsandbytes use as many threads of their own, on pieces of 2^20 values, which suits them better. Errors are the norm of
what is lost over the norm of the values, for normally distributed values and for Student's t with three degrees of
freedom. ``--json FILE`` writes the rows.

``lowrank`` is rank 8 of matrices of 256 by 256, with directions that are known already; finding them is a row of its
own. Its error says little: random values have no directions, and what is not sent stays with the sender.

torch.compile may contract and reassociate, so its bytes are compared and not trusted; it runs in a process of its own
that is ended when compiling takes too long. bitsandbytes is measured where it is installed (``atoll[bench]``).

``--device cuda`` measures instead what a trainer does on a GPU (``atoll.node.codecs_torch``): encoding and decoding
there, encoding with the copy of the payload to the host, and beside it the copy of the float32 values that this
replaces, and the closest kernels of bitsandbytes. Then what a round costs a trainer that encodes: its contribution,
from parameters to bytes in the memory that it shares with its node, and a commit out of it; page-locked, and not.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.protocol import kernels
from atoll.protocol.codecs import CODECS
from atoll.protocol.fragments import make_layout
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.lowrank import Factors, LowRankLayout, directions, segments
from atoll.protocol.outer import outer_step
from atoll.protocol.state import GlobalState
from atoll.protocol.theta0 import TensorSpec, fill

from ._common import Row, machine, stamp, table, write_rows

CHUNK = 65536
PIECE = 1 << 20
RANK = 8
IMPLEMENTATIONS = ("numba", "numpy", "torch eager", "torch.compile", "bitsandbytes")
OPERATIONS = ("encode", "decode", "accumulate")


@dataclass
class Job:
    """One codec in one implementation: each function takes the number of a piece."""

    codec: str
    layout: ChunkLayout
    bytes: int
    encode: Callable[[int], object]
    decode: Callable[[int], object]
    accumulate: Callable[[int], object]
    exact: bool | None = None
    """Whether the bytes are those of the specification; None where the format is another."""
    own_threads: bool = False


def measure(work: Callable[[int], object], layout: ChunkLayout, threads: int, seconds: float) -> float:
    """Gigabytes of float32 per second, the best of the passes over all chunks that fit into ``seconds`` (two at
    least, not counting one that warms up)."""

    def strand(first: int) -> None:
        for i in range(first, layout.count, threads):
            work(i)

    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        end, passes = time.perf_counter() + seconds, -1
        while passes < 2 or time.perf_counter() < end:
            start = time.perf_counter()
            list(pool.map(strand, range(threads)))
            passes += 1
            if passes:
                best = min(best, time.perf_counter() - start)
    return 4e-9 * layout.parameters / best


def heavy(values: np.ndarray[Any, Any]) -> None:
    rng = np.random.default_rng(3)
    for start in range(0, values.size, PIECE):
        part = values[start : start + PIECE]
        part[:] = rng.standard_t(3, part.size) * 1e-3


def gaussian(values: np.ndarray[Any, Any]) -> None:
    rng = np.random.default_rng(2)
    for start in range(0, values.size, PIECE):
        part = values[start : start + PIECE]
        part[:] = rng.standard_normal(part.size, np.float32) * np.float32(1e-3)


def protocol_jobs(values: Any, into: Any, names: list[str]) -> Iterator[Job]:
    layout = ChunkLayout(values.size, CHUNK)
    for name in names:
        if name == "lowrank":
            yield low_rank_job(values, into)
            continue
        codec = CODECS[name]
        sizes = [codec.encoded_size(layout.size(i)) for i in range(layout.count)]
        buffers = [bytearray(size) for size in sizes]
        yield Job(
            name, layout, sum(sizes),
            lambda i, c=codec, b=buffers: c.encode(values[layout.span(i)], b[i]),  # type: ignore[misc]
            lambda i, c=codec, b=buffers: c.decode(b[i], layout.size(i), into[layout.span(i)]),  # type: ignore[misc]
            lambda i, c=codec, b=buffers: c.accumulate(b[i], 3.0, into[layout.span(i)]),  # type: ignore[misc]
            exact=True,
        )  # fmt: skip


def matrices(size: int) -> LowRankLayout:
    """So many elements as matrices of 256 by 256, a chunk each."""
    count = size // CHUNK
    layout = make_layout(size, CHUNK, [[CHUNK] * count], 1, "balanced", [256] * count, RANK)
    assert isinstance(layout, LowRankLayout)
    return layout


def low_rank_job(values: Any, into: Any) -> Job:
    layout, codec = matrices(values.size), CODECS["lowrank"]
    wire, factors, momentum = layout.wire(0), Factors(layout), values[::-1].copy()
    payloads: list[Any] = [None] * layout.count
    sums = np.zeros(wire.chunk, np.float32)

    def encode(i: int) -> None:
        payloads[i] = codec.encode(factors.project(i, values[layout.span(i)], momentum))

    def decode(i: int) -> None:
        travelled = np.empty(wire.size(i), np.float32)
        codec.decode(payloads[i], travelled.size, travelled)
        factors.expand(i, travelled, momentum, into[layout.span(i)])

    for i in range(layout.count):
        encode(i)
    return Job(
        "lowrank", layout, sum(map(len, payloads)), encode, decode,
        lambda i: codec.accumulate(payloads[i], 3.0, sums), exact=True,
    )  # fmt: skip


def torch_jobs(values: Any, into: Any, names: list[str], *, compiled: bool) -> Iterator[Job]:
    import torch

    from atoll.node import codecs_torch

    layout = ChunkLayout(values.size, PIECE)
    x, y = torch.from_numpy(values), torch.from_numpy(into)
    encode: Callable[..., Any] = codecs_torch._encoded
    if compiled:
        encode = torch.compile(codecs_torch._encoded, dynamic=False)
    for name in [name for name in names if name in codecs_torch.SUPPORTED]:
        payloads: list[Any] = [None] * layout.count

        def pack(i: int, name: str = name, payloads: list[Any] = payloads) -> None:
            rows, worst = encode(name, x[layout.span(i)].view(-1, min(CHUNK, layout.size(i))))
            assert int(worst) < 0x7F800000
            payloads[i] = rows

        def unpack(i: int, name: str = name, payloads: list[Any] = payloads) -> Iterator[tuple[int, Any]]:
            size = layout.size(i) // len(payloads[i])
            for row, payload in enumerate(payloads[i]):
                start = layout.span(i).start + row * size
                yield start, codecs_torch.decode_rows(name, payload[None], size)[0]

        def read(i: int, unpack: Any = unpack) -> None:
            for start, decoded in unpack(i):
                y[start : start + decoded.numel()] = decoded

        def add(i: int, unpack: Any = unpack) -> None:
            for start, decoded in unpack(i):
                y[start : start + decoded.numel()] += decoded * 3.0

        for i in range(layout.count):
            pack(i)
        theirs = b"".join(row.numpy().tobytes() for rows in payloads for row in rows)
        chunks = ChunkLayout(values.size, CHUNK)
        ours = b"".join(bytes(CODECS[name].encode(values[chunks.span(i)])) for i in range(chunks.count))
        yield Job(name, layout, len(theirs), pack, read, add, exact=theirs == ours, own_threads=True)


def bitsandbytes_jobs(values: Any, into: Any) -> Iterator[Job]:
    """The closest that bitsandbytes has: 8-bit dynamic blocks and nf4, blocks of 64, scales in float32; on the CPU."""
    import torch
    from bitsandbytes import functional

    layout = ChunkLayout(values.size, PIECE)
    x, y = torch.from_numpy(values), torch.from_numpy(into)
    sides: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "bnb 8-bit": (
            lambda t: functional.quantize_blockwise(t, blocksize=64),
            lambda q: functional.dequantize_blockwise(*q),
        ),
        "bnb nf4": (
            lambda t: functional.quantize_4bit(t, blocksize=64, quant_type="nf4"),
            lambda q: functional.dequantize_4bit(*q),
        ),
    }
    for name, (pack, unpack) in sides.items():
        packed: list[Any] = [None] * layout.count

        def encode(i: int, pack: Any = pack, packed: list[Any] = packed) -> None:
            packed[i] = pack(x[layout.span(i)])

        def decode(i: int, unpack: Any = unpack, packed: list[Any] = packed) -> None:
            y[layout.span(i)] = unpack(packed[i]).view(-1)

        def add(i: int, unpack: Any = unpack, packed: list[Any] = packed) -> None:
            y[layout.span(i)] += unpack(packed[i]).view(-1) * 3.0

        for i in range(layout.count):
            encode(i)
        size = sum(q.numel() * q.element_size() + state.absmax.numel() * 4 for q, state in packed)
        yield Job(name, layout, size, encode, decode, add, own_threads=True)


def cuda_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Encoding on the GPU, beside the copy of what is not encoded, and beside bitsandbytes. Gigabytes are of float32
    values; everything stays on the device but what "to host" copies into page-locked memory."""
    import torch

    from atoll.node import codecs_torch

    device, count = torch.device("cuda"), options.elements // PIECE
    host = np.empty(options.elements, np.float32)
    gaussian(host)
    values = torch.from_numpy(host).to(device).view(count, PIECE)
    back = torch.empty_like(values)
    landing = torch.empty(4 * PIECE, dtype=torch.uint8, pin_memory=True)
    packed: list[Any] = [None] * count

    def speed(work: Callable[[int], object]) -> float:
        best, passes, end = float("inf"), -1, time.perf_counter() + options.seconds
        while passes < 2 or time.perf_counter() < end:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(count):
                work(i)
            torch.cuda.synchronize()
            passes += 1
            if passes:
                best = min(best, time.perf_counter() - start)
        return 4e-9 * options.elements / best

    def crosses(data: Any) -> None:
        flat = data.contiguous().view(-1).view(torch.uint8)
        landing[: flat.numel()].copy_(flat, non_blocking=True)

    def row(codec: str, by: str, encode: Any, decode: Any, parts: Callable[[Any], list[Any]], exact: str) -> Row:
        def pack(i: int) -> None:
            packed[i] = encode(values[i])

        def send(i: int) -> None:
            pack(i)
            for part in parts(packed[i]):
                crosses(part)

        def unpack(i: int) -> None:
            back[i] = decode(packed[i]).view(-1)

        found: Row = {"codec": codec, "implementation": by, "elements": options.elements, "specified bytes": exact}
        found["encode cuda"], found["to host cuda"] = speed(pack), speed(send)
        found["decode cuda"] = speed(unpack)
        size = sum(part.numel() * part.element_size() for piece in packed for part in parts(piece))
        found["ratio"] = 4 * options.elements / size
        found["error normal"] = float((back - values).double().norm() / values.double().norm())
        return found

    for name in [name for name in options.codecs if name in codecs_torch.SUPPORTED]:
        payloads = [codecs_torch.encode_rows(name, piece.view(-1, CHUNK))[0] for piece in values]
        chunks = ChunkLayout(options.elements, CHUNK)
        theirs = b"".join(piece.cpu().numpy().tobytes() for piece in payloads)
        ours = b"".join(bytes(CODECS[name].encode(host[chunks.span(i)])) for i in range(chunks.count))
        yield row(
            name, "torch", lambda x, name=name: codecs_torch.encode_rows(name, x.view(-1, CHUNK))[0],
            lambda payload, name=name: codecs_torch.decode_rows(name, payload, CHUNK), lambda payload: [payload],
            "yes" if theirs == ours else "no",
        )  # fmt: skip
    yield row("none", "copy", lambda x: x, lambda x: x, lambda x: [x], "-")
    yield from noted("bitsandbytes", lambda: bitsandbytes_cuda_rows(row))


def bitsandbytes_cuda_rows(row: Callable[..., Row]) -> Iterator[Row]:
    """The closest kernels of bitsandbytes, as :func:`cuda_rows` measures. Raises ImportError without it, and
    RuntimeError at the first call where it has no library for this CUDA."""
    import torch
    from bitsandbytes import functional

    device = torch.device("cuda")
    # The levels of ``int8`` are linear; bitsandbytes takes any 256, and searches them.
    linear = torch.linspace(-127, 127, 255, device=device) / 127
    code = torch.cat([linear, linear[-1:]])
    for title, block, levels in (("bnb 8-bit", 64, None), ("bnb 8-bit, linear", 64, code), ("bnb 8-bit", 4096, None)):
        yield row(
            f"{title}, {block}", "bitsandbytes",
            lambda x, block=block, levels=levels: functional.quantize_blockwise(x, code=levels, blocksize=block),
            lambda pair: functional.dequantize_blockwise(*pair), lambda pair: [pair[0], pair[1].absmax], "-",
        )  # fmt: skip
    yield row(
        "bnb nf4, 64", "bitsandbytes", lambda x: functional.quantize_4bit(x, blocksize=64, quant_type="nf4"),
        lambda pair: functional.dequantize_4bit(*pair), lambda pair: [pair[0], pair[1].absmax], "-",
    )  # fmt: skip


def round_rows(names: list[str], elements: int, seconds: float, device: str) -> Iterator[Row]:
    """What a round costs a trainer that encodes on its device: x out of g, θ and e, encoded, in the memory that is
    shared with the node; and the commit's g out of that memory, with θ and e brought up to it. GB/s of float32."""
    import torch

    from atoll.node import codecs_torch, pinned
    from atoll.node.device_replica import DeviceReplica
    from atoll.node.sharedmem import SharedMemory
    from atoll.protocol.overlap import Overlap

    place, layout = torch.device(device), ChunkLayout(elements, CHUNK)
    everything = range(layout.count)
    for name in [name for name in names if name in codecs_torch.SUPPORTED]:
        decay = None if CODECS[name].lossless else 1.0
        size = sum(CODECS[name].encoded_size(layout.size(i)) for i in everything)
        for lock in (False, True) if place.type == "cuda" else (False,):
            memory = SharedMemory.create(elements, encoded=size)
            memory.reserve(encodes=True)
            gaussian(memory.array)
            new, out = torch.from_numpy(memory.array), torch.from_numpy(memory.encoded)
            flat = new.to(place, copy=True)
            replica = DeviceReplica(flat, layout, name, decay, DeviceReplica.allocate(elements, place, decay))
            shared: list[Any] = [memory.array, memory.encoded]
            why = pinned.lock(shared, place) if lock else ""
            out_best, in_best, number, end = float("inf"), float("inf"), 0, time.perf_counter() + 2 * seconds
            replica.reset()
            while number < 3 or time.perf_counter() < end:
                number += 1
                flat.add_(1e-3)
                replica.freeze(number)
                start = time.perf_counter()
                sound, _ = replica.encode(number, 0, out)
                encoded = time.perf_counter()
                known = replica.commit(
                    0, everything, [], new, source=number, rule=Overlap(), lost=False, dropped=False, head="00"
                )
                assert (sound, known) == (True, True)
                if number > 1:
                    out_best = min(out_best, encoded - start)
                    in_best = min(in_best, time.perf_counter() - encoded)
            if lock:
                pinned.unlock(shared, place)
            del new, out, shared
            memory.close()
            yield {
                "codec": name, "implementation": "a round", "elements": elements,
                "shared memory": why or ("page-locked" if lock else "pageable"),
                "round out": 4e-9 * elements / out_best, "commit": 4e-9 * elements / in_best,
            }  # fmt: skip


def noted(implementation: str, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of an implementation, and one that says why where they end early: the others are still measured."""
    try:
        yield from rows()
    except ModuleNotFoundError as error:
        yield {"codec": "-", "implementation": implementation, "note": f"{error.name} is not installed"}
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        # Whatever a library says that is not there whole, or was not built for this machine.
        told = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        yield {"codec": "-", "implementation": implementation, "note": told[:100]}


def on_cuda(options: argparse.Namespace) -> int:
    """``--device cuda``; the exit code."""
    import torch

    if not torch.cuda.is_available():
        print(
            f"bench.codecs: no usable CUDA device (torch {torch.__version__}); run it on a machine with a GPU and a "
            "CUDA build of torch, or leave out --device cuda",
            file=sys.stderr,
        )
        return 2
    name = torch.cuda.get_device_name()
    print(f"{name}; {options.elements:,} values in pieces of {PIECE:,}; torch {torch.__version__}")
    rows: list[Row] = []
    for row in cuda_rows(options):
        rows.append({"device": name} | row | stamp())
        write_rows(options.json, rows)
    columns = [("codec", "GB/s of float32", ""), ("implementation", "by", ""), ("encode cuda", "encode", ".1f")]
    columns += [("to host cuda", "encode, to host", ".1f"), ("decode cuda", "decode", ".1f")]
    columns += [("ratio", "smaller", ".1f"), ("error normal", "error normal", ".4f")]
    columns += [("specified bytes", "bytes as specified", ""), ("note", "", "")]
    print(table(rows, columns), flush=True)
    rounds: list[Row] = []
    for row in noted("a round", lambda: round_rows(options.codecs, options.elements, options.seconds, "cuda")):
        rounds.append({"device": name} | row | stamp())
        write_rows(options.json, rows + rounds)
    columns = [("codec", "GB/s of float32", ""), ("shared memory", "", ""), ("round out", "contribution", ".1f")]
    print("", table(rounds, [*columns, ("commit", "commit", ".1f"), ("note", "", "")]), sep="\n", flush=True)
    return 0


def jobs_of(implementation: str, values: Any, into: Any, names: list[str]) -> Iterator[Job]:
    if implementation in ("numba", "numpy"):
        return protocol_jobs(values, into, names)
    if implementation == "bitsandbytes":
        return bitsandbytes_jobs(values, into)
    return torch_jobs(values, into, names, compiled=implementation == "torch.compile")


def rows_of(implementation: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure every codec of one implementation."""
    values, into = (np.empty(options.elements, np.float32) for _ in range(2))
    backend = kernels.NUMPY if implementation == "numpy" else kernels.table()
    if implementation in ("torch eager", "torch.compile", "bitsandbytes"):
        import torch

        torch.set_num_threads(max(options.threads))
    with kernels.using(backend):
        gaussian(values)
        for job in jobs_of(implementation, values, into, options.codecs):
            row: Row = {"codec": job.codec, "implementation": implementation, "elements": options.elements}
            row["ratio"] = 4 * values.size / job.bytes
            row["specified bytes"] = {True: "yes", False: "no", None: "-"}[job.exact]
            for data, make in (("t3", heavy), ("normal", gaussian)):
                make(values)
                for work in (job.encode, job.decode):
                    for i in range(job.layout.count):
                        work(i)
                lost = np.linalg.norm((into - values).astype(np.float64))
                row[f"error {data}"] = float(lost / np.linalg.norm(values.astype(np.float64)))
            for threads in options.threads:
                if job.own_threads:
                    torch.set_num_threads(threads)
                for operation in OPERATIONS:
                    into.fill(0)
                    speed = measure(
                        getattr(job, operation), job.layout, 1 if job.own_threads else threads, options.seconds
                    )
                    row[f"{operation} {threads}"] = speed
            yield row


def others(options: argparse.Namespace) -> Iterator[Row]:
    """The outer step, hashing, the directions of low rank, and θ₀."""
    layout = ChunkLayout(options.elements, CHUNK)
    spec = TensorSpec("vector", (layout.parameters,), "normal", 1e-3)
    values, into, momentum = (np.zeros(layout.parameters, np.float32) for _ in range(3))
    fill(1, 0, spec, values)
    state, factors = GlobalState(layout, into, momentum), matrices(layout.parameters)
    works: dict[str, Callable[[int], object]] = {
        "outer step": lambda i: outer_step(
            into[layout.span(i)], momentum[layout.span(i)], values[layout.span(i)], 0.7, 0.6
        ),
        "hash a blob": lambda i: state._hash(2 * i),
        "directions": lambda i: directions(segments(factors.pieces[i], RANK), values[layout.span(i)]),
        "theta0, normal": lambda i: fill(1, 0, spec, into[layout.span(i)], layout.span(i).start),
    }
    for what, work in works.items():
        row: Row = {"what": what, "implementation": kernels.backend(), "elements": options.elements}
        for threads in options.threads:
            row[f"speed {threads}"] = measure(work, layout, threads, options.seconds)
        yield row


def compiled_rows(implementation: str, options: argparse.Namespace) -> list[Row]:
    """torch.compile's rows, from a process that is ended when it takes too long. Raises :class:`RuntimeError`."""
    command = [sys.executable, "-m", "bench.codecs", "--rows-of", implementation]
    command += ["--elements", str(options.elements), "--seconds", str(options.seconds), "--codecs", *options.codecs]
    command += ["--threads", *map(str, options.threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.patience)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"did not finish within {options.patience:.0f} s") from None
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 24, help="length of the vector (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure (default: %(default)s)")
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), default=list(CODECS))
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--patience", type=float, default=180.0, help="seconds for torch.compile (default: 180)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--rows-of", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.elements % PIECE:
        parser.error(f"--elements must be a multiple of {PIECE}")
    if options.device == "cuda":
        sys.exit(on_cuda(options))

    start = time.perf_counter()
    backend = kernels.warm_up()
    if options.rows_of:
        print(json.dumps(list(rows_of(options.rows_of, options))))
        return
    took = time.perf_counter() - start
    print(f"{machine()}; {options.elements:,} values; kernels compiled or loaded in {took:.2f} s ({backend})")
    rows: list[Row] = []
    for implementation in options.implementations:
        work = functools.partial(compiled_rows if implementation == "torch.compile" else rows_of, implementation)
        for row in noted(implementation, functools.partial(work, options)):
            rows.append(row | stamp())
            write_rows(options.json, rows)
    titles = [
        (f"{operation} {n}", f"{operation}, {n} thr.", ".2f") for operation in OPERATIONS for n in options.threads
    ]
    columns = [("codec", "GB/s of float32", ""), ("implementation", "by", ""), *titles]
    columns += [("ratio", "smaller", ".1f"), ("error normal", "error normal", ".4f"), ("error t3", "error t3", ".4f")]
    rows.sort(key=lambda row: (list(CODECS).index(row["codec"]) if row["codec"] in CODECS else 99, row["codec"]))
    columns += [("specified bytes", "bytes as specified", ""), ("note", "", "")]
    print(table(rows, columns), flush=True)
    more = [row | stamp() for row in others(options)]
    speeds = [(f"speed {n}", f"{n} thr.", ".2f") for n in options.threads]
    print("", table(more, [("what", "GB/s of float32", ""), *speeds]), sep="\n", flush=True)
    write_rows(options.json, rows + more)


if __name__ == "__main__":
    main()
