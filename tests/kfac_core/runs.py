"""Tiny models by name, trained for a few steps on one rank's share of each batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from kfac_core.placement import FactorShape
from kfac_core.placement.placement import data_elements
from kfac_core.solvers import solver_of
from tests.kfac_core.nets import batch, conv_net

LR, GLOBAL_BATCH = 0.1, 12


class Tokens(nn.Module):
    """An embedding, a Linear layer on the sequence, and a classifier of its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = (
            nn.Embedding(6, 4, padding_idx=0),
            nn.Linear(4, 4),
            nn.Linear(4, 3),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))).mean(1))


def build(net: str) -> nn.Module:
    """`conv`, `tokens` or `mlp`, in float64, always the same."""
    if net == "conv":
        return conv_net()
    torch.manual_seed(0)
    if net == "tokens":
        return Tokens().double()
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data(net: str, seed: int) -> tuple[Tensor, Tensor]:
    """The global batch of one step."""
    if net == "conv":
        return batch(GLOBAL_BATCH, seed)
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (GLOBAL_BATCH,), generator=generator)
    if net == "tokens":
        return torch.randint(0, 6, (GLOBAL_BATCH, 5), generator=generator), y
    return torch.randn(GLOBAL_BATCH, 4, dtype=torch.float64, generator=generator), y


def train(
    model: nn.Module, kfac: KFAC, net: str, steps: Iterable[int], rank: int = 0, world_size: int = 1
) -> list[dict[str, Tensor]]:
    """Train with plain SGD after K-FAC; returns the preconditioned gradients of every step."""
    history = []
    for number in steps:
        history.append(step(model, kfac, *data(net, number), rank, world_size))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(LR * parameter.grad)
    return history


def step(
    model: nn.Module, kfac: KFAC, x: Tensor, y: Tensor, rank: int = 0, world_size: int = 1
) -> dict[str, Tensor]:
    """A step on this rank's share of a batch; the preconditioned gradients."""
    mine = slice(rank * len(x) // world_size, (rank + 1) * len(x) // world_size)
    model.zero_grad()
    functional.cross_entropy(model(x[mine]), y[mine]).backward()
    average_gradients(model, world_size)
    kfac.step()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def average_gradients(model: nn.Module, world_size: int) -> None:
    """Average gradients as DistributedDataParallel does."""
    if world_size > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size


def run(
    rank: int,
    world_size: int,
    net: str,
    options: dict[str, Any],
    steps: int,
    execution: Execution | None = None,
) -> tuple[list[dict[str, Tensor]], dict[str, tuple[int, ...]]]:
    """Gradients of every step on this rank, and each layer's factor workers."""
    model = build(net)
    kfac = KFAC(model, KFACConfig.sc20(**options), lr=LR, execution=execution)
    history = train(model, kfac, net, range(steps), rank, world_size)
    kfac.remove()
    return history, {name: layer.factor_workers for name, layer in kfac.placement.layers.items()}


def solved(config: KFACConfig, factor: Tensor, damping: float = 0.0, last: Tensor | None = None) -> Tensor:
    """Second-order data of `factor`, flat, in memory of its own."""
    shape = FactorShape(factor.shape[-1], factor.shape[0])
    out = torch.full((data_elements(config, shape),), torch.nan, dtype=factor.dtype)
    solver_of(config).solve(factor, damping, out, last)
    return out


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """`tolerance` is relative to the norm of each parameter; 0 requires equal bits."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] - value).norm() <= tolerance * value.norm(), name
