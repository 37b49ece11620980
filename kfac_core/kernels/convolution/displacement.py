"""The gram of stride-1 convolution patches from displacements: no patch is ever built.

Two pairs of taps with the same displacement see the same pairs of pixels but for the edges of the image
(`shared_sums`). A 3 x 3 kernel has 81 pairs of taps and 25 displacements; one and its negative are each
other's transpose, which leaves 13 products, and 16 small ones of the image's edges.

Cost for a k x k kernel, C channels and P pixels: below (2k - 1)^2 C^2 P multiplications and additions, where
the product of the patch matrix with itself takes 2 k^4 C^2 P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_core.kernels.convolution.geometry import Margins
from kfac_core.kernels.convolution.shared_sums import recipe
from kfac_core.kernels.convolution.tap_sums import TapSums
from kfac_core.kernels.grams import inner, is_thin
from kfac_core.kernels.scratch import scratch
from kfac_core.kernels.transpose import copy_pixels

_SHORT = 32  # pixels of a row's product, below which copying the rows together first is faster (C = 64, 128)


def by_displacement(images: Tensor, kernel: tuple[int, int], margins: Margins) -> Tensor:
    """Sum of (patch patchT) over all windows of `images` [B, C, height, width] with zeros around them.

    The image is at least as large as the kernel.

    Returns:
        `[n, n]` with n = C * kernel height * kernel width, the channel slowest as in a convolution's weight.
    """
    steps = recipe((images.shape[2], images.shape[3]), kernel, margins)
    room, pixels = TapSums(steps, images), _images_inside(images)
    for number, here, there in steps.products:
        _multiply(pixels[here].flatten(1, 2), pixels[there].flatten(1, 2), room.sums[number])
    return room.gram()


def _images_inside(images: Tensor) -> Tensor:
    """A copy `[height, width, B, C]`: neighbouring columns of a row, of all images, lie one after another."""
    batch, channels, height, width = images.shape
    pixels = scratch(images, height, width, batch, channels)
    copy_pixels(images, pixels.permute(2, 0, 1, 3))
    return pixels


def _multiply(one: Tensor, other: Tensor, out: Tensor) -> None:
    """Sum of x x'T over two windows `[rows, pixels, C]`: a product a row, or one where the rows meet."""
    if one.is_contiguous() or one.shape[1] < _SHORT:
        one, other = one.flatten(0, 1).unsqueeze(0), other.flatten(0, 1).unsqueeze(0)
    if is_thin(one):
        out.copy_(inner(one.mT, other).sum(0))
    else:
        torch.addbmm(out, one.mT, other, beta=0, out=out)
