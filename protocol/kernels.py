"""Which implementation of the arithmetic kernels runs in this process, and the state of the calling thread's FPU.

Two implementations give the same bits: :mod:`.kernels_numpy`, at hand at once, and :mod:`.kernels_numba`, compiled by
:func:`warm_up` (a few seconds the first time, a fraction of one from the cache). Until then, and where numba does not
work, numpy runs. Importing this module imports neither numba nor torch.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import kernels_numba, kernels_numpy
from .errors import ResourceError

log = logging.getLogger(__name__)

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Kernels:
    """One implementation: arguments and meaning as in :mod:`.kernels_numba`.

    Read-only arguments must be read-only arrays (:func:`frozen`), all arrays aligned and C-contiguous.
    """

    name: str
    largest: Kernel
    outer_nesterov: Kernel
    outer_delayed: Kernel
    outer_sgd: Kernel
    contribution: Kernel
    float32_add: Kernel
    int8_encode: Kernel
    int8_valid: Kernel
    int8_decode: Kernel
    int8_add: Kernel
    int4_encode: Kernel
    int4_valid: Kernel
    int4_decode: Kernel
    int4_add: Kernel
    sparse_encode: Kernel
    sparse_valid: Kernel
    sparse_decode: Kernel
    sparse_add: Kernel
    union_encode: Kernel
    union_valid: Kernel
    union_decode: Kernel
    float16_encode: Kernel
    float16_valid: Kernel
    float16_decode: Kernel
    float16_add: Kernel
    theta0_normal: Kernel
    matrix_times: Kernel
    times_matrix: Kernel
    outer_add: Kernel
    orthonormal: Kernel


NAMES = tuple(field.name for field in fields(Kernels) if field.name != "name")
NUMPY = Kernels("numpy", **{name: getattr(kernels_numpy, name) for name in NAMES})

_lock = threading.Lock()
_active = NUMPY
_warm = False
_cache_dir: Path | None = None
_allow_numba = True


def table() -> Kernels:
    """The implementation to use now."""
    return _active


def backend() -> str:
    """``"numba"`` or ``"numpy"``."""
    return _active.name


def configure(*, cache_dir: Path | None = None, numba: bool = True) -> None:
    """Where compiled code is cached (None: where numba puts it), and whether to use numba at all.

    Has an effect on the next :func:`warm_up`, which starts anew.
    """
    global _cache_dir, _allow_numba, _active, _warm
    with _lock:
        _cache_dir, _allow_numba = cache_dir, numba
        _active, _warm = NUMPY, False


def warm_up() -> str:
    """Compile the kernels, check them against numpy's bits and use them from now on; returns :func:`backend`.

    Takes seconds of CPU when the cache is cold, so call it in a thread, before the peer reports. Never fails: without
    a usable cache it compiles for this process alone, and without a usable numba it stays with numpy, which is slower
    and otherwise the same; a warning is logged then.
    """
    global _active, _warm
    with _lock:
        if not _warm:
            _active = _compiled() if _allow_numba else NUMPY
            _warm = True
        return _active.name


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Use these kernels within, in all threads of the process (tests and benchmarks compare implementations so)."""
    global _active
    before, _active = _active, kernels
    try:
        yield
    finally:
        _active = before


def _compiled() -> Kernels:
    # numba, its cache and LLVM can fail in many ways (an incompatible numpy, a read-only or damaged cache, a CPU that
    # LLVM does not know), and none of them may keep a peer from running: hence the broad excepts.
    for cache in (True, False):
        try:
            kernels = compile_kernels(cache=cache, cache_dir=_cache_dir)
        except Exception as error:
            what = "with the cache" if cache else "without a cache"
            log.warning("numba could not compile the kernels %s: %s: %s", what, type(error).__name__, error)
            continue
        wrong = differences(kernels, NUMPY)
        if not wrong:
            return kernels
        log.warning("numba's kernels give other bits than numpy's on this CPU (%s)", ", ".join(wrong))
    log.warning("using the numpy kernels: the same results, several times slower")
    return NUMPY


