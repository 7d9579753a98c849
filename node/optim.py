"""The inner optimizer: AdamW for everything, or Muon or 8-bit AdamW for the matrices and AdamW for the rest.

Its state is a peer's own and lives on across rounds; only parameters are averaged (DiLoCo, arXiv:2311.08105). Rates
follow the progress of the whole run, not the steps of this process, so that a peer that joins late uses the rate the
others use.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from .config import InnerConfig
from .model import Transformer
from .specs import matrices

if TYPE_CHECKING:
    from .optim8bit import AdamW8bit


def rate(config: InnerConfig, progress: float) -> float:
    """The factor of the peak rate at ``progress`` (0 … 1) of the run: linear warmup, then decay to ``final_lr``."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < config.warmup:
        # never quite zero: the very first step of the run should count as well
        return max(progress / config.warmup, 0.01)
    done = (progress - config.warmup) / (1.0 - config.warmup)
    shape = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final_lr + (1.0 - config.final_lr) * shape


def progress_of_run(outer_step: int, steps: int, inner_steps: int, rounds: int, fragments: int = 1) -> float:
    """The run's progress (0 … 1): outer steps done, and the part of the current one, over ``rounds`` of each fragment.

    ``steps`` beyond ``inner_steps`` / ``fragments`` (a round that is late or went void) stand still at the round's end.
    """
    return min((outer_step + min(steps * fragments / inner_steps, 1.0)) / (rounds * fragments), 1.0)


class InnerOptimizer:
    """Takes one step on the gradients of a model: clips, sets the rates, updates, clears the gradients."""

    def __init__(self, model: Transformer, config: InnerConfig) -> None:
        self.config = config
        self.parameters = list(model.named.values())
        taken = dict(matrices(model.config)) if config.optimizer == "muon" else {}
        self.muon = Muon([(model.named[n], rows) for n, rows in taken.items()], config) if taken else None
        rest = [(n, p) for n, p in model.named.items() if n not in taken]
        embeddings = ("embedding", "head")
        decayed = [p for n, p in rest if p.dim() > 1 and n not in embeddings]
        others = [p for n, p in rest if p.dim() < 2 or n in embeddings]
        self.adamw: list[AdamW | AdamW8bit] = []
        if decayed:
            self.adamw.append(_kind(config)(decayed, config, config.weight_decay))
        if others:
            # embeddings too, whose state is best not in 8 bits (arXiv:2110.02861)
            self.adamw.append(AdamW(others, config, 0.0))

    def step(self, progress: float) -> bool:
        """Update at ``progress`` of the run. False, and nothing changed, when the gradient is not finite."""
        factor = rate(self.config, progress)
        largest = self.config.grad_clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.parameters, largest)
        finite = bool(torch.isfinite(norm))
        if finite:
            for group in self.adamw:
                group.step(self.config.adamw_lr * factor)
            if self.muon is not None:
                self.muon.step(self.config.lr * factor)
        for parameter in self.parameters:
            parameter.grad = None
        return finite


def _kind(config: InnerConfig) -> type[AdamW] | type[AdamW8bit]:
    if config.optimizer != "adamw8bit":
        return AdamW
    # bitsandbytes takes seconds to import
    from .optim8bit import AdamW8bit

    return AdamW8bit


class AdamW:
    """AdamW (arXiv:1711.05101) by torch's fused kernel.

    The kernel alone: torch's class of that name imports the compiler, a second or two at each trainer's start.
    """

    def __init__(self, parameters: list[nn.Parameter], config: InnerConfig, weight_decay: float) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.config, self.weight_decay = config, weight_decay
        self.averages = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in parameters]
        self.squares = [torch.zeros_like(average) for average in self.averages]
        self.steps = [torch.zeros((), dtype=torch.float32, device=p.device) for p in parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the parameters' ``grad`` at rate ``lr``."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        assert len(gradients) == len(self.parameters)
        adamw(
            self.parameters, gradients, self.averages, self.squares, [], self.steps,
            fused=True, amsgrad=False, beta1=self.config.beta1, beta2=self.config.beta2, lr=lr,
            weight_decay=self.weight_decay, eps=1e-8, maximize=False,
        )  # fmt: skip


class _Slice(NamedTuple):
    """One matrix: rows of a parameter."""

    number: int
    """Of the parameter."""
    first: int
    rows: int
    transposed: bool


@dataclass
class _Stack:
    """Matrices of one shape, orthogonalised in one batch."""

    momentum: Tensor
    """float32 [count, small, large]."""
    slices: list[_Slice]
    scale: float


class Muon:
    """Momentum, orthogonalised (Muon, Jordan et al. 2024; scaling as in arXiv:2502.16982's reference form).

    ``W ← W − lr · √max(1, rows/columns) · NS(g + μ·m)``. A parameter may hold several matrices one below another
    (query, key, value; gate, up): each is orthogonalised by itself. Matrices of one shape go through the
    Newton–Schulz iteration as one batch, tall ones transposed, because a small model's time goes into calls.
    """

    def __init__(self, parameters: list[tuple[nn.Parameter, tuple[int, ...]]], config: InnerConfig) -> None:
        self.parameters = [p for p, _ in parameters]
        self.momentum, self.weight_decay = config.momentum, config.weight_decay
        shapes: dict[tuple[int, int, float], list[_Slice]] = defaultdict(list)
        for number, (parameter, rows_of) in enumerate(parameters):
            first, columns = 0, parameter.shape[1]
            for rows in rows_of:
                scale = math.sqrt(max(1.0, rows / columns))
                key = (min(rows, columns), max(rows, columns), scale)
                shapes[key].append(_Slice(number, first, rows, rows > columns))
                first += rows
        self.stacks = [
            _Stack(parameters[0][0].new_zeros(len(slices), small, large), slices, scale)
            for (small, large, scale), slices in shapes.items()
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the parameters' ``grad`` at rate ``lr``."""
        targets: list[Tensor] = []
        updates: list[Tensor] = []
        for stack in self.stacks:
            gradient = torch.stack([_slice(self.parameters[s.number].grad, s) for s in stack.slices])
            stack.momentum.lerp_(gradient, 1.0 - self.momentum)
            direction = orthogonalise(gradient.lerp_(stack.momentum, self.momentum))
            direction.mul_(-lr * stack.scale)
            targets += [_slice(self.parameters[s.number], s) for s in stack.slices]
            updates += direction.unbind()
        if self.weight_decay:
            torch._foreach_mul_(list[Tensor](self.parameters), 1.0 - lr * self.weight_decay)
        torch._foreach_add_(targets, updates)


def _slice(tensor: Tensor | None, where: _Slice) -> Tensor:
    assert tensor is not None
    part = tensor.narrow(0, where.first, where.rows)
    return part.mT if where.transposed else part


NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients of the quintic iteration, one triple a step (Jordan et al. 2024)."""


def orthogonalise(x: Tensor) -> Tensor:
    """About U·Vᵀ of each matrix U·Σ·Vᵀ in ``x`` [count, small, large], small ≤ large; singular values end in 0.7…1.2.

    float32 on a CPU, where bf16 is emulated and costs three times as much; bf16 on CUDA.
    """
    work = x.bfloat16() if x.is_cuda else x
    # the Frobenius norm bounds the spectral norm
    work = work / (work.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        gram = work @ work.mT
        work = torch.baddbmm(work, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), work, beta=a)
    return work.to(x.dtype)
