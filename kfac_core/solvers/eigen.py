"""Inverse-free K-FAC: damp the Kronecker product itself in the joint eigenbasis (SC20, section III-B)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kfac_core.grams import inner
from kfac_core.matmul import multiply
from kfac_core.placement import FactorShape, LayerShape

UNRESOLVED = 1e-3
"""Where noise is removed, eigenvalues of A and G count as at least this share of it, times the largest one:
5e-10 of the largest in float32. Rounding makes smaller ones zero. A factor of unlike inputs, as of a bias
beside inputs a thousand times as large, has right ones at 1e-8 of the largest."""

SMALLEST_EIGENVALUE = 1e-10
"""Below it an eigenvalue is rounding noise, as in the released SC20 code; a relative damping has no such."""

REFINED = 0.2
"""Largest residual of a refined basis, as a share of the factor's norm; beyond it, a factor is decomposed. On
ResNet-8 that is one in twenty, early in training; at 0.1 it was one in four, for an error a sixth smaller."""

_SHIFT = 1e-4  # of the largest eigenvalue, added as a basis is refined: what a factor hardly has stays

_MISFIT = 0.01  # of the norms of factor and basis: far above rounding, even that of TF32

_UPPER_FROM = 256  # rows, from which on MKL reduces an upper triangle faster than a lower one


@dataclass(frozen=True)
class Eigenbases:
    """Views of a layer's second-order data; the leading dimension is missing where there is one block.

    Attributes:
        q_a: eigenvectors of A as columns, `[blocks, n, n]`.
        q_at: the same as rows, kept to save a transpose per step.
        d_a: eigenvalues of A as a row, `[blocks, 1, n]`; with `tokens`, as a column.
        q_g: eigenvectors of G as columns.
        q_gt: the same as rows.
        d_g: eigenvalues of G as a column; with `tokens`, as a row.
        tokens: A is diagonal, its blocks the rows of one matrix: an embedding.
        diagonal: the factors that are too large for a basis, as `LayerShape.diagonal`.
    """

    q_a: Tensor
    q_at: Tensor
    d_a: Tensor
    q_g: Tensor
    q_gt: Tensor
    d_g: Tensor
    tokens: bool
    diagonal: str = ""


class EigenSolver:
    """A = Qa diag(da) QaT, G = Qg diag(dg) QgT; preconditions by 1 / (dg daT + damping), exact Tikhonov."""

    needs_traces = False
    tells_condition = True
    holds_damping = False

    def __init__(self, smallest: float = SMALLEST_EIGENVALUE) -> None:
        self.smallest = smallest

    def factor_damping(self, damping: float, own_mean: Tensor, other_mean: Tensor) -> float:
        """Zero: the product is damped when the gradient is preconditioned."""
        return 0.0

    def solve(self, factor: Tensor, damping: Tensor | float, out: Tensor, last: Tensor | None = None) -> None:
        """Eigenvectors as rows, then eigenvalues; with `last`, by refinement of it where that is enough."""
        shape = FactorShape(factor.shape[-1], factor.shape[0])
        vectors, values = _columns(out, shape)
        if shape.dim == 1:
            vectors.fill_(1.0)
            values.copy_(factor.view_as(values))
        elif last is None or not _refined_to(
            factor, _columns(last.to(factor.dtype), shape)[0], vectors, values
        ):
            decomposed(factor, out=(values, vectors))  # LAPACK writes contiguous columns in place
        torch.threshold_(values, self.smallest, 0.0)

    def solve_all(
        self, factors: Tensor, damping: Tensor | float, last: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Eigenvectors as rows, and eigenvalues, by one call for all factors."""
        failed = None
        if factors.shape[-1] == 1:
            vectors, values = torch.ones_like(factors), factors.flatten(1)
        elif last is None:
            values, vectors = decomposed(factors)
            failed = _misfits(factors, values, vectors)
        else:
            before, _ = _columns(last, FactorShape(factors.shape[-1], len(factors)))
            values, vectors, failed = refined(factors, before, by_products=True)
        return [vectors.mT.reshape(len(factors), -1), torch.threshold(values, self.smallest, 0.0)], failed

    def views(self, a_data: Tensor, g_data: Tensor, shape: LayerShape) -> Eigenbases:
        """Both bases, in the form that `precondition` takes."""
        (q_a, d_a), (q_g, d_g) = _columns(a_data, shape.a), _columns(g_data, shape.g)
        if shape.diagonal:
            return Eigenbases(
                q_a[0], q_a[0].mT, d_a.view(1, -1), q_g[0], q_g[0].mT, d_g.view(-1, 1),
                tokens=False, diagonal=shape.diagonal,
            )  # fmt: skip
        if shape.has_tokens:
            return Eigenbases(q_a, q_a.mT, d_a, q_g[0], q_g[0].mT, d_g, tokens=True)
        d_a, d_g = d_a.unsqueeze(-2), d_g.unsqueeze(-1)
        if shape.a.blocks == 1:
            q_a, d_a, q_g, d_g = q_a[0], d_a[0], q_g[0], d_g[0]
        return Eigenbases(q_a, q_a.mT, d_a, q_g, q_g.mT, d_g, tokens=False)

    def eigenvalues(self, data: Tensor, shape: FactorShape) -> Tensor:
        """Those in second-order data, of all blocks."""
        return _columns(data, shape)[1].flatten()

    def mean_eigenvalue(self, data: Tensor, shape: FactorShape) -> Tensor:
        """Over all blocks."""
        return _columns(data, shape)[1].mean()

    def precondition(
        self, gradient: Tensor, views: Eigenbases, damping: Tensor, out: Tensor, noise: float = 0.0
    ) -> None:
        """Qg ((QgT W Qa) / (dg daT + damping)) QaT."""
        if views.tokens:  # the eigenvectors of a diagonal A are the tokens
            projected = multiply(gradient.squeeze(-1), views.q_g)
            projected = _divided(projected, views.d_a, views.d_g, damping, noise)
            multiply(projected, views.q_gt, out.squeeze(-1))
            return
        if views.diagonal:
            _precondition_diagonal(gradient, views, damping, out, noise)
            return
        projected = multiply(multiply(views.q_gt, gradient), views.q_a)
        d_g, d_a = (_resolved(values, noise) if noise else values for values in (views.d_g, views.d_a))
        projected = _divided(projected, d_g, d_a, damping, noise)
        multiply(multiply(views.q_g, projected), views.q_at, out)


