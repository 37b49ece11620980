"""Residual networks: of CIFAR (He et al. 2016, section 4.2) and of ImageNet (table 1, bottlenecks)."""

from analysis.cost_model.models.layers import Builder, Model

_BOTTLENECKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def cifar_resnet(depth: int, classes: int = 10, width: int = 16) -> Model:
    """6n + 2 layers in three stages, the first of `width` channels; shortcuts without parameters."""
    builder = Builder(channels=3, size=32)
    builder.conv("conv1", width, 3)
    for stage, channels in enumerate((width, 2 * width, 4 * width), start=1):
        for block in range((depth - 2) // 6):
            stride = 2 if stage > 1 and block == 0 else 1
            builder.conv(f"layer{stage}.{block}.conv1", channels, 3, stride)
            builder.conv(f"layer{stage}.{block}.conv2", channels, 3)
    builder.classify("linear", classes)
    return builder.model(f"resnet{depth}")


def imagenet_resnet(depth: int, classes: int = 1000, size: int = 224) -> Model:
    """Bottlenecks with the stride on the 3 by 3 convolution, as in torchvision; images of `size` x `size`."""
    builder = Builder(channels=3, size=size)
    builder.conv("conv1", 64, 7, 2)
    builder.pool(3, 2, padding=1)
    for stage, blocks in enumerate(_BOTTLENECKS[depth], start=1):
        width = 32 * 2**stage
        for block in range(blocks):
            name, fork, stride = f"layer{stage}.{block}", builder.fork(), 2 if stage > 1 and block == 0 else 1
            builder.conv(f"{name}.conv1", width, 1)
            builder.conv(f"{name}.conv2", width, 3, stride)
            builder.conv(f"{name}.conv3", 4 * width, 1)
            if block == 0:
                builder.back(fork)
                builder.conv(f"{name}.downsample", 4 * width, 1, stride)
    builder.classify("fc", classes)
    return builder.model(f"resnet{depth}")
