"""DenseNet-201 (Huang et al. 2017, table 1), as in torchvision."""

from analysis.cost_model.models.layers import Builder, Model

_GROWTH, _BOTTLENECK = 32, 4 * 32


def densenet201() -> Model:
    """Four blocks of 6, 12, 48 and 32 layers; a layer reads all before it in its block."""
    builder = Builder(channels=3, size=224)
    builder.conv("conv0", 64, 7, 2)
    builder.pool(3, 2, padding=1)
    for block, layers in enumerate((6, 12, 48, 32), start=1):
        channels, size = builder.fork()
        for layer in range(1, layers + 1):
            builder.back((channels, size))
            builder.norm(channels)
            builder.conv(f"block{block}.layer{layer}.conv1", _BOTTLENECK, 1)
            builder.conv(f"block{block}.layer{layer}.conv2", _GROWTH, 3, norm=False)
            channels += _GROWTH
        builder.back((channels, size))
        builder.norm(channels)
        if block < 4:
            builder.conv(f"transition{block}.conv", channels // 2, 1, norm=False)
            builder.pool(2, 2)
    builder.classify("classifier", 1000)
    return builder.model("densenet201")
