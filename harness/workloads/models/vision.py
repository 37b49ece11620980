"""Networks for images: ResNets, VGG-16, the U-Net, and torchvision's DenseNet-201 and Inception-v3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.workloads.sources.files import import_extra


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A: subsample, pad channels)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self._stride, self._missing = stride, outputs - inputs

    def forward(self, images: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, outputs, H / stride, W / stride]`."""
        residual = functional.relu(self.bn1(self.conv1(images)))
        residual = self.bn2(self.conv2(residual))
        if self._missing or self._stride > 1:
            before = self._missing // 2
            channels = (before, self._missing - before)
            images = functional.pad(images[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, *channels))
        return functional.relu(residual + images)


class CifarResNet(nn.Module):
    """Three stages of 16, 32 and 64 channels, `6 * blocks + 2` layers deep, for images of 32 x 32.

    Args:
        width: channels of the first stage; the paper has 16.
    """

    def __init__(self, blocks: int, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        inputs = width
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
            for index in range(blocks):
                stages.append(BasicBlock(inputs, outputs, stride if index == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*stages)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of `[B, 3, H, W]`."""
        features = self.blocks(functional.relu(self.bn1(self.conv1(images))))
        scores: Tensor = self.fc(features.mean((2, 3)))
        return scores


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions; the 3x3 has the stride, as in torchvision."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, 4 * width, H / stride, W / stride]`."""
        residual = functional.relu(self.bn1(self.conv1(images)))
        residual = functional.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        return functional.relu(residual + self.shortcut(images))


class ImageNetResNet(nn.Module):
    """Four stages of bottlenecks, `3 * sum(blocks) + 2` layers deep."""

    def __init__(self, blocks: Sequence[int], classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        stages: list[nn.Module] = []
        inputs = 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            for index in range(count):
                stages.append(Bottleneck(inputs, width, 2 if index == 0 and stage else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of `[B, 3, H, W]`."""
        features = self.blocks(self.pool(functional.relu(self.bn1(self.conv1(images)))))
        scores: Tensor = self.fc(torch.flatten(features.mean((2, 3)), 1))
        return scores


def resnet32() -> CifarResNet:
    """The network of SC20's CIFAR-10 runs: 0.46 M parameters."""
    return CifarResNet(5)


def cifar_resnet(depth: int, classes: int, width: int = 16) -> CifarResNet:
    """A network of the CIFAR family by its depth, `6 * blocks + 2`, initialised as in He et al. 2015."""
    network = CifarResNet((depth - 2) // 6, classes, width)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return network


def resnet50() -> ImageNetResNet:
    """25.6 M parameters, the same layers as torchvision's."""
    return ImageNetResNet((3, 4, 6, 3))


def imagenet_resnet(depth: int, classes: int) -> ImageNetResNet:
    """ResNet-50, 101 or 152, initialised as torchvision's (kaiming, fan out)."""
    blocks = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}[depth]
    network = ImageNetResNet(blocks, classes)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


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


def imagenet_network(name: str, classes: int) -> nn.Module:
    """The network of that name, its weights random.

    Raises:
        ModuleNotFoundError: torchvision is missing, or built for another version of torch.
    """
    if name.startswith("resnet"):
        return imagenet_resnet(int(name.removeprefix("resnet")), classes)
    alternative = ", built for the installed torch, or use resnet50, resnet101 or resnet152, which need none"
    models = import_extra("torchvision", f"workload.options.model={name}", "vision", alternative).models
    if name == "densenet201":
        network: nn.Module = models.densenet201(num_classes=classes)
    else:
        # The auxiliary classifier's gradient would enter the factors of the shared layers.
        network = models.inception_v3(num_classes=classes, aux_logits=False, init_weights=True)
    return network


class UNet(nn.Module):
    """Halvings, a bottom, and as many doublings that also see the level's own features.

    Args:
        features: channels of the first level; each level doubles them.
        inputs: channels of an image.
        levels: halvings of its sides.
    """

    def __init__(self, features: int = 32, inputs: int = 3, levels: int = 4) -> None:
        super().__init__()
        widths = [features * 2**level for level in range(levels + 1)]
        before = [inputs, *widths[:-1]]
        self.down = nn.ModuleList(
            _two_convolutions(i, o) for i, o in zip(before[:-1], widths[:-1], strict=True)
        )
        self.bottom = _two_convolutions(before[-1], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in widths[-2::-1])
        self.merge = nn.ModuleList(_two_convolutions(2 * width, width) for width in widths[-2::-1])
        self.head = nn.Conv2d(features, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Log odds of each pixel, `[B, 1, H, W]` for `[B, C, H, W]`; sides are multiples of 2^levels."""
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
