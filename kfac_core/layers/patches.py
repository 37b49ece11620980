"""Gram matrices of convolution patches, with as few copies of the input as the geometry allows.

`patch_gram` chooses among exact forms of the same sum; `by_columns` is the plain one that the others are
tested against.
"""

from __future__ import annotations

import torch
from torch import Tensor


def patch_gram(
    images: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Sum over all windows of (patch patchT), and of the patches.

    `images` are padded already, `[B, groups * channels, height, width]`. The results are `[groups, n, n]` and
    `[groups, n]` with n = channels * kernel height * kernel width, the channel slowest as in a
    convolution's weight.
    """
    channels = images.shape[1] // groups
    if kernel == (1, 1):
        pixels = images[:, :, :: stride[0], :: stride[1]]
        columns = pixels.flatten(2).unflatten(1, (groups, channels)).permute(1, 2, 0, 3).flatten(2)
        return torch.matmul(columns, columns.mT), columns.sum(-1)
    if kernel[0] > 1:
        return by_row_shift(images, kernel, stride, dilation, groups)
    return by_columns(images, kernel, stride, dilation, groups)


def output_size(
    images: Tensor, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int]:
    """Height and width of a convolution's output over `images`, padded already."""
    height, width = (
        (size - (taps - 1) * step - 1) // hop + 1
        for size, taps, hop, step in zip(images.shape[2:], kernel, stride, dilation, strict=True)
    )
    return height, width


def by_columns(
    images: Tensor, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int], groups: int
) -> tuple[Tensor, Tensor]:
    """Im2col: every patch a column, one product."""
    patches = torch.nn.functional.unfold(images, kernel, dilation=dilation, stride=stride)
    columns = patches.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(2)
    return torch.matmul(columns, columns.mT), columns.sum(-1)


def by_row_shift(
    images: Tensor, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int], groups: int
) -> tuple[Tensor, Tensor]:
    """Only horizontal neighbours are copied, k times instead of k * k, and edge rows make up for the rest.

    Let z[h] be the input row h with the kernel's k horizontal taps side by side. The block of taps (dy, dy')
    is the sum of z[h]T z[h + delta] over the rows h = dy, dy + stride, ... under the output, with delta =
    dy' - dy. Blocks of one delta whose rows meet share all but their edge rows, so the first costs one
    product and the others a correction by a few rows: at stride 1 three products, not nine, for k = 3.
    """
    taps = kernel[0]
    height, width = output_size(images, kernel, stride, dilation)
    z = _rows(images, kernel, stride, dilation, groups, width)
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
    sums = [window(row, height).sum(-1) for row in range(0, taps * dilation[0], dilation[0])]
    channels = images.shape[1] // groups
    return _channel_first(total, kernel, channels), _channel_first_vector(
        torch.stack(sums, 1), kernel, channels
    )


def _rows(
    images: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    width: int,
) -> list[Tensor]:
    """Rows with horizontal taps side by side, sorted by their phase, the row's number modulo the stride.

    Each phase is `[groups, taps * channels, rows * B * width]`: a window of its rows is a view that a matrix
    product takes as it is, and the copy that makes it moves whole rows of pixels.
    """
    step, hop = dilation[1], stride[1]
    pixels = images.unflatten(1, (groups, -1)).permute(1, 2, 3, 0, 4)  # [groups, channel, row, B, column]
    span = (width - 1) * hop + 1
    taps = [pixels[..., tap * step : tap * step + span : hop] for tap in range(kernel[1])]
    return [
        torch.stack([tap[:, :, phase :: stride[0]] for tap in taps], dim=1).flatten(3).flatten(1, 2)
        for phase in range(stride[0])
    ]


def _channel_first(total: Tensor, kernel: tuple[int, int], channels: int) -> Tensor:
    """From (tap y, tap x, channel) to (channel, tap y, tap x) on both sides."""
    taps_y, taps_x = kernel
    split = total.view(-1, taps_y, taps_x, channels, taps_y, taps_x, channels)
    n = taps_y * taps_x * channels
    return split.permute(0, 3, 1, 2, 6, 4, 5).reshape(-1, n, n)


def _channel_first_vector(sums: Tensor, kernel: tuple[int, int], channels: int) -> Tensor:
    return sums.view(-1, *kernel, channels).permute(0, 3, 1, 2).flatten(1)
