"""Compares a cluster's Slurm, as its commands report it, with a site's profile."""

from __future__ import annotations

from harness.doctor.findings import Finding, fault, ok, skipped, warning
from harness.errors import SiteError
from harness.launchers.site_profile import Site
from harness.launchers.slurm import START_MINUTES, NoAnswerError, Partition, Survey, rehearse, slurm

_NO_MPI = "none"

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


def check_cluster(site: Site, seen: Survey) -> list[Finding]:
    """All checks that need no job."""
    return [
        check_commands(seen),
        check_controller(seen),
        check_accounting(seen),
        check_partition(site, seen),
        check_mpi(site, seen),
        check_arrays(site, seen),
    ]


def check_commands(seen: Survey) -> Finding:
    """Whether Slurm's commands are on this host."""
    if seen.missing:
        found = f"not on this host's PATH: {', '.join(seen.missing)}"
        return fault("slurm: commands", found, "run kronscale on a login node, or load the module of Slurm")
    return ok("slurm: commands", "all on this host's PATH")


def check_controller(seen: Survey) -> Finding:
    """Whether the controller answers."""
    if "controller" in seen.errors:
        advice = "run scontrol ping; if it still fails, ask the cluster's administrators"
        return fault("slurm: controller", seen.errors["controller"], advice)
    name, version = (seen.settings.get(field, "?") for field in ("ClusterName", "SLURM_VERSION"))
    return ok("slurm: controller", f"Slurm {version}, cluster {name}")


def check_accounting(seen: Survey) -> Finding:
    """Whether accounting answers; it has jobs that the controller no longer has."""
    if "accounting" in seen.errors:
        advice = (
            "run kronscale status within minutes of a job's end, while the controller still has the job: the "
            "reason why Slurm ended a job without an outcome is lost later"
        )
        return warning("slurm: accounting", seen.errors["accounting"], advice)
    return ok("slurm: accounting", "answers")


def check_partition(site: Site, seen: Survey) -> Finding:
    """Whether the site's partitions exist, are up, and allow jobs of the site's length."""
    check, named = "slurm: partition", slurm(site).partition
    if "partitions" in seen.errors:
        return skipped(check, seen.errors["partitions"])
    known = {one.name: one for one in seen.partitions}
    wanted = named.split(",") if named else [one.name for one in seen.partitions if one.default]
    if not wanted:
        return skipped(check, "the site sets none and the cluster has no default; see slurm: sbatch")
    if missing := [name for name in wanted if name not in known]:
        found = f"there is no partition {', '.join(missing)}; there are {', '.join(known) or 'none'}"
        return fault(check, found, f"set slurm.partition of site {site.name} to one of these")
    chosen = [known[name] for name in wanted]
    problems = [problem for one in chosen if (problem := _problem(one, site)) is not None]
    if len(problems) == len(chosen):  # of several, Slurm takes the one that starts first
        return fault(check, *problems[0])
    nodes = ", ".join(f"{one.name}: {one.usable_nodes} of {one.nodes} nodes usable" for one in chosen)
    return ok(check, f"{nodes}, jobs of {_minutes(chosen[0].limit_minutes)}")


def check_mpi(site: Site, seen: Survey) -> Finding:
    """Whether srun supports the site's kind of MPI, and whether that can carry the site's traffic."""
    check, wanted = "slurm: mpi", slurm(site).mpi
    if site.backend == "mpi" and wanted == _NO_MPI:
        advice = "set slurm.mpi: pmi2 for MPICH or pmix for Open MPI, or use backend: gloo or nccl"
        return fault(check, "backend: mpi, but with mpi: none the ranks are not one MPI world", advice)
    if not seen.mpi_types:
        return skipped(check, seen.errors.get("mpi", "the output of srun --mpi=list cannot be read"))
    supported = ", ".join(sorted(seen.mpi_types))
    if wanted not in (*seen.mpi_types, _NO_MPI):
        found = f"srun does not support {wanted}; it supports {supported}"
        return fault(check, found, "set slurm.mpi to one of these")
    return ok(check, f"{wanted}, of {supported}")


def check_arrays(site: Site, seen: Survey) -> Finding:
    """Whether an array of the site's size is allowed."""
    check, wanted = "slurm: arrays", slurm(site).array_size
    value = seen.settings.get("MaxArraySize", "")
    if not value.isdigit():
        return skipped(check, "the controller does not report MaxArraySize")
    most = int(value)
    if most > wanted:
        return ok(check, f"MaxArraySize {most}, slurm.array_size {wanted}")
    found = f"MaxArraySize is {most}, slurm.array_size {wanted}"
    if most <= 1:
        return fault(check, found, "ask the cluster's administrators to allow job arrays")
    return fault(check, found, f"set slurm.array_size: {most - 1}")


def nodes_to_try(site: Site, seen: Survey) -> int:
    """Two, if the site's partition has two usable nodes for a job; else one."""
    named = (slurm(site).partition or "").split(",")
    chosen = [one for one in seen.partitions if one.name in named or (one.default and named == [""])]
    nodes = [min(one.usable_nodes, one.largest_job or one.nodes) for one in chosen]
    return min(2, max(1, *nodes)) if nodes else 2


def check_sbatch(text: str, site: Site) -> Finding:
    """Whether sbatch accepts the batch script of a cell; runs sbatch --test-only."""
    check = "slurm: sbatch"
    try:
        return ok(check, rehearse(text, site).removeprefix("sbatch: "))
    except NoAnswerError as error:
        return skipped(check, str(error))
    except SiteError as error:
        return fault(check, str(error), advice_on_rejection(str(error), site))


def advice_on_rejection(message: str, site: Site) -> str:
    """Which setting sbatch's error message is about."""
    found = (fields for words, fields in _FIELDS_BY_WORDS if words in message.lower())
    field = next(found, "what sbatch names in the profile")
    return f"correct {field} of site {site.name}; kronscale submit --dry-run prints the script"


def _problem(one: Partition, site: Site) -> tuple[str, str] | None:
    needed = max(site.limits_minutes) + START_MINUTES
    if not one.up:
        return f"{one.name} is not up", "set another slurm.partition, or wait until it is up"
    if not one.usable_nodes:
        found = f"none of the {one.nodes} nodes of {one.name} is usable"
        return found, f"run sinfo --list-reasons --partition={one.name}, or set another partition"
    if one.limit_minutes is not None and one.limit_minutes < needed:
        found = f"{one.name} allows {_minutes(one.limit_minutes)}, a cell of this site needs {needed:g}"
        most = max(1, one.limit_minutes - START_MINUTES)
        return found, f"set timeout_minutes: {most:g}, or another partition"
    return None


def _minutes(limit: float | None) -> str:
    return "any length" if limit is None else f"up to {limit:g} minutes"
