"""Symmetric matrices as one triangle, in LAPACK's rectangular full packed layout.

A triangle of an n by n matrix is two half-sized triangles and a rectangle. Laid against each other the two
small triangles fill a rectangle too, so packing is three block copies at memory speed: no index tables, no
gather, and exactly n(n+1)/2 elements (Gustavson et al. 2010, ACM TOMS 37(2), "Rectangular Full Packed
Format for Cholesky's Algorithm").

    n = 2k      leading k x k block -> lower part of rows 1..k,  trailing k x k -> upper part of rows 0..k-1
    n = 2k + 1  leading (k+1) x (k+1) -> lower part,             trailing k x k -> strictly upper part
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kfac_core.grams import Gram, Rows

Writer = Callable[[Tensor, int, int, int, int], None]
_STRIP = 512  # rows that are packed at once: a megabyte, which stays in the cache


def packed_size(n: int) -> int:
    """Elements of one triangle of an `n` by `n` matrix, diagonal included."""
    return n * (n + 1) // 2


def pack(total: Gram, out: Tensor, scale: float = 1.0) -> None:
    """Write the triangle of symmetric `scale * total` [blocks, n, n] to `out` [blocks, n(n+1)/2], contiguous.

    Rows are multiplied straight into their place: the matrix is never made.
    """
    write = _writer(total, scale)
    n = total.rows.shape[-1] if isinstance(total, Rows) else total.shape[-1]
    half, rest = n // 2, n - n // 2
    rectangle, square = _split(out, half, rest)
    write(square, 0, rest, rest, n)
    shift, height = 1 - n % 2, rectangle.shape[-2]
    for start in range(0, height, _STRIP):
        stop = min(start + _STRIP, height)
        low, high = start - shift + 1, stop - shift  # the columns in which this strip's staircase lies
        write(rectangle[..., start:stop, :low], start - shift, stop - shift, 0, low)
        if stop <= half:
            write(rectangle[..., start:stop, high:], rest + start, rest + stop, rest + stop - 1, n)
        _write_stairs(rectangle[..., start:stop, low:high], write, low, high, rest + start)


def _write_stairs(stairs: Tensor, write: Writer, low: int, high: int, start: int) -> None:
    """Upper triangle of the trailing block from `start` on, below it the lower one of the leading block."""
    width = high - low
    upper, lower = stairs[..., :width, :], stairs.new_empty(*stairs.shape[:-2], width, width)
    write(upper, start, start + width, start, start + width)
    write(lower, low, high, low, high)
    upper.triu_()
    stairs[..., width:, :].zero_()
    stairs[..., 1:, :] += lower.tril_()


def _writer(total: Gram, scale: float) -> Writer:
    """Writes rows `top` to `bottom`, columns `left` to `right` of the scaled matrix."""
    if isinstance(total, Rows):
        rows = total.rows if len(total.rows) > 1 else total.rows[0]
        scaled = (rows * scale).mT

        def multiply(place: Tensor, top: int, bottom: int, left: int, right: int) -> None:
            if place.numel():
                target = place if rows.ndim > 2 else place[0]
                torch.matmul(scaled[..., top:bottom, :], rows[..., left:right], out=target)

        return multiply

    def copy(place: Tensor, top: int, bottom: int, left: int, right: int) -> None:
        if place.numel():
            torch.mul(total[..., top:bottom, left:right], scale, out=place)

    return copy


def unpack(packed: Tensor, out: Tensor) -> None:
    """Write both triangles to `out` [..., n, n] from what `pack` wrote."""
    n = out.shape[-1]
    half, rest = n // 2, n - n // 2
    rectangle, square = _split(packed, half, rest)
    if n % 2:
        lower, upper = rectangle.tril(), rectangle[..., :half, 1:].triu()
    else:
        lower, upper = rectangle[..., 1:, :].tril(), rectangle[..., :half, :].triu()
    torch.add(lower, lower.tril(-1).mT, out=out[..., :rest, :rest])
    torch.add(upper, upper.triu(1).mT, out=out[..., rest:, rest:])
    out[..., :rest, rest:].copy_(square)
    out[..., rest:, :rest].copy_(square.mT)


def _split(packed: Tensor, half: int, rest: int) -> tuple[Tensor, Tensor]:
    """Views: the rectangle of the two triangles, and the off-diagonal block [rest, half]."""
    height = rest if rest > half else half + 1
    rectangle = packed[..., : height * rest].unflatten(-1, (height, rest))
    return rectangle, packed[..., height * rest :].unflatten(-1, (rest, half))
