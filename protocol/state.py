"""The global state of one fragment: parameters and outer momentum, the same bits at every peer at one head."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .digest import BytesLike, blake3_digest
from .errors import NonFinite, PeerMisbehaved
from .kernels import frozen, table
from .layout import ChunkLayout
from .outer import check_outer, outer_step

Floats = NDArray[np.float32]
T = TypeVar("T")

DOMAIN = b"atoll state 1\0"
INFINITE_BITS = 0x7F800000
PARALLEL_BYTES = 32 << 20
"""Bytes from which work on chunks spreads over threads; below, starting them costs more than it saves."""


def spread(work: Callable[[int], T], items: Sequence[int], size: int, *, spare: int = 0) -> list[T]:
    """``work`` of each item, over several threads where they pay. ``size``: bytes that an item stands for; ``spare``:
    cores that are left alone, for whoever trains there meanwhile."""
    if len(items) * size < PARALLEL_BYTES:
        return [work(item) for item in items]  # and the cores are not even counted, which is a system call
    workers = min(len(items), 8, max((os.cpu_count() or 1) - spare, 1))
    if workers < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(workers, thread_name_prefix="state") as pool:
        return list(pool.map(work, items))


class GlobalState:
    """Parameters g and outer momentum b of one fragment, float32[N] each, in chunks.

    ``params`` and ``momentum`` may be the caller's memory (shared with a trainer, say): they are written in place and
    never replaced. Whoever else writes there calls :meth:`forget`. Not for use by two threads at once, except that
    :meth:`hashes` and :meth:`blob` may run in one thread while another only reads.

    For transfer and hashing the state is a list of *blobs*, little-endian float32: blob 2i is chunk i of the
    parameters, blob 2i + 1 chunk i of the momentum.
    """

    def __init__(self, layout: ChunkLayout, params: Floats, momentum: Floats, *, fragment: int = 0) -> None:
        for what, array in (("parameters", params), ("momentum", momentum)):
            good = array.dtype == np.float32 and array.shape == (layout.parameters,)
            if not (good and array.flags.c_contiguous and array.flags.aligned and array.flags.writeable):
                raise ValueError(
                    f"expected {what} as a writable, contiguous float32 vector of {layout.parameters}, "
                    f"found {array.dtype} of shape {array.shape}"
                )
        self.layout = layout
        self.params = params
        self.momentum = momentum
        self.fragment = fragment
        self._hashes: list[bytes | None] = [None] * self.blob_count

    @classmethod
    def fresh(cls, layout: ChunkLayout, params: Floats, *, fragment: int = 0) -> GlobalState:
        """The state at the start of a run: momentum zero. ``params`` is kept, not copied."""
        return cls(layout, params, np.zeros(layout.parameters, np.float32), fragment=fragment)

    def copy(self) -> GlobalState:
        """The same state in memory of its own."""
        other = GlobalState(self.layout, self.params.copy(), self.momentum.copy(), fragment=self.fragment)
        other._hashes = list(self._hashes)
        return other

    def apply(self, chunks: Sequence[Floats | None], *, lr: float, mu: float, kind: str = "nesterov") -> None:
        """One outer step with the averaged chunks (float32, decoded), see :func:`.outer.outer_step`.

        A chunk that is None had no contributors and stays as it is, momentum included. All or nothing: everything is
        checked before the first write. Raises :class:`NonFinite` when an average is not finite, :class:`ValueError`
        when chunks are missing or have another size, :class:`ConfigError` for a wrong optimizer.
        """
        check_outer(lr, mu, kind)
        if len(chunks) != self.layout.count:
            raise ValueError(f"expected {self.layout.count} chunks, found {len(chunks)}")
        kernels = table()
        for i, mean in enumerate(chunks):
            if mean is None:
                continue
            size = self.layout.size(i)
            good = mean.dtype == np.float32 and mean.shape == (size,)
            if not (good and mean.flags.c_contiguous and mean.flags.aligned):
                raise ValueError(f"expected chunk {i} as float32[{size}], found {mean.dtype} of shape {mean.shape}")
            if kernels.largest(frozen(mean)) >= INFINITE_BITS:
                raise NonFinite(f"chunk {i} of the average holds NaN or infinities; nothing was applied")
        for i, mean in enumerate(chunks):
            if mean is not None:
                span = self.layout.span(i)
                outer_step(self.params[span], self.momentum[span], mean, lr, mu, kind)
                self._hashes[2 * i] = self._hashes[2 * i + 1] = None

    def step(
        self, index: int, mean: Floats, *, lr: float, mu: float, kind: str = "nesterov", phase: int = 0, period: int = 1
    ) -> None:
        """One outer step of one chunk, see :func:`.outer.outer_step`, for callers who have checked all chunks of the
        commit before; several threads may work on different chunks."""
        span = self.layout.span(index)
        outer_step(self.params[span], self.momentum[span], mean, lr, mu, kind, phase=phase, period=period)
        self._hashes[2 * index] = self._hashes[2 * index + 1] = None

    @property
    def blob_count(self) -> int:
        """Two blobs a chunk."""
        return 2 * self.layout.count

    def blob(self, index: int) -> bytes:
        """The bytes of one blob. Raises :class:`IndexError` for an unknown one."""
        return self._part(index).astype("<f4", copy=False).tobytes()

    def set_blob(self, index: int, data: BytesLike) -> None:
        """Take over one blob. Its hash is the caller's to check.

        Raises :class:`PeerMisbehaved`, with nothing changed, when the length is wrong or a value is not finite.
        """
        part = self._part(index)
        array = np.frombuffer(data, np.uint8)
        if array.size != 4 * part.size:
            raise PeerMisbehaved(f"blob {index} of the state has {4 * part.size} bytes, received {array.size}")
        values: Floats = np.require(array.view("<f4"), np.float32, ["C", "A"])
        if table().largest(frozen(values)) >= INFINITE_BITS:
            raise PeerMisbehaved(f"blob {index} of the state holds NaN or infinities")
        part[:] = values
        self._hashes[index] = None

    def forget(self) -> None:
        """Forget all cached hashes: someone else has written into ``params`` or ``momentum``."""
        self._hashes = [None] * self.blob_count

    def hashes(self) -> list[bytes]:
        """BLAKE3 of every blob; only those that changed since the last call are computed."""
        stale = [index for index, known in enumerate(self._hashes) if known is None]
        fresh = spread(self._hash, stale, 4 * self.layout.chunk)
        for index, digest in zip(stale, fresh, strict=True):
            self._hashes[index] = digest
        return [known for known in self._hashes if known is not None]

    def digest(self) -> bytes:
        """The state digest (32 bytes), as it stands in commits and, for θ₀, in the manifest."""
        return self.digest_of(self.layout, self.hashes(), fragment=self.fragment)

    @staticmethod
    def digest_of(layout: ChunkLayout, hashes: Sequence[bytes], *, fragment: int = 0) -> bytes:
        """The state digest from the hashes of all blobs. Raises :class:`PeerMisbehaved` when their number is wrong."""
        if len(hashes) != 2 * layout.count or any(len(digest) != 32 for digest in hashes):
            raise PeerMisbehaved(f"expected {2 * layout.count} blob hashes of 32 bytes, found {len(hashes)}")
        numbers = (layout.parameters, layout.chunk, fragment)
        return blake3_digest(DOMAIN, *(number.to_bytes(8, "little") for number in numbers), *hashes)

    def _part(self, index: int) -> Floats:
        if not 0 <= index < self.blob_count:
            raise IndexError(f"blob {index} of {self.blob_count}")
        return (self.momentum if index % 2 else self.params)[self.layout.span(index // 2)]

    def _hash(self, index: int) -> bytes:
        return blake3_digest(self._part(index).astype("<f4", copy=False).view(np.uint8).data)
