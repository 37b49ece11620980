"""Supervisor of a job, on its first node: `python -m harness.launchers.slurm.batch_job MANIFEST`.

Runs the attempts of this job of the array, slots side by side, and writes the outcome of each. If Slurm ends
the job, the supervisor writes none: only Slurm knows why, and whether it starts the job again. `status` then
gets the state from Slurm. With `--shared-runs` it runs attempts too that another user may have written.

At most one job ever runs an attempt, whatever happened to the submission. The submit lock keeps two
submitters apart, and `finish_submission` looks for the jobs of an unconfirmed manifest before it submits that
again. If file locks fail or sbatch ran twice, `taken.json` decides: only one job can create it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from harness.errors import StoreError
from harness.launchers.cost import StartBudget
from harness.launchers.launch import SHARED_RUNS, Launch, RanksStarted, cancel_requested
from harness.launchers.ranks.outcome import cancelled_before_start, outcome_without_ranks
from harness.launchers.ranks.srun import SrunRanks, in_words
from harness.launchers.resuming import continued, not_started, resumed
from harness.launchers.slurm.job_layout import slurm
from harness.launchers.slurm.scheduler import NO_ANSWER, NoAnswerError, requeue
from harness.launchers.slurm.submission_manifest import SubmissionManifest
from harness.runs.attempt_outcome import Outcome
from harness.runs.checkpoint_store import kept_step
from harness.runs.store import Attempt
from harness.runs.stored_files import STRICT, Count, Seconds, with_checksum, write_once

_REQUEUE_SECONDS = 90.0  # of the two minutes that a job has more than its attempts
_REQUEUE_PAUSE_SECONDS = 3.0
_ENDED_SECONDS = 1.0  # between the signals of Slurm to the processes of one job
_SIGNAL_SECONDS = 180  # Slurm signals up to a minute early, and the profile's setup may have taken two


class Supervisor:
    """Runs the attempts of one job."""

    def __init__(self, manifest: SubmissionManifest, job: int, *, shared_runs: bool = False) -> None:
        self._manifest = manifest
        self._job = job
        self._shared_runs = shared_runs
        self._ending = threading.Event()
        self._lost_nodes: tuple[str, ...] = ()
        self._failure: Exception | None = None
        self._following: list[Attempt] = []
        self._repeated = False  # whether Slurm may start this job again for an attempt without an outcome
        self._preparing = threading.Lock()  # slots are threads
        layout, site = manifest.layout, manifest.site
        self._ends = time.monotonic() + layout.minutes(site) * 60
        self._budget = StartBudget(
            manifest.sweep,
            manifest.launch.budget,
            layout.estimate_cost(site),
            layout.minutes(site),
            alone=layout.slots == layout.length == 1,
        )

    def run(self) -> int:
        """Run all slots.

        Returns:
            The exit code: an error number if an outcome could not be written, 1 for any other error.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        slots = [
            threading.Thread(target=self._run_slot, args=(slot,)) for slot in self._manifest.slots(self._job)
        ]
        for slot in slots:
            slot.start()
        for slot in slots:
            slot.join()
        if not self._repeated:  # else that start uses what is committed, and gives back what it leaves
            with suppress(OSError, StoreError):  # then it stays committed
                self._budget.close()
        if self._following and not self._ending.is_set():
            self._start_again()
        if isinstance(self._failure, OSError):
            return self._failure.errno or 1
        return 0 if self._failure is None else 1

    def _run_slot(self, slot: list[Attempt]) -> None:
        for listed in slot:
            attempt = None
            try:
                attempt = None if self._ending.is_set() else acquire_attempt(listed, self._manifest)
                outcome = self._run(attempt) if attempt is not None else None
                if attempt is not None and outcome is not None:
                    outcome = self._continued(attempt, outcome)
                    attempt.write_outcome(outcome)
                    sys.stderr.write(f"{attempt.path}: {outcome.state} {outcome.cause}\n")
            except OSError as error:  # on a full disk the exit code is the only message left
                self._failure = error
                sys.stderr.write(f"{listed.path}: {error}\n")
            except Exception as error:  # else the job would end with 0
                self._failure = error
                traceback.print_exc()
                if attempt is not None:
                    self._record_failure(attempt, error)

    def _continued(self, attempt: Attempt, outcome: Outcome) -> Outcome:
        """The outcome; if the run goes on, its next attempt is noted for the next start of this job."""
        launch = Launch.read_to_execute(attempt, shared_runs=self._shared_runs)
        with self._preparing:
            outcome, following = continued(attempt, launch, outcome, self._budget)
        if following is not None:
            self._following.append(following)
        return outcome

    def _start_again(self) -> None:
        """Have Slurm start this job again for the attempts that follow; waits for a restarting controller."""
        gives_up = time.monotonic() + _REQUEUE_SECONDS
        while (why := self._requeue()) and time.monotonic() < gives_up and NO_ANSWER.search(why):
            self._ending.wait(_REQUEUE_PAUSE_SECONDS)
        for attempt in self._following if why else ():
            attempt.write_outcome(not_started(attempt, f"Slurm did not requeue its job: {why}"))

    def _requeue(self) -> str:
        """Put this job back into the queue; why that failed, or empty.

        Slurm then ends this job, and with it a scontrol that it has not answered yet.
        """
        try:
            requeue(os.environ["SLURM_JOB_ID"])
        except NoAnswerError as error:
            return "" if self._ending.wait(_ENDED_SECONDS) else str(error)
        return ""

    def _record_failure(self, attempt: Attempt, error: Exception) -> None:
        with suppress(OSError):
            cause = f"its supervisor failed: {type(error).__name__}: {error}"
            attempt.write_outcome(outcome_without_ranks("FAILED", cause))

    def _run(self, attempt: Attempt) -> Outcome | None:
        launch = Launch.read_to_execute(attempt, shared_runs=self._shared_runs)
        if cancel_requested(attempt):
            return cancelled_before_start(attempt)
        if self._lost_nodes:
            cause = f"its job lost {in_words(self._lost_nodes)} before the attempt started"
            return outcome_without_ranks("NODE_FAIL", cause, checkpoint_step=kept_step(attempt))
        started_at = time.time()
        RanksStarted(started_at, (), ()).write(attempt)
        ranks = SrunRanks(attempt, launch, self._manifest.layout, self._ending.is_set)
        outcome = ranks.run(started_at)
        if ranks.failed_nodes and slurm(launch.site).requeue:
            self._ending.set()  # Slurm starts this job again, and its signal reaches no node without slurmd
        if self._ending.is_set() and cancel_requested(attempt) is None and outcome.state != "COMPLETED":
            self._repeated = True
            return None
        if outcome.state == "NODE_FAIL":
            self._lost_nodes = (*self._lost_nodes, *ranks.lost_nodes)
        if outcome.state == "PREEMPTED" and self._at_time_limit(launch):
            cause = outcome.cause.replace("preempted", "stopped before its job's time limit", 1)
            outcome = replace(outcome, state="TIMEOUT", cause=cause)
        if outcome.state == "PREEMPTED" and slurm(launch.site).requeue and not self._requeue():
            self._repeated = True
            return None  # the job resumes from the checkpoint when Slurm starts it again
        return outcome

    def _at_time_limit(self, launch: Launch) -> bool:
        """Whether a signal of Slurm announced the job's time limit, and no preemption."""
        seconds = slurm(launch.site).signal_seconds
        return seconds is not None and self._ends - time.monotonic() < seconds + _SIGNAL_SECONDS

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._ending.set()


