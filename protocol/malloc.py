"""What the C library does with memory that was freed: a process that moves chunks should keep it."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of ``mallopt`` in glibc's malloc.h."""
LARGEST = 32 << 20
"""Bytes; glibc takes no more. What is larger still comes from and goes back to the system on its own."""
KEPT = 64 << 20
"""Bytes of freed memory that stay with the process, at most, at the end of each heap."""


def keep_freed_memory() -> bool:
    """Keep freed blocks up to :data:`LARGEST` for the next ones, in the whole process; False where there is no glibc.

    Chunks of about a megabyte come and go by the hundred in a round. By default each is mapped anew, and the kernel's
    clearing and mapping of their pages took a fifth of a peer's CPU time (docs/benchmarks.md).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library, or another system
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST) and mallopt(_TRIM_THRESHOLD, KEPT))
