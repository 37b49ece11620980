"""What the ranks of the examination's job report, and the checks of it: pure functions of the reports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Self

from pydantic import TypeAdapter

from harness.doctor.findings import Finding, fault, ok, skipped, warning
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site
from harness.runs.store import Attempt
from harness.study.status import CellStatus

JOB = "ranks: job"


@dataclass(frozen=True)
class Report:
    """The report of one rank.

    Attributes:
        node: the scheduler's name of the host.
        versions: of Python, torch, kronscale, and the commit unless git was too slow.
        device_id: unique id of the GPU that the rank computes on; empty without one.
        gpus: names of the visible GPUs.
        cpus: CPUs that the rank may run on.
        data: KRONSCALE_DATA, empty if not set.
        data_seen: whether the rank sees that folder.
        backend: carries the traffic, in words; None if the rank did not join the others.
        sum_error: by how much an all-reduce was wrong; empty if it was right.
        all_reduce_seconds: of 4 MiB, median.
    """

    rank: int
    node: str
    python: str
    versions: Mapping[str, str]
    device_id: str
    gpus: tuple[str, ...]
    cpus: tuple[int, ...]
    data: str = ""
    data_seen: bool = False
    backend: str | None = None
    sum_error: str = ""
    all_reduce_seconds: float = 0.0

    def write(self, attempt: Attempt) -> None:
        """Write the report into the attempt's folder; replaces an earlier one of this rank."""
        attempt.write(f"report-{self.rank:05}.json", asdict(self))

    @classmethod
    def read(cls, attempt: Attempt, rank: int) -> Self | None:
        """The rank's report, or None if it wrote none."""
        raw = attempt.read(f"report-{rank:05}.json")
        return None if raw is None else TypeAdapter(cls).validate_python(raw)


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
        joined = sum(report.backend is not None for report in reports)
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
    checks = (check_sums, check_gpus, check_cpus, check_software, check_data)
    findings = [check(reports, launch) for check in checks]
    if len(reports) < world_size:  # a fault of those that reported is one; nothing is known of the others
        reason = "not all ranks reported"
        return [skipped(one.check, reason) if one.state == "ok" else one for one in findings]
    return findings


def check_sums(reports: Sequence[Report], _launch: Launch) -> Finding:
    """Whether an all-reduce returns the sum."""
    check, joined = "ranks: all-reduce", [one for one in reports if one.backend is not None]
    if len(joined) < len(reports):
        return skipped(check, "not all ranks joined")
    if wrong := [one for one in joined if one.sum_error]:
        found = f"wrong over {wrong[0].backend}, rank {wrong[0].rank}: {wrong[0].sum_error}"
        return fault(check, found, "do not train on this site: update the library, or set another backend")
    slowest = max(one.all_reduce_seconds for one in joined)
    return ok(check, f"right over {joined[0].backend}; 4 MiB take {1e3 * slowest:.3g} ms")


def check_gpus(reports: Sequence[Report], launch: Launch) -> Finding:
    """Whether every rank has a GPU of its own and sees those of the other ranks on its host."""
    check, on_gpu = "ranks: GPUs", [one for one in reports if one.device_id]
    if not launch.site.gpus_per_rank:
        if not on_gpu:
            return skipped(check, "the site assigns none to its ranks")
        found = f"rank {on_gpu[0].rank} computes on its CPUs beside {on_gpu[0].gpus[0]}, as the site says"
        return warning(check, found, "set gpus_per_rank: 1 to compute on it")
    if problem := next(_gpu_problems(reports), None):
        return fault(check, *problem)
    kinds = sorted({one.gpus[0] for one in reports})
    if len(kinds) > 1:
        advice = "set slurm.constraint to one kind of node: all ranks wait for the slowest GPU"
        return warning(check, ", ".join(kinds), advice)
    return ok(check, f"one per rank, each rank sees all GPUs of its host's ranks: {kinds[0]}")


def _gpu_problems(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    for node, ranks in _by_node(reports).items():
        for one in ranks:
            if not one.device_id:
                found = f"rank {one.rank} on {node} sees no GPU"
                advice = "run nvidia-smi there, install a torch build for its CUDA, and check gpus_per_rank"
                yield found, f"{advice} and slurm.gpus_by"
            if len(one.gpus) < len(ranks):
                found = f"rank {one.rank} on {node} sees {len(one.gpus)} of its host's {len(ranks)} GPUs"
                advice = "remove --gpus-per-task and --gpu-bind from slurm.srun and slurm.sbatch"
                yield found, f"{advice}: NCCL must see all of them"
        [(device, count)] = Counter(one.device_id for one in ranks).most_common(1)
        if count > 1:
            sharing = ", ".join(str(one.rank) for one in ranks if one.device_id == device)
            yield f"ranks {sharing} on {node} share a GPU", "set slurm.ranks_per_node to the GPUs of a node"


def check_cpus(reports: Sequence[Report], launch: Launch) -> Finding:
    """Whether each rank has CPUs of its own."""
    check, wanted = "ranks: CPUs", launch.cpus_per_rank
    for one in reports:
        if len(one.cpus) < wanted:
            found = f"rank {one.rank} on {one.node} may use {len(one.cpus)} CPUs, the site requests {wanted}"
            advice = "lower cpus_per_rank, or correct --cpu-bind and --hint in slurm.srun and slurm.sbatch"
            return fault(check, found, advice)
    if launch.oversubscribed:
        found = f"{len(reports)} ranks share {len(launch.cpus)} CPUs, as the site allows"
        return warning(check, found, "use fewer ranks: times of cells with so many ranks are not valid")
    for ranks in _by_node(reports).values():
        for one, two in combinations(ranks, 2):
            if set(one.cpus) & set(two.cpus):
                found = f"ranks {one.rank} and {two.rank} on {one.node} may use the same CPUs: not bound"
                return warning(check, found, "add --cpu-bind=cores to slurm.srun: unbound ranks are slower")
    return ok(check, f"{wanted} per rank, bound")


def check_software(reports: Sequence[Report], _launch: Launch) -> Finding:
    """Whether all ranks run the same code."""
    check, first = "ranks: software", reports[0]
    for name in first.versions:
        known = {one.rank: one.versions[name] for one in reports if name in one.versions}
        if len(set(known.values())) > 1:
            found = "; ".join(f"{name} {version} on rank {rank}" for rank, version in known.items())
            advice = "use one Python environment on all nodes, on a shared file system: slurm.setup"
            return fault(check, found, advice)
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    return ok(check, f"the same on all ranks: {first.python}, {versions}")


def check_data(reports: Sequence[Report], launch: Launch) -> Finding:
    """Whether all ranks see the data, behind the site's prefix if there is one."""
    check, first = "ranks: data", reports[0]
    behind = f" behind {launch.site.launch_prefix[0]}" if launch.site.launch_prefix else ""
    if not first.data:
        return ok(check, f"KRONSCALE_DATA is not set{behind}: the embedded data are there")
    if blind := [one for one in reports if not one.data_seen]:
        found = f"rank {blind[0].rank} on {blind[0].node} does not see KRONSCALE_DATA={first.data}{behind}"
        return fault(check, found, "mount it there, in launch_prefix, or correct the site's environment")
    return ok(check, f"KRONSCALE_DATA={first.data}{behind}")


def _by_node(reports: Iterable[Report]) -> dict[str, list[Report]]:
    ranks: dict[str, list[Report]] = defaultdict(list)
    for one in reports:
        ranks[one.node].append(one)
    return ranks
