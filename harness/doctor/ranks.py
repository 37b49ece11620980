"""Checks of the job and of its ranks together: pure functions of reports, so that tests can try any fault."""

from __future__ import annotations

from collections.abc import Sequence

from harness.doctor.findings import Finding, fault, ok, skipped, warning
from harness.doctor.hosts import (
    check_cpus,
    check_gpus,
    check_locked_memory,
    check_memory,
    check_shared_memory,
    check_software,
    check_versions,
)
from harness.doctor.reports import Report, WorldReport, by_host, by_rank
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site
from harness.study.status import CellStatus

JOB = "ranks: job"

_SKEW_SECONDS = 0.5  # beyond it, records of different hosts cannot be ordered by time
_VISIBLE_SECONDS = 1.0  # a rendezvous through the run folder waits for so long
_SMALL_SECONDS = 0.1  # Ethernet takes 100 microseconds
_LARGE_SECONDS = 1.0  # 4 MiB over 100 Mbit/s Ethernet take 0.4 s

_UNREPORTED = "not all ranks reported"
_UNJOINED = "not all ranks joined"
_ALONE = "a world of one does not communicate"


def check_job(status: CellStatus, reports: Sequence[Report], wait_seconds: float, site: Site) -> Finding:
    """Whether the job completed in time, from the status of its cell after `wait_seconds`."""
    ranks = status.cell.world_size
    if status.state == "COMPLETED":
        nodes = sorted({report.node for report in reports})
        took = f" in {status.elapsed_seconds:.0f} s" if status.elapsed_seconds is not None else ""
        return ok(JOB, f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {', '.join(nodes)} ran{took}")
    if status.state == "PENDING":
        reason = status.cause or "other runs hold this host's CPUs or GPUs"
        found = f"still PENDING after {wait_seconds:g} s, cancelled: {reason}"
        on_slurm = "see JOB REASON CODES in man squeue"
        advice = on_slurm if site.launcher == "slurm" else "wait until kronscale status shows none running"
        return fault(JOB, found, f"{advice}, or use a longer --wait")
    if status.state == "RUNNING":
        joined = sum(report.exchange is not None for report in reports)
        found = f"still RUNNING after {wait_seconds:g} s, cancelled: {joined} of {ranks} ranks were done"
        return fault(JOB, found, "read logs/ in the folder below; a slow start needs a longer --wait")
    advice = "correct that cause; logs/ in the folder below has the output of every rank"
    if "started no rank" in status.cause:
        advice = "correct slurm.mpi, slurm.srun or slurm.setup; see logs/srun.log in the folder below"
    elif "before the attempt started" in status.cause:  # the job ran, but not its supervisor
        advice = "check that the nodes see the runs folder and this Python, and that slurm.setup works there"
    return fault(JOB, f"{status.state}: {status.cause}", advice)


def check_ranks(reports: Sequence[Report], launch: Launch, world_size: int) -> list[Finding]:
    """All checks of the reports: at least one, in rank order; ranks that failed early have none."""
    hosts = [
        check_gpus(reports, launch),
        check_cpus(reports, launch),
        check_memory(reports, launch),
        check_locked_memory(reports),
        check_shared_memory(reports),
        check_versions(reports),
        check_software(reports, launch),
    ]
    if len(reports) < world_size:
        hosts = [one if one.state != "ok" else skipped(one.check, _UNREPORTED) for one in hosts]
    joined = [report for report in reports if report.exchange is not None]
    if len(joined) < world_size:
        return [*(skipped(check, _UNJOINED) for check in _TOGETHER), *hosts]
    return [
        check_sums(joined),
        check_speed(joined),
        check_nccl(joined),
        check_mpi(joined, launch),
        check_clocks(joined),
        check_files(joined),
        *hosts,
    ]


_TOGETHER = (
    "ranks: all-reduce", "ranks: speed", "ranks: NCCL", "ranks: MPI", "ranks: clocks", "ranks: files"
)  # fmt: skip


def check_sums(reports: Sequence[Report]) -> Finding:
    """Whether an all-reduce returns the sum."""
    check, backend = "ranks: all-reduce", _world(reports[0]).backend
    if len(reports) == 1:
        return skipped(check, _ALONE)
    wrong = [f"rank {one.rank}: {error}" for one in reports if (error := _world(one).wrong_sum)]
    if wrong:
        advice = "do not train over it on this site: update its library, or set another backend"
        return fault(check, f"wrong over {backend}, {wrong[0]}", advice)
    joined = max(_world(one).joined_seconds for one in reports)
    return ok(check, f"right over {backend}; the ranks joined in {joined:.1f} s")


def check_speed(reports: Sequence[Report]) -> Finding:
    """Whether communication is as fast as it should be."""
    if len(reports) == 1:
        return skipped("ranks: speed", _ALONE)
    small = max(_world(one).small_seconds for one in reports)
    large = max(_world(one).large_seconds for one in reports)
    found = f"all-reduce of 4 B {_short(small)}, of 4 MiB {_short(large)}{_within_hosts(reports)}"
    if small <= _SMALL_SECONDS and large <= _LARGE_SECONDS:
        return ok("ranks: speed", found)
    if len(by_host(reports)) == 1:
        return warning("ranks: speed", found, "find other processes that use this host: top, nvidia-smi")
    name = "NCCL_SOCKET_IFNAME" if _world(reports[0]).backend == "nccl" else "GLOO_SOCKET_IFNAME"
    advice = f"set the fast network in the site's profile, as environment: {{{name}: ib0}}"
    return warning("ranks: speed", found, advice)


def _within_hosts(reports: Sequence[Report]) -> str:
    """How ranks of one host communicate, if they could read each other's memory."""
    hosts = by_host(reports).values()
    pairs = [(one, two.rank) for ranks in hosts for one in ranks for two in ranks if one is not two]
    if _world(reports[0]).backend != "gloo" or not pairs:
        return ""
    if all(other in _world(one).near for one, other in pairs):
        return "; ranks of one host read each other's memory"
    return (
        "; ranks of one host use Gloo too: the site has single_copy: false, or the kernel or container "
        "refuses it (where kernel.yama.ptrace_scope is 1, set ptrace_any: true)"
    )


def check_nccl(reports: Sequence[Report]) -> Finding:
    """Whether ranks that communicate over NCCL have the same version."""
    first, backend = reports[0], _world(reports[0]).backend
    if backend != "nccl":
        reason = f", and {first.no_nccl}" if first.no_nccl else ""
        return skipped("ranks: NCCL", f"the ranks communicate over {backend}{reason}")
    versions = {one.nccl for one in reports}
    if len(versions) > 1:
        advice = "use one Python environment on all nodes: see slurm.setup"
        return fault("ranks: NCCL", by_rank((one.rank, one.nccl) for one in reports), advice)
    return ok("ranks: NCCL", first.nccl)


def check_mpi(reports: Sequence[Report], launch: Launch) -> Finding:
    """Whether the ranks are one MPI world, if the site configures that."""
    first = _world(reports[0])
    profile = launch.site.slurm
    configured = profile.mpi if profile is not None else "none"
    if not first.no_mpi:
        return ok("ranks: MPI", f"one world, {first.mpi}")
    if configured == "none":
        return skipped("ranks: MPI", first.no_mpi)
    found = f"mpi: {configured}, but {first.no_mpi}; the rendezvous went through the run folder"
    return warning("ranks: MPI", found, "load an MPI library that supports it, or set slurm.mpi: none")


def check_clocks(reports: Sequence[Report]) -> Finding:
    """An upper bound of the difference between hosts' clocks: the readings are not taken at one moment."""
    if len(by_host(reports)) == 1:
        return skipped("ranks: clocks", "one host has one clock")
    rounds = list(zip(*(_world(one).clock_readings for one in reports), strict=True))
    best = min(rounds, key=lambda readings: max(readings) - min(readings))
    skew = max(best) - min(best)
    if skew <= _SKEW_SECONDS:
        return ok("ranks: clocks", f"at most {_short(skew)} apart")
    ahead, behind = (reports[best.index(end(best))].host for end in (max, min))
    advice = "have both clocks set (see chronyc tracking); until then do not compare times of two hosts"
    return warning("ranks: clocks", f"{ahead} is {_short(skew)} ahead of {behind}", advice)


def check_files(reports: Sequence[Report]) -> Finding:
    """How soon a rank sees a file that another rank wrote into the run folder."""
    check = "ranks: files"
    blind = [one for one in reports if _world(one).visible_seconds is None]
    if blind:
        found = f"rank {blind[0].rank} on {blind[0].node} did not see every rank's file within 30 s"
        return fault(check, found, "give --runs a folder on a file system that all nodes share")
    slowest = max(reports, key=lambda one: _world(one).visible_seconds or 0.0)
    seconds = _world(slowest).visible_seconds or 0.0
    found = f"seen by all ranks after {_short(seconds)}"
    if seconds > _VISIBLE_SECONDS:
        advice = "give --runs a folder on a parallel file system, or have this one mounted with actimeo=1"
        return warning(check, f"{found}, last on {slowest.node}", advice)
    return ok(check, found)


def _world(report: Report) -> WorldReport:
    assert report.exchange is not None  # noqa: S101  # see check_ranks
    return report.exchange


def _short(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
