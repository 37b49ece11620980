"""The drawer of solvers. To add one: a class with `Solver`'s methods, named here and in `config.SOLVERS`."""

from collections.abc import Mapping
from types import MappingProxyType

from kfac_core.solvers.eigen import EigenSolver
from kfac_core.solvers.inverse import InversePiSolver, InverseSolver
from kfac_core.solvers.solver import Solver

__all__ = ["SOLVERS", "Solver"]

SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {"eigen": EigenSolver(), "inverse": InverseSolver(), "inverse_pi": InversePiSolver()}
)
