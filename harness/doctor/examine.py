"""The examination: the login node first, then one small job that leaves nothing behind, even if stopped."""

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
from harness.doctor.cluster import judge_cluster, nodes_to_try, rehearsal
from harness.doctor.findings import Finding, any_fault, fault, skipped
from harness.doctor.here import examine_here, most_ranks
from harness.doctor.judge import JOB, judge_job, judge_ranks
from harness.doctor.reports import Report
from harness.doctor.storage import examine_storage
from harness.errors import SchedulerError, SiteError
from harness.launchers import LAUNCHERS
from harness.launchers.launch import Launch
from harness.launchers.site import Site
from harness.launchers.slurm.cluster_survey import survey
from harness.launchers.slurm.job_layout import slurm
from harness.launchers.slurm.scheduler import NoAnswerError, end_named, jobs_of
from harness.launchers.slurm.scheduler_state import scheduler_ids
from harness.launchers.slurm.submission_manifest import unsettled
from harness.runs.store import SweepFolder, sweep_folder
from harness.study.cell_states import IN_FLIGHT
from harness.study.status import CellStatus, read_statuses
from harness.study.submit import cancel, submit

PROBE_COMMAND = (sys.executable, "-m", "harness.doctor.probe")

_RANKS_A_NODE = 2
_JOB_MINUTES = 10.0  # a short job starts sooner; ranks that are not done by then are stuck
_LOOK_SECONDS = 0.5
_LEAVE_SECONDS = 30.0  # from an outcome to the end of what wrote it


@dataclass(frozen=True)
class Examination:
    """What came out.

    Attributes:
        findings: in the order of the checks.
        reports: what ranks said, in rank order.
        kept: where the job's files are, if there was a fault.
    """

    findings: tuple[Finding, ...]
    reports: tuple[Report, ...]
    kept: Path | None


def examine(
    site: Site, runs: Path, ranks: int | None, wait_seconds: float, say: Callable[[str], None]
) -> Examination:
    """Look at a site from this host, and if all is well here, from a few of its ranks.

    Args:
        site: to be examined.
        runs: where runs would be stored; a folder in it, `.doctor`, is used and removed.
        ranks: how many to start, laid out as a cell's; None for two on each of two nodes, or two here.
        wait_seconds: for the ranks to start and end.
        say: tells how the job is getting on.

    Raises:
        SiteError: so many ranks as asked for cannot run on the site.
        SchedulerError: Slurm fell silent, and may still have the job.
    """
    folder = runs.resolve() / ".doctor" / f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}"
    seen = None
    with _stoppable():
        try:
            findings = examine_storage(folder)
            found, patient = _look_from_login(site, folder, ranks)
            findings += found
            if any_fault(findings) or patient is None:
                findings.append(skipped(JOB, "what is wrong here has to be mended first"))
                return Examination(tuple(findings), (), None)
            found, reports = _look_from_ranks(*patient, folder, wait_seconds, say)
            seen = Examination((*findings, *found), reports, folder if any_fault(found) else None)
            return seen
        finally:
            if seen is None or seen.kept is None:
                _remove(folder)


def _look_from_login(
    site: Site, folder: Path, ranks: int | None
) -> tuple[list[Finding], tuple[Cell, Site] | None]:
    """Findings, and which cell is to run on which variant of the site."""
    if site.launcher == "local":
        found = examine_here(site)
        if any_fault(found):
            return found, None
        patient = probe_cell(ranks or most_ranks(site, _RANKS_A_NODE)), site
        LAUNCHERS[site.launcher].check(*patient)
        return found, patient
    seen = survey()
    found = judge_cluster(site, seen)
    if ranks is not None:
        patient = probe_cell(ranks), site
    else:
        site = _with_ranks_a_node(site, min(_RANKS_A_NODE, slurm(site).ranks_per_node))
        patient = probe_cell(nodes_to_try(site, seen) * slurm(site).ranks_per_node), site
    launcher = LAUNCHERS[site.launcher]
    launcher.check(*patient)
    if "sbatch" in seen.missing:
        return [*found, skipped("slurm: sbatch", "sbatch is not here")], None
    text = launcher.preview(_sweep(patient[0], folder), [patient[0]], site)
    return [*found, rehearsal(text, site)], patient


