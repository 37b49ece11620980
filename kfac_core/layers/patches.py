"""Gram matrices of convolution patches, with as few copies of the input as the geometry allows.

`patch_gram` chooses among exact forms of the same sum; `by_columns` is the plain one that the others are
tested against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kfac_core.grams import Gram, gram, outer_sum
from kfac_core.layers.displacement import by_displacement
from kfac_core.layers.shared_sums import Margins
from kfac_core.layers.side_by_side import by_pixels_side_by_side

_MANY_CHANNELS = 32  # from which on a pixel alone is wide enough: 0.9 times the time, at 16 1.06 times
_MANY_PIXELS = 64  # in an image, from which on a product an image beats gathering the pixels of all


@dataclass(frozen=True)
class Geometry:
    """How a convolution's windows lie on its input; pairs are (vertical, horizontal).

    Attributes:
        margins: zeros around the images; other padding is part of the images already.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    margins: Margins = (0, 0, 0, 0)

    def pad(self, images: Tensor) -> Tensor:
        """`images` with their margins."""
        return functional.pad(images, self.margins) if any(self.margins) else images

    def output_size(self, images: Tensor) -> tuple[int, int]:
        """Height and width of the convolution's output."""
        left, right, top, bottom = self.margins
        sizes = images.shape[2] + top + bottom, images.shape[3] + left + right
        height, width = (
            (size - (taps - 1) * step - 1) // hop + 1
            for size, taps, hop, step in zip(sizes, self.kernel, self.stride, self.dilation, strict=True)
        )
        return height, width


def patch_gram(images: Tensor, geometry: Geometry) -> Tensor:
    """Sum over all windows of (patch patchT).

    `images` are `[B, groups * channels, height, width]`. The result is `[groups, n, n]` with n = channels *
    kernel height * kernel width, the channel slowest as in a convolution's weight.
    """
    kernel, groups = geometry.kernel, geometry.groups
    dense = geometry.stride == geometry.dilation == (1, 1) and groups == 1
    if dense and all(size >= taps for size, taps in zip(images.shape[2:], kernel, strict=True)):
        on_cpu = images.device.type == "cpu"  # elsewhere a product a row would be many small kernels
        many = on_cpu and images.shape[1] >= _MANY_CHANNELS
        form = by_displacement if many else by_pixels_side_by_side
        return form(images, kernel, geometry.margins).unsqueeze(0)
    if kernel[0] > 1:
        return by_row_shift(images, geometry)
    return by_columns(images, geometry)


def pixel_gram(images: Tensor, groups: int) -> Gram:
    """Sum over all pixels of (channels channelsT), `[groups, n, n]` from `[B, groups * n, height, width]`."""
    if groups == 1 and images.is_contiguous(memory_format=torch.channels_last):
        return gram(images.permute(0, 2, 3, 1).flatten(0, 2).unsqueeze(0))
    pixels = images.flatten(2)
    if groups == 1 and pixels.shape[2] >= _MANY_PIXELS:
        return outer_sum(pixels.mT).unsqueeze(0)
    return gram(pixels.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2))


def patch_rows(images: Tensor, geometry: Geometry) -> Tensor:
    """Im2col: every patch a row, `[groups, rows, n]`."""
    patches: Tensor = functional.unfold(
        geometry.pad(images), geometry.kernel, dilation=geometry.dilation, stride=geometry.stride
    )
    by_group: Tensor = patches.unflatten(1, (geometry.groups, -1)).permute(1, 0, 3, 2)
    return by_group.flatten(1, 2)


def patch_sums(images: Tensor, geometry: Geometry) -> Tensor:
    """Sum of all patches, `[groups, n]`."""
    return patch_rows(images.sum(0, keepdim=True), geometry).sum(1)


def by_columns(images: Tensor, geometry: Geometry) -> Tensor:
    """One product of all patches."""
    rows = patch_rows(images, geometry)
    return torch.matmul(rows.mT, rows)


def by_row_shift(images: Tensor, geometry: Geometry) -> Tensor:
    """Only horizontal neighbours are copied, k times instead of k * k, and edge rows make up for the rest.

    Let z[h] be the input row h with the kernel's k horizontal taps side by side. The block of taps (dy, dy')
    is the sum of z[h]T z[h + delta] over the rows h = dy, dy + stride, ... under the output, with delta =
    dy' - dy. Blocks of one delta whose rows meet share all but their edge rows, so the first costs one
    product and the others a correction by a few rows: at stride 1 three products, not nine, for k = 3.
    """
    kernel, stride, dilation, groups = geometry.kernel, geometry.stride, geometry.dilation, geometry.groups
    taps = kernel[0]
    height, width = geometry.output_size(images)
    z = _rows(geometry.pad(images), geometry, width)
    pixels = images.shape[0] * width  # of one row
    size = z[0].shape[1]

    def window(row: int, count: int) -> Tensor:
        """`count` rows from `row` on, in steps of the stride: a view."""
        start = row // stride[0]
        return z[row % stride[0]][..., start * pixels : (start + count) * pixels]

    def product(first: int, second: int, count: int) -> Tensor:
        """Sum over `count` rows of z[h]T z[h'], from h = first and h' = second on, in steps of the stride."""
        one, other = (window(row, count) for row in (first, second))
        return torch.matmul(one, other.mT)

    total = images.new_empty(groups, taps, size, taps, size)
    for difference in range(taps):
        delta = difference * dilation[0]
        newest: dict[int, tuple[int, Tensor]] = {}  # by phase of the rows: first row of a window, its block
        for tap in range(taps - difference):
            first = tap * dilation[0]
            start, block = newest.get(first % stride[0], (first, None))
            moved = (first - start) // stride[0]
            if block is None or 2 * moved >= height:
                block = product(first, first + delta, height)
            else:
                end = start + height * stride[0]
                block = block + product(end, end + delta, moved) - product(start, start + delta, moved)
            newest[first % stride[0]] = (first, block)
            total[:, tap, :, tap + difference] = block
            total[:, tap + difference, :, tap] = block.mT
    return _channel_first(total, kernel, images.shape[1] // groups)


def _rows(images: Tensor, geometry: Geometry, width: int) -> list[Tensor]:
    """Rows with horizontal taps side by side, sorted by their phase, the row's number modulo the stride.

    Each phase is `[groups, taps * channels, rows * B * width]`: a window of its rows is a view that a matrix
    product takes as it is, and the copy that makes it moves whole rows of pixels.
    """
    step, hop = geometry.dilation[1], geometry.stride[1]
    pixels = images.unflatten(1, (geometry.groups, -1)).permute(
        1, 2, 3, 0, 4
    )  # [groups, channel, row, B, column]
    span = (width - 1) * hop + 1
    taps = [pixels[..., tap * step : tap * step + span : hop] for tap in range(geometry.kernel[1])]
    return [
        torch.stack([tap[:, :, phase :: geometry.stride[0]] for tap in taps], dim=1).flatten(3).flatten(1, 2)
        for phase in range(geometry.stride[0])
    ]


def _channel_first(total: Tensor, kernel: tuple[int, int], channels: int) -> Tensor:
    """From (tap y, tap x, channel) to (channel, tap y, tap x) on both sides."""
    taps_y, taps_x = kernel
    split = total.view(-1, taps_y, taps_x, channels, taps_y, taps_x, channels)
    n = taps_y * taps_x * channels
    return split.permute(0, 3, 1, 2, 6, 4, 5).reshape(-1, n, n)
