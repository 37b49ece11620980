"""Inception-v4 (Szegedy et al. 2016, figures 3 to 9), padded as in the public port that SPD-KFAC used."""

from collections.abc import Sequence

from analysis.cost_model.models.layers import Model, Pair, Pen

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
    pen = Pen(channels=3, size=299)
    _stem(pen)
    for index in range(4):
        _block(pen, f"a{index}", _BLOCK_A)
    _reduce(pen, "reduction_a", [[(384, 3)], [(192, 1), (224, 3), (256, 3)]])
    for index in range(7):
        _block(pen, f"b{index}", _BLOCK_B)
    _reduce(pen, "reduction_b", [[(192, 1), (192, 3)], [(256, 1), (256, _ROW), (320, _COLUMN), (320, 3)]])
    for index in range(3):
        _block_c(pen, f"c{index}")
    pen.classify("last_linear", 1000)
    return pen.model("inception_v4")


def _stem(pen: Pen) -> None:
    pen.conv("stem.0", 32, 3, 2, same=False)
    pen.conv("stem.1", 32, 3, same=False)
    pen.conv("stem.2", 64, 3)
    _reduce(pen, "stem.3", [[(96, 3)]])
    fork = pen.fork()
    widths = []
    before: list[list[Step]] = [[(64, 1)], [(64, 1), (64, _ROW), (64, _COLUMN)]]
    for index, steps in enumerate(before):
        pen.back(fork)
        _branch(pen, f"stem.4.{index}", steps)
        pen.conv(f"stem.4.{index}.last", 96, 3, same=False)
        widths.append(pen.channels)
    pen.back((sum(widths), pen.size))
    _reduce(pen, "stem.5", [[(192, 3)]])


def _block(pen: Pen, name: str, branches: Sequence[Sequence[Step]]) -> None:
    """Branches side by side, their outputs stacked; pooling before the last one keeps the size."""
    fork, width = pen.fork(), 0
    for index, steps in enumerate(branches):
        pen.back(fork)
        _branch(pen, f"{name}.{index}", steps)
        width += pen.channels
    pen.back((width, pen.size))


def _reduce(pen: Pen, name: str, branches: Sequence[Sequence[Step]]) -> None:
    """Branches whose last convolution halves the size, beside a pooling that passes all channels."""
    fork = pen.fork()
    width = fork[0]
    for index, (*first, (outputs, kernel)) in enumerate(branches):
        pen.back(fork)
        _branch(pen, f"{name}.{index}", first)
        pen.conv(f"{name}.{index}.last", outputs, kernel, 2, same=False)
        width += outputs
    pen.back((width, pen.size))


def _block_c(pen: Pen, name: str) -> None:
    """Its two middle branches end in a row and a column side by side."""
    fork, size = pen.fork(), pen.size
    _branch(pen, f"{name}.0", [(256, 1)])
    before: list[list[Step]] = [[(384, 1)], [(384, 1), (448, _SHORT_COLUMN), (512, _SHORT_ROW)]]
    for index, steps in enumerate(before, start=1):
        pen.back(fork)
        _branch(pen, f"{name}.{index}", steps)
        ends = pen.fork()
        for end, kernel in (("a", _SHORT_ROW), ("b", _SHORT_COLUMN)):
            pen.back(ends)
            pen.conv(f"{name}.{index}.{end}", 256, kernel)
    pen.back(fork)
    _branch(pen, f"{name}.3", [(256, 1)])
    pen.back((6 * 256, size))


def _branch(pen: Pen, name: str, steps: Sequence[Step]) -> None:
    for index, (outputs, kernel) in enumerate(steps):
        pen.conv(f"{name}.{index}", outputs, kernel)
