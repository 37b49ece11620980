"""Nets with every kind of layer that K-FAC takes: tiny for exactness, larger for counts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def conv_net() -> nn.Module:
    """Stride, padding, dilation, groups, a layer with and without bias, and in-place activations."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=1, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, (3, 2), stride=2, padding=(2, 1), dilation=(2, 1), groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 3, 1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.Tanh(),
        nn.Linear(5, 3, bias=False),
    ).double()


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images [size, 2, 5, 5] and labels of three classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, 5, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (size,), generator=generator)


class ConvNet(nn.Module):
    """Convolutions: wide, grouped, strided, dilated, 1 by 1, in one dimension."""

    def __init__(self, wide: int = 640, channels: int = 64) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.a, self.grouped = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.point = nn.Conv2d(32, channels, 1, stride=2)
        self.dilated = nn.Conv2d(channels, channels, 3, padding=2, dilation=2)
        self.wide = nn.Conv2d(channels, wide, 1)
        self.signal = nn.Conv1d(wide, 24, 3, padding=1, padding_mode="circular")
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, 10]` of `[B, 3, height, width]`."""
        x = self.grouped(self.a(torch.relu(self.norm(self.stem(images)))))
        x = self.wide(self.dilated(self.point(x)))
        logits: Tensor = self.head(self.signal(x.flatten(2)).mean(2))
        return logits


class Transformer(nn.Module):
    """An embedding, attention, a feed-forward block and a head over the vocabulary."""

    def __init__(self, vocabulary: int = 400, features: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features, padding_idx=0)
        self.norm = nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)
        self.head = nn.Linear(features, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[B, length, vocabulary]` of `[B, length]`."""
        x = self.embedding(tokens)
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(functional.scaled_dot_product_attention(query, key, value))
        logits: Tensor = self.head(x + self.down(torch.relu(self.up(self.norm(x)))))
        return logits


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut; the 3 x 3 has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, 4 * width, H / stride, W / stride]`."""
        return torch.relu(self.body(images) + self.shortcut(images))


def resnet50() -> nn.Module:
    """The layers of ResNet-50 (He et al. 2016), for images `[B, 3, 224, 224]`."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for index in range(count):
            layers.append(Bottleneck(inputs, width, 2 if index == 0 and stage else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
