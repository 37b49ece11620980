"""VGG-16 for images of 32 x 32: the thirteen convolutions of Simonyan & Zisserman 2015, table 1, D."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# 0: halve the sides
_CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


class CifarVGG16(nn.Module):
    """Convolutions with batch normalisation, and one linear layer instead of the paper's three.

    Five poolings reduce 32 x 32 to one pixel, so that the two hidden layers of 4,096 would add nothing.

    Args:
        width: channels of the first stage; the paper has 64.
    """

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        inputs = 3
        for channels in _CHANNELS:
            if not channels:
                parts.append(nn.MaxPool2d(2))
                continue
            outputs = max(1, channels * width // 64)
            parts += [nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            nn.init.kaiming_normal_(parts[-3].weight, mode="fan_out", nonlinearity="relu")  # type: ignore[arg-type]
            inputs = outputs
        self.features = nn.Sequential(*parts)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of `[B, 3, 32, 32]`."""
        scores: Tensor = self.fc(torch.flatten(self.features(images), 1))
        return scores
