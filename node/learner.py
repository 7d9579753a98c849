"""Training on one device: model, optimizer and windows of text, without processes or messages.

The trainer child drives it, and so do the sweep and the data-parallel baseline.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.protocol.errors import ResourceError

from .config import InnerConfig, ModelConfig
from .data.units import Units
from .model import Transformer
from .optim import InnerOptimizer, progress_of_run
from .specs import ONE_THREAD_BELOW

MOVED_AT_ONCE = 1 << 24
"""Parameters whose shift is on the device at one time."""


class Learner:
    """Inner steps on the parameters in ``host``, float32 [count_parameters(model)], memory that others see too.

    On the CPU ``host`` is the model, unless it is to be ``apart``: every step changes it. On CUDA the model lives on
    the device; :meth:`store` and :meth:`load` copy.

    device: ``auto`` (CUDA when there is one, else CPU), ``cpu``, ``cuda`` or ``cuda:N``; :class:`ResourceError` when
    it is absent. Steps run in bfloat16 autocast on CUDA and in float32 on a CPU. micro_batch: sequences that go through
    the model at once; the gradient of a step is always that of the whole batch. inner_steps: H, between two rounds of
    one of the ``fragments``; rounds: of each of them in the whole run.
    """

    def __init__(
        self,
        model: ModelConfig,
        inner: InnerConfig,
        inner_steps: int,
        rounds: int,
        text: NDArray[np.uint8],
        host: NDArray[np.float32],
        *,
        device: str = "auto",
        micro_batch: int | None = None,
        fragments: int = 1,
        apart: bool = False,
    ) -> None:
        self.device = choose_device(device)
        self.inner, self.inner_steps, self.rounds, self.fragments = inner, inner_steps, rounds, fragments
        self.text = text
        self.units = Units(len(text), model.context, model.seed)
        self.host = torch.from_numpy(host)
        shared = self.device.type == "cpu" and not apart
        self.flat = self.host if shared else torch.empty_like(self.host, device=self.device)
        self.model = Transformer(model, self.flat)
        self.optimizer = InnerOptimizer(self.model, inner)
        self.micro_batch = min(micro_batch or inner.batch, inner.batch)
        self.tokens_per_step = inner.batch * model.context
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.skipped = 0
        """Steps without an update, because the gradient was not finite."""

    def load(self) -> None:
        """Take the parameters from ``host``. The optimizer's state stays."""
        if self.flat is not self.host:
            with torch.no_grad():
                self.flat.copy_(self.host)

    def store(self) -> None:
        """Write the parameters into ``host``."""
        if self.flat is not self.host:
            self.host.copy_(self.flat)

    def snapshot(self, out: torch.Tensor, start: int, stop: int) -> None:
        """Copy the parameters ``start`` … ``stop`` to their place in ``out``, float32 in the host's memory, as long as
        all of them are."""
        out[start:stop].copy_(self.flat[start:stop])

    def move(self, shift: torch.Tensor, start: int, stop: int, keep: float) -> None:
        """θ ← keep·θ + shift for the parameters ``start`` … ``stop``; ``shift``: all of them, in the host's memory."""
        with torch.no_grad():
            for at in range(start, stop, MOVED_AT_ONCE):
                part = slice(at, min(at + MOVED_AT_ONCE, stop))
                mine, here = self.flat[part], shift[part].to(self.device)
                if keep == 0:
                    mine.copy_(here)
                else:
                    if keep != 1:
                        mine.mul_(keep)
                    mine.add_(here)

    def progress(self, outer_step: int, steps: int) -> float:
        """The run's progress (0 … 1), ``steps`` inner steps after ``outer_step``."""
        return progress_of_run(outer_step, steps, self.inner_steps, self.rounds, self.fragments)

    def step(self, units: NDArray[np.int64], outer_step: int, steps: int) -> float:
        """One inner step on these sample units, ``steps`` steps into the round after ``outer_step``; returns the loss.

        When the device's memory runs out, the micro-batch is halved and the step starts again with nothing changed.
        Raises :class:`ResourceError` when not even one sequence fits.
        """
        tokens = torch.from_numpy(self.units.batch(self.text, units)).to(self.device, non_blocking=True)
        while True:
            try:
                loss = self._gradient(tokens)
                break
            except torch.OutOfMemoryError as error:
                for parameter in self.optimizer.parameters:
                    parameter.grad = None
                if self.micro_batch == 1:
                    raise ResourceError(
                        f"one sequence does not fit into the memory of {self.device}: {str(error).splitlines()[0]}; "
                        "use a device with more memory, or a smaller model or context"
                    ) from None
                self.micro_batch = (self.micro_batch + 1) // 2
            # outside the handler, whose traceback keeps the failed step's tensors alive
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if not self.optimizer.step(self.progress(outer_step, steps)):
            self.skipped += 1
        return loss

    def _gradient(self, tokens: torch.Tensor) -> float:
        """Leave the gradient of the mean loss over all sequences in the parameters' ``grad``."""
        total = torch.zeros((), device=self.device)
        for part in tokens.split(self.micro_batch):
            with self._autocast():
                loss = self.model.loss(part)
            if len(part) != len(tokens):
                loss = loss * (len(part) / len(tokens))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return float(total)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def choose_device(name: str) -> torch.device:
    """The device of that name; ``auto``: CUDA when there is one. Raises :class:`ResourceError` when it is absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ResourceError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ResourceError(
                f"device {name!r} was asked for, but this machine has {count} usable CUDA devices "
                f"(torch {torch.__version__}); use --device auto or cpu, or install a CUDA build of torch"
            )
    elif device.type != "cpu":
        raise ResourceError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    return device


def default_threads(parameters: int) -> int:
    """Threads that pay for a model of that size on a CPU: one for the small ones, else every core we may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if parameters < ONE_THREAD_BELOW else cores
