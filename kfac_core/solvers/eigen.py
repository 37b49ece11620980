"""Inverse-free K-FAC: damp the Kronecker product itself in the joint eigenbasis (SC20, section III-B)."""

import torch
from torch import Tensor

from kfac_core.placement import FactorShape, LayerShape
from kfac_core.solvers.solver import product

SMALLEST_EIGENVALUE = 1e-10  # below it an eigenvalue is rounding noise; the released SC20 code does the same


class EigenSolver:
    """A = Qa diag(da) QaT, G = Qg diag(dg) QgT; preconditions by 1 / (dg daT + damping), exact Tikhonov."""

    needs_traces = False

    def data_elements(self, factor: FactorShape) -> int:
        """Eigenvectors and eigenvalues."""
        return factor.elements + factor.blocks * factor.dim

    def factor_damping(self, damping: float, own_mean: Tensor, other_mean: Tensor) -> float:
        """None: the product is damped when the gradient is preconditioned."""
        return 0.0

    def solve(
        self, factor: Tensor, damping: Tensor | float, last: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Eigenvectors as rows, then eigenvalues; with `last` one step of orthogonal iteration from it.

        A running mean turns slowly, so its last basis is nearly one of eigenvectors: multiplied by the factor
        and orthonormalised it is nearer, and the Rayleigh quotients are the best values for it. Source: Vyas
        et al. 2024, "SOAP", arXiv:2409.11321, section 4.2.
        """
        if factor.shape[-1] == 1:
            values, vectors = factor.flatten(), torch.ones_like(factor)
        elif last is None:
            values, vectors = torch.linalg.eigh(factor)
        else:
            before = last[: factor.numel()].to(factor.dtype).view_as(factor).mT
            vectors, _ = torch.linalg.qr(factor @ before)
            values = (vectors * (factor @ vectors)).sum(-2)
        values = values.masked_fill(values < SMALLEST_EIGENVALUE, 0.0)
        return vectors.mT, values  # LAPACK's order: columns lie one after another

    def precondition(
        self,
        gradient: Tensor,
        a_data: Tensor,
        g_data: Tensor,
        shape: LayerShape,
        damping: float,
        out: Tensor,
    ) -> None:
        """Qg ((QgT W Qa) / (dg daT + damping)) QaT."""
        (q_a, d_a), (q_g, d_g) = _views(a_data, shape.a), _views(g_data, shape.g)
        if shape.a.dim == 1 and shape.g.blocks == 1:  # A is diagonal: its eigenvectors are the tokens
            projected = gradient.squeeze(-1) @ q_g[0]
            projected /= d_a * d_g + damping
            torch.mm(projected, q_g[0].mT, out=out.squeeze(-1))
            return
        projected = torch.empty_like(out)
        product(q_g.mT, gradient, q_a, projected)
        projected /= (d_g.unsqueeze(-1) * d_a.unsqueeze(-2)).add_(damping)
        product(q_g, projected, q_a.mT, out)


def _views(data: Tensor, shape: FactorShape) -> tuple[Tensor, Tensor]:
    """Eigenvectors as columns, `[blocks, n, n]`, and eigenvalues `[blocks, n]`."""
    vectors, values = data[: shape.elements], data[shape.elements :]
    return vectors.view(shape.blocks, shape.dim, shape.dim).mT, values.view(shape.blocks, shape.dim)
