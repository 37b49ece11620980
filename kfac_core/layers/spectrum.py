"""The correlation of images with themselves by their spectra, in a third to a fifth of the multiplications.

The sums of x[p] x[p + d]T over all pixels p, one for each displacement d, are the inverse Fourier transform
of one product a frequency (Wiener and Khinchin): X(f) conj(X(f))T, summed over the images. A pixel and a
displacement take a product of C x C each otherwise. Zeros around the images, k - 1 in each direction, keep
displaced pixels from coming in again at the other side.

Images of a convolution's input are small, and so are their transforms: products with tables of cosines and
sines. Half of the frequencies are the others' conjugates and left out.

Cost for a k x k kernel, C channels, B images and F = (height + k - 1) (width + k - 1) numbers of a spectrum,
in multiplications and additions: 3 F C^2 B, 2 F k (2k - 1) C^2 back, and the transforms (`multiplications`).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_core.scratch import scratch
from kfac_core.transpose import transposed

_TURN = 2 * math.pi


def multiplications(shape: torch.Size, kernel: tuple[int, int]) -> tuple[int, int]:
    """Of the correlation of images of `shape` [B, C, height, width] by spectra, and pair by pair."""
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
    by_row = (
        images.flatten(2) if images.is_contiguous() else transposed(images.permute(0, 2, 3, 1).flatten(1, 2))
    )
    lines, part, of_even, of_odd = _rooms(images, tables)
    torch.mm(tables.across, by_row.reshape(-1, width).mT, out=lines)
    even = images.new_zeros(kernel[0] * (2 * kernel[1] - 1), channels**2)
    odd = torch.zeros_like(even)
    for column in tables.columns:
        numbers = part[: len(column.of_real)]
        torch.mm(column.of_real, lines[column.first].view(-1, height).mT, out=numbers)
        if not column.is_real:
            numbers.addmm_(column.of_imaginary, lines[column.first + 1].view(-1, height).mT)
        spectrum = numbers.view(-1, 2 * batch, channels)  # of all images the real parts, then the imaginary
        real, imaginary = spectrum.split(batch, 1)
        count = len(spectrum)
        even.addmm_(column.cosines, torch.bmm(spectrum.mT, spectrum, out=of_even[:count]).flatten(1))
        odd.addmm_(column.sines, torch.bmm(real.mT, imaginary, out=of_odd[:count]).flatten(1))
    odd = odd.view(kernel[0], -1, channels, channels)
    return even.view_as(odd) - odd + odd.mT


class _Column(NamedTuple):
    """The frequencies with one horizontal part, as many as the `vertical` ones with it that are needed.

    Attributes:
        first: row of the horizontal table with its cosine; its sine follows.
        is_real: whether there is no sine; then half of the vertical frequencies are conjugates of the others.
        of_real: `[2 * vertical, height]`, from real lines to real and imaginary parts in turn.
        of_imaginary: the same from imaginary lines.
        cosines: `[displacements, vertical]`, what a frequency counts for in each sum.
        sines: the same of antisymmetric parts.
    """

    first: int
    is_real: bool
    of_real: Tensor
    of_imaginary: Tensor
    cosines: Tensor
    sines: Tensor


class _Tables(NamedTuple):
    """Attributes: across: `[horizontal numbers, width]`; columns: by horizontal frequency."""

    across: Tensor
    columns: list[_Column]


@functools.lru_cache(maxsize=64)
@torch.inference_mode(mode=False)
def _tables(size: tuple[int, int], kernel: tuple[int, int], dtype: torch.dtype) -> _Tables:
    """For images of this height and width."""
    (height, width), (taps_down, taps_across) = size, kernel
    down, across = height + taps_down - 1, width + taps_across - 1
    shifts_down, shifts_across = _count(taps_down), _count(2 * taps_across - 1) + 1 - taps_across
    shifts = torch.cartesian_prod(shifts_down, shifts_across)
    horizontal: list[Tensor] = []
    columns = []
    for number in range(across // 2 + 1):
        is_real = 2 * number % across == 0
        angles = _TURN * number / across * _count(width)
        first = len(horizontal)
        horizontal += [angles.cos()] if is_real else [angles.cos(), -angles.sin()]
        vertical = _count(down // 2 + 1 if is_real else down)
        turns = _TURN / down * vertical[:, None] * _count(height)
        cosine, sine = turns.cos(), turns.sin()
        has_conjugate = (2 * vertical % down != 0) if is_real else torch.ones_like(vertical, dtype=torch.bool)
        weight = (1 + has_conjugate.double()) / (down * across)
        phase = _TURN * (shifts[:, :1] * vertical / down + shifts[:, 1:] * number / across)
        tables = (
            torch.stack([cosine, -sine], 1).flatten(0, 1),
            torch.stack([sine, cosine], 1).flatten(0, 1),
            weight * phase.cos(),
            weight * phase.sin(),
        )
        columns.append(_Column(first, is_real, *(table.to(dtype) for table in tables)))
    return _Tables(torch.stack(horizontal).to(dtype), columns)


def _count(stop: int) -> Tensor:
    return torch.arange(stop, dtype=torch.float64, device="cpu")


def _rooms(images: Tensor, tables: _Tables) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for the lines' transforms, one column's spectrum, and its products twice."""
    batch, channels, height, _ = images.shape
    vertical = max(len(column.of_real) for column in tables.columns) // 2
    shapes = (
        (len(tables.across), batch * channels * height),
        (2 * vertical, batch * channels),
        *2 * ((vertical, channels, channels),),
    )
    memory = scratch(images, sum(map(math.prod, shapes))).split([math.prod(shape) for shape in shapes])
    lines, part, even, odd = (room.view(shape) for room, shape in zip(memory, shapes, strict=True))
    return lines, part, even, odd
