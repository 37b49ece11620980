"""Which job may run an attempt: at most one ever does, whatever happened to the submission.

The submit lock keeps two submitters apart, and `resume` looks for the jobs of an unconfirmed manifest before
it submits it again. If file locks fail or sbatch ran twice, `taken.json` decides: only one job can create it.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace

from harness.launchers.launch import Launch, RanksStarted, cancel_requested
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.launchers.slurm.submission_manifest import SubmissionManifest
from harness.runs.attempt_outcome import Outcome, State
from harness.runs.checkpoint_store import CheckpointStore, kept_step
from harness.runs.store import Attempt
from harness.runs.stored_files import STRICT, Count, Seconds, with_checksum, write_once


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
    return _continue(last)


def _continue(interrupted: Attempt) -> Attempt | None:
    if cancel_requested(interrupted) is not None:
        cause = "cancelled before its job was started again"
        interrupted.write_outcome(_interruption(interrupted, "CANCELLED", cause))
        return None
    launch = Launch.read(interrupted)
    if launch is None:
        return None
    attempt = interrupted.cell_folder.new_attempt()
    continues = interrupted.number if CheckpointStore(interrupted).newest_first() else launch.continues
    launch.model_copy(update={"continues": continues}).identified(attempt).write(attempt)
    cause = f"Slurm requeued its job and started it again; resumed by attempt {attempt.number}"
    interrupted.write_outcome(_interruption(interrupted, "PREEMPTED", cause))
    return attempt if _acquire(attempt) else None


def _interruption(attempt: Attempt, state: State, cause: str) -> Outcome:
    started = RanksStarted.read(attempt)
    started_at = started.started_at if started is not None else None
    step = kept_step(attempt)
    if state == "PREEMPTED":  # its cause names the attempt that resumes it
        return replace(outcome_without_ranks(state, cause, started_at), checkpoint_step=step)
    return outcome_without_ranks(state, cause, started_at, checkpoint_step=step)


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
