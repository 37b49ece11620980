"""Gram matrices of convolution patches: the sum over all windows of patch patchT.

Four exact forms of the same sum; `patch_gram` picks one by device and geometry. What each of them buys is
measured in `results/core/convolution_forms.csv`.

| form | for | builds |
|---|---|---|
| `im2col` | GPUs; reference of the tests | every patch, then one product |
| `by_spectrum` | CPU, stride 1, many small images | spectra of the images |
| `by_displacement` | CPU, stride 1, otherwise | one transposed copy of the images |
| `by_row_shift` | CPU, any stride, dilation, groups; few channels | rows with horizontal taps side by side |
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kfac_core.grams import Gram, gram, inner, is_thin, outer_sum
from kfac_core.matmul import copy_pixels, is_plain, scratch, transposed

# ------------------------------------------------------------
# How a convolution's windows lie on its input.


Padding = tuple[int, int, int, int]
"""Zeros to the left of, to the right of, above and below an image."""


@dataclass(frozen=True)
class Geometry:
    """A convolution's windows; pairs are (vertical, horizontal).

    Attributes:
        padding: zeros around the images; padding with other values is already part of the images.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    padding: Padding = (0, 0, 0, 0)

    def pad(self, images: Tensor) -> Tensor:
        """`images` with their padding."""
        return functional.pad(images, self.padding) if any(self.padding) else images

    def output_size(self, images: Tensor) -> tuple[int, int]:
        """Height and width of the convolution's output."""
        left, right, top, bottom = self.padding
        sizes = images.shape[2] + top + bottom, images.shape[3] + left + right
        height, width = (
            (size - (taps - 1) * dilation - 1) // stride + 1
            for size, taps, dilation, stride in zip(
                sizes, self.kernel, self.dilation, self.stride, strict=True
            )
        )
        return height, width


_FEW_CHANNELS = 8  # below, products of displaced images are too narrow, and row shift is faster
_NARROW = 16  # channels up to which products of displaced images run below full speed
_FEWER_NARROW, _FEWER_WIDE = 1.4, 2.5  # how many times fewer multiplications make the spectrum faster
_SPECTRAL = (torch.float32, torch.float64)  # a narrower type could not hold a spectrum to its own precision
_PATCH_ELEMENTS = 1 << 26  # of patches built at once: 256 MiB of float32
_MANY_PIXELS = 64  # per image, from which on one product per image beats gathering the pixels of all


def patch_gram(images: Tensor, geometry: Geometry) -> Tensor:
    """Sum over all windows of patch patchT.

    `images` are `[B, groups * channels, height, width]`. The result is `[groups, n, n]` with n = channels *
    kernel height * kernel width, the channel slowest as in a convolution's weight.
    """
    if not images.is_cpu:
        return im2col(images, geometry)
    dense = geometry.stride == geometry.dilation == (1, 1) and geometry.groups == 1
    large = all(size >= taps for size, taps in zip(images.shape[2:], geometry.kernel, strict=True))
    if not (dense and large) or images.shape[1] < _FEW_CHANNELS:
        return by_row_shift(images, geometry)
    form = by_spectrum if _spectrum_is_faster(images, geometry.kernel) else by_displacement
    return form(images, geometry.kernel, geometry.padding).unsqueeze(0)


def _spectrum_is_faster(images: Tensor, kernel: tuple[int, int]) -> bool:
    if images.dtype not in _SPECTRAL or not is_plain(images):
        return False
    by_frequency, by_pair = multiplications(images.shape, kernel)
    return by_frequency * (_FEWER_NARROW if images.shape[1] <= _NARROW else _FEWER_WIDE) <= by_pair


