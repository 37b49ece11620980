"""The budget of a submission whose runs continue by themselves: what their starts may cost together.

`<sweep>/budgets/<name>.json` has the sum of what finished starts have cost and of what others could still
cost. It begins as the cost of the first start of every job, within the budget. Another start is granted only
if all of its time limit fits. Of starts that Slurm repeats after a preemption or a node failure only one is
counted, the last.

An attempt on this host that is cancelled before its ranks start costs nothing. A job of Slurm that is
cancelled in the queue stays committed: it may hold other attempts, or start at that moment and give back its
time itself.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness.launchers.cost_estimate import CostEstimate
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
