"""Freed memory stays with the process: counted in page faults, in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys
from atoll.protocol.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def turn():
    blocks = [bytearray(5 << 20) for _ in range(8)]
for _ in range(3):
    turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_used_again() -> None:
    def faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    pages = 10 * 8 * (5 << 20) // resource_page()
    assert faults("keep") < pages / 10
    assert faults("leave") > pages / 4  # else this test shows nothing


def resource_page() -> int:
    import resource

    return resource.getpagesize()
