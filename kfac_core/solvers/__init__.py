"""The drawer of solvers. To add one: a class with `Solver`'s methods, named here and in `config.SOLVERS`."""

from collections.abc import Mapping
from types import MappingProxyType

from kfac_core.config import KFACConfig
from kfac_core.solvers.eigen import EigenSolver
from kfac_core.solvers.inverse import InversePiSolver, InverseSolver
from kfac_core.solvers.low_rank import LowRankEigenSolver
from kfac_core.solvers.solver import Solver

__all__ = ["SOLVERS", "Solver", "solver_of"]

SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {"eigen": EigenSolver(), "inverse": InverseSolver(), "inverse_pi": InversePiSolver()}
)


def solver_of(config: KFACConfig) -> Solver:
    """The solver that a configuration asks for."""
    return SOLVERS[config.solver] if config.eigen_rank is None else LowRankEigenSolver(config.eigen_rank)
