"""Convolutions in one and two dimensions with any stride, padding, dilation and number of groups."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core.layers.layer import KroneckerLayer, with_bias
from kfac_core.layers.patches import output_size, patch_gram
from kfac_core.placement import FactorShape, LayerShape


class ConvLayer(KroneckerLayer):
    """`nn.Conv1d` and `nn.Conv2d`: a row of `a` is the patch under one output pixel (KFC).

    Groups are independent convolutions side by side: one block of A and G each.
    """

    module: nn.Conv1d | nn.Conv2d

    @property
    def shape(self) -> LayerShape:
        """A over a patch of one group (and bias), G over the outputs of one group."""
        conv = self.module
        patch = conv.weight[0].numel()
        return LayerShape(
            self.name,
            FactorShape(patch + self.has_bias, conv.groups),
            FactorShape(conv.out_channels // conv.groups, conv.groups),
        )

    def positions(self, inputs: Tensor, outputs: Tensor) -> tuple[int, int]:
        """Output pixels are the positions; an input without batch dimension is one example."""
        images = self._batched(outputs)
        return images.shape[0], images[0, 0].numel()

    def input_gram(self, inputs: Tensor) -> Tensor:
        """One row for the patch under each output pixel, without building the rows where that can be."""
        conv = self.module
        images = self._batched(inputs)
        kernel, stride, dilation = (_pair(v) for v in (conv.kernel_size, conv.stride, conv.dilation))
        padded = self._pad(images)
        total, sums = patch_gram(padded, kernel, stride, dilation, conv.groups)
        if not self.has_bias:
            return total
        height, width = output_size(padded, kernel, stride, dilation)
        return with_bias(total, sums, images.shape[0] * height * width)

    def output_gram(self, gradients: Tensor) -> Tensor:
        """Pixels of all images as columns, `[groups, outputs, B * S]`."""
        images = self._batched(gradients).flatten(2)
        columns = images.unflatten(1, (self.module.groups, -1)).permute(1, 2, 0, 3).flatten(2)
        return torch.matmul(columns, columns.mT)

    def _batched(self, images: Tensor) -> Tensor:
        """`[B, channels, height, width]`; a signal is an image of height 1."""
        dimensions = len(self.module.kernel_size)
        if images.ndim == dimensions + 1:
            images = images.unsqueeze(0)
        return images.unsqueeze(2) if dimensions == 1 else images

    def _pad(self, images: Tensor) -> Tensor:
        """Pad as the convolution would, so that patches of every padding mode are plain windows."""
        conv = self.module
        if conv.padding == "valid":
            return images
        if conv.padding == "same":  # torch puts the odd pixel at the end
            totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
            sides = [(total // 2, total - total // 2) for total in totals]
        else:
            sides = [(int(amount), int(amount)) for amount in conv.padding]
        amounts = [amount for side in reversed(sides) for amount in side]
        if conv.padding_mode == "zeros":
            return functional.pad(images, amounts)
        if len(conv.kernel_size) == 1:  # these modes pad exactly the dimensions that they are given
            return functional.pad(images.squeeze(2), amounts, mode=conv.padding_mode).unsqueeze(2)
        return functional.pad(images, amounts, mode=conv.padding_mode)


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    return (1, values[0]) if len(values) == 1 else (values[0], values[1])