def compile_kernels(*, cache: bool, cache_dir: Path | None = None) -> Kernels:
    """All of :mod:`.kernels_numba`, compiled for this CPU. Raises whatever numba raises."""
    import numba
    from numba import types

    floats = types.Array(types.float32, 1, "C")
    frozen_floats = types.Array(types.float32, 1, "C", readonly=True)
    octets = types.Array(types.uint8, 1, "C")
    frozen_octets = types.Array(types.uint8, 1, "C", readonly=True)
    f4, u4, i8, u8, yes, none = (
        types.float32,
        types.uint32,
        types.int64,
        types.uint64,
        types.boolean,
        types.void,
    )
    signatures = {
        "largest": u4(frozen_floats),
        "outer_nesterov": none(floats, floats, frozen_floats, f4, f4),
        "outer_delayed": none(floats, floats, frozen_floats, f4, f4, f4, yes, yes),
        "outer_sgd": none(floats, frozen_floats, f4),
        "contribution": none(frozen_floats, frozen_floats, frozen_floats, f4, floats),
        "float32_add": none(frozen_floats, f4, floats),
        "int8_encode": yes(frozen_floats, octets, u4),
        "int8_valid": yes(frozen_octets, i8, i8),
        "int8_decode": none(frozen_octets, floats),
        "int8_add": none(frozen_octets, f4, floats),
        "int4_encode": yes(frozen_floats, octets, u4),
        "int4_valid": yes(frozen_octets, i8, i8),
        "int4_decode": none(frozen_octets, floats),
        "int4_add": none(frozen_octets, f4, floats),
        "sparse_encode": yes(frozen_floats, octets, u4),
        "sparse_valid": yes(frozen_octets, i8, i8),
        "sparse_decode": none(frozen_octets, floats),
        "sparse_add": none(frozen_octets, f4, floats),
        "union_encode": i8(frozen_floats, octets, u4),
        "union_valid": yes(frozen_octets, i8, i8, i8),
        "union_decode": none(frozen_octets, floats),
        "float16_encode": yes(frozen_floats, octets, u4),
        "float16_valid": yes(frozen_octets, i8),
        "float16_decode": none(frozen_octets, floats),
        "float16_add": none(frozen_octets, f4, floats),
        "theta0_normal": none(floats, u8, f4),
        "matrix_times": none(frozen_floats, frozen_floats, i8, floats),
        "times_matrix": none(frozen_floats, frozen_floats, i8, floats),
        "outer_add": none(frozen_floats, frozen_floats, i8, floats),
        "orthonormal": none(frozen_floats, frozen_floats, i8, floats),
    }
    logging.getLogger("numba").setLevel(logging.WARNING)  # below, it prints every instruction it compiles
    before = numba.config.CACHE_DIR
    if cache_dir is not None:
        cache_dir.mkdir(parents=True, exist_ok=True)
        numba.config.CACHE_DIR = str(cache_dir)
    try:
        return Kernels(
            "numba",
            **{
                # fastmath stays off: with it LLVM would reorder and fuse operations; division by zero does not arise,
                # and the "numpy" error model saves the test for it, which would stop vectorisation.
                name: numba.njit(signature, nogil=True, cache=cache, fastmath=False, error_model="numpy")(
                    getattr(kernels_numba, name)
                )
                for name, signature in signatures.items()
            },
        )
    finally:
        numba.config.CACHE_DIR = before


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view, as the kernels take their inputs."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def probe(n: int, seed: int = 1) -> NDArray[np.float32]:
    """``n`` float32 of all signs and of magnitudes from subnormal to 2⁶², for tests of kernels: word i is splitmix64
    of seed + i, its top 32 bits taken as float32 with the exponent clipped to at most 2⁶²."""
    words = (np.arange(1, n + 1, dtype=np.uint64) + np.uint64(seed)) * kernels_numba.GOLDEN
    words = (words ^ (words >> np.uint64(30))) * kernels_numba.MIX_1
    words = (words ^ (words >> np.uint64(27))) * kernels_numba.MIX_2
    words = words ^ (words >> np.uint64(31))
    bits: NDArray[np.uint32] = (words >> np.uint64(32)).astype(np.uint32)
    exponent = (bits >> np.uint32(23)) & np.uint32(0xFF)
    # a third around 1e-3, where rounding decides; a third of all sizes; a third small or subnormal
    kind = np.arange(n, dtype=np.uint32) // np.uint32(64) % np.uint32(3)
    exponent = np.where(kind == 0, np.uint32(113) + exponent % np.uint32(12), exponent % np.uint32(190))
    exponent = np.where(kind == 2, exponent % np.uint32(4), exponent).astype(np.uint32)
    return ((bits & np.uint32(0x807FFFFF)) | (exponent << np.uint32(23))).view(np.float32)


