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

from kfac_core.grams import inner, is_thin
from kfac_core.layers.geometry import Margins
from kfac_core.layers.shared_sums import Recipe, recipe
from kfac_core.scratch import scratch
from kfac_core.transpose import copy_pixels

_SHORT = 32  # pixels of a row's product, below which copying the rows together first is faster (C = 64, 128)


def by_displacement(images: Tensor, kernel: tuple[int, int], margins: Margins) -> Tensor:
    """Sum of (patch patchT) over all windows of `images` [B, C, height, width] with zeros around them.

    The image is at least as large as the kernel.

    Returns:
        `[n, n]` with n = C * kernel height * kernel width, the channel slowest as in a convolution's weight.
    """
    channels, height, width = images.shape[1:]
    steps = recipe((height, width), kernel, margins)
    blocks = images.new_empty(channels, steps.wanted, channels)
    helpers = images.new_empty(len(steps.numbers) - steps.wanted, channels, channels)
    _find(_images_inside(images), steps, [*blocks.unbind(1), *helpers])
    return _arranged(blocks, steps.of_taps, kernel[0] * kernel[1])


def _images_inside(images: Tensor) -> Tensor:
    """A copy `[height, width, B, C]`: neighbouring columns of a row, of all images, lie one after another."""
    batch, channels, height, width = images.shape
    pixels = scratch(images, height, width, batch, channels)
    copy_pixels(images, pixels.permute(2, 0, 1, 3))
    return pixels


def _find(pixels: Tensor, steps: Recipe, sums: list[Tensor]) -> None:
    """Fill `sums`, each `[C, C]`, by number, from `pixels` [height, width, B, C]."""
    for number, here, there in steps.products:
        _multiply(pixels[here].flatten(1, 2), pixels[there].flatten(1, 2), sums[number])
    for number, (first, *others) in steps.additions:
        total = sums[first]
        for other in others:
            total = torch.add(total, sums[other], out=sums[number])
    for number, transposed in steps.mirrors:
        sums[number].copy_(sums[transposed].mT)


def _multiply(one: Tensor, other: Tensor, out: Tensor) -> None:
    """Sum of x x'T over two windows `[rows, pixels, C]`: a product a row, or one where the rows meet."""
    if one.is_contiguous() or one.shape[1] < _SHORT:
        one, other = one.flatten(0, 1).unsqueeze(0), other.flatten(0, 1).unsqueeze(0)
    if is_thin(one):
        out.copy_(inner(one.mT, other).sum(0))
    else:
        torch.addbmm(out, one.mT, other, beta=0, out=out)


def _arranged(blocks: Tensor, of_taps: list[int], taps: int) -> Tensor:
    """The gram `[n, n]` from the sums `[C, number, C']` and the numbers for each tap and tap'.

    One selection writes every element once: 0.6 ms for n = 1152, where a copy a block and one more to bring
    the channels outward take 1.5 ms.
    """
    channels = len(blocks)
    first = torch.tensor(of_taps, device=blocks.device).view(taps, 1, taps) * channels
    order = first + torch.arange(channels, device=blocks.device).view(1, -1, 1)  # [tap, C', tap']
    total = torch.index_select(blocks.flatten(1), 1, order.flatten())
    return total.view(channels * taps, -1)
