"""A multilayer perceptron, for measurements in which little but communication should take time."""

from collections.abc import Sequence
from itertools import pairwise

from analysis.cost_model.models.layers import Layer, Model


def perceptron(widths: Sequence[int]) -> Model:
    """Linear layers with bias from each width to the next."""
    layers = [
        Layer(str(index), inputs, outputs, bias=True, kind="linear")
        for index, (inputs, outputs) in enumerate(pairwise(widths))
    ]
    return Model("perceptron", tuple(layers), other_parameters=0)
