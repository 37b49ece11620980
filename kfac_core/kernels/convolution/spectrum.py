"""Gram matrix of stride-1 convolution patches from the spectra of the images; no patch is built.

The sums of x[p] x[p + d]T over all pixels p, for all displacements d, are the inverse Fourier transform of
conj(X(f)) X(f)T summed over the images (Wiener-Khinchin): one C x C product per frequency instead of one per
pixel and displacement, a third to a fifth of the multiplications for 3 x 3 kernels. Zeros around the
images, k - 1 in each direction, prevent wrap-around. What a pair of taps does not visit at the image's edges
is subtracted afterwards (`tap_sum_plan`).

The images are small, so the transforms are products with tables of cosines and sines. Half of the frequencies
are complex conjugates of the others and are skipped.

The error of an element is relative to the norms of its two channels, not to the element. The lowest frequency
squares the sum of a channel's pixels: with P pixels per image, overflow begins at values sqrt(P) times
smaller than in a direct sum.

A spectrum has F = (height + k - 1) (width + k - 1) numbers. For C channels and B images, products of spectra
take 3 F C^2 B multiplications and additions, the way back 2 F k (2k - 1) C^2 (`multiplications`).
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_core.kernels.convolution.geometry import Padding
from kfac_core.kernels.convolution.tap_sum_plan import TapSums, Window, plan_tap_sums
from kfac_core.kernels.grams import inner
from kfac_core.kernels.scratch import scratch
from kfac_core.kernels.transpose import transposed

_FULL_CIRCLE = 2 * math.pi


def by_spectrum(images: Tensor, kernel: tuple[int, int], padding: Padding) -> Tensor:
    """Sum of patch patchT over all windows of `images` [B, C, height, width], zero-padded by `padding`.

    The images must be at least as large as the kernel.

    Returns:
        `[n, n]` with n = C * kernel height * kernel width, the channel slowest as in a convolution's weight.
    """
    plan = plan_tap_sums((images.shape[2], images.shape[3]), kernel, padding)
    total, edge_lines = TapSums(plan, images), _EdgeLines(images)
    products = defaultdict(list)
    for number, here, there in plan.products:
        products[_displacement(here, there)].append((number, here, there))
    correlation = correlate(images, kernel)
    for (down, right), parts in products.items():
        (inside, *_), *edges = sorted(parts, key=lambda part: _size(part[1]), reverse=True)
        remainder = correlation[down, kernel[1] - 1 + right]
        for number, here, there in edges:
            total.sums[number].copy_(inner(edge_lines.of(here).mT, edge_lines.of(there)))
            remainder = torch.sub(remainder, total.sums[number], out=total.sums[inside])
        if not edges:
            total.sums[inside].copy_(remainder)
    return total.gram()


def multiplications(shape: torch.Size, kernel: tuple[int, int]) -> tuple[int, int]:
    """Multiplications to correlate images of `shape` [B, C, height, width]: by spectrum, and by displacement.

    A product of two spectra takes three real products, for half of the frequencies.
    """
    batch, channels, height, width = shape
    down, across = height + kernel[0] - 1, width + kernel[1] - 1
    displacements = kernel[0] * (2 * kernel[1] - 1)
    transform = batch * channels * height * across * (width + 2 * down)
    products = down * across * channels**2 * (batch * 3 // 2 + displacements)
    rows = sum(height - shift for shift in range(kernel[0]))
    columns = sum(width - abs(shift) for shift in range(1 - kernel[1], kernel[1]))
    return transform + products, batch * channels**2 * rows * columns


def correlate(images: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Sum of x[p] x[p + d]T over all pixels of `images` [B, C, height, width], zero outside.

    Returns:
        `[down, right, C, C]`: vertical displacements 0 to k - 1, horizontal ones 1 - k to k - 1.
    """
    batch, channels, height, width = images.shape
    tables = _tables((height, width), kernel, images.dtype)
    if images.is_contiguous():
        by_channel = images.flatten(2)
    else:
        by_channel = transposed(images.permute(0, 2, 3, 1).flatten(1, 2))
    row_spectra, spectrum, squares, crosses = _buffers(images, tables)
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
    """All frequencies that share a horizontal frequency; vertical ones start at 0, conjugates are left out.

    Attributes:
        first: row of the horizontal table with its cosine; its sine follows.
        is_real: whether there is no sine; then half of the vertical frequencies are conjugates of the others.
        cosines: `[displacements, vertical]`, weight of a frequency in the symmetric part of each sum.
        sines: its weight in the antisymmetric part.
    """

    first: int
    is_real: bool
    cosines: Tensor
    sines: Tensor


