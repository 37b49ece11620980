"""Supervisor of a job, on its first node: `python -m harness.launchers.slurm.batch_job MANIFEST`.

With `--shared-runs` it runs attempts too that another user may have written.
Runs the attempts of this job of the array, slots side by side, and writes the outcome of each. If Slurm ends
the job, the supervisor writes none: only Slurm knows why, and whether it starts the job again. `status` then
gets the state from Slurm.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from harness.launchers.launch import SHARED_RUNS, Launch, RanksStarted, cancel_requested
from harness.launchers.outcome import outcome_of_ranks, outcome_without_ranks
from harness.launchers.slurm.attempt_ownership import acquire_attempt
from harness.launchers.slurm.job_layout import slurm
from harness.launchers.slurm.scheduler import requeue
from harness.launchers.slurm.step import StepEnd, run_step
from harness.launchers.slurm.submission_manifest import SubmissionManifest
from harness.runs.attempt_outcome import Outcome
from harness.runs.log_tail import last_lines
from harness.runs.store import Attempt

_FULL_BYTES = 1024 * 1024


class Supervisor:
    """Runs the attempts of one job."""

    def __init__(self, manifest: SubmissionManifest, job: int, *, shared_runs: bool = False) -> None:
        self._manifest = manifest
        self._job = job
        self._shared_runs = shared_runs
        self._ending = threading.Event()
        self._lost_nodes: tuple[str, ...] = ()
        self._failure: Exception | None = None

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

    def _record_failure(self, attempt: Attempt, error: Exception) -> None:
        with suppress(OSError):
            cause = f"its supervisor failed: {type(error).__name__}: {error}"
            attempt.write_outcome(outcome_without_ranks("FAILED", cause))

    def _run(self, attempt: Attempt) -> Outcome | None:
        launch = Launch.read_to_execute(attempt, shared_runs=self._shared_runs)
        if cancel_requested(attempt):
            return outcome_without_ranks("CANCELLED", "cancelled before it started")
        if self._lost_nodes:
            return outcome_without_ranks(
                "NODE_FAIL", f"its job lost {_nodes(self._lost_nodes)} before the attempt started"
            )
        started_at = time.time()
        RanksStarted(started_at, (), ()).write(attempt)
        try:
            attempt.reserve(self._manifest.layout.world_size)
            end = run_step(attempt, launch, self._manifest.layout, self._ending.is_set)
        except OSError as error:
            return outcome_without_ranks("FAILED", f"the ranks could not be run: {error}", started_at)
        if self._ending.is_set() and cancel_requested(attempt) is None:
            return None
        outcome = self._outcome(attempt, end, started_at)
        if (
            outcome.state == "PREEMPTED"
            and slurm(launch.site).requeue
            and requeue(os.environ["SLURM_JOB_ID"])
        ):
            return None  # the job resumes from the checkpoint when Slurm starts it again
        return outcome

    def _outcome(self, attempt: Attempt, end: StepEnd, started_at: float) -> Outcome:
        outcome = outcome_of_ranks(attempt, end.ending, started_at, time.time(), end.out_of_memory)
        if outcome.state != "FAILED" or end.ending.reason != "ranks":
            return outcome
        if end.hung:  # its ranks were killed and left no exit line, but no node failed
            cause = "the ranks hung in MPI's initialization: Slurm's mpi/pmi2 rejected one of their requests"
            return replace(outcome, cause=cause)
        if end.lost_nodes:
            self._lost_nodes = (*self._lost_nodes, *end.lost_nodes)
            cause = f"{_nodes(end.lost_nodes)} failed with all ranks there; {outcome.cause}"
            return replace(outcome, state="NODE_FAIL", cause=cause, failed_nodes=end.lost_nodes)
        if not end.started:
            printed = [line for line in last_lines(attempt.path / "logs" / "srun.log") if line.strip()]
            message = printed[-1].strip() if printed else ""
            cause = f"srun started no rank and ended with {end.exit_code}: {message}"
            return replace(outcome, cause=cause, ranks=())
        if shutil.disk_usage(attempt.path).free < _FULL_BYTES:
            return replace(outcome, cause=f"{outcome.cause}; no space is left on the disk of {attempt.path}")
        return outcome

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._ending.set()


def main(path: Path, *, shared_runs: bool) -> int:
    """Run this job of the array of the manifest in folder `path`; returns the exit code."""
    os.umask(os.umask(0) | 0o022)  # nobody else may write what supervisors and ranks make
    manifest = SubmissionManifest.read_to_execute(path, shared_runs=shared_runs)
    return Supervisor(manifest, int(os.environ["SLURM_ARRAY_TASK_ID"]), shared_runs=shared_runs).run()


def _nodes(names: tuple[str, ...]) -> str:
    return f"node {names[0]}" if len(names) == 1 else f"nodes {', '.join(names)}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), shared_runs=SHARED_RUNS in sys.argv[2:]))
