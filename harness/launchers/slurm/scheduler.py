"""What Slurm is asked: a few calls whatever the number of jobs, and no call that cannot fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.runs.records import State

_ANSWER_SECONDS = 30.0  # a controller that takes longer is as good as down
_AT_A_TIME = 1000  # job ids in one command line

# Slurm's names of states, sacct(1); flags such as COMPLETING win over the state beneath them in squeue.
_STATES: Mapping[str, State] = {
    "PENDING": "PENDING", "CONFIGURING": "PENDING", "REQUEUED": "PENDING", "REQUEUE_FED": "PENDING",
    "REQUEUE_HOLD": "PENDING", "SPECIAL_EXIT": "PENDING", "RESV_DEL_HOLD": "PENDING",
    "RUNNING": "RUNNING", "COMPLETING": "RUNNING", "SUSPENDED": "RUNNING", "STOPPED": "RUNNING",
    "SIGNALING": "RUNNING", "STAGE_OUT": "RUNNING", "RESIZING": "RUNNING",
    "COMPLETED": "COMPLETED", "FAILED": "FAILED", "TIMEOUT": "TIMEOUT", "DEADLINE": "TIMEOUT",
    "PREEMPTED": "PREEMPTED", "OUT_OF_MEMORY": "OOM", "NODE_FAIL": "NODE_FAIL", "BOOT_FAIL": "NODE_FAIL",
    "CANCELLED": "CANCELLED", "REVOKED": "CANCELLED",
}  # fmt: skip


_NOTHING = ("None", "N/A", "(null)", "None assigned", "")
_QUEUE_FIELDS = "ArrayJobID:|,ArrayTaskID:|,JobID:|,State:|,NodeList:|,Reason:|,exit_code: "


class NoAnswerError(Exception):
    """Slurm did not answer, so nothing is known."""


@dataclass(frozen=True)
class Job:
    """A job as Slurm sees it.

    Attributes:
        id: `123`, or `123_4` in an array.
        state: one of ours.
        word: Slurm's own word for it.
        nodes: that it has or had, in Slurm's notation.
        reason: why it waits or ended, empty if Slurm does not say.
        exit_code: of its batch script, 0 where not known.
    """

    id: str
    state: State
    word: str
    nodes: str
    reason: str
    exit_code: int


def jobs_of(users: Iterable[str]) -> dict[str, Job]:
    """All jobs of `users` that the controller still knows, ended ones for some minutes, by id. One call.

    Raises:
        NoAnswerError: the controller did not answer.
    """
    words = ["squeue", "--noheader", "--array", "--states=all", f"--user={','.join(sorted(set(users)))}"]
    rows = (line.split("|") for line in ask([*words, f"--Format={_QUEUE_FIELDS}"]).splitlines())
    found = {}
    for array, index, job, word, nodes, reason, status in rows:
        name = f"{array}_{index}" if index not in _NOTHING else job
        code = os.waitstatus_to_exitcode(int(status))
        found[name] = _job(name, word, nodes, reason, str(code))
    return found


def cluster_name() -> str:
    """What the cluster that answers here is called.

    Raises:
        NoAnswerError: the controller did not answer.
    """
    found = re.search(r"^ClusterName\s*=\s*(\S+)", ask(["scontrol", "show", "config"]), re.MULTILINE)
    if found is None:
        raise NoAnswerError("scontrol names no cluster")
    return found[1]


def accounted(ids: Sequence[str]) -> dict[str, Job]:
    """What accounting remembers of jobs, by id; empty where there is no accounting or it does not answer."""
    found: dict[str, Job] = {}
    arrays = sorted({name.split("_")[0] for name in ids})
    words = ["sacct", "--allocations", "--noheader", "--parsable2"]
    for start in range(0, len(arrays), _AT_A_TIME):
        some = f"--jobs={','.join(arrays[start : start + _AT_A_TIME])}"
        try:
            lines = ask([*words, some, "--format=JobID,State,NodeList,Reason,ExitCode"]).splitlines()
        except NoAnswerError:
            return found
        for line in lines:
            name, *rest = line.split("|")
            found[name] = _job(name, *rest)
    return found


def down_nodes() -> frozenset[str]:
    """Nodes that are down or do not answer now; empty if the controller does not answer."""
    words = ["sinfo", "--noheader", "--Node", "--states=down,no_respond,fail", "--format=%N"]
    try:
        return frozenset(ask(words).split())
    except NoAnswerError:
        return frozenset()


def find_array(job_name: str, user: str) -> str | None:
    """The number of the array with that name, or None if Slurm has never heard of it.

    Raises:
        NoAnswerError: the controller did not answer.
    """
    words = ["squeue", "--noheader", "--states=all", f"--user={user}", f"--name={job_name}"]
    numbers = ask([*words, "--format=%F"]).split()
    if not numbers:  # it may have ended before anyone looked
        words = ["sacct", "--allocations", "--noheader", "--parsable2", "--starttime=now-30days"]
        try:
            lines = ask([*words, f"--name={job_name}", "--format=JobID"]).split()
        except NoAnswerError:
            lines = []
        numbers = [line.split("_")[0] for line in lines]
    return numbers[0] if numbers else None


def end_jobs(array: str, indexes: Sequence[int]) -> None:
    """End jobs of an array; those that are over are left alone.

    No state is asked for: with `--state=PENDING` scancel 22.05 takes the whole array for each of its waiting
    jobs, and ends them all.

    Raises:
        NoAnswerError: the controller did not answer.
    """
    for start in range(0, len(indexes), _AT_A_TIME):
        some = ",".join(map(str, indexes[start : start + _AT_A_TIME]))
        ask(["scancel", "--quiet", f"{array}_[{some}]"])


def end_named(job_name: str, user: str) -> None:
    """End all jobs of that name: for a submission of which nobody knows the number.

    Raises:
        NoAnswerError: the controller did not answer.
    """
    ask(["scancel", "--quiet", f"--user={user}", f"--name={job_name}"])


def kill_step(step: str) -> None:
    """End all of a step's processes at once, as far as Slurm can be reached."""
    try:
        ask(["scancel", "--quiet", "--signal=KILL", step])
    except NoAnswerError:
        return


def requeue(job_id: str) -> bool:
    """Have Slurm start the job again, later; whether it will."""
    try:
        ask(["scontrol", "requeue", job_id])
    except NoAnswerError:
        return False
    return True


def ask(command: Sequence[str]) -> str:
    """What one of Slurm's commands prints.

    Raises:
        NoAnswerError: it is not installed here, took too long, or failed; in its own words.
    """
    if shutil.which(command[0]) is None:
        raise NoAnswerError(f"{command[0]} is not installed here")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{command[0]} did not answer in {_ANSWER_SECONDS:.0f} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise NoAnswerError(said[-1] if said else f"{command[0]} ended with {done.returncode}")
    return done.stdout


def _job(name: str, word: str, nodes: str, reason: str, exit_code: str) -> Job:
    first = word.split(maxsplit=1)[0] if word.split() else ""  # `CANCELLED by 1000`
    code = exit_code.split(":", maxsplit=1)[0]  # `28:0`, the signal after the colon
    return Job(
        id=name,
        state=_STATES.get(first, "RUNNING"),  # a word of a newer Slurm: not known to be over
        word=first,
        nodes="" if nodes in _NOTHING else nodes,
        reason="" if reason in _NOTHING else reason,
        exit_code=int(code) if code.isdigit() else 0,
    )
