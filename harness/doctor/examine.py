"""The examination: the login node first, then one small job; both job and files are removed at the end."""

from __future__ import annotations

import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from harness.cell import Cell
from harness.doctor.findings import Finding, any_fault, fault, ok, skipped
from harness.doctor.ranks import JOB, Report, check_job, check_ranks
from harness.doctor.storage import check_storage
from harness.errors import SchedulerError, SiteError
from harness.launchers import LAUNCHERS
from harness.launchers.launch import Launch
from harness.launchers.local import site_cpus, site_gpus
from harness.launchers.site_profile import Site
from harness.launchers.slurm import (
    NoAnswerError,
    end_named,
    jobs_of,
    rehearse,
    scheduler_ids,
    slurm,
    unconfirmed,
)
from harness.runs.store import SweepFolder, sweep_folder
from harness.study.cell_states import IN_FLIGHT
from harness.study.status import CellStatus, LauncherReports, read_statuses
from harness.study.submit import cancel, submit

PROBE_COMMAND = (sys.executable, "-P", "-m", "harness.doctor.probe")

_RANKS_A_NODE = 2
_JOB_MINUTES = 10.0  # a short job starts sooner; ranks that are not done by then are stuck
_POLL_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 8.0  # for the exit of a job
_EXIT_SECONDS = 30.0  # from an outcome to the exit of the process that wrote it

# Words in an error message of sbatch, and the fields of the profile that cause it.
_FIELDS_BY_WORDS = (
    ("account", "slurm.account"),  # Slurm's message about a wrong account names the partition too
    ("partition", "slurm.partition"),
    ("qos", "slurm.qos or timeout_minutes"),
    ("time limit", "timeout_minutes"),
    ("feature", "slurm.constraint"),
    ("memory", "slurm.memory_gb_per_node"),
    ("gres", "slurm.gpus_by and gpus_per_rank"),
    ("node configuration", "slurm.ranks_per_node, cpus_per_rank and gpus_per_rank"),
    ("cpu count", "slurm.ranks_per_node and cpus_per_rank"),
)


@dataclass(frozen=True)
class Examination:
    """The result.

    Attributes:
        findings: in the order of the checks.
        reports: of the ranks, in rank order.
        kept: folder of the job's files, if there was a fault.
    """

    findings: tuple[Finding, ...]
    reports: tuple[Report, ...]
    kept: Path | None


def examine(
    site: Site, runs: Path, ranks: int | None, wait_seconds: float, report: Callable[[str], None]
) -> Examination:
    """Check a site from this host and, if there is no fault, from a few of its ranks.

    Args:
        site: to be examined.
        runs: where runs would be stored; its folder `.doctor` is used and removed.
        ranks: how many to start, with a cell's job layout; None for two on each of two nodes, or two on
            this host.
        wait_seconds: for the ranks to start and end.
        report: called with the progress of the job.

    Raises:
        SiteError: the site cannot run so many ranks.
        SchedulerError: Slurm stopped answering, and may still have the job.
    """
    folder = runs.resolve() / ".doctor" / f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}"
    result = None
    with _stoppable():
        try:
            findings = check_storage(folder)
            found, job = _check_from_login(site, folder, ranks)
            findings += found
            if any_fault(findings):
                findings.append(skipped(JOB, "correct the faults above first"))
                return Examination(tuple(findings), (), None)
            found, reports = _check_from_ranks(*job, folder, wait_seconds, report)
            result = Examination((*findings, *found), reports, folder if any_fault(found) else None)
            return result
        finally:
            if result is None or result.kept is None:
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):  # another examination uses it too, or it was never made
                    folder.parent.rmdir()


def _check_from_login(site: Site, folder: Path, ranks: int | None) -> tuple[list[Finding], tuple[Cell, Site]]:
    """Findings, and the cell and the variant of the site for the job."""
    site = site.model_copy(update={"timeout_minutes": max(site.limits_minutes)})  # of a probe's few ranks
    launcher = LAUNCHERS[site.launcher]
    if site.launcher == "local":
        job = probe_cell(ranks or _most_ranks(site)), site
        launcher.check(*job)
        return [check_program(site)], job
    if ranks is None:
        site = _with_ranks_a_node(site, min(_RANKS_A_NODE, slurm(site).ranks_per_node))
    job = probe_cell(ranks or 2 * slurm(site).ranks_per_node), site
    launcher.check(*job)
    return [check_sbatch(launcher.preview(_sweep(job[0], folder), [job[0]], site), site)], job


