"""Page-locked memory: what lies in it crosses to and from a CUDA device without a detour over a buffer of the driver's.

Memory that another process maps too cannot come from torch's own page-locked allocator, but the CUDA runtime locks
pages that are there already (cudaHostRegister). It does so for as long as the process lives, or until :func:`unlock`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

PORTABLE = 1
"""``cudaHostRegisterPortable``: for every CUDA context of the process."""


def lock(memory: Sequence[NDArray[Any]], device: torch.device) -> str:
    """Page-lock these arrays, each of which begins with a page that it shares with no other, for copies to and from
    ``device``; nothing to do where that is no CUDA device. All of their memory is allocated by it.

    Returns what kept it from that, empty when nothing did. Then some may be locked and others not: copies to and from
    those take longer, and come to the same.
    """
    if device.type != "cuda":
        return ""
    try:
        with torch.cuda.device(device):
            runtime: Any = torch.cuda.cudart()
            for array in memory:
                if not array.nbytes:
                    continue  # which CUDA refuses
                error = int(runtime.cudaHostRegister(array.ctypes.data, array.nbytes, PORTABLE))
                if error:
                    _forget_error(device)
                    return f"cudaHostRegister of {array.nbytes / 2**20:.0f} MiB gave error {error}"
    except Exception as error:  # without it all works too, whatever it is
        return f"{type(error).__name__}: {' '.join(str(error).splitlines()[:1])}"
    return ""


def unlock(memory: Sequence[NDArray[Any]], device: torch.device) -> None:
    """Undo :func:`lock`, before the memory is unmapped in a process that goes on. What is not locked is passed over."""
    if device.type != "cuda":
        return
    with contextlib.suppress(Exception), torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()
        for array in memory:
            if array.nbytes and int(runtime.cudaHostUnregister(array.ctypes.data)):
                _forget_error(device)


def _forget_error(device: torch.device) -> None:
    """A call to the CUDA runtime that fails leaves its error to the thread's next kernel launch: here is one."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
