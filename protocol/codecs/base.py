"""What every codec does the same way: checks, buffers, errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..digest import BytesLike
from ..errors import NonFinite, PeerMisbehaved
from ..kernels import frozen, subnormals_on

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

MAX_MAGNITUDE = 2.0**64
"""Largest magnitude that is encoded. Real pseudo-gradients are many orders below; the bound keeps any sum of weighted
contributions finite, so that no single peer can spoil an average by overflow."""
MAX_WEIGHT = 2.0**53
LIMIT_BITS = np.uint32(0x5F800000)
"""``MAX_MAGNITUDE`` as float32 bits: magnitudes compare like their bits, NaN and infinities lie above."""


class Codec(ABC):
    """One way to write ``n`` float32 values as bytes. Stateless, and safe to use from several threads at once.

    Arrays are float32, one-dimensional and C-contiguous (:class:`ValueError` otherwise). A codec is deterministic:
    the same values give the same bytes on every machine, and the same bytes the same values.
    """

    name: ClassVar[str]
    """As in the manifest."""
    version: ClassVar[int] = 1
    """Version of the wire format of contributions and averages. A manifest names it (``codec.version``), so that peers
    of which one does not know the format never meet in a run."""
    lossless: ClassVar[bool]
    """Whether decoding gives back exactly what was encoded."""
    fixed: ClassVar[bool] = True
    """Whether the length of a payload follows from the number of values."""
    averages: ClassVar[str] = ""
    """Name of the codec in which averages of such contributions travel; empty: this one."""

    @abstractmethod
    def encoded_size(self, n: int) -> int:
        """Bytes of a payload of ``n`` values; the most, where that depends on them."""

    def average_size(self, n: int, contributions: int) -> int:
        """The most that an average of so many contributions takes, of ``n`` values each."""
        return self.encoded_size(n)

    def error(self, largest: float) -> float:
        """The most that a decoded value can be off, where no value of the chunk exceeds that magnitude: all of it, if
        the codec says nothing better."""
        return 0.0 if self.lossless else largest

    def encode(self, values: Floats, out: bytearray | memoryview | None = None) -> bytearray | memoryview:
        """Encode. Returns a new bytearray, or the written beginning of ``out``, which has room for
        :meth:`encoded_size`.

        Raises :class:`NonFinite` when a value is NaN, infinite or above ``MAX_MAGNITUDE`` (``out`` then holds
        rubbish), :class:`ValueError` when ``out`` is too small.
        """
        _check(values)
        size = self.encoded_size(values.size)
        result: bytearray | memoryview
        if out is None:
            result = bytearray(size)
        else:
            view = memoryview(out).cast("B")
            if view.nbytes < size:
                raise ValueError(f"{self.name} of {values.size} values takes {size} bytes, out has {view.nbytes}")
            result = view[:size]
        subnormals_on()
        written = self._write(frozen(values), np.frombuffer(result, np.uint8))
        if written < 0:
            raise NonFinite(
                f"cannot send {values.size} values as {self.name}: at least one is NaN, infinite or above "
                f"{MAX_MAGNITUDE:.3g}; the training has probably diverged (lower the learning rates)"
            )
        if written < size and isinstance(result, bytearray):
            del result[written:]
        return result if isinstance(result, bytearray) else result[:written]

    def validate(self, payload: BytesLike, n: int, contributions: int | None = None) -> None:
        """Raises :class:`PeerMisbehaved` unless ``payload`` is a valid encoding of ``n`` values: of an average of so
        many contributions, where that is said."""
        self._validated(payload, n, contributions)

    def decode(self, payload: BytesLike, n: int, out: Floats) -> None:
        """Decode ``n`` values into ``out``.

        Raises :class:`PeerMisbehaved`, with ``out`` untouched, when the payload has the wrong length or contents
        that no encoder writes.
        """
        _check(out, n, writes=True)
        data = self._validated(payload, n)
        subnormals_on()
        self._decode(data, out)

    def accumulate(self, payload: BytesLike, weight: float, into: Floats) -> None:
        """``into += weight * decoded``: the float32 weight times the value, rounded, then added, rounded.

        ``weight`` is from 0 to ``MAX_WEIGHT``. Raises :class:`PeerMisbehaved` as :meth:`decode` does, with ``into``
        untouched.
        """
        _check(into, writes=True)
        if not 0 <= weight <= MAX_WEIGHT:
            raise ValueError(f"a weight lies between 0 and {MAX_WEIGHT:.3g}, found {weight}")
        data = self._validated(payload, into.size)
        subnormals_on()
        self._add(data, np.float32(weight), into)

    def _validated(self, payload: BytesLike, n: int, contributions: int | None = None) -> Bytes:
        data = np.frombuffer(payload, np.uint8)
        size = self.encoded_size(n)
        if data.size != size:
            raise PeerMisbehaved(f"a chunk of {n} values in {self.name} takes {size} bytes, received {data.size}")
        data = frozen(data)
        if not self._valid(data, n):
            raise PeerMisbehaved(f"a chunk in {self.name} holds what no encoder writes: {self._invalid}")
        return data

    _invalid: ClassVar[str] = "values that are NaN, infinite or too large"

    def _write(self, values: Floats, payload: Bytes) -> int:
        """Bytes written to the beginning of a payload of :meth:`encoded_size`; negative when a value is refused."""
        return payload.size if self._encode(values, payload) else -1

    @abstractmethod
    def _encode(self, values: Floats, payload: Bytes) -> bool:
        """False when a value is refused."""

    @abstractmethod
    def _valid(self, payload: Bytes, n: int) -> bool: ...

    @abstractmethod
    def _decode(self, payload: Bytes, out: Floats) -> None: ...

    @abstractmethod
    def _add(self, payload: Bytes, weight: np.float32, into: Floats) -> None: ...


def _check(values: Floats, n: int | None = None, *, writes: bool = False) -> None:
    if values.dtype != np.float32 or values.ndim != 1 or not values.flags.c_contiguous or not values.flags.aligned:
        raise ValueError(f"expected a contiguous float32 vector, found {values.dtype} of shape {values.shape}")
    if n is not None and values.size != n:
        raise ValueError(f"expected a vector of {n} values, found {values.size}")
    if values.size == 0:
        raise ValueError("expected at least one value")
    if writes and not values.flags.writeable:
        raise ValueError("expected a writable vector")
