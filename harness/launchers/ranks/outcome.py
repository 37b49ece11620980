"""The outcome of an attempt, from the ends of its ranks: state, root cause, and one sentence for the user."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, Literal

from harness.cell import Target
from harness.errors import StoreError
from harness.runs.attempt_outcome import Outcome, RankExit, Result, State
from harness.runs.checkpoint_store import PREEMPTED_EXIT_CODE, kept_step
from harness.runs.record_lines import effective_evaluations, last_lines, last_record
from harness.runs.records import CheckpointRecord, FailureRecord
from harness.runs.store import Attempt

# Messages of TCP, gloo, NCCL and the store in a rank that lost a peer, and so is not the root cause.
_LOST_PEER = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|closed by peer|broken pipe|remote peer|gloo|"
    r"ncclRemoteError|DistNetworkError|socket|(wait|store|recv|barrier).*time(d )?-?out",
    re.IGNORECASE,
)

# What launchers, Slurm and Hydra end ranks with.
_ENDING = (-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGKILL)


Reason = Literal["ranks", "timeout", "cancel", "preempt"]
"""Why ranks had to end; "ranks" if nobody asked them to."""


@dataclass(frozen=True)
class RankDeath:
    """The end of one rank.

    Attributes:
        exit_code: as of `subprocess`: minus the signal's number when killed by one.
        own: whether the rank ended by itself; false when its launcher ended it.
    """

    rank: int
    exit_code: int
    own: bool


@dataclass(frozen=True)
class RanksEnd:
    """Why the ranks ended, and all deaths in the order in which they were seen."""

    reason: Reason
    deaths: tuple[RankDeath, ...]


def outcome_of_ranks(
    attempt: Attempt, ending: RanksEnd, started_at: float, ended_at: float, oom_killed: bool
) -> Outcome:
    """The outcome of an attempt whose ranks have all ended.

    Args:
        attempt: read for heartbeats, records, logs and `result.json`; not written.
        ending: why and in which order the ranks ended.
        started_at: Unix time, seconds.
        ended_at: Unix time, seconds.
        oom_killed: whether the kernel killed processes of this control group for memory during the run.
    """
    result = _result(attempt)
    codes = {death.exit_code for death in ending.deaths}
    checkpoint = kept_step(attempt)
    seen = [read_exit(attempt, death) for death in ending.deaths]
    exits = _root_cause_first(ending.deaths, seen, oom_killed)
    state: State
    if codes == {PREEMPTED_EXIT_CODE}:
        state, cause = _stopped(attempt, ending)
    elif codes == {0} and isinstance(result, Result):
        state, cause = "COMPLETED", _missed(attempt, result)
    elif ending.reason in ("timeout", "cancel") or not any(death.own for death in ending.deaths):
        state, cause = _ended_from_outside(ending, exits)
        cause += checkpoint_note(checkpoint)
    elif codes != {0}:
        state, cause = _failed(attempt, exits[0], oom_killed)
    else:
        state, cause = "FAILED", f"every rank exited with 0, but {result}"
    completed = result if isinstance(result, Result) and state == "COMPLETED" else None
    return Outcome(
        state=state,
        cause=cause,
        reached_target=completed.reached_target if completed else None,
        stop_reason=completed.stop_reason if completed else "error",
        started_at=started_at,
        ended_at=ended_at,
        train_seconds=result.train_seconds if isinstance(result, Result) else None,
        value=result.value if isinstance(result, Result) else None,
        ranks=exits,
        checkpoint_step=None if completed else checkpoint,
    )


def outcome_without_ranks(
    state: State, cause: str, started_at: float | None = None, *, checkpoint_step: int | None = None
) -> Outcome:
    """The outcome of an attempt whose ranks never ran, or do not decide it.

    Args:
        state: a final one.
        cause: without its checkpoint.
        started_at: Unix time, seconds; None if its ranks never ran.
        checkpoint_step: the step at which a retry would resume, if there is a checkpoint.
    """
    now = time.time()
    began = started_at if started_at is not None else now
    cause += checkpoint_note(checkpoint_step)
    return Outcome(state, cause, None, "error", began, now, checkpoint_step=checkpoint_step)


def cancelled_before_start(attempt: Attempt) -> Outcome:
    """The outcome of an attempt that was cancelled before its ranks ran; its cause names the checkpoint."""
    step = kept_step(attempt)
    return outcome_without_ranks("CANCELLED", "cancelled before it started", checkpoint_step=step)


def checkpoint_note(step: int | None) -> str:
    """The end of a cause that says from where a retry would go on; empty without a checkpoint."""
    return "" if step is None else f"; a retry resumes from its checkpoint at step {step}"


def read_exit(attempt: Attempt, death: RankDeath) -> RankExit:
    """One rank's exit with its last step and phase and the first line of its exception."""
    heartbeat = attempt.last_heartbeat(death.rank)
    failure = last_record(attempt.records(death.rank), FailureRecord.KIND)
    error = None
    if failure is not None:
        lines = str(failure["message"]).strip().splitlines()
        error = f"{failure['error']}: {lines[0]}" if lines else str(failure["error"])
    return RankExit(
        rank=death.rank,
        exit_code=death.exit_code,
        signal=_signal_name(death.exit_code),
        step=heartbeat.step if heartbeat is not None and heartbeat.step >= 0 else None,
        phase=heartbeat.phase if heartbeat is not None else None,
        error=error,
    )


