from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.protocol import kernels, selftest
from atoll.protocol.errors import ResourceError

ON_X86_LINUX = platform.machine() == "x86_64" and sys.platform == "linux"


@functools.cache
def compiled() -> kernels.Kernels:
    return kernels.compile_kernels(cache=True)


def numba_kernels() -> list[Any]:
    return [getattr(kernels.table(), name) for name in kernels.NAMES]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that two processes filled at the same time, each using what it compiled."""
    cache = tmp_path_factory.mktemp("kernels") / "a" / "cache"
    code = (
        "import sys; from pathlib import Path; from atoll.protocol import kernels, selftest\n"
        "kernels.configure(cache_dir=Path(sys.argv[1])); sys.stdin.read()\n"
        "assert kernels.warm_up() == 'numba'; selftest.self_test()"
    )
    command = [sys.executable, "-c", code, str(cache)]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2)]
    for process in running:
        assert process.stdin is not None
        process.stdin.close()  # both begin now
    assert [process.wait(240) for process in running] == [0, 0]
    return cache


@pytest.fixture
def cold() -> Any:
    kernels.configure()
    yield
    kernels.configure()


def test_both_implementations_give_the_same_bits() -> None:
    assert kernels.differences(compiled(), kernels.NUMPY) == []


def test_compiled_code_has_no_fused_operations() -> None:
    fresh = kernels.compile_kernels(cache=False)  # cached code cannot be inspected
    for name in kernels.NAMES:
        for assembly in getattr(fresh, name).inspect_asm().values():
            assert "vfmadd" not in assembly, name
            assert "vfnmadd" not in assembly, name
            assert "vfmsub" not in assembly, name
            assert "fmla" not in assembly, name


def test_importing_the_protocol_does_not_import_numba() -> None:
    code = (
        "import sys, atoll.protocol.codecs, atoll.protocol.state, atoll.protocol.theta0, atoll.protocol.selftest\n"
        "assert not {'numba', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("cold")
def test_warm_up_compiles_once_and_caches_where_told(filled: Path) -> None:
    kernels.configure(cache_dir=filled)
    assert kernels.backend() == "numpy"
    assert kernels.warm_up() == "numba"
    assert kernels.backend() == "numba"
    assert list(filled.rglob("*.nbi"))
    assert sum(kernel.stats.cache_hits.total() for kernel in numba_kernels()) == len(kernels.NAMES)
    table = kernels.table()
    assert kernels.warm_up() == "numba"
    assert kernels.table() is table
    selftest.self_test()


@pytest.mark.usefixtures("cold")
def test_without_numba_numpy_does_the_work() -> None:
    kernels.configure(numba=False)
    assert kernels.warm_up() == "numpy"
    selftest.self_test()


@pytest.mark.usefixtures("cold")
def test_a_failing_compiler_is_not_the_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(**_: Any) -> Any:
        raise RuntimeError("no such processor")

    monkeypatch.setattr(kernels, "compile_kernels", broken)
    assert kernels.warm_up() == "numpy"
    assert "no such processor" in caplog.text
    selftest.self_test()


@pytest.mark.usefixtures("cold")
def test_an_unusable_cache_is_not_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    asked = []

    def compile_(*, cache: bool, cache_dir: Path | None) -> kernels.Kernels:
        asked.append(cache)
        if cache:
            assert cache_dir == file
            file.mkdir(parents=True, exist_ok=True)  # raises
        return compiled()

    monkeypatch.setattr(kernels, "compile_kernels", compile_)
    kernels.configure(cache_dir=file)
    assert kernels.warm_up() == "numba"
    assert asked == [True, False]
    assert "with the cache" in caplog.text


@pytest.mark.usefixtures("cold")
def test_a_damaged_cache_is_not_the_end(filled: Path, tmp_path: Path) -> None:
    cache = Path(shutil.copytree(filled, tmp_path / "cache"))
    for file in cache.rglob("*.nb?"):
        file.write_bytes(b"rubbish")
    kernels.configure(cache_dir=cache)
    assert kernels.warm_up() == "numba"


def fused(params: Any, momentum: Any, mean: Any, lr: Any, mu: Any) -> None:
    """What a compiler with contraction on would make of the outer step."""
    b = (momentum.astype(np.float64) * mu + mean).astype(np.float32)
    momentum[:] = b
    params[:] = (params - np.float64(lr) * (b.astype(np.float64) * mu + mean).astype(np.float32)).astype(np.float32)


@pytest.mark.usefixtures("cold")
def test_a_compiler_that_fuses_is_found_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    wrong = replace(kernels.NUMPY, name="numba", outer_nesterov=fused)
    assert kernels.differences(wrong, kernels.NUMPY) == ["outer_nesterov"]
    monkeypatch.setattr(kernels, "compile_kernels", lambda **_: wrong)
    assert kernels.warm_up() == "numpy"
    assert "other bits" in caplog.text
    with kernels.using(wrong), pytest.raises(ResourceError, match="kernel outer_nesterov"):
        selftest.self_test()


def in_thread(function: Any) -> Any:
    """Run in a thread of its own, whose control register dies with it."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def flush_to_zero(bits: int) -> None:
    """Set bits of MXCSR (0x8000 flush results, 0x40 read as zero) through glibc's fenv_t."""
    libc = ctypes.CDLL(None)
    environment = (ctypes.c_uint32 * 8)()
    libc.fegetenv(environment)
    environment[7] |= bits
    libc.fesetenv(environment)


@pytest.mark.skipif(not ON_X86_LINUX, reason="sets the control register of x86 through glibc")
@pytest.mark.parametrize("bits", [0x8000, 0x40, 0x8040])
def test_subnormals_are_switched_back_on(bits: int) -> None:
    def body() -> None:
        flush_to_zero(bits)
        assert not kernels.subnormals_work()
        kernels.subnormals_on()
        assert kernels.subnormals_work()
        assert (np.full(9, 1e-40, np.float32) * np.float32(0.5)).all()

    in_thread(body)


@pytest.mark.skipif(not ON_X86_LINUX, reason="sets the control register of x86 through glibc")
@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_every_public_operation_repairs_its_thread(name: str) -> None:
    def body() -> dict[str, bytes]:
        flush_to_zero(0x8040)
        return selftest.answers()

    with kernels.using(kernels.NUMPY if name == "numpy" else compiled()):
        assert in_thread(body) == selftest.answers()


@pytest.mark.skipif(not ON_X86_LINUX, reason="sets the control register of x86 through glibc")
def test_the_known_answers_notice_flushed_subnormals(monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.protocol import outer, theta0
    from atoll.protocol.codecs import base

    for module in (kernels, outer, theta0, base, selftest):
        monkeypatch.setattr(module, "subnormals_on", lambda: None)

    def body() -> None:
        flush_to_zero(0x8040)
        selftest.self_test()

    with pytest.raises(ResourceError, match=r"outer_nesterov.*theta0"):
        in_thread(body)


def test_what_cannot_be_repaired_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "subnormals_work", lambda: False)
    with pytest.raises(ResourceError, match="ffast-math"):
        kernels.subnormals_on()


def test_frozen_views_do_not_freeze_the_original() -> None:
    array = np.zeros(3, np.float32)
    assert not kernels.frozen(array).flags.writeable
    assert array.flags.writeable
