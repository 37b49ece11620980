"""Symmetric matrices as one triangle, in LAPACK's rectangular full packed layout.

A triangle of an n by n matrix is two half-sized triangles and a rectangle. The two small triangles together
fill another rectangle, so packing is three block copies at memory bandwidth, without a gather, and takes
exactly n(n+1)/2 elements (Gustavson et al. 2010, ACM TOMS 37(2), "Rectangular Full Packed Format for
Cholesky's Algorithm").

    n = 2k      leading k x k block -> lower part of rows 1..k,  trailing k x k -> upper part of rows 0..k-1
    n = 2k + 1  leading (k+1) x (k+1) -> lower part,             trailing k x k -> strictly upper part

Small matrices, where operations cost more than bytes, are packed by index tables (`table`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kfac_core.grams import Gram, Rows, mirror
from kfac_core.matmul import is_plain, multiply, scratch, transposed

# ------------------------------------------------------------
# Index tables that pack small symmetric matrices in the same layout as `packing`.
#
# Block by block, a small matrix takes a dozen operations that cost more than its bytes; with a table it
# takes one `index_select`.


LARGEST = 320
"""The largest n with a table; larger tables take too much memory on every rank for what they save."""


@dataclass(frozen=True)
class Table:
    """The index table of one matrix size.

    Attributes:
        sources: index in the matrix of every packed element, `[n(n+1)/2]`.
        places: index in the packed triangle of every matrix element, `[n * n]`.
        diagonal: index in the packed triangle of the diagonal's elements, `[n]`.
    """

    sources: Tensor
    places: Tensor
    diagonal: Tensor

    def pack(self, matrices: Tensor, out: Tensor, scale: float) -> None:
        """Write one triangle of `scale * matrices` [blocks, n, n] to `out` [blocks, n(n+1)/2]."""
        flat = _flat(matrices.contiguous())
        torch.index_select(flat, -1, self.sources, out=out.squeeze(0)).mul_(scale)

    def copy(self, matrices: Tensor, out: Tensor) -> None:
        """`pack` without a scale."""
        torch.index_select(_flat(matrices.contiguous()), -1, self.sources, out=out.squeeze(0))

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write both triangles to `out` [blocks, n, n], contiguous."""
        torch.index_select(packed.squeeze(0), -1, self.places, out=_flat(out))

    def fold(self, packed: Tensor, scale: float, mean: Tensor, decay: float) -> None:
        """`mean = decay * mean + scale * matrix`, in place."""
        matrices = scratch(mean, *mean.shape)
        self.unpack(packed, matrices)
        mean.mul_(decay).add_(matrices, alpha=scale)

    def trace(self, packed: Tensor) -> Tensor:
        """Sum of the diagonals of all blocks."""
        return packed.index_select(-1, self.diagonal).sum()


def table(n: int, like: Tensor) -> Table:
    """The table for matrices of `n` rows on the device of `like`."""
    return _cached_table(n, like.device) if is_plain(like) else _make_table(n, like.device)


@cache
def _cached_table(n: int, device: torch.device) -> Table:
    with torch.inference_mode(False):  # else passes outside inference mode could not use it
        return _make_table(n, device)


def _make_table(n: int, device: torch.device) -> Table:
    half, lead, shift = n // 2, n - n // 2, 1 - n % 2
    indices = torch.arange(n, dtype=torch.int32, device=device)
    low, high = torch.minimum(indices[:, None], indices), torch.maximum(indices[:, None], indices)
    leading = (high + shift) * lead + low
    trailing = (low - lead) * lead + high - lead + 1 - shift
    across = (lead + shift) * lead + low * half + high - lead
    places = torch.where(high < lead, leading, torch.where(low >= lead, trailing, across))
    rows, columns = torch.triu_indices(n, n, device=device)
    sources = torch.empty(rows.shape, dtype=torch.int32, device=device)
    sources[places[rows, columns].long()] = (rows * n + columns).int()
    return Table(sources, places.flatten(), places.diagonal().contiguous())


