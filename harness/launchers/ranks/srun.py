"""Ranks as one step of a Slurm job: `srun` with a task per rank, on one or more nodes.

What Slurm did explains what the ranks did: a lost node or slurmstepd, no memory, a hang of its PMI.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.launchers.address_board import VARIABLE, AddressBoard, new_secret
from harness.launchers.launch import Launch
from harness.launchers.ranks import wrapper
from harness.launchers.ranks.environment import own_variables
from harness.launchers.ranks.outcome import RankDeath, RanksEnd, Reason, outcome_of_ranks, slurm_killed
from harness.launchers.ranks.watching import TERM_SECONDS, WATCH_SECONDS, Ranks, end_lines
from harness.launchers.slurm.job_layout import JobLayout, slurm
from harness.launchers.slurm.scheduler import kill_step
from harness.runs.attempt_outcome import Outcome
from harness.runs.checkpoint_store import PREEMPTED_EXIT_CODE
from harness.runs.record_lines import last_lines
from harness.runs.store import Attempt
from harness.runs.stored_files import parse_object, read_bytes, write_atomically

# After this error Slurm's pmi2 no longer answers the rank, and all ranks hang in MPI's initialization.
_PMI_BROKE = b"mpi/pmi2: invalid client request"
_NODE_FAILED = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)
_ORPHANED = "orphaned.jsonl"  # written by `wrapper.py`
_WAIT_SECONDS = 60  # srun's --wait: how long other tasks may run after the first has ended with 0
_FULL_BYTES = 1024 * 1024


class SrunRanks(Ranks):
    """The ranks of an attempt in the job of this process.

    Args:
        attempt: its `begun.json` is written.
        launch: of the attempt.
        layout: of the job.
        job_ending: called a few times a second; true once Slurm ends the job.

    Attributes:
        lost_nodes: once they have ended, nodes on which all ranks started and none left an exit line.
        failed_nodes: once they have ended, nodes of which Slurm reported a failure: it ends the job.
    """

    def __init__(
        self, attempt: Attempt, launch: Launch, layout: JobLayout, job_ending: Callable[[], bool]
    ) -> None:
        super().__init__(attempt, launch, layout.world_size)
        self.lost_nodes: tuple[str, ...] = ()
        self.failed_nodes: tuple[str, ...] = ()
        self._layout, self._job_ending = layout, job_ending
        self._srun: subprocess.Popen[bytes] | None = None
        self._log = attempt.path / "logs" / "srun.log"
        self._board = ExitStack()

    def start(self) -> None:
        """Start srun, with a board on which ranks of several hosts find rank 0."""
        board = self._open_board() if self._layout.nodes > 1 else ""
        with self._log.open("ab") as file:
            self._srun = subprocess.Popen(
                srun_command(self.attempt, self.launch, self._layout),
                env=_environment(self.launch, board), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip

    def running(self) -> bool:
        """Whether srun runs, neither Slurm nor a lost slurmstepd ends the step, and no rank hangs in MPI."""
        if self._srun is None or self._srun.poll() is not None:
            return False
        if self._job_ending() or (self.attempt.path / _ORPHANED).exists():
            return False
        return not self._pmi_broke()

    def wait(self) -> None:
        """Wait for srun, which ends the other ranks itself when one has failed."""
        self._wait(WATCH_SECONDS)

    def request_checkpoint(self) -> None:
        """Send SIGUSR1 to srun, which passes it on."""
        if self._srun is not None:
            self._srun.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        """End the step by SIGTERM, then through Slurm: a killed srun leaves its tasks running."""
        with self._board:
            if self._srun is None:  # it could not be started
                return
            if self._srun.poll() is None:
                self._srun.send_signal(signal.SIGTERM)
                self._wait(TERM_SECONDS)
            if self._srun.poll() is None:
                for step in {line["step"] for line in _starts(self.attempt).values()}:
                    kill_step(step)
                self._wait(TERM_SECONDS)
            if self._srun.poll() is None:
                self._srun.kill()
                self._srun.wait()

    def outcome(self, reason: Reason, started_at: float) -> Outcome:
        """The outcome, from the lines that the ranks' parents have left and from what srun printed."""
        self.lost_nodes = self._nodes_without_ends()
        printed = self._log.read_text(errors="replace")
        self.failed_nodes = tuple(sorted(set(_NODE_FAILED.findall(printed))))
        ending = RanksEnd(reason, tuple(self._deaths()))
        out_of_memory = slurm_killed(printed)
        outcome = outcome_of_ranks(self.attempt, ending, started_at, time.time(), out_of_memory)
        return self._explained(outcome) if outcome.state == "FAILED" and reason == "ranks" else outcome

    def _explained(self, outcome: Outcome) -> Outcome:
        """The outcome of ranks that failed, with what Slurm has to do with it."""
        if self._pmi_broke():  # ranks that hung in it were killed and left no exit line, but no node failed
            cause = "MPI's initialization failed: Slurm's mpi/pmi2 rejected a request of the ranks"
            return replace(outcome, cause=cause)
        if orphaned := self._orphaned():
            nodes = tuple(sorted(orphaned))
            ranks = ", ".join(str(rank) for node in nodes for rank in sorted(orphaned[node]))
            what = f"slurmstepd on {in_words(nodes)} is gone, and its ranks ({ranks}) were ended"
            return _node_fail(outcome, what, nodes)
        if nodes := self.lost_nodes or self.failed_nodes:
            ranks = " with all ranks there" if self.lost_nodes else ""
            return _node_fail(outcome, f"{in_words(nodes)} failed{ranks}", nodes)
        if not _starts(self.attempt):
            message = "; ".join([line.strip() for line in last_lines(self._log) if line.strip()][-2:])
            code = self._srun.returncode if self._srun is not None else None
            cause = f"srun started no rank and ended with {code}: {message}"
            return replace(outcome, cause=cause, ranks=())
        if shutil.disk_usage(self.attempt.path).free < _FULL_BYTES:
            path = self.attempt.path
            return replace(outcome, cause=f"{outcome.cause}; no space is left on the disk of {path}")
        return outcome

    def _open_board(self) -> str:
        """Open a board, and leave the ranks its secret; returns its address."""
        secret = new_secret()
        board = self._board.enter_context(AddressBoard(secret))
        text = json.dumps({"secret": secret.hex()})
        write_atomically(self.attempt.path / "rendezvous.json", text, private=True)
        return board.address

    def _wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            if self._srun is not None:
                self._srun.wait(seconds)

    def _pmi_broke(self) -> bool:
        """Whether Slurm's PMI failed before any rank was in training."""
        if _PMI_BROKE not in self._log.read_bytes():
            return False
        heartbeats = [self.attempt.last_heartbeat(rank) for rank in range(self.world_size)]
        return all(last is None or last.phase == "start" for last in heartbeats)

    def _deaths(self) -> list[RankDeath]:
        """Ends of all ranks in order of time; a rank without an exit line was killed with its parent."""
        ends = {rank: end_lines(self.attempt, rank)[-1] for rank in _starts(self.attempt)}
        ended = sorted((end["at"], rank) for rank, end in ends.items() if "exit_code" in end)
        deaths = [RankDeath(rank, ends[rank]["exit_code"], ends[rank]["own"]) for _, rank in ended]
        silent = [rank for rank in range(self.world_size) if "exit_code" not in ends.get(rank, {})]
        alone = all(death.exit_code in (0, PREEMPTED_EXIT_CODE) or not death.own for death in deaths)
        return deaths + [RankDeath(rank, -signal.SIGKILL, alone) for rank in silent]

    def _nodes_without_ends(self) -> tuple[str, ...]:
        """Nodes, other than this one, on which all ranks started and none left an exit line."""
        silent: dict[str, int] = {}
        for rank, start in _starts(self.attempt).items():
            if "exit_code" not in end_lines(self.attempt, rank)[-1]:
                silent[start["node"]] = silent.get(start["node"], 0) + 1
        here, full = os.environ.get("SLURMD_NODENAME"), self._layout.ranks_per_node
        return tuple(sorted(node for node, count in silent.items() if count == full and node != here))

    def _orphaned(self) -> dict[str, list[int]]:
        """Ranks by node whose slurmstepd was gone."""
        try:
            lines = read_bytes(path := self.attempt.path / _ORPHANED).splitlines()
        except FileNotFoundError:
            return {}
        orphaned: dict[str, list[int]] = {}
        for line in lines:
            entry = parse_object(line, path)
            orphaned.setdefault(str(entry["node"]), []).append(int(entry["rank"]))
        return orphaned


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
    hidden = ("SLURM_ARRAY_TASK_ID", "SLURM_EXPORT_ENV")  # with the latter srun passes on less than this
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return own_variables(launch) | environment | ({VARIABLE: board} if board else {})


def in_words(nodes: Sequence[str]) -> str:
    """Such as `node n1` or `nodes n1, n2`."""
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(nodes)}"


def _node_fail(outcome: Outcome, what: str, nodes: tuple[str, ...]) -> Outcome:
    return replace(outcome, state="NODE_FAIL", cause=f"{what}; {outcome.cause}", failed_nodes=nodes)


def _starts(attempt: Attempt) -> Mapping[int, dict[str, Any]]:
    """First lines of the ranks' end files, by rank."""
    starts = {}
    for path in sorted(attempt.path.glob("rank-*.end")):
        rank = int(path.stem.removeprefix("rank-"))
        if lines := end_lines(attempt, rank):
            starts[rank] = lines[0]
    return starts
