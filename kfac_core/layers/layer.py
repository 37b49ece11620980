"""The base class of layers: what a module contributes to K-FAC."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_core.config import KFACConfig
from kfac_core.device_grams import DeviceGrams
from kfac_core.grams import Gram
from kfac_core.placement import LayerShape

# ------------------------------------------------------------
# How messages name layers. A layer that is the whole model has an empty name.


_AROUND = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))  # torch.compile's, checkpoint_wrapper's
_SHOWN = 4
_ROOT = "the model"


def unwrapped_name(name: str) -> str:
    """A module's qualified name as it is without `torch.compile` and checkpoint wrappers around blocks."""
    return ".".join(part for part in name.split(".") if part not in _AROUND)


def layer_text(name: str) -> str:
    """`layer 3`, or `the model`."""
    return f"layer {name}" if name else _ROOT


def listed_layers(names: Sequence[str]) -> str:
    """At most four names: `0, 2` or `0, 2, 4, 6 and others`."""
    return ", ".join(name or _ROOT for name in names[:_SHOWN]) + (" and others" if names[_SHOWN:] else "")


class KroneckerLayer(ABC):
    """A module whose curvature K-FAC approximates as a Kronecker product of A and G.

    Notation, with N loss terms in the batch (examples or tokens) and M rows, one for every position at which
    the module applies its weight (pixels of a convolution, tokens, calls of a shared module):

        a  [blocks, M, a.dim]  inputs of the weight, with a one appended for a trained bias
        g  [blocks, M, g.dim]  gradients of the mean loss by the module's output; S = M / N

        A = 1/(N S^2) sum a aT        G = N S sum g gT        A x G = N/M (sum a aT) x (sum g gT)

    That is KFC (Grosse & Martens 2016) as in SC20, and `expand` of Eschenhagen et al. 2023. For S < 1, as of
    an expert that sees part of the tokens, A = 1/M sum a aT and G = N sum g gT, with the same product.

    `input_gram` and `output_gram` return unscaled sums. They are scaled the same for all layers
    (`capture.factor_scale`).

    Attributes:
        name: the module's qualified name without wrappers, or one below it for a layer that is a part of it.
        module_name: the module's qualified name.
        module: the module; K-FAC writes to nothing but its parameters' gradients.
        grams: sums of outer products where execution is batched, from inputs and gradients of any dtype.
            None sums in the order that suits a CPU, from inputs of the sums' own dtype.
        gradient_of: where a parameter's gradient is; elsewhere than in the parameter if that has only a part.
        has_bias: whether there is a trained bias; a frozen one is not part of the curvature.
    """

    def __init__(self, name: str, module: nn.Module, config: KFACConfig) -> None:
        self.name, self.module_name = unwrapped_name(name), name
        self.module = module
        self.config = config
        self.grams: DeviceGrams | None = None
        self.gradient_of: Callable[[nn.Parameter], Tensor | None] = _own_gradient
        bias = getattr(module, "bias", None)
        self.has_bias = isinstance(bias, nn.Parameter) and bias.requires_grad

    _weight = "weight"
    _bias: str | None = "bias"
    in_order = True
    """Whether the weight's memory is the gradient matrix, but for the bias."""

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Whether this module's options are supported."""
        return True

    @property
    @abstractmethod
    def shape(self) -> LayerShape:
        """Sizes of the two factors."""

    @abstractmethod
    def count(self, inputs: Tensor, outputs: Tensor) -> tuple[int, int]:
        """Examples as this layer counts them, and rows M, of one call."""

    def batch_dim(self, outputs: Tensor) -> int:
        """The dimension of the examples, also in the input."""
        return 0

    def arranged(self, tensor: Tensor, batch: int | None) -> Tensor:
        """An input or output as the other methods take it, `batch` being the examples of the model."""
        return tensor

    @abstractmethod
    def input_gram(self, inputs: Tensor) -> Gram:
        """Sum of a aT over all rows, `[a.blocks, a.dim, a.dim]`, from the module's input."""

    @abstractmethod
    def output_gram(self, gradients: Tensor) -> Gram:
        """Sum of g gT over all rows, `[g.blocks, g.dim, g.dim]`, from the gradient of the output."""

    @property
    def is_trained(self) -> bool:
        """Whether the weight is trained now; it may be frozen for a while, as while a generator learns."""
        return bool(self.module.weight.requires_grad)

    def lost(self) -> str | None:
        """`weight` or `bias` where that is no parameter any more, as if pruning computes it; else None."""
        for kind, name in (("weight", self._weight), ("bias", self._bias if self.has_bias else None)):
            if name is not None and not isinstance(getattr(self.module, name, None), nn.Parameter):
                return kind
        return None

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
        if self.in_order and not self.has_bias:
            (gradient,) = self.gradients()
            if gradient is not None and gradient.dtype == out.dtype and gradient.is_contiguous():
                return gradient.view(out.shape)
        for view, gradient in self.gradient_sources(out):
            view.copy_(gradient)
        return out

    def gradient_sources(self, out: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs (a view of `out`, the parameter gradient to copy there); parts without one become zero."""
        for gradient, view in zip(self.gradients(), self._views(out), strict=True):
            if gradient is None:
                view.zero_()
        return [(view, gradient) for gradient, view in self.gradient_targets(out)]

    def gradient_targets(self, matrix: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs (parameter gradient, its new value, a view of `matrix`) for gradients that exist."""
        return [
            (gradient if gradient.shape == view.shape else gradient.view(view.shape), view)
            for gradient, view in zip(self.gradients(), self.aligned(matrix), strict=True)
            if gradient is not None
        ]

    def aligned(self, matrix: Tensor) -> Iterator[Tensor]:
        """Views of a gradient matrix in the order of the weight's and the bias's own dimensions."""
        for view, parameter in zip(self._views(matrix), self.parameters(), strict=True):
            yield view.reshape(parameter.shape)

    def bounded(self, shape: LayerShape) -> LayerShape:
        """A shape under `max_factor_dim`."""
        return shape.bounded(self.config.max_factor_dim)

    def is_diagonal(self, kind: str) -> bool:
        """Whether only the diagonal of A or G is kept."""
        return kind in self.shape.diagonal

    def gradients(self) -> list[Tensor | None]:
        return [self.gradient_of(parameter) for parameter in self.parameters()]

    def parameters(self) -> list[nn.Parameter]:
        """The weight, and the trained bias."""
        if not self.has_bias:
            return [self.weight]
        bias = self.module.bias
        assert isinstance(bias, nn.Parameter)  # noqa: S101  has_bias implies it
        return [self.weight, bias]

    def _views(self, matrix: Tensor) -> list[Tensor]:
        return [matrix[..., :-1], matrix[..., -1]] if self.has_bias else [matrix]


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a `DTensor`, of which each process holds a part."""
    package = sys.modules.get("torch.distributed.tensor")  # where it is not imported, there is none
    return package is not None and isinstance(tensor, package.DTensor)


def strided(tensor: Tensor) -> Tensor | None:
    """A tensor as others see it: sparse ones dense, the rows of a jagged one behind each other.

    None for a nested tensor that is not jagged, or has gaps.
    """
    if tensor.is_nested:
        known: Any = tensor
        return known.values() if tensor.layout is torch.jagged and known._lengths is None else None
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _own_gradient(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad
