"""K-FAC from its definitions, slow and dense: a reference that is independent of `kfac_core`.

Factors come example by example from rows of a and g that autograd alone derives; Kronecker products are built
and solved densely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

Factor = list[Tensor]  # one matrix a block
Loss = Callable[[Tensor, Tensor], Tensor]  # from the model's output and the labels to the mean over a batch
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SPATIAL = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
KINDS = (nn.Linear, *SPATIAL, nn.Embedding, Conv1D)


def supported(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in model.named_modules() if type(m) in KINDS and m.weight.requires_grad]


def factors(
    model: nn.Module, x: Tensor, y: Tensor, loss: Loss = functional.cross_entropy, sequence: str = "expand"
) -> dict[str, tuple[Factor, Factor]]:
    """A and G of every layer from the definition, over the examples (x, y).

    KFC averages over positions; SC20 puts 1/S^2 on A and S on G, with the same product. An example's own
    gradient is that of a batch of itself.
    """
    sums: dict[str, tuple[Factor, Factor]] = {}
    for example, label in zip(x, y, strict=True):
        for name, (a_rows, g_rows) in _rows_of_example(model, example, label, loss, sequence).items():
            positions = a_rows[0].shape[0]
            a = [r.T @ r / positions**2 / len(x) for r in a_rows]
            g = [r.T @ r * positions / len(x) for r in g_rows]
            old_a, old_g = sums.get(name, ([0.0] * len(a), [0.0] * len(g)))
            sums[name] = (
                [p + q for p, q in zip(old_a, a, strict=True)],
                [p + q for p, q in zip(old_g, g, strict=True)],
            )
    return sums


def rows(module: nn.Module, inputs: Tensor, g: Tensor, sequence: str) -> tuple[list[Tensor], list[Tensor]]:
    """Rows of a and g of one call on one example, a list with one [positions, dim] matrix a block.

    A row of a is the derivative of one output by the weights (and bias) that it is linear in.
    """
    weight = module.weight.detach().clone().requires_grad_()
    out = _by_position(module, functional_call(module, {"weight": weight}, (inputs,)))
    g = _by_position(module, g)
    groups = getattr(module, "groups", 1)
    a_blocks, g_blocks = [], []
    for channels in torch.arange(out.shape[1]).chunk(groups):
        first = int(channels[0])
        derivatives = [torch.autograd.grad(o, weight, retain_graph=True)[0] for o in out[:, first]]
        one_output = [_of_output(module, d, first, len(channels)) for d in derivatives]
        a = torch.stack([d.flatten() for d in one_output])
        if has_trained_bias(module):
            a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
        a_blocks.append(a)
        g_blocks.append(g[:, channels])
    if sequence == "reduce" and isinstance(module, nn.Linear | Conv1D):
        return [a.mean(0, keepdim=True) for a in a_blocks], [g.sum(0, keepdim=True) for g in g_blocks]
    return a_blocks, g_blocks


def has_trained_bias(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None and module.bias.requires_grad


def _rows_of_example(
    model: nn.Module, example: Tensor, label: Tensor, loss: Loss, sequence: str
) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Rows of every layer that the example's loss depends on; several calls one below the other."""
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def see(
        name: str, module: nn.Module, args: tuple[Tensor], keywords: dict[str, Tensor], out: Tensor
    ) -> Tensor:
        (inputs,) = (*args, *keywords.values())
        calls.append((name, module, inputs.detach(), out))
        return out.clone()  # what follows may work in place, on the copy

    handles = [
        module.register_forward_hook(partial(see, name), with_kwargs=True)
        for name, module in supported(model)
    ]
    value = loss(model(example[None]), label[None])
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(value, [out for *_, out in calls], allow_unused=True)
    found: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    for (name, module, inputs, _), g in zip(calls, gradients, strict=True):
        if g is None:
            continue
        new = rows(module, inputs, g, sequence)
        old = found.get(name, ([r[:0] for r in new[0]], [r[:0] for r in new[1]]))
        found[name] = tuple(
            [torch.cat(pair) for pair in zip(before, after, strict=True)]
            for before, after in zip(old, new, strict=True)
        )
    return found


def _of_output(module: nn.Module, derivative: Tensor, output: int, in_group: int) -> Tensor:
    """The part of a weight's derivative that belongs to one output; the first of a group of so many."""
    if isinstance(module, TRANSPOSED):
        return derivative.chunk(module.groups)[output // in_group][:, 0]
    return derivative[:, output] if isinstance(module, nn.Embedding | Conv1D) else derivative[output]


def _by_position(module: nn.Module, tensor: Tensor) -> Tensor:
    """`[positions, channels]` of one example."""
    if isinstance(module, SPATIAL):
        return tensor[0].flatten(1).T
    return tensor.reshape(-1, tensor.shape[-1])


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
    relative_damping: bool = False


def solve(
    solver: str,
    damping: float,
    a: Tensor,
    g: Tensor,
    w: Tensor,
    means: tuple[float, float],
    relative: bool = False,
) -> Tensor:
    """The damped Kronecker system, materialised and solved; `w` is [n_g, n_a]."""
    eye_a, eye_g = torch.eye(len(a), dtype=a.dtype), torch.eye(len(g), dtype=g.dtype)
    if relative and solver != "eigen":
        root = damping**0.5
        system = torch.kron(g + root * means[1] * eye_g, a + root * means[0] * eye_a)
        return torch.linalg.solve(system, w.flatten()).view_as(w)
    damping *= means[0] * means[1] if relative else 1.0
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
            (solve(s.solver, s.damping, a_block, g_block, w, means, s.relative_damping), w)  # type: ignore[arg-type]
            for a_block, g_block, w in zip(a, g, weight.chunk(len(a)), strict=True)
        ]
