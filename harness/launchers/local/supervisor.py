"""Supervises one attempt on this host: takes locks, runs the ranks, writes the outcome."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from harness.errors import StoreError
from harness.launchers.cost import StartBudget
from harness.launchers.launch import Launch, ProcessIdentity, RanksStarted, cancel_requested
from harness.launchers.local.host_locks import locked, pools_of
from harness.launchers.local.launcher import LocalLauncher
from harness.launchers.ranks.local import local_ranks
from harness.launchers.ranks.outcome import (
    cancelled_before_start,
    outcome_without_ranks,
)
from harness.launchers.ranks.watching import Interruption
from harness.launchers.resuming import continued, not_started
from harness.runs.attempt_outcome import Outcome
from harness.runs.checkpoint_store import kept_step
from harness.runs.locks import exclusive, take
from harness.runs.store import Attempt, SweepFolder


def supervise_attempt(path: str, *, shared_runs: bool = False) -> str | None:
    """Run the launched attempt in folder `path`; blocks until it has an outcome.

    Only for the main thread of a process that does nothing else. It handles SIGTERM and SIGINT, which cancel
    the attempt, and SIGUSR1, which preempts it after the ranks have saved a checkpoint. It ends every
    descendant of the process.

    Args:
        path: of the attempt.
        shared_runs: whether the attempt is run even if another user may have written it.

    Returns:
        The final state, or None if the attempt has ended already or another supervisor runs it.

    Raises:
        ForeignError: another user may have written `launch.json`, and `shared_runs` is false.
        OSError: the outcome could not be written; the log has the reason.
    """
    attempt = Attempt(Path(path))
    launch = Launch.read_to_execute(attempt, shared_runs=shared_runs)
    lock = take(attempt.path / "supervisor.lock")
    if lock is None:
        return None
    with lock:
        return None if attempt.outcome() is not None else _Supervisor(attempt, launch, shared_runs).run()


class _Supervisor:
    def __init__(self, attempt: Attempt, launch: Launch, shared_runs: bool) -> None:
        self.attempt = attempt
        self.launch = launch
        self.shared_runs = shared_runs
        self.cell = attempt.cell_folder.cell()
        self.world_size = self.cell.world_size
        self._signals: set[int] = set()
        self._budget = self._new_budget()

    def _new_budget(self) -> StartBudget:
        site = self.launch.site
        return StartBudget(
            SweepFolder(self.attempt.path.parent.parent),
            self.launch.budget,
            LocalLauncher().estimate_cost([self.cell], site),
            site.limit_minutes(self.world_size),
            alone=True,
        )

    def run(self) -> str | None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        self.attempt.write("supervisor.json", ProcessIdentity.mine().to_dict())
        outcome = self._run_with_locks()
        if outcome is None:
            return None
        outcome, following = continued(self.attempt, self.launch, outcome, self._budget)
        if self._write(outcome):  # else whoever wrote one has given back what was committed
            self._give_back()
        if following is not None:
            self._start(following)
        return outcome.state

    def _give_back(self) -> None:
        """Give back the time that this start has not used: all of it if its ranks never ran."""
        with suppress(OSError, StoreError):  # then it stays committed
            if (self.attempt.path / "begun.json").exists():
                self._budget.close()
            else:
                self._budget.refund()

    def _start(self, following: Attempt) -> None:
        """Have the sweep's queue start the next attempt of this run."""
        folder = SweepFolder(following.path.parent.parent)
        try:
            with exclusive(folder.path / "submit.lock"):
                LocalLauncher().finish_submission(folder, shared_runs=self.shared_runs)
        except (OSError, StoreError) as error:
            following.write_outcome(not_started(following, f"its queue could not be started: {error}"))

    def _run_with_locks(self) -> Outcome | None:
        pools = pools_of(self.launch, self.world_size)
        with locked(pools, give_up=self._cancelled, label=str(self.attempt.path.resolve())) as held:
            if self.attempt.outcome() is not None:  # cancelled by another process while this one waited
                return None
            if held is None or self._cancelled():
                return self._ended_before_start()
            self._budget = self._new_budget()  # whose time begins now
            started = RanksStarted(time.time(), held[0], held[1])
            started.write(self.attempt)
            ranks = local_ranks(self.attempt, self.launch, self.world_size, started)
            return ranks.run(started.started_at, self._interruption)

    def _ended_before_start(self) -> Outcome:
        if self._signals == {signal.SIGUSR1} and cancel_requested(self.attempt) is None:
            cause, step = "preempted before it started", kept_step(self.attempt)
            return outcome_without_ranks("PREEMPTED", cause, checkpoint_step=step)
        return cancelled_before_start(self.attempt)

    def _write(self, outcome: Outcome) -> bool:
        """Write the outcome; returns whether this call did, as `Attempt.write_outcome`."""
        try:
            return self.attempt.write_outcome(outcome)
        except OSError as error:
            sys.stderr.write(
                f"kronscale: cannot write {self.attempt.path / 'outcome.json'}: {error}; the attempt will "
                f"show as LOST, but it ended {outcome.state} {outcome.cause}\n"
            )
            raise

    def _cancelled(self) -> bool:
        return bool(self._signals) or cancel_requested(self.attempt) is not None

    def _interruption(self) -> Interruption | None:
        """SIGUSR1 preempts the ranks, any other signal cancels them."""
        return ("cancel" if self._signals - {signal.SIGUSR1} else "preempt") if self._signals else None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.add(number)
