"""The U-Net for brain MRI of Buda et al. 2019 (Ronneberger et al. 2015 with batch normalisation)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.workloads.cards.segmentation import UNET_LEVELS


class UNet(nn.Module):
    """Four halvings, a bottom, and four doublings that also see the level's own features.

    Args:
        features: channels of the first level; each level doubles them.
        inputs: channels of an image.
    """

    def __init__(self, features: int = 32, inputs: int = 3) -> None:
        super().__init__()
        widths = [features * 2**level for level in range(UNET_LEVELS + 1)]
        before = [inputs, *widths[:-1]]
        self.down = nn.ModuleList(
            _two_convolutions(i, o) for i, o in zip(before[:-1], widths[:-1], strict=True)
        )
        self.bottom = _two_convolutions(before[-1], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in widths[-2::-1])
        self.merge = nn.ModuleList(_two_convolutions(2 * width, width) for width in widths[-2::-1])
        self.head = nn.Conv2d(features, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Log odds of each pixel, `[B, 1, H, W]` for `[B, C, H, W]`; sides are multiples of 16."""
        levels = []
        for down in self.down:
            images = down(images)
            levels.append(images)
            images = nn.functional.max_pool2d(images, 2)
        images = self.bottom(images)
        for up, merge in zip(self.up, self.merge, strict=True):
            images = merge(torch.cat((up(images), levels.pop()), dim=1))
        scores: Tensor = self.head(images)
        return scores


def _two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )
