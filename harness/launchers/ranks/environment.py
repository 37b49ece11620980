"""Environment variables of ranks: which ones a launcher removes, and which ones it sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.launchers.launch import Launch

MPI_IDENTITY = (
    "PMI_", "PMI2_", "PMIX_", "OMPI_COMM_WORLD_", "HYDI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
)  # fmt: skip
"""Prefixes of what an MPI process manager tells a rank: a child that inherits them takes the rank's place."""

# A submission from inside an allocation or under mpirun inherits these, and libraries believe them.
_LAUNCHER_PREFIXES = (
    "SLURM", "SBATCH_", "SRUN_", "SUBMITIT_", "TORCHELASTIC_", "PMI", "OMPI_", "HYDRA_", "MPI_LOCAL",
)  # fmt: skip
_LAUNCHER_NAMES = frozenset({
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
})  # fmt: skip
_AFFINITY_NAMES = frozenset({"GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"})
_CLUSTER_NAME = "SLURM_CONF"  # chooses a cluster, not an allocation
_THREAD_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def rank_environment(inherited: Mapping[str, str], launch: Launch, gpus: Sequence[int]) -> dict[str, str]:
    """Environment of a local rank: the inherited one without the variables of another launcher.

    Every rank sees all the GPUs of its attempt: hiding a peer's GPU breaks NCCL's peer-to-peer path.
    """
    environment = {
        name: value
        for name, value in inherited.items()
        if not (_from_launcher(name) or name in _AFFINITY_NAMES)
    }
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return environment | own_variables(launch)


def own_variables(launch: Launch) -> dict[str, str]:
    """Variables that every launcher sets for its ranks: threads, unbuffered logs, and the site's own."""
    environment = dict.fromkeys(_THREAD_NAMES, str(launch.cpus_per_rank))
    environment["PYTHONUNBUFFERED"] = "1"  # the last lines of a killed rank reach its log
    return environment | launch.site.environment


def hidden_from_jobs(name: str) -> bool:
    """Whether a variable of the submitting shell must not reach a Slurm job."""
    return name == "CUDA_VISIBLE_DEVICES" or (_from_launcher(name) and name != _CLUSTER_NAME)


def _from_launcher(name: str) -> bool:
    return name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES)
