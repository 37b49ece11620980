"""Kronecker factors from their definition, example by example; rows of a and g come from autograd alone."""

from __future__ import annotations

from collections.abc import Callable
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
