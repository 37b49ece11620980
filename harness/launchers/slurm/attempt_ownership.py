"""Which attempt a job may run: at most one job ever runs an attempt, whatever happened to its submission.

The submit lock keeps two submitters apart, and a claim is settled before it is submitted twice. Filter a file
system's locks fail, or sbatch was heard twice, what decides is here: a file that only one job can make.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

from harness.launchers.launch import Launch, cancel_requested
from harness.launchers.outcome import outcome_without_ranks
from harness.launchers.slurm.submission_manifest import SubmissionManifest
from harness.runs.checkpoint_store import CheckpointStore, resumable
from harness.runs.records import Outcome, State
from harness.runs.store import Attempt, write_once


def acquire_attempt(claimed: Attempt, claim: SubmissionManifest) -> Attempt | None:
    """The attempt that this job is to run in place of `claimed`, now taken by it; None if there is none.

    A job that Slurm starts again gives what it had begun an outcome and goes on in a new attempt, unless that
    was to end: whoever cancelled it asked the attempt that he saw.
    """
    if (claim.submitted or {}).get("refused"):
        return None
    chain = claim.chain(claimed)
    if not chain or chain[-1].outcome() is not None:
        return None
    last = chain[-1]
    holder = last.read("taken.json")
    if holder is None:
        other = _other_in_flight(last, claim)
        if other is not None:
            last.write_outcome(
                outcome_without_ranks("CANCELLED", f"attempt {other.number} of this cell was there before")
            )
            return None
        return last if _take(last) else None
    if holder["job"] != _this_job() or holder["restart"] >= _restarts():
        return None
    return _go_on(last)


def _go_on(interrupted: Attempt) -> Attempt | None:
    if cancel_requested(interrupted) is not None:
        cause = "cancelled before its job was started again"
        interrupted.write_outcome(_interruption(interrupted, "CANCELLED", cause))
        return None
    launch = Launch.read(interrupted)
    if launch is None:
        return None
    attempt = interrupted.cell_folder.new_attempt()
    continues = interrupted.number if CheckpointStore(interrupted).newest_first() else launch.continues
    launch.model_copy(update={"continues": continues}).write(attempt)
    cause = f"Slurm took its nodes back and started its job again; attempt {attempt.number} goes on"
    interrupted.write_outcome(_interruption(interrupted, "PREEMPTED", cause))
    return attempt if _take(attempt) else None


def _interruption(attempt: Attempt, state: State, cause: str) -> Outcome:
    began = (attempt.read("begun.json") or {}).get("started_at")
    step = next((saved.step for _, saved in resumable(attempt)), None)
    return replace(outcome_without_ranks(state, cause, began), checkpoint_step=step)


def _take(attempt: Attempt) -> bool:
    word = {"job": _this_job(), "restart": _restarts(), "node": os.environ.get("SLURMD_NODENAME", "")}
    return write_once(attempt.path / "taken.json", json.dumps({**word, "at": time.time()}) + "\n")


def _other_in_flight(mine: Attempt, claim: SubmissionManifest) -> Attempt | None:
    """An attempt at the same cell by another claim that came first and is running or has completed."""
    for attempt in mine.cell_folder.attempts():
        launch = attempt.read("launch.json")
        if launch is None or launch.get("claim") == claim.path.name:
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
