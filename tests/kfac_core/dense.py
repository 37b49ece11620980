"""K-FAC from its definitions, slow and dense: a reference that is independent of `kfac_core`.

Factors come from `per_example.py`, Kronecker products are built and solved densely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from tests.kfac_core.per_example import TRANSPOSED, Factor, Loss, factors, has_trained_bias, supported


@dataclass
class DenseSettings:
    solver: str
    damping: float
    factor_decay: float
    kl_clip: float | None
    factor_update_steps: int
    inverse_update_steps: int
    lr: float
    loss: Loss = functional.cross_entropy
    sequence: str = "expand"


def solve(solver: str, damping: float, a: Tensor, g: Tensor, w: Tensor, means: tuple[float, float]) -> Tensor:
    """The damped Kronecker system, materialised and solved; `w` is [n_g, n_a]."""
    eye_a, eye_g = torch.eye(len(a), dtype=a.dtype), torch.eye(len(g), dtype=g.dtype)
    if solver == "eigen":
        system = torch.kron(g, a) + damping * torch.eye(w.numel(), dtype=w.dtype)
    elif solver == "inverse":
        system = torch.kron(g + damping * eye_g, a + damping * eye_a)
    else:
        pi = (means[0] / means[1]) ** 0.5
        system = torch.kron(g + damping**0.5 / pi * eye_g, a + pi * damping**0.5 * eye_a)
    return torch.linalg.solve(system, w.flatten()).view_as(w)


def as_matrix(module: nn.Module, gradient: Tensor) -> Tensor:
    """A weight's gradient as `[outputs, inputs of one]`."""
    if isinstance(module, TRANSPOSED):
        return torch.cat([part.transpose(0, 1).flatten(1) for part in gradient.chunk(module.groups)])
    return gradient.T if isinstance(module, nn.Embedding | Conv1D) else gradient.flatten(1)


def of_weight(module: nn.Module, matrix: Tensor) -> Tensor:
    """The reverse of `as_matrix`."""
    if isinstance(module, TRANSPOSED):
        outputs, taps = module.weight.shape[1], module.weight.shape[2:]
        parts = [part.reshape(outputs, -1, *taps).transpose(0, 1) for part in matrix.chunk(module.groups)]
        return torch.cat(parts)
    return (matrix.T if isinstance(module, nn.Embedding | Conv1D) else matrix).reshape(module.weight.shape)


class DenseKFAC:
    """SGD preconditioned by dense K-FAC; the caller says which examples each layer's factors average over."""

    def __init__(self, model: nn.Module, settings: DenseSettings) -> None:
        self.model, self.settings, self.steps = model, settings, 0
        self.running: dict[str, tuple[Factor, Factor]] = {}
        self.frozen: dict[str, tuple[Factor, Factor]] = {}

    def step(self, x: Tensor, y: Tensor, examples_of: dict[str, Sequence[int]]) -> dict[str, Tensor]:
        """Preconditioned and clipped gradients by parameter; also updates the model."""
        s = self.settings
        if self.steps % s.factor_update_steps == 0:
            self._average(x, y, examples_of)
        if self.steps % s.inverse_update_steps == 0:
            self.frozen = {n: ([*a], [*g]) for n, (a, g) in self.running.items()}
        self.model.zero_grad()
        s.loss(self.model(x), y).backward()
        layers = [(name, m) for name, m in supported(self.model) if m.weight.grad is not None]
        solved = {name: self._solve(name, module) for name, module in layers}
        scale = 1.0
        if s.kl_clip is not None:
            total = sum((new * old).sum() for pairs in solved.values() for new, old in pairs)
            scale = min(1.0, (s.kl_clip / abs(float(total) * s.lr**2)) ** 0.5)
        result = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        for name, module in layers:
            matrix = torch.cat([new for new, _ in solved[name]]) * scale
            if has_trained_bias(module):
                result[f"{name}.bias".lstrip(".")] = matrix[:, -1]
                matrix = matrix[:, :-1]
            result[f"{name}.weight".lstrip(".")] = of_weight(module, matrix)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in result:
                    parameter.sub_(s.lr * result[name])
        self.steps += 1
        return result

    def _average(self, x: Tensor, y: Tensor, examples_of: dict[str, Sequence[int]]) -> None:
        decay = self.settings.factor_decay
        for subset in {tuple(indices) for indices in examples_of.values()}:
            mine = list(subset)
            fresh = factors(self.model, x[mine], y[mine], self.settings.loss, self.settings.sequence)
            for name, indices in examples_of.items():
                if tuple(indices) != subset:
                    continue
                old = self.running.get(name) or tuple(
                    [torch.eye(len(m), dtype=m.dtype) for m in blocks] for blocks in fresh[name]
                )
                self.running[name] = tuple(
                    [decay * p + (1 - decay) * q for p, q in zip(o, f, strict=True)]
                    for o, f in zip(old, fresh[name], strict=True)
                )  # type: ignore[assignment]

    def _solve(self, name: str, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """(preconditioned, plain) gradient matrices, one pair a block."""
        s, (a, g) = self.settings, self.frozen[name]
        weight = as_matrix(module, module.weight.grad)
        if has_trained_bias(module):
            weight = torch.cat([weight, module.bias.grad[:, None]], 1)
        means = tuple(float(torch.cat([m.diagonal() for m in blocks]).mean()) for blocks in (a, g))
        return [
            (solve(s.solver, s.damping, a_block, g_block, w, means), w)  # type: ignore[arg-type]
            for a_block, g_block, w in zip(a, g, weight.chunk(len(a)), strict=True)
        ]
