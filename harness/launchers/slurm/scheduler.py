"""Calls of Slurm's commands; their number does not grow with the number of jobs, and any of them may fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.runs.attempt_outcome import State

_ANSWER_SECONDS = 30.0  # a controller that takes longer counts as down
_IDS_PER_CALL = 1000  # job ids in one command line
_ALLOWED = ("SLURM_CONF", "SLURM_JWT")  # which cluster and who asks; all others change what is asked

# Slurm's states, sacct(1); squeue shows flags such as COMPLETING instead of the state.
_STATES: Mapping[str, State] = {
    "PENDING": "PENDING", "CONFIGURING": "PENDING", "REQUEUED": "PENDING", "REQUEUE_FED": "PENDING",
    "REQUEUE_HOLD": "PENDING", "SPECIAL_EXIT": "PENDING", "RESV_DEL_HOLD": "PENDING",
    "RUNNING": "RUNNING", "COMPLETING": "RUNNING", "SUSPENDED": "RUNNING", "STOPPED": "RUNNING",
    "SIGNALING": "RUNNING", "STAGE_OUT": "RUNNING", "RESIZING": "RUNNING",
    "COMPLETED": "COMPLETED", "FAILED": "FAILED", "TIMEOUT": "TIMEOUT", "DEADLINE": "TIMEOUT",
    "PREEMPTED": "PREEMPTED", "OUT_OF_MEMORY": "OOM", "NODE_FAIL": "NODE_FAIL", "BOOT_FAIL": "NODE_FAIL",
    "CANCELLED": "CANCELLED", "REVOKED": "CANCELLED",
}  # fmt: skip


# States of sinfo, with flags such as `*` behind them, in which a node takes no more jobs.
_UNUSABLE = re.compile(r"down|drain|fail|maint|unk|no_respond|inval|.*\*")
_FILTERS = re.compile("(SLURM|SQUEUE|SACCT|SINFO|SCANCEL|SCONTROL)_")
_NOTHING = ("None", "N/A", "(null)", "None assigned", "")
_QUEUE_FIELDS = "ArrayJobID:|,ArrayTaskID:|,JobID:|,State:|,NodeList:|,Partition:|,Reason:|,exit_code: "


# Errors after which Slurm may have done what it was asked, or would if asked again; any other means no.
NO_ANSWER = re.compile(
    r"unable to contact|timed out|connection|transmitted|slurm controller|communication|temporarily|"
    r"authentication|munge|no respon|did not answer",
    re.IGNORECASE,
)


class NoAnswerError(Exception):
    """Slurm did not answer, so the state is not known."""


@dataclass(frozen=True)
class Job:
    """A job as reported by Slurm.

    Attributes:
        id: `123`, or `123_4` in an array.
        state: as in records.
        slurm_state: Slurm's name of the state.
        nodes: of the job, in Slurm's notation.
        reason: why it waits or ended, empty if not known.
        exit_code: of its batch script, 0 if not known.
        partition: empty if not known.
    """

    id: str
    state: State
    slurm_state: str
    nodes: str
    reason: str
    exit_code: int
    partition: str = ""


@dataclass(frozen=True)
class PartitionState:
    """Nodes of a partition, and how many of them take no jobs."""

    nodes: int
    unusable: int


def jobs_of(ids: Iterable[str]) -> dict[str, Job]:
    """Jobs of these arrays that the controller still knows, by id, in one call; ended ones for some minutes.

    They are asked for by number alone: what is missing in the answer is not known to the controller.

    Args:
        ids: of jobs or of whole arrays.

    Raises:
        NoAnswerError: the controller did not answer.
    """
    arrays = ",".join(sorted({name.split("_")[0] for name in ids}))
    words = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={arrays}"]
    try:
        lines = run_command([*words, f"--Format={_QUEUE_FIELDS}"]).splitlines()
    except NoAnswerError as error:
        if "Invalid job id" not in str(error):
            raise
        lines = []
    found = {}
    rows = (line.split("|") for line in lines)
    for array, index, job, slurm_state, nodes, partition, reason, status in rows:
        name = f"{array}_{index}" if index not in _NOTHING else job
        code = os.waitstatus_to_exitcode(int(status))
        found[name] = replace(_job(name, slurm_state, nodes, reason, str(code)), partition=partition)
    return found


@dataclass(frozen=True)
class Cluster:
    """The cluster whose controller answers here; with `hides_jobs` users see their own jobs only."""

    name: str
    hides_jobs: bool


def this_cluster() -> Cluster:
    """The cluster whose controller answers here.

    Raises:
        NoAnswerError: the controller did not answer.
    """
    found = dict(re.findall(r"^(\w+)\s*= (.*)", run_command(["scontrol", "show", "config"]), re.MULTILINE))
    if "ClusterName" not in found:
        raise NoAnswerError("scontrol show config has no ClusterName")
    return Cluster(found["ClusterName"].strip(), "jobs" in found.get("PrivateData", ""))


def accounted(ids: Sequence[str]) -> dict[str, Job]:
    """Jobs in Slurm's accounting, by id; empty if there is no accounting or it does not answer."""
    found: dict[str, Job] = {}
    arrays = sorted({name.split("_")[0] for name in ids})
    words = ["sacct", "--allocations", "--noheader", "--parsable2"]
    for start in range(0, len(arrays), _IDS_PER_CALL):
        some = f"--jobs={','.join(arrays[start : start + _IDS_PER_CALL])}"
        try:
            lines = run_command([*words, some, "--format=JobID,State,NodeList,Reason,ExitCode"]).splitlines()
        except NoAnswerError:
            return found
        for line in lines:
            name, *rest = line.split("|")
            found[name] = _job(name, *rest)
    return found


