"""Upper bound of the cost of runs, and the budget that refuses them before they start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from harness.errors import BudgetError


@dataclass(frozen=True)
class CostEstimate:
    """Time limits times the resources held: the most that one start of each job costs.

    A cluster may start a job again after a preemption or a node failure. How often is not known
    beforehand, so where that may happen this is not a bound of the total.

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
        return f"at most {gpus}{self.core_hours:.4g} core-hours{self._per_start}"

    @property
    def _per_start(self) -> str:
        return " per start, and Slurm may start a job again (slurm.requeue)" if self.requeued else ""

    def refuse_beyond(self, budget: float | None) -> None:
        """Refuse a cost above `budget`, in GPU-hours where GPUs are held, else in core-hours.

        Raises:
            BudgetError: the cost could be higher.
        """
        counted, unit = (self.gpu_hours, "GPU-hours") if self.gpu_hours else (self.core_hours, "core-hours")
        if budget is not None and counted > budget:
            raise BudgetError(
                f"this could cost {counted:.4g} {unit}{self._per_start}, the budget is {budget:.4g}: "
                f"submit less with --where, lower the site's timeout_minutes, or raise --budget; "
                "nothing was submitted"
            )
