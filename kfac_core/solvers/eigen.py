"""Inverse-free K-FAC: damp the Kronecker product itself in the joint eigenbasis (SC20, section III-B)."""

import torch
from torch import Tensor

from kfac_core.placement import FactorShape

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

    def solve(self, factor: Tensor, damping: Tensor | float, out: Tensor) -> None:
        """Eigenvectors, then eigenvalues."""
        vectors, values = _views(out, factor.shape[0], factor.shape[-1])
        eigenvalues, eigenvectors = torch.linalg.eigh(factor)
        vectors.copy_(eigenvectors)
        values.copy_(eigenvalues.masked_fill_(eigenvalues < SMALLEST_EIGENVALUE, 0.0))

    def precondition(
        self, gradient: Tensor, a_data: Tensor, g_data: Tensor, damping: float, out: Tensor
    ) -> None:
        """Qg ((QgT W Qa) / (dg daT + damping)) QaT."""
        blocks, g_dim, a_dim = gradient.shape
        q_a, d_a = _views(a_data, blocks, a_dim)
        q_g, d_g = _views(g_data, blocks, g_dim)
        projected = q_g.mT @ gradient @ q_a
        projected /= d_g.unsqueeze(-1) * d_a.unsqueeze(-2) + damping
        torch.matmul(q_g @ projected, q_a.mT, out=out)


def _views(data: Tensor, blocks: int, dim: int) -> tuple[Tensor, Tensor]:
    count = blocks * dim * dim
    return data[:count].view(blocks, dim, dim), data[count:].view(blocks, dim)
