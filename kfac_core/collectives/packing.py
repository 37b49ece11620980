"""Symmetric matrices as one triangle, in LAPACK's rectangular full packed layout.

A triangle of an n by n matrix is two half-sized triangles and a rectangle. Laid against each other the two
small triangles fill a rectangle too, so packing is three block copies at memory speed: no index tables, no
gather, and exactly n(n+1)/2 elements (Gustavson et al. 2010, ACM TOMS 37(2), "Rectangular Full Packed
Format for Cholesky's Algorithm").

    n = 2k      leading k x k block -> lower part of rows 1..k,  trailing k x k -> upper part of rows 0..k-1
    n = 2k + 1  leading (k+1) x (k+1) -> lower part,             trailing k x k -> strictly upper part
"""

import torch
from torch import Tensor


def packed_size(n: int) -> int:
    """Elements of one triangle of an `n` by `n` matrix, diagonal included."""
    return n * (n + 1) // 2


def pack(matrix: Tensor, out: Tensor) -> None:
    """Write the triangle of symmetric `matrix` [..., n, n] to `out` [..., n(n+1)/2], contiguous."""
    n = matrix.shape[-1]
    half, rest = n // 2, n - n // 2
    rectangle, square = _split(out, half, rest)
    leading, trailing = matrix[..., :rest, :rest], matrix[..., rest:, rest:]
    if n % 2:
        rectangle.copy_(leading.tril())
        rectangle[..., :half, 1:] += trailing.triu()
    else:
        rectangle[..., 1:, :].copy_(leading.tril())
        rectangle[..., 0, :] = 0
        rectangle[..., :half, :] += trailing.triu()
    square.copy_(matrix[..., :rest, rest:])


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
