"""The protocol of the drawer: from a factor to second-order data to a preconditioned gradient."""

from typing import Any, Protocol

import torch
from torch import Tensor

from kfac_core.placement import FactorShape, LayerShape

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # torch hides it


class Solver(Protocol):
    """Turns factors into second-order data and applies them to a gradient.

    Second-order data of a factor lies in one flat vector, so that it travels without further packing.
    """

    needs_traces: bool
    """Whether `factor_damping` reads the factors' mean diagonals, which then travel too."""

    def data_elements(self, factor: FactorShape) -> int:
        """Elements of the second-order data of one factor."""
        ...

    def factor_damping(self, damping: float, own_mean: Tensor, other_mean: Tensor) -> Tensor | float:
        """Damping to add to a factor whose mean diagonal is `own_mean`, beside one of `other_mean`."""
        ...

    def solve(self, factor: Tensor, damping: Tensor | float, out: Tensor, last: Tensor | None = None) -> None:
        """Second-order data of `factor` [blocks, n, n], which is left alone, to the flat `out` of its dtype.

        `last` is the flat vector of an earlier state of the factor, to start from; `out` is other memory.

        Raises:
            LinAlgError: the factor cannot be decomposed in its precision; `out` holds anything then.
        """
        ...

    def views(self, a_data: Tensor, g_data: Tensor, shape: LayerShape) -> Any:
        """Flat second-order data of both factors as `precondition` takes it: views, made once."""
        ...

    def precondition(self, gradient: Tensor, views: Any, damping: Tensor, out: Tensor) -> None:
        """`gradient` of `LayerShape.gradient_shape`, preconditioned, to `out`; all of one dtype and device.

        `damping` is a tensor of no dimensions.
        """
        ...