def _precondition_diagonal(
    gradient: Tensor, views: Eigenbases, damping: Tensor, out: Tensor, noise: float
) -> None:
    """The same where the eigenvectors of A, of G or of both are the unit vectors."""
    projected = gradient if "g" in views.diagonal else multiply(views.q_gt, gradient)
    projected = projected if "a" in views.diagonal else multiply(projected, views.q_a)
    if "a" in views.diagonal and "g" in views.diagonal:
        projected = projected.clone()  # the gradient itself
    projected = _divided(projected, views.d_g, views.d_a, damping, noise)
    projected = projected if "g" in views.diagonal else multiply(views.q_g, projected)
    out.copy_(projected if "a" in views.diagonal else multiply(projected, views.q_at))


def _resolved(values: Tensor, noise: float) -> Tensor:
    """Eigenvalues of factors, `[..., 1, n]` or `[..., n, 1]`, none far below the rounding of the largest.

    A running mean keeps small curvature of old batches, which rounding makes zero. The gradient is small
    there, but no rounding noise, and would be divided by the damping alone.
    """
    return torch.maximum(values, values.amax((-2, -1), keepdim=True) * (noise * UNRESOLVED))


def _divided(projected: Tensor, first: Tensor, second: Tensor, damping: Tensor, noise: float) -> Tensor:
    """A gradient in the eigenbases over the damped eigenvalues of the product.

    Where the factors have no rank the gradient has none either. What rounding leaves of it there would be
    divided by the damping alone, and so coefficients below `noise` times the norm count as zero.
    """
    if noise:
        size = torch.linalg.matrix_norm(projected, keepdim=True)
        projected = projected.masked_fill(projected.abs() < noise * size, 0.0)
    return projected.div_(torch.addcmul(damping, first, second))


