"""States of attempts as reported by Slurm, where the attempts' own files do not have them."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.launchers import AttemptState
from harness.launchers.ranks.srun import ranks_nodes
from harness.launchers.slurm.sbatch import SETUP_FAILED
from harness.launchers.slurm.scheduler import (
    Job,
    NoAnswerError,
    PartitionState,
    accounted,
    down_nodes,
    jobs_of,
    partition_states,
    this_cluster,
)
from harness.runs.commands import command
from harness.runs.record_lines import last_lines
from harness.runs.store import Attempt
from harness.runs.stored_files import user_name


def manifest_path(attempt: Attempt) -> Path | None:
    """Folder of the manifest that lists the attempt; None if the attempt was not launched on Slurm."""
    manifest = _manifest_name(attempt.read("launch.json") or {})
    return attempt.path.resolve().parent.parent / "jobs" / manifest if manifest else None


def scheduler_ids(attempts: Sequence[Attempt]) -> dict[Attempt, str]:
    """Ids of the attempts' jobs, such as `123_4`, for those attempts that have one."""
    return {attempt: submitted.id for attempt, submitted in _submitted_jobs(attempts).items()}


def attempt_states(attempts: Sequence[Attempt]) -> dict[Attempt, AttemptState]:
    """States of attempts without an outcome, in at most five calls of Slurm's commands.

    One call gets the jobs that the controller knows, one more those that ended long ago, one the failed
    nodes, one the partitions of jobs that wait for nodes. Before any attempt counts as ended, one checks that
    its own cluster answers and shows us its jobs: else running attempts would count as lost.
    """
    ids = scheduler_ids(attempts)
    found = {
        attempt: AttemptState("PENDING", _unsubmitted(attempt)) for attempt in attempts if attempt not in ids
    }
    if not ids:
        return found
    try:
        jobs: Mapping[str, Job] = jobs_of(ids.values())
    except NoAnswerError as error:
        return found | {attempt: AttemptState(None, f"Slurm does not answer: {error}") for attempt in ids}
    gone = sorted({name for name in ids.values() if name not in jobs})
    jobs = {**accounted(gone), **jobs}
    failed = any(name in jobs and jobs[name].state == "NODE_FAIL" for name in ids.values())
    down = down_nodes() if failed else frozenset()
    waiting = [jobs[name] for name in ids.values() if name in jobs and jobs[name].state == "PENDING"]
    partitions = partition_states() if any(map(asks_about_nodes, waiting)) else {}
    for attempt, name in ids.items():
        reported = _state_of(attempt, name, jobs.get(name), partitions)
        if reported is not None and reported.state == "NODE_FAIL":
            reported = _with_nodes(reported, tuple(sorted(down & ranks_nodes(attempt))))
        if reported is not None:
            found[attempt] = reported
    if any(reported.sure for reported in found.values()):
        return found | _not_shown_here(attempts, jobs)
    return found


def _unsubmitted(attempt: Attempt) -> str:
    site = str(((attempt.read("launch.json") or {}).get("site") or {}).get("name") or "local")
    again = command("submit", attempt.path.parent.parent, site=site)
    return f"not submitted to Slurm yet; to finish the submission: {again}"


@dataclass(frozen=True)
class _SubmittedJob:
    """An attempt's job.

    Attributes:
        cluster: on which it was submitted; None if not known.
        user: who submitted it.
    """

    id: str
    cluster: str | None
    user: str


def _submitted_jobs(attempts: Sequence[Attempt]) -> dict[Attempt, _SubmittedJob]:
    launches = {attempt: attempt.read("launch.json") or {} for attempt in attempts}
    submissions: dict[Path, Mapping[str, Any]] = {}
    found = {}
    for attempt, launch in launches.items():
        manifest = attempt.path.parent.parent / "jobs" / str(_manifest_name(launch))  # of any sweep
        if manifest not in submissions:
            submissions[manifest] = Attempt(manifest).read("submitted.json") or {}
        array = submissions[manifest].get("job_id")
        if array is not None:
            job = launch.get("manifest_job", launch.get("claim_job"))
            cluster, user = submissions[manifest].get("cluster"), str(launch.get("user", ""))
            found[attempt] = _SubmittedJob(f"{array}_{job}", cluster, user)
    return found


def _manifest_name(launch: Mapping[str, Any]) -> Any:
    return launch.get("manifest", launch.get("claim"))  # the key of versions up to 0.1.0


def _not_shown_here(attempts: Sequence[Attempt], known: Mapping[str, Job]) -> dict[Attempt, AttemptState]:
    """States of attempts of which the cluster that answers here does not tell us: another's, or hidden."""
    found, me = {}, user_name()
    jobs = {
        attempt: job
        for attempt, job in _submitted_jobs(attempts).items()
        if job.cluster is not None or job.user != me
    }
    if not jobs:
        return {}
    try:
        here = this_cluster()
    except NoAnswerError as error:
        return {attempt: AttemptState(None, f"Slurm does not answer: {error}") for attempt in jobs}
    for attempt, job in jobs.items():
        if job.cluster not in (None, here.name):
            cause = f"job {job.id} is on cluster {job.cluster}, and this is {here.name}: run kronscale there"
            found[attempt] = AttemptState(None, cause)
        elif here.hides_jobs and job.user != me and job.id not in known:
            cause = f"Slurm does not show job {job.id} of {job.user} to {me}: {job.user} has to ask"
            found[attempt] = AttemptState(None, cause)
    return found


