"""Gram matrices of convolution patches: the sum over all windows of patch patchT.

Four exact forms of the same sum; `patch_gram` picks one by device and geometry. What each of them buys is
measured in `results/core/convolution_forms.csv`.

| form | for | builds |
|---|---|---|
| `im2col` | GPUs; reference of the tests | every patch, then one product |
| `by_spectrum` | CPU, stride 1, many small images | spectra of the images |
| `by_displacement` | CPU, stride 1, otherwise | one transposed copy of the images |
| `by_row_shift` | CPU, any stride, dilation, groups; few channels | rows with horizontal taps side by side |
"""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_core.kernels.convolution.displacement import by_displacement
from kfac_core.kernels.convolution.geometry import Geometry
from kfac_core.kernels.convolution.row_shift import by_row_shift
from kfac_core.kernels.convolution.spectrum import by_spectrum, multiplications
from kfac_core.kernels.grams import Gram, gram, outer_sum
from kfac_core.kernels.scratch import is_plain

_FEW_CHANNELS = 8  # below, products of displaced images are too narrow, and row shift is faster
_NARROW = 16  # channels up to which products of displaced images run below full speed
_FEWER_NARROW, _FEWER_WIDE = 1.4, 2.5  # how many times fewer multiplications make the spectrum faster
_SPECTRAL = (torch.float32, torch.float64)  # a narrower type could not hold a spectrum to its own precision
_PATCH_ELEMENTS = 1 << 26  # of patches built at once: 256 MiB of float32
_MANY_PIXELS = 64  # per image, from which on one product per image beats gathering the pixels of all


def patch_gram(images: Tensor, geometry: Geometry) -> Tensor:
    """Sum over all windows of patch patchT.

    `images` are `[B, groups * channels, height, width]`. The result is `[groups, n, n]` with n = channels *
    kernel height * kernel width, the channel slowest as in a convolution's weight.
    """
    if not images.is_cpu:
        return im2col(images, geometry)
    dense = geometry.stride == geometry.dilation == (1, 1) and geometry.groups == 1
    large = all(size >= taps for size, taps in zip(images.shape[2:], geometry.kernel, strict=True))
    if not (dense and large) or images.shape[1] < _FEW_CHANNELS:
        return by_row_shift(images, geometry)
    form = by_spectrum if _spectrum_is_faster(images, geometry.kernel) else by_displacement
    return form(images, geometry.kernel, geometry.padding).unsqueeze(0)


def _spectrum_is_faster(images: Tensor, kernel: tuple[int, int]) -> bool:
    if images.dtype not in _SPECTRAL or not is_plain(images):
        return False
    by_frequency, by_pair = multiplications(images.shape, kernel)
    return by_frequency * (_FEWER_NARROW if images.shape[1] <= _NARROW else _FEWER_WIDE) <= by_pair


def im2col(images: Tensor, geometry: Geometry) -> Tensor:
    """One product of all patches; a large batch is taken in parts."""
    height, width = geometry.output_size(images)
    per_image = images.shape[1] * geometry.kernel[0] * geometry.kernel[1] * height * width
    first, *others = images.split(max(1, _PATCH_ELEMENTS // max(1, per_image)))
    rows = patch_rows(first, geometry)
    total = torch.matmul(rows.mT, rows)
    for part in others:
        rows = patch_rows(part, geometry)
        total.baddbmm_(rows.mT, rows)
    return total


def patch_rows(images: Tensor, geometry: Geometry) -> Tensor:
    """Every patch as a row, `[groups, rows, n]`, by one strided copy."""
    (height, width), padded = geometry.output_size(images), geometry.pad(images)
    channels = padded.shape[1] // geometry.groups
    batch, channel, row, column = padded.stride()
    (taps_down, taps_across), (down, across) = geometry.kernel, geometry.stride
    windows = padded.as_strided(
        (geometry.groups, len(padded), height, width, channels, taps_down, taps_across),
        (
            channel * channels, batch, row * down, column * across,
            channel, row * geometry.dilation[0], column * geometry.dilation[1],
        ),
    )  # fmt: skip
    return windows.reshape(geometry.groups, len(padded) * height * width, -1)


def patch_sums(images: Tensor, geometry: Geometry) -> Tensor:
    """Sum of all patches, `[groups, n]`."""
    return patch_rows(images.sum(0, keepdim=True), geometry).sum(1)


def pixel_gram(images: Tensor, groups: int) -> Gram:
    """Sum over all pixels of channels channelsT, `[groups, n, n]` from `[B, groups * n, height, width]`."""
    if groups == 1 and images.is_contiguous(memory_format=torch.channels_last):
        return gram(images.permute(0, 2, 3, 1).flatten(0, 2).unsqueeze(0))
    pixels = images.flatten(2)
    if groups == 1 and pixels.shape[2] >= _MANY_PIXELS:
        return outer_sum(pixels.mT).unsqueeze(0)
    return gram(pixels.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2))