def position(end: RankExit) -> str:
    """Step and phase of a rank's end, for a sentence."""
    if end.step is None:
        return "before its first step"
    return f"at step {end.step} in {end.phase}"


def _root_cause_first(
    deaths: Sequence[RankDeath], exits: Sequence[RankExit], oom_killed: bool
) -> tuple[RankExit, ...]:
    """Exits, the cause first: what ended by itself, in order of time, before what was ended for it.

    A launcher knows whom it ended, but Slurm and Hydra end the other ranks themselves, and a rank may be gone
    before its wrapper has noticed that it was signalled too. So a death by one of their signals is no cause
    if another rank failed by itself: SIGTERM and SIGUSR1 at any time, as hosts' clocks differ; SIGKILL, which
    comes seconds after SIGTERM, if the other failed first.
    """
    of_peer = [end.error is not None and _LOST_PEER.search(end.error) is not None for end in exits]
    failed = [
        death.own and not lost and death.exit_code not in (0, PREEMPTED_EXIT_CODE, *_ENDING)
        for death, lost in zip(deaths, of_peer, strict=True)
    ]

    def priority(index: int) -> tuple[bool, bool, bool, bool, int]:
        code, own = deaths[index].exit_code, deaths[index].own
        of_kernel = oom_killed and code == -signal.SIGKILL
        others = failed[:index] if code == -signal.SIGKILL else failed
        was_ended = not own or (code in _ENDING and any(others) and not of_kernel)
        return code == 0, was_ended, not of_kernel, of_peer[index], index

    return tuple(exits[index] for index in sorted(range(len(exits)), key=priority))


_STOPPED: dict[Reason, tuple[State, str]] = {
    "ranks": ("PREEMPTED", "preempted"),
    "preempt": ("PREEMPTED", "preempted"),
    "cancel": ("CANCELLED", "cancelled"),
    "timeout": ("TIMEOUT", "stopped before the site's timeout_minutes"),
}


def _stopped(attempt: Attempt, ending: RanksEnd) -> tuple[State, str]:
    """All ranks agreed to end, with a checkpoint or with the reason why there is none."""
    state, words = _STOPPED[ending.reason]
    record = last_record(attempt.records(0), CheckpointRecord.KIND)
    if record is None:
        return state, f"{words}; rank 0 recorded no checkpoint"
    if record["error"]:
        return state, f"{words}; no checkpoint could be saved at step {record['step']}: {record['error']}"
    by = f" by {record['reason']}" if ending.reason == "ranks" else ""
    return state, f"{words}{by} with a checkpoint at step {record['step']}"


