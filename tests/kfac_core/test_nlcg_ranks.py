"""Promise: with averaged gradients every world size takes the same path, whatever each rank's own loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.optimizers import NLCG

STEPS, GLOBAL_BATCH = 12, 8


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def global_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(GLOBAL_BATCH, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (GLOBAL_BATCH,), generator=generator)


def bias_of(rank: int, world_size: int, step: int) -> float:
    """Offset of this rank's loss from the mean: sums to zero over ranks, and grows with the step."""
    if world_size == 1:
        return 0.0
    return 0.04 * step * (1 if rank < world_size // 2 else -1)


def walk(
    rank: int, world_size: int, options: dict[str, Any], alone: bool = False
) -> tuple[list[Tensor], float]:
    """Parameters after every step, the last scale and average; with `alone` the loss is not averaged."""
    model = net()
    with_kfac = options.get("precondition") == "kfac"
    config = KFACConfig(kl_clip=None, damping=0.1, factor_update_steps=1, inverse_update_steps=2)
    kfac = KFAC(model, config, lr=0.1) if with_kfac else None
    optimizer = NLCG(model.parameters(), 0.3, kfac=kfac, **options)
    if alone:
        from kfac_core.collectives import SingleCommunicator

        optimizer._communicator = SingleCommunicator()
    mine = slice(rank * GLOBAL_BATCH // world_size, (rank + 1) * GLOBAL_BATCH // world_size)
    path = []
    for step in range(STEPS):
        x, labels = global_batch(step % 3)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x[mine]), labels[mine])
        loss.backward()
        for parameter in model.parameters():
            if world_size > 1:
                dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step(loss.detach() + bias_of(rank, world_size, step))
        path.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return path, optimizer.scale, float(optimizer.state[next(model.parameters())]["loss_ema"])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"beta": "PR", "precondition": "none"}, {"beta": "HS"}, {"beta": "DY"}, {"precondition": "kfac"}],
    ids=["FR", "PR without BFGS", "HS", "DY", "K-FAC"],
)
def test_every_world_size_takes_the_path_of_one_rank(world, world_size, options):
    ((one, one_scale, one_average),) = world(1).run(walk, options)
    for path, scale, average in world(world_size).run(walk, options):
        assert scale == one_scale
        assert average == pytest.approx(one_average, rel=1e-12), "a state must resume on another world size"
        for got, want in zip(path, one, strict=True):
            assert (got - want).norm() <= 1e-12 * want.norm()


@pytest.mark.parametrize("world_size", [2, 4])
def test_with_their_own_losses_the_ranks_would_diverge(world, world_size):
    results = world(world_size).run(walk, {}, True)
    assert results[0][1] < results[-1][1], "the premise of the test above: the losses lead to two branches"
    assert (results[0][0][-1] - results[-1][0][-1]).norm() > 1e-3


def traffic(rank: int, world_size: int, step_control: bool) -> tuple[int, int]:
    model = net()
    optimizer = NLCG(model.parameters(), 0.3, step_control=step_control)
    for _ in range(STEPS):
        optimizer.step(1.0)
    counted = optimizer._communicator.traffic
    return counted.calls, counted.sent_bytes


def test_traffic_is_one_scalar_per_step_and_nothing_without_control(world):
    assert world(2).run(traffic, True) == [(STEPS, 8 * STEPS)] * 2
    assert world(2).run(traffic, False) == [(0, 0)] * 2
