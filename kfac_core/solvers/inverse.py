"""Explicit inverses: each factor damped and inverted by itself."""

import torch
from torch import Tensor

from kfac_core.placement import FactorShape


class InverseSolver:
    """(G + damping I)^-1 W (A + damping I)^-1, as SC20 compares against."""

    needs_traces = False

    def data_elements(self, factor: FactorShape) -> int:
        """The inverse."""
        return factor.elements

    def factor_damping(self, damping: float, own_mean: Tensor, other_mean: Tensor) -> Tensor | float:
        """The damping itself on both factors; the product then carries cross terms."""
        return damping

    def solve(self, factor: Tensor, damping: Tensor | float, out: Tensor) -> None:
        """Cholesky inverse of a damped copy: the running factor must not collect damping."""
        damped = factor.clone()
        damped.diagonal(dim1=-2, dim2=-1).add_(damping)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        out.view(factor.shape).copy_(inverse)

    def precondition(
        self, gradient: Tensor, a_data: Tensor, g_data: Tensor, damping: float, out: Tensor
    ) -> None:
        """The inverse of G from the left, of A from the right."""
        blocks, g_dim, a_dim = gradient.shape
        torch.matmul(g_data.view(blocks, g_dim, g_dim) @ gradient, a_data.view(blocks, a_dim, a_dim), out=out)


class InversePiSolver(InverseSolver):
    """DP-KFAC's inverse: the damping is split by pi = sqrt(mean diagonal of A / mean diagonal of G).

    A gets sqrt(damping) * pi, G gets sqrt(damping) / pi (Martens & Grosse 2015, section 6.3).
    """

    needs_traces = True

    def factor_damping(self, damping: float, own_mean: Tensor, other_mean: Tensor) -> Tensor:
        """Each factor's share is sqrt(damping) times the root of its own mean over the other's."""
        tiny = torch.finfo(own_mean.dtype).tiny
        return (damping * own_mean.clamp_min(tiny) / other_mean.clamp_min(tiny)).sqrt()
