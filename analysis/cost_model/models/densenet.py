"""DenseNet-201 (Huang et al. 2017, table 1), as in torchvision."""

from analysis.cost_model.models.layers import Model, Pen

_GROWTH, _BOTTLENECK = 32, 4 * 32


def densenet201() -> Model:
    """Four blocks of 6, 12, 48 and 32 layers; a layer reads all before it in its block."""
    pen = Pen(channels=3, size=224)
    pen.conv("conv0", 64, 7, 2)
    pen.pool(3, 2, padding=1)
    for block, layers in enumerate((6, 12, 48, 32), start=1):
        channels, size = pen.fork()
        for layer in range(1, layers + 1):
            pen.back((channels, size))
            pen.norm(channels)
            pen.conv(f"block{block}.layer{layer}.conv1", _BOTTLENECK, 1)
            pen.conv(f"block{block}.layer{layer}.conv2", _GROWTH, 3, norm=False)
            channels += _GROWTH
        pen.back((channels, size))
        pen.norm(channels)
        if block < 4:
            pen.conv(f"transition{block}.conv", channels // 2, 1, norm=False)
            pen.pool(2, 2)
    pen.classify("classifier", 1000)
    return pen.model("densenet201")
