"""VGG-16 for images of 32 x 32: thirteen convolutions and one linear layer."""

from analysis.cost_model.models.layers import Builder, Model

_CHANNELS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(classes: int = 10, width: int = 64) -> Model:
    """Simonyan & Zisserman 2015, table 1, D, with normalisation; `width` channels in the first stage."""
    builder = Builder(channels=3, size=32)
    for stage, widths in enumerate(_CHANNELS):
        for place, channels in enumerate(widths):
            builder.conv(f"features.{stage}.{place}", max(1, channels * width // 64), 3)
        builder.pool(2, 2)
    builder.classify("fc", classes)
    return builder.model("vgg16")
