"""Upper bound of the cost of runs, and the budget that refuses them before they start."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from harness.errors import BudgetError, CostlyError
from harness.runs.locks import exclusive
from harness.runs.store import SweepFolder
from harness.runs.stored_files import (
    STRICT,
    Seconds,
    make_inside,
    read_as,
    with_checksum,
    write_atomically,
)  # fmt: skip

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


Hours = Seconds  # a number that is not negative


@dataclass(frozen=True)
class _Account:
    """The content of a budget's file.

    Attributes:
        unit: `GPU-hours` or `core-hours`.
        hours: the budget.
        committed: what its starts have cost or could still cost.
    """

    __pydantic_config__ = STRICT
    unit: str
    hours: Hours
    committed: Hours


def open_budget(folder: SweepFolder, hours: float, cost: CostEstimate) -> str:
    """Open a budget for a submission whose first starts could cost `cost`; returns its name.

    Raises:
        OSError: the disk is full, for example.
    """
    with suppress(FileExistsError):
        make_inside(folder.path / "budgets")
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(4)}"
    _write(_path(folder, name), _Account(cost.unit, hours, cost.counted))
    return name


class StartBudget:
    """What one start of a job may cost, and whether there may be another one.

    Args:
        folder: of the sweep.
        name: of the submission's budget; None if it has none.
        cost: of one start, to its time limit.
        limit_minutes: that time limit.
        alone: whether the job runs one attempt only, so that it is over when that attempt is.
    """

    def __init__(
        self, folder: SweepFolder, name: str | None, cost: CostEstimate, limit_minutes: float, *, alone: bool
    ) -> None:
        self._folder, self._name, self._cost, self._alone = folder, name, cost, alone
        self._limit_seconds = limit_minutes * 60
        self._began = time.monotonic()
        self._granted = self._closed = False

    def grant_next(self) -> str:
        """Commit the cost of another start, once for all attempts of the job.

        Returns:
            Empty, or why there may be none.

        Raises:
            OSError: it could not be recorded.
            StoreError: the budget's file is missing or damaged.
        """
        if self._name is None or self._granted:
            return ""
        if self._alone:
            self.close()
        with self._account() as (path, account):
            left = account.hours - account.committed
            if self._cost.counted > left:
                return (
                    f"the budget of {account.hours:.4g} {account.unit} has {max(left, 0.0):.2g} left, and "
                    f"another start could cost {self._cost.counted:.2g}"
                )
            _write(path, replace(account, committed=account.committed + self._cost.counted))
        self._granted = True
        return ""

    def close(self) -> None:
        """Give back what this start has not used.

        Raises:
            OSError: it could not be recorded.
            StoreError: the budget's file is missing or damaged.
        """
        used = min(1.0, (time.monotonic() - self._began) / self._limit_seconds)
        self._give_back(self._cost.counted * (1 - used))

    def refund(self) -> None:
        """Give back all of this start, whose ranks never ran.

        Raises:
            OSError: it could not be recorded.
            StoreError: the budget's file is missing or damaged.
        """
        self._give_back(self._cost.counted)

    def _give_back(self, hours: float) -> None:
        if self._name is None or self._closed:
            return
        with self._account() as (path, account):
            _write(path, replace(account, committed=max(0.0, account.committed - hours)))
        self._closed = True

    @contextmanager
    def _account(self) -> Iterator[tuple[Path, _Account]]:
        path = _path(self._folder, str(self._name))
        with exclusive(path.with_suffix(".lock")):
            yield path, read_as(_Account, path)


def _path(folder: SweepFolder, name: str) -> Path:
    return folder.path / "budgets" / f"{name}.json"


def _write(path: Path, account: _Account) -> None:
    write_atomically(path, with_checksum(asdict(account)))
