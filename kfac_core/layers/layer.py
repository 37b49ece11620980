"""The base class of layers: what a module contributes to K-FAC."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from kfac_core.config import KFACConfig
from kfac_core.kernels.device_grams import DeviceGrams
from kfac_core.kernels.grams import Gram
from kfac_core.placement import LayerShape


class KroneckerLayer(ABC):
    """A module whose curvature K-FAC approximates as a Kronecker product of A and G.

    Notation, with B examples in the batch and S positions at which the module applies its weight to each
    (1 for a plain Linear, output pixels for a convolution, tokens in a sequence, calls of a shared module):

        a  [blocks, rows, a.dim]  inputs of the weight, with a one appended for a trained bias
        g  [blocks, rows, g.dim]  gradients of the batch-mean loss by the module's output, rows = B * S

        A = 1/(B S^2) sum a aT        G = B S sum g gT         (Grosse & Martens 2016, "KFC", as in SC20)

    `input_gram` and `output_gram` return unscaled sums. Only `capture` scales them, the same for all layers.

    Attributes:
        name: the module's qualified name.
        module: the module; K-FAC writes to nothing but its parameters' gradients.
        grams: sums of outer products where execution is batched, from inputs and gradients of any dtype.
            None sums in the order that suits a CPU, from inputs of the sums' own dtype.
        has_bias: whether there is a trained bias; a frozen one is not part of the curvature.
    """

    def __init__(self, name: str, module: nn.Module, config: KFACConfig) -> None:
        self.name = name
        self.module = module
        self.config = config
        self.grams: DeviceGrams | None = None
        bias = getattr(module, "bias", None)
        self.has_bias = isinstance(bias, nn.Parameter) and bias.requires_grad

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Whether this module's options are supported."""
        return True

    @property
    @abstractmethod
    def shape(self) -> LayerShape:
        """Sizes of the two factors."""

    @abstractmethod
    def positions(self, inputs: Tensor, outputs: Tensor) -> tuple[int, int]:
        """Examples B and positions S of one call."""

    @abstractmethod
    def input_gram(self, inputs: Tensor) -> Gram:
        """Sum of a aT over all rows, `[a.blocks, a.dim, a.dim]`, from the module's input."""

    @abstractmethod
    def output_gram(self, gradients: Tensor) -> Gram:
        """Sum of g gT over all rows, `[g.blocks, g.dim, g.dim]`, from the gradient of the output."""

    @property
    def weight(self) -> nn.Parameter:
        """The weight."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)  # noqa: S101  every registered module type has one
        return weight

    def read_gradient(self, out: Tensor) -> Tensor:
        """Weight and bias gradient as one matrix of `shape.gradient_shape`; zeros where there is none.

        Returns:
            `out` with copies; or a view of the weight's gradient if its memory already is this matrix.
        """
        if not self.has_bias:
            gradient = self.weight.grad
            if gradient is not None and gradient.dtype == out.dtype and gradient.is_contiguous():
                return gradient.view(out.shape)
        for view, gradient in self.gradient_sources(out):
            view.copy_(gradient)
        return out

    def gradient_sources(self, out: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs (a view of `out`, the parameter gradient to copy there); parts without one become zero."""
        for (gradient, _), view in zip(self._gradients(), self._views(out), strict=True):
            if gradient is None:
                view.zero_()
        return [(view, gradient) for gradient, view in self.gradient_targets(out)]

    def gradient_targets(self, matrix: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs (parameter gradient, its new value, a view of `matrix`) for gradients that exist."""
        return [
            (gradient, view.reshape(parameter.shape))
            for (gradient, parameter), view in zip(self._gradients(), self._views(matrix), strict=True)
            if gradient is not None
        ]

    def _gradients(self) -> list[tuple[Tensor | None, nn.Parameter]]:
        parameters = [self.weight]
        if self.has_bias:
            bias = self.module.bias
            assert isinstance(bias, nn.Parameter)  # noqa: S101  has_bias implies it
            parameters.append(bias)
        return [(parameter.grad, parameter) for parameter in parameters]

    def _views(self, matrix: Tensor) -> list[Tensor]:
        return [matrix[..., :-1], matrix[..., -1]] if self.has_bias else [matrix]