def im2col(images: Tensor, geometry: Geometry) -> Tensor:
    """One product of all patches; a large batch is taken in parts."""
    height, width = geometry.output_size(images)
    per_image = images.shape[1] * geometry.kernel[0] * geometry.kernel[1] * height * width
    first, *others = images.split(max(1, _PATCH_ELEMENTS // max(1, per_image)))
    rows = patch_rows(first, geometry)
    total = torch.matmul(rows.mT, rows)
    for part in others:
        rows = patch_rows(part, geometry)
        total.baddbmm_(rows.mT, rows)
    return total


def patch_rows(images: Tensor, geometry: Geometry) -> Tensor:
    """Every patch as a row, `[groups, rows, n]`, by one strided copy."""
    (height, width), padded = geometry.output_size(images), geometry.pad(images)
    channels = padded.shape[1] // geometry.groups
    batch, channel, row, column = padded.stride()
    (taps_down, taps_across), (down, across) = geometry.kernel, geometry.stride
    windows = padded.as_strided(
        (geometry.groups, len(padded), height, width, channels, taps_down, taps_across),
        (
            channel * channels, batch, row * down, column * across,
            channel, row * geometry.dilation[0], column * geometry.dilation[1],
        ),
    )  # fmt: skip
    return windows.reshape(geometry.groups, len(padded) * height * width, -1)


def patch_sums(images: Tensor, geometry: Geometry) -> Tensor:
    """Sum of all patches, `[groups, n]`."""
    return patch_rows(images.sum(0, keepdim=True), geometry).sum(1)


def pixel_gram(images: Tensor, groups: int) -> Gram:
    """Sum over all pixels of channels channelsT, `[groups, n, n]` from `[B, groups * n, height, width]`."""
    if groups == 1 and images.is_contiguous(memory_format=torch.channels_last):
        return gram(images.permute(0, 2, 3, 1).flatten(0, 2).unsqueeze(0))
    pixels = images.flatten(2)
    if groups == 1 and pixels.shape[2] >= _MANY_PIXELS:
        return outer_sum(pixels.mT).unsqueeze(0)
    return gram(pixels.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2))


# ------------------------------------------------------------
# Gram matrix of stride-1 convolution patches from displaced images; no patch is built.
#
# Two pairs of taps with the same displacement see the same pairs of pixels, except at the edges of the
# image (`plan_tap_sums`). A 3 x 3 kernel has 81 pairs of taps but 25 displacements, and opposite
# displacements give each other's transpose: 13 products remain, and 16 small ones at the edges.
#
# Cost for a k x k kernel, C channels and P pixels: below (2k - 1)^2 C^2 P multiplications and additions,
# where the product of the patch matrix with itself takes 2 k^4 C^2 P.


_SHORT = 32  # pixels per row below which copying the rows together first is faster


def by_displacement(images: Tensor, kernel: tuple[int, int], padding: Padding) -> Tensor:
    """Sum of patch patchT over all windows of `images` [B, C, height, width], zero-padded by `padding`.

    The images must be at least as large as the kernel.

    Returns:
        `[n, n]` with n = C * kernel height * kernel width, the channel slowest as in a convolution's weight.
    """
    plan = plan_tap_sums((images.shape[2], images.shape[3]), kernel, padding)
    total, pixels = TapSums(plan, images), _batch_innermost(images)
    for number, here, there in plan.products:
        _multiply(pixels[here].flatten(1, 2), pixels[there].flatten(1, 2), total.sums[number])
    return total.gram()


def _batch_innermost(images: Tensor) -> Tensor:
    """A copy `[height, width, B, C]`: the neighbouring columns of a row are contiguous over all images."""
    batch, channels, height, width = images.shape
    pixels = scratch(images, height, width, batch, channels)
    copy_pixels(images, pixels.permute(2, 0, 1, 3))
    return pixels


def _multiply(one: Tensor, other: Tensor, out: Tensor) -> None:
    """Sum of x x'T over two windows `[rows, pixels, C]`, by row unless rows are contiguous."""
    if one.is_contiguous() or one.shape[1] < _SHORT:
        one, other = one.flatten(0, 1).unsqueeze(0), other.flatten(0, 1).unsqueeze(0)
    if is_thin(one):
        out.copy_(inner(one.mT, other).sum(0))
    else:
        torch.addbmm(out, one.mT, other, beta=0, out=out)


# ------------------------------------------------------------
# Gram matrix of stride-1 convolution patches from the spectra of the images; no patch is built.
#
# The sums of x[p] x[p + d]T over all pixels p, for all displacements d, are the inverse Fourier transform
# of conj(X(f)) X(f)T summed over the images (Wiener-Khinchin): one C x C product per frequency instead of
# one per pixel and displacement, a third to a fifth of the multiplications for 3 x 3 kernels. Zeros
# around the images, k - 1 in each direction, prevent wrap-around. What a pair of taps does not visit at
# the image's edges is subtracted afterwards (`plan_tap_sums`).
#
# The images are small, so the transforms are products with tables of cosines and sines. Half of the
# frequencies are complex conjugates of the others and are skipped.
#
# The error of an element is relative to the norms of its two channels, not to the element. The lowest
# frequency squares the sum of a channel's pixels: with P pixels per image, overflow begins at values
# sqrt(P) times smaller than in a direct sum.
#
# A spectrum has F = (height + k - 1) (width + k - 1) numbers. For C channels and B images, products of
# spectra take 3 F C^2 B multiplications and additions, the way back 2 F k (2k - 1) C^2
# (`multiplications`).


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


# ------------------------------------------------------------
# Which sums over pixels make up the Gram matrix of patches, and the order in which they cost least.
#
# Block (tap, tap') of the matrix sums x[p] x[p + d]T with displacement d = tap' - tap, over the pixels p
# that the tap visits and whose partner p + d lies inside the image. These pixels form a rectangle. For
# one displacement the rectangles differ only in a few rows and columns at the image's edges, so all of
# them are assembled from shared parts.


Span = tuple[int, int]
"""Rows or columns: first, and one past the last."""

Window = tuple[slice, slice]
"""A rectangle of pixels as an index: rows and columns."""


class PixelPairs(NamedTuple):
    """A rectangle of pixels p whose partners p + d lie inside the image; d is (vertical, horizontal)."""

    displacement: tuple[int, int]
    rows: Span
    columns: Span

    @property
    def window(self) -> Window:
        """The pixels p."""
        return slice(*self.rows), slice(*self.columns)

    def seen_from_partner(self) -> PixelPairs:
        """The pixels p + d with displacement -d, whose sum is this one's transpose."""
        dy, dx = self.displacement
        (top, bottom), (left, right) = self.rows, self.columns
        return PixelPairs((-dy, -dx), (top + dy, bottom + dy), (left + dx, right + dx))


@dataclass
class TapSumPlan:
    """How to compute all sums, each known by a number: first the products, then additions, then mirrors.

    Attributes:
        taps: number of taps of the kernel.
        of_taps: number of the sum of each pair of taps, in row-major order.
        wanted: how many sums belong to pairs of taps; they come first, the others are intermediate results.
        products: (number, pixels p, their partners).
        additions: (number, sums to add).
        mirrors: (number, sum of which this one is the transpose).
        numbers: number of every sum.
    """

    taps: int
    of_taps: list[int] = field(default_factory=list)
    wanted: int = 0
    products: list[tuple[int, Window, Window]] = field(default_factory=list)
    additions: list[tuple[int, list[int]]] = field(default_factory=list)
    mirrors: list[tuple[int, int]] = field(default_factory=list)
    numbers: dict[PixelPairs, int] = field(default_factory=dict)


@functools.lru_cache(maxsize=256)  # one entry per layer shape; planning takes longer than a small product
def plan_tap_sums(size: tuple[int, int], kernel: tuple[int, int], padding: Padding) -> TapSumPlan:
    """Plan the sums for images of `size` (height, width), which must be at least as large as the kernel."""
    left, right, top, bottom = padding
    rows, columns = _Axis(size[0], kernel[0], top, bottom), _Axis(size[1], kernel[1], left, right)
    taps = list(product(range(kernel[0]), range(kernel[1])))
    of_taps = [
        PixelPairs((y2 - y, x2 - x), rows.visited(y, y2 - y), columns.visited(x, x2 - x))
        for (y, x), (y2, x2) in product(taps, taps)
    ]
    found = TapSumPlan(
        len(taps), numbers={pairs: number for number, pairs in enumerate(dict.fromkeys(of_taps))}
    )
    found.of_taps = [found.numbers[pairs] for pairs in of_taps]
    found.wanted = len(found.numbers)
    solved: set[PixelPairs] = set()

    def number_of(pairs: PixelPairs) -> int:
        """Add the steps that compute this sum, after those of the sums that it needs."""
        number = found.numbers.setdefault(pairs, len(found.numbers))
        if pairs not in solved:
            solved.add(pairs)
            solve(number, pairs)
        return number

    def solve(number: int, pairs: PixelPairs) -> None:
        (dy, dx), partner = pairs.displacement, pairs.seen_from_partner()
        if (dy, dx) < (0, 0):
            found.mirrors.append((number, number_of(partner)))
        elif len(parts := rows.parts(pairs.rows, dy)) > 1:
            found.additions.append((number, [number_of(pairs._replace(rows=part)) for part in parts]))
        elif len(parts := columns.parts(pairs.columns, dx)) > 1:
            found.additions.append((number, [number_of(pairs._replace(columns=part)) for part in parts]))
        else:
            found.products.append((number, pairs.window, partner.window))

    for pairs in list(found.numbers):
        number_of(pairs)
    return found


class TapSums:
    """Memory for every sum of a plan; the caller fills in the products.

    Attributes:
        sums: one `[C, C]` matrix per number.
    """

    def __init__(self, plan: TapSumPlan, images: Tensor) -> None:
        channels = images.shape[1]
        self._plan = plan
        self._wanted = images.new_empty(channels, plan.wanted, channels)
        intermediate = images.new_empty(len(plan.numbers) - plan.wanted, channels, channels)
        self.sums = [*self._wanted.unbind(1), *intermediate]

    def gram(self) -> Tensor:
        """Gram matrix `[n, n]` with n = C * taps, the channel slowest; all products must be filled in.

        One `index_select` writes every element once, instead of a copy per block and one to reorder channels.
        """
        for number, (first, *others) in self._plan.additions:
            total = self.sums[first]
            for other in others:
                total = torch.add(total, self.sums[other], out=self.sums[number])
        for number, original in self._plan.mirrors:
            self.sums[number].copy_(self.sums[original].mT)
        channels, taps = len(self._wanted), self._plan.taps
        of_taps = torch.tensor(self._plan.of_taps, device=self._wanted.device)
        columns = torch.arange(channels, device=self._wanted.device).view(1, -1, 1)  # [tap, C', tap']
        order = of_taps.view(taps, 1, taps) * channels + columns
        return torch.index_select(self._wanted.flatten(1), 1, order.flatten()).view(channels * taps, -1)


@dataclass(frozen=True)
class _Axis:
    """One direction of the image: `size` pixels, padded by `before` and `after`, under a kernel of `taps`."""

    size: int
    taps: int
    before: int
    after: int

    def visited(self, tap: int, shift: int) -> Span:
        """Pixels that `tap` visits over all windows and that have a partner `shift` pixels further."""
        first = tap - self.before
        places = self.before + self.size + self.after - self.taps + 1
        start = max(0, -shift, first)
        return start, max(start, min(self.size, self.size - shift, first + places))

    def parts(self, span: Span, shift: int) -> list[Span]:
        """`span`, split wherever the set of visiting taps changes."""
        taps = range(max(0, -shift), self.taps - max(0, shift))
        ends = {end for tap in taps for end in self.visited(tap, shift)} | set(span)
        cuts = sorted(end for end in ends if span[0] <= end <= span[1])
        return list(itertools.pairwise(cuts))


# ------------------------------------------------------------
# Gram matrix of convolution patches from shifted rows, for any stride, dilation and number of groups.
#
# Only horizontal neighbours are copied: k times the input instead of k * k. Let z[h] be input row h with
# the kernel's k horizontal taps side by side. The block of taps (dy, dy') is the sum of z[h]T z[h +
# delta] over the rows h = dy, dy + stride, ... under the output, with delta = dy' - dy. Two blocks with
# the same delta differ only in their edge rows: the first costs one product, each other one a correction
# by a few rows. At stride 1 and k = 3 that is three products instead of nine.


_BUFFER_ELEMENTS = 1 << 24  # of rows built at once; a larger batch is taken in parts
_NARROW_ROWS, _WIDE = 8, 256  # elements of a pixel of z; see _inner
_MANY_TAPS = 8  # side by side in a row
_COPIED_FIRST = 8  # channels of a group, from which on they are brought inward before the taps are laid out


def by_row_shift(images: Tensor, geometry: Geometry) -> Tensor:
    """Sum of patch patchT over all windows of `images` [B, groups * C, height, width].

    Returns:
        `[groups, n, n]` with n = C * kernel height * kernel width, the channel slowest as in a convolution's
        weight.
    """
    above, below = geometry.padding[2:]
    rows = images.shape[2] + above + below
    of_image = images.shape[1] * geometry.kernel[1] * rows * geometry.output_size(images)[1]
    first, *others = images.split(max(1, _BUFFER_ELEMENTS // max(1, of_image)))
    total = _of_part(first, geometry)
    for part in others:
        total += _of_part(part, geometry)
    return total


def _of_part(images: Tensor, geometry: Geometry) -> Tensor:
    taps, step, stride = geometry.kernel[0], geometry.dilation[0], geometry.stride[0]
    height = geometry.output_size(images)[0]
    rows = _Rows(images, geometry)
    total = images.new_empty(geometry.groups, taps, rows.size, taps, rows.size)
    for difference in range(taps):
        delta = difference * step
        newest: dict[int, tuple[int, Tensor]] = {}  # by phase of the rows: first row of a window, its block
        for tap in range(taps - difference):
            first = tap * step
            start, block = newest.get(first % stride, (first, None))
            moved = (first - start) // stride
            if block is None or 2 * moved >= height:
                block = rows.product(first, first + delta, height)
            else:
                end = start + height * stride
                block = block + rows.product(end, end + delta, moved)
                block -= rows.product(start, start + delta, moved)
            newest[first % stride] = (first, block)
            total[:, tap, :, tap + difference] = block
            total[:, tap + difference, :, tap] = block.mT
    return _channel_first(total, geometry.kernel, images.shape[1] // geometry.groups)


class _Rows:
    """Rows with horizontal taps side by side, grouped by phase: the row's number modulo the stride.

    Rows are counted from the first row of the top padding. A window of one phase's rows is a view that a
    matrix product accepts without a copy.

    Attributes:
        size: elements per pixel, taps * C.
    """

    def __init__(self, images: Tensor, geometry: Geometry) -> None:
        groups, taps, (_, _, above, below) = geometry.groups, geometry.kernel[1], geometry.padding
        batch, channels, height, _ = images.shape
        channels //= groups
        width = geometry.output_size(images)[1]
        self.size = taps * channels
        self._stride = geometry.stride[0]
        self._pixels = batch * width  # of a row
        counts = [len(range(phase, above + height + below, self._stride)) for phase in range(self._stride)]
        row = groups * self.size * self._pixels
        memory = scratch(images, row * sum(counts)).split([row * count for count in counts])
        inner = _inner(images, geometry, self.size)
        if inner and channels >= _COPIED_FIRST and images.is_contiguous():
            images = transposed(images.flatten(2)).unflatten(1, images.shape[2:]).permute(0, 3, 1, 2)
        source = images.unflatten(1, (groups, channels)).permute(1, 2, 3, 0, 4)
        self._phases: list[Tensor] = []  # each [groups, size, row * B * width]
        for phase, (part, count) in enumerate(zip(memory, counts, strict=True)):
            if inner:
                rows = part.view(groups, count, batch, width, taps, channels).permute(0, 4, 5, 1, 2, 3)
                self._phases.append(part.view(groups, -1, self.size).mT)
            else:
                rows = part.view(groups, taps, channels, count, batch, width)
                self._phases.append(part.view(groups, self.size, -1))
            _fill(rows, source, phase, geometry)

    def product(self, first: int, second: int, count: int) -> Tensor:
        """Sum over `count` rows of z[h]T z[h'], from h = first and h' = second on, in steps of the stride."""
        one, other = self._window(first, count), self._window(second, count)
        if first == second and len(one) == 1:
            return outer_sum(one.mT).unsqueeze(0)
        return inner(one, other.mT)

    def _window(self, row: int, count: int) -> Tensor:
        start = row // self._stride
        return self._phases[row % self._stride][..., start * self._pixels : (start + count) * self._pixels]


def _inner(images: Tensor, geometry: Geometry, size: int) -> bool:
    """Whether a pixel's taps and channels are contiguous, instead of all pixels of one tap and channel.

    Contiguous taps and channels make products of medium width faster. The copy is faster if it keeps the
    memory layout of the images; for many taps it is faster with contiguous pixels.
    """
    if size <= _NARROW_ROWS or geometry.kernel[1] > _MANY_TAPS:
        return False
    if not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last):
        return True
    return images.is_cpu and geometry.groups == 1 and size < _WIDE


def _fill(rows: Tensor, source: Tensor, phase: int, geometry: Geometry) -> None:
    """Fill `rows` [groups, taps, C, row, B, width] from `source` [groups, C, row, B, column]."""
    left, _, above, _ = geometry.padding
    lines, seen = _inside(phase - above, geometry.stride[0], rows.shape[3], source.shape[2])
    rows[:, :, :, : lines.start] = 0
    rows[:, :, :, lines.stop :] = 0
    for tap, own in enumerate(rows[:, :, :, lines].unbind(1)):
        start = tap * geometry.dilation[1] - left
        columns, seen_columns = _inside(start, geometry.stride[1], rows.shape[5], source.shape[4])
        own[..., : columns.start] = 0
        own[..., columns.stop :] = 0
        own[..., columns] = source[:, :, seen, :, seen_columns]


def _inside(start: int, stride: int, count: int, size: int) -> tuple[slice, slice]:
    """Which of the positions start, start + stride, ... lie in 0 to size - 1: indices and positions."""
    first = min(count, max(0, -(start // stride)))
    last = max(first, min(count, -((start - size) // stride)))
    return slice(first, last), slice(start + first * stride, start + last * stride, stride)


def _channel_first(total: Tensor, kernel: tuple[int, int], channels: int) -> Tensor:
    """From (tap y, tap x, channel) to (channel, tap y, tap x) on both sides."""
    split = total.view(-1, *kernel, channels, *kernel, channels)
    n = kernel[0] * kernel[1] * channels
    return split.permute(0, 3, 1, 2, 6, 4, 5).reshape(-1, n, n)
