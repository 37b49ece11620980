"""Inverse-free K-FAC from the largest eigenpairs of each factor; the residual eigenvalues become their mean.

    F = Q diag(d) QT + mean (I - Q QT),    Q [n, rank], mean = (trace F - sum d) / (n - rank)

Curvature has few large eigenvalues, and eigenvalues below the damping have little effect. The data, its
exchange and the products with it shrink to rank / n; so does the decomposition with a warm start. After Puiu
2022, "Randomized K-FACs", arXiv:2206.15397.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_core.kernels.matmul import multiply
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.solvers.eigen import (
    SMALLEST_EIGENVALUE,
    Eigenbases,
    EigenSolver,
    decomposed,
    iterated,
    split_data,
)


@dataclass(frozen=True)
class Eigenpairs:
    """The largest eigenpairs of a factor.

    Attributes:
        vectors: eigenvectors as columns, `[blocks, n, kept]`; `TruncatedEigenbases` omits a single block's
            dimension.
        values: their eigenvalues, `[blocks, kept]`.
        residual: mean of the other eigenvalues, `[blocks, 1]`; None where there are none.
    """

    vectors: Tensor
    values: Tensor
    residual: Tensor | None


@dataclass(frozen=True)
class TruncatedEigenbases:
    """Both factors of a layer, at least one of them truncated; `tokens` and `diagonal` as in `Eigenbases`."""

    a: Eigenpairs
    g: Eigenpairs
    tokens: bool
    diagonal: str


class LowRankEigenSolver:
    """At most `rank` eigenpairs of each factor; smaller factors are decomposed whole."""

    needs_traces = False
    tells_condition = False
    holds_damping = False

    def __init__(self, rank: int) -> None:
        self._rank, self._whole = rank, EigenSolver()

    def eigenvalues(self, data: Tensor, shape: FactorShape) -> Tensor:
        """Not known."""
        raise NotImplementedError

    def factor_damping(self, damping: float, own_mean: Tensor, other_mean: Tensor) -> float:
        """Zero, as with all eigenpairs."""
        return 0.0

    def solve(self, factor: Tensor, damping: Tensor | float, out: Tensor, last: Tensor | None = None) -> None:
        """The largest eigenvectors as rows, their values, the residual; with `last`, by one iteration."""
        dim = factor.shape[-1]
        if dim <= self._rank:
            self._whole.solve(factor, damping, out, last)
            return
        shape = FactorShape(dim, factor.shape[0])
        if last is None:
            values, vectors = decomposed(factor)
            values, vectors = values[..., dim - self._rank :], vectors[..., dim - self._rank :]
        else:
            before = self._eigenpairs(last.to(factor.dtype), shape)
            values, vectors = iterated(factor, before.vectors, before.values)
        residual = (factor.diagonal(dim1=-2, dim2=-1).sum(-1) - values.sum(-1)) / (dim - self._rank)
        kept = self._eigenpairs(out, shape)
        kept.vectors.copy_(vectors)
        torch.cat([values, residual.unsqueeze(-1)], -1, out=out[vectors.numel() :].view(shape.blocks, -1))
        torch.threshold_(out[vectors.numel() :], SMALLEST_EIGENVALUE, 0.0)

    def solve_all(
        self, factors: Tensor, damping: Tensor | float, last: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """The largest eigenvectors as rows, their values, the residual, by one call for all factors."""
        count, dim = factors.shape[:2]
        if dim <= self._rank:
            return self._whole.solve_all(factors, damping, last)
        if last is None:
            values, vectors = decomposed(factors)
            values, vectors = values[:, dim - self._rank :], vectors[..., dim - self._rank :]
        else:
            before = self._eigenpairs(last, FactorShape(dim, count))
            values, vectors = iterated(factors, before.vectors, before.values)
        residual = (factors.diagonal(dim1=-2, dim2=-1).sum(-1) - values.sum(-1)) / (dim - self._rank)
        numbers = torch.cat([values, residual.unsqueeze(-1)], -1)
        return [vectors.mT.reshape(count, -1), torch.threshold(numbers, SMALLEST_EIGENVALUE, 0.0)], None

    def views(self, a_data: Tensor, g_data: Tensor, shape: LayerShape) -> Eigenbases | TruncatedEigenbases:
        """Both bases, in the form that `precondition` takes."""
        if max(shape.a.dim, shape.g.dim) <= self._rank:
            return self._whole.views(a_data, g_data, shape)
        a, g = self._eigenpairs(a_data, shape.a), self._eigenpairs(g_data, shape.g)
        return TruncatedEigenbases(_squeezed(a), _squeezed(g), shape.has_tokens, shape.diagonal)

    def precondition(
        self,
        gradient: Tensor,
        views: Eigenbases | TruncatedEigenbases,
        damping: Tensor,
        out: Tensor,
        noise: float = 0.0,
    ) -> None:
        """The exact inverse of `G x A + damping` for truncated factors, at the kept eigenpairs' cost."""
        if isinstance(views, Eigenbases):
            self._whole.precondition(gradient, views, damping, out)
        elif views.tokens:
            _token_rows(gradient.squeeze(-1), views.a.values.flatten(), views.g, damping, out.squeeze(-1))
        elif views.diagonal == "a":
            _token_rows(gradient.mT, views.a.values.flatten(), views.g, damping, out.mT)
        elif views.diagonal == "g":
            _token_rows(gradient, views.g.values.flatten(), views.a, damping, out)
        elif views.g.residual is None:
            _a_truncated(gradient, views.a, views.g, damping, out)
        elif views.a.residual is None:  # the same, transposed
            _a_truncated(gradient.mT, views.g, views.a, damping, out.mT)
        else:
            _both_truncated(gradient, views.a, views.g, damping, out)

    def _eigenpairs(self, data: Tensor, shape: FactorShape) -> Eigenpairs:
        kept = min(self._rank, shape.dim)
        vectors, values = split_data(data, shape, kept * shape.dim)
        columns, values = vectors.view(shape.blocks, kept, shape.dim).mT, values.view(shape.blocks, -1)
        return Eigenpairs(columns, values[:, :kept], values[:, kept:] if kept < shape.dim else None)


