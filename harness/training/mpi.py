"""Whether this rank is in the MPI world that its launcher means; MPI is started here or nowhere."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_LOG = logging.getLogger(__name__)

# What process managers give the ranks that they start: Hydra, Slurm's pmi2 and pmix, Open MPI.
_MANAGED = ("PMI_RANK", "PMI_ID", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
# Whoever starts MPI with these in its environment takes this rank's place; a spawned loader worker would.
_IDENTITY = ("PMI_", "PMI2_", "PMIX_", "OMPI_COMM_WORLD_", "HYDI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def find_mpi(rank: int, world_size: int, *, wanted: bool) -> tuple[MPI.Intracomm | None, str]:
    """MPI's world, if it is the launcher's: as many ranks, and this one in its place.

    Args:
        rank: as the launcher counts.
        world_size: as the launcher counts.
        wanted: start MPI also where no process manager shows in the environment.

    Returns:
        A communicator, or None; and where there is none the reason, one sentence.
    """
    managed = [name for name in _MANAGED if name in os.environ]
    if not (managed or wanted):
        return None, "no process manager of an MPI library has started this rank"
    try:
        from mpi4py import MPI  # noqa: PLC0415  # importing it starts MPI: in a rank only, and only when due
    except (ImportError, RuntimeError) as error:
        return None, f"there is no MPI library that mpi4py can load: {' '.join(str(error).split())}"
    scrub_identity()
    world = MPI.COMM_WORLD
    if (world.size, world.rank) == (world_size, rank):
        return world, ""
    reason = (
        f"MPI says rank {world.rank} of {world.size}, the launcher says rank {rank} of {world_size}: "
        f"the ranks were not started as one MPI world"
    )
    if world.size == 1:
        forget_shared_memory()
    if managed:
        _LOG.warning("%s; the rendezvous goes through the run folder instead", reason)
    return None, reason


def scrub_identity() -> None:
    """Take this rank's place in MPI's world out of the environment that its children inherit."""
    for name in [name for name in os.environ if name.startswith(_IDENTITY)]:
        del os.environ[name]


def forget_shared_memory() -> None:
    """Take the name off the memory that MPICH's ranks share on a host: killed ranks then leave none behind.

    Only once every rank of the host has it open, which is so after any collective.
    """
    maps = Path("/proc/self/maps").read_text()
    for name in set(re.findall(r"/dev/shm/mpich_shm_\S+$", maps, re.MULTILINE)):  # noqa: S108  MPICH's choice
        Path(name).unlink(missing_ok=True)


def finish_mpi() -> None:
    """Finalize MPI if it was started here; collective, and the last that a rank does with it."""
    started = sys.modules.get("mpi4py.MPI")
    if started is not None and not started.Is_finalized():
        started.Finalize()