def _ended_from_outside(ending: RanksEnd, exits: Sequence[RankExit]) -> tuple[State, str]:
    behind = min(exits, key=lambda end: -1 if end.step is None else end.step, default=None)
    where = f"; the last rank was {behind.rank}, {position(behind)}" if behind is not None else ""
    if ending.reason == "timeout":
        return "TIMEOUT", f"ran longer than the site's timeout_minutes{where}"
    if ending.reason == "preempt":
        return "PREEMPTED", f"preempted, and saved no checkpoint within the site's grace_seconds{where}"
    return "CANCELLED", f"cancelled while running{where}"


def _failed(attempt: Attempt, first: RankExit, oom_killed: bool) -> tuple[State, str]:
    if first.signal is not None:
        cause = f"rank {first.rank} was killed by {first.signal} {position(first)}"
        if oom_killed and first.signal == "SIGKILL":
            return "OOM", f"{cause}: the kernel ran out of memory"
        return "FAILED", cause
    if first.error is not None:
        state: State = "OOM" if is_memory_error(first.error) else "FAILED"
        return state, f"rank {first.rank} failed {position(first)}: {first.error}"
    lines = [line.strip() for line in last_lines(attempt.log(first.rank)) if line.strip()]
    last = f"; last line of its log: {lines[-1]}" if lines else ""
    cause = f"rank {first.rank} exited with code {first.exit_code} {position(first)}{last}"
    return ("OOM" if is_memory_error(last) else "FAILED"), cause


def _result(attempt: Attempt) -> Result | str:
    """What rank 0 wrote at the end, or why that is not known."""
    try:
        return attempt.read_as(Result, "result.json") or "rank 0 left no result.json"
    except StoreError as error:
        return str(error)


def _missed(attempt: Attempt, result: Result) -> str:
    if result.reached_target:
        return ""
    target = attempt.cell_folder.cell().target
    relation = ">=" if target.direction == "higher" else "<="
    missed = f"target {target.metric} {relation} {target.value:g} not reached"
    if result.stop_reason == "diverged":
        return f"{missed}: diverged after {result.steps} steps"
    try:
        evaluations = effective_evaluations(attempt)  # of a resumed run all, not the last segment's alone
    except StoreError:  # readers of the records will say so
        evaluations = []
    epochs = f"{evaluations[-1]['epoch']:g} epochs" if evaluations else f"{result.steps} steps"
    return f"{missed}: best {_best(evaluations, target, result.value):g} after {epochs}"


def _best(evaluations: Sequence[Mapping[str, Any]], target: Target, last: float) -> float:
    values = [last, *(float(record["value"]) for record in evaluations)]
    best = max if target.direction == "higher" else min
    return best((value for value in values if not isnan(value)), default=last)


def _signal_name(exit_code: int) -> str | None:
    if exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-exit_code}"


_MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError", "out of memory", "can't allocate memory")
# Not: a node called bloom01.
_SLURM_KILLED = re.compile(r"oom[-_ ]?kill|out[-_ ]of[-_ ]memory", re.IGNORECASE)


def is_memory_error(text: str) -> bool:
    """Whether the first line of an exception reports that host or device memory ran out."""
    return any(words in text for words in _MEMORY_ERRORS)


def slurm_killed(log: str) -> bool:
    """Whether srun's output reports that a step was killed for memory."""
    return _SLURM_KILLED.search(log) is not None


def oom_kills() -> int | None:
    """Processes of this control group that the kernel killed for memory; None if there is no such count.

    From the innermost group that has the count, of cgroups version 2 or 1. A container may show another
    hierarchy than it names.
    """
    membership, mounted = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, counter = mounted, "memory.events"
        elif "memory" in controllers.split(","):
            top, counter = mounted / "memory", "memory.oom_control"
        else:
            continue
        folder = top / group.lstrip("/")
        for path in (folder, *folder.parents[: len(folder.relative_to(top).parts)]):
            with suppress(OSError, KeyError, ValueError):
                fields = dict(line.split() for line in (path / counter).read_text().splitlines())
                return int(fields["oom_kill"])
    return None
