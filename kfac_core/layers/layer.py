"""The protocol of the drawer: what a module contributes to K-FAC."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from kfac_core.placement import LayerShape


class KroneckerLayer(ABC):
    """A module whose curvature K-FAC approximates as a Kronecker product of A and G.

    Notation, with B examples in the batch and S positions at which the module applies its weight to each
    (1 for a plain Linear, output pixels for a convolution):

        a  [blocks, rows, a.dim]  inputs of the weight, a one appended where there is a bias
        g  [blocks, rows, g.dim]  gradients of the batch-mean loss by the module's output, rows = B * S

        A = 1/(B S^2) sum a aT        G = B S sum g gT         (Grosse & Martens 2016, "KFC", as in SC20)

    `input_gram` and `output_gram` return the bare sums; `capture` scales them, so that no layer can get
    the scale wrong on its own.

    Attributes:
        name: the module's qualified name.
        module: the module, its parameters the only thing this class ever writes to.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module

    @property
    @abstractmethod
    def shape(self) -> LayerShape:
        """Sizes of the two factors."""

    @abstractmethod
    def positions(self, inputs: Tensor, outputs: Tensor) -> tuple[int, int]:
        """Examples B and positions S of one call."""

    @abstractmethod
    def input_gram(self, inputs: Tensor) -> Tensor:
        """Sum of a aT over all rows, `[a.blocks, a.dim, a.dim]`, from the module's input."""

    @abstractmethod
    def output_gram(self, gradients: Tensor) -> Tensor:
        """Sum of g gT over all rows, `[g.blocks, g.dim, g.dim]`, from the gradient of the output."""

    @property
    def weight(self) -> nn.Parameter:
        """The weight, first dimension the outputs."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)  # noqa: S101  the registry admits only modules that have one
        return weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, one element an output, if there is one."""
        bias = self.module.bias
        return bias if isinstance(bias, nn.Parameter) else None

    def read_gradient(self, out: Tensor) -> None:
        """Copy weight and bias gradient to `out` [blocks, g.dim, a.dim], the bias as last column."""
        if self.weight.grad is None:
            out.zero_()
            return
        weight, bias = self._split(out)
        weight.copy_(self.weight.grad.reshape(weight.shape))
        if bias is not None and self.bias is not None and self.bias.grad is not None:
            bias.copy_(self.bias.grad.view(bias.shape))

    def gradient_targets(self, matrix: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs (parameter gradient, its new value, a view of `matrix`) for gradients that exist."""
        weight, bias = self._split(matrix)
        pairs = []
        if self.weight.grad is not None:
            pairs.append((self.weight.grad, weight.view_as(self.weight)))
        if bias is not None and self.bias is not None and self.bias.grad is not None:
            pairs.append((self.bias.grad, bias.view_as(self.bias)))
        return pairs

    def _split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.bias is None:
            return matrix, None
        return matrix[..., :-1], matrix[..., -1]


def gram(rows: Tensor, *, with_ones: bool) -> Tensor:
    """Sum of outer products of `rows` [blocks, rows, n]; with a one appended to each row on request.

    Returns:
        `[blocks, n, n]`, or `[blocks, n + 1, n + 1]` without ever building the longer rows.
    """
    if not with_ones:
        return torch.matmul(rows.mT, rows)
    blocks, count, n = rows.shape
    total = rows.new_empty(blocks, n + 1, n + 1)
    torch.matmul(rows.mT, rows, out=total[:, :n, :n])
    column_sums = rows.sum(1)
    total[:, n, :n] = column_sums
    total[:, :n, n] = column_sums
    total[:, n, n] = count
    return total
