"""The `slurm:` section of a site profile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from harness.cell import Spec

START_MINUTES = 2
"""For starting and ending ranks, in addition to the limits of the cells."""

# Options of sbatch by the field that sets them: costs, limits and the ranks depend on it.
_SET_BY = {
    "timeout_minutes": "time time-min",
    "cpus_per_rank": "cpus-per-task cpus-per-gpu mincpus overcommit",
    "gpus_per_rank": "gpus gpus-per-node gpus-per-socket gpus-per-task tres-per-task",
    "slurm.ranks_per_node": "nodes ntasks ntasks-per-node ntasks-per-core ntasks-per-gpu ntasks-per-socket",
    "slurm.at_once": "array",
    "slurm.requeue": "requeue no-requeue",
    "slurm.signal_seconds": "signal",
    "slurm.exclusive": "exclusive",
    "slurm.exclude_nodes": "exclude",
    "slurm.partition": "partition",
    "slurm.account": "account",
    "slurm.qos": "qos",
    "slurm.constraint": "constraint",
    "slurm.memory_gb_per_node": "mem",
}
FIELDS = {option: field for field, options in _SET_BY.items() for option in options.split()}
# With these kronscale would not find its jobs, or they would be none.
RESERVED = (
    "clusters", "comment", "error", "help", "job-name", "no-kill", "open-mode", "output", "parsable",
    "test-only", "usage", "version", "wait", "wrap",
)  # fmt: skip
WHOLE_NODES = ("core-spec", "thread-spec")
# Options of srun without which ranks would not start, end or report as they should.
_RESERVED_OF_SRUN = (
    "cpus-per-task", "error", "export", "input", "kill-on-bad-exit", "mpi", "nodes", "ntasks",
    "ntasks-per-node", "output", "wait",
)  # fmt: skip


class SlurmProfile(Spec):
    """Facts about one cluster, and how cells are laid out in its jobs."""

    # Launches of earlier versions have fields that are gone. `read_site` refuses unknown keys of a profile.
    model_config = ConfigDict(extra="ignore")

    ranks_per_node: int = Field(ge=1)
    """Most ranks of a cell on a node; a wider cell takes several nodes, all equally full. Example: `4`."""

    partition: str | None = None
    """Partition, as `sbatch --partition`; null takes the cluster's default. Example: `gpu`."""

    account: str | None = None
    """Account that is charged, as `sbatch --account`. Example: `proj42`."""

    qos: str | None = None
    """Quality of service, as `sbatch --qos`. Example: `normal`."""

    constraint: str | None = None
    """Features of the nodes, as `sbatch --constraint`. Example: `a100`."""

    exclude_nodes: tuple[str, ...] = ()
    """Nodes that no job may get. Example: `[node017]`."""

    memory_gb_per_node: float | None = Field(default=None, gt=0)
    """Memory in GB requested for a full node; a cell with fewer ranks requests its share. Null requests
    nothing, so that the cluster's default applies. Example: `480`."""

    exclusive: bool = False
    """Whether jobs get whole nodes, which are counted; needs `cpus_per_node`, and with GPUs `gpus_per_node`.
    Example: `true`."""

    cpus_per_node: int | None = Field(default=None, ge=1)
    """CPUs of a whole node, for the cost of `exclusive` jobs. Example: `64`."""

    gpus_per_node: int | None = Field(default=None, ge=0)
    """GPUs of a whole node, for the cost of `exclusive` jobs. Example: `4`."""

    gpus_by: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How GPUs are requested: the option `gpus-per-node`, `gres` (as `gres=gpu:4`), or `none` where whole
    nodes come with all of theirs. Example: `gres`."""

    gpu_type: str | None = None
    """Type of GPU that is requested, where nodes differ. Example: `a100`."""

    mpi: str = "none"
    """Value of `srun --mpi`, a name that `srun --mpi=list` prints: `pmi2` for MPICH, `pmix` for Open MPI, or
    `none`. Example: `pmix`."""

    sbatch: dict[str, str | int | None] = {}
    """More options of sbatch by name without dashes; a value of null gives the bare option.
    Example: `{hint: nomultithread}`."""

    srun: tuple[str, ...] = ()
    """More options of srun. Example: `["--cpu-bind=cores"]`."""

    setup: tuple[str, ...] = ()
    """Lines of bash that run before the ranks start; not quoted. Example: `["module load cuda"]`."""

    at_once: int = Field(default=50, ge=1)
    """Most jobs of an array that run at the same time. Example: `8`."""

    array_size: int = Field(default=1000, ge=1)
    """Most jobs in an array; the cluster's MaxArraySize minus one. Example: `500`."""

    cells_per_job: int = Field(default=1, ge=1)
    """Cells that run side by side in one job. Example: `4`."""

    pair_arms: bool = False
    """Whether all arms of a block, the cells of one world size and seed, run in one job one after another, so
    that comparisons between them are within one allocation. Example: `true`."""

    requeue: bool = True
    """Whether Slurm may start a job again after a node failed or a preemption. Example: `false`."""

    signal_seconds: int | None = Field(default=None, ge=1)
    """Time between SIGUSR2 to the ranks and the preemption or time limit of the job; null for no signal.
    Ranks save before their own limit without it, so that no more than `grace_seconds` and two minutes cannot
    act. Example: `300`."""

    def gpu_option(self, count: int) -> dict[str, str]:
        """Option of sbatch or srun that requests `count` GPUs on each node; empty if none is needed."""
        if not count or self.gpus_by == "none":
            return {}
        words = ("gpu" if self.gpus_by == "gres" else None, self.gpu_type, str(count))
        return {self.gpus_by: ":".join(filter(None, words))}

    @model_validator(mode="after")
    def _options_are_single_lines(self) -> Self:
        names = ("partition", "account", "qos", "constraint", "gpu_type")
        named = {name: getattr(self, name) for name in names}
        options = named | {f"sbatch.{name}": value for name, value in self.sbatch.items()}
        for name, value in (*options.items(), *(("exclude_nodes", node) for node in self.exclude_nodes)):
            if any(sign in str(value) for sign in "\n\r\0'"):
                raise ValueError(
                    f"{name}={value!r} has a line break or a quote, which #SBATCH lines cannot hold"
                )
        return self

    def refused(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Options that a new profile may not have, each with the rest of a sentence about it.

        Sbatch and srun also take any unique beginning of an option's name.
        """
        for name, value in self.sbatch.items():
            place = ("slurm", "sbatch", name)
            known = len(name) > 1 and name.replace("-", "").isalnum()
            if not known or any(one.startswith(name) for one in RESERVED):
                listed = ", ".join(RESERVED)
                yield place, f" must be the long name of an option of sbatch, and none of {listed}"
            elif field := next((FIELDS[one] for one in sorted(FIELDS) if one.startswith(name)), None):
                yield place, f" is set by {field}: change that, and remove this"
            elif name == "gres" and "gpu" in str(value):
                yield place, f"={value} requests GPUs, set by gpus_per_rank, slurm.gpus_by and slurm.gpu_type"
            elif name in WHOLE_NODES and not self.exclusive:
                yield place, " takes whole nodes: set slurm.exclusive: true, so that they are counted"
        for number, word in enumerate(self.srun):
            name = word.removeprefix("--").partition("=")[0]
            if word.startswith("--") and any(one.startswith(name) for one in _RESERVED_OF_SRUN):
                yield ("slurm", "srun", number), f"={word} must not be one of {', '.join(_RESERVED_OF_SRUN)}"

    @model_validator(mode="after")
    def _mpi_is_a_plugin_of_srun(self) -> Self:
        if not re.fullmatch(r"[a-z0-9_]+", self.mpi):
            raise ValueError(
                f"mpi={self.mpi!r} must have lower-case letters, digits and '_' only, as srun --mpi=list "
                "prints them"
            )
        return self