def decomposed(factor: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[blocks, n]` and eigenvectors as columns of the symmetric `factor` [blocks, n, n].

    LAPACK needs contiguous columns: passing the transpose makes that copy fast.
    """
    upper = factor.shape[-1] >= _UPPER_FROM and factor.device.type == "cpu"
    values, vectors = torch.linalg.eigh(factor.mT, UPLO="U" if upper else "L", out=out)
    return values, vectors


def refined(factor: Tensor, vectors: Tensor, *, by_products: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """One step of orthogonal iteration from eigenvectors of an earlier factor, `[blocks, n, kept]`.

    A running mean changes slowly, so its last eigenbasis is a good start. Multiplication by the factor and
    orthonormalisation improve it; Rayleigh quotients are its best eigenvalues. Source: Vyas et al. 2024,
    "SOAP", arXiv:2409.11321, section 4.2.

    Columns are sorted by decreasing eigenvalue: a column is made orthogonal to those before it, so a small
    eigenvector in front would soon turn towards the largest.

    Args:
        factor: `[blocks, n, n]`, not modified.
        vectors: the earlier ones as columns.
        by_products: orthonormalise by two passes of Cholesky, which a GPU does for all blocks at once and
            which suffice because the columns, of length one each, are nearly orthogonal; else by QR.

    Returns:
        Values `[blocks, kept]`, vectors, and of each block whether it must be decomposed instead: the factor
        has changed too much, is zero or is not finite.
    """
    products = inner(factor, vectors)
    values = (vectors * products).sum(-2, keepdim=True)
    products = products.add_(vectors * values.amax(-1, keepdim=True), alpha=_SHIFT)
    order = values.argsort(-1, descending=True)
    vectors = functional.normalize(products.take_along_dim(order, -1), dim=-2)
    status: Tensor | int = 0
    for _ in range(2 if by_products else 0):
        lower, failed = torch.linalg.cholesky_ex(inner(vectors.mT, vectors))
        vectors = torch.linalg.solve_triangular(lower.mT, vectors, upper=True, left=False)
        status = status + failed
    if not by_products:
        vectors, _ = torch.linalg.qr(vectors)
    products = inner(factor, vectors)
    values = (vectors * products).sum(-2)
    residual = torch.linalg.matrix_norm(torch.addcmul(products, vectors, values.unsqueeze(-2), value=-1))
    failed = (residual <= REFINED * torch.linalg.matrix_norm(products)).logical_not_()
    return values, vectors, failed | (status != 0)


def _misfits(factors: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Which decompositions are none, `[blocks]`: vectors that are not orthonormal, or not the factor's.

    Batched decompositions of some libraries return such in silence, and those of single matrices do not:
    cuSOLVER 11.7.1.2 (pytorch/pytorch#192483), rocSOLVER (ROCm/rocm-libraries#9118). It costs two
    products, hardly anything beside the decomposition.
    """
    products = inner(factors, vectors)
    residual = torch.linalg.matrix_norm(torch.addcmul(products, vectors, values.unsqueeze(-2), value=-1))
    overlaps = inner(vectors.mT, vectors)
    overlaps.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    fits: Tensor = residual <= _MISFIT * torch.linalg.matrix_norm(factors)
    upright: Tensor = torch.linalg.matrix_norm(overlaps) <= _MISFIT * math.sqrt(vectors.shape[-1])
    return (fits & upright).logical_not_()


def _refined_to(factor: Tensor, before: Tensor, vectors: Tensor, values: Tensor) -> bool:
    """Whether refinement of `before` is enough; its results are then in `vectors` and `values`."""
    better, turned, failed = refined(factor, before)
    if failed.any():
        return False
    values.copy_(better)
    vectors.copy_(turned)
    return True


def _columns(data: Tensor, shape: FactorShape) -> tuple[Tensor, Tensor]:
    """Eigenvectors as columns, `[blocks, n, n]`, and eigenvalues `[blocks, n]`."""
    vectors, values = split_data(data, shape, shape.dim * shape.dim)
    return vectors.view(shape.blocks, shape.dim, shape.dim).mT, values.view(shape.blocks, shape.dim)


def split_data(data: Tensor, shape: FactorShape, elements: int) -> tuple[Tensor, Tensor]:
    """Second-order data as its first `elements` a block, and the rest.

    The data of one factor are flat, first all blocks' first part; those of several factors `[blocks,
    elements]`.
    """
    first = elements if data.ndim == 2 else shape.blocks * elements
    return data[..., :first], data[..., first:]


# ------------------------------------------------------------
# Inverse-free K-FAC from the largest eigenpairs of each factor; the residual eigenvalues become their
# mean.
#
#     F = Q diag(d) QT + mean (I - Q QT),    Q [n, rank], mean = (trace F - sum d) / (n - rank)
#
# Curvature has few large eigenvalues, and eigenvalues below the damping have little effect. The data, its
# exchange and the products with it shrink to rank / n; so does the decomposition with a warm start. After
# Puiu 2022, "Randomized K-FACs", arXiv:2206.15397.


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

    def __init__(self, rank: int, smallest: float = SMALLEST_EIGENVALUE) -> None:
        self._rank, self._whole = rank, EigenSolver(smallest)

    def eigenvalues(self, data: Tensor, shape: FactorShape) -> Tensor:
        """Not known."""
        raise NotImplementedError

    def mean_eigenvalue(self, data: Tensor, shape: FactorShape) -> Tensor:
        """Over all blocks, those outside the kept eigenpairs included."""
        pairs = self._eigenpairs(data, shape)
        whole = pairs.values.sum(-1)
        if pairs.residual is not None:
            whole = whole + pairs.residual.squeeze(-1) * (shape.dim - pairs.values.shape[-1])
        return whole.mean() / shape.dim

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
        failed = last is None
        if last is not None:
            before = self._eigenpairs(last.to(factor.dtype), shape)
            values, vectors, refused = refined(factor, before.vectors)
            failed = bool(refused.any())
        if failed:
            values, vectors = self._largest(factor)
        residual = (factor.diagonal(dim1=-2, dim2=-1).sum(-1) - values.sum(-1)) / (dim - self._rank)
        kept = self._eigenpairs(out, shape)
        kept.vectors.copy_(vectors)
        torch.cat([values, residual.unsqueeze(-1)], -1, out=out[vectors.numel() :].view(shape.blocks, -1))
        torch.threshold_(out[vectors.numel() :], self._whole.smallest, 0.0)

    def solve_all(
        self, factors: Tensor, damping: Tensor | float, last: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """The largest eigenvectors as rows, their values, the residual, by one call for all factors."""
        count, dim = factors.shape[:2]
        if dim <= self._rank:
            return self._whole.solve_all(factors, damping, last)
        if last is None:
            values, vectors = self._largest(factors)
            failed = _misfits(factors, values, vectors)
        else:
            before = self._eigenpairs(last, FactorShape(dim, count))
            values, vectors, failed = refined(factors, before.vectors, by_products=True)
        residual = (factors.diagonal(dim1=-2, dim2=-1).sum(-1) - values.sum(-1)) / (dim - self._rank)
        numbers = torch.cat([values, residual.unsqueeze(-1)], -1)
        return [vectors.mT.reshape(count, -1), torch.threshold(numbers, self._whole.smallest, 0.0)], failed

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

    def _largest(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = decomposed(factor)
        return values[..., -self._rank :], vectors[..., -self._rank :]

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
