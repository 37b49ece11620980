"""The `slurm:` section of a site profile."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from harness.cell import Spec

_RESERVED = (
    "array",
    "comment",
    "job-name",
    "nodes",
    "ntasks-per-node",
    "output",
    "error",
    "open-mode",
    "requeue",
)


class SlurmProfile(Spec):
    """Facts about one cluster, and how cells are laid out in its jobs.

    Attributes:
        ranks_per_node: most ranks of a cell on a node; a wider cell takes several nodes, all equally full.
        partition: and `account`, `qos`, `constraint`, `wckey`: sbatch's options of these names.
        exclude_nodes: nodes that no job may get.
        memory_gb_per_node: requested for a full node; a cell with fewer ranks requests its share. None
            requests nothing, so that the cluster's default applies.
        exclusive: whether jobs get whole nodes; the cost estimate then counts whole nodes.
        cpus_per_node: and `gpus_per_node`: of a whole node; only for the cost estimate.
        gpus_by: how GPUs are requested: the option `gpus-per-node`, `gres` (as `gres=gpu:4`), or `none` where
            whole nodes come with all of theirs.
        mpi: srun's `--mpi`: `pmi2` for MPICH, `pmix` for Open MPI, `none`.
        sbatch: more options by name without dashes; a value of null gives the bare option.
        srun: more options of srun, such as `--cpu-bind=cores`.
        setup: lines of bash that run before the ranks start, such as `module load ...`; not quoted.
        at_once: most jobs of an array that run at the same time.
        array_size: most jobs in an array; the cluster's MaxArraySize minus one.
        cells_per_job: cells that run side by side in one job.
        pair_arms: whether all arms of a block, the cells of one world size and seed, run in one job one
            after another, so that comparisons between them are within one allocation.
        requeue: whether Slurm may start a job again after a node failed or a preemption.
        signal_seconds: time between SIGUSR2 to the ranks and the job's time limit or preemption; None for no
            signal.
    """

    ranks_per_node: int = Field(ge=1)
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    wckey: str | None = None
    exclude_nodes: tuple[str, ...] = ()
    memory_gb_per_node: float | None = Field(default=None, gt=0)
    exclusive: bool = False
    cpus_per_node: int | None = Field(default=None, ge=1)
    gpus_per_node: int | None = Field(default=None, ge=0)
    gpus_by: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    mpi: str = Field(default="none", pattern=r"^[a-z0-9_]+$")
    sbatch: dict[str, str | int | None] = {}
    srun: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    at_once: int = Field(default=50, ge=1)
    array_size: int = Field(default=1000, ge=1)
    cells_per_job: int = Field(default=1, ge=1)
    pair_arms: bool = False
    requeue: bool = True
    signal_seconds: int | None = Field(default=None, ge=1)

    def gpu_option(self, count: int) -> dict[str, str]:
        """Option of sbatch or srun that requests `count` GPUs on each node; empty if none is needed."""
        if not count or self.gpus_by == "none":
            return {}
        return {self.gpus_by: f"gpu:{count}" if self.gpus_by == "gres" else str(count)}

    @model_validator(mode="after")
    def _options_are_single_lines(self) -> Self:
        named = {name: getattr(self, name) for name in ("partition", "account", "qos", "constraint", "wckey")}
        options = named | {f"sbatch.{name}": value for name, value in self.sbatch.items()}
        for name, value in (*options.items(), *(("exclude_nodes", node) for node in self.exclude_nodes)):
            if any(sign in str(value) for sign in "\n\r\0'"):
                raise ValueError(
                    f"{name}={value!r} has a line break or a quote, which #SBATCH lines cannot hold"
                )
        for name in self.sbatch:
            if not name.replace("-", "").isalnum() or name in _RESERVED:
                raise ValueError(
                    f"sbatch={name!r} must be an option of sbatch, and none of {', '.join(_RESERVED)}"
                )
        return self
