"""Runs one attempt as one step of a job: `srun` with a task per rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.launchers.address_board import VARIABLE, AddressBoard, new_secret
from harness.launchers.launch import Launch
from harness.launchers.ranks import wrapper
from harness.launchers.ranks.environment import own_variables
from harness.launchers.ranks.local import TERM_SECONDS
from harness.launchers.ranks.outcome import outcome_of_ranks, slurm_killed
from harness.launchers.ranks.watching import RankDeath, RanksEnd, Stop, end_lines, stop_request, watch_ranks
from harness.launchers.slurm.job_layout import JobLayout, slurm
from harness.launchers.slurm.scheduler import kill_step
from harness.runs.attempt_outcome import Outcome
from harness.runs.checkpoint_store import PREEMPTED_EXIT_CODE
from harness.runs.record_lines import last_lines
from harness.runs.store import Attempt
from harness.runs.stored_files import parse_object, read_bytes, write_atomically

_WATCH_SECONDS = 0.2
# After this error Slurm's pmi2 no longer answers the rank, and all ranks hang in MPI's initialization.
_PMI_BROKE = b"mpi/pmi2: invalid client request"
_ORPHANED = "orphaned.jsonl"  # written by `wrapper.py`
_WAIT_SECONDS = 60  # srun's --wait: how long other tasks may run after the first has ended with 0


@dataclass(frozen=True)
class StepEnd:
    """How a step ended.

    Attributes:
        ending: of the ranks, for the outcome.
        lost_nodes: nodes on which no rank left an exit line.
        out_of_memory: whether Slurm killed processes for memory.
        started: whether any rank was started.
        exit_code: srun's.
        hung: whether the ranks hung in MPI's initialization.
        orphaned: ranks by node whose slurmstepd was gone.
    """

    ending: RanksEnd
    lost_nodes: tuple[str, ...]
    out_of_memory: bool
    started: bool
    exit_code: int
    hung: bool
    orphaned: Mapping[str, Sequence[int]] = field(default_factory=dict)


def run_step(attempt: Attempt, launch: Launch, layout: JobLayout, job_ending: Callable[[], bool]) -> StepEnd:
    """Run the attempt's ranks in this job; returns when all have ended.

    Args:
        attempt: its `begun.json` is written.
        launch: of the attempt.
        layout: of the job.
        job_ending: called a few times a second; true once Slurm ends the job.

    Raises:
        OSError: srun could not be started.
    """
    with ExitStack() as open_board:
        board = _open_board(attempt, open_board) if layout.nodes > 1 else ""
        return _run(attempt, launch, layout, job_ending, board)


def _open_board(attempt: Attempt, stack: ExitStack) -> str:
    """Open a board for ranks of several hosts, and leave them its secret; returns its address."""
    secret = new_secret()
    board = stack.enter_context(AddressBoard(secret))
    write_atomically(attempt.path / "rendezvous.json", json.dumps({"secret": secret.hex()}), private=True)
    return board.address


def _run(
    attempt: Attempt, launch: Launch, layout: JobLayout, job_ending: Callable[[], bool], board: str
) -> StepEnd:
    process = _start(attempt, launch, layout, board)
    site = launch.site
    deadline = time.monotonic() + site.limit_minutes(layout.world_size) * 60
    save_seconds = site.save_seconds(layout.world_size)

    def running() -> bool:
        if process.poll() is not None or job_ending() or (attempt.path / _ORPHANED).exists():
            return False
        return not _hangs(attempt, layout)

    def request() -> Stop | None:
        return stop_request(attempt, save_seconds, deadline - time.monotonic(), preempted=False)

    def request_checkpoint() -> None:
        process.send_signal(signal.SIGUSR1)  # srun passes it on

    try:
        reason = watch_ranks(
            running, request, request_checkpoint, partial(_wait, process, _WATCH_SECONDS), site.grace_seconds
        )
        hung = process.poll() is None and _hangs(attempt, layout)
    finally:
        _end(process, attempt)
    output = (attempt.path / "logs" / "srun.log").read_text(errors="replace")
    return StepEnd(
        ending=RanksEnd(reason, tuple(_deaths(attempt, layout))),
        lost_nodes=_lost_nodes(attempt, layout),
        out_of_memory=slurm_killed(output),
        started=bool(_starts(attempt)),
        exit_code=process.returncode,
        hung=hung,
        orphaned=_orphaned(attempt),
    )


def _start(attempt: Attempt, launch: Launch, layout: JobLayout, board: str) -> subprocess.Popen[bytes]:
    with (attempt.path / "logs" / "srun.log").open("ab") as file:
        return subprocess.Popen(
            srun_command(attempt, launch, layout),
            env=_environment(launch, board), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip


def _hangs(attempt: Attempt, layout: JobLayout) -> bool:
    """Whether Slurm's PMI failed before any rank was in training."""
    if _PMI_BROKE not in (attempt.path / "logs" / "srun.log").read_bytes():
        return False
    heartbeats = [attempt.last_heartbeat(rank) for rank in range(layout.world_size)]
    return all(last is None or last.phase == "start" for last in heartbeats)