def down_nodes() -> frozenset[str]:
    """Nodes that are down or do not respond now; empty if the controller does not answer."""
    words = ["sinfo", "--noheader", "--Node", "--states=down,no_respond,fail", "--format=%N"]
    try:
        return frozenset(run_command(words).split())
    except NoAnswerError:
        return frozenset()


def partition_states() -> dict[str, PartitionState]:
    """Partitions by name; empty if the controller does not answer."""
    try:
        lines = run_command(["sinfo", "--noheader", "--format=%R|%D|%T"]).splitlines()
    except NoAnswerError:
        return {}
    found: dict[str, PartitionState] = {}
    for name, count, state in (line.split("|") for line in lines):
        seen = found.get(name, PartitionState(0, 0))
        unusable = int(count) if _UNUSABLE.match(state) else 0
        found[name] = PartitionState(seen.nodes + int(count), seen.unusable + unusable)
    return found


def find_array(job_name: str, user: str) -> str | None:
    """Job id of the array with that name; None if Slurm does not know it.

    Raises:
        NoAnswerError: the controller did not answer.
    """
    words = ["squeue", "--noheader", "--states=all", f"--user={user}", f"--name={job_name}"]
    numbers = run_command([*words, "--format=%F"]).split()
    if not numbers:  # it may have ended already
        words = ["sacct", "--allocations", "--noheader", "--parsable2", "--starttime=now-30days"]
        try:
            lines = run_command([*words, f"--name={job_name}", "--format=JobID"]).split()
        except NoAnswerError:
            lines = []
        numbers = [line.split("_")[0] for line in lines]
    return numbers[0] if numbers else None


def end_jobs(array: str, indexes: Sequence[int]) -> None:
    """End jobs of an array; does nothing for jobs that have ended.

    Not restricted to a state: with `--state=PENDING` scancel 22.05 takes the whole array for each of its
    waiting jobs, and ends all of them.

    Raises:
        NoAnswerError: the controller did not answer.
    """
    for start in range(0, len(indexes), _IDS_PER_CALL):
        some = ",".join(map(str, indexes[start : start + _IDS_PER_CALL]))
        run_command(["scancel", "--quiet", f"{array}_[{some}]"])


def end_named(job_name: str, user: str) -> None:
    """End all jobs of that name, for a submission whose job id is not known.

    Raises:
        NoAnswerError: the controller did not answer.
    """
    run_command(["scancel", "--quiet", f"--user={user}", f"--name={job_name}"])


def kill_step(step: str) -> None:
    """Kill all processes of a step; does nothing if Slurm does not answer."""
    try:
        run_command(["scancel", "--quiet", "--signal=KILL", step])
    except NoAnswerError:
        return


def requeue(job_id: str) -> None:
    """Put the job back into the queue.

    Raises:
        NoAnswerError: the controller did not answer, or refused.
    """
    run_command(["scontrol", "requeue", job_id])


def run_command(command: Sequence[str]) -> str:
    """Output of one of Slurm's commands, which a user's variables such as SQUEUE_PARTITION do not change.

    Raises:
        NoAnswerError: it is not installed here, took too long, or failed; with its message.
    """
    if shutil.which(command[0]) is None:
        raise NoAnswerError(f"{command[0]} is not installed here")
    environment = {
        name: value for name, value in os.environ.items() if name in _ALLOWED or not _FILTERS.match(name)
    }
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{command[0]} did not answer in {_ANSWER_SECONDS:.0f} s") from None
    if done.returncode != 0:
        errors = done.stderr.strip().splitlines()
        raise NoAnswerError(errors[-1] if errors else f"{command[0]} ended with {done.returncode}")
    return done.stdout


def _job(name: str, slurm_state: str, nodes: str, reason: str, exit_code: str) -> Job:
    first = slurm_state.split(maxsplit=1)[0] if slurm_state.split() else ""  # `CANCELLED by 1000`
    code = exit_code.split(":", maxsplit=1)[0]  # `28:0`, the signal after the colon
    return Job(
        id=name,
        state=_STATES.get(first, "RUNNING"),  # a state of a newer Slurm: the job may still run
        slurm_state=first,
        nodes="" if nodes in _NOTHING else nodes,
        reason="" if reason in _NOTHING else reason,
        exit_code=int(code) if code.isdigit() else 0,
    )
