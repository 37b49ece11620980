"""How a convolution's windows lie on its input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

Padding = tuple[int, int, int, int]
"""Zeros to the left of, to the right of, above and below an image."""


@dataclass(frozen=True)
class Geometry:
    """A convolution's windows; pairs are (vertical, horizontal).

    Attributes:
        padding: zeros around the images; padding with other values is already part of the images.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    padding: Padding = (0, 0, 0, 0)

    def pad(self, images: Tensor) -> Tensor:
        """`images` with their padding."""
        return functional.pad(images, self.padding) if any(self.padding) else images

    def output_size(self, images: Tensor) -> tuple[int, int]:
        """Height and width of the convolution's output."""
        left, right, top, bottom = self.padding
        sizes = images.shape[2] + top + bottom, images.shape[3] + left + right
        height, width = (
            (size - (taps - 1) * dilation - 1) // stride + 1
            for size, taps, dilation, stride in zip(
                sizes, self.kernel, self.dilation, self.stride, strict=True
            )
        )
        return height, width
