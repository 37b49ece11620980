"""Promise: products in TF32 change a preconditioned gradient by what the option says, at every condition.

TF32 rounds what a product multiplies to 11 bits. Here a dispatch mode does so to the operands of the products
that a solver issues, and the reference is a solve in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_core import KFACConfig
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.solvers import solver_of
from tests.kfac_core.runs import solved

N, DAMPING = 96, 1e-3
SHAPE = LayerShape("one", FactorShape(N), FactorShape(N))
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm}


class Tf32(TorchDispatchMode):
    """Rounds the operands of products to the nearest number of 11 bits, as tensor cores do."""

    rounded = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS and args[0].dtype == torch.float32:
            self.rounded += 1
            args = tuple(to_11_bits(each) for each in args)
        return func(*args, **(kwargs or {}))


def to_11_bits(operand: Tensor) -> Tensor:
    return ((operand.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def factors_of(condition: float) -> tuple[Tensor, Tensor, Tensor]:
    """A, G and a gradient as a mini-batch has it: its variance along an eigenvector is the eigenvalue."""
    torch.manual_seed(0)
    values = (condition * DAMPING) ** 0.5 * torch.logspace(0, -6, N, dtype=torch.float64)
    bases = [torch.linalg.qr(torch.randn(N, N, dtype=torch.float64))[0] for _ in range(2)]
    a, g = ((basis * values @ basis.T).unsqueeze(0) for basis in bases)
    seen = values.sqrt().unsqueeze(1) * torch.randn(N, N, dtype=torch.float64) * values.sqrt()
    return a, g, bases[1] @ seen @ bases[0].T


def preconditioned(solver: str, condition: float, dtype: torch.dtype) -> Tensor:
    a, g, gradient = (each.to(dtype) for each in factors_of(condition))
    config = KFACConfig(solver=solver, damping=DAMPING)
    damping = 0.0 if solver == "eigen" else DAMPING**0.5
    views = solver_of(config).views(solved(config, a, damping), solved(config, g, damping), SHAPE)
    out = torch.empty_like(gradient)
    solver_of(config).precondition(gradient, views, torch.tensor(DAMPING, dtype=dtype), out)
    return out.double()


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("condition", [1e1, 1e2, 1e3, 1e4, 1e5, 1e6])
def test_the_error_of_tf32_is_within_its_bound(solver, condition):
    exact = preconditioned(solver, condition, torch.float64)
    with Tf32() as mode:
        got = preconditioned(solver, condition, torch.float32)
    assert mode.rounded >= 2
    error = float((got - exact).norm() / exact.norm())
    assert 1e-5 < error < 2**-11 * condition**0.5
