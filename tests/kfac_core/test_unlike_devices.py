"""Promise: strategies that solve a factor on every rank keep models equal on unlike devices too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.collectives import communicator as alike
from kfac_core.config import Execution
from kfac_core.solvers.eigen import EigenSolver
from tests.kfac_core.nets import batch, conv_net


def trained(
    rank: int, world_size: int, strategy: str, kinds: list[str], execution: Execution
) -> list[Tensor]:
    """Parameters after three steps in a world whose last rank decomposes with another rounding."""
    real_kind, real = alike.kind_of, (EigenSolver.solve, EigenSolver.solve_all)

    def solve(
        self: EigenSolver, factor: Tensor, damping: Any, out: Tensor, last: Tensor | None = None
    ) -> None:
        real[0](self, factor, damping, out, last)
        out.mul_(1 + 1e-5 * rank)

    def solve_all(self: EigenSolver, *arguments: Any) -> Any:
        parts, failed = real[1](self, *arguments)
        return [part * (1 + 1e-5 * rank) for part in parts], failed

    alike.kind_of = lambda device: kinds[rank]
    EigenSolver.solve, EigenSolver.solve_all = solve, solve_all
    try:
        model = conv_net()
        config = KFACConfig(strategy=strategy, factor_update_steps=1, inverse_update_steps=1)
        kfac = KFAC(model, config, lr=0.1, execution=execution)
        for step in range(3):
            x, y = batch(8, seed=step)
            model.zero_grad()
            functional.cross_entropy(model(x[rank::world_size]), y[rank::world_size]).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            kfac.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
        return [parameter.detach().clone() for parameter in model.parameters()]
    finally:
        alike.kind_of = real_kind
        EigenSolver.solve, EigenSolver.solve_all = real


@pytest.mark.parametrize("strategy", ["d_kfac", "spd_kfac"])
@pytest.mark.parametrize("execution", Execution)
def test_models_stay_equal_on_unlike_devices(world, strategy, execution):
    first, second = world(2).run(trained, strategy, ["H100", "A100"], execution)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_without_the_exchange_they_would_not(world):
    first, second = world(2).run(trained, "d_kfac", ["H100", "H100"], Execution.SEQUENTIAL)
    assert not all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
