"""The processes of one attempt's ranks: started together, watched together, gone together."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from harness.launchers.launch import Launch, RanksStarted
from harness.launchers.local import parent_death as tether
from harness.launchers.local.pmi import ProcessManager
from harness.launchers.stopping import Reason, Stop
from harness.runs.checkpoint_requests import PREEMPTED_EXIT_CODE
from harness.runs.store import Attempt

GRACE_SECONDS = 0.5  # ranks that die this soon after the first may be the cause just as well
TERM_SECONDS = 5.0  # from SIGTERM to SIGKILL

_WATCH_SECONDS = 0.2  # deaths wake the watch at once; this is for the deadline and for cancel requests
_ASK_AGAIN_SECONDS = 1.0  # a rank that is still starting does not hear the first time
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: orphans of ranks become children of the gang

# A submission from inside an allocation or under mpirun leaves these behind, and libraries believe them.
_SCRUBBED_PREFIXES = (
    "SLURM",
    "SBATCH_",
    "SRUN_",
    "PMI",
    "OMPI_",
    "HYDRA_",
    "MPI_LOCAL",
    "SUBMITIT_",
    "TORCHELASTIC_",
)
_SCRUBBED = frozenset({
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND",
})  # fmt: skip
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class RankDeath:
    """The end of one rank.

    Attributes:
        exit_code: as of `subprocess`: minus the signal's number when killed by one.
        own: whether the rank ended by itself; false when the gang ended it.
    """

    rank: int
    exit_code: int
    own: bool


@dataclass(frozen=True)
class RanksEnd:
    """Why the ranks are gone, and all deaths in the order in which they were seen."""

    reason: Reason
    deaths: tuple[RankDeath, ...]


@dataclass
class Ranks:
    """The running ranks of one attempt; leaving the `with` block leaves none of them."""

    attempt: Attempt
    _running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _groups: list[int] = field(default_factory=list)
    _deaths: list[RankDeath] = field(default_factory=list)
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

    def watch(self, stop: Callable[[], Stop | None], save_seconds: float) -> RanksEnd:
        """Wait until all ranks ended well, or end them all after the first that did not.

        Args:
            stop: whether they have to end; asked a few times a second.
            save_seconds: what they get for a checkpoint, where they may save one.
        """
        reason: Reason = "ranks"
        grace_ends = save_ends = float("inf")
        asked = float("-inf")
        while self._running:
            now = time.monotonic()
            wish = stop()
            if wish is not None:
                reason = wish.reason
                save_ends = min(save_ends, now + save_seconds)
                if not wish.save or now > save_ends:
                    break
                if now - asked > _ASK_AGAIN_SECONDS:
                    self._ask_to_save()
                    asked = now
            if now > grace_ends:
                break
            self._wait(min(_WATCH_SECONDS, max(0.0, grace_ends - now)))
            if self._reap(own=True) and grace_ends == float("inf"):
                grace_ends = time.monotonic() + GRACE_SECONDS
        self._end_all()
        return RanksEnd(reason, tuple(self._deaths))

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


def rank_environment(inherited: Mapping[str, str], launch: Launch, gpus: Sequence[int]) -> dict[str, str]:
    """What a rank finds in its environment: the inherited one without another launcher's traces.

    Every rank sees all the GPUs that its gang leased: hiding a peer's GPU breaks NCCL's peer-to-peer path.
    """
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _SCRUBBED and not name.startswith(_SCRUBBED_PREFIXES)
    }
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return environment | own_variables(launch)


def own_variables(launch: Launch) -> dict[str, str]:
    """What every launcher sets for its ranks: threads, whole logs, and what the site says."""
    environment = dict.fromkeys(_THREAD_VARIABLES, str(launch.cpus_per_rank))
    environment["PYTHONUNBUFFERED"] = "1"  # the last words of a killed rank reach its log
    return environment | launch.site.environment


def _kill_quietly(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
