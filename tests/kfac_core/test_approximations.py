"""Promise: each approximation is what it says: part of the batch, a warm basis, few eigenpairs, a diagonal.

`eigen_rank` is exact K-FAC for factors whose smaller eigenvalues are replaced by their mean; beyond
`max_factor_dim` a factor is its diagonal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.placement.balance import CUBIC
from kfac_core.placement.placement import data_elements
from kfac_core.solvers import solver_of
from kfac_core.solvers.eigen import EigenSolver, refined
from tests.kfac_core.dense import as_matrix, factors, has_trained_bias, solve
from tests.kfac_core.layer_cases import loss, module_and_batch
from tests.kfac_core.runs import LR, assert_same, build, run, solved, train


def small_conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, stride=2), nn.Flatten(), nn.Linear(27, 5)
    ).double()


def running_after(batch: int, **options: Any) -> dict[Any, torch.Tensor]:
    """Running factors after one step on the first `batch` of 8 examples, their loss a mean over the 8."""
    model = small_conv_net()
    kfac = KFAC(model, KFACConfig.sc20(factor_update_steps=1, inverse_update_steps=1, **options), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 2, 8, 8, dtype=torch.float64, generator=generator)
    labels = torch.arange(8) % 5
    functional.cross_entropy(model(images[:batch]), labels[:batch]).backward()
    kfac.step()
    return kfac._factors.running


@pytest.mark.parametrize(("fraction", "examples"), [(0.5, 4), (0.01, 1), (1.0, 8)])
def test_part_of_the_batch_gives_the_factors_of_a_batch_of_that_part(fraction, examples):
    part, whole = running_after(8, factor_batch_fraction=fraction), running_after(examples)
    for key, factor in part.items():
        torch.testing.assert_close(factor, whole[key], rtol=1e-12, atol=1e-14)


SPECTRA = {
    "falling": 2.0 ** -torch.arange(12.0), "rank 1": [1.0] + [0.0] * 11, "equal": [3.0] * 12,
    "zero": [0.0] * 12, "equal, then none": [2.0] * 6 + [0.0] * 6, "wide": torch.logspace(4, -12, 12),
}  # fmt: skip


def turned(spectrum: str, share: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Data of a factor of these eigenvalues, and a factor whose basis and values differ by about `share`."""
    torch.manual_seed(0)
    values = torch.as_tensor(SPECTRA[spectrum]).double()
    basis = torch.linalg.qr(torch.randn(1, 12, 12).double())[0]
    turn = torch.matrix_exp(share * (noise := torch.randn(1, 12, 12).double() / 12**0.5) - share * noise.mT)
    later = (turn @ basis) * (values * (1 + share)) @ (turn @ basis).mT
    return torch.cat([basis.mT.flatten(), values]).to(dtype), later.to(dtype)