def _state_of(
    attempt: Attempt, name: str, job: Job | None, partitions: Mapping[str, PartitionState]
) -> AttemptState | None:
    started = (attempt.path / "begun.json").exists()
    if job is None:
        return AttemptState(
            "LOST", f"Slurm no longer knows its job {name}, and it left no outcome", sure=True
        )
    if job.slurm_state in ("SUSPENDED", "STOPPED"):
        return AttemptState(None, f"Slurm has suspended its job {name}")
    if job.state == "RUNNING":
        return None
    if job.state == "PENDING":
        why = waiting_in_words(job, partitions)
        return AttemptState("PENDING", f"Slurm requeued its job; {why}" if started else why)
    nodes = f" on {job.nodes}" if job.nodes else ""
    because = f", {job.reason}" if job.reason else ""
    when = "" if started else " before the attempt started"
    cause = f"job {name}{nodes} ended {job.slurm_state}{because}{when}{_why_failed(attempt, job)}"
    return AttemptState("LOST" if job.state == "COMPLETED" else job.state, cause, sure=True)


def _with_nodes(reported: AttemptState, failed: tuple[str, ...]) -> AttemptState:
    """The state with the nodes that failed: Slurm does not report which node of a job failed."""
    cause = f"{reported.cause}; {', '.join(failed)} is down" if failed else reported.cause
    return replace(reported, cause=cause, failed_nodes=failed)


def job_log(attempt: Attempt) -> Path | None:
    """What `setup` and the supervisor of the attempt's job have printed; None if there is no such file."""
    manifest, launch = manifest_path(attempt), attempt.read("launch.json") or {}
    if manifest is None:
        return None
    log = manifest / f"job-{launch.get('manifest_job', launch.get('claim_job')):05}.log"
    return log if log.exists() else None


def _why_failed(attempt: Attempt, job: Job) -> str:
    """What a job without an outcome has left: the supervisor's exit code, or the last line of its log."""
    if job.state != "FAILED":
        return ""
    if job.exit_code not in (1, SETUP_FAILED) and job.exit_code in errno.errorcode:
        return f": it could not write its outcome, {os.strerror(job.exit_code)}"
    log = job_log(attempt)
    said = [line for line in last_lines(log) if line.strip()] if log is not None else []
    shown = "; ".join(line.strip() for line in said[-2 if job.exit_code == SETUP_FAILED else -1 :])
    return f": {shown} ({log})" if said else ""


_NODES = "nodes that it needs are down, drained or reserved; it starts when they are back"

# Slurm's reasons, squeue(1), by their beginning; those not listed are shown as they are.
_WORDS: Mapping[str, str] = {
    "PartitionDown": "partition {partition} is down; it starts when that is up again",
    "PartitionInactive": "partition {partition} is inactive; it starts when that is up again",
    "ReqNodeNotAvail": _NODES,
    "Nodes_required_for_job": _NODES,
    "PartitionNodeLimit": "partition {partition} allows fewer nodes; it never starts, so cancel it",
    "PartitionTimeLimit": "partition {partition} allows less time; it never starts, so cancel it",
    "JobHeldUser": "its user holds it; scontrol release {array} lets it start",
    "JobHeldAdmin": "an administrator holds it",
    "JobHoldMaxRequeue": "Slurm has started it again too often; scontrol release {array} lets it start",
    "launch_failed_requeued_held": "a node could not start it; scontrol release {array} lets it start",
    "BeginTime": "Slurm starts a job again only after a pause",
    "Resources": "nodes are not free",
    "Priority": "other jobs come first",
    "JobArrayTaskLimit": "the site's at_once jobs are running",
}
_ABOUT_NODES = ("ReqNodeNotAvail", "Nodes_required_for_job", "Resources", "Priority")


def asks_about_nodes(job: Job) -> bool:
    """Whether the state of its partition's nodes may explain why the job waits."""
    return job.reason.replace(" ", "_").startswith(_ABOUT_NODES)


def waiting_in_words(job: Job, partitions: Mapping[str, PartitionState]) -> str:
    """Why a job waits, such as `job 7_0 waits: partition main is down; ... (PartitionDown)`.

    Args:
        job: that is pending.
        partitions: states of partitions by name; those that are missing are not mentioned.
    """
    reason = job.reason.replace(" ", "_")
    if not reason:
        return f"job {job.id} waits"
    words = next((text for start, text in _WORDS.items() if reason.startswith(start)), None)
    if words is None:
        return f"job {job.id} waits: {job.reason}"
    text = words.format(partition=job.partition, array=job.id.split("_")[0])
    state = partitions.get(job.partition)
    if asks_about_nodes(job) and state is not None and state.unusable:
        text += f"; {state.unusable} of {state.nodes} nodes of {job.partition} are drained or down"
    return f"job {job.id} waits: {text} ({reason.split(',')[0]})"
