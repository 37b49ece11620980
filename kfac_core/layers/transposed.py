"""Transposed convolutions: a row of `a` holds the inputs that one output pixel is a sum over."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional

from kfac_core.kernels.convolution.geometry import Geometry
from kfac_core.layers.convolution import ConvLayer, windows_of
from kfac_core.placement import FactorShape, LayerShape


class TransposedConvLayer(ConvLayer):
    """`nn.ConvTranspose1d` to `3d`: a convolution of the input with zeros between its pixels.

    Its taps run backwards. The images are mirrored instead, so that patches are in the order of the weight
    `[in, out / groups, *kernel]`.
    """

    in_order = False
    module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d  # type: ignore[assignment]

    @property
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
