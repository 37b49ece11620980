"""How a convolution's windows lie on its input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

Margins = tuple[int, int, int, int]
"""Zeros left of, right of, above and below an image."""


@dataclass(frozen=True)
class Geometry:
    """A convolution's windows; pairs are (vertical, horizontal).

    Attributes:
        margins: zeros around the images; other padding is part of the images already.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    margins: Margins = (0, 0, 0, 0)

    def pad(self, images: Tensor) -> Tensor:
        """`images` with their margins."""
        return functional.pad(images, self.margins) if any(self.margins) else images

    def output_size(self, images: Tensor) -> tuple[int, int]:
        """Height and width of the convolution's output."""
        left, right, top, bottom = self.margins
        sizes = images.shape[2] + top + bottom, images.shape[3] + left + right
        height, width = (
            (size - (taps - 1) * step - 1) // hop + 1
            for size, taps, hop, step in zip(sizes, self.kernel, self.stride, self.dilation, strict=True)
        )
        return height, width