def main(path: Path, *, shared_runs: bool) -> int:
    """Run this job of the array of the manifest in folder `path`; returns the exit code."""
    os.umask(os.umask(0) | 0o022)  # nobody else may write what supervisors and ranks make
    manifest = SubmissionManifest.read_to_execute(path, shared_runs=shared_runs)
    return Supervisor(manifest, int(os.environ["SLURM_ARRAY_TASK_ID"]), shared_runs=shared_runs).run()


@dataclass(frozen=True)
class _Owner:
    """The job that runs an attempt: the content of `taken.json`.

    Attributes:
        restart: how often Slurm had started the job again by then.
        at: Unix time, seconds.
    """

    __pydantic_config__ = STRICT
    job: str
    restart: Count
    node: str
    at: Seconds


def acquire_attempt(listed: Attempt, manifest: SubmissionManifest) -> Attempt | None:
    """The attempt that this job has to run for `listed`, now owned by the job; None if there is none.

    A job that Slurm starts again writes the outcome of the attempt that it had started, and resumes it in a
    new attempt, unless the old one was cancelled.
    """
    if (manifest.submitted or {}).get("refused"):
        return None
    chain = manifest.chain(listed)
    if not chain or chain[-1].outcome() is not None:
        return None
    last = chain[-1]
    holder = last.read_as(_Owner, "taken.json")
    if holder is None:
        other = _earlier_attempt(last, manifest)
        if other is not None:
            last.write_outcome(
                outcome_without_ranks("CANCELLED", f"attempt {other.number} of this cell was first")
            )
            return None
        return last if _acquire(last) else None
    if holder.job != _this_job() or holder.restart >= _restarts():
        return None
    following = resumed(last)
    return following if following is not None and _acquire(following) else None


def _acquire(attempt: Attempt) -> bool:
    owner = _Owner(_this_job(), _restarts(), os.environ.get("SLURMD_NODENAME", ""), time.time())
    return write_once(attempt.path / "taken.json", with_checksum(asdict(owner)))


def _earlier_attempt(own: Attempt, manifest: SubmissionManifest) -> Attempt | None:
    """An attempt at the same cell from another manifest that is running or has completed."""
    for attempt in own.cell_folder.attempts():
        launch = attempt.read("launch.json")
        if launch is None or launch.get("manifest") == manifest.path.name:
            continue
        outcome = attempt.outcome()
        if outcome is None and (attempt.path / "taken.json").exists():
            return attempt
        if outcome is not None and outcome.state == "COMPLETED":
            return attempt
    return None


def _this_job() -> str:
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"


def _restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), shared_runs=SHARED_RUNS in sys.argv[2:]))
