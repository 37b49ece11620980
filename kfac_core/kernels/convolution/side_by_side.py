"""The gram of stride-1 convolution patches by displacements, in few long products.

As in `displacement`, but zeros between the rows of pixels let one product run over all rows, and where the
channels alone make it too narrow to run at full speed, it takes several neighbouring pixels at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from kfac_core.kernels.convolution.geometry import Margins
from kfac_core.kernels.matmul import is_amd
from kfac_core.kernels.scratch import scratch
from kfac_core.kernels.transpose import copy_pixels

_WIDTH = 32  # columns; where nothing is known of the processor, and on GPUs


@functools.cache
def full_width() -> int:
    """Columns that a product on this CPU needs at least to run at full speed, or nearly.

    On an AMD EPYC (Zen 5) 16 run at 85 % of the speed of 32, on an Intel Xeon at 60 %.
    """
    return 16 if is_amd() else _WIDTH


def by_pixels_side_by_side(images: Tensor, kernel: tuple[int, int], margins: Margins) -> Tensor:
    """Sum of (patch patchT) over all windows of `images` [B, C, height, width] with zeros around them.

    The image is at least as large as the kernel.

    Returns:
        `[n, n]` with n = C * kernel height * kernel width, the channel slowest as in a convolution's weight.
    """
    plane = _Plane(images, kernel, margins)
    taps, channels = kernel[0], images.shape[1]
    total = images.new_empty(channels, *kernel, channels, *kernel)
    for delta in range(taps):
        block = plane.product(0, delta, plane.height)
        for tap in range(taps - delta):
            if tap:  # the window moves down by one row: one enters, one leaves
                entering, leaving = tap - 1 + plane.height, tap - 1
                if plane.meets(entering, entering + delta):
                    block = block + plane.product(entering, entering + delta, 1)
                if plane.meets(leaving, leaving + delta):
                    block = block - plane.product(leaving, leaving + delta, 1)
            total[:, tap, :, :, tap + delta] = block
            if delta:
                total[:, tap + delta, :, :, tap] = block.permute(2, 3, 0, 1)
    return total.flatten(3).flatten(0, 2)


class _Plane:
    """The images as rows of pixels with the channels innermost, `[row, image, column, C]`.

    There are k - 1 or more columns of zeros between a row's pixels and the next row's, so that a row that is
    displaced meets zeros and never its neighbour. Rows of zeros above and below are not stored.

    Attributes:
        height: rows of the output; a window has as many.
    """

    def __init__(self, images: Tensor, kernel: tuple[int, int], margins: Margins) -> None:
        batch, channels, rows, columns = images.shape
        self._left, right, self._top, bottom = margins
        self._taps = kernel[1]
        self._right_edge = self._left + columns + right - kernel[1] + 1  # width of the output
        self.height = rows + self._top + bottom - kernel[0] + 1
        self._together = 1  # pixels side by side in a product
        width = full_width() if images.is_cpu else _WIDTH
        while self._together * channels < width:
            self._together *= 2
        self._end = self._left + columns
        pitch = -(-(self._end + max(right, kernel[1] - 1 - self._left)) // self._together) * self._together
        self._rows = scratch(images, rows, batch, pitch, channels)
        self._rows[:, :, : self._left] = 0
        self._rows[:, :, self._end :] = 0
        copy_pixels(images, self._rows[:, :, self._left : self._end].transpose(0, 1))

    def meets(self, first: int, second: int) -> bool:
        """Whether two rows, counted from the top margin's first, both hold pixels."""
        return all(0 <= row - self._top < len(self._rows) for row in (first, second))

    def product(self, first: int, second: int, count: int) -> Tensor:
        """Sum over `count` rows from `first` >= 0 and `second` >= first on, by tap: `[C, x, C, x']`."""
        one, other = self._window(first, second, count)
        shifted = self._shifted(one, other)
        taps, last = self._taps, self._taps - 1
        block = torch.stack(
            [torch.stack([shifted[last + x2 - x1] for x2 in range(taps)], 1) for x1 in range(taps)], 1
        )  # [C, x, x', C]
        for x1, x2, extra in self._beyond(one, other):
            block[:, x1, x2] -= extra
        return block.transpose(2, 3)

    def _window(self, first: int, second: int, count: int) -> tuple[Tensor, Tensor]:
        """Rows `first ...` and `second ...` where both hold pixels: views `[rows, B, column, C]`."""
        start = max(first, self._top) - self._top
        delta = second - first
        stop = min(first + count - self._top, len(self._rows) - delta)
        start = max(start, -delta)
        return self._rows[start:stop], self._rows[start + delta : stop + delta]

    def _shifted(self, one: Tensor, other: Tensor) -> list[Tensor]:
        """Sum over all pixels p of x[p] x'[p + d]T, `[C, C]`, for d = 1 - k ... k - 1.

        Products of several pixels at a time hold each displacement on their diagonals of blocks.
        """
        together, taps, channels = self._together, self._taps, one.shape[-1]
        left, right = (pixels.reshape(-1, together * channels) for pixels in (one, other))
        symmetric = one.data_ptr() == other.data_ptr()
        reach = (taps + together - 2) // together
        sums: list[Tensor | None] = [None] * (2 * taps - 1)
        for offset in range(0 if symmetric else -reach, reach + 1):
            count = len(left) - abs(offset)
            product = left[max(0, -offset) :][:count].mT @ right[max(0, offset) :][:count]
            blocks = product.view(together, channels, together, channels)
            for diagonal in range(1 - together, together):
                d = together * offset + diagonal
                if abs(d) < taps and not (symmetric and d < 0):
                    part = product if together == 1 else blocks.diagonal(diagonal, 0, 2).sum(-1)
                    before = sums[taps - 1 + d]
                    sums[taps - 1 + d] = part if before is None else before + part
        if symmetric:
            sums[: taps - 1] = [part.mT for part in reversed(sums[taps:]) if part is not None]
        return [part for part in sums if part is not None]

    def _beyond(self, one: Tensor, other: Tensor) -> list[tuple[int, int, Tensor]]:
        """What `_shifted` sums of pixels that the window of a tap does not visit: tap, tap', `[C, C]`.

        Tap x visits columns x to x + width - 1, so those left of it and right of it are too much.
        """
        taps, last, channels = self._taps, self._taps - 1, one.shape[-1]
        extra: list[tuple[int, int, Tensor]] = []
        sides: tuple[tuple[range, Callable[[int, int], bool]], ...] = (
            (range(self._left, last), lambda x, c: c < x),
            (range(self._right_edge, self._end), lambda x, c: c >= x + self._right_edge),
        )
        for columns, outside in sides:
            if not columns:
                continue
            span = slice(columns.start, columns.stop)
            edges = [pixels[:, :, span].flatten(0, 1).flatten(1) for pixels in (one, other)]
            product = (edges[0].mT @ edges[1]).view(len(columns), channels, len(columns), channels)
            for c, c2 in itertools.product(columns, columns):
                pair = product[c - columns.start, :, c2 - columns.start]
                taps_of_pair = ((x, x + c2 - c) for x in range(taps))
                extra += [(x, x2, pair) for x, x2 in taps_of_pair if 0 <= x2 < taps and outside(x, c)]
        return extra
