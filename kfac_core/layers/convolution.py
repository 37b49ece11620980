"""Convolutions in one and two dimensions with any stride, padding, dilation and number of groups."""

from torch import Tensor, nn
from torch.nn import functional

from kfac_core.kernels.convolution.geometry import Geometry
from kfac_core.kernels.convolution.patches import patch_gram, patch_rows, patch_sums, pixel_gram
from kfac_core.kernels.grams import Gram, dense, gram, keeps_rows, with_bias
from kfac_core.layers.layer import KroneckerLayer
from kfac_core.placement import FactorShape, LayerShape


class ConvLayer(KroneckerLayer):
    """`nn.Conv1d` and `nn.Conv2d`: a row of `a` is the patch under one output pixel (KFC).

    Groups are independent convolutions side by side: one block of A and G each.
    """

    module: nn.Conv1d | nn.Conv2d
    is_spatial = True

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

    def count(self, inputs: Tensor, outputs: Tensor) -> tuple[int, int]:
        """Output pixels are rows; an input without a batch dimension is one example."""
        images = self._batched(outputs)
        return images.shape[0], images[:, 0].numel()

    def input_gram(self, inputs: Tensor) -> Gram:
        """Sum over the patches under all output pixels; with many, no patch matrix is built."""
        images, geometry = self._windows(self._batched(inputs))
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
        if self.grams is not None:
            return self.grams.of_pixels(images, self.module.groups)
        return pixel_gram(images, self.module.groups)

    def _batched(self, images: Tensor) -> Tensor:
        """`[B, channels, height, width]`; a signal is an image of height 1."""
        dimensions = len(self.module.kernel_size)
        if images.ndim == dimensions + 1:
            images = images.unsqueeze(0)
        return images.unsqueeze(2) if dimensions == 1 else images

    def _windows(self, images: Tensor) -> tuple[Tensor, Geometry]:
        """The images, padded here unless padding is zeros, and the geometry of the windows."""
        conv = self.module
        kernel, stride, dilation = (_pair(v) for v in (conv.kernel_size, conv.stride, conv.dilation))
        if conv.padding == "valid":
            sides = [(0, 0) for _ in conv.kernel_size]
        elif conv.padding == "same":  # torch pads the odd pixel at the end
            totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
            sides = [(total // 2, total - total // 2) for total in totals]
        else:
            sides = [(int(amount), int(amount)) for amount in conv.padding]
        amounts = [amount for side in reversed(sides) for amount in side]
        if conv.padding_mode != "zeros":
            images = _padded(images, amounts, conv.padding_mode)
            amounts = []
        left, right, top, bottom = [*amounts, 0, 0, 0, 0][:4]
        return images, Geometry(kernel, stride, dilation, conv.groups, (left, right, top, bottom))


def _padded(images: Tensor, amounts: list[int], mode: str) -> Tensor:
    if len(amounts) == 2:  # these modes pad exactly the given dimensions
        return functional.pad(images.squeeze(2), amounts, mode=mode).unsqueeze(2)
    return functional.pad(images, amounts, mode=mode)


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    return (1, values[0]) if len(values) == 1 else (values[0], values[1])
