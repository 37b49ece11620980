"""Promise: beyond `max_factor_dim` a factor is its diagonal, exactly, and costs what a diagonal costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from kfac_core.errors import ConfigError
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.placement.balance import CUBIC
from kfac_core.placement.placement import data_elements
from tests.kfac_core.dense import as_matrix, solve
from tests.kfac_core.layer_cases import loss, module_and_batch
from tests.kfac_core.per_example import factors, has_trained_bias

NOW = {"factor_decay": 0.0, "factor_update_steps": 1, "inverse_update_steps": 1, "loss_terms": "example"}
BOTH, ONE = 1, {  # a bound below both factors, and one between them
    "linear": (2, "a"), "linear-no-bias": (2, "a"), "linear-sequence": (2, "a"), "conv-1x1": (2, "a"),
    "conv1d": (4, "a"), "conv1d-circular": (3, "a"), "conv3d": (4, "a"), "transposed2d": (4, "a"),
    "conv1d-of-transformers": (3, "a"), "wide": (3, "g"),
}  # fmt: skip
SOLVERS = [("eigen", None), ("eigen", 2), ("inverse", None), ("inverse_pi", None)]


def case_of(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    if name != "wide":
        return module_and_batch(name)
    torch.manual_seed(0)
    module, x = nn.Linear(2, 7).double(), torch.randn(4, 2, dtype=torch.float64)
    return module, x, torch.randn(4, 7, dtype=torch.float64)


@pytest.mark.parametrize("execution", Execution)
@pytest.mark.parametrize("bound", ["one", "both"])
@pytest.mark.parametrize("name", ONE)
def test_a_factor_beyond_the_bound_is_the_diagonal_of_the_dense_one(name, bound, execution):
    largest, kinds = ONE[name] if bound == "one" else (BOTH, "ag")
    module, x, y = case_of(name)
    kfac = KFAC(module, KFACConfig(**NOW, max_factor_dim=largest), lr=0.1, execution=execution)
    loss(module(x), y).backward()
    gradient = matrix_of(module)
    kfac.step()
    kfac.remove()
    assert kfac.shapes[0].diagonal == kinds
    (dense,) = factors(module, x, y, loss).values()
    for kind, (want,) in zip("ag", dense, strict=True):
        got = torch.block_diag(*kfac._factors.running[0, kind])
        torch.testing.assert_close(
            got, want.diagonal().diag() if kind in kinds else want, rtol=1e-10, atol=1e-13
        )
    assert gradient.shape == kfac.shapes[0].gradient_shape


@pytest.mark.parametrize("execution", Execution)
@pytest.mark.parametrize(("solver", "rank"), SOLVERS)
@pytest.mark.parametrize(
    ("name", "largest"), [(n, ONE[n][0]) for n in ("linear", "conv1d", "wide")] + [("linear", 1)]
)
def test_the_step_is_that_of_the_dense_system_with_the_diagonal(name, largest, solver, rank, execution):
    module, x, y = case_of(name)
    options = {"solver": solver, "eigen_rank": rank, "damping": 0.1, "kl_clip": None}
    kfac = KFAC(module, KFACConfig(**NOW, **options, max_factor_dim=largest), lr=0.1, execution=execution)
    loss(module(x), y).backward()
    gradient = matrix_of(module)
    kfac.step()
    kfac.remove()
    a, g = (factor(kfac, kind, rank) for kind in "ag")
    means = float(a.diagonal().mean()), float(g.diagonal().mean())
    want = solve(solver, 0.1, a, g, gradient, means)
    assert (matrix_of(module) - want).norm() <= 1e-8 * want.norm()


def matrix_of(module: nn.Module) -> Tensor:
    weight = as_matrix(module, module.weight.grad)
    if has_trained_bias(module):
        weight = torch.cat([weight, module.bias.grad[:, None]], 1)
    return weight.clone()


def factor(kfac: KFAC, kind: str, rank: int | None) -> Tensor:
    """A or G as a matrix, with the mean in the place of the eigenvalues that `eigen_rank` leaves out."""
    whole = torch.block_diag(*kfac._factors.running[0, kind])
    if rank is None or kind in kfac.shapes[0].diagonal or len(whole) <= rank:
        return whole
    values, vectors = torch.linalg.eigh(whole)
    values[:-rank] = values[:-rank].mean()
    return vectors * values @ vectors.T


def test_costs_and_memory_are_those_of_a_dense_factor_and_of_a_diagonal():
    words, width = 30_522, 768
    head = LayerShape("head", FactorShape(width + 1), FactorShape(words))
    bounded = head.bounded(8192)
    assert bounded.gradient_elements == head.gradient_elements == words * (width + 1)
    assert CUBIC.inverse(head.g) == float(words) ** 3
    assert CUBIC.inverse(bounded.g) == words
    config = KFACConfig()
    assert data_elements(config, head.g) == words**2 + words
    assert data_elements(config, bounded.g) == 2 * words


def test_the_default_bound_leaves_every_factor_of_the_conv_nets_and_of_bert_large_dense():
    assert KFACConfig().max_factor_dim == 8192
    for rows in (4608, 4097):  # ResNet-50, BERT-large
        shape = LayerShape("layer", FactorShape(rows), FactorShape(1024))
        assert shape.bounded(8192) == shape


@pytest.mark.parametrize("value", [0, True, 1.5])
def test_other_bounds_are_refused(value):
    with pytest.raises(ConfigError, match="max_factor_dim"):
        KFACConfig(max_factor_dim=value)
