"""Whether a cluster's Slurm is as a site's profile says: its answers, judged beside the profile."""

from __future__ import annotations

from harness.doctor.findings import Finding, fault, ok, skipped, warning
from harness.errors import SiteError
from harness.launchers.site import Site
from harness.launchers.slurm.cluster_survey import Partition, Survey
from harness.launchers.slurm.job_layout import START_MINUTES, slurm
from harness.launchers.slurm.sbatch import rehearse
from harness.launchers.slurm.scheduler import NoAnswerError

_NO_MPI = "none"

# What stands in a refusal of sbatch's, and the field of the profile that it is about.
_BLAMED = (
    ("partition", "slurm.partition"),
    ("account", "slurm.account"),
    ("qos", "slurm.qos or timeout_minutes"),
    ("time limit", "timeout_minutes"),
    ("feature", "slurm.constraint"),
    ("memory", "slurm.memory_gb_per_node"),
    ("gres", "slurm.gpus_by and gpus_per_rank"),
    ("node configuration", "slurm.ranks_per_node, cpus_per_rank and gpus_per_rank"),
    ("cpu count", "slurm.ranks_per_node and cpus_per_rank"),
)


def judge_cluster(site: Site, seen: Survey) -> list[Finding]:
    """All that the answers say."""
    return [
        judge_commands(seen),
        judge_controller(seen),
        judge_accounting(seen),
        judge_partition(site, seen),
        judge_mpi(site, seen),
        judge_arrays(site, seen),
    ]


def judge_commands(seen: Survey) -> Finding:
    """Whether Slurm's commands are here."""
    if seen.missing:
        found = f"not on this host's PATH: {', '.join(seen.missing)}"
        return fault("slurm: commands", found, "run kronscale on a login node, or load the module of Slurm")
    return ok("slurm: commands", "all on this host's PATH")


def judge_controller(seen: Survey) -> Finding:
    """Whether the controller answers."""
    if "controller" in seen.silence:
        advice = "see scontrol ping; if it stays so, ask the cluster's administrators"
        return fault("slurm: controller", seen.silence["controller"], advice)
    name, version = (seen.settings.get(field, "?") for field in ("ClusterName", "SLURM_VERSION"))
    return ok("slurm: controller", f"Slurm {version}, cluster {name}")


def judge_accounting(seen: Survey) -> Finding:
    """Whether accounting answers, which remembers jobs that the controller has forgotten."""
    if "accounting" in seen.silence:
        advice = (
            "look with kronscale status within minutes of a job's end, while the controller remembers: later "
            "it cannot say why Slurm ended a job that left no outcome"
        )
        return warning("slurm: accounting", seen.silence["accounting"], advice)
    return ok("slurm: accounting", "answers")


def judge_partition(site: Site, seen: Survey) -> Finding:
    """Whether the partitions that the site names are there, up, and allow jobs of the site's length."""
    check, named = "slurm: partition", slurm(site).partition
    if "partitions" in seen.silence:
        return skipped(check, seen.silence["partitions"])
    known = {one.name: one for one in seen.partitions}
    wanted = named.split(",") if named else [one.name for one in seen.partitions if one.default]
    if not wanted:
        return skipped(check, "the site names none and the cluster has no default; see slurm: sbatch")
    if lacking := [name for name in wanted if name not in known]:
        found = f"there is no partition {', '.join(lacking)}; there are {', '.join(known) or 'none'}"
        return fault(check, found, f"set slurm.partition of site {site.name} to one of these")
    chosen = [known[name] for name in wanted]
    wrongs = [wrong for one in chosen if (wrong := _wrong_with(one, site)) is not None]
    if len(wrongs) == len(chosen):  # of several, Slurm takes the one that starts first
        return fault(check, *wrongs[0])
    nodes = ", ".join(f"{one.name}: {one.usable_nodes} of {one.nodes} nodes usable" for one in chosen)
    return ok(check, f"{nodes}, jobs of {_minutes(chosen[0].limit_minutes)}")


def judge_mpi(site: Site, seen: Survey) -> Finding:
    """Whether srun knows the site's kind of MPI, and whether that can carry the site's traffic."""
    check, wanted = "slurm: mpi", slurm(site).mpi
    if site.backend == "mpi" and wanted == _NO_MPI:
        advice = "set slurm.mpi: pmi2 for MPICH or pmix for Open MPI, or use backend: gloo or nccl"
        return fault(check, "backend: mpi, but mpi: none makes no MPI world of the ranks", advice)
    if not seen.mpi_types:
        return skipped(check, seen.silence.get("mpi", "srun --mpi=list says nothing that can be read"))
    there = ", ".join(sorted(seen.mpi_types))
    if wanted not in (*seen.mpi_types, _NO_MPI):
        return fault(check, f"srun knows no {wanted}; it knows {there}", "set slurm.mpi to one of these")
    return ok(check, f"{wanted}, of {there}")


def judge_arrays(site: Site, seen: Survey) -> Finding:
    """Whether an array of the site's size is allowed."""
    check, wanted = "slurm: arrays", slurm(site).array_size
    said = seen.settings.get("MaxArraySize", "")
    if not said.isdigit():
        return skipped(check, "the controller does not say")
    most = int(said)
    if most > wanted:
        return ok(check, f"MaxArraySize {most}, up to {wanted} jobs in ours")
    found = f"MaxArraySize is {most}, slurm.array_size {wanted}"
    if most <= 1:
        return fault(check, found, "ask the cluster's administrators to allow job arrays")
    return fault(check, found, f"set slurm.array_size: {most - 1}")


def nodes_to_try(site: Site, seen: Survey) -> int:
    """Two, where the site's partition gives a job two that are usable; else one."""
    named = (slurm(site).partition or "").split(",")
    chosen = [one for one in seen.partitions if one.name in named or (one.default and named == [""])]
    room = [min(one.usable_nodes, one.largest_job or one.nodes) for one in chosen]
    return min(2, max(1, *room)) if room else 2


def rehearsal(text: str, site: Site) -> Finding:
    """What sbatch says to the text that a cell's job would have; asks it."""
    check = "slurm: sbatch"
    try:
        return ok(check, rehearse(text, site).removeprefix("sbatch: "))
    except NoAnswerError as error:
        return skipped(check, str(error))
    except SiteError as error:
        return fault(check, str(error), advice_on_refusal(str(error), site))


def advice_on_refusal(words: str, site: Site) -> str:
    """Which setting sbatch's words are about."""
    said = words.lower()
    blamed = next((field for sign, field in _BLAMED if sign in said), "what sbatch names in the profile")
    return f"correct {blamed} of site {site.name}; kronscale submit --dry-run shows the text"


def _wrong_with(one: Partition, site: Site) -> tuple[str, str] | None:
    needed = site.timeout_minutes + START_MINUTES
    if not one.up:
        return f"{one.name} is not up", "name another partition in slurm.partition, or wait until it is up"
    if not one.usable_nodes:
        found = f"none of the {one.nodes} nodes of {one.name} is usable"
        return found, f"see why with sinfo --list-reasons --partition={one.name}, or name another partition"
    if one.limit_minutes is not None and one.limit_minutes < needed:
        found = f"{one.name} allows {_minutes(one.limit_minutes)}, a cell of this site asks for {needed:g}"
        most = max(1, one.limit_minutes - START_MINUTES)
        return found, f"set timeout_minutes: {most:g}, or name another partition"
    return None


def _minutes(limit: float | None) -> str:
    return "any length" if limit is None else f"up to {limit:g} minutes"
