"""Solvers: from a factor to second-order data to a preconditioned gradient.

To add one: write `kfac_core/solvers/<name>.py` with a class that has `Solver`'s methods, and add its line to
`kfac_core.config.SOLVERS`; `kfac_core.placement.footprint.data_elements` says how large its data is.
"""

from importlib import import_module

from kfac_core.config import SOLVERS, KFACConfig
from kfac_core.solvers.low_rank import LowRankEigenSolver
from kfac_core.solvers.solver import Solver

__all__ = ["Solver", "solver_of"]


def solver_of(config: KFACConfig) -> Solver:
    """The solver that a configuration asks for."""
    if config.eigen_rank is not None:
        return LowRankEigenSolver(config.eigen_rank)
    module, name = SOLVERS[config.solver]
    solver: Solver = getattr(import_module(f"{__name__}.{module}"), name)()
    return solver
