"""Promise: two ranks on a GPU train as two on a CPU do, and as each other, with every strategy.

With two GPUs tensors travel over NCCL, else over Gloo, and the ranks share the device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from kfac_core.config import STRATEGIES, Execution
from tests.gpu.trained import CPU, error_of, trained

LIMIT = 1e-8
CASES: dict[str, dict[str, Any]] = {
    f"{strategy}, {solver}": {
        "strategy": strategy, "solver": solver,
        **({"grad_worker_fraction": 0.5} if strategy == "hybrid_opt" else {}),
    }
    for strategy in STRATEGIES
    for solver in ("eigen", "inverse_pi")
} | {"overlap_factors": {"overlap_factors": True}}  # fmt: skip


def errors(rank: int, world_size: int, config: dict[str, Any], kind: str) -> tuple[float, float]:
    """Of the device's gradients, and the largest relative difference between two ranks'."""
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else CPU
    want, got = (
        trained("conv", torch.float64, where, config, execution=how, rank=rank, ranks=world_size)
        for where, how in ((CPU, Execution.SEQUENTIAL), (device, Execution.BATCHED))
    )
    flat = torch.cat([gradients.flatten() for gradients in got.values()])
    highest, lowest = flat.clone(), flat.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return error_of(got, want), float((highest - lowest).norm() / flat.norm())


REHEARSED = "hybrid_opt, eigen", "dp_kfac, inverse_pi"


@pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param("cuda", case, marks=pytest.mark.gpu) for case in CASES]
    + [("cpu", case) for case in REHEARSED],
)
def test_two_ranks_on_the_device_train_as_two_on_the_cpu(world, kind, case):
    for error, apart in world(2).run(errors, CASES[case], kind):
        assert error <= LIMIT
        assert apart <= LIMIT
