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
    if stride[0] == 1 and kernel[0] > 1:
        return by_row_shift(images, kernel, stride[1], dilation, groups)
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
    images: Tensor, kernel: tuple[int, int], stride_x: int, dilation: tuple[int, int], groups: int
) -> tuple[Tensor, Tensor]:
    """For vertical stride 1: only horizontal neighbours are copied, k times instead of k * k.

    Let z[h] be the input row h with the kernel's k horizontal taps side by side. The block of taps (dy, dy')
    is the sum of z[h]T z[h + delta] over the rows h = dy .. dy + H - 1, with delta = dy' - dy. Blocks of one
    delta share all but their edge rows, so each delta costs one product and a correction by a few rows: 27
    instead of 81 channel blocks for 3 x 3.
    """
    taps_y, taps_x = kernel
    step_y, step_x = dilation
    channels = images.shape[1] // groups
    height, width = output_size(images, kernel, (1, stride_x), dilation)
    # [groups, rows, B, width, taps_x, channels]: a slice of rows is a view with contiguous rows of z
    grouped = images.unflatten(1, (groups, channels)).permute(1, 3, 0, 4, 2)
    z = torch.stack(
        [
            grouped[..., x * step_x :, :][..., : (width - 1) * stride_x + 1 : stride_x, :]
            for x in range(taps_x)
        ],
        dim=-2,
    )
    size = taps_x * channels
    z = z.flatten(4).flatten(2, 3)  # [groups, rows, B * width, taps_x * channels]

    def product(first: int, last: int, delta: int) -> Tensor:
        """Sum over rows first <= h < last of z[h]T z[h + delta]."""
        one, other = z[:, first:last].flatten(1, 2), z[:, first + delta : last + delta].flatten(1, 2)
        return torch.matmul(one.mT, other)

    total = images.new_empty(groups, taps_y, size, taps_y, size)
    for difference in range(taps_y):
        delta = difference * step_y
        block = product(0, height, delta)
        for tap in range(taps_y - difference):
            if tap:  # the window of rows moves down by one dilation step
                first, last = (tap - 1) * step_y, tap * step_y
                block = block + product(first + height, last + height, delta) - product(first, last, delta)
            total[:, tap, :, tap + difference] = block
            total[:, tap + difference, :, tap] = block.mT
    sums = torch.stack([z[:, y * step_y : y * step_y + height].sum((1, 2)) for y in range(taps_y)], dim=1)
    return _channel_first(total, kernel, channels), _channel_first_vector(sums, kernel, channels)


def _channel_first(total: Tensor, kernel: tuple[int, int], channels: int) -> Tensor:
    """From (tap y, tap x, channel) to (channel, tap y, tap x) on both sides."""
    taps_y, taps_x = kernel
    split = total.view(-1, taps_y, taps_x, channels, taps_y, taps_x, channels)
    n = taps_y * taps_x * channels
    return split.permute(0, 3, 1, 2, 6, 4, 5).reshape(-1, n, n)


def _channel_first_vector(sums: Tensor, kernel: tuple[int, int], channels: int) -> Tensor:
    return sums.view(-1, *kernel, channels).permute(0, 3, 1, 2).flatten(1)
