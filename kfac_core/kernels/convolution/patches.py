"""Gram matrices of convolution patches, with as few copies of the input as the geometry allows.

`patch_gram` chooses among exact forms of the same sum; `by_columns` is the plain one that the others are
tested against.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kfac_core.kernels.convolution.correlation import Correlate, by_correlation, correlation_by_convolution
from kfac_core.kernels.convolution.displacement import by_displacement
from kfac_core.kernels.convolution.geometry import Geometry
from kfac_core.kernels.convolution.row_shift import by_row_shift
from kfac_core.kernels.convolution.side_by_side import by_pixels_side_by_side, full_width
from kfac_core.kernels.convolution.spectrum import correlation_by_spectrum, multiplications
from kfac_core.kernels.grams import Gram, gram, outer_sum
from kfac_core.kernels.matmul import is_compiled
from kfac_core.kernels.scratch import is_plain

_FEW_CHANNELS = 8  # below which shifting rows beats displacements, up to 10 times at 1 channel of 5 x 5 taps
_LEAST_CHANNELS = {16: 3, 32: 16}  # for pixels side by side to be ahead, by the width that a product needs
_TALL = 4  # taps above each other that share no row, from which on shifting rows is slower, up to 1.8 times
_SPECTRAL = (torch.float32, torch.float64)  # narrower ones could not hold a spectrum to their own precision
_TIMES_FEWER = 3.3  # multiplications by spectrum, from which on it is ahead; 3 x 3 taps, AMD EPYC
_WIDE_ENOUGH = 16  # channels, below which its products are narrow: up to 1.25 times as long for 7 x 7 taps
_TIMES_REACH = 4  # of an image's side by a kernel's, less one; below, what lies outside is a third and more
_PIXELS_A_CHANNEL = 8  # below, sums take less time than putting them into place
_ONE_SMALL = 20480  # elements; torch's own bound
_MANY_PIXELS = 64  # in an image, from which on a product an image beats gathering the pixels of all


def patch_gram(images: Tensor, geometry: Geometry) -> Tensor:
    """Sum over all windows of (patch patchT).

    `images` are `[B, groups * channels, height, width]`. The result is `[groups, n, n]` with n = channels *
    kernel height * kernel width, the channel slowest as in a convolution's weight.
    """
    dense = geometry.stride == geometry.dilation == (1, 1) and geometry.groups == 1
    if dense and all(size >= taps for size, taps in zip(images.shape[2:], geometry.kernel, strict=True)):
        if correlate := _fastest_correlation(images, geometry.kernel):
            return by_correlation(images, geometry.kernel, geometry.margins, correlate).unsqueeze(0)
        channels, width = images.shape[1], full_width()
        if not images.is_cpu or _LEAST_CHANNELS[width] <= channels < width <= images.shape[3]:
            return by_pixels_side_by_side(images, geometry.kernel, geometry.margins).unsqueeze(0)
        if channels >= _FEW_CHANNELS:
            return by_displacement(images, geometry.kernel, geometry.margins).unsqueeze(0)
    if geometry.groups == 1 and geometry.stride[0] >= geometry.kernel[0] >= _TALL:
        return outer_sum(patch_rows(images, geometry)).unsqueeze(0)
    return by_row_shift(images, geometry)


def _fastest_correlation(images: Tensor, kernel: tuple[int, int]) -> Correlate | None:
    """What correlates these images faster than their displaced copies are multiplied, if anything."""
    if images.shape[1] < _FEW_CHANNELS or not (images.is_cpu and is_plain(images)):
        return None
    by_spectrum, pair_by_pair = multiplications(images.shape, kernel)
    wide = images.shape[1] >= _WIDE_ENOUGH
    if wide and images.dtype in _SPECTRAL and by_spectrum * _TIMES_FEWER <= pair_by_pair:
        return correlation_by_spectrum
    return correlation_by_convolution if _is_compiled_well(images, kernel) else None


def _is_compiled_well(images: Tensor, kernel: tuple[int, int]) -> bool:
    """Whether oneDNN's sums are ahead: not of few pixels, nor with zeros all around.

    Of one small image torch takes the gradient by another way, which builds the patches.
    """
    channels, reach = images.shape[1], max(kernel) - 1
    enough = images.numel() >= _PIXELS_A_CHANNEL * channels**2
    alone = len(images) == 1 and images.numel() <= _ONE_SMALL
    return enough and not alone and min(images.shape[2:]) >= _TIMES_REACH * reach and is_compiled(images)


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
