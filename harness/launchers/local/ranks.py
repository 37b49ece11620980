"""The processes of one attempt's ranks: started together, watched together, gone together."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from harness.launchers.launch import Launch, RanksStarted
from harness.launchers.local import parent_death as tether
from harness.launchers.local.pmi import ProcessManager
from harness.launchers.rank_environment import rank_environment
from harness.launchers.rank_exits import RankDeath, RanksEnd
from harness.launchers.stopping import Stop, watch_ranks
from harness.runs.checkpoint_requests import PREEMPTED_EXIT_CODE
from harness.runs.store import Attempt

GRACE_SECONDS = 0.5  # ranks that die this soon after the first may be the cause just as well
TERM_SECONDS = 5.0  # from SIGTERM to SIGKILL

_WATCH_SECONDS = 0.2  # deaths wake the watch at once; this is for the deadline and for cancel requests
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: orphans of ranks become children of the gang


@dataclass
class Ranks:
    """The running ranks of one attempt; leaving the `with` block leaves none of them."""

    attempt: Attempt
    _running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _groups: list[int] = field(default_factory=list)
    _deaths: list[RankDeath] = field(default_factory=list)
    _grace_ends: float = float("inf")
    _held: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()
        self._held.close()

    def start(self, launch: Launch, begun: RanksStarted, world_size: int) -> None:
        """Start every rank, pinned to its leases.

        Raises:
            OSError: a process could not be made.
        """
        environment = rank_environment(os.environ, launch, begun.gpus)
        manager = None
        if launch.site.backend == "mpi" and world_size > 1:
            manager = self._held.enter_context(ProcessManager(world_size))
        for rank in range(world_size):
            place, inherited = manager.of_rank(rank) if manager is not None else ({}, ())
            command = rank_command(self.attempt, launch, begun, rank, world_size)
            with self.attempt.log(rank).open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=environment | place, pass_fds=inherited, start_new_session=True,
                )  # fmt: skip
            self._running[rank] = process
            self._groups.append(process.pid)

    def watch(self, request: Callable[[], Stop | None], save_seconds: float) -> RanksEnd:
        """Wait until all ranks ended well, or end them all after the first that did not.

        Args:
            request: whether they have to end; called a few times a second.
            save_seconds: what they get to save a checkpoint, where they may.
        """
        reason = watch_ranks(self._go_on, request, self._ask_to_save, self._wait_for_death, save_seconds)
        self._end_all()
        return RanksEnd(reason, tuple(self._deaths))

    def _go_on(self) -> bool:
        return bool(self._running) and time.monotonic() <= self._grace_ends

    def _wait_for_death(self) -> None:
        self._wait(min(_WATCH_SECONDS, max(0.0, self._grace_ends - time.monotonic())))
        if self._reap(own=True) and self._grace_ends == float("inf"):
            self._grace_ends = time.monotonic() + GRACE_SECONDS

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        descriptors = [os.pidfd_open(process.pid) for process in self._running.values()]
        try:
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
            poll.poll(seconds * 1000 + 1)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _reap(self, *, own: bool) -> bool:
        """Note who died; returns whether anyone died badly."""
        bad = False
        for rank, process in list(self._running.items()):
            exit_code = process.poll()
            if exit_code is not None:
                del self._running[rank]
                self._deaths.append(RankDeath(rank, exit_code, own))
                bad = bad or exit_code not in (0, PREEMPTED_EXIT_CODE)
        return bad

    def _ask_to_save(self) -> None:
        for process in self._running.values():  # not their groups: data loaders have nothing to save
            process.send_signal(signal.SIGUSR1)

    def _end_all(self) -> None:
        self._reap(own=True)
        self._signal_groups(signal.SIGTERM)
        ends = time.monotonic() + TERM_SECONDS
        while self._running and time.monotonic() < ends:
            self._wait(ends - time.monotonic())
            self._reap(own=False)
        self._signal_groups(signal.SIGKILL)
        for child in psutil.Process().children(recursive=True):  # those that left their rank's group
            if child.pid not in self._groups:
                _kill_quietly(child)
        while self._running:  # SIGKILL cannot be refused; a rank stuck in the kernel is worth waiting for
            self._wait(_WATCH_SECONDS)
            self._reap(own=False)
        self._groups.clear()

    def _signal_groups(self, number: signal.Signals) -> None:
        for group in self._groups:
            try:
                os.killpg(group, number)
            except ProcessLookupError:  # the whole group is gone
                continue


def rank_command(
    attempt: Attempt, launch: Launch, begun: RanksStarted, rank: int, world_size: int
) -> list[str]:
    """The command line of one rank, tether included."""
    share = launch.cpus_per_rank
    cpus = begun.cpus if launch.oversubscribed else begun.cpus[rank * share : (rank + 1) * share]
    tied = [
        sys.executable,
        "-I",
        "-S",
        str(Path(tether.__file__)),
        str(os.getpid()),
        ",".join(map(str, cpus)),
    ]
    worker = [*launch.command, str(attempt.path)]
    options = {"rank": rank, "world-size": world_size, "local-rank": rank, "threads": launch.cpus_per_rank}
    return [*tied, *worker, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def _kill_quietly(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