def _look_from_ranks(
    cell: Cell, site: Site, folder: Path, wait_seconds: float, say: Callable[[str], None]
) -> tuple[list[Finding], tuple[Report, ...]]:
    site = site.model_copy(update={"timeout_minutes": min(site.timeout_minutes, _JOB_MINUTES)})
    try:
        with _ended(cell, folder):
            submit([cell], site, folder, PROBE_COMMAND)
            status = _watch(cell, folder, wait_seconds, say)
    except SiteError as error:
        return [fault(JOB, str(error), "correct what it names in the site's profile")], ()
    attempt = _sweep(cell, folder).cell_folder(cell).latest()
    launch = Launch.read(attempt) if attempt is not None else None
    if attempt is None or launch is None:
        raise AssertionError(f"{folder}: submitted, and nothing was launched")
    found = [Report.read(attempt, rank) for rank in range(cell.world_size)]
    reports = tuple(one for one in found if one is not None)
    judged = judge_ranks(reports, launch, cell.world_size) if reports else []
    return [judge_job(status, reports, wait_seconds, site), *judged], reports


def probe_cell(world_size: int) -> Cell:
    """What the launcher is told to run; the probe trains nothing of it."""
    return Cell.model_validate({
        "sweep": "doctor", "method": "probe", "workload": "digits", "world_size": world_size,
        "target": {"metric": "accuracy", "at_least": 0.0},
        "training": {"local_batch_size": 1, "epochs": 1}, "optimizer": {"lr": 0.1},
    })  # fmt: skip


def _sweep(cell: Cell, folder: Path) -> SweepFolder:
    return sweep_folder(cell.sweep, folder)


def _with_ranks_a_node(site: Site, ranks: int) -> Site:
    """The site with nodes that are cut down to `ranks`, and their memory with them."""
    profile = slurm(site)
    memory = profile.memory_gb_per_node
    share = memory * ranks / profile.ranks_per_node if memory is not None else None
    cut = profile.model_copy(update={"ranks_per_node": ranks, "memory_gb_per_node": share})
    return site.model_copy(update={"slurm": cut})


def _watch(cell: Cell, folder: Path, wait_seconds: float, say: Callable[[str], None]) -> CellStatus:
    ends = time.monotonic() + wait_seconds
    said = ""
    while True:
        [status] = read_statuses(_sweep(cell, folder), [cell])
        words = f"{cell.world_size} ranks {status.state}" + (f": {status.cause}" if status.cause else "")
        if words != said:
            say(words)
            said = words
        if status.state not in IN_FLIGHT or time.monotonic() > ends:
            return status
        time.sleep(_LOOK_SECONDS)


@contextmanager
def _stoppable() -> Iterator[None]:
    """A closed terminal and a kill end the examination as Ctrl-C does: with its job."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ended(cell: Cell, folder: Path) -> Iterator[None]:
    """However the block ends, the cell's job ends with it."""
    try:
        yield
    finally:
        sweep = _sweep(cell, folder)
        try:
            for claim in unsettled(sweep):  # sbatch was interrupted: its job has a name and no number
                end_named(claim.job_name, claim.launch.user)
            cancel([cell], folder)
            _wait_until_left(cell, sweep)
        except (NoAnswerError, SchedulerError) as error:
            raise SchedulerError(
                f"Slurm did not answer ({error}); see to it that no job called kronscale-doctor-... is left: "
                f"squeue --me"
            ) from None


def _wait_until_left(cell: Cell, sweep: SweepFolder) -> None:
    """Wait for what wrote the outcome to end too: it writes into the folder until then."""
    ends = time.monotonic() + _LEAVE_SECONDS
    attempt = sweep.cell_folder(cell).latest()
    launch = Launch.read(attempt) if attempt is not None else None
    if attempt is None or launch is None:
        return
    name = scheduler_ids([attempt]).get(attempt) if launch.launcher == "slurm" else None
    while time.monotonic() < ends:
        if name is not None:
            job = jobs_of([launch.user]).get(name)
            busy = job is not None and job.state in IN_FLIGHT
        else:
            busy = launch.launcher == "local" and LAUNCHERS["local"].works_on(sweep)
        if not busy:
            return
        time.sleep(_LOOK_SECONDS)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # another examination's folder is there too, or nothing could be made
        folder.parent.rmdir()
