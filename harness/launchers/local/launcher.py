"""The local launcher: ranks on this host, started by a queue as locks become free."""

from __future__ import annotations

import math
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.cell import Cell
from harness.errors import SiteError, StoredFileError
from harness.launchers import AttemptState
from harness.launchers.cost import CostEstimate
from harness.launchers.launch import (
    SHARED_RUNS,
    WORKER_COMMAND,
    Launch,
    ProcessIdentity,
    rank_words,
    request_cancel,
    supervisor_identity,
)
from harness.launchers.local.host_locks import waiting
from harness.launchers.ranks.local import NO_MPIEXEC, find_mpiexec
from harness.launchers.site_profile import Site
from harness.runs.store import Attempt, SweepFolder
from harness.runs.stored_files import foreign, user_name


class LocalLauncher:
    """Starts attempts in order of submission as CPUs and GPUs of this host become free."""

    poll_seconds = 0.0

    def check(self, cell: Cell, site: Site) -> None:
        """Refuse a cell that the site can never run.

        Raises:
            SiteError: the cell needs more CPUs or GPUs than the site has, a time limit for its world size, or
                an `mpiexec` that is missing.
        """
        site.limit_minutes(cell.world_size)
        cpus, gpus = len(site_cpus(site)), len(site_gpus(site))
        needed = cell.world_size * site.cpus_per_rank
        if needed > cpus and not site.oversubscribe:
            raise SiteError(
                f"{cell.id} needs {needed} CPUs, {site.cpus_per_rank} for each of {cell.world_size} ranks; "
                f"site {site.name} has {cpus}: use fewer ranks or set oversubscribe: true"
            )
        if needed > site.oversubscribe_limit * cpus:
            raise SiteError(
                f"{cell.id} needs {needed} CPUs, which is {needed / cpus:.4g} times the {cpus} of site "
                f"{site.name}; at most {site.oversubscribe_limit:g} times are allowed: name a cluster with "
                f"--site, or allow it with --oversubscribe {math.ceil(needed / cpus)}"
            )
        if cell.world_size * site.gpus_per_rank > gpus:
            raise SiteError(
                f"{cell.id} needs {cell.world_size} GPUs, one a rank; site {site.name} has {gpus}: use fewer "
                f"ranks or set gpus_per_rank: 0"
            )
        if site.backend == "mpi" and cell.world_size > 1 and find_mpiexec() is None:
            raise SiteError(f"site {site.name}: {NO_MPIEXEC}")

    def plan(self, cell: Cell, site: Site, command: Sequence[str] = WORKER_COMMAND) -> Launch:
        """How an attempt at `cell` will be launched; oversubscribed if it needs more CPUs than there are."""
        cpus = site_cpus(site)
        oversubscribed = cell.world_size * site.cpus_per_rank > len(cpus)
        return Launch(
            launcher="local",
            site=site,
            command=rank_words(site, command),
            cpus=cpus,
            gpus=site_gpus(site) if site.gpus_per_rank else (),
            cpus_per_rank=max(1, len(cpus) // cell.world_size) if oversubscribed else site.cpus_per_rank,
            oversubscribed=oversubscribed,
            host=socket.gethostname(),
            user=user_name(),
            submitted_at=time.time(),
        )

    def estimate_cost(self, cells: Sequence[Cell], site: Site) -> CostEstimate:
        """Upper bound of the cost of the cells: their ranks' CPUs and GPUs until the time limit."""
        ranks = sum(cell.world_size * site.limit_minutes(cell.world_size) for cell in cells) / 60
        largest = max(cell.world_size for cell in cells)
        return CostEstimate(
            gpu_hours=ranks * site.gpus_per_rank, core_hours=ranks * site.cpus_per_rank,
            jobs=len(cells), largest_ranks=largest, largest_nodes=1, continuations=site.max_continuations,
        )  # fmt: skip

    def preview(self, folder: SweepFolder, cells: Sequence[Cell], site: Site) -> str:
        """The command that would start each rank, without pinning and the rank's options; changes nothing."""
        planned = ((self.plan(cell, site), folder.cell_folder(cell).path) for cell in cells)
        return "\n".join(shlex.join([*launch.command, str(path)]) for launch, path in planned)

    def launch(self, folder: SweepFolder, launches: Iterable[tuple[Attempt, Launch]]) -> None:
        """Make attempts pending and have a queue start them; the caller holds the sweep's submit lock."""
        planned = dict(launches)
        for attempt, launch in planned.items():  # all that can fail for want of space comes first
            launch.prepare(attempt)
        for attempt in planned:
            Launch.publish(attempt)
        self.finish_submission(
            folder, shared_runs=any(launch.site.shared_runs for launch in planned.values())
        )

    def interrupted(self, folder: SweepFolder) -> bool:
        """Never: a pending attempt is one whose `launch.json` was written."""
        return False

    def finish_submission(self, folder: SweepFolder, *, shared_runs: bool) -> None:
        """Start the sweep's queue if none is alive; the caller holds the sweep's submit lock."""
        if self.starts_pending(folder):
            return
        words = [sys.executable, "-P", "-m", "harness.launchers.local.queue", str(folder.path.resolve())]
        with (folder.path / "queue.log").open("ab") as log:
            subprocess.Popen(
                [*words, SHARED_RUNS] if shared_runs else words,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def starts_pending(self, folder: SweepFolder) -> bool:
        """Whether the sweep's queue is alive, so that pending attempts will start."""
        try:
            queue = Attempt(folder.path).read_as(ProcessIdentity, "queue.json")
        except StoredFileError:  # a second queue finds the lock of a living first one, and ends
            return False
        return queue is not None and queue.alive()

    def attempt_states(self, attempts: Sequence[Attempt]) -> dict[Attempt, AttemptState]:
        """States of started attempts whose supervisor is gone or elsewhere; why pending ones wait."""
        reported = {attempt: _reported(attempt) for attempt in attempts}
        found = {attempt: state for attempt, state in reported.items() if state is not None}
        own = (attempt for attempt in attempts if attempt not in found)
        return found | waiting(attempt for attempt in own if not (attempt.path / "begun.json").exists())

    def cancel(self, attempts: Sequence[Attempt], *, checkpoint: bool = False) -> None:
        """Request the end of attempts, pending or running; returns before they have ended."""
        for attempt in attempts:
            request_cancel(attempt, checkpoint=checkpoint)
            if checkpoint and (attempt.path / "begun.json").exists():
                continue  # the supervisor reads the file; a signal would end the ranks before they save
            try:
                supervisor = supervisor_identity(attempt)
            except StoredFileError:  # the supervisor, if there is one, still reads the request
                continue
            if supervisor is not None and not foreign(attempt.path / "supervisor.json", _sweep(attempt)):
                supervisor.terminate()


def _sweep(attempt: Attempt) -> Path:
    return attempt.path.parent.parent


def _reported(attempt: Attempt) -> AttemptState | None:
    started = (attempt.path / "begun.json").exists()
    if not started and (reason := foreign(attempt.path / "launch.json", _sweep(attempt))):
        return AttemptState("PENDING", f"not started without shared_runs in the site profile: {reason}")
    try:
        supervisor = supervisor_identity(attempt)
    except StoredFileError as error:
        if started:
            return AttemptState(None, f"whether it still runs is not known: {error}")
        return AttemptState(None, f"no queue starts it: {error}; cancel it, then retry it")
    return _state_of(supervisor) if started else None


def _state_of(supervisor: ProcessIdentity | None) -> AttemptState | None:
    if supervisor is None or not supervisor.alive():
        return AttemptState("LOST", "its launcher's process is gone and left no outcome")
    if supervisor.host != socket.gethostname():
        return AttemptState(
            None, f"its launcher ran on {supervisor.host}; whether it still does is known only there"
        )
    return None


def site_cpus(site: Site) -> tuple[int, ...]:
    """CPU numbers of this host that the site uses.

    Raises:
        SiteError: the profile has more than this process may use.
    """
    usable = sorted(os.sched_getaffinity(0))
    if site.cpus is not None and site.cpus > len(usable):
        raise SiteError(
            f"site {site.name} has cpus={site.cpus}, this process may use {len(usable)}: lower it, or "
            f"remove it to use them all"
        )
    return tuple(usable[: site.cpus])


def site_gpus(site: Site) -> tuple[int, ...]:
    """GPU numbers of this host that the site uses, of those that CUDA_VISIBLE_DEVICES and the driver show.

    Raises:
        SiteError: the profile has more than there are.
    """
    if site.gpus == 0 or not site.gpus_per_rank:
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = _driver_gpus() if visible is None else _listed(visible)
    if site.gpus is not None and site.gpus > len(shown):
        raise SiteError(f"site {site.name} has gpus={site.gpus}, this host shows {len(shown)}: lower it")
    return shown[: site.gpus]


def _listed(visible: str) -> tuple[int, ...]:
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not all(name.isdigit() for name in names):
        raise SiteError(f"CUDA_VISIBLE_DEVICES={visible} names GPUs by identifier; use numbers, such as 0,1")
    return tuple(int(name) for name in names)


def _driver_gpus() -> tuple[int, ...]:
    import pynvml  # noqa: PLC0415  # only needed on hosts with GPU cells

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()
