"""Two-dimensional convolutions with any stride, padding, dilation and number of groups."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core.layers.layer import KroneckerLayer, gram
from kfac_core.placement import FactorShape, LayerShape


class Conv2dLayer(KroneckerLayer):
    """`nn.Conv2d`: a row of `a` is the patch under one output pixel, channel by channel (KFC).

    Groups are independent convolutions side by side: one block of A and G each.
    """

    module: nn.Conv2d

    @property
    def shape(self) -> LayerShape:
        """A over a patch of one group (and bias), G over the outputs of one group."""
        conv = self.module
        patch = conv.in_channels // conv.groups * conv.kernel_size[0] * conv.kernel_size[1]
        return LayerShape(
            self.name,
            FactorShape(patch + (conv.bias is not None), conv.groups),
            FactorShape(conv.out_channels // conv.groups, conv.groups),
        )

    def positions(self, inputs: Tensor, outputs: Tensor) -> tuple[int, int]:
        """Output pixels are the positions; an input without batch dimension is one example."""
        examples = outputs.shape[0] if outputs.ndim == 4 else 1
        return examples, outputs.shape[-1] * outputs.shape[-2]

    def input_gram(self, inputs: Tensor) -> Tensor:
        """Patches by im2col, `[groups, B * S, patch]`."""
        conv = self.module
        images = inputs if inputs.ndim == 4 else inputs.unsqueeze(0)
        patches = functional.unfold(
            _pad(images, conv), conv.kernel_size, dilation=conv.dilation, stride=conv.stride
        )
        rows = patches.unflatten(1, (conv.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        return gram(rows, with_ones=conv.bias is not None)

    def output_gram(self, gradients: Tensor) -> Tensor:
        """Pixels of all images as columns, `[groups, outputs, B * S]`."""
        images = gradients if gradients.ndim == 4 else gradients.unsqueeze(0)
        columns = images.flatten(2).unflatten(1, (self.module.groups, -1)).permute(1, 2, 0, 3).flatten(2)
        return torch.matmul(columns, columns.mT)


def _pad(images: Tensor, conv: nn.Conv2d) -> Tensor:
    """Pad as the convolution would, so that patches of every padding mode are plain windows."""
    if conv.padding == "valid":
        return images
    if conv.padding == "same":  # torch puts the odd pixel at the end
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        (top, bottom), (left, right) = ((total // 2, total - total // 2) for total in totals)
    else:
        top, left = (int(amount) for amount in conv.padding)
        bottom, right = top, left
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return functional.pad(images, (left, right, top, bottom), mode=mode)
