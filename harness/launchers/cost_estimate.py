"""Upper bound of the cost of runs, and the budget that refuses them before they start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from harness.errors import BudgetError, CostlyError

ASK_ABOVE_GPU_HOURS = 100.0
"""Somebody has to agree to more than this: about four GPUs for a day."""

ASK_ABOVE_CORE_HOURS = 1000.0
"""The same for CPUs. The bound of a paper's sweeps at size `small` is a few hundred core-hours."""


@dataclass(frozen=True)
class CostEstimate:
    """Time limits times the resources held: the most that one start of each job costs.

    A cluster may start a job again after a preemption or a node failure. How often is not known
    beforehand, so where that may happen this is not a bound of the total.

    Attributes:
        continuations: how many times more a job may be started because a run met its time limit.
        requeued: whether jobs may be started again.
        jobs: number of jobs, or of runs on a host.
        largest_ranks: most ranks of a job.
        largest_nodes: most nodes of a job.
    """

    gpu_hours: float = 0.0
    core_hours: float = 0.0
    requeued: bool = False
    jobs: int = 0
    largest_ranks: int = 0
    largest_nodes: int = 0
    continuations: int = 0

    def __add__(self, other: Self) -> CostEstimate:
        return CostEstimate(
            self.gpu_hours + other.gpu_hours,
            self.core_hours + other.core_hours,
            self.requeued or other.requeued,
            self.jobs + other.jobs,
            max(self.largest_ranks, other.largest_ranks),
            max(self.largest_nodes, other.largest_nodes),
            max(self.continuations, other.continuations),
        )

    def __mul__(self, times: int) -> CostEstimate:
        return CostEstimate(
            self.gpu_hours * times,
            self.core_hours * times,
            self.requeued,
            self.jobs * times,
            self.largest_ranks,
            self.largest_nodes,
            self.continuations,
        )

    def __str__(self) -> str:
        if not self.continuations:
            return f"at most {self.hours}{self._per_start}"
        again = ", and Slurm may start a job again (slurm.requeue)" if self.requeued else ""
        starts = self.continuations + 1
        return f"at most {self.hours_of(starts)} in {starts} starts of each (max_continuations){again}"

    @property
    def hours(self) -> str:
        """Of one start of each job, such as `12 GPU-hours, 96 core-hours`."""
        return self.hours_of(1)

    def hours_of(self, starts: int) -> str:
        """Of so many starts of each job."""
        gpus = f"{self.gpu_hours * starts:.4g} GPU-hours, " if self.gpu_hours else ""
        return f"{gpus}{self.core_hours * starts:.4g} core-hours"

    @property
    def sizes(self) -> str:
        """Such as `36 jobs, the largest of 4 ranks on 2 nodes`."""
        nodes = "1 node" if self.largest_nodes == 1 else f"{self.largest_nodes} nodes"
        ranks = "1 rank" if self.largest_ranks == 1 else f"{self.largest_ranks} ranks"
        jobs = "1 job of" if self.jobs == 1 else f"{self.jobs} jobs, the largest of"
        return f"{jobs} {ranks} on {nodes}"

    @property
    def counted(self) -> float:
        """One start in a budget's unit: GPU-hours where GPUs are held, else core-hours."""
        return self.gpu_hours or self.core_hours

    @property
    def most(self) -> float:
        """All starts in a budget's unit."""
        return self.counted * (self.continuations + 1)

    @property
    def unit(self) -> str:
        """Unit of a budget."""
        return "GPU-hours" if self.gpu_hours else "core-hours"

    @property
    def _per_start(self) -> str:
        return " per start, and Slurm may start a job again (slurm.requeue)" if self.requeued else ""

    def refuse_beyond(self, budget: float | None) -> None:
        """Refuse first starts that could cost more than `budget`; it is checked again before further ones.

        Raises:
            BudgetError: the cost could be higher.
        """
        if budget is not None and self.counted > budget:
            raise BudgetError(
                f"this could cost {self.counted:.4g} {self.unit}{self._per_start}, the budget is "
                f"{budget:.4g}: submit less with --where, lower the site's timeout_minutes, or raise "
                "--budget; nothing was submitted"
            )

    def refuse_unasked(self) -> None:
        """Refuse a cost that somebody has to agree to first.

        Raises:
            CostlyError: the cost could be above the threshold.
        """
        most = ASK_ABOVE_GPU_HOURS if self.gpu_hours else ASK_ABOVE_CORE_HOURS
        if self.most > most:
            starts = f", in {self.continuations + 1} starts of each" if self.continuations else ""
            raise CostlyError(
                f"this could cost {self.most:.4g} {self.unit}{starts or self._per_start}, in {self.sizes}; "
                f"above {most:g} {self.unit} somebody has to agree: repeat it with --yes or --budget "
                f"{math.ceil(self.most)}, or see what it is with --dry-run; nothing was submitted",
                self.most,
            )
