"""Sums of outer products, computed at once or kept as the rows that they are made of.

A factor of n = 4608 fed by 32 rows is 85 MB made of 0.6 MB. Kept as rows it is folded into the running mean
by one product that reads and writes the mean once, and no other matrix of n^2 elements is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_core.kernels.matmul import is_compiled, multiply
from kfac_core.kernels.transpose import transposed

_FEW = 4  # rows are kept if n is at least so many times their number
_LARGE, _MIDDLE = 256, 64  # elements of a row, from which on four and two strips are faster
_LEAST_PRODUCT = 2**13  # elements of a batch's rows, below which none are
_COMPILED = 24  # elements of a row, from which on the product of all is worth a copy
_NARROW, _LONG = 12, 4096  # see is_thin
_COPIED = 2**20  # elements of a batch that are copied at once
_DIRECT = 2**13  # elements that are copied across the diagonal one by one: their two copies would take longer
_COMPILED_FOLD = 2**15  # elements of all rows, from which on oneDNN folds them as fast as BLAS or faster
_FOLDED = 128  # columns of kept rows that are folded at once; worth it from half as many rows on


@dataclass(frozen=True)
class Rows:
    """The sum of row rowT over `rows` [blocks, rows, n], not computed yet."""

    rows: Tensor


Gram = Tensor | Rows
"""A sum of outer products, `[blocks, n, n]`, or its rows."""


def gram(rows: Tensor, *, with_ones: bool = False) -> Gram:
    """The sum of row rowT over `rows` [blocks, rows, n], with a one appended to each row on request."""
    count, n = rows.shape[1:]
    if keeps_rows(count, n):
        ones = (rows.new_ones(*rows.shape[:2], 1),) if with_ones else ()
        return Rows(torch.cat([rows, *ones], -1))  # a copy: the caller's memory may change
    product = outer_sum(rows).unsqueeze(0) if len(rows) == 1 else inner(rows.mT, rows)
    return with_bias(product, rows.sum(1), count) if with_ones else product


def outer_sum(rows: Tensor) -> Tensor:
    """The sum of row rowT over all `rows` [batches, rows, n]: `[n, n]`, a product a batch or one of all.

    On a CPU a large one is made in strips of its upper triangle, which are copied to the lower one.
    """
    n = rows.shape[2]
    if n >= _COMPILED and is_compiled(rows):
        first, *others = rows.split(max(1, _COPIED // max(1, rows[0].numel())))
        total = _of_columns(_columns(first))
        for part in others:
            total += _of_columns(_columns(part))
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


def _of_columns(columns: Tensor) -> Tensor:
    """The sum of column columnT over `columns` [n, count], contiguous."""
    n = len(columns)
    total = columns.new_empty(n, n)
    for start, stop in _strips_of(n, 4 if n >= _LARGE else 1):
        strip = multiply(columns[start:stop], columns[start:].mT, total[start:stop, start:])
        mirror(strip[:, stop - start :], total[stop:, start:stop])
    return total


def _strips_of(n: int, count: int) -> list[tuple[int, int]]:
    width = -(-n // count)
    return [(start, min(start + width, n)) for start in range(0, n, width)]


def _strip_count(rows: Tensor) -> int:
    """Strips that a sum is made in: 4 take 10/16 of the multiplications, 2 take 12/16.

    They take 0.67 to 0.83 of the time at 256 and 512 columns, 0.81 to 0.93 at 64 to 192. More
    of them (8: 9/16) are too narrow to be any faster.
    """
    count, n = rows.shape[1:]
    if rows.device.type != "cpu" or n < _MIDDLE or count * n < _LEAST_PRODUCT:
        return 1
    return 4 if n >= _LARGE else 2


def is_thin(rows: Tensor) -> bool:
    """Whether a BLAS may add up the products of all `rows` [..., rows, n] one after another.

    MKL does on AMD's processors where n is below 12: 131,072 rows come out 1e-5 beside the exact sum, and
    524,288 of one element 5e-5. In pieces of 4,096 it is 1e-7.
    """
    return rows.is_cpu and rows.shape[-1] < _NARROW and rows.shape[:-1].numel() > _LONG


def inner(one: Tensor, other: Tensor) -> Tensor:
    """`one` [..., n, rows] times `other` [..., rows, m], in pieces where one of them is thin."""
    count = other.shape[-2]
    if one.ndim == 3 and len(one) == 1 and min(one.shape[1], other.shape[2]) >= _COMPILED:
        return multiply(one[0], other[0]).unsqueeze(0)
    if count <= _LONG or not (is_thin(one.mT) or is_thin(other)):
        return torch.matmul(one, other)
    whole = count - count % _LONG
    left = one[..., :whole].unflatten(-1, (-1, _LONG)).movedim(-2, -3)
    total = torch.matmul(left, other[..., :whole, :].unflatten(-2, (-1, _LONG))).sum(-3)
    return total + torch.matmul(one[..., whole:], other[..., whole:, :]) if whole < count else total


def keeps_rows(count: int, n: int) -> bool:
    """Whether so many rows of n elements are worth keeping in place of their product."""
    return count * _FEW <= n


def with_bias(total: Tensor, sums: Tensor, count: int) -> Tensor:
    """The gram of rows with a one appended, from that without, the sums of the rows and their number.

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
    """The matrix; a gram that is one already is returned as it is."""
    return torch.matmul(total.rows.mT, total.rows) if isinstance(total, Rows) else total


