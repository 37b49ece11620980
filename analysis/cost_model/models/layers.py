"""A network as its preconditioned layers and its other parameters, and a builder for convolutional ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kfac_core.placement import FactorShape, LayerShape

Pair = tuple[int, int]


@dataclass(frozen=True)
class Layer:
    """A convolution or a linear layer; a linear layer is a 1 by 1 convolution over its positions.

    Attributes:
        inputs, outputs: channels or features.
        kernel, stride, padding: of the convolution.
        size: height and width of the input; for a linear layer (1, positions).
        kind: `conv` or `linear`.
    """

    name: str
    inputs: int
    outputs: int
    kernel: Pair = (1, 1)
    stride: int = 1
    padding: Pair = (0, 0)
    size: Pair = (1, 1)
    bias: bool = False
    kind: str = "conv"

    @property
    def shape(self) -> LayerShape:
        """The shapes of the two factors."""
        patch = self.inputs * self.kernel[0] * self.kernel[1]
        return LayerShape(self.name, FactorShape(patch + self.bias), FactorShape(self.outputs))

    @property
    def output_size(self) -> Pair:
        """Height and width of the output."""
        height, width = (
            (size + 2 * pad - taps) // self.stride + 1
            for size, pad, taps in zip(self.size, self.padding, self.kernel, strict=True)
        )
        return height, width

    @property
    def positions(self) -> int:
        """Rows of the input matrix for each example: output pixels or tokens."""
        return self.output_size[0] * self.output_size[1]

    @property
    def forward_flops(self) -> int:
        """Multiplications and additions of the forward pass for one example, bias left out."""
        patch = self.inputs * self.kernel[0] * self.kernel[1]
        return 2 * self.positions * patch * self.outputs


@dataclass(frozen=True)
class Model:
    """The properties of a network that determine K-FAC's costs.

    Attributes:
        layers: those that K-FAC preconditions, in the model's order.
        other_parameters: trained parameters outside of them: normalisation, embeddings.
        plain_flops: of the forward pass for one example outside of the layers: attention.
    """

    name: str
    layers: tuple[Layer, ...]
    other_parameters: int
    plain_flops: int = 0

    @cached_property
    def shapes(self) -> list[LayerShape]:
        """The factor shapes of all layers."""
        return [layer.shape for layer in self.layers]

    @property
    def parameters(self) -> int:
        """All trained parameters, whose gradients data parallelism averages."""
        return self.other_parameters + sum(shape.gradient_elements for shape in self.shapes)

    @property
    def forward_flops(self) -> int:
        """FLOPs of one example's forward pass."""
        return self.plain_flops + sum(layer.forward_flops for layer in self.layers)

    @property
    def activations(self) -> int:
        """Elements of all layers' outputs for one example; a training step keeps about twice as many."""
        return sum(layer.positions * layer.outputs for layer in self.layers)


class Builder:
    """Builds a convolutional network layer by layer; holds the shape of the next layer's input."""

    def __init__(self, channels: int, size: int) -> None:
        self.channels, self.size = channels, (size, size)
        self.layers: list[Layer] = []
        self.other_parameters = 0

    def conv(
        self,
        name: str,
        outputs: int,
        kernel: int | Pair,
        stride: int = 1,
        *,
        same: bool = True,
        norm: bool = True,
    ) -> None:
        """A convolution without bias.

        With `same` it is padded so that stride 1 keeps the size; with `norm` a batch normalisation follows.
        """
        taps = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (taps[0] // 2, taps[1] // 2) if same else (0, 0)
        layer = Layer(name, self.channels, outputs, taps, stride, padding, self.size)
        self.layers.append(layer)
        self.channels, self.size = outputs, layer.output_size
        if norm:
            self.norm(outputs)

    def norm(self, channels: int) -> None:
        """A batch normalisation: a scale and a shift a channel."""
        self.other_parameters += 2 * channels

    def pool(self, kernel: int, stride: int, padding: int = 0) -> None:
        """A pooling."""
        height, width = ((size + 2 * padding - kernel) // stride + 1 for size in self.size)
        self.size = (height, width)

    def fork(self) -> tuple[int, Pair]:
        """The start of a branch, for `back`."""
        return self.channels, self.size

    def back(self, fork: tuple[int, Pair]) -> None:
        """Return to the start of a branch."""
        self.channels, self.size = fork

    def classify(self, name: str, classes: int) -> None:
        """Global pooling and a linear layer with bias."""
        self.layers.append(Layer(name, self.channels, classes, bias=True, kind="linear"))

    def model(self, name: str) -> Model:
        """The network built so far."""
        return Model(name, tuple(self.layers), self.other_parameters)
