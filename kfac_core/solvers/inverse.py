"""Explicit inverses: each factor is damped and inverted by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_core.matmul import multiply
from kfac_core.placement import FactorShape, LayerShape


@dataclass(frozen=True)
class Inverses:
    """Views of a layer's second-order data; the leading dimension is missing where there is one block.

    Attributes:
        a: inverse of A, `[blocks, n, n]`; with `tokens`, of its diagonal, as a column.
        g: inverse of G.
        tokens: A is diagonal, its blocks the rows of one matrix: an embedding.
        diagonal: the factors of which `a` or `g` is the inverse diagonal, as `LayerShape.diagonal`.
    """

    a: Tensor
    g: Tensor
    tokens: bool
    diagonal: str = ""


class InverseSolver:
    """(G + damping I)^-1 W (A + damping I)^-1, the baseline in SC20."""

    needs_traces = False
    tells_condition = False
    holds_damping = True

    def eigenvalues(self, data: Tensor, shape: FactorShape) -> Tensor:
        """Not known."""
        raise NotImplementedError

    def mean_eigenvalue(self, data: Tensor, shape: FactorShape) -> Tensor:
        """Not known."""
        raise NotImplementedError

    def factor_damping(self, damping: float, own_mean: Tensor, other_mean: Tensor) -> Tensor | float:
        """The damping itself on both factors; the product then carries cross terms."""
        return damping

    def solve(self, factor: Tensor, damping: Tensor | float, out: Tensor, last: Tensor | None = None) -> None:
        """Cholesky inverse of a damped copy: the running factor must not accumulate damping."""
        damped = out.view(factor.shape).copy_(factor)
        damped.diagonal(dim1=-2, dim2=-1).add_(damping)
        if factor.shape[-1] == 1:
            damped.reciprocal_()
            return
        columns = damped.mT  # LAPACK's order, so that it works in place without a copy
        torch.linalg.cholesky(columns, out=columns)
        torch.cholesky_inverse(columns, out=columns)

    def solve_all(
        self, factors: Tensor, damping: Tensor | float, last: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """L^-T L^-1 for A = L LT: `cholesky_inverse` would wait for the device, these do not."""
        count, dim = factors.shape[:2]
        damped = factors.clone()
        damped.diagonal(dim1=-2, dim2=-1).add_(
            damping.unsqueeze(-1) if isinstance(damping, Tensor) else damping
        )
        if dim == 1:
            return [damped.reciprocal_().flatten(1)], None
        lower, status = torch.linalg.cholesky_ex(damped)
        identity = torch.eye(dim, dtype=damped.dtype, device=damped.device).expand_as(damped)
        inverted = torch.linalg.solve_triangular(lower, identity, upper=False)
        return [torch.bmm(inverted.mT, inverted).view(count, -1)], status != 0

    def views(self, a_data: Tensor, g_data: Tensor, shape: LayerShape) -> Inverses:
        """Both inverses, in the form that `precondition` takes."""
        if shape.diagonal:
            a = a_data.view(1, -1) if "a" in shape.diagonal else a_data.view(shape.a.dim, -1)
            g = g_data.view(-1, 1) if "g" in shape.diagonal else g_data.view(shape.g.dim, -1)
            return Inverses(a, g, tokens=False, diagonal=shape.diagonal)
        g_inverse = g_data.view(shape.g.blocks, shape.g.dim, shape.g.dim)
        if shape.has_tokens:
            return Inverses(a_data.unsqueeze(-1), g_inverse[0], tokens=True)
        a_inverse = a_data.view(shape.a.blocks, shape.a.dim, shape.a.dim)
        if shape.a.blocks > 1:
            return Inverses(a_inverse, g_inverse, tokens=False)
        return Inverses(a_inverse[0], g_inverse[0], tokens=False)

    def precondition(
        self, gradient: Tensor, views: Inverses, damping: Tensor, out: Tensor, noise: float = 0.0
    ) -> None:
        """Multiply by the inverse of G from the left and of A from the right."""
        if views.tokens:
            multiply(gradient.squeeze(-1), views.g.mT, out.squeeze(-1)).mul_(views.a)
            return
        if views.diagonal:
            by_g = gradient * views.g if "g" in views.diagonal else multiply(views.g, gradient)
            out.copy_(by_g * views.a if "a" in views.diagonal else multiply(by_g, views.a.mT))
            return
        multiply(multiply(views.g, gradient), views.a.mT, out)  # A = A.mT, which has contiguous columns


class InversePiSolver(InverseSolver):
    """DP-KFAC's inverse, with damping split by pi = sqrt(mean diagonal of A / mean diagonal of G).

    A gets sqrt(damping) * pi, G gets sqrt(damping) / pi (Martens & Grosse 2015, section 6.3).
    """

    needs_traces = True

    def factor_damping(self, damping: float, own_mean: Tensor, other_mean: Tensor) -> Tensor:
        """sqrt(damping * own_mean / other_mean)."""
        tiny = torch.finfo(own_mean.dtype).tiny
        return (damping * own_mean.clamp_min(tiny) / other_mean.clamp_min(tiny)).sqrt()
