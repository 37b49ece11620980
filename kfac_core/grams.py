"""Gram matrices: sums of outer products of rows, computed at once or kept as rows.

A factor of n = 4608 from 32 rows takes 85 MB, its rows 0.6 MB. Kept as rows, it is added to the running mean
by one product that reads and writes the mean once, without another matrix of n^2 elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_core.matmul import multiply, prefers_onednn, transposed

_KEPT_RATIO = 4  # rows are kept if n is at least this many times their number
_FOUR_STRIPS, _TWO_STRIPS = 256, 64  # minimum n for four and two strips
_MIN_STRIPPED = 2**13  # minimum elements of a batch's rows for strips
_ONEDNN_MIN_N = 24  # minimum n for one oneDNN product of all rows, which needs a copy
_NARROW, _LONG = 12, 4096  # see is_thin
_COPIED = 2**20  # elements of a batch copied at a time
_STRIP_ELEMENTS = 1 << 18  # of the mean, folded at a time
_DIRECT = 2**13  # maximum elements mirrored without a transposed copy
_ONEDNN_MIN_FOLD = 2**15  # minimum elements of all rows for folding by oneDNN
_FOLD_STRIP = 128  # columns of kept rows folded at a time; needs at least half as many rows


@dataclass(frozen=True)
class Rows:
    """The sum of row rowT over `rows` [blocks, rows, n], not yet computed."""

    rows: Tensor


Gram = Tensor | Rows
"""A sum of outer products, `[blocks, n, n]`, or the rows of one."""


def gram(rows: Tensor, *, with_ones: bool = False) -> Gram:
    """The sum of row rowT over `rows` [blocks, rows, n], optionally with a one appended to each row."""
    count, n = rows.shape[1:]
    if keeps_rows(count, n):
        ones = (rows.new_ones(*rows.shape[:2], 1),) if with_ones else ()
        return Rows(torch.cat([rows, *ones], -1))  # a copy: the caller's memory may change
    product = outer_sum(rows).unsqueeze(0) if len(rows) == 1 else inner(rows.mT, rows)
    return with_bias(product, rows.sum(1), count) if with_ones else product


def squares(rows: Tensor, dtype: torch.dtype, *, with_ones: bool = False) -> Tensor:
    """The diagonal of `gram` alone, `[n, 1, 1]`, of `rows` [rows, n]."""
    total = rows.to(dtype).square().sum(0)
    if with_ones:
        total = torch.cat([total, total.new_full((1,), len(rows))])
    return total.view(-1, 1, 1)


def outer_sum(rows: Tensor) -> Tensor:
    """The sum of row rowT over all `rows` [batches, rows, n]: `[n, n]`, by a product per batch or one of all.

    On a CPU a large one is computed in strips of its upper triangle, which are mirrored to the lower one.
    """
    n = rows.shape[2]
    if n >= _ONEDNN_MIN_N and prefers_onednn(rows):
        first, *others = rows.split(max(1, _COPIED // max(1, rows[0].numel())))
        total = _column_sum(_columns(first))
        for part in others:
            total += _column_sum(_columns(part))
        return total
    if is_thin(rows):
        return inner(rows.mT, rows).sum(0)
    total = rows.new_empty(n, n)
    for start, stop in _strips_of(n, _strip_count(rows)):
        strip = total[start:stop, start:]
        torch.addbmm(strip, rows[:, :, start:stop].mT, rows[:, :, start:], beta=0, out=strip)
        mirror(strip[:, stop - start :], total[stop:, start:stop])
    return total


def _columns(rows: Tensor) -> Tensor:
    """All of `rows` [batches, rows, n] as columns `[n, batches * rows]`, contiguous."""
    if rows.is_contiguous():
        return transposed(rows.flatten(0, 1))
    return rows.permute(2, 0, 1).flatten(1).contiguous()


def _column_sum(columns: Tensor) -> Tensor:
    """The sum of column columnT over `columns` [n, count], contiguous."""
    n = len(columns)
    total = columns.new_empty(n, n)
    for start, stop in _strips_of(n, 4 if n >= _FOUR_STRIPS else 1):
        strip = multiply(columns[start:stop], columns[start:].mT, total[start:stop, start:])
        mirror(strip[:, stop - start :], total[stop:, start:stop])
    return total


def _strips_of(n: int, count: int) -> list[tuple[int, int]]:
    width = -(-n // count)
    return [(start, min(start + width, n)) for start in range(0, n, width)]


def _strip_count(rows: Tensor) -> int:
    """Strips of the upper triangle: 4 take 10/16 of the multiplications, 2 take 12/16.

    More of them (8: 9/16) are too narrow to be faster.
    """
    count, n = rows.shape[1:]
    if rows.device.type != "cpu" or n < _TWO_STRIPS or count * n < _MIN_STRIPPED:
        return 1
    return 4 if n >= _FOUR_STRIPS else 2


def is_thin(rows: Tensor) -> bool:
    """Whether a BLAS may add the products of all `rows` [..., rows, n] sequentially, which loses precision.

    MKL does so on AMD's processors for n < 12: the relative error is 1e-5 for 131,072 rows, and 5e-5 for
    524,288 of one element. In pieces of 4,096 rows it is 1e-7.
    """
    return rows.is_cpu and rows.shape[-1] < _NARROW and rows.shape[:-1].numel() > _LONG


def inner(one: Tensor, other: Tensor) -> Tensor:
    """`one` [..., n, rows] times `other` [..., rows, m], in pieces where one of them is thin."""
    count = other.shape[-2]
    if one.ndim == 3 and len(one) == 1 and min(one.shape[1], other.shape[2]) >= _ONEDNN_MIN_N:
        return multiply(one[0], other[0]).unsqueeze(0)
    if count <= _LONG or not (is_thin(one.mT) or is_thin(other)):
        return torch.matmul(one, other)
    whole = count - count % _LONG
    left = one[..., :whole].unflatten(-1, (-1, _LONG)).movedim(-2, -3)
    total = torch.matmul(left, other[..., :whole, :].unflatten(-2, (-1, _LONG))).sum(-3)
    return total + torch.matmul(one[..., whole:], other[..., whole:, :]) if whole < count else total


def keeps_rows(count: int, n: int) -> bool:
    """Whether `count` rows of n elements are kept instead of their product."""
    return count * _KEPT_RATIO <= n


def with_bias(total: Tensor, sums: Tensor, count: int) -> Tensor:
    """The gram of rows with a one appended, from the gram without, the sum of the rows and their number.

    `total` is `[blocks, n, n]`, `sums` `[blocks, n]`, the result `[blocks, n + 1, n + 1]`.
    """
    blocks, n = sums.shape
    extended = total.new_empty(blocks, n + 1, n + 1)
    extended[:, :n, :n] = total
    extended[:, n, :n] = sums
    extended[:, :n, n] = sums
    extended[:, n, n] = count
    return extended


def dense(total: Gram) -> Tensor:
    """The matrix; a gram that is already a matrix is returned unchanged."""
    return torch.matmul(total.rows.mT, total.rows) if isinstance(total, Rows) else total


def trace(total: Gram) -> Tensor:
    """Sum of the diagonals of all blocks, at least in float32, read from the diagonal or the rows only."""
    if isinstance(total, Rows):
        return total.rows.square().sum()
    return total.diagonal(dim1=-2, dim2=-1).sum(dtype=torch.promote_types(total.dtype, torch.float32))


def is_finite(total: Gram) -> Tensor:
    """Whether all elements, and the trace, are finite: a tensor on the device, from the diagonal only.

    No element of a positive semi-definite matrix exceeds the largest diagonal element, and a NaN or an
    infinity in a row appears on the diagonal.
    """
    return trace(total).isfinite()


def fold(total: Gram, scale: float, mean: Tensor, decay: float) -> None:
    """`mean = decay * mean + scale * total`, in place, reading and writing the symmetric mean once."""
    if isinstance(total, Rows):
        _fold_rows(total.rows, scale, mean, decay)
    else:
        for own, new in zip(_strips(mean), _strips(total), strict=True):  # both passes over a strip in cache
            own.mul_(decay).add_(new, alpha=scale)


def _fold_rows(rows: Tensor, scale: float, mean: Tensor, decay: float) -> None:
    """`fold` for rows. If they are many or long, it computes the upper triangle in strips and mirrors them.

    That saves half the multiplications, but reads and writes the mean by column.
    """
    blocks, count, n = rows.shape
    onednn = count * n >= _ONEDNN_MIN_FOLD and prefers_onednn(rows, mean)
    if not rows.is_cpu or blocks > 1 or (2 * count < _FOLD_STRIP and not onednn):
        mean.baddbmm_(rows.mT, rows, beta=decay, alpha=scale)
        return
    columns = transposed(rows[0])
    for start in range(0, n, _FOLD_STRIP):
        stop = start + _FOLD_STRIP
        strip = mean[0, start:stop, start:]
        if onednn:
            product = multiply(columns[start:stop] * scale, columns[start:].mT)
            torch.add(product, strip, alpha=decay, out=strip)
        else:
            strip.addmm_(columns[start:stop], rows[0, :, start:], beta=decay, alpha=scale)
        mirror(strip[:, _FOLD_STRIP:], mean[0, stop:, start:stop])


def mirror(part: Tensor, out: Tensor) -> None:
    """Copy the transpose of `part` to `out`."""
    out.copy_(transposed(part) if part.is_cpu and part.numel() > _DIRECT else part.mT)


def _strips(matrices: Tensor) -> tuple[Tensor, ...]:
    """Rows of all blocks; on a CPU in strips of about a megabyte."""
    flat = matrices.flatten(0, 1)
    if matrices.device.type != "cpu":
        return (flat,)
    return torch.split(flat, max(1, _STRIP_ELEMENTS // flat.shape[1]))
