"""Solvers: from a factor to second-order data to a preconditioned gradient.

To add one: write `kfac_core/solvers/<name>.py` with a class that has `Solver`'s methods, and add its line to
`kfac_core.config.SOLVERS`; `kfac_core.placement.placement.data_elements` says how large its data is.
"""

from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from kfac_core.config import SOLVERS, KFACConfig
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.solvers.eigen import SMALLEST_EIGENVALUE, EigenSolver, LowRankEigenSolver

# ------------------------------------------------------------
# The solver protocol: from a factor to second-order data to a preconditioned gradient.


LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # missing in torch's stubs


class Solver(Protocol):
    """Turns factors into second-order data and applies them to a gradient.

    Second-order data of a factor is one flat vector, so that it is sent without packing.
    """

    needs_traces: bool
    """Whether `factor_damping` reads the factors' mean diagonals, which are then communicated too."""

    tells_condition: bool
    """Whether `eigenvalues` gives those in second-order data."""

    holds_damping: bool
    """Whether the data are of one damping; else it enters only as they are applied."""

    def eigenvalues(self, data: Tensor, shape: FactorShape) -> Tensor:
        """All eigenvalues in a factor's data, flat."""
        ...

    def mean_eigenvalue(self, data: Tensor, shape: FactorShape) -> Tensor:
        """Of a factor, from its data; by a solver whose data are not of one damping."""
        ...

    def factor_damping(self, damping: float, own_mean: Tensor, other_mean: Tensor) -> Tensor | float:
        """Damping to add to a factor of mean diagonal `own_mean` whose partner has `other_mean`."""
        ...

    def solve(self, factor: Tensor, damping: Tensor | float, out: Tensor, last: Tensor | None = None) -> None:
        """Write second-order data of `factor` [blocks, n, n] to the flat `out` of its dtype.

        `factor` is not modified. `last` is data of an earlier state of the factor to start from, in other
        memory than `out`.

        Raises:
            LinAlgError: the factor cannot be decomposed in its precision; `out` is then undefined.
        """
        ...

    def solve_all(
        self, factors: Tensor, damping: Tensor | float, last: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Second-order data of `factors` [factors, n, n], one block each, on a device that nobody waits for.

        Args:
            factors: not modified.
            damping: of each factor, or of all.
            last: data of an earlier state, `[factors, elements]`.

        Returns:
            The parts of the data, each `[factors, elements of the part]`, in their order in the data; and of
            each factor whether the decomposition failed, None where its numbers or `deferred_status` show it.

        Raises:
            LinAlgError: a factor cannot be decomposed, and the library says so at once.
        """
        ...

    def views(self, a_data: Tensor, g_data: Tensor, shape: LayerShape) -> Any:
        """Views of both factors' second-order data, in the form that `precondition` takes.

        The data are flat; or, of several layers of one shape, `[layers, elements]`, with the layers as the
        blocks of `shape`.
        """
        ...

    def precondition(
        self, gradient: Tensor, views: Any, damping: Tensor, out: Tensor, noise: float = 0.0
    ) -> None:
        """Precondition `gradient` of `LayerShape.gradient_shape` to `out`; all of one dtype and device.

        `damping` is a tensor of no dimensions. Coefficients below `noise` times the gradient's norm may count
        as zero, by a solver that has `tells_condition`.
        """
        ...


__all__ = ["Solver", "solver_of"]


def solver_of(config: KFACConfig) -> Solver:
    """The solver that a configuration asks for."""
    smallest = SMALLEST_EIGENVALUE if config.relative_damping is None else 0.0
    if config.eigen_rank is not None:
        return LowRankEigenSolver(config.eigen_rank, smallest)
    if config.solver == "eigen":
        return EigenSolver(smallest)
    module, name = SOLVERS[config.solver]
    solver: Solver = getattr(import_module(f"{__name__}.{module}"), name)()
    return solver
