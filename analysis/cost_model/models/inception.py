"""Inception-v4 (Szegedy et al. 2016, figures 3 to 9), padded as in the public port that SPD-KFAC used."""

from collections.abc import Sequence

from analysis.cost_model.models.layers import Builder, Model, Pair

Step = tuple[int, int | Pair]  # outputs, kernel
_ROW, _COLUMN, _SHORT_ROW, _SHORT_COLUMN = (1, 7), (7, 1), (1, 3), (3, 1)

_BLOCK_A: list[list[Step]] = [[(96, 1)], [(64, 1), (96, 3)], [(64, 1), (96, 3), (96, 3)], [(96, 1)]]
_BLOCK_B: list[list[Step]] = [
    [(384, 1)],
    [(192, 1), (224, _ROW), (256, _COLUMN)],
    [(192, 1), (192, _COLUMN), (224, _ROW), (224, _COLUMN), (256, _ROW)],
    [(128, 1)],
]


def inception_v4() -> Model:
    """150 layers at 299 by 299 pixels."""
    builder = Builder(channels=3, size=299)
    _stem(builder)
    for index in range(4):
        _block(builder, f"a{index}", _BLOCK_A)
    _reduce(builder, "reduction_a", [[(384, 3)], [(192, 1), (224, 3), (256, 3)]])
    for index in range(7):
        _block(builder, f"b{index}", _BLOCK_B)
    _reduce(builder, "reduction_b", [[(192, 1), (192, 3)], [(256, 1), (256, _ROW), (320, _COLUMN), (320, 3)]])
    for index in range(3):
        _block_c(builder, f"c{index}")
    builder.classify("last_linear", 1000)
    return builder.model("inception_v4")


def _stem(builder: Builder) -> None:
    builder.conv("stem.0", 32, 3, 2, same=False)
    builder.conv("stem.1", 32, 3, same=False)
    builder.conv("stem.2", 64, 3)
    _reduce(builder, "stem.3", [[(96, 3)]])
    fork = builder.fork()
    widths = []
    before: list[list[Step]] = [[(64, 1)], [(64, 1), (64, _ROW), (64, _COLUMN)]]
    for index, steps in enumerate(before):
        builder.back(fork)
        _branch(builder, f"stem.4.{index}", steps)
        builder.conv(f"stem.4.{index}.last", 96, 3, same=False)
        widths.append(builder.channels)
    builder.back((sum(widths), builder.size))
    _reduce(builder, "stem.5", [[(192, 3)]])


def _block(builder: Builder, name: str, branches: Sequence[Sequence[Step]]) -> None:
    """Branches side by side, their outputs stacked; pooling before the last one keeps the size."""
    fork, width = builder.fork(), 0
    for index, steps in enumerate(branches):
        builder.back(fork)
        _branch(builder, f"{name}.{index}", steps)
        width += builder.channels
    builder.back((width, builder.size))


def _reduce(builder: Builder, name: str, branches: Sequence[Sequence[Step]]) -> None:
    """Branches whose last convolution halves the size, beside a pooling that passes all channels."""
    fork = builder.fork()
    width = fork[0]
    for index, (*first, (outputs, kernel)) in enumerate(branches):
        builder.back(fork)
        _branch(builder, f"{name}.{index}", first)
        builder.conv(f"{name}.{index}.last", outputs, kernel, 2, same=False)
        width += outputs
    builder.back((width, builder.size))


def _block_c(builder: Builder, name: str) -> None:
    """Its two middle branches end in a row and a column side by side."""
    fork, size = builder.fork(), builder.size
    _branch(builder, f"{name}.0", [(256, 1)])
    before: list[list[Step]] = [[(384, 1)], [(384, 1), (448, _SHORT_COLUMN), (512, _SHORT_ROW)]]
    for index, steps in enumerate(before, start=1):
        builder.back(fork)
        _branch(builder, f"{name}.{index}", steps)
        ends = builder.fork()
        for end, kernel in (("a", _SHORT_ROW), ("b", _SHORT_COLUMN)):
            builder.back(ends)
            builder.conv(f"{name}.{index}.{end}", 256, kernel)
    builder.back(fork)
    _branch(builder, f"{name}.3", [(256, 1)])
    builder.back((6 * 256, size))


def _branch(builder: Builder, name: str, steps: Sequence[Step]) -> None:
    for index, (outputs, kernel) in enumerate(steps):
        builder.conv(f"{name}.{index}", outputs, kernel)
