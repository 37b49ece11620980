"""The gram of stride-1 convolution patches from the images' correlation with themselves: no patch is built.

Every displacement is summed over all pixels first, by whatever does that fastest; what a pair of taps does
not visit, at the edges, is taken off afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from kfac_core.kernels.convolution.geometry import Margins
from kfac_core.kernels.convolution.shared_sums import Window, recipe
from kfac_core.kernels.convolution.tap_sums import TapSums
from kfac_core.kernels.grams import inner
from kfac_core.kernels.transpose import transposed

_SUMMED = 1 << 13  # pixels in one go: oneDNN adds one product after another to the same number

Correlate = Callable[[Tensor, tuple[int, int]], Tensor]
"""Images `[B, C, height, width]` and a kernel to the sum of x[p] x[p + d]T over all pixels, zero outside:
`[down, right, C, C]`, displacements from 0 down and from 1 - k to the right on, to k - 1."""


def by_correlation(images: Tensor, kernel: tuple[int, int], margins: Margins, correlate: Correlate) -> Tensor:
    """Sum of (patch patchT) over all windows of `images` [B, C, height, width] with zeros around them.

    The image is at least as large as the kernel.

    Returns:
        `[n, n]` with n = C * kernel height * kernel width, the channel slowest as in a convolution's weight.
    """
    steps = recipe((images.shape[2], images.shape[3]), kernel, margins)
    room, lines = TapSums(steps, images), _Lines(images)
    products = defaultdict(list)
    for number, here, there in steps.products:
        products[_displacement(here, there)].append((number, here, there))
    everywhere = correlate(images, kernel)
    for (down, right), parts in products.items():
        (inside, *_), *edges = sorted(parts, key=lambda part: _size(part[1]), reverse=True)
        rest = everywhere[down, kernel[1] - 1 + right]
        for number, here, there in edges:
            room.sums[number].copy_(inner(lines.of(here).mT, lines.of(there)))
            rest = torch.sub(rest, room.sums[number], out=room.sums[inside])
        if not edges:
            room.sums[inside].copy_(rest)
    return room.gram()


def correlation_by_convolution(images: Tensor, kernel: tuple[int, int]) -> Tensor:
    """The correlation (`Correlate`) as a convolution's own backward pass.

    The gradient of a convolution's weight is, for each tap, the sum of products of the output's gradient and
    of the input so many pixels further. With the same images in both places that is their correlation. oneDNN
    compiles it for the processor and its shape, and reads the images as they lie; it does 150 to 195 GFLOP/s
    on one core of an AMD EPYC (Zen 5), where MKL's products of displaced copies do 65 to 110.

    Cost for a k x k kernel, C channels and P pixels: 2 k (2k - 1) C^2 P multiplications and additions, zeros
    around the images included, where the product of the patch matrix with itself takes 2 k^4 C^2 P.
    """
    channels, (down, right) = images.shape[1], kernel
    size = (channels, channels, down, 2 * right - 1)
    together = max(1, _SUMMED // images[0, 0].numel())
    weight, *others = (
        conv2d_weight(functional.pad(part, (0, 0, 0, down - 1)), size, part, padding=(0, right - 1))
        for part in images.split(together)
    )
    for other in others:
        weight += other
    everywhere: Tensor = transposed(weight.flatten(2)).unflatten(1, size[2:])
    return everywhere.permute(1, 2, 0, 3)


def _displacement(here: Window, there: Window) -> tuple[int, int]:
    down, right = (to.start - own.start for own, to in zip(here, there, strict=True))
    return down, right


def _size(window: Window) -> int:
    rows, columns = (part.stop - part.start for part in window)
    return int(rows * columns)


class _Lines:
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
        """These rows (dimension 2) or columns (3), `[of them, along them, B, C]`."""
        key = dimension, span.start, span.stop
        if key not in self._copies:
            lines = self._images.narrow(dimension, span.start, span.stop - span.start).movedim(dimension, 0)
            flat = transposed(lines.flatten(1, 2))  # [of them, along them, B * C]
            self._copies[key] = flat.unflatten(2, lines.shape[1:3])
        return self._copies[key]
