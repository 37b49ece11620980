"""Promise: every layer kind and option has the factors of its definition and the gradient of a dense solve.

The definition is Grosse & Martens 2016 (KFC), A = 1/(B S^2) sum a aT and G = B S sum g gT, on rows that
`dense.py` derives with autograd.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from tests.kfac_core.dense import DenseKFAC, DenseSettings, factors, supported
from tests.kfac_core.layer_cases import CASES, EXAMPLES, REDUCED, loss, module_and_batch
from tests.kfac_core.runs import assert_same

EVERY_CASE = [(name, "expand") for name in CASES] + [(name, "reduce") for name in REDUCED]
ONE_OF_A_KIND = [
    ("linear", "expand"), ("linear-two-sequence-dimensions", "expand"),
    ("linear-called-three-times", "reduce"), ("conv1d-groups-dilation", "expand"),
    ("conv-depthwise", "expand"), ("conv-called-twice", "expand"), ("conv3d-strided", "expand"),
    ("transposed2d-groups", "expand"), ("embedding-called-twice", "expand"),
    ("conv1d-of-transformers-sequence", "reduce"),
    ("conv-circular-valid-stride2-dilation1-groups2", "expand"),
]  # fmt: skip
EVERY_STEP = {"factor_update_steps": 1, "inverse_update_steps": 1}
AN_EXAMPLE_EACH = {"loss_terms": "example", **EVERY_STEP}


def factors_of(
    module: nn.Module,
    parts: list[tuple[Tensor, Tensor]],
    sequence: str,
    execution: Execution = Execution.SEQUENTIAL,
) -> dict[str, Tensor]:
    """The factors that K-FAC sees in one step, in which the batch comes in parts."""
    config = KFACConfig.sc20(factor_decay=0.0, sequence=sequence, **AN_EXAMPLE_EACH)
    kfac = KFAC(module, config, lr=0.1, execution=execution)
    for x, y in parts:
        (loss(module(x), y) * len(x) / EXAMPLES).backward()
    kfac.step()
    kfac.remove()
    names = [shape.name for shape in kfac.shapes]
    return {
        f"{names[layer]}.{kind}": torch.block_diag(*blocks)
        for (layer, kind), blocks in kfac._factors.running.items()
    }


@pytest.mark.parametrize("execution", Execution)
@pytest.mark.parametrize(("case", "sequence"), EVERY_CASE)
def test_factors_equal_their_definition(case, sequence, execution):
    module, x, y = module_and_batch(case)
    got = factors_of(module, [(x, y)], sequence, execution)
    want = factors(module, x, y, loss, sequence)
    assert {name.rpartition(".")[0] for name in got} == set(want) != set()
    for name, (a, g) in want.items():
        torch.testing.assert_close(got[f"{name}.a"], torch.block_diag(*a), rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(got[f"{name}.g"], torch.block_diag(*g), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("case", "sequence"), ONE_OF_A_KIND)
def test_the_scale_is_the_same_however_the_batch_is_split(case, sequence):
    module, x, y = module_and_batch(case)
    whole = factors_of(module, [(x, y)], sequence)
    in_parts = factors_of(module, [(x[:1], y[:1]), (x[1:], y[1:])], sequence)
    for name, factor in whole.items():
        torch.testing.assert_close(in_parts[name], factor, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("case", "shape"),
    [("linear", (3,)), ("conv1d", (2, 7)), ("conv-depthwise", (3, 3, 3)), ("embedding", ())],
)
def test_an_input_without_batch_dimension_is_one_example(case, shape):
    module, x, y = module_and_batch(case)
    batched = factors_of(module, [(x[:1], y[:1])], "expand")
    kfac = KFAC(module, KFACConfig.sc20(factor_decay=0.0, **EVERY_STEP), lr=0.1)
    assert x[0].shape == shape
    ((module(x[0]) * y[0]).square().sum() / EXAMPLES).backward()
    kfac.step()
    for kind, (name, factor) in zip("ag", batched.items(), strict=True):
        assert name.endswith(kind)
        torch.testing.assert_close(torch.block_diag(*kfac._factors.running[0, kind]), factor)


def preconditioned(
    rank: int, world_size: int, case: str, sequence: str, solver: str, relative: bool = False
) -> dict[str, Tensor]:
    module, x, y = module_and_batch(case)
    damping = {"damping": None, "relative_damping": 0.1} if relative else {"damping": 0.1}
    options = {**damping, **AN_EXAMPLE_EACH}
    config = KFACConfig.sc20(strategy="mem_opt", solver=solver, sequence=sequence, **options)
    kfac = KFAC(module, config, lr=0.1)
    share = slice(rank * EXAMPLES // world_size, (rank + 1) * EXAMPLES // world_size)
    loss(module(x[share]), y[share]).backward()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        if world_size > 1:
            dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    kfac.step()
    return {name: p.grad for name, p in trained.items()}


@cache
def dense(case: str, sequence: str, solver: str, relative: bool = False) -> dict[str, Tensor]:
    module, x, y = module_and_batch(case)
    every_step = DenseSettings(solver, 0.1, 0.95, 0.001, 1, 1, 0.1, loss, sequence, relative)
    whole_batch = {name: range(EXAMPLES) for name, _ in supported(module)}
    return DenseKFAC(module, every_step).step(x, y, whole_batch)


@pytest.mark.parametrize(("case", "sequence"), EVERY_CASE)
def test_preconditioned_gradients_equal_the_dense_solve(case, sequence):
    solver = ("eigen", "inverse", "inverse_pi")[EVERY_CASE.index((case, sequence)) % 3]
    assert_same(preconditioned(0, 1, case, sequence, solver), dense(case, sequence, solver), 1e-8)


@pytest.mark.parametrize(("case", "sequence"), ONE_OF_A_KIND)
def test_they_do_so_where_the_damping_is_relative(case, sequence):
    solver = ("inverse", "inverse_pi", "eigen")[ONE_OF_A_KIND.index((case, sequence)) % 3]
    got = preconditioned(0, 1, case, sequence, solver, relative=True)
    assert_same(got, dense(case, sequence, solver, relative=True), 1e-8)


@pytest.mark.parametrize(("case", "sequence"), ONE_OF_A_KIND)
def test_they_do_so_on_two_ranks(world, case, sequence):
    solver = ("eigen", "inverse", "inverse_pi")[ONE_OF_A_KIND.index((case, sequence)) % 3]
    for got in world(2).run(preconditioned, case, sequence, solver):
        assert_same(got, dense(case, sequence, solver), 1e-8)
