"""Gram matrix of convolution patches from shifted rows, for any stride, dilation and number of groups.

Only horizontal neighbours are copied: k times the input instead of k * k. Let z[h] be input row h with the
kernel's k horizontal taps side by side. The block of taps (dy, dy') is the sum of z[h]T z[h + delta] over the
rows h = dy, dy + stride, ... under the output, with delta = dy' - dy. Two blocks with the same delta differ
only in their edge rows: the first costs one product, each other one a correction by a few rows. At stride 1
and k = 3 that is three products instead of nine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_core.kernels.convolution.geometry import Geometry
from kfac_core.kernels.grams import inner, outer_sum
from kfac_core.kernels.scratch import scratch
from kfac_core.kernels.transpose import transposed

_BUFFER_ELEMENTS = 1 << 24  # of rows built at once; a larger batch is taken in parts
_NARROW, _WIDE = 8, 256  # elements of a pixel of z; see _inner
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
    if size <= _NARROW or geometry.kernel[1] > _MANY_TAPS:
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
