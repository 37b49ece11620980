"""The correlation of images with themselves by their spectra: a third to a fifth of the work for 3 x 3 taps.

The sums of x[p] x[p + d]T over all pixels p, one for each displacement d, are the inverse Fourier transform
of one product a frequency, conj(X(f)) X(f)T, summed over the images (Wiener and Khinchin). Pair by pair, a
pixel and a displacement take a product of C x C each. Zeros around the images, k - 1 in each direction, keep
displaced pixels from coming in again at the other side.

Images of a convolution's input are small, and so are their transforms: products with tables of cosines and
sines. Half of the frequencies are the others' conjugates and left out.

An element is as exact as the lengths of its two channels are large, also where it is small itself. The lowest
frequency squares the sum of a channel's pixels, so that an overflow may come at pixels smaller than in a
direct sum by the root of their number in an image (8 x 8: 8 times).

Cost for a k x k kernel, C channels, B images and F = (height + k - 1) (width + k - 1) numbers of a spectrum,
in multiplications and additions: 3 F C^2 B, 2 F k (2k - 1) C^2 back, and the transforms (`multiplications`).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_core.kernels.scratch import scratch
from kfac_core.kernels.transpose import transposed

_TURN = 2 * math.pi


def multiplications(shape: torch.Size, kernel: tuple[int, int]) -> tuple[int, int]:
    """How many correlating images of `shape` [B, C, height, width] takes: by spectra, and pair by pair.

    A product of two spectra is three real ones, for half of the frequencies.
    """
    batch, channels, height, width = shape
    down, across = height + kernel[0] - 1, width + kernel[1] - 1
    displacements = kernel[0] * (2 * kernel[1] - 1)
    transform = batch * channels * height * across * (width + 2 * down)
    products = down * across * channels**2 * (batch * 3 // 2 + displacements)
    rows = sum(height - shift for shift in range(kernel[0]))
    columns = sum(width - abs(shift) for shift in range(1 - kernel[1], kernel[1]))
    return transform + products, batch * channels**2 * rows * columns


def correlation_by_spectrum(images: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Sum of x[p] x[p + d]T over all pixels of `images` [B, C, height, width], zero outside.

    Returns:
        `[down, right, C, C]`: displacements from 0 down and from 1 - k to the right on, to k - 1.
    """
    batch, channels, height, width = images.shape
    tables = _tables((height, width), kernel, images.dtype)
    if images.is_contiguous():
        by_channel = images.flatten(2)
    else:
        by_channel = transposed(images.permute(0, 2, 3, 1).flatten(1, 2))
    row_spectra, spectrum, squares, crosses = _rooms(images, tables)
    torch.mm(tables.across, by_channel.reshape(-1, width).mT, out=row_spectra)
    even = images.new_zeros(kernel[0] * (2 * kernel[1] - 1), channels**2)
    odd = torch.zeros_like(even)
    for column in tables.columns:
        count = column.cosines.shape[1]
        numbers = spectrum[: 2 * count]
        torch.mm(tables.of_real[: 2 * count], row_spectra[column.first].view(-1, height).mT, out=numbers)
        if not column.is_real:
            numbers.addmm_(tables.of_imaginary, row_spectra[column.first + 1].view(-1, height).mT)
        parts = numbers.view(count, 2 * batch, channels)  # of all images the real parts, then the imaginary
        real, imaginary = parts.split(batch, 1)
        even.addmm_(column.cosines, torch.bmm(parts.mT, parts, out=squares[:count]).flatten(1))
        odd.addmm_(column.sines, torch.bmm(real.mT, imaginary, out=crosses[:count]).flatten(1))
    odd = odd.view(kernel[0], -1, channels, channels)
    return even.view_as(odd) - odd + odd.mT


class _Column(NamedTuple):
    """The frequencies with one horizontal part, as many of the vertical ones as are needed, from 0 on.

    Attributes:
        first: row of the horizontal table with its cosine; its sine follows.
        is_real: whether there is no sine; then half of the vertical frequencies are conjugates of the others.
        cosines: `[displacements, vertical]`, what a frequency counts for in each sum.
        sines: the same of antisymmetric parts.
    """

    first: int
    is_real: bool
    cosines: Tensor
    sines: Tensor


class _Tables(NamedTuple):
    """What transforms images of one size.

    Attributes:
        across: `[horizontal numbers, width]`, from pixels to the spectra of their rows.
        of_real: `[2 * vertical, height]`, from the real numbers of rows to real and imaginary ones in turn.
        of_imaginary: the same from imaginary numbers.
        columns: by horizontal frequency.
    """

    across: Tensor
    of_real: Tensor
    of_imaginary: Tensor
    columns: list[_Column]


@functools.lru_cache(maxsize=64)
def _tables(size: tuple[int, int], kernel: tuple[int, int], dtype: torch.dtype) -> _Tables:
    """For images of this height and width, on the CPU; 25 KB for 16 x 16 pixels and 3 x 3 taps."""
    (height, width), (taps_down, taps_across) = size, kernel
    down, across = height + taps_down - 1, width + taps_across - 1
    shifts_down, shifts_across = _count(taps_down), _count(2 * taps_across - 1) + 1 - taps_across
    shifts = torch.cartesian_prod(shifts_down, shifts_across)  # (0, right < 0) are mirrors and go unread
    horizontal: list[Tensor] = []
    columns = []
    for number in range(across // 2 + 1):
        is_real = 2 * number % across == 0
        angles = _TURN * number / across * _count(width)
        first = len(horizontal)
        horizontal += [angles.cos()] if is_real else [angles.cos(), -angles.sin()]
        vertical = _count(down // 2 + 1 if is_real else down)
        counts_twice = (2 * vertical % down != 0) if is_real else torch.ones_like(vertical, dtype=torch.bool)
        weight = (1 + counts_twice.double()) / (down * across)
        phase = _TURN * (shifts[:, :1] * vertical / down + shifts[:, 1:] * number / across)
        cosines, sines = weight * phase.cos(), weight * phase.sin()
        columns.append(_Column(first, is_real, cosines.to(dtype), sines.to(dtype)))
    turns = _TURN / down * _count(down)[:, None] * _count(height)
    cosine, sine = turns.cos(), turns.sin()
    of_real = torch.stack([cosine, -sine], 1).flatten(0, 1)
    of_imaginary = torch.stack([sine, cosine], 1).flatten(0, 1)
    return _Tables(torch.stack(horizontal).to(dtype), of_real.to(dtype), of_imaginary.to(dtype), columns)


def _count(stop: int) -> Tensor:
    return torch.arange(stop, dtype=torch.float64, device="cpu")


def _rooms(images: Tensor, tables: _Tables) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for the spectra of all rows, one column's spectrum, and its two kinds of products."""
    batch, channels, height, _ = images.shape
    vertical = len(tables.of_real) // 2
    shapes = (
        (len(tables.across), batch * channels * height),
        (2 * vertical, batch * channels),
        *2 * ((vertical, channels, channels),),
    )
    memory = scratch(images, sum(map(math.prod, shapes))).split([math.prod(shape) for shape in shapes])
    rows, column, squares, crosses = (room.view(shape) for room, shape in zip(memory, shapes, strict=True))
    return rows, column, squares, crosses
