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
from torch import Tensor
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from tests.kfac_core.dense import DenseKFAC, DenseSettings, factors
from tests.kfac_core.nets import batch, conv_net
from tests.kfac_core.runs import GLOBAL_BATCH, LR, assert_same, build, data, run

STEPS = 4
HYPERPARAMETERS = {
    "damping": 0.01, "factor_decay": 0.6, "kl_clip": 0.001,
    "factor_update_steps": 1, "inverse_update_steps": 2,
}  # fmt: skip
NAMES: dict[str, dict[str, Any]] = {
    "comm_opt": {}, "mem_opt": {}, "hybrid_opt": {"grad_worker_fraction": 0.5}, "mpd_kfac": {}, "d_kfac": {},
    "spd_kfac": {}, "dp_kfac": {},
}  # fmt: skip
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    *NAMES.items(),
    ("comm_opt", {"assignment": "round_robin"}),
    ("mem_opt", {"assignment": "round_robin"}),
    ("comm_opt", {"split_factors": "when_ranks_exceed_layers"}),
    ("dp_kfac", {"assignment": "balanced"}),
]
Seen = tuple[tuple[str, tuple[int, ...]], ...]


@cache
def reference(
    solver: str, seen: Seen, net: str = "conv", sequence: str = "expand", relative: bool = False
) -> list[dict[str, Tensor]]:
    """Gradients of every step when each layer's factors see the given examples of the global batch."""
    settings = DenseSettings(solver, **HYPERPARAMETERS, lr=LR, sequence=sequence, relative_damping=relative)
    dense = DenseKFAC(build(net), settings)
    return [dense.step(*data(net, step), dict(seen)) for step in range(STEPS)]


def seen_by(workers: dict[str, tuple[int, ...]], world_size: int) -> Seen:
    """The examples of the global batch that each layer's factor workers hold."""
    share = GLOBAL_BATCH // world_size
    return tuple(
        (name, tuple(i for rank in ranks for i in range(rank * share, (rank + 1) * share)))
        for name, ranks in workers.items()
    )


def assert_equals_the_reference(
    ranks: Any, net: str, world_size: int, execution: Execution | None = None, **options: Any
) -> None:
    if options["strategy"] == "hybrid_opt":
        options["grad_worker_fraction"] = 1 / world_size if world_size % 2 else 0.5
    results = ranks(world_size).run(run, net, HYPERPARAMETERS | options, STEPS, execution)
    seen = seen_by(results[0][1], world_size)
    expected = reference(
        options["solver"], seen, net, options.get("sequence", "expand"),
        "relative_damping" in options,
    )  # fmt: skip
    for history, _ in results:
        for got, want in zip(history, expected, strict=True):
            assert_same(got, want, 1e-8)


@pytest.mark.parametrize(
    ("solver", "world_size"), [*product(("eigen", "inverse"), (1, 4)), ("inverse_pi", 3)]
)
@pytest.mark.parametrize(("strategy", "extra"), STRATEGIES)
def test_gradients_equal_the_dense_reference(world, world_size, solver, strategy, extra):
    assert_equals_the_reference(world, "conv", world_size, strategy=strategy, solver=solver, **extra)


@pytest.mark.parametrize(
    ("world_size", "strategy", "solver", "sequence"),
    [
        (1, "comm_opt", "eigen", "reduce"), (1, "comm_opt", "inverse_pi", "expand"),
        (2, "comm_opt", "eigen", "expand"), (4, "mem_opt", "inverse", "reduce"),
        (3, "hybrid_opt", "inverse_pi", "expand"), (4, "hybrid_opt", "eigen", "reduce"),
        (4, "mpd_kfac", "inverse", "expand"), (4, "d_kfac", "eigen", "reduce"),
        (4, "spd_kfac", "inverse_pi", "reduce"), (4, "dp_kfac", "eigen", "expand"),
    ],
)  # fmt: skip
def test_gradients_of_embeddings_and_sequences_do_too(world, world_size, strategy, solver, sequence):
    options = {"strategy": strategy, "solver": solver, "sequence": sequence}
    assert_equals_the_reference(world, "tokens", world_size, **options)


@pytest.mark.parametrize(
    ("world_size", "solver", "strategy"),
    [(1, "eigen", "comm_opt"), (1, "inverse", "comm_opt"), (1, "inverse_pi", "comm_opt")]
    + [(4, ("eigen", "inverse_pi")[place % 2], strategy) for place, strategy in enumerate(NAMES)],
)
def test_what_a_gpu_would_run_equals_the_dense_reference_on_a_cpu(world, world_size, solver, strategy):
    extra = NAMES[strategy]
    assert_equals_the_reference(
        world, "conv", world_size, Execution.BATCHED, strategy=strategy, solver=solver, **extra
    )


@pytest.mark.parametrize("execution", list(Execution))
@pytest.mark.parametrize("net", ["conv", "tokens"])
@pytest.mark.parametrize("solver", ["eigen", "inverse", "inverse_pi"])
def test_a_damping_relative_to_the_mean_curvature_does_too(world, net, solver, execution):
    options = {"solver": solver, "damping": None, "relative_damping": HYPERPARAMETERS["damping"]}
    for world_size, strategy in ((1, "comm_opt"), (2, "mem_opt")):
        assert_equals_the_reference(world, net, world_size, execution, strategy=strategy, **options)


@pytest.mark.parametrize("strategy", [name for name in NAMES if name != "dp_kfac"])
def test_the_world_size_has_no_effect_at_a_fixed_global_batch(world, strategy):
    options = {"strategy": strategy, **HYPERPARAMETERS, **NAMES[strategy]}
    one, _ = run(0, 1, "conv", {**HYPERPARAMETERS, "strategy": "comm_opt"}, STEPS)
    for world_size in (2, 4):
        for many, _ in world(world_size).run(run, "conv", options, STEPS):
            for got, want in zip(many, one, strict=True):
                assert_same(got, want, 1e-10)


@pytest.mark.parametrize("change", [{}, {"solver": "inverse"}, {"execution": Execution.BATCHED}])
@pytest.mark.parametrize("net", ["conv", "mlp"])
def test_nor_has_it_with_the_default_start_scale_and_damping(world, net, change):
    defaults = {"factor_start": "mean", "grafting": True, "damping": None, "relative_damping": 0.3}
    options = {**HYPERPARAMETERS, **defaults, "kl_clip": None, **change}
    execution = options.pop("execution", None)
    one, _ = run(0, 1, net, options, STEPS, execution)
    for strategy in ("comm_opt", "mem_opt"):
        for many, _ in world(2).run(run, net, {**options, "strategy": strategy}, STEPS, execution):
            for got, want in zip(many, one, strict=True):
                assert_same(got, want, 1e-9)


def test_factors_equal_their_definition_including_scale():
    model = conv_net()
    x, y = batch(GLOBAL_BATCH, seed=0)
    want = factors(model, x, y)
    kfac = KFAC(
        model, KFACConfig.sc20(factor_decay=0.0, factor_update_steps=1, inverse_update_steps=1), lr=LR
    )
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    for index, (name, (a, g)) in enumerate(want.items()):
        for kind, blocks in (("a", a), ("g", g)):
            torch.testing.assert_close(
                kfac._factors.running[index, kind], torch.stack(blocks), rtol=1e-10, atol=0,
                msg=lambda text, name=name, kind=kind: f"{kind} of {name}: {text}",
            )  # fmt: skip
