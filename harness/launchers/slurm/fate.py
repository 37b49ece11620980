"""What became of attempts, from Slurm's view, where their own files do not say."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.launchers.fates import Fate
from harness.launchers.slurm.scheduler import Job, NoAnswerError, accounted, down_nodes, jobs_of
from harness.launchers.slurm.step import ranks_nodes
from harness.store import Attempt


def claim_path(attempt: Attempt) -> Path | None:
    """The folder of the claim that the attempt is in; None if it was not launched here."""
    claim = (attempt.read("launch.json") or {}).get("claim")
    return attempt.path.resolve().parent.parent / "jobs" / claim if claim else None


def scheduler_ids(attempts: Sequence[Attempt]) -> dict[Attempt, str]:
    """Slurm's names of the attempts' jobs, such as `123_4`; attempts without one are left out."""
    launches = {attempt: attempt.read("launch.json") or {} for attempt in attempts}
    arrays: dict[str, str | None] = {}
    found = {}
    for attempt, launch in launches.items():
        claim = str(launch.get("claim"))
        if claim not in arrays:
            folder = Attempt(attempt.path.parent.parent / "jobs" / claim)
            arrays[claim] = (folder.read("submitted.json") or {}).get("job_id")
        if arrays[claim] is not None:
            found[attempt] = f"{arrays[claim]}_{launch['claim_job']}"
    return found


def fates(attempts: Sequence[Attempt]) -> dict[Attempt, Fate]:
    """Fates of attempts without an outcome: one call for all, one more if some were over long ago.

    And one more if nodes failed under some.
    """
    ids = scheduler_ids(attempts)
    unheard = "sbatch was not heard; kronscale submit finishes the submission"
    found = {attempt: Fate("PENDING", unheard) for attempt in attempts if attempt not in ids}
    if not ids:
        return found
    users = {str((attempt.read("launch.json") or {})["user"]) for attempt in ids}
    try:
        jobs: Mapping[str, Job] = jobs_of(users)
    except NoAnswerError as error:
        return found | {attempt: Fate(None, f"Slurm does not answer: {error}") for attempt in ids}
    gone = sorted({name for name in ids.values() if name not in jobs})
    jobs = {**accounted(gone), **jobs}
    failed = any(name in jobs and jobs[name].state == "NODE_FAIL" for name in ids.values())
    down = down_nodes() if failed else frozenset()
    for attempt, name in ids.items():
        fate = _fate(name, jobs.get(name), begun=(attempt.path / "begun.json").exists())
        if fate is not None and fate.state == "NODE_FAIL":
            fate = _with_nodes(fate, tuple(sorted(down & ranks_nodes(attempt))))
        if fate is not None:
            found[attempt] = fate
    return found


def _fate(name: str, job: Job | None, *, begun: bool) -> Fate | None:
    if job is None:
        return Fate("LOST", f"Slurm does not know its job {name} any more, and it left no outcome", sure=True)
    if job.state == "RUNNING":
        return None
    if job.state == "PENDING":
        why = f"job {name} waits{f': {job.reason}' if job.reason else ''}"
        return Fate("PENDING", f"Slurm took its nodes back; {why}" if begun else why)
    nodes = f" on {job.nodes}" if job.nodes else ""
    because = f", {job.reason}" if job.reason else ""
    when = "" if begun else " before its turn"
    cause = f"job {name}{nodes} ended {job.word}{because}{when}{_said(job)}"
    return Fate("LOST" if job.state == "COMPLETED" else job.state, cause, sure=True)


def _with_nodes(fate: Fate, failed: tuple[str, ...]) -> Fate:
    """Slurm says that a node of the job failed, but not which."""
    cause = f"{fate.cause}; {', '.join(failed)} is down" if failed else fate.cause
    return replace(fate, cause=cause, failed_nodes=failed)


def _said(job: Job) -> str:
    """The supervisor's exit code is an error number where it could write nothing else."""
    if job.state == "FAILED" and job.exit_code in errno.errorcode:
        return f": it could not write its outcome, {os.strerror(job.exit_code)}"
    return ""
