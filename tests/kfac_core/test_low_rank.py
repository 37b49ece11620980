"""Promise: `eigen_rank` is exact K-FAC for factors whose smaller eigenvalues are replaced by their mean."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.placement.placement import data_elements
from kfac_core.solvers import solver_of
from tests.kfac_core.dense import solve
from tests.kfac_core.runs import assert_same, run, solved

DAMPING, STEPS = 0.05, 4
OPTIONS: dict[str, Any] = {"damping": 0.01, "factor_update_steps": 1, "inverse_update_steps": 1}
SHAPES = {  # against a rank of 4: which of both factors is truncated
    "a": LayerShape("one", FactorShape(9), FactorShape(3)),
    "g": LayerShape("one", FactorShape(4), FactorShape(7)),
    "both": LayerShape("one", FactorShape(9), FactorShape(6)),
    "neither": LayerShape("one", FactorShape(4), FactorShape(4)),
    "groups": LayerShape("one", FactorShape(9, 2), FactorShape(6, 2)),
    "tokens": LayerShape("one", FactorShape(1, 5), FactorShape(6)),
}


def factor(shape: FactorShape, seed: int) -> Tensor:
    rows = torch.randn(shape.blocks, 3 * shape.dim, shape.dim, generator=torch.Generator().manual_seed(seed))
    rows = rows.double() * 2.0 ** -torch.arange(shape.dim)  # no two eigenvalues alike
    return rows.mT @ rows / rows.shape[1]


def truncated(matrix: Tensor, rank: int) -> Tensor:
    """`matrix` with all eigenvalues but the largest `rank` replaced by their mean."""
    values, vectors = torch.linalg.eigh(matrix)
    if rank < len(values):
        values[:-rank] = values[:-rank].mean()
    return vectors * values @ vectors.T


@pytest.mark.parametrize("name", SHAPES)
def test_a_gradient_is_preconditioned_by_the_dense_system_of_truncated_factors(name):
    shape, rank = SHAPES[name], 4
    config = KFACConfig(eigen_rank=rank)
    solver = solver_of(config)
    a, g = factor(shape.a, 1), factor(shape.g, 2)
    gradient = torch.randn(shape.a.blocks, shape.g.dim, shape.a.dim, dtype=torch.float64)
    data = [solved(config, each, DAMPING) for each in (a, g)]
    out = torch.empty_like(gradient)
    before = gradient.clone()
    views, damping = solver.views(*data, shape), torch.tensor(DAMPING, dtype=torch.float64)
    matrix = shape.gradient_shape
    solver.precondition(gradient.view(matrix), views, damping, out.view(matrix))
    g = g.expand(shape.a.blocks, -1, -1)
    want = [
        solve("eigen", DAMPING, truncated(one_a, rank), truncated(one_g, rank), w, (1.0, 1.0))
        for one_a, one_g, w in zip(a, g, gradient, strict=True)
    ]
    torch.testing.assert_close(out, torch.stack(want), rtol=1e-10, atol=1e-12)
    assert torch.equal(gradient, before), "the gradient must not change"


@pytest.mark.parametrize("dim", [1, 4, 5, 30])
def test_the_data_has_the_documented_size_and_is_smaller_than_full_data(dim):
    shape, config = FactorShape(dim, 2), KFACConfig(eigen_rank=4)
    data = solved(config, factor(shape, 0), DAMPING)
    assert data.isfinite().all(), "written whole"
    assert data.numel() == data_elements(config, shape)
    assert data_elements(config, shape) <= data_elements(KFACConfig(), shape)


def test_iteration_from_the_last_basis_finds_the_largest_eigenpairs():
    shape = FactorShape(12)
    matrix, other = factor(shape, 3), factor(shape, 4)
    config = KFACConfig(eigen_rank=4)
    data = solved(config, other, DAMPING)
    for _ in range(40):
        data = solved(config, matrix, DAMPING, last=data)
    values = torch.linalg.eigvalsh(matrix[0])
    torch.testing.assert_close(data[-5:-1].sort().values, values[-4:], rtol=1e-10, atol=0.0)
    torch.testing.assert_close(data[-1], values[:-4].mean(), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("strategy", ["comm_opt", "mem_opt", "mpd_kfac", "spd_kfac"])
@pytest.mark.parametrize("start", ["cold", "warm"])
def test_many_ranks_step_as_one_does(strategy, start, world):
    options = {**OPTIONS, "eigen_rank": 3, "eigen_start": start}
    ((want, _),) = world(1).run(run, "mlp", options, STEPS)
    for size in (2, 4):
        for history, _ in world(size).run(run, "mlp", {**options, "strategy": strategy}, STEPS):
            for got, expected in zip(history, want, strict=True):
                assert_same(got, expected, 1e-10)


def test_a_rank_as_large_as_every_factor_changes_nothing_and_a_small_one_does():
    (whole, _), (large, _), (small, _) = (
        run(0, 1, "mlp", {**OPTIONS, "eigen_rank": rank}, STEPS) for rank in (None, 1000, 1)
    )
    assert_same(large[-1], whole[-1], 1e-12)
    assert any((small[-1][name] - value).norm() > 1e-3 * value.norm() for name, value in whole[-1].items())


def test_a_saved_state_of_another_eigen_rank_is_solved_again():
    def start(**options: Any) -> tuple[nn.Module, KFAC]:
        torch.manual_seed(0)
        model = nn.Linear(6, 5).double()
        return model, KFAC(
            model, KFACConfig(factor_update_steps=1, inverse_update_steps=5, **options), lr=0.1
        )

    def step(model: nn.Module, kfac: KFAC) -> Tensor:
        model.zero_grad()
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        functional.cross_entropy(model(x), torch.arange(8) % 5).backward()
        kfac.step()
        weight = model.get_parameter("weight").grad
        assert weight is not None
        return weight.clone()

    model, kfac = start(eigen_rank=2)
    step(model, kfac)
    state = kfac.state_dict()
    other_model, other = start()
    other.load_state_dict(state)
    assert not torch.allclose(step(other_model, other), step(model, kfac))
    same_model, same = start(eigen_rank=2)
    same.load_state_dict(state)
    torch.testing.assert_close(step(same_model, same), step(*_after_one(start(eigen_rank=2), step)))


def _after_one(pair: tuple[nn.Module, KFAC], step: Any) -> tuple[nn.Module, KFAC]:
    step(*pair)
    return pair


@pytest.mark.parametrize(
    "options", [{"eigen_rank": 0}, {"eigen_rank": 1.5}, {"eigen_rank": 8, "solver": "inverse"}]
)
def test_invalid_eigen_ranks_are_errors(options):
    with pytest.raises(ConfigError, match="eigen_rank="):
        KFACConfig(**options)
