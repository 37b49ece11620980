"""The U-Net of Buda et al. 2019: four halvings, a bottom and four doublings by transposed convolutions."""

from analysis.cost_model.models.layers import Layer, Model

_LEVELS = 4


def unet(size: int = 256, features: int = 32, inputs: int = 3) -> Model:
    """For images of `size` x `size`; `features` channels on the first level, doubled by each further one."""
    widths = [features * 2**level for level in range(_LEVELS + 1)]
    layers: list[Layer] = []
    before = inputs
    for level, width in enumerate(widths):
        name = "bottom" if level == _LEVELS else f"down.{level}"
        layers += _two(name, before, width, size >> level)
        before = width
    for place, width in enumerate(widths[-2::-1]):
        side = size >> (_LEVELS - 1 - place)
        # as its K-FAC layer sees it: every pixel of the result is a product with a patch of the spread input
        layers.append(
            Layer(f"up.{place}", 2 * width, width, (2, 2), size=(side + 1, side + 1), bias=True, kind="conv")
        )
        layers += _two(f"merge.{place}", 2 * width, width, side)
    layers.append(Layer("head", features, 1, size=(size, size), bias=True))
    norms = sum(4 * width for width in widths) + sum(4 * width for width in widths[:-1])
    return Model("unet", tuple(layers), norms)


def _two(name: str, inputs: int, outputs: int, size: int) -> list[Layer]:
    return [
        Layer(f"{name}.0", inputs, outputs, (3, 3), padding=(1, 1), size=(size, size)),
        Layer(f"{name}.3", outputs, outputs, (3, 3), padding=(1, 1), size=(size, size)),
    ]
