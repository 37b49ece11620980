"""Ranks on this host: processes of the supervisor, or one MPI world under MPICH's `mpiexec` (Hydra)."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.launchers.launch import Launch, RanksStarted
from harness.launchers.ranks import parent_death, wrapper
from harness.launchers.ranks.environment import rank_environment
from harness.launchers.ranks.outcome import RankDeath, RanksEnd, Reason, oom_kills, outcome_of_ranks
from harness.launchers.ranks.watching import TERM_SECONDS, WATCH_SECONDS, Ranks, end_lines
from harness.runs.attempt_outcome import Outcome
from harness.runs.checkpoint_store import PREEMPTED_EXIT_CODE
from harness.runs.record_lines import last_lines
from harness.runs.store import Attempt

GRACE_SECONDS = 0.5  # a rank that dies this soon after the first may be the root cause too

NO_MPIEXEC = (
    f"backend: mpi needs the mpiexec of MPICH or a relative, found none beside {sys.executable} or on PATH: "
    "pip install mpich, or use backend: gloo"
)

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: orphans of ranks become children of the supervisor
_START_SECONDS = 120.0  # a busy machine starts an interpreter per rank in seconds
_POLL_SECONDS = 0.01
# Hydra must not end the other ranks when one dies: the launcher does, once it has seen which was the first.
_HYDRA_OPTIONS = ("-launcher", "fork", "-rmk", "user", "-disable-auto-cleanup")


def local_ranks(attempt: Attempt, launch: Launch, world_size: int, started: RanksStarted) -> LocalRanks:
    """The ranks of an attempt on this host, not started yet; `started` has their CPUs and GPUs."""
    under_mpiexec = launch.site.backend == "mpi" and world_size > 1
    return (MpiexecRanks if under_mpiexec else LocalRanks)(attempt, launch, world_size, started)


@dataclass(frozen=True)
class _RunningRank:
    """A rank's process, which leads a process group.

    Attributes:
        descriptor: becomes readable when the exit code is known.
        exit_code: None as long as it is not.
    """

    pid: int
    descriptor: int
    exit_code: Callable[[], int | None]


class LocalRanks(Ranks):
    """Ranks that are processes of this one, each pinned to its CPUs."""

    def __init__(self, attempt: Attempt, launch: Launch, world_size: int, started: RanksStarted) -> None:
        super().__init__(attempt, launch, world_size)
        self._started = started
        self._environment = rank_environment(os.environ, launch, started.gpus)
        self._running: dict[int, _RunningRank] = {}
        self._groups: list[int] = []
        self._deaths: list[RankDeath] = []
        self._grace_ends = float("inf")
        self._kills_before = oom_kills()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(self) -> None:
        """Start every rank in a session of its own."""
        for rank in range(self.world_size):
            with self.attempt.log(rank).open("ab") as log:
                process = subprocess.Popen(
                    [*_tied(self._cpus_of(rank)), *self._rank_command(rank)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=self._environment, start_new_session=True,
                )  # fmt: skip
            self._add(rank, _RunningRank(process.pid, os.pidfd_open(process.pid), process.poll))

    def running(self) -> bool:
        """Whether ranks run and none failed, or the first failed just now."""
        return bool(self._running) and time.monotonic() <= self._grace_ends

    def wait(self) -> None:
        """Wait for a death, and note whether it was a failure."""
        self._wait(min(WATCH_SECONDS, max(0.0, self._grace_ends - time.monotonic())))
        if self._reap(own=True) and self._grace_ends == float("inf"):
            self._grace_ends = time.monotonic() + GRACE_SECONDS

    def request_checkpoint(self) -> None:
        """Send SIGUSR1 to the ranks, not to their groups: data loaders have nothing to save."""
        for running in self._running.values():
            with suppress(ProcessLookupError):
                if self.launch.site.launch_prefix:  # the rank may be a child of what starts its container
                    os.killpg(running.pid, signal.SIGUSR1)
                else:
                    os.kill(running.pid, signal.SIGUSR1)

    def end(self) -> None:
        """End the ranks and every descendant of this process."""
        self._end_ranks()
        for child in psutil.Process().children(recursive=True):  # those that left their rank's group
            with suppress(psutil.NoSuchProcess):
                child.kill()

    def outcome(self, reason: Reason, started_at: float) -> Outcome:
        """The outcome, from the deaths in the order in which they were seen."""
        kills = oom_kills()
        oom_killed = kills is not None and self._kills_before is not None and kills > self._kills_before
        ending = RanksEnd(reason, tuple(self._deaths))
        return outcome_of_ranks(self.attempt, ending, started_at, time.time(), oom_killed)

    def _end_ranks(self) -> None:
        self._reap(own=True)
        self._signal_groups(signal.SIGTERM)
        deadline = time.monotonic() + TERM_SECONDS
        while self._running and time.monotonic() < deadline:
            self._wait(deadline - time.monotonic())
            self._reap(own=False, foreign=(-signal.SIGKILL,))  # nobody here has sent that yet
        self._signal_groups(signal.SIGKILL)
        while self._running:  # SIGKILL cannot be ignored; a rank stuck in the kernel is worth waiting for
            self._wait(WATCH_SECONDS)
            self._reap(own=False)

    def _rank_command(self, rank: int) -> list[str]:
        options = {"rank": rank, "world-size": self.world_size, "local-rank": rank}
        options["threads"] = self.launch.cpus_per_rank
        words = (word for name, value in options.items() for word in (f"--{name}", str(value)))
        return [*self.launch.command, str(self.attempt.path), *words]

    def _cpus_of(self, rank: int) -> tuple[int, ...]:
        share, cpus = self.launch.cpus_per_rank, self._started.cpus
        return cpus if self.launch.oversubscribed else cpus[rank * share : (rank + 1) * share]

    def _add(self, rank: int, running: _RunningRank) -> None:
        self._running[rank] = running
        self._groups.append(running.pid)

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        for running in self._running.values():
            poll.register(running.descriptor, select.POLLIN)
        poll.poll(seconds * 1000 + 1)

    def _reap(self, *, own: bool, foreign: Collection[int] = ()) -> bool:
        """Record the ranks that have ended, by themselves if `own` or with an exit code of `foreign`.

        Returns:
            Whether any of them failed.
        """
        new = []
        for rank, running in list(self._running.items()):
            exit_code = running.exit_code()
            if exit_code is not None:
                del self._running[rank]
                os.close(running.descriptor)
                new.append(RankDeath(rank, exit_code, own or exit_code in foreign))
        # Seen together: under mpiexec their wrappers know when; else a signal explains the other's exit.
        new.sort(key=lambda death: (self._ended_at(death.rank), death.exit_code >= 0))
        self._deaths += new
        return any(death.exit_code not in (0, PREEMPTED_EXIT_CODE) for death in new)

    def _ended_at(self, rank: int) -> float:
        """Unix time at which a rank ended, where that is known."""
        del rank
        return 0.0

    def _signal_groups(self, number: signal.Signals) -> None:
        for group in self._groups:
            with suppress(ProcessLookupError):  # the whole group is gone
                os.killpg(group, number)


class MpiexecRanks(LocalRanks):
    """Ranks that are children of wrappers, which mpiexec has started; the wrappers write how they ended."""

    _mpiexec: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start mpiexec; returns once every rank has a line in its end file.

        Raises:
            OSError: there is no mpiexec, or it did not start the ranks.
        """
        mpiexec = find_mpiexec()
        if mpiexec is None:
            raise FileNotFoundError(NO_MPIEXEC)
        by_rank = ";".join(",".join(map(str, self._cpus_of(rank))) for rank in range(self.world_size))
        parents = [sys.executable, "-I", "-S", str(Path(wrapper.__file__)), str(self.attempt.path)]
        log = self.attempt.path / "logs" / "mpiexec.log"
        with log.open("ab") as file:
            self._mpiexec = subprocess.Popen(
                [
                    *_tied(self._started.cpus), str(mpiexec), *_HYDRA_OPTIONS, "-n", str(self.world_size),
                    *parents, str(self.launch.cpus_per_rank), by_rank, *self.launch.command,
                ],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=self._environment,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _START_SECONDS
        while not all(end_lines(self.attempt, rank) for rank in range(self.world_size)):
            if self._mpiexec.poll() is not None or time.monotonic() > deadline:
                printed = [line.strip() for line in last_lines(log) if line.strip()]
                detail = printed[-1] if printed else "it printed nothing"
                raise OSError(f"{mpiexec} did not start {self.world_size} ranks: {detail}")
            time.sleep(_POLL_SECONDS)
        for rank in range(self.world_size):
            self._add(rank, self._under_wrapper(rank))

    def _end_ranks(self) -> None:
        super()._end_ranks()
        if self._mpiexec is not None:  # it ends after its ranks, and removes its files
            with suppress(subprocess.TimeoutExpired):
                self._mpiexec.wait(TERM_SECONDS)

    def _under_wrapper(self, rank: int) -> _RunningRank:
        start = end_lines(self.attempt, rank)[0]
        try:
            descriptor = os.pidfd_open(start["wrapper"])
        except ProcessLookupError:  # it has ended already
            descriptor = os.open(os.devnull, os.O_RDONLY)  # always readable

        def exit_code() -> int | None:
            wrapper_ended = bool(select.select([descriptor], [], [], 0)[0])
            code = end_lines(self.attempt, rank)[-1].get("exit_code")
            return -signal.SIGKILL if code is None and wrapper_ended else code

        return _RunningRank(start["pid"], descriptor, exit_code)

    def _ended_at(self, rank: int) -> float:
        """By its wrapper's line; infinite where the wrapper was killed with it."""
        last = end_lines(self.attempt, rank)[-1]
        return last["at"] if "exit_code" in last else float("inf")


def find_mpiexec() -> Path | None:
    """The `mpiexec` beside this Python, else the one on PATH; None if there is neither."""
    beside = Path(sys.executable).with_name("mpiexec")
    if beside.exists():
        return beside
    on_path = shutil.which("mpiexec")
    return Path(on_path) if on_path is not None else None


def _tied(cpus: Sequence[int]) -> list[str]:
    """Prefix of a command that pins it and has it die with this process."""
    program = str(Path(parent_death.__file__))
    return [sys.executable, "-I", "-S", program, str(os.getpid()), ",".join(map(str, cpus))]
