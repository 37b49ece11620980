"""Promise: every strategy and solver, at every world size, computes exactly what its definition says.

The reference (`dense.py`) builds factors from autograd and solves the materialised Kronecker system. Each
strategy is held against the reference on the batches that its own factor workers saw.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from tests.kfac_core.dense import DenseKFAC, DenseSettings, factors
from tests.kfac_core.nets import batch, conv_net

LR, STEPS, GLOBAL_BATCH = 0.1, 4, 12
HYPERPARAMETERS = {
    "damping": 0.01, "factor_decay": 0.6, "kl_clip": 0.001,
    "factor_update_steps": 1, "inverse_update_steps": 2,
}  # fmt: skip
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("comm_opt", {}),
    ("comm_opt", {"assignment": "round_robin"}),
    ("mem_opt", {}),
    ("mem_opt", {"assignment": "round_robin"}),
    ("hybrid_opt", {"grad_worker_fraction": 0.5}),
    ("mpd_kfac", {}),
    ("d_kfac", {}),
    ("spd_kfac", {}),
    ("comm_opt", {"split_factors": "when_ranks_exceed_layers"}),
    ("dp_kfac", {}),
    ("dp_kfac", {"assignment": "balanced"}),
]


def run_kfac(
    rank: int, world_size: int, options: dict[str, Any], execution: Execution | None = None
) -> tuple[list[dict[str, Tensor]], Any]:
    """Train a few steps on this rank's share; the preconditioned gradients of every step."""
    model = conv_net()
    kfac = KFAC(model, KFACConfig(**options), lr=LR, execution=execution)
    history = []
    for step in range(STEPS):
        x, y = batch(GLOBAL_BATCH, seed=step)
        mine = slice(rank * GLOBAL_BATCH // world_size, (rank + 1) * GLOBAL_BATCH // world_size)
        model.zero_grad()
        functional.cross_entropy(model(x[mine]), y[mine]).backward()
        for parameter in model.parameters():
            if world_size > 1:
                dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        kfac.step()
        history.append({name: p.grad.clone() for name, p in model.named_parameters()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(LR * parameter.grad)
    workers = {name: layer.factor_workers for name, layer in kfac.placement.layers.items()}
    kfac.remove()
    return history, workers


@cache
def reference(solver: str, examples_of: tuple[tuple[str, tuple[int, ...]], ...]) -> list[dict[str, Tensor]]:
    """Gradients of every step when each layer's factors see the given examples of the global batch."""
    dense = DenseKFAC(conv_net(), DenseSettings(solver, **HYPERPARAMETERS, lr=LR))
    return [dense.step(*batch(GLOBAL_BATCH, seed=step), dict(examples_of)) for step in range(STEPS)]


def seen_by(workers: dict[str, tuple[int, ...]], world_size: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The examples of the global batch that each layer's factor workers hold."""
    share = GLOBAL_BATCH // world_size
    return tuple(
        (name, tuple(i for rank in ranks for i in range(rank * share, (rank + 1) * share)))
        for name, ranks in workers.items()
    )


@pytest.mark.parametrize(
    ("solver", "world_size"),
    # `inverse` sends and stores what `inverse_pi` does
    [*product(("eigen", "inverse_pi"), (1, 2, 3, 4)), *product(("inverse",), (1, 3))],
)
@pytest.mark.parametrize(("strategy", "extra"), STRATEGIES)
def test_gradients_equal_the_dense_reference(world, world_size, solver, strategy, extra):
    if strategy == "hybrid_opt" and world_size == 1:
        extra = {"grad_worker_fraction": 1.0}
    if strategy == "hybrid_opt" and world_size == 3:
        extra = {"grad_worker_fraction": 1 / 3}
    options = {"strategy": strategy, "solver": solver, **HYPERPARAMETERS, **extra}
    results = world(world_size).run(run_kfac, options)
    expected = reference(solver, seen_by(results[0][1], world_size))
    for history, _ in results:
        for got, want in zip(history, expected, strict=True):
            for name, value in want.items():
                error = (got[name] - value).norm() / value.norm()
                assert error < 1e-8, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("world_size", "solver", "strategy"),
    [(1, solver, STRATEGIES[0]) for solver in ("eigen", "inverse", "inverse_pi")]
    + [(4, ("eigen", "inverse_pi")[place % 2], strategy) for place, strategy in enumerate(STRATEGIES)],
)
def test_what_a_gpu_would_run_equals_the_dense_reference_on_a_cpu(world, world_size, solver, strategy):
    options = {"strategy": strategy[0], "solver": solver, **HYPERPARAMETERS, **strategy[1]}
    results = world(world_size).run(run_kfac, options, Execution.BATCHED)
    expected = reference(solver, seen_by(results[0][1], world_size))
    for history, _ in results:
        for got, want in zip(history, expected, strict=True):
            for name, value in want.items():
                error = (got[name] - value).norm() / value.norm()
                assert error < 1e-8, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s[0] != "dp_kfac"])
def test_the_world_size_has_no_effect_at_a_fixed_global_batch(world, strategy):
    name, extra = strategy
    options = {
        "strategy": name,
        "kl_clip": None,
        "factor_update_steps": 1,
        "inverse_update_steps": 2,
        **extra,
    }
    alone = {**options, "grad_worker_fraction": 1.0} if name == "hybrid_opt" else options
    (one, _), *_ = world(1).run(run_kfac, alone)
    for world_size in (2, 4):
        for many, _ in world(world_size).run(run_kfac, options):
            for got, want in zip(many, one, strict=True):
                for parameter, value in want.items():
                    assert (got[parameter] - value).norm() <= 1e-10 * value.norm(), parameter


def test_factors_equal_their_definition_including_scale():
    model = conv_net()
    x, y = batch(GLOBAL_BATCH, seed=0)
    want = factors(model, x, y)
    kfac = KFAC(model, KFACConfig(factor_decay=0.0, factor_update_steps=1, inverse_update_steps=1), lr=LR)
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    for index, (name, (a, g)) in enumerate(want.items()):
        for kind, blocks in (("a", a), ("g", g)):
            torch.testing.assert_close(
                kfac._factors.running[index, kind], torch.stack(blocks), rtol=1e-10, atol=0,
                msg=lambda text, name=name, kind=kind: f"{kind} of {name}: {text}",
            )  # fmt: skip
