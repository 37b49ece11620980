"""Convolutions in one to three dimensions with any stride, padding, dilation and number of groups."""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core.convolution import Geometry, patch_gram, patch_rows, patch_sums, pixel_gram
from kfac_core.grams import Gram, dense, gram, keeps_rows, squares, with_bias
from kfac_core.layers.layer import KroneckerLayer
from kfac_core.placement import FactorShape, LayerShape


class ConvLayer(KroneckerLayer):
    """`nn.Conv1d` to `nn.Conv3d`: a row of `a` is the patch under one output pixel (KFC).

    Groups are independent convolutions side by side: one block of A and G each.
    """

    module: nn.Conv1d | nn.Conv2d | nn.Conv3d

    @cached_property
    def shape(self) -> LayerShape:
        """A over a patch of one group (and bias), G over the outputs of one group."""
        conv = self.module
        patch = conv.weight.shape[1:].numel()
        return self.bounded(
            LayerShape(
                self.name,
                FactorShape(patch + self.has_bias, conv.groups),
                FactorShape(conv.out_channels // conv.groups, conv.groups),
            )
        )

    def count(self, inputs: Tensor, outputs: Tensor) -> tuple[int, int]:
        """Output pixels are rows; an input without a batch dimension is one example."""
        images = self._batched(outputs)
        return images.shape[0], images[:, 0].numel()

    def input_gram(self, inputs: Tensor) -> Gram:
        """Sum over the patches under all output pixels; with many, no patch matrix is built."""
        images, geometry = self._windows(inputs)
        if self.is_diagonal("a"):
            return self._patch_squares(images, geometry)
        if self.grams is not None:
            if geometry == Geometry((1, 1), groups=geometry.groups) and not self.has_bias:
                return self.grams.of_pixels(images, geometry.groups)
            return self.grams.of_patches(images, geometry, with_ones=self.has_bias)
        height, width = geometry.output_size(images)
        count = images.shape[0] * height * width
        if keeps_rows(count, self.shape.a.dim):
            return gram(patch_rows(images, geometry), with_ones=self.has_bias)
        if geometry.kernel == (1, 1):
            strided = geometry.pad(images)[:, :, :: geometry.stride[0], :: geometry.stride[1]]
            total = dense(pixel_gram(strided, geometry.groups))
        else:
            total = patch_gram(images, geometry)
        return with_bias(total, patch_sums(images, geometry), count) if self.has_bias else total

    def output_gram(self, gradients: Tensor) -> Gram:
        """Sum over all pixels of all images."""
        images = self._batched(gradients)
        if self.is_diagonal("g"):
            pixels = images.movedim(1, -1).reshape(-1, images.shape[1])
            return squares(pixels, self.grams.dtype if self.grams else images.dtype)
        if self.grams is not None:
            return self.grams.of_pixels(images, self.module.groups)
        return pixel_gram(images, self.module.groups)

    def _patch_squares(self, images: Tensor, geometry: Geometry) -> Tensor:
        """The diagonal alone: sums over all windows of the patches of squared pixels."""
        squared = images.to(self.grams.dtype if self.grams else images.dtype).square()
        total = patch_sums(squared, geometry).flatten()
        if self.has_bias:
            height, width = geometry.output_size(images)
            total = torch.cat([total, total.new_full((1,), len(images) * height * width)])
        return total.view(-1, 1, 1)

    def _batched(self, images: Tensor) -> Tensor:
        """`[B, channels, height, width]`; a signal is an image of height 1, a volume one below the other."""
        images = self._with_batch(images)
        if images.ndim == 3:
            return images.unsqueeze(2)
        return images.flatten(2, 3) if images.ndim == 5 else images

    def _with_batch(self, images: Tensor) -> Tensor:
        return images.unsqueeze(0) if images.ndim == len(self.module.kernel_size) + 1 else images

    def _windows(self, inputs: Tensor) -> tuple[Tensor, Geometry]:
        """The images, padded here unless padding is zeros, and the geometry of the windows."""
        conv, images = self.module, self._with_batch(inputs)
        if conv.padding == "valid":
            sides = [(0, 0) for _ in conv.kernel_size]
        elif conv.padding == "same":  # torch pads the odd pixel at the end
            totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
            sides = [(total // 2, total - total // 2) for total in totals]
        else:
            sides = [(int(amount), int(amount)) for amount in conv.padding]
        if conv.padding_mode != "zeros":
            images = functional.pad(images, _amounts(sides), mode=conv.padding_mode)
            sides = [(0, 0) for _ in sides]
        return windows_of(images, conv.kernel_size, conv.stride, conv.dilation, sides, conv.groups)


def windows_of(
    images: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    sides: list[tuple[int, int]],
    groups: int,
) -> tuple[Tensor, Geometry]:
    """Windows in one to three dimensions as windows of images, with the same patches in the same order.

    A volume becomes an image for each place of the window along its depth, with the slices that the window
    covers side by side as channels. `sides` are the zeros before and after, by dimension.
    """
    if len(kernel) == 1:
        pair = images.unsqueeze(2), (1, *kernel), (1, *stride), (1, *dilation), [(0, 0), *sides]
        return windows_of(*pair, groups)
    if len(kernel) == 3:
        deep = functional.pad(images, [0, 0, 0, 0, *sides[0]])
        places = (deep.shape[2] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
        step = deep.stride()
        slices = deep.as_strided(
            (len(deep), places, deep.shape[1], kernel[0], *deep.shape[3:]),
            (step[0], step[2] * stride[0], step[1], step[2] * dilation[0], *step[3:]),
            deep.storage_offset(),
        )
        flat = slices.flatten(2, 3).flatten(0, 1)
        return windows_of(flat, kernel[1:], stride[1:], dilation[1:], sides[1:], groups)
    (top, bottom), (left, right) = sides
    windows = (kernel[0], kernel[1]), (stride[0], stride[1]), (dilation[0], dilation[1])
    return images, Geometry(*windows, groups, (left, right, top, bottom))


def _amounts(sides: list[tuple[int, int]]) -> list[int]:
    """As `functional.pad` takes them: the last dimension first."""
    return [amount for side in reversed(sides) for amount in side]


# ------------------------------------------------------------
# Transposed convolutions: a row of `a` holds the inputs that one output pixel is a sum over.


class TransposedConvLayer(ConvLayer):
    """`nn.ConvTranspose1d` to `3d`: a convolution of the input with zeros between its pixels.

    Its taps run backwards. The images are mirrored instead, so that patches are in the order of the weight
    `[in, out / groups, *kernel]`.
    """

    in_order = False
    module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d  # type: ignore[assignment]

    @cached_property
    def shape(self) -> LayerShape:
        """A over the inputs of one group under all taps (and bias), G over the outputs of one group."""
        conv = self.module
        patch = conv.weight.shape[0] * conv.weight.shape[2:].numel() // conv.groups
        return self.bounded(
            LayerShape(
                self.name,
                FactorShape(patch + self.has_bias, conv.groups),
                FactorShape(conv.out_channels // conv.groups, conv.groups),
            )
        )

    def aligned(self, matrix: Tensor) -> Iterator[Tensor]:
        """The weight's part as `[groups, in / groups, out / groups, *kernel]`, and the bias."""
        conv, taps = self.module, self.module.weight.shape[2:]
        weight, *bias = self._views(matrix)
        yield (
            weight.unflatten(-1, (-1, *taps))
            .view(conv.groups, conv.out_channels // conv.groups, conv.in_channels // conv.groups, *taps)
            .transpose(1, 2)
        )
        for part in bias:
            yield part.reshape(conv.out_channels)

    def _windows(self, inputs: Tensor) -> tuple[Tensor, Geometry]:
        conv, images = self.module, self._with_batch(inputs)
        stride: tuple[int, ...] = conv.stride
        sizes = [(pixels - 1) * each + 1 for pixels, each in zip(images.shape[2:], stride, strict=True)]
        spread = images.new_zeros(*images.shape[:2], *sizes)
        apart: list[slice] = [slice(None), slice(None), *(slice(None, None, each) for each in stride)]
        spread[tuple(apart)] = images
        settings: list[tuple[int, ...]] = [conv.kernel_size, conv.dilation, conv.padding, conv.output_padding]  # type: ignore[list-item]
        sides = [
            (dilation * (taps - 1) - padding + extra, dilation * (taps - 1) - padding)
            for taps, dilation, padding, extra in zip(*settings, strict=True)
        ]
        mirrored = spread.flip(tuple(range(2, spread.ndim)))
        amounts = [amount for side in reversed(sides) for amount in side]
        padded = functional.pad(mirrored, amounts)  # also crops, where padding exceeds the kernel
        ones, none = (1,) * len(sizes), [(0, 0) for _ in sizes]
        return windows_of(padded, conv.kernel_size, ones, conv.dilation, none, conv.groups)