def trace(total: Gram) -> Tensor:
    """Sum of the diagonals of all blocks, of float16 ones in float32, from n elements or the rows only."""
    if isinstance(total, Rows):
        return total.rows.square().sum()
    return total.diagonal(dim1=-2, dim2=-1).sum(dtype=torch.promote_types(total.dtype, torch.float32))


def is_finite(total: Gram) -> Tensor:
    """Whether all elements, and their trace, are finite numbers, on the device, from the diagonal only.

    No element of a positive semi-definite matrix is larger than the largest of its diagonal, and a NaN or an
    infinity in a row reaches the diagonal.
    """
    return trace(total).isfinite()


def fold(total: Gram, scale: float, mean: Tensor, decay: float) -> None:
    """`mean = decay * mean + scale * total`, in place, reading and writing the symmetric mean once."""
    if isinstance(total, Rows):
        _fold_rows(total.rows, scale, mean, decay)
    else:
        for own, new in zip(_strips(mean), _strips(total), strict=True):  # both passes of a strip in cache
            own.mul_(decay).add_(new, alpha=scale)


def _fold_rows(rows: Tensor, scale: float, mean: Tensor, decay: float) -> None:
    """The same for rows; of large or many the upper triangle only, in strips that are mirrored.

    That is half the multiplications, but a mean that is read and written by column.
    """
    blocks, count, n = rows.shape
    compiled = count * n >= _COMPILED_FOLD and is_compiled(rows, mean)
    if not rows.is_cpu or blocks > 1 or (2 * count < _FOLDED and not compiled):
        mean.baddbmm_(rows.mT, rows, beta=decay, alpha=scale)
        return
    columns = transposed(rows[0])
    for start in range(0, n, _FOLDED):
        stop = start + _FOLDED
        strip = mean[0, start:stop, start:]
        if compiled:
            product = multiply(columns[start:stop] * scale, columns[start:].mT)
            torch.add(product, strip, alpha=decay, out=strip)
        else:
            strip.addmm_(columns[start:stop], rows[0, :, start:], beta=decay, alpha=scale)
        mirror(strip[:, _FOLDED:], mean[0, stop:, start:stop])


def mirror(part: Tensor, out: Tensor) -> None:
    """Copy the transpose of `part` to `out`."""
    out.copy_(transposed(part) if part.is_cpu and part.numel() > _DIRECT else part.mT)


def _strips(matrices: Tensor) -> tuple[Tensor, ...]:
    """Rows of all blocks in strips of about a megabyte on a CPU."""
    flat = matrices.flatten(0, 1)
    if matrices.device.type != "cpu":
        return (flat,)
    return torch.split(flat, max(1, _STRIP_ELEMENTS // flat.shape[1]))


_STRIP_ELEMENTS = 1 << 18
