"""The protocol of the drawer: from a factor to second-order data to a preconditioned gradient."""

from typing import Protocol

from torch import Tensor

from kfac_core.placement import FactorShape


class Solver(Protocol):
    """Turns factors into second-order data and applies them to a gradient.

    Second-order data of a factor is one flat vector, so that it travels without further packing.
    """

    needs_traces: bool
    """Whether `factor_damping` reads the factors' mean diagonals, which then travel too."""

    def data_elements(self, factor: FactorShape) -> int:
        """Elements of the second-order data of one factor."""
        ...

    def factor_damping(self, damping: float, own_mean: Tensor, other_mean: Tensor) -> Tensor | float:
        """Damping to add to a factor whose mean diagonal is `own_mean`, beside one of `other_mean`."""
        ...

    def solve(self, factor: Tensor, damping: Tensor | float, out: Tensor) -> None:
        """Second-order data of `factor` [blocks, n, n] into the flat `out`; `factor` is left alone."""
        ...

    def precondition(
        self, gradient: Tensor, a_data: Tensor, g_data: Tensor, damping: float, out: Tensor
    ) -> None:
        """Precondition `gradient` [blocks, g.dim, a.dim] into `out` of the same shape."""
        ...
