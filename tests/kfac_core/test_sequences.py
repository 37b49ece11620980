"""Promise: token models equal their dense reference under every strategy and solver at every world size."""

from __future__ import annotations

from functools import cache

import pytest
from torch import Tensor

from tests.kfac_core.dense import DenseKFAC, DenseSettings
from tests.kfac_core.runs import GLOBAL_BATCH, LR, assert_same, build, data, run

STEPS = 3
SETTINGS = {
    "damping": 0.01, "factor_decay": 0.6, "kl_clip": 0.001,
    "factor_update_steps": 1, "inverse_update_steps": 2,
}  # fmt: skip
STRATEGIES = ["comm_opt", "mem_opt", "hybrid_opt", "dp_kfac", "mpd_kfac", "d_kfac", "spd_kfac"]


@cache
def reference(
    solver: str, sequence: str, seen: tuple[tuple[str, tuple[int, ...]], ...]
) -> list[dict[str, Tensor]]:
    dense = DenseKFAC(build("tokens"), DenseSettings(solver, **SETTINGS, lr=LR, sequence=sequence))
    return [dense.step(*data("tokens", step), dict(seen)) for step in range(STEPS)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("solver", ["eigen", "inverse", "inverse_pi"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_embeddings_and_sequences_equal_the_dense_reference(world, world_size, solver, strategy):
    sequence = "reduce" if (world_size + len(solver)) % 2 else "expand"
    options = {"strategy": strategy, "solver": solver, "sequence": sequence, **SETTINGS}
    if strategy == "hybrid_opt":
        options["grad_worker_fraction"] = 1 / world_size if world_size % 2 else 0.5
    results = world(world_size).run(run, "tokens", options, STEPS)
    share = GLOBAL_BATCH // world_size
    seen = tuple(
        (name, tuple(i for rank in ranks for i in range(rank * share, (rank + 1) * share)))
        for name, ranks in results[0][1].items()
    )
    for history, _ in results:
        for got, want in zip(history, reference(solver, sequence, seen), strict=True):
            assert_same(got, want, 1e-8)
