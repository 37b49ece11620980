"""Whether this rank is part of the MPI world that its launcher started; MPI is started only here."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.launchers.ranks.environment import MPI_IDENTITY

if TYPE_CHECKING:
    from mpi4py import MPI

_LOG = logging.getLogger(__name__)

# What process managers set for the ranks that they start: Hydra, Slurm's pmi2 and pmix, Open MPI.
_MANAGED = ("PMI_RANK", "PMI_ID", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


def find_mpi(rank: int, world_size: int, *, required: bool) -> tuple[MPI.Intracomm | None, str]:
    """MPI's world communicator, if its rank and size are those of the launcher.

    Args:
        rank: as the launcher counts.
        world_size: as the launcher counts.
        required: start MPI even if the environment shows no process manager.

    Returns:
        The communicator and an empty text, or None and the reason, one sentence.
    """
    managed = any(name in os.environ for name in _MANAGED)
    if not (managed or required):
        return None, "no process manager of an MPI library has started this rank"
    try:
        from mpi4py import MPI  # noqa: PLC0415  # importing it starts MPI: in a rank only, and only when due
    except (ImportError, RuntimeError) as error:
        return None, f"there is no MPI library that mpi4py can load: {' '.join(str(error).split())}"
    _remove_identity()
    world = MPI.COMM_WORLD
    if (world.size, world.rank) == (world_size, rank):
        return world, ""
    reason = (
        f"MPI reports rank {world.rank} of {world.size}, the launcher reports rank {rank} of {world_size}: "
        f"the ranks were not started as one MPI world"
    )
    if world.size == 1:
        unlink_shared_memory()
    if managed:
        _LOG.warning("%s; the rendezvous goes through the run folder instead", reason)
    return None, reason


def unlink_shared_memory() -> None:
    """Unlink the memory that MPICH's ranks share on a host, so that killed ranks leave none behind.

    Every rank of the host must have it open already, which is so after any collective.
    """
    maps = Path("/proc/self/maps").read_text()
    for name in set(re.findall(r"/dev/shm/mpich_shm_\S+$", maps, re.MULTILINE)):  # noqa: S108  MPICH's choice
        Path(name).unlink(missing_ok=True)


def finalize_mpi() -> None:
    """Finalize MPI if this process started it; collective, and a rank's last call to MPI."""
    started = sys.modules.get("mpi4py.MPI")
    if started is not None and not started.Is_finalized():
        started.Finalize()


def _remove_identity() -> None:
    """Remove this rank's MPI identity from the environment that its children inherit."""
    for name in [name for name in os.environ if name.startswith(MPI_IDENTITY)]:
        del os.environ[name]
