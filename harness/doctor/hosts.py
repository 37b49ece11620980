"""What ranks report of their hosts -> findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from harness.doctor.findings import Finding, fault, in_bytes, ok, skipped, warning
from harness.doctor.reports import NOT_KNOWN, Report, by_host, by_rank
from harness.launchers.launch import Launch

_RANK_BYTES = 2 << 30  # torch, its CUDA context and a small model
_SHARED_BYTES = 1 << 30  # what NCCL's guide asks containers for


def judge_gpus(reports: Sequence[Report], launch: Launch) -> Finding:
    """Whether every rank has a GPU of its own and sees those of its host's other ranks."""
    check, on_gpu = "ranks: GPUs", [one for one in reports if one.device_id]
    if not launch.site.gpus_per_rank and on_gpu:
        found = (
            f"rank {on_gpu[0].rank} computes on its CPUs beside {on_gpu[0].device}, as the site asks for none"
        )
        return warning(check, found, "set gpus_per_rank: 1 to compute on it")
    if not launch.site.gpus_per_rank:
        return skipped(check, "the site gives ranks none")
    wrongs = (_wrong_gpus(host, ranks) for host, ranks in by_host(reports).items())
    if wrong := next(filter(None, wrongs), None):
        return fault(check, *wrong)
    kinds = sorted({f"{one.device}, driver {one.driver or 'not known'}" for one in reports})
    if len(kinds) > 1:
        advice = "set slurm.constraint to one kind of node: the slowest GPU sets everyone's pace"
        return warning(check, "; ".join(kinds), advice)
    return ok(check, f"one a rank, each sees all of its host's: {kinds[0]}")


def _wrong_gpus(host: str, ranks: Sequence[Report]) -> tuple[str, str] | None:
    for one in ranks:
        if not one.device_id:
            why = f"its driver is {one.driver}" if one.driver else "no driver answers there"
            found = f"rank {one.rank} on {one.node} sees no GPU; {why}"
            mend = "install a torch build for its CUDA" if one.driver else "look with nvidia-smi"
            return found, f"{mend} on that node, and check gpus_per_rank and slurm.gpus_by"
        if len(one.gpus) < len(ranks):
            found = (
                f"rank {one.rank} on {host} sees {len(one.gpus)} of the {len(ranks)} GPUs of its host's ranks"
            )
            advice = "take --gpus-per-task and --gpu-bind out of slurm.srun and slurm.sbatch"
            return found, f"{advice}: NCCL needs to see them all"
    [(device, count)] = Counter(one.device_id for one in ranks).most_common(1)
    if count > 1:
        sharing = ", ".join(str(one.rank) for one in ranks if one.device_id == device)
        return f"ranks {sharing} on {host} share a GPU", "set slurm.ranks_per_node to the GPUs of a node"
    return None


def judge_cpus(reports: Sequence[Report], launch: Launch) -> Finding:
    """Whether each rank has CPUs of its own, and as many as it has threads."""
    check, wanted = "ranks: CPUs", launch.cpus_per_rank
    for one in reports:
        if len(one.cpus) < wanted:
            found = f"rank {one.rank} on {one.node} may use {len(one.cpus)} CPUs, the site says {wanted}"
            advice = "lower cpus_per_rank, or correct --cpu-bind and --hint in slurm.srun and slurm.sbatch"
            return fault(check, found, advice)
        if one.threads > len(one.cpus):
            found = f"rank {one.rank} has {one.threads} threads on {len(one.cpus)} CPUs"
            return warning(check, found, "take OMP_NUM_THREADS out of the site's environment")
    if launch.oversubscribed:
        found = f"{len(reports)} ranks share {len(launch.cpus)} CPUs, as the site allows"
        return warning(check, found, "read no seconds from cells with as many ranks as this: use fewer ranks")
    sharing = [
        (first, second)
        for ranks in by_host(reports).values()
        for first, second in pairwise(ranks)
        if set(first.cpus) & set(second.cpus)
    ]
    if sharing:
        first, second = sharing[0]
        found = (
            f"ranks {first.rank} and {second.rank} on {first.host} may use the same CPUs: they are not bound"
        )
        return warning(
            check, found, "add --cpu-bind=cores to slurm.srun: ranks that move between CPUs are slower"
        )
    return ok(check, f"{wanted} a rank, bound, {reports[0].threads} threads")


def judge_memory(reports: Sequence[Report], launch: Launch) -> Finding:
    """Whether the ranks of a host have room."""
    check = "ranks: memory"
    for one in reports:
        if one.address_space_bytes is not None:
            found = f"rank {one.rank}: address space limited to {in_bytes(one.address_space_bytes)}"
            advice = "put ulimit -v unlimited into slurm.setup: CUDA reserves more than it uses"
            return (fault if one.device_id else warning)(check, found, advice)
    limits = [(one, one.memory_limit_bytes) for one in reports if one.memory_limit_bytes is not None]
    if not limits:
        return ok(check, "no limit but the hosts' own")
    least, limit = min(limits, key=lambda pair: pair[1])
    sharing = len(by_host(reports)[least.host])
    found = f"{in_bytes(limit)} for {sharing} ranks on {least.node}"
    if limit < sharing * _RANK_BYTES:
        where = "slurm.memory_gb_per_node" if launch.launcher == "slurm" else "this host's control group"
        advice = f"raise the limit by {where} to at least {in_bytes(sharing * _RANK_BYTES)}"
        return warning(check, found, advice)
    return ok(check, found)


def judge_locked_memory(reports: Sequence[Report]) -> Finding:
    """Whether InfiniBand may pin its buffers; hosts that talk to nobody need not."""
    check = "ranks: locked memory"
    if len(by_host(reports)) == 1:
        return skipped(check, "one host needs no network")
    limits = [one.locked_memory_bytes for one in reports if one.locked_memory_bytes is not None]
    if not limits:
        return ok(check, "unlimited")
    advice = (
        "where the network is InfiniBand, have memlock unlimited on the nodes (PropagateResourceLimitsExcept"
        "=MEMLOCK in slurm.conf), or put ulimit -l unlimited into slurm.setup"
    )
    return warning(check, f"limited to {in_bytes(min(limits))}", advice)


def judge_shared_memory(reports: Sequence[Report]) -> Finding:
    """Whether /dev/shm, through which ranks of a host talk, has room."""
    least = min(reports, key=lambda one: one.shared_memory_bytes)
    found = f"{in_bytes(least.shared_memory_bytes)} free in /dev/shm on {least.node}"
    if least.shared_memory_bytes < _SHARED_BYTES:
        advice = f"clear /dev/shm, or give containers more (--shm-size={in_bytes(_SHARED_BYTES)})"
        return warning("ranks: shared memory", found, advice.replace(" GiB", "g"))
    return ok("ranks: shared memory", found)


def judge_versions(reports: Sequence[Report]) -> Finding:
    """Whether all ranks run the same code."""
    check = "ranks: versions"
    said = []
    for name in reports[0].versions:
        told = [
            (one.rank, version)
            for one in reports
            if (version := one.versions.get(name, "missing")) != NOT_KNOWN
        ]
        if len({version for _, version in told}) > 1:
            found = by_rank((rank, f"{name} {version}") for rank, version in told)
            return fault(
                check, found, "use one Python environment on all nodes, on a shared file system: slurm.setup"
            )
        said.append(f"{name} {told[0][1] if told else NOT_KNOWN}")
    return ok(check, f"the same on all ranks: {', '.join(said)}")
