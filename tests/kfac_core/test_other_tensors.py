"""Promise: sparse and jagged inputs have the factors of the same rows in a dense tensor; others are named."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution

ROWS = torch.tensor([3, 1, 5])
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors"
)


class Tokens(nn.Module):
    """Words in, scores of each word out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.words(ids)))
        return scores


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False))


def stepped(
    model: nn.Module, x: Tensor, execution: Execution, terms: str | None, stated: float | None = None
) -> tuple[KFAC, list[Tensor]]:
    model = copy.deepcopy(model)
    config = KFACConfig.sc20(factor_decay=0.0, kl_clip=None, damping=0.01, loss_terms=terms)
    kfac = KFAC(model, config, execution=execution)
    if stated is not None:
        kfac.set_loss_terms(stated)
    scores = model(x)
    rows = scores.values() if scores.is_nested else scores
    (rows * torch.linspace(1, 2, rows.numel(), dtype=rows.dtype).view_as(rows)).square().mean().backward()
    kfac.step()
    return kfac, [parameter.grad for parameter in model.parameters()]


def assert_alike(
    model: nn.Module, odd: Tensor, dense: Tensor, execution: Execution, terms: str | None
) -> None:
    torch.manual_seed(0)
    kfac, gradients = stepped(model, odd, execution, terms)
    # of jagged examples in a dense tensor of rows K-FAC cannot know the number
    stated = float(len(ROWS)) if odd.is_nested and terms == "example" else None
    want, same = stepped(model, dense, execution, terms, stated)
    for key, factor in want._factors.running.items():
        torch.testing.assert_close(kfac._factors.running[key], factor, rtol=1e-10, atol=1e-16)
    for got, right in zip(gradients, same, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("execution", Execution)
@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_a_sparse_input_has_the_factors_of_a_dense_one(sparse: Callable[[Tensor], Tensor], execution):
    torch.manual_seed(0)
    x = torch.randn(8, 4, dtype=torch.float64).relu()
    assert_alike(perceptron().double(), sparse(x), x, execution, "example")


@pytest.mark.parametrize("execution", Execution)
@pytest.mark.parametrize("terms", ["token", "example", None])
@pytest.mark.parametrize("make", [perceptron, Tokens])
def test_a_jagged_input_has_the_factors_of_its_rows(make, terms, execution):
    torch.manual_seed(0)
    total = int(ROWS.sum())
    words, features = torch.randint(0, 9, (total,)), torch.randn(total, 4, dtype=torch.float64)
    rows = words if make is Tokens else features
    jagged = torch.nested.nested_tensor(list(rows.split(ROWS.tolist())), layout=torch.jagged)
    assert_alike(make().double(), jagged, rows, execution, terms)


def test_a_nested_input_without_a_dense_form_leaves_its_layers_plain_by_name():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)])
    kfac = KFAC(model, KFACConfig.sc20(kl_clip=None))
    torch.nested.to_padded_tensor(model(nested), 0.0).square().mean().backward()
    with pytest.warns(RuntimeWarning, match=r"no statistics of 0, 2 .* another layout than torch.jagged"):
        kfac.step()