def _most_ranks(site: Site) -> int:
    fitting = _RANKS_A_NODE if site.oversubscribe else len(site_cpus(site)) // site.cpus_per_rank
    if site.gpus_per_rank:
        fitting = min(fitting, len(site_gpus(site)) // site.gpus_per_rank)
    return max(1, min(fitting, _RANKS_A_NODE))


def check_program(site: Site) -> Finding:
    """Whether this host has the program that ranks are started with: the prefix's, or the site's Python."""
    check, field = "host: program", "launch_prefix" if site.launch_prefix else "python"
    program = site.launch_prefix[0] if site.launch_prefix else site.python or sys.executable
    if shutil.which(program) is None:
        found = f"{field}: {program} is not a program on this host's PATH"
        return fault(check, found, f"correct {field} of site {site.name}, or load its module")
    return ok(check, program)


def check_sbatch(text: str, site: Site) -> Finding:
    """Whether sbatch accepts the batch script of a cell; runs sbatch --test-only."""
    check = "slurm: sbatch"
    try:
        return ok(check, rehearse(text, site).removeprefix("sbatch: "))
    except NoAnswerError as error:
        return fault(check, str(error), "run kronscale on a login node, and try scontrol ping there")
    except SiteError as error:
        of_words = (fields for words, fields in _FIELDS_BY_WORDS if words in str(error).lower())
        fields = next(of_words, "what sbatch names in the profile")
        advice = f"correct {fields} of site {site.name}; kronscale submit --dry-run prints the script"
        return fault(check, str(error), advice)


def _check_from_ranks(
    cell: Cell, site: Site, folder: Path, wait_seconds: float, report: Callable[[str], None]
) -> tuple[list[Finding], tuple[Report, ...]]:
    site = site.model_copy(update={"timeout_minutes": min(*site.limits_minutes, _JOB_MINUTES)})
    try:
        with _ended(cell, folder):
            submit([cell], site, folder, PROBE_COMMAND)
            status = _watch(cell, folder, wait_seconds, report)
    except SiteError as error:
        return [fault(JOB, str(error), "correct that in the site's profile")], ()
    attempt = _sweep(cell, folder).cell_folder(cell).latest()
    launch = Launch.read(attempt) if attempt is not None else None
    if attempt is None or launch is None:
        raise AssertionError(f"{folder}: submitted, but nothing was launched")
    found = [Report.read(attempt, rank) for rank in range(cell.world_size)]
    reports = tuple(one for one in found if one is not None)
    judged = check_ranks(reports, launch, cell.world_size) if reports else []
    return [check_job(status, reports, wait_seconds, site), *judged], reports


def probe_cell(world_size: int) -> Cell:
    """The cell that the launcher runs; the probe does not train it."""
    return Cell.model_validate({
        "sweep": "doctor", "method": "probe", "workload": "digits", "world_size": world_size,
        "target": {"metric": "accuracy", "at_least": 0.0},
        "training": {"local_batch_size": 1, "epochs": 1}, "optimizer": {"lr": 0.1},
    })  # fmt: skip


def _sweep(cell: Cell, folder: Path) -> SweepFolder:
    return sweep_folder(cell.sweep, folder)


def _with_ranks_a_node(site: Site, ranks: int) -> Site:
    """The site with at most `ranks` ranks and a proportional share of memory on each node."""
    profile = slurm(site)
    memory = profile.memory_gb_per_node
    share = memory * ranks / profile.ranks_per_node if memory is not None else None
    reduced = profile.model_copy(update={"ranks_per_node": ranks, "memory_gb_per_node": share})
    return site.model_copy(update={"slurm": reduced})


def _watch(cell: Cell, folder: Path, wait_seconds: float, report: Callable[[str], None]) -> CellStatus:
    ends = time.monotonic() + wait_seconds
    last, reports = "", LauncherReports()
    while True:
        [status] = read_statuses(_sweep(cell, folder), [cell], reports)
        line = f"{cell.world_size} ranks {status.state}" + (f": {status.cause}" if status.cause else "")
        if line != last:
            report(line)
            last = line
        if status.state not in IN_FLIGHT:
            return status
        if time.monotonic() > ends:  # the last answer may be older than Slurm's reason for the wait
            return read_statuses(_sweep(cell, folder), [cell])[0]
        time.sleep(_POLL_SECONDS)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP stop the examination like Ctrl-C does, and its job with it."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _ended(cell: Cell, folder: Path) -> Iterator[None]:
    """Stop the cell's job at the end of the block, also after an exception."""
    try:
        yield
    finally:
        sweep = _sweep(cell, folder)
        try:
            for manifest in unconfirmed(sweep):  # sbatch was interrupted: the job's number is not known
                end_named(manifest.job_name, manifest.launch.user)
            cancel([cell], folder)
            _wait_for_exit(cell, sweep)
        except (NoAnswerError, SchedulerError) as error:
            raise SchedulerError(
                f"Slurm did not answer ({error}); cancel any job called kronscale-doctor-... that "
                f"squeue --me still lists"
            ) from None


def _wait_for_exit(cell: Cell, sweep: SweepFolder) -> None:
    """Wait for the process that wrote the outcome: it writes into the folder until it exits."""
    ends = time.monotonic() + _EXIT_SECONDS
    attempt = sweep.cell_folder(cell).latest()
    launch = Launch.read(attempt) if attempt is not None else None
    if attempt is None or launch is None:
        return
    name = scheduler_ids([attempt]).get(attempt) if launch.launcher == "slurm" else None
    pause = _POLL_SECONDS
    while time.monotonic() < ends:
        if name is not None:
            job = jobs_of([name]).get(name)
            busy = job is not None and job.state in IN_FLIGHT
        else:
            busy = launch.launcher == "local" and LAUNCHERS["local"].starts_pending(sweep)
        if not busy:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
