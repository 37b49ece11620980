"""What ranks report -> findings: pure, so that every fault can be tried without having it."""

from __future__ import annotations

from collections.abc import Sequence

from harness.doctor.findings import Finding, fault, ok, skipped, warning
from harness.doctor.hosts import (
    judge_cpus,
    judge_gpus,
    judge_locked_memory,
    judge_memory,
    judge_shared_memory,
    judge_versions,
)
from harness.doctor.reports import Exchange, Report, by_host, by_rank
from harness.launchers.launch import Launch
from harness.launchers.site import Site
from harness.study.status import CellStatus

JOB = "ranks: job"

_SKEW_SECONDS = 0.5  # beyond it, what different hosts wrote down cannot be put in order
_VISIBLE_SECONDS = 1.0  # a rendezvous through the run folder waits as long
_SMALL_SECONDS = 0.1  # Ethernet takes 100 microseconds
_LARGE_SECONDS = 1.0  # 4 MiB over 100 Mbit/s Ethernet take 0.4 s

_UNREPORTED = "not all ranks reported"
_UNJOINED = "not all ranks joined"
_ALONE = "a world of one talks to nobody"


def judge_job(status: CellStatus, reports: Sequence[Report], wait_seconds: float, site: Site) -> Finding:
    """Whether the job ran to its end in time.

    Args:
        status: of its cell when the wait was over.
        reports: that ranks left.
        wait_seconds: how long was waited.
        site: where.
    """
    ranks = status.cell.world_size
    if status.state == "COMPLETED":
        nodes = sorted({report.node for report in reports})
        took = f" in {status.elapsed_seconds:.0f} s" if status.elapsed_seconds is not None else ""
        return ok(JOB, f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {', '.join(nodes)} ran{took}")
    if status.state == "PENDING":
        why = status.cause or "other runs hold this host's CPUs or GPUs"
        found = f"still PENDING after {wait_seconds:g} s, cancelled: {why}"
        elsewhere = "look the reason up under JOB REASON CODES in man squeue"
        advice = elsewhere if site.launcher == "slurm" else "wait until kronscale status shows none running"
        return fault(JOB, found, f"{advice}, or give a longer --wait")
    if status.state == "RUNNING":
        joined = sum(report.exchange is not None for report in reports)
        found = f"still RUNNING after {wait_seconds:g} s, cancelled: {joined} of {ranks} ranks were through"
        return fault(JOB, found, "read logs/ in the folder below; a slow start needs a longer --wait")
    advice = "mend the cause that is named; logs/ in the folder below has every rank's words"
    if "started no rank" in status.cause:
        advice = "correct slurm.mpi, slurm.srun or slurm.setup; logs/srun.log in the folder below says more"
    elif "before its turn" in status.cause:  # the job ran, but not its supervisor
        advice = "see that the nodes see the runs folder and this Python, and that slurm.setup works there"
    return fault(JOB, f"{status.state}: {status.cause}", advice)


def judge_ranks(reports: Sequence[Report], launch: Launch, world_size: int) -> list[Finding]:
    """All that the ranks say.

    Args:
        reports: of those that left one, at least one, in rank order.
        launch: how they were launched.
        world_size: how many there should be.
    """
    hosts = [
        judge_gpus(reports, launch),
        judge_cpus(reports, launch),
        judge_memory(reports, launch),
        judge_locked_memory(reports),
        judge_shared_memory(reports),
        judge_versions(reports),
    ]
    if len(reports) < world_size:
        hosts = [one if one.state != "ok" else skipped(one.check, _UNREPORTED) for one in hosts]
    joined = [report for report in reports if report.exchange is not None]
    if len(joined) < world_size:
        return [*(skipped(check, _UNJOINED) for check in _TOGETHER), *hosts]
    return [
        judge_sums(joined),
        judge_speed(joined),
        judge_nccl(joined),
        judge_mpi(joined, launch),
        judge_clocks(joined),
        judge_files(joined),
        *hosts,
    ]


_TOGETHER = (
    "ranks: all-reduce", "ranks: speed", "ranks: NCCL", "ranks: MPI", "ranks: clocks", "ranks: files"
)  # fmt: skip


def judge_sums(reports: Sequence[Report]) -> Finding:
    """Whether an all-reduce gives the sum."""
    check, backend = "ranks: all-reduce", _exchange(reports[0]).backend
    if len(reports) == 1:
        return skipped(check, _ALONE)
    wrong = [f"rank {one.rank}: {said}" for one in reports if (said := _exchange(one).wrong_sum)]
    if wrong:
        advice = "do not train over it here: bring its library up to date, or set another backend"
        return fault(check, f"wrong over {backend}, {wrong[0]}", advice)
    joined = max(_exchange(one).joined_seconds for one in reports)
    return ok(check, f"right over {backend}; the ranks found each other in {joined:.1f} s")


def judge_speed(reports: Sequence[Report]) -> Finding:
    """Whether the network is the fast one."""
    if len(reports) == 1:
        return skipped("ranks: speed", _ALONE)
    small = max(_exchange(one).small_seconds for one in reports)
    large = max(_exchange(one).large_seconds for one in reports)
    found = f"all-reduce of 4 B {_short(small)}, of 4 MiB {_short(large)}{_inside_of_hosts(reports)}"
    if small <= _SMALL_SECONDS and large <= _LARGE_SECONDS:
        return ok("ranks: speed", found)
    if len(by_host(reports)) == 1:
        return warning("ranks: speed", found, "see who else computes on this host: top, nvidia-smi")
    name = "NCCL_SOCKET_IFNAME" if _exchange(reports[0]).backend == "nccl" else "GLOO_SOCKET_IFNAME"
    advice = f"name the fast network in the site's profile, as environment: {{{name}: ib0}}"
    return warning("ranks: speed", found, advice)


def _inside_of_hosts(reports: Sequence[Report]) -> str:
    """How ranks of one host exchange, where they could read each other's memory."""
    mates = [(one, other.rank) for ranks in by_host(reports).values() for one in ranks for other in ranks]
    pairs = [(one, other) for one, other in mates if one.rank != other]
    if _exchange(reports[0]).backend != "gloo" or not pairs:
        return ""
    if all(other in _exchange(one).near for one, other in pairs):
        return "; ranks of one host read each other's memory"
    return "; over Gloo also inside of a host: kernel, container or KFAC_SINGLE_COPY forbids to read memory"


def judge_nccl(reports: Sequence[Report]) -> Finding:
    """Whether ranks that talk over NCCL have the same one."""
    first, backend = reports[0], _exchange(reports[0]).backend
    if backend != "nccl":
        why = f", and {first.no_nccl}" if first.no_nccl else ""
        return skipped("ranks: NCCL", f"the ranks talk over {backend}{why}")
    versions = {one.nccl for one in reports}
    if len(versions) > 1:
        advice = "use one Python environment on all nodes: see slurm.setup"
        return fault("ranks: NCCL", by_rank((one.rank, one.nccl) for one in reports), advice)
    return ok("ranks: NCCL", first.nccl)


def judge_mpi(reports: Sequence[Report], launch: Launch) -> Finding:
    """Whether the ranks are one MPI world, where the site makes them one."""
    first = _exchange(reports[0])
    profile = launch.site.slurm
    asked = profile.mpi if profile is not None else "none"
    if not first.no_mpi:
        return ok("ranks: MPI", f"one world, {first.mpi}")
    if asked == "none":
        return skipped("ranks: MPI", first.no_mpi)
    found = f"mpi: {asked}, but {first.no_mpi}; the ranks met through the run folder"
    return warning("ranks: MPI", found, "load an MPI library that understands it, or set slurm.mpi: none")


def judge_clocks(reports: Sequence[Report]) -> Finding:
    """How far hosts' clocks are apart, at most: the readings are not quite of one moment."""
    if len(by_host(reports)) == 1:
        return skipped("ranks: clocks", "one host has one clock")
    rounds = list(zip(*(_exchange(one).clock_readings for one in reports), strict=True))
    best = min(rounds, key=lambda readings: max(readings) - min(readings))
    skew = max(best) - min(best)
    if skew <= _SKEW_SECONDS:
        return ok("ranks: clocks", f"at most {_short(skew)} apart")
    ahead, behind = (reports[best.index(end(best))].host for end in (max, min))
    advice = "have both clocks set (see chronyc tracking); till then compare no times of two hosts"
    return warning("ranks: clocks", f"{ahead} is {_short(skew)} ahead of {behind}", advice)


def judge_files(reports: Sequence[Report]) -> Finding:
    """How soon a rank sees what another wrote into the run folder."""
    check = "ranks: files"
    blind = [one for one in reports if _exchange(one).visible_seconds is None]
    if blind:
        found = f"rank {blind[0].rank} on {blind[0].node} did not see every rank's file within 30 s"
        return fault(check, found, "give --runs a folder on a file system that all nodes share")
    slowest = max(reports, key=lambda one: _exchange(one).visible_seconds or 0.0)
    seconds = _exchange(slowest).visible_seconds or 0.0
    found = f"seen by all ranks after {_short(seconds)}"
    if seconds > _VISIBLE_SECONDS:
        advice = "give --runs a folder on a parallel file system, or have this one mounted with actimeo=1"
        return warning(check, f"{found}, last on {slowest.node}", advice)
    return ok(check, found)


def _exchange(report: Report) -> Exchange:
    assert report.exchange is not None  # noqa: S101  # see judge_ranks
    return report.exchange


def _short(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