def parts(data: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors as columns, and values."""
    return data[:-12].view(12, 12).T, data[-12:]


@pytest.mark.parametrize("by_products", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_a_refined_basis_is_one_of_orthogonal_iteration(spectrum, dtype, limit, by_products):
    """Both ways to it; what neither can refine is left to a decomposition."""
    data, factor = turned(spectrum, 0.03, dtype)
    before, exact = parts(data)[0].double(), factor[0].double()
    (values,), (vectors,), failed = refined(factor, before.to(dtype).unsqueeze(0), by_products=by_products)
    if failed:
        assert spectrum == "zero"
        return
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(12, dtype=dtype), rtol=0, atol=1e-5)
    kept = (before * (exact @ before)).sum(0)
    if spectrum == "falling":  # else the basis is not unique to rounding
        before = before[:, kept.argsort(descending=True)]
        want, _ = torch.linalg.qr(exact @ before + 1e-4 * kept.max() * before)
        cosines = (vectors.double() * want).sum(0).abs()
        torch.testing.assert_close(cosines, torch.ones(12).double(), rtol=0, atol=limit)
    size = exact.norm().clamp_min(1e-30)
    error = (vectors * values @ vectors.T - factor[0]).norm() / size
    was = (parts(data)[0].double() * kept @ parts(data)[0].double().T - exact).norm() / size
    assert error <= 0.6 * was + 1e-6


def test_refined_bases_converge_on_a_constant_factor():
    data, factor = turned("falling", 0.03, torch.float64)
    errors = []
    for _ in range(60):
        data = solved(KFACConfig(), factor, last=data)
        vectors, values = parts(data)
        errors.append(float((vectors * values @ vectors.T - factor).norm() / factor.norm()))
    assert errors[0] > 1e-4
    assert errors[-1] < 1e-10


@pytest.mark.parametrize("last", ["of another factor", "not finite"])
def test_what_changed_too_much_is_decomposed(last):
    data, factor = turned("falling", 1.0, torch.float64)
    if last == "not finite":
        data[:] = float("nan")
    assert torch.equal(solved(KFACConfig(), factor, last=data), solved(KFACConfig(), factor))
    near, _ = turned("falling", 0.0, torch.float64)
    nearly = turned("falling", 0.03, torch.float64)[1]
    failed = EigenSolver().solve_all(torch.cat([nearly, factor]), 0.0, torch.stack([near, data]))[1]
    assert failed.tolist() == [False, True]


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
    config = KFACConfig.sc20(eigen_rank=rank)
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
    for part, seed, one in ((shape.a, 1, data[0]), (shape.g, 2, data[1])):  # what a relative damping is of
        mean = factor(part, seed).diagonal(dim1=-2, dim2=-1).mean()
        torch.testing.assert_close(solver.mean_eigenvalue(one, part), mean)


@pytest.mark.parametrize("dim", [4, 5, 30])
def test_the_data_has_the_documented_size_and_is_smaller_than_full_data(dim):
    shape, config = FactorShape(dim, 2), KFACConfig.sc20(eigen_rank=4)
    data = solved(config, factor(shape, 0), DAMPING)
    assert data.isfinite().all(), "written whole"
    assert data.numel() == data_elements(config, shape)
    assert data_elements(config, shape) <= data_elements(KFACConfig.sc20(), shape)


def test_iteration_from_the_last_basis_finds_the_largest_eigenpairs():
    shape = FactorShape(12)
    matrix, other = factor(shape, 3), factor(shape, 4)
    config = KFACConfig.sc20(eigen_rank=4)
    data = solved(config, other, DAMPING)
    for _ in range(40):
        data = solved(config, matrix, DAMPING, last=data)
    values = torch.linalg.eigvalsh(matrix[0])
    torch.testing.assert_close(data[-5:-1].sort().values, values[-4:], rtol=1e-10, atol=0.0)
    torch.testing.assert_close(data[-1], values[:-4].mean(), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize(
    ("strategy", "start", "world_size"),
    [("comm_opt", "warm", 2), ("mem_opt", "cold", 4), ("mpd_kfac", "warm", 4)],
)
def test_many_ranks_step_as_one_does(strategy, start, world_size, world):
    options = {**OPTIONS, "eigen_rank": 3, "eigen_start": start}
    want, _ = run(0, 1, "mlp", options, STEPS)
    for history, _ in world(world_size).run(run, "mlp", {**options, "strategy": strategy}, STEPS):
        for got, expected in zip(history, want, strict=True):
            assert_same(got, expected, 1e-10)


def test_a_saved_state_of_another_eigen_rank_is_solved_again():
    def start(**options: Any) -> tuple[nn.Module, KFAC]:
        model = build("mlp")
        return model, KFAC(model, KFACConfig.sc20(**{**OPTIONS, "inverse_update_steps": 5} | options), lr=LR)

    model, kfac = start(eigen_rank=2)
    train(model, kfac, "mlp", [0])
    for rank, again in ((2, False), (None, True), (3, True)):
        _, other = start(eigen_rank=rank)
        other.load_state_dict(kfac.state_dict())
        assert other._must_solve == again


NOW = {"factor_decay": 0.0, "factor_update_steps": 1, "inverse_update_steps": 1, "loss_terms": "example"}
BOTH, ONE = 1, {  # a bound below both factors, and one between them
    "linear": (2, "a"), "linear-no-bias": (2, "a"), "linear-sequence": (2, "a"), "conv-1x1": (2, "a"),
    "conv1d": (4, "a"), "conv1d-circular": (3, "a"), "conv3d": (4, "a"), "transposed2d": (4, "a"),
    "conv1d-of-transformers": (3, "a"), "wide": (3, "g"),
}  # fmt: skip


def case_of(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    if name != "wide":
        return module_and_batch(name)
    torch.manual_seed(0)
    module, x = nn.Linear(2, 7).double(), torch.randn(4, 2, dtype=torch.float64)
    return module, x, torch.randn(4, 7, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "bound", "execution"),
    [*((name, "one", list(Execution)[place % 2]) for place, name in enumerate(ONE)),
     ("linear", "both", Execution.BATCHED), ("conv1d", "both", Execution.SEQUENTIAL)],
)  # fmt: skip
def test_a_factor_beyond_the_bound_is_the_diagonal_of_the_dense_one(name, bound, execution):
    largest, kinds = ONE[name] if bound == "one" else (BOTH, "ag")
    module, x, y = case_of(name)
    kfac = KFAC(module, KFACConfig.sc20(**NOW, max_factor_dim=largest), lr=0.1, execution=execution)
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


@pytest.mark.parametrize(
    ("name", "largest", "solver", "rank", "execution"),
    [
        ("linear", 2, "eigen", None, Execution.SEQUENTIAL), ("conv1d", 4, "eigen", 2, Execution.BATCHED),
        ("wide", 3, "inverse", None, Execution.SEQUENTIAL), ("wide", 3, "eigen", 2, Execution.SEQUENTIAL),
        ("linear", 1, "inverse_pi", None, Execution.BATCHED), ("linear", 1, "eigen", None, Execution.BATCHED),
        ("wide", 3, "inverse", None, Execution.BATCHED),
        ("conv1d", 4, "inverse_pi", None, Execution.SEQUENTIAL),
    ],
)  # fmt: skip
def test_the_step_is_that_of_the_dense_system_with_the_diagonal(name, largest, solver, rank, execution):
    module, x, y = case_of(name)
    options = {"solver": solver, "eigen_rank": rank, "damping": 0.1, "kl_clip": None}
    kfac = KFAC(
        module, KFACConfig.sc20(**NOW, **options, max_factor_dim=largest), lr=0.1, execution=execution
    )
    loss(module(x), y).backward()
    gradient = matrix_of(module)
    kfac.step()
    kfac.remove()
    a, g = (factor_of(kfac, kind, rank) for kind in "ag")
    means = float(a.diagonal().mean()), float(g.diagonal().mean())
    want = solve(solver, 0.1, a, g, gradient, means)
    assert (matrix_of(module) - want).norm() <= 1e-8 * want.norm()


def matrix_of(module: nn.Module) -> Tensor:
    weight = as_matrix(module, module.weight.grad)
    if has_trained_bias(module):
        weight = torch.cat([weight, module.bias.grad[:, None]], 1)
    return weight.clone()


def factor_of(kfac: KFAC, kind: str, rank: int | None) -> Tensor:
    """A or G as a matrix, with the mean in the place of the eigenvalues that `eigen_rank` leaves out."""
    whole = torch.block_diag(*kfac._factors.running[0, kind])
    if rank is None or kind in kfac.shapes[0].diagonal or len(whole) <= rank:
        return whole
    return truncated(whole, rank)


def test_costs_and_memory_are_those_of_a_dense_factor_and_of_a_diagonal():
    words, width = 30_522, 768
    head = LayerShape("head", FactorShape(width + 1), FactorShape(words))
    bounded = head.bounded(8192)
    assert bounded.gradient_elements == head.gradient_elements == words * (width + 1)
    assert CUBIC.inverse(head.g) == float(words) ** 3
    assert CUBIC.inverse(bounded.g) == words
    config = KFACConfig.sc20()
    assert data_elements(config, head.g) == words**2 + words
    assert data_elements(config, bounded.g) == 2 * words


def test_the_default_bound_leaves_every_factor_of_the_conv_nets_and_of_bert_large_dense():
    assert KFACConfig.sc20().max_factor_dim == 8192
    for rows in (4608, 4097):  # ResNet-50, BERT-large
        shape = LayerShape("layer", FactorShape(rows), FactorShape(1024))
        assert shape.bounded(8192) == shape