def _flat(matrices: Tensor) -> Tensor:
    """`[blocks, n * n]`, or `[n * n]` for a single block, where `index_select` is faster."""
    return matrices.view(len(matrices), -1).squeeze(0)


Writer = Callable[[Tensor, int, int, int, int], None]
_STRIP = 512  # rows packed at a time: a megabyte, which stays in cache
_MIRROR_STRIP = 128  # rows or columns mirrored at a time where there are more than
_IN_CACHE = 384  # rows, of which all fit in cache


@dataclass(frozen=True)
class Packed:
    """A gram to be sent to other ranks, as a triangle `[blocks, n(n+1)/2]` of half the memory."""

    triangle: Tensor


def packed(total: Gram | Packed) -> Packed:
    """The triangle of a gram."""
    if isinstance(total, Packed):
        return total
    matrices = total.rows if isinstance(total, Rows) else total
    out = matrices.new_empty(len(matrices), packed_size(matrices.shape[-1]))
    if matrices.is_cpu or isinstance(total, Rows):
        pack(total, out)
    else:
        pack_whole(total, out)
    return Packed(out)


def packed_size(n: int) -> int:
    """Elements of one triangle of an `n` by `n` matrix, diagonal included."""
    return n * (n + 1) // 2


def pack(total: Gram | Packed, out: Tensor, scale: float = 1.0) -> None:
    """Write the triangle of symmetric `scale * total` [blocks, n, n] to `out` [blocks, n(n+1)/2], contiguous.

    `Rows` are multiplied straight into place, without the whole matrix.
    """
    if isinstance(total, Packed):
        torch.mul(total.triangle, scale, out=out)
        return
    if isinstance(total, Tensor) and total.shape[-1] <= LARGEST:
        table(total.shape[-1], total).pack(total, out, scale)
        return
    write = _writer(total, scale)
    n = total.rows.shape[-1] if isinstance(total, Rows) else total.shape[-1]
    half, lead = n // 2, n - n // 2
    rectangle, square = _split(out, half, lead)
    write(square, 0, lead, lead, n)
    shift, height = 1 - n % 2, rectangle.shape[-2]
    for start in range(0, height, _STRIP):
        stop = min(start + _STRIP, height)
        low, high = start - shift + 1, stop - shift  # columns that this strip's diagonal block covers
        write(rectangle[..., start:stop, :low], start - shift, stop - shift, 0, low)
        if stop <= half:
            write(rectangle[..., start:stop, high:], lead + start, lead + stop, lead + stop - 1, n)
        _write_diagonal_block(rectangle[..., start:stop, low:high], write, low, high, lead + start)


def pack_whole(total: Gram | Packed, out: Tensor) -> None:
    """`pack` without a scale, in the fewest operations: for a GPU, where a strip is a launch."""
    if isinstance(total, Packed):
        out.copy_(total.triangle)
        return
    assert isinstance(total, Tensor)  # noqa: S101  rows are kept on CPUs only
    n = total.shape[-1]
    if n <= LARGEST:
        table(n, total).copy(total, out)
        return
    half, lead = n // 2, n - n // 2
    rectangle, square = _split(out, half, lead)
    square.copy_(total[..., :lead, lead:])
    trailing, first = total[..., lead:, lead:].triu(), 1 - n % 2
    torch.tril(total[..., :lead, :lead], out=rectangle[..., first:, :])
    rectangle[..., :first, :].zero_()
    rectangle[..., :half, 1 - first :].add_(trailing)


def _write_diagonal_block(block: Tensor, write: Writer, low: int, high: int, start: int) -> None:
    """The trailing block's upper triangle from `start`, and below it the leading block's lower triangle."""
    width = high - low
    upper, lower = block[..., :width, :], block.new_empty(*block.shape[:-2], width, width)
    write(upper, start, start + width, start, start + width)
    write(lower, low, high, low, high)
    upper.triu_()
    block[..., width:, :].zero_()
    block[..., 1:, :] += lower.tril_()


