"""The protocol of the drawer: what a module contributes to K-FAC."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from kfac_core.config import KFACConfig
from kfac_core.kernels.grams import Gram
from kfac_core.placement import LayerShape


class KroneckerLayer(ABC):
    """A module whose curvature K-FAC approximates as a Kronecker product of A and G.

    Notation, with B examples in the batch and S positions at which the module applies its weight to each
    (1 for a plain Linear, output pixels for a convolution, tokens in a sequence, calls of a shared module):

        a  [blocks, rows, a.dim]  inputs of the weight, a one appended where there is a trained bias
        g  [blocks, rows, g.dim]  gradients of the batch-mean loss by the module's output, rows = B * S

        A = 1/(B S^2) sum a aT        G = B S sum g gT         (Grosse & Martens 2016, "KFC", as in SC20)

    `input_gram` and `output_gram` return the bare sums; `capture` scales them, so that no layer can get
    the scale wrong on its own.

    Attributes:
        name: the module's qualified name.
        module: the module, its parameters' gradients the only thing that K-FAC ever writes to.
        has_bias: whether there is a bias and it is trained; a frozen one is no part of the curvature.
    """

    def __init__(self, name: str, module: nn.Module, config: KFACConfig) -> None:
        self.name = name
        self.module = module
        self.config = config
        bias = getattr(module, "bias", None)
        self.has_bias = isinstance(bias, nn.Parameter) and bias.requires_grad

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Whether this module's options are covered."""
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
        assert isinstance(weight, nn.Parameter)  # noqa: S101  the registry admits only modules that have one
        return weight

    def read_gradient(self, out: Tensor, *, always_copy: bool = True) -> Tensor:
        """Weight and bias gradient as one matrix of `shape.gradient_shape`; zeros where there is none.

        Returns:
            `out`, into which they were copied; or, unless `always_copy`, the weight's own gradient where it
            is such a matrix as it lies.
        """
        if not (always_copy or self.has_bias):
            alone = self.weight.grad
            if alone is not None and alone.dtype == out.dtype and alone.is_contiguous():
                return alone.view(out.shape)
        for (gradient, _), view in zip(self._gradients(), self._views(out), strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient.reshape(view.shape))
        return out

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
            assert isinstance(bias, nn.Parameter)  # noqa: S101  has_bias says so
            parameters.append(bias)
        return [(parameter.grad, parameter) for parameter in parameters]

    def _views(self, matrix: Tensor) -> list[Tensor]:
        return [matrix[..., :-1], matrix[..., -1]] if self.has_bias else [matrix]
