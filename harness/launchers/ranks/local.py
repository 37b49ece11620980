"""Starts, watches and ends the rank processes of one attempt on this host."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from harness.launchers.launch import Launch, RanksStarted
from harness.launchers.ranks import parent_death, wrapper
from harness.launchers.ranks.environment import rank_environment
from harness.launchers.ranks.watching import RankDeath, RanksEnd, Stop, end_lines, watch_ranks
from harness.runs.checkpoint_store import PREEMPTED_EXIT_CODE
from harness.runs.record_lines import last_lines
from harness.runs.store import Attempt

GRACE_SECONDS = 0.5  # a rank that dies this soon after the first may be the root cause too
TERM_SECONDS = 5.0  # from SIGTERM to SIGKILL

_WATCH_SECONDS = 0.2  # between checks of the time limit and of cancel requests; deaths wake `_wait` at once
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: orphans of ranks become children of the supervisor


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


@dataclass
class Ranks:
    """The running ranks of one attempt; leaving the `with` block ends all of them."""

    attempt: Attempt
    _running: dict[int, _RunningRank] = field(default_factory=dict)
    _groups: list[int] = field(default_factory=list)
    _deaths: list[RankDeath] = field(default_factory=list)
    _grace_ends: float = float("inf")
    _mpiexec: subprocess.Popen[bytes] | None = None
    _prefixed: bool = False

    def __enter__(self) -> Self:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()

    def start(self, launch: Launch, started: RanksStarted, world_size: int) -> None:
        """Start every rank, pinned to its CPUs.

        Raises:
            OSError: a process could not be started.
        """
        self._prefixed = bool(launch.site.launch_prefix)
        environment = rank_environment(os.environ, launch, started.gpus)
        cpus = [_cpus_of(rank, launch, started) for rank in range(world_size)]
        if launch.site.backend == "mpi" and world_size > 1:
            self._mpiexec = start_world(_tied(started.cpus), self.attempt, launch, cpus, environment)
            for rank in range(world_size):
                self._add(rank, *_under_wrapper(self.attempt, rank))
            return
        for rank in range(world_size):
            with self.attempt.log(rank).open("ab") as log:
                process = subprocess.Popen(
                    [*_tied(cpus[rank]), *rank_command(self.attempt, launch, rank, world_size)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=environment, start_new_session=True,
                )  # fmt: skip
            self._add(rank, process.pid, os.pidfd_open(process.pid), process.poll)

    def _add(self, rank: int, pid: int, descriptor: int, exit_code: Callable[[], int | None]) -> None:
        self._running[rank] = _RunningRank(pid, descriptor, exit_code)
        self._groups.append(pid)

    def watch(self, request: Callable[[], Stop | None], save_seconds: float) -> RanksEnd:
        """Wait until all ranks have ended; end all of them if one fails or they have to stop.

        Args:
            request: whether they have to end; called a few times a second.
            save_seconds: what they get to save a checkpoint, where they may.
        """
        reason = watch_ranks(
            self._watching, request, self._request_checkpoint, self._wait_for_death, save_seconds
        )
        self._end_all()
        return RanksEnd(reason, tuple(self._deaths))

    def _watching(self) -> bool:
        return bool(self._running) and time.monotonic() <= self._grace_ends

    def _wait_for_death(self) -> None:
        self._wait(min(_WATCH_SECONDS, max(0.0, self._grace_ends - time.monotonic())))
        if self._reap(own=True) and self._grace_ends == float("inf"):
            self._grace_ends = time.monotonic() + GRACE_SECONDS

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
        """Unix time at which a rank of mpiexec ended; infinite where its wrapper was killed with it."""
        if self._mpiexec is None:
            return 0.0
        last = end_lines(self.attempt, rank)[-1]
        return last["at"] if "exit_code" in last else float("inf")

    def _request_checkpoint(self) -> None:
        for running in self._running.values():  # not their groups: data loaders have nothing to save
            with suppress(ProcessLookupError):
                if self._prefixed:  # the rank may be a child of what starts its container
                    os.killpg(running.pid, signal.SIGUSR1)
                else:
                    os.kill(running.pid, signal.SIGUSR1)

    def _end_all(self) -> None:
        self._reap(own=True)
        self._signal_groups(signal.SIGTERM)
        deadline = time.monotonic() + TERM_SECONDS
        while self._running and time.monotonic() < deadline:
            self._wait(deadline - time.monotonic())
            self._reap(own=False, foreign=(-signal.SIGKILL,))  # nobody here has sent that yet
        self._signal_groups(signal.SIGKILL)
        while self._running:  # SIGKILL cannot be ignored; a rank stuck in the kernel is worth waiting for
            self._wait(_WATCH_SECONDS)
            self._reap(own=False)
        if self._mpiexec is not None:  # it ends after its ranks, and removes its files
            with suppress(subprocess.TimeoutExpired):
                self._mpiexec.wait(TERM_SECONDS)
        for child in psutil.Process().children(recursive=True):  # those that left their rank's group
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self._groups.clear()

    def _signal_groups(self, number: signal.Signals) -> None:
        for group in self._groups:
            try:
                os.killpg(group, number)
            except ProcessLookupError:  # the whole group is gone
                continue


def rank_command(attempt: Attempt, launch: Launch, rank: int, world_size: int) -> list[str]:
    """The command line of one rank."""
    options = {"rank": rank, "world-size": world_size, "local-rank": rank, "threads": launch.cpus_per_rank}
    words = (word for name, value in options.items() for word in (f"--{name}", str(value)))
    return [*launch.command, str(attempt.path), *words]


def _cpus_of(rank: int, launch: Launch, started: RanksStarted) -> tuple[int, ...]:
    share = launch.cpus_per_rank
    return started.cpus if launch.oversubscribed else started.cpus[rank * share : (rank + 1) * share]


def _tied(cpus: Sequence[int]) -> list[str]:
    """Prefix of a command that pins it and has it die with this process."""
    program = str(Path(parent_death.__file__))
    return [sys.executable, "-I", "-S", program, str(os.getpid()), ",".join(map(str, cpus))]


def _under_wrapper(attempt: Attempt, rank: int) -> tuple[int, int, Callable[[], int | None]]:
    """Process, descriptor and exit code of a rank that mpiexec has started."""
    start = end_lines(attempt, rank)[0]
    try:
        descriptor = os.pidfd_open(start["wrapper"])
    except ProcessLookupError:  # it has ended already
        descriptor = os.open(os.devnull, os.O_RDONLY)  # always readable

    def exit_code() -> int | None:
        wrapper_ended = bool(select.select([descriptor], [], [], 0)[0])
        code = end_lines(attempt, rank)[-1].get("exit_code")
        return -signal.SIGKILL if code is None and wrapper_ended else code

    return start["pid"], descriptor, exit_code


NO_MPIEXEC = (
    f"backend: mpi needs the mpiexec of MPICH or a relative, found none beside {sys.executable} or on PATH: "
    "pip install mpich, or use backend: gloo"
)

_START_SECONDS = 120.0  # a busy machine starts an interpreter per rank in seconds
_POLL_SECONDS = 0.01
# Hydra must not end the other ranks when one dies: the launcher does, once it has seen which was the first.
_OPTIONS = ("-launcher", "fork", "-rmk", "user", "-disable-auto-cleanup")


def find_mpiexec() -> Path | None:
    """The `mpiexec` beside this Python, else the one on PATH; None if there is neither."""
    beside = Path(sys.executable).with_name("mpiexec")
    if beside.exists():
        return beside
    on_path = shutil.which("mpiexec")
    return Path(on_path) if on_path is not None else None


def start_world(
    prefix: Sequence[str],
    attempt: Attempt,
    launch: Launch,
    cpus: Sequence[Sequence[int]],
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start a rank for each of `cpus`; returns mpiexec once every rank has a line in its end file.

    Args:
        prefix: of mpiexec's command line, which has it die with this process.
        attempt: of the ranks.
        launch: of the attempt.
        cpus: CPU numbers by rank.
        environment: of every rank.

    Raises:
        OSError: there is no mpiexec, or it did not start the ranks.
    """
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise FileNotFoundError(NO_MPIEXEC)
    by_rank = ";".join(",".join(map(str, numbers)) for numbers in cpus)
    parents = [sys.executable, "-I", "-S", str(Path(wrapper.__file__)), str(attempt.path)]
    log = attempt.path / "logs" / "mpiexec.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            [
                *prefix, str(mpiexec), *_OPTIONS, "-n", str(len(cpus)),
                *parents, str(launch.cpus_per_rank), by_rank, *launch.command,
            ],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + _START_SECONDS
    while not all(end_lines(attempt, rank) for rank in range(len(cpus))):
        if process.poll() is not None or time.monotonic() > deadline:
            printed = [line.strip() for line in last_lines(log) if line.strip()]
            detail = printed[-1] if printed else "it printed nothing"
            raise OSError(f"{mpiexec} did not start {len(cpus)} ranks: {detail}")
        time.sleep(_POLL_SECONDS)
    return process
