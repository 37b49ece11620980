"""What became of attempts, from Slurm's view, where their own files do not say."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.launchers.attempt_state import AttemptState
from harness.launchers.slurm.scheduler import (
    Job,
    NoAnswerError,
    accounted,
    cluster_name,
    down_nodes,
    jobs_of,
)
from harness.launchers.slurm.step import ranks_nodes
from harness.runs.store import Attempt


def manifest_path(attempt: Attempt) -> Path | None:
    """The folder of the claim that the attempt is in; None if it was not launched here."""
    claim = (attempt.read("launch.json") or {}).get("claim")
    return attempt.path.resolve().parent.parent / "jobs" / claim if claim else None


def scheduler_ids(attempts: Sequence[Attempt]) -> dict[Attempt, str]:
    """Slurm's names of the attempts' jobs, such as `123_4`; attempts without one are left out."""
    return {attempt: place.job for attempt, place in _places(attempts).items()}


def fates(attempts: Sequence[Attempt]) -> dict[Attempt, AttemptState]:
    """Fates of attempts without an outcome: one call for all, one more if some were over long ago.

    And one more if nodes failed under some, and one before any is called over: whether their own cluster
    answers. Another one knows none of their jobs, and would have them lost while they run.
    """
    ids = scheduler_ids(attempts)
    unheard = "sbatch was not heard; kronscale submit finishes the submission"
    found = {attempt: AttemptState("PENDING", unheard) for attempt in attempts if attempt not in ids}
    if not ids:
        return found
    users = {str((attempt.read("launch.json") or {})["user"]) for attempt in ids}
    try:
        jobs: Mapping[str, Job] = jobs_of(users)
    except NoAnswerError as error:
        return found | {attempt: AttemptState(None, f"Slurm does not answer: {error}") for attempt in ids}
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
    if any(fate.sure for fate in found.values()):
        return found | _elsewhere(attempts)
    return found


@dataclass(frozen=True)
class _Place:
    """Where an attempt's job is.

    Attributes:
        job: Slurm's name of it.
        cluster: on which it was submitted; None if that was not noted.
    """

    job: str
    cluster: str | None


def _places(attempts: Sequence[Attempt]) -> dict[Attempt, _Place]:
    launches = {attempt: attempt.read("launch.json") or {} for attempt in attempts}
    submissions: dict[str, Mapping[str, Any]] = {}
    found = {}
    for attempt, launch in launches.items():
        claim = str(launch.get("claim"))
        if claim not in submissions:
            folder = Attempt(attempt.path.parent.parent / "jobs" / claim)
            submissions[claim] = folder.read("submitted.json") or {}
        array = submissions[claim].get("job_id")
        if array is not None:
            found[attempt] = _Place(f"{array}_{launch['claim_job']}", submissions[claim].get("cluster"))
    return found


def _elsewhere(attempts: Sequence[Attempt]) -> dict[Attempt, AttemptState]:
    """What to say of attempts on which the cluster that answers here cannot have a word."""
    noted = {attempt: place for attempt, place in _places(attempts).items() if place.cluster is not None}
    if not noted:
        return {}
    try:
        here = cluster_name()
    except NoAnswerError as error:
        return {attempt: AttemptState(None, f"Slurm does not answer: {error}") for attempt in noted}
    return {
        attempt: AttemptState(
            None, f"job {place.job} is on cluster {place.cluster}, and this is {here}: ask there"
        )
        for attempt, place in noted.items()
        if place.cluster != here
    }


def _fate(name: str, job: Job | None, *, begun: bool) -> AttemptState | None:
    if job is None:
        return AttemptState(
            "LOST", f"Slurm does not know its job {name} any more, and it left no outcome", sure=True
        )
    if job.state == "RUNNING":
        return None
    if job.state == "PENDING":
        why = f"job {name} waits{f': {job.reason}' if job.reason else ''}"
        return AttemptState("PENDING", f"Slurm took its nodes back; {why}" if begun else why)
    nodes = f" on {job.nodes}" if job.nodes else ""
    because = f", {job.reason}" if job.reason else ""
    when = "" if begun else " before its turn"
    cause = f"job {name}{nodes} ended {job.word}{because}{when}{_said(job)}"
    return AttemptState("LOST" if job.state == "COMPLETED" else job.state, cause, sure=True)


def _with_nodes(fate: AttemptState, failed: tuple[str, ...]) -> AttemptState:
    """Slurm says that a node of the job failed, but not which."""
    cause = f"{fate.cause}; {', '.join(failed)} is down" if failed else fate.cause
    return replace(fate, cause=cause, failed_nodes=failed)


def _said(job: Job) -> str:
    """The supervisor's exit code is an error number where it could write nothing else."""
    if job.state == "FAILED" and job.exit_code in errno.errorcode:
        return f": it could not write its outcome, {os.strerror(job.exit_code)}"
    return ""
