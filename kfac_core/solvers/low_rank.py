"""Inverse-free K-FAC from the largest eigenpairs of each factor alone; the rest counts as its mean.

    F = Q diag(d) QT + mean (I - Q QT),    Q [n, rank], mean = (trace F - sum d) / (n - rank)

Curvature has few large eigenvalues, and below the damping the others make no difference. The data shrinks to
rank / n of itself, and with it its exchange and the products with it; the decomposition too, where it starts
from the last basis. After Puiu 2022, "Randomized K-FACs", arXiv:2206.15397.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_core.kernels.matmul import multiply
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.solvers.eigen import SMALLEST_EIGENVALUE, Eigenbases, EigenSolver, decomposed, iterated


@dataclass(frozen=True)
class Spectrum:
    """What is kept of a factor.

    Attributes:
        vectors: eigenvectors as columns, `[blocks, n, kept]`; in `TruncatedEigenbases`, one block has no dimension.
        values: their eigenvalues, `[blocks, kept]`.
        rest: what all others count as, `[blocks, 1]`; None where there are none.
    """

    vectors: Tensor
    values: Tensor
    rest: Tensor | None


@dataclass(frozen=True)
class TruncatedEigenbases:
    """Both factors of a layer of which at least one is cut; `tokens` as in `Eigenbases`."""

    a: Spectrum
    g: Spectrum
    tokens: bool


class LowRankEigenSolver:
    """At most `rank` eigenpairs of each factor; smaller factors are decomposed whole."""

    needs_traces = False

    def __init__(self, rank: int) -> None:
        self._rank, self._whole = rank, EigenSolver()

    def factor_damping(self, damping: float, own_mean: Tensor, other_mean: Tensor) -> float:
        """None, as with all eigenpairs."""
        return 0.0

    def data_elements(self, factor: FactorShape) -> int:
        """Eigenvectors, eigenvalues and, where some are missing, the mean of the others."""
        kept = min(self._rank, factor.dim)
        return factor.blocks * (kept * factor.dim + kept + (kept < factor.dim))

    def solve(self, factor: Tensor, damping: Tensor | float, out: Tensor, last: Tensor | None = None) -> None:
        """The largest eigenvectors as rows, their values and the rest; with `last`, iterated once from it."""
        dim = factor.shape[-1]
        if dim <= self._rank:
            self._whole.solve(factor, damping, out, last)
            return
        shape = FactorShape(dim, factor.shape[0])
        if last is None:
            values, vectors = decomposed(factor)
            values, vectors = values[..., dim - self._rank :], vectors[..., dim - self._rank :]
        else:
            before = self._spectrum(last.to(factor.dtype), shape)
            values, vectors = iterated(factor, before.vectors, before.values)
        rest = (factor.diagonal(dim1=-2, dim2=-1).sum(-1) - values.sum(-1)) / (dim - self._rank)
        kept = self._spectrum(out, shape)
        kept.vectors.copy_(vectors)
        torch.cat([values, rest.unsqueeze(-1)], -1, out=out[vectors.numel() :].view(shape.blocks, -1))
        torch.threshold_(out[vectors.numel() :], SMALLEST_EIGENVALUE, 0.0)

    def views(self, a_data: Tensor, g_data: Tensor, shape: LayerShape) -> Eigenbases | TruncatedEigenbases:
        """Both bases, as `precondition` takes them."""
        if max(shape.a.dim, shape.g.dim) <= self._rank:
            return self._whole.views(a_data, g_data, shape)
        a, g = self._spectrum(a_data, shape.a), self._spectrum(g_data, shape.g)
        return TruncatedEigenbases(_alone(a), _alone(g), shape.has_tokens)

    def precondition(
        self, gradient: Tensor, views: Eigenbases | TruncatedEigenbases, damping: Tensor, out: Tensor
    ) -> None:
        """The exact inverse of `G x A + damping` of what is kept, at the cost of the kept eigenpairs."""
        if isinstance(views, Eigenbases):
            self._whole.precondition(gradient, views, damping, out)
        elif views.tokens:
            _tokens(gradient.squeeze(-1), views.a.values.flatten(), views.g, damping, out.squeeze(-1))
        elif views.g.rest is None:
            _a_cut(gradient, views.a, views.g, damping, out)
        elif views.a.rest is None:  # the same of the transposed product
            _a_cut(gradient.mT, views.g, views.a, damping, out.mT)
        else:
            _both_cut(gradient, views.a, views.g, damping, out)

    def _spectrum(self, data: Tensor, shape: FactorShape) -> Spectrum:
        kept = min(self._rank, shape.dim)
        vectors, values = data.split_with_sizes([part := shape.blocks * kept * shape.dim, len(data) - part])
        columns, values = vectors.view(shape.blocks, kept, shape.dim).mT, values.view(shape.blocks, -1)
        return Spectrum(columns, values[:, :kept], values[:, kept:] if kept < shape.dim else None)


def _alone(spectrum: Spectrum) -> Spectrum:
    """Without the dimension of blocks where there is one."""
    if len(spectrum.values) > 1:
        return spectrum
    return Spectrum(
        spectrum.vectors[0], spectrum.values[0], None if spectrum.rest is None else spectrum.rest[0]
    )


def _a_cut(gradient: Tensor, a: Spectrum, g: Spectrum, damping: Tensor, out: Tensor) -> None:
    """Beside the kept part of A there is a rest, of which every direction counts alike."""
    assert a.rest is not None  # noqa: S101  the caller has asked
    by_g, beside = multiply(g.vectors.mT, gradient), _over(g.values, a.rest, damping)
    inside = multiply(by_g, a.vectors).mul_(_over(g.values, a.values, damping).sub_(beside))
    within = by_g.mul_(beside).add_(multiply(inside, a.vectors.mT))
    out.copy_(multiply(g.vectors, within))


def _both_cut(gradient: Tensor, a: Spectrum, g: Spectrum, damping: Tensor, out: Tensor) -> None:
    """Inside both kept parts, inside one of them, inside neither: four kinds of directions."""
    assert a.rest is not None  # noqa: S101  the caller has asked
    assert g.rest is not None  # noqa: S101  likewise
    by_g, by_a = multiply(g.vectors.mT, gradient), multiply(gradient, a.vectors)
    neither = _over(g.rest, a.rest, damping)
    beside_a, beside_g = _over(g.values, a.rest, damping), _over(g.rest, a.values, damping)
    kept = _over(g.values, a.values, damping).sub_(beside_a).sub_(beside_g).add_(neither)
    inside = multiply(multiply(by_g, a.vectors).mul_(kept), a.vectors.mT)
    out.copy_(multiply(g.vectors, by_g.mul_(beside_a.sub_(neither)).add_(inside)))
    out.add_(multiply(by_a.mul_(beside_g.sub_(neither)), a.vectors.mT)).add_(gradient * neither)


def _tokens(gradient: Tensor, tokens: Tensor, g: Spectrum, damping: Tensor, out: Tensor) -> None:
    """A is diagonal and G is cut: rows `[tokens, features]`, each with its own eigenvalue of A."""
    assert g.rest is not None  # noqa: S101  else nothing is cut
    beside = _over(tokens, g.rest, damping)
    inside = multiply(gradient, g.vectors).mul_(_over(tokens, g.values, damping).sub_(beside))
    torch.add(gradient * beside, multiply(inside, g.vectors.mT), out=out)


def _over(column: Tensor, row: Tensor, damping: Tensor) -> Tensor:
    """1 / (column rowT + damping), `[blocks, len(column), len(row)]`."""
    return torch.addcmul(damping, column.unsqueeze(-1), row.unsqueeze(-2)).reciprocal_()
