"""Checks of the hosts, from the reports of their ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from itertools import chain, pairwise

from harness.doctor.findings import Finding, fault, in_bytes, ok, skipped, warning
from harness.doctor.reports import NOT_KNOWN, Report, by_host, by_rank
from harness.launchers.launch import Launch

_RANK_BYTES = 2 << 30  # torch, its CUDA context and a small model
_SHARED_BYTES = 1 << 30  # NCCL's guide requires it for containers


def check_gpus(reports: Sequence[Report], launch: Launch) -> Finding:
    """Whether every rank has a GPU of its own and sees those of the other ranks on its host."""
    check, on_gpu = "ranks: GPUs", [one for one in reports if one.device_id]
    if not launch.site.gpus_per_rank and on_gpu:
        found = (
            f"rank {on_gpu[0].rank} computes on its CPUs beside {on_gpu[0].device}, as the site requests none"
        )
        return warning(check, found, "set gpus_per_rank: 1 to compute on it")
    if not launch.site.gpus_per_rank:
        return skipped(check, "the site assigns none to its ranks")
    problems = (_gpu_problem(host, ranks) for host, ranks in by_host(reports).items())
    if problem := next(filter(None, problems), None):
        return fault(check, *problem)
    kinds = sorted({f"{one.device}, driver {one.driver or 'not known'}" for one in reports})
    if len(kinds) > 1:
        advice = "set slurm.constraint to one kind of node: all ranks wait for the slowest GPU"
        return warning(check, "; ".join(kinds), advice)
    return ok(check, f"one per rank, each rank sees all GPUs of its host's ranks: {kinds[0]}")


def _gpu_problem(host: str, ranks: Sequence[Report]) -> tuple[str, str] | None:
    for one in ranks:
        if not one.device_id:
            reason = f"its driver is {one.driver}" if one.driver else "no driver answers there"
            found = f"rank {one.rank} on {one.node} sees no GPU; {reason}"
            action = "install a torch build for its CUDA" if one.driver else "run nvidia-smi"
            return found, f"{action} on that node, and check gpus_per_rank and slurm.gpus_by"
        if len(one.gpus) < len(ranks):
            found = (
                f"rank {one.rank} on {host} sees {len(one.gpus)} of the {len(ranks)} GPUs of its host's ranks"
            )
            advice = "remove --gpus-per-task and --gpu-bind from slurm.srun and slurm.sbatch"
            return found, f"{advice}: NCCL must see all of them"
    [(device, count)] = Counter(one.device_id for one in ranks).most_common(1)
    if count > 1:
        sharing = ", ".join(str(one.rank) for one in ranks if one.device_id == device)
        return f"ranks {sharing} on {host} share a GPU", "set slurm.ranks_per_node to the GPUs of a node"
    return None


def check_cpus(reports: Sequence[Report], launch: Launch) -> Finding:
    """Whether each rank has CPUs of its own, at least one per thread."""
    check, wanted = "ranks: CPUs", launch.cpus_per_rank
    for one in reports:
        if len(one.cpus) < wanted:
            found = f"rank {one.rank} on {one.node} may use {len(one.cpus)} CPUs, the site requests {wanted}"
            advice = "lower cpus_per_rank, or correct --cpu-bind and --hint in slurm.srun and slurm.sbatch"
            return fault(check, found, advice)
        if one.threads > len(one.cpus):
            found = f"rank {one.rank} has {one.threads} threads on {len(one.cpus)} CPUs"
            return warning(check, found, "remove OMP_NUM_THREADS from the site's environment")
    if launch.oversubscribed:
        found = f"{len(reports)} ranks share {len(launch.cpus)} CPUs, as the site allows"
        return warning(check, found, "use fewer ranks: times of cells with so many ranks are not valid")
    neighbours = chain.from_iterable(pairwise(ranks) for ranks in by_host(reports).values())
    for one, two in neighbours:
        if set(one.cpus) & set(two.cpus):
            found = f"ranks {one.rank} and {two.rank} on {one.host} may use the same CPUs: they are not bound"
            advice = "add --cpu-bind=cores to slurm.srun: ranks that move between CPUs are slower"
            return warning(check, found, advice)
    return ok(check, f"{wanted} per rank, bound, {reports[0].threads} threads")


def check_memory(reports: Sequence[Report], launch: Launch) -> Finding:
    """Whether the ranks of a host have enough memory."""
    check = "ranks: memory"
    for one in reports:
        if one.address_space_bytes is not None:
            found = f"rank {one.rank}: address space limited to {in_bytes(one.address_space_bytes)}"
            advice = "add ulimit -v unlimited to slurm.setup: CUDA reserves more than it uses"
            return (fault if one.device_id else warning)(check, found, advice)
    limits = [(one, one.memory_limit_bytes) for one in reports if one.memory_limit_bytes is not None]
    if not limits:
        return ok(check, "no limit except that of the hosts")
    least, limit = min(limits, key=lambda pair: pair[1])
    sharing = len(by_host(reports)[least.host])
    found = f"{in_bytes(limit)} for {sharing} ranks on {least.node}"
    if limit < sharing * _RANK_BYTES:
        where = "slurm.memory_gb_per_node" if launch.launcher == "slurm" else "this host's control group"
        advice = f"raise the limit in {where} to at least {in_bytes(sharing * _RANK_BYTES)}"
        return warning(check, found, advice)
    return ok(check, found)


def check_locked_memory(reports: Sequence[Report]) -> Finding:
    """Whether InfiniBand may pin its buffers; a single host does not use it."""
    check = "ranks: locked memory"
    if len(by_host(reports)) == 1:
        return skipped(check, "one host needs no network")
    limits = [one.locked_memory_bytes for one in reports if one.locked_memory_bytes is not None]
    if not limits:
        return ok(check, "unlimited")
    advice = (
        "for InfiniBand, set memlock to unlimited on the nodes (PropagateResourceLimitsExcept=MEMLOCK in "
        "slurm.conf), or add ulimit -l unlimited to slurm.setup"
    )
    return warning(check, f"limited to {in_bytes(min(limits))}", advice)


def check_shared_memory(reports: Sequence[Report]) -> Finding:
    """Whether /dev/shm, through which ranks of a host communicate, has enough space."""
    least = min(reports, key=lambda one: one.shared_memory_bytes)
    found = f"{in_bytes(least.shared_memory_bytes)} free in /dev/shm on {least.node}"
    if least.shared_memory_bytes < _SHARED_BYTES:
        advice = f"clear /dev/shm, or give containers more (--shm-size={in_bytes(_SHARED_BYTES)})"
        return warning("ranks: shared memory", found, advice.replace(" GiB", "g"))
    return ok("ranks: shared memory", found)


def check_software(reports: Sequence[Report], launch: Launch) -> Finding:
    """Which Python, torch and data the ranks have, behind the site's prefix if there is one."""
    check, first = "ranks: software", reports[0]
    blind = [one for one in reports if one.data and not one.data_seen]
    behind = f" behind {launch.site.launch_prefix[0]}" if launch.site.launch_prefix else ""
    if blind:
        found = f"rank {blind[0].rank} on {blind[0].node} does not see KRONSCALE_DATA={blind[0].data}{behind}"
        return fault(check, found, "mount it there, in launch_prefix, or correct the site's environment")
    data = f"KRONSCALE_DATA={first.data}" if first.data else "KRONSCALE_DATA is not set"
    found = f"{first.python}{behind}, torch with {', '.join(first.backends)}; code in {first.code}; {data}"
    submits = _version()
    if (runs := first.versions.get("kronscale", submits)) != submits:
        advice = "install the same version in both: they read each other's files"
        return warning(check, f"ranks have kronscale {runs}, this command is of {submits}; {found}", advice)
    return ok(check, found)


def _version() -> str:
    """Of Kronscale here; "not installed" where it is only importable."""
    try:
        return metadata.version("kronscale")
    except metadata.PackageNotFoundError:
        return "not installed"


def check_versions(reports: Sequence[Report]) -> Finding:
    """Whether all ranks run the same code."""
    check = "ranks: versions"
    same = []
    for name in reports[0].versions:
        versions = ((one.rank, one.versions.get(name, "missing")) for one in reports)
        known = [(rank, version) for rank, version in versions if version != NOT_KNOWN]
        if len({version for _, version in known}) > 1:
            found = by_rank((rank, f"{name} {version}") for rank, version in known)
            return fault(
                check, found, "use one Python environment on all nodes, on a shared file system: slurm.setup"
            )
        same.append(f"{name} {known[0][1] if known else NOT_KNOWN}")
    return ok(check, f"the same on all ranks: {', '.join(same)}")