def results(kernels: Kernels) -> dict[str, bytes]:
    """What each kernel makes of :func:`probe`, as bytes, by name: the material of self tests."""
    subnormals_on()
    n = 64 * 48 + 37
    values = frozen(probe(n))
    f4, limit = np.float32, np.uint32(0x5F800000)
    found: dict[str, bytes] = {"largest": int(kernels.largest(values)).to_bytes(4, "little")}

    small = frozen(values * f4(2.0**-20))
    params, momentum = probe(n, 2), probe(n, 3)
    kernels.outer_nesterov(params, momentum, values, f4(0.7), f4(0.6))
    kernels.outer_nesterov(params, momentum, small, f4(0.7), f4(0.6))
    found["outer_nesterov"] = params.tobytes() + momentum.tobytes()
    params, momentum = probe(n, 2), probe(n, 3)
    for phase in range(3):
        mean = values if phase == 1 else small
        kernels.outer_delayed(params, momentum, mean, f4(0.7), f4(0.6), f4(1 / 3), phase == 0, phase == 2)
    found["outer_delayed"] = params.tobytes() + momentum.tobytes()
    params = probe(n, 2)
    kernels.outer_sgd(params, values, f4(0.7))
    found["outer_sgd"] = params.tobytes()
    into = np.empty(n, np.float32)
    kernels.contribution(frozen(probe(n, 2)), values, frozen(probe(n, 3)), f4(0.95), into)
    found["contribution"] = into.tobytes()
    into = probe(n, 4)
    kernels.float32_add(values, f4(12345), into)
    found["float32_add"] = into.tobytes()

    for codec, size, bound in (
        ("int8", n + 2 * (n // 64 + 1), (n, 0x5C80)),
        ("int4", (n + 1) // 2 + 2 * (n // 64 + 1), (n, 0x5C80)),
        ("sparse", 2 + (3 * 49 + 1) // 2 + (49 + 3) // 4, (n, 0xBF0)),
        ("float16", 2 * n, (n,)),
    ):
        payload = np.zeros(size, np.uint8)
        good = getattr(kernels, f"{codec}_encode")(values, payload, limit)
        found[f"{codec}_encode"] = bytes([good]) + payload.tobytes()
        found[f"{codec}_valid"] = bytes([getattr(kernels, f"{codec}_valid")(frozen(payload), *bound)])
        out, into = np.empty(n, np.float32), probe(n, 5)
        getattr(kernels, f"{codec}_decode")(frozen(payload), out)
        getattr(kernels, f"{codec}_add")(frozen(payload), f4(12345), into)
        found[f"{codec}_decode"], found[f"{codec}_add"] = out.tobytes(), into.tobytes()

    few = values.copy()
    few[np.arange(n) % 16 > 0] = 0
    payload = np.zeros(2 * n, np.uint8)
    size = int(kernels.union_encode(frozen(few), payload, limit))
    found["union_encode"] = payload[:size].tobytes()
    found["union_valid"] = bytes([kernels.union_valid(frozen(payload[:size]), n, 0x5C80, 4)])
    out = np.empty(n, np.float32)
    kernels.union_decode(frozen(payload[:size]), out)
    found["union_decode"] = out.tobytes()

    out = np.empty(n, np.float32)
    kernels.theta0_normal(out, np.uint64(0xFEDCBA9876543210), f4(0.02))
    found["theta0_normal"] = out.tobytes()

    rank, rows, columns = 3, 37, 70
    matrix, left, right = (
        frozen(probe(size, 6) * f4(2.0**-40)) for size in (rows * columns, rank * rows, rank * columns)
    )
    out = np.empty(rank * rows, np.float32)
    kernels.matrix_times(matrix, right, rank, out)
    found["matrix_times"] = out.tobytes()
    out = np.empty(rank * columns, np.float32)
    kernels.times_matrix(left, matrix, rank, out)
    found["times_matrix"] = out.tobytes()
    out = probe(rows * columns, 7)
    kernels.outer_add(left, right, rank, out)
    found["outer_add"] = out.tobytes()
    # the second vector is the first one again, so the spare one takes its place
    vectors, out = left.copy(), np.empty(rank * rows, np.float32)
    vectors[rows : 2 * rows] = vectors[:rows]
    kernels.orthonormal(frozen(vectors), frozen(probe(rank * rows, 8)), rank, out)
    found["orthonormal"] = out.tobytes()
    return found


def differences(a: Kernels, b: Kernels) -> list[str]:
    """Names of the kernels whose results differ in any bit."""
    of_a, of_b = results(a), results(b)
    return [name for name in of_a if of_a[name] != of_b[name]]


_ONE, _HALF = 1.0, 0.5
_SMALLEST, _SMALLEST_NORMAL = 5e-324, 2.2250738585072014e-308


def subnormals_work() -> bool:
    """Whether the calling thread computes with subnormal numbers (neither flushed to zero nor read as zero)."""
    # Python's floats go through the same control register as numpy's and numba's vector code, and a product of
    # variables is not folded by the compiler; this costs a tenth of a microsecond.
    return _SMALLEST * _ONE != 0.0 and _SMALLEST_NORMAL * _HALF != 0.0


def subnormals_on() -> None:
    """Make sure that the calling thread computes with subnormals.

    A library built with fast-math switches them off in the thread that loads it, and threads started from there
    inherit that. Every public function with float arithmetic in this package calls this first; it only costs
    something when there is something to repair. Raises :class:`ResourceError` when they cannot be switched on.
    """
    if subnormals_work():
        return
    for repair in (_default_environment, _torch_environment):
        repair()
        if subnormals_work():
            return
    raise ResourceError(
        "this thread flushes subnormal numbers to zero and atoll could not switch that off, so its parameters would "
        "differ from everyone else's; look for a library built with -ffast-math that is loaded into the process"
    )


def _default_environment() -> None:
    """``fesetenv(FE_DFL_ENV)``: control words as at the start of a program, subnormals on."""
    try:
        library = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)  # None: Python itself links libm
        if sys.platform == "darwin":
            default = ctypes.addressof(ctypes.c_char.in_dll(library, "_FE_DFL_ENV"))
        else:
            default = ctypes.c_void_p(-1).value or 0  # FE_DFL_ENV of glibc and musl
        library.fesetenv.argtypes = [ctypes.c_void_p]
        library.fesetenv(default)
    except (OSError, AttributeError, ValueError):
        log.debug("no fesetenv to call", exc_info=True)


def _torch_environment() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_flush_denormal(False)