def srun_command(attempt: Attempt, launch: Launch, layout: JobLayout) -> list[str]:
    """The step's command line, as a list: no shell reads it."""
    site = launch.site
    profile = slurm(site)
    words = [
        "srun", f"--nodes={layout.nodes}", f"--ntasks={layout.world_size}",
        f"--ntasks-per-node={layout.ranks_per_node}", "--distribution=block",
        f"--cpus-per-task={site.cpus_per_rank}",  # not inherited from the job since Slurm 22.05
        "--kill-on-bad-exit=1", f"--wait={_WAIT_SECONDS}", f"--mpi={profile.mpi}", "--input=none",
    ]  # fmt: skip
    if layout.slots > 1:  # else every step waits for the one before
        words.append("--exact")
        memory = layout.memory_mb(site, 1)
        words.append(f"--mem={memory}M" if memory is not None else "--mem=0")
    # All of a cell's GPUs on a node are visible to all of its ranks there.
    options = profile.gpu_option(layout.ranks_per_node * site.gpus_per_rank)
    words += [f"--{name}={value}" for name, value in options.items()]
    start = [sys.executable, "-I", "-S", str(Path(wrapper.__file__))]
    return [*words, *profile.srun, *start, str(attempt.path), str(launch.cpus_per_rank), "-", *launch.command]


def ranks_nodes(attempt: Attempt) -> set[str]:
    """Nodes on which ranks of the attempt were started."""
    return {start["node"] for start in _starts(attempt).values()}


def _environment(launch: Launch, board: str) -> dict[str, str]:
    """Environment of the job, after the profile's setup lines, which have the last word.

    The batch script sets the ranks' variables before those lines; scripts of older versions did not.
    """
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_ARRAY_TASK_ID"}
    return own_variables(launch) | environment | ({VARIABLE: board} if board else {})


def _end(process: subprocess.Popen[bytes], attempt: Attempt) -> None:
    """End the step with SIGTERM, then by killing it through Slurm: a killed srun leaves its tasks running."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        _wait(process, TERM_SECONDS)
    if process.poll() is None:
        steps = {line["step"] for line in _starts(attempt).values()}
        for step in steps:
            kill_step(step)
        _wait(process, TERM_SECONDS)
    if process.poll() is None:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _deaths(attempt: Attempt, layout: JobLayout) -> list[RankDeath]:
    """Ends of all ranks in order of time; a rank without an exit line was killed with its parent."""
    ends = {rank: end_lines(attempt, rank)[-1] for rank in _starts(attempt)}
    ended = sorted((end["at"], rank) for rank, end in ends.items() if "exit_code" in end)
    deaths = [RankDeath(rank, ends[rank]["exit_code"], ends[rank]["own"]) for _, rank in ended]
    silent = [rank for rank in range(layout.world_size) if "exit_code" not in ends.get(rank, {})]
    alone = all(death.exit_code in (0, PREEMPTED_EXIT_CODE) or not death.own for death in deaths)
    return deaths + [RankDeath(rank, -signal.SIGKILL, alone) for rank in silent]


def _lost_nodes(attempt: Attempt, layout: JobLayout) -> tuple[str, ...]:
    """Nodes, other than this one, on which all ranks started and none left an exit line."""
    silent: dict[str, int] = {}
    for rank, start in _starts(attempt).items():
        if "exit_code" not in end_lines(attempt, rank)[-1]:
            silent[start["node"]] = silent.get(start["node"], 0) + 1
    here = os.environ.get("SLURMD_NODENAME")
    return tuple(sorted(n for n, count in silent.items() if count == layout.ranks_per_node and n != here))


def _orphaned(attempt: Attempt) -> dict[str, list[int]]:
    try:
        lines = read_bytes(path := attempt.path / _ORPHANED).splitlines()
    except FileNotFoundError:
        return {}
    found: dict[str, list[int]] = {}
    for line in lines:
        entry = parse_object(line, path)
        found.setdefault(str(entry["node"]), []).append(int(entry["rank"]))
    return found


def _starts(attempt: Attempt) -> Mapping[int, dict[str, Any]]:
    found = {}
    for path in sorted(attempt.path.glob("rank-*.end")):
        rank = int(path.stem.removeprefix("rank-"))
        lines = end_lines(attempt, rank)
        if lines:
            found[rank] = lines[0]
    return found


_FULL_BYTES = 1024 * 1024


def outcome_of_step(attempt: Attempt, end: StepEnd, started_at: float) -> Outcome:
    """The outcome of an attempt whose step has ended.

    Args:
        attempt: read for heartbeats, records and logs; not written.
        end: of the step.
        started_at: Unix time, seconds.
    """
    outcome = outcome_of_ranks(attempt, end.ending, started_at, time.time(), end.out_of_memory)
    if outcome.state != "FAILED" or end.ending.reason != "ranks":
        return outcome
    if end.hung:  # its ranks were killed and left no exit line, but no node failed
        cause = "the ranks hung in MPI's initialization: Slurm's mpi/pmi2 rejected one of their requests"
        return replace(outcome, cause=cause)
    if end.orphaned or end.lost_nodes:
        return _of_nodes(outcome, end)
    if not end.started:
        printed = [line for line in last_lines(attempt.path / "logs" / "srun.log") if line.strip()]
        message = printed[-1].strip() if printed else ""
        cause = f"srun started no rank and ended with {end.exit_code}: {message}"
        return replace(outcome, cause=cause, ranks=())
    if shutil.disk_usage(attempt.path).free < _FULL_BYTES:
        return replace(outcome, cause=f"{outcome.cause}; no space is left on the disk of {attempt.path}")
    return outcome


def in_words(nodes: Sequence[str]) -> str:
    """Such as `node n1` or `nodes n1, n2`."""
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(nodes)}"


def _of_nodes(outcome: Outcome, end: StepEnd) -> Outcome:
    if end.orphaned:
        nodes = tuple(sorted(end.orphaned))
        ranks = ", ".join(str(rank) for node in nodes for rank in sorted(end.orphaned[node]))
        what = f"slurmstepd on {in_words(nodes)} is gone, and its ranks ({ranks}) were ended"
    else:
        nodes = end.lost_nodes
        what = f"{in_words(nodes)} failed with all ranks there"
    return replace(outcome, state="NODE_FAIL", cause=f"{what}; {outcome.cause}", failed_nodes=nodes)
