"""What runs may cost at most, and the budget that stops them before they start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from harness.errors import BudgetError


@dataclass(frozen=True)
class CostEstimate:
    """Time limits times what is held, also where runs end sooner: the most that one life of each job costs.

    A cluster that starts a job again, after a preemption or a node's failure, gives it a life more. How
    often is not known beforehand, so where that may happen this bounds no total.

    Attributes:
        requeued: whether jobs may be started again.
    """

    gpu_hours: float = 0.0
    core_hours: float = 0.0
    requeued: bool = False

    def __add__(self, other: Self) -> CostEstimate:
        return CostEstimate(
            self.gpu_hours + other.gpu_hours,
            self.core_hours + other.core_hours,
            self.requeued or other.requeued,
        )

    def __mul__(self, times: int) -> CostEstimate:
        return CostEstimate(self.gpu_hours * times, self.core_hours * times, self.requeued)

    def __str__(self) -> str:
        gpus = f"{self.gpu_hours:.4g} GPU-hours, " if self.gpu_hours else ""
        return f"at most {gpus}{self.core_hours:.4g} core-hours{self._a_life}"

    @property
    def _a_life(self) -> str:
        return (
            " a life, and a job that Slurm starts again has another (slurm.requeue)" if self.requeued else ""
        )

    def refuse_beyond(self, budget: float | None) -> None:
        """Stop what is over `budget`, in GPU-hours where GPUs are held, else in core-hours.

        Raises:
            BudgetError: it could cost more.
        """
        counted, unit = (self.gpu_hours, "GPU-hours") if self.gpu_hours else (self.core_hours, "core-hours")
        if budget is not None and counted > budget:
            raise BudgetError(
                f"this could cost {counted:.4g} {unit}{self._a_life}, the budget is {budget:.4g}: "
                f"submit less with --where, lower the site's timeout_minutes, or raise --budget; "
                "nothing was submitted"
            )