def _writer(total: Gram, scale: float) -> Writer:
    """A function that writes rows `top` to `bottom`, columns `left` to `right` of the scaled matrix."""
    if isinstance(total, Rows):
        columns = transposed(total.rows if len(total.rows) > 1 else total.rows[0])
        scaled = columns * scale

        def fill(place: Tensor, top: int, bottom: int, left: int, right: int) -> None:
            if place.numel():
                target = place if columns.ndim > 2 else place[0]
                multiply(scaled[..., top:bottom, :], columns[..., left:right, :].mT, target)

        return fill

    def copy(place: Tensor, top: int, bottom: int, left: int, right: int) -> None:
        if place.numel():
            torch.mul(total[..., top:bottom, left:right], scale, out=place)

    return copy


def unpack(packed: Tensor, out: Tensor) -> None:
    """Write both triangles to `out` [blocks, n, n] from what `pack` wrote, `[blocks, n(n+1)/2]`."""
    if out.shape[-1] <= LARGEST:
        table(out.shape[-1], out).unpack(packed, out)
    else:
        _spread(packed, out, Tensor.copy_)


def fold_packed(packed: Tensor, scale: float, mean: Tensor, decay: float) -> None:
    """`mean = decay * mean + scale * matrix`, in place, for the matrix that `pack` wrote; both symmetric."""
    if mean.shape[-1] <= LARGEST:
        table(mean.shape[-1], mean).fold(packed, scale, mean, decay)
        return

    def put(place: Tensor, part: Tensor) -> None:
        kept = place if decay == 1.0 else place.mul_(decay)
        kept.add_(part, alpha=scale)

    _spread(packed, mean, put)


def packed_trace(packed: Tensor, n: int) -> Tensor:
    """Sum of the diagonals of all blocks of what `pack` wrote."""
    if n <= LARGEST:
        return table(n, packed).trace(packed)
    lower, upper, _ = _views(packed, n)
    return lower.diagonal(dim1=-2, dim2=-1).sum() + upper.diagonal(dim1=-2, dim2=-1).sum()


def _spread(packed: Tensor, out: Tensor, put: Callable[[Tensor, Tensor], object]) -> None:
    """`put` every part of one triangle in place and mirror the result to the other triangle.

    On a CPU in strips, so that the mirrored elements are still in cache.
    """
    n = out.shape[-1]
    lead = n - n // 2
    lower, upper, square = _views(packed, n)
    width = _MIRROR_STRIP if out.is_cpu and lead > _IN_CACHE else lead
    for start in range(0, lead, width):
        stop = min(start + width, lead)
        put(out[..., start:stop, lead:], square[..., start:stop, :])
        mirror(out[..., start:stop, lead:], out[..., lead:, start:stop])
        if start:
            put(out[..., start:stop, :start], lower[..., start:stop, :start])
            mirror(out[..., start:stop, :start], out[..., :start, start:stop])
        corner = lower[..., start:stop, start:stop].tril()
        put(out[..., start:stop, start:stop], corner + corner.tril(-1).mT)
    trailing = out[..., lead:, lead:]
    for start in range(0, n - lead, width):
        stop = min(start + width, n - lead)
        if stop < n - lead:
            put(trailing[..., start:stop, stop:], upper[..., start:stop, stop:])
            mirror(trailing[..., start:stop, stop:], trailing[..., stop:, start:stop])
        corner = upper[..., start:stop, start:stop].triu()
        put(trailing[..., start:stop, start:stop], corner + corner.triu(1).mT)


def _views(packed: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views: the leading block's lower triangle, the trailing block's upper one, the off-diagonal block.

    The triangles are squares of which only that half is valid.
    """
    half, lead = n // 2, n - n // 2
    rectangle, square = _split(packed, half, lead)
    if n % 2:
        return rectangle, rectangle[..., :half, 1:], square
    return rectangle[..., 1:, :], rectangle[..., :half, :], square


def _split(packed: Tensor, half: int, lead: int) -> tuple[Tensor, Tensor]:
    """Views: the rectangle of the two triangles, and the off-diagonal block [lead, half]."""
    height = lead if lead > half else half + 1
    rectangle = packed[..., : height * lead].unflatten(-1, (height, lead))
    return rectangle, packed[..., height * lead :].unflatten(-1, (lead, half))
