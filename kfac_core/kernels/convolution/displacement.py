"""Gram matrix of stride-1 convolution patches from displaced images; no patch is built.

Two pairs of taps with the same displacement see the same pairs of pixels, except at the edges of the image
(`tap_sum_plan`). A 3 x 3 kernel has 81 pairs of taps but 25 displacements, and opposite displacements give
each other's transpose: 13 products remain, and 16 small ones at the edges.

Cost for a k x k kernel, C channels and P pixels: below (2k - 1)^2 C^2 P multiplications and additions, where
the product of the patch matrix with itself takes 2 k^4 C^2 P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_core.kernels.convolution.geometry import Padding
from kfac_core.kernels.convolution.tap_sum_plan import TapSums, plan_tap_sums
from kfac_core.kernels.grams import inner, is_thin
from kfac_core.kernels.scratch import scratch
from kfac_core.kernels.transpose import copy_pixels

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