def _squeezed(pairs: Eigenpairs) -> Eigenpairs:
    """Without the block dimension of a single block."""
    if len(pairs.values) > 1:
        return pairs
    return Eigenpairs(
        pairs.vectors[0], pairs.values[0], None if pairs.residual is None else pairs.residual[0]
    )


def _a_truncated(gradient: Tensor, a: Eigenpairs, g: Eigenpairs, damping: Tensor, out: Tensor) -> None:
    """Only A is truncated: all directions outside its kept eigenvectors have the residual eigenvalue."""
    assert a.residual is not None  # noqa: S101  checked by the caller
    by_g, outside = multiply(g.vectors.mT, gradient), _over(g.values, a.residual, damping)
    inside = multiply(by_g, a.vectors).mul_(_over(g.values, a.values, damping).sub_(outside))
    within = by_g.mul_(outside).add_(multiply(inside, a.vectors.mT))
    out.copy_(multiply(g.vectors, within))


def _both_truncated(gradient: Tensor, a: Eigenpairs, g: Eigenpairs, damping: Tensor, out: Tensor) -> None:
    """Both are truncated: directions inside both kept subspaces, inside one of them, or inside neither."""
    assert a.residual is not None  # noqa: S101  checked by the caller
    assert g.residual is not None  # noqa: S101  checked by the caller
    by_g, by_a = multiply(g.vectors.mT, gradient), multiply(gradient, a.vectors)
    neither = _over(g.residual, a.residual, damping)
    outside_a, outside_g = _over(g.values, a.residual, damping), _over(g.residual, a.values, damping)
    kept = _over(g.values, a.values, damping).sub_(outside_a).sub_(outside_g).add_(neither)
    inside = multiply(multiply(by_g, a.vectors).mul_(kept), a.vectors.mT)
    out.copy_(multiply(g.vectors, by_g.mul_(outside_a.sub_(neither)).add_(inside)))
    out.add_(multiply(by_a.mul_(outside_g.sub_(neither)), a.vectors.mT)).add_(gradient * neither)


def _token_rows(gradient: Tensor, tokens: Tensor, g: Eigenpairs, damping: Tensor, out: Tensor) -> None:
    """A is diagonal and G truncated, or the reverse: each row has its own eigenvalue."""
    assert g.residual is not None  # noqa: S101  else nothing is truncated
    outside = _over(tokens, g.residual, damping)
    inside = multiply(gradient, g.vectors).mul_(_over(tokens, g.values, damping).sub_(outside))
    torch.add(gradient * outside, multiply(inside, g.vectors.mT), out=out)


def _over(column: Tensor, row: Tensor, damping: Tensor) -> Tensor:
    """1 / (column rowT + damping), `[blocks, len(column), len(row)]`."""
    return torch.addcmul(damping, column.unsqueeze(-1), row.unsqueeze(-2)).reciprocal_()
