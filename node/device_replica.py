"""What a trainer keeps on its device so that only encoded bytes leave it: g, the residual e, and what rounds froze.

The same arithmetic as :class:`atoll.protocol.replica.Replica` does for a peer that encodes on the host, operation by
operation in float32, so the bytes are the same (x = g − θ + β·e, then the codec of :mod:`.codecs_torch`). The outer
step itself stays on the host, in the protocol's kernels: what comes back is the new g, over the way that parameters
take to a device anyway.

Memory beside θ, in bytes a parameter: 4 for g, 4 for e where the codec loses something, and 4 of the round's fragment
for what is frozen, from the snapshot on where training runs ahead, else only after a void round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.protocol.layout import ChunkLayout
from atoll.protocol.overlap import Merge, Overlap

from . import codecs_torch

PIECE = 1 << 22
"""Elements that are worked on at a time; temporaries take about 20 bytes each, with ``sparse`` 50."""


@dataclass(frozen=True)
class Batch:
    """Neighbouring chunks of one size: the elements ``start`` … ``stop`` of θ, from ``place`` on among those of the
    fragment, and from ``byte`` on among its payloads."""

    first: int
    count: int
    size: int
    start: int
    place: int
    byte: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.size


class DeviceReplica:
    """g, e and frozen copies beside the parameters ``flat`` (float32 vector), on their device.

    decay: β of the error feedback; None where there is no residual. memory: float32 vectors of ``flat``'s length for g
    and, with a decay, e (:meth:`allocate`). Methods may be called from two threads: the one that trains, and one that
    serves :meth:`encode` and :meth:`read` meanwhile.
    """

    def __init__(
        self, flat: Tensor, layout: ChunkLayout, codec: str, decay: float | None, memory: Sequence[Tensor]
    ) -> None:
        self.flat, self.layout, self.codec = flat, layout, codec
        self.params = memory[0]
        self.residual = memory[1] if decay is not None else None
        self._decay = torch.full((1,), decay if decay is not None else 0.0, device=flat.device)
        self.head = ""
        """Whose residual it is, a commit id in hexadecimal; empty when it is nobody's."""
        self._brought: tuple[int, Tensor | None] | None = None
        """Number of the last freeze, and a copy of what it froze; without one it is θ, which stands still."""
        self._fragment = 0
        self._kept: dict[int, Tensor] = {}
        """What was frozen for void rosters, by number."""
        self._lock = threading.Lock()

    @staticmethod
    def allocate(parameters: int, device: torch.device, decay: float | None) -> list[Tensor]:
        """Memory for :class:`DeviceReplica`. Raises as torch does when there is not enough."""
        return [torch.zeros(parameters, device=device) for _ in range(1 if decay is None else 2)]

    # --- state --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reset(self, head: str = "") -> None:
        """θ has just become the global parameters: g is that, e is zero, nothing is frozen."""
        with self._lock:
            self.params.copy_(self.flat)
            if self.residual is not None:
                self.residual.zero_()
            self._forget()
            self.head = head
            self._settle()

    @torch.no_grad()
    def place(self, what: str, values: Tensor) -> None:
        """Take ``"residual"`` or ``"theta"`` from the host's memory."""
        with self._lock:
            target = self.flat if what == "theta" else self.residual
            if target is not None:
                target.copy_(values)
            self._settle()

    @torch.no_grad()
    def read(self, what: str, start: int, out: Tensor) -> str:
        """Write elements of ``"residual"`` or ``"theta"`` into ``out`` (host); whose residual it is."""
        with self._lock:
            source = self.flat if what == "theta" else self.residual
            if source is None:
                return ""
            out.copy_(source[start : start + out.numel()])
            return self.head

    # --- a round ------------------------------------------------------------------------------------------------

    def freeze(self, number: int) -> None:
        """Training stands still: what the next round averages is θ."""
        with self._lock:
            self._brought = (number, None)
            self._settle()

    @torch.no_grad()
    def snapshot(self, number: int, parts: Sequence[tuple[int, int]]) -> None:
        """Copy the stretches of θ that the next round averages; training goes on."""
        with self._lock:
            self._brought = None  # whose memory may be used again
            self._brought = (number, self._copied(parts))
            self._settle()

    def go_on(self) -> None:
        """Training goes on: θ is not what was frozen any more."""
        with self._lock:
            if self._brought is not None and self._brought[1] is None:
                self._brought = None

    @torch.no_grad()
    def encode(self, number: int, fragment: int, out: Tensor, share: float = 1.0) -> tuple[bool, int]:
        """Encode the fragment as freeze ``number`` left it into ``out`` (uint8, host), chunk after chunk.

        share: below 1, and with training paused, θ itself is moved before, so that Δ has that share of its length.
        Whether every element of x can be sent (else ``out`` holds rubbish), and how many bytes crossed to the host.
        Raises :class:`LookupError` when something else, or nothing, is frozen.
        """
        with self._lock:
            if self._brought is None or self._brought[0] != number:
                raise LookupError(f"freeze {number} is not what is frozen here")
            self._fragment = fragment
            part, values, moved = self.layout.fragment(fragment), self._brought[1], 0
            if share < 1:
                if values is not None:
                    raise LookupError(f"freeze {number} is a copy; only parameters that stand still are shortened")
                factor = torch.full((1,), share, dtype=torch.float32, device=self.flat.device)
                for stretch in part.stretches():
                    self.flat[stretch].sub_(self.params[stretch]).mul_(factor).add_(self.params[stretch])
            for batch in self._batches(part, range(part.count)):
                payload, sound = codecs_torch.encode_rows(self.codec, self._contribution(batch, values))
                moved += 1
                if not bool(sound):
                    return False, moved
                here = out[batch.byte : batch.byte + payload.numel()]
                here.copy_(payload.view(-1))
                moved += here.numel()
            return True, moved

    @torch.no_grad()
    def hold(self, numbers: Sequence[int]) -> None:
        """Keep what was frozen under these numbers until the next commit, and nothing else. What there is no memory
        for is not kept: :meth:`commit` then says so."""
        with self._lock:
            for gone in self._kept.keys() - set(numbers):
                del self._kept[gone]
            if self._brought is None or self._brought[0] not in numbers:
                return
            number, values = self._brought
            if values is None:
                part = self.layout.fragment(self._fragment)
                try:
                    values = self._copied([(stretch.start, stretch.stop) for stretch in part.stretches()])
                except RuntimeError:  # of which running out of memory is a kind
                    return
            self._kept[number] = values
            self._settle()

    @torch.no_grad()
    def commit(
        self, fragment: int, mine: Sequence[int], others: Sequence[int], new: Tensor, *, source: int | None,
        rule: Overlap, lost: bool, dropped: bool, head: str,
    ) -> bool:  # fmt: skip
        """Take over g after a commit: ``new``, all parameters in the host's memory, of which this fragment is read.

        mine: its chunks that were averaged with what freeze ``source`` froze: θ moves by ``rule``, and e becomes what
        the codec lost. others: those averaged without it, where θ moves along. lost, dropped: see
        :class:`atoll.protocol.encoder.Outcome`. False when the source is not here, so that it was lost.
        """
        with self._lock:
            part, known = self.layout.fragment(fragment), True
            values: Tensor | None = None
            if mine and not lost:
                brought = self._brought is not None and self._brought[0] == source
                values = self._brought[1] if brought and self._brought else self._kept.get(source or 0)
                known = brought or values is not None
            if lost or not known:
                self._take_over(part, new)
            else:
                for batch in self._batches(part, mine):
                    self._averaged(batch, values, self._up(new, batch), rule)
                for batch in self._batches(part, others):
                    now, theta, old = self._up(new, batch), self._span(self.flat, batch), self._params(batch)
                    theta.add_(now - old)
                    old.copy_(now)
                for stretch in part.stretches() if dropped else ():
                    self.flat[stretch].copy_(self.params[stretch])
            self._forget()
            self.head = head
            self._settle()
            return known

    # --- one batch of chunks ------------------------------------------------------------------------------------

    def _contribution(self, batch: Batch, values: Tensor | None) -> Tensor:
        """x = g − θ + β·e, float32 [chunks, elements of one]. values: what was frozen; None: θ as it is."""
        theta = self._span(self.flat, batch) if values is None else self._frozen(values, batch)
        x = self._params(batch) - theta
        if self.residual is not None:
            x.add_(self._span(self.residual, batch) * self._decay)
        return x.view(batch.count, batch.size)

    def _averaged(self, batch: Batch, values: Tensor | None, new: Tensor, rule: Overlap) -> None:
        if self.residual is not None:
            x = self._contribution(batch, values)
            payload, _ = codecs_torch.encode_rows(self.codec, x)
            x.sub_(codecs_torch.decode_rows(self.codec, payload, batch.size))
            self._span(self.residual, batch).copy_(x.view(-1))
        theta = self._span(self.flat, batch)
        if values is None or rule.merge is Merge.OVERWRITE:
            theta.copy_(new)
        elif rule.merge is Merge.MIX:
            theta.mul_(torch.full((1,), rule.alpha, device=theta.device))
            theta.add_(new * torch.full((1,), 1 - rule.alpha, device=theta.device))
        else:
            theta.add_(new - self._frozen(values, batch))
        self._params(batch).copy_(new)

    def _take_over(self, part: ChunkLayout, new: Tensor) -> None:
        for stretch in part.stretches():
            self.params[stretch].copy_(new[stretch])
            self.flat[stretch].copy_(self.params[stretch])
            if self.residual is not None:
                self.residual[stretch].zero_()

    def _batches(self, part: ChunkLayout, indices: Sequence[int]) -> Iterator[Batch]:
        """These chunks of a fragment, in order, in batches of at most ``PIECE`` elements."""
        wanted = set(indices)
        place = byte = 0
        batch: Batch | None = None
        for index in range(part.count):
            span, size = part.span(index), part.size(index)
            if index in wanted:
                joins = (
                    batch is not None
                    and batch.first + batch.count == index
                    and batch.stop == span.start
                    and batch.size == size
                    and (batch.count + 1) * size <= PIECE
                )
                if batch is not None and joins:
                    batch = Batch(batch.first, batch.count + 1, size, batch.start, batch.place, batch.byte)
                else:
                    if batch is not None:
                        yield batch
                    batch = Batch(index, 1, size, span.start, place, byte)
            place += size
            byte += codecs_torch.payload_size(self.codec, size)
        if batch is not None:
            yield batch

    def _span(self, vector: Tensor, batch: Batch) -> Tensor:
        return vector[batch.start : batch.stop]

    def _params(self, batch: Batch) -> Tensor:
        return self._span(self.params, batch)

    def _frozen(self, values: Tensor, batch: Batch) -> Tensor:
        return values[batch.place : batch.place + batch.count * batch.size]

    def _up(self, new: Tensor, batch: Batch) -> Tensor:
        # From page-locked memory the host does not wait for each batch; :meth:`commit` waits for all in the end.
        return self._span(new, batch).to(self.flat.device, non_blocking=True)

    def _copied(self, parts: Sequence[tuple[int, int]]) -> Tensor:
        return torch.cat([self.flat[start:stop] for start, stop in parts])

    def _forget(self) -> None:
        self._kept.clear()
        self._brought = None

    def _settle(self) -> None:
        """Wait for the device: the other thread works on a stream of its own."""
        if self.flat.device.type == "cuda":
            torch.cuda.synchronize(self.flat.device)


def side_stream(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A context for work beside training, on a stream of its own where there are streams."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.Stream(device)
    return lambda: torch.cuda.stream(stream)
