"""K-FAC the slow way, from the definitions: the reference that nothing in `kfac_core` helped to write.

Patches and per-example gradients come from autograd, Kronecker products are built and solved densely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

Factor = list[Tensor]  # one matrix a block


@dataclass
class DenseSettings:
    solver: str
    damping: float
    factor_decay: float
    kl_clip: float | None
    factor_update_steps: int
    inverse_update_steps: int
    lr: float


def supported(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]


def factors(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[Factor, Factor]]:
    """A and G of every layer from the definition, over the examples (x, y) of a batch-mean loss."""
    sums: dict[str, tuple[Factor, Factor]] = {}
    for example, label in zip(x, y, strict=True):
        seen: dict[str, Tensor] = {}
        inputs: dict[str, Tensor] = {}
        handles = []
        for name, module in supported(model):
            handles.append(module.register_forward_hook(partial(_see, name, inputs, seen)))
        loss = functional.cross_entropy(model(example[None]), label[None])
        for handle in handles:
            handle.remove()
        output_gradients = torch.autograd.grad(loss, list(seen.values()))
        for (name, module), g in zip(supported(model), output_gradients, strict=True):
            a_rows, g_rows = rows(module, inputs[name], g)
            positions = a_rows[0].shape[0]
            a = [r.T @ r / positions**2 for r in a_rows]
            # the example's own gradient: its batch is itself, so the mean is it; KFC averages over positions,
            # SC20 puts 1/S^2 on A and S on G, with the same product
            g_mat = [r.T @ r * positions for r in g_rows]
            old = sums.get(name)
            if old is None:
                sums[name] = (a, g_mat)
            else:
                sums[name] = (
                    [p + q for p, q in zip(old[0], a, strict=True)],
                    [p + q for p, q in zip(old[1], g_mat, strict=True)],
                )
    count = len(x)
    return {n: ([p / count for p in a], [p / count for p in g]) for n, (a, g) in sums.items()}


def _see(
    name: str,
    inputs: dict[str, Tensor],
    seen: dict[str, Tensor],
    _: nn.Module,
    args: tuple[Tensor],
    out: Tensor,
) -> Tensor:
    inputs[name] = args[0].detach()
    seen[name] = out
    return out.clone()  # what follows may work in place, on the copy


def rows(module: nn.Module, inputs: Tensor, g: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Rows of a and g of one example, a list with one [positions, dim] matrix a block.

    A row of a is the derivative of one output by the weight (and bias) that it is linear in.
    """
    if isinstance(module, nn.Linear):
        a = inputs.reshape(-1, module.in_features)
        if module.bias is not None:
            a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
        return [a], [g.reshape(-1, module.out_features)]
    assert isinstance(module, nn.Conv2d)
    weight = module.weight.detach().clone().requires_grad_()
    out = module._conv_forward(inputs, weight, None)
    per_group = module.out_channels // module.groups
    a_blocks, g_blocks = [], []
    flat = out[0].flatten(1)
    for group in range(module.groups):
        channel = group * per_group
        patches = []
        for position in range(flat.shape[1]):
            (derivative,) = torch.autograd.grad(flat[channel, position], weight, retain_graph=True)
            patch = derivative[channel].flatten()
            if module.bias is not None:
                patch = torch.cat([patch, torch.ones(1, dtype=patch.dtype)])
            patches.append(patch)
        a_blocks.append(torch.stack(patches))
        g_blocks.append(g[0, channel : channel + per_group].flatten(1).T)
    return a_blocks, g_blocks


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


class DenseKFAC:
    """Steps a model with SGD behind dense K-FAC; factors of each layer over the examples that it is told."""

    def __init__(self, model: nn.Module, settings: DenseSettings) -> None:
        self.model, self.settings, self.steps = model, settings, 0
        self.running: dict[str, tuple[Factor, Factor]] = {}
        self.frozen: dict[str, tuple[Factor, Factor]] = {}

    def step(self, x: Tensor, y: Tensor, examples_of: dict[str, Sequence[int]]) -> dict[str, Tensor]:
        """Preconditioned and clipped gradients by parameter, after which the model has moved."""
        s = self.settings
        if self.steps % s.factor_update_steps == 0:
            self._average(x, y, examples_of)
        if self.steps % s.inverse_update_steps == 0:
            self.frozen = {n: ([*a], [*g]) for n, (a, g) in self.running.items()}
        self.model.zero_grad()
        functional.cross_entropy(self.model(x), y).backward()
        solved = {name: self._solve(name, module) for name, module in supported(self.model)}
        scale = 1.0
        if s.kl_clip is not None:
            total = sum((new * old).sum() for pairs in solved.values() for new, old in pairs)
            scale = min(1.0, (s.kl_clip / abs(float(total) * s.lr**2)) ** 0.5)
        result = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        for name, module in supported(self.model):
            matrix = torch.cat([new for new, _ in solved[name]]) * scale
            if module.bias is not None:
                result[f"{name}.bias"] = matrix[:, -1]
                matrix = matrix[:, :-1]
            result[f"{name}.weight"] = matrix.reshape(module.weight.shape)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.sub_(s.lr * result[name])
        self.steps += 1
        return result

    def _average(self, x: Tensor, y: Tensor, examples_of: dict[str, Sequence[int]]) -> None:
        decay = self.settings.factor_decay
        for subset in {tuple(indices) for indices in examples_of.values()}:
            fresh = factors(self.model, x[list(subset)], y[list(subset)])
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
        weight = module.weight.grad.reshape(module.weight.shape[0], -1)
        if module.bias is not None:
            weight = torch.cat([weight, module.bias.grad[:, None]], 1)
        means = tuple(float(torch.cat([m.diagonal() for m in blocks]).mean()) for blocks in (a, g))
        return [
            (solve(s.solver, s.damping, a_block, g_block, w, means), w)  # type: ignore[arg-type]
            for a_block, g_block, w in zip(a, g, weight.chunk(len(a)), strict=True)
        ]