class _Tables(NamedTuple):
    """Transform tables for images of one size.

    Attributes:
        across: `[horizontal numbers, width]`, from pixels to the spectra of their rows.
        of_real: `[2 * vertical, height]`, from the real parts of row spectra to alternating real and
            imaginary parts.
        of_imaginary: the same from imaginary parts.
        columns: by horizontal frequency.
    """

    across: Tensor
    of_real: Tensor
    of_imaginary: Tensor
    columns: list[_Column]


@functools.lru_cache(maxsize=64)
def _tables(size: tuple[int, int], kernel: tuple[int, int], dtype: torch.dtype) -> _Tables:
    """Tables for images of this height and width, on the CPU."""
    (height, width), (taps_down, taps_across) = size, kernel
    down, across = height + taps_down - 1, width + taps_across - 1
    shifts_down, shifts_across = _arange(taps_down), _arange(2 * taps_across - 1) + 1 - taps_across
    shifts = torch.cartesian_prod(shifts_down, shifts_across)  # (0, right < 0) are mirrors and go unread
    horizontal: list[Tensor] = []
    columns = []
    for number in range(across // 2 + 1):
        is_real = 2 * number % across == 0
        angles = _FULL_CIRCLE * number / across * _arange(width)
        first = len(horizontal)
        horizontal += [angles.cos()] if is_real else [angles.cos(), -angles.sin()]
        vertical = _arange(down // 2 + 1 if is_real else down)
        counts_twice = (2 * vertical % down != 0) if is_real else torch.ones_like(vertical, dtype=torch.bool)
        weight = (1 + counts_twice.double()) / (down * across)
        phase = _FULL_CIRCLE * (shifts[:, :1] * vertical / down + shifts[:, 1:] * number / across)
        cosines, sines = weight * phase.cos(), weight * phase.sin()
        columns.append(_Column(first, is_real, cosines.to(dtype), sines.to(dtype)))
    angles = _FULL_CIRCLE / down * _arange(down)[:, None] * _arange(height)
    cosine, sine = angles.cos(), angles.sin()
    of_real = torch.stack([cosine, -sine], 1).flatten(0, 1)
    of_imaginary = torch.stack([sine, cosine], 1).flatten(0, 1)
    return _Tables(torch.stack(horizontal).to(dtype), of_real.to(dtype), of_imaginary.to(dtype), columns)


def _arange(stop: int) -> Tensor:
    return torch.arange(stop, dtype=torch.float64, device="cpu")


def _buffers(images: Tensor, tables: _Tables) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for the spectra of all rows, one column's spectrum, and its two kinds of products."""
    batch, channels, height, _ = images.shape
    vertical = len(tables.of_real) // 2
    shapes = (
        (len(tables.across), batch * channels * height),
        (2 * vertical, batch * channels),
        *2 * ((vertical, channels, channels),),
    )
    memory = scratch(images, sum(map(math.prod, shapes))).split([math.prod(shape) for shape in shapes])
    rows, column, squares, crosses = (part.view(shape) for part, shape in zip(memory, shapes, strict=True))
    return rows, column, squares, crosses


def _displacement(here: Window, there: Window) -> tuple[int, int]:
    down, right = (to.start - own.start for own, to in zip(here, there, strict=True))
    return down, right


def _size(window: Window) -> int:
    rows, columns = (part.stop - part.start for part in window)
    return int(rows * columns)


class _EdgeLines:
    """Rows and columns at the edges, each copied out of the images once."""

    def __init__(self, images: Tensor) -> None:
        self._images = images
        self._copies: dict[tuple[int, int, int], Tensor] = {}

    def of(self, window: Window) -> Tensor:
        """The pixels of `window`, `[pixels, C]`."""
        rows, columns = window
        if rows.stop - rows.start < columns.stop - columns.start:
            return self._copy(2, rows)[:, columns].flatten(0, 2)
        return self._copy(3, columns)[:, rows].flatten(0, 2)

    def _copy(self, dimension: int, span: slice) -> Tensor:
        """Rows (dimension 2) or columns (3) of a span, `[in the span, along them, B, C]`."""
        key = dimension, span.start, span.stop
        if key not in self._copies:
            lines = self._images.narrow(dimension, span.start, span.stop - span.start).movedim(dimension, 0)
            flat = transposed(lines.flatten(1, 2))  # [in the span, along them, B * C]
            self._copies[key] = flat.unflatten(2, lines.shape[1:3])
        return self._copies[key]
