"""Joining the world of a run: device, backend, MPI, rendezvous and communicator of one rank."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.errors import SiteError
from harness.launchers.launch import Launch
from harness.launchers.ranks.environment import MPI_IDENTITY
from harness.launchers.site_profile import Site
from harness.runs.store import Attempt
from harness.training.world.rendezvous import (
    all_gather_bytes,
    is_one_host,
    rendezvous_in_folder,
    rendezvous_over_mpi,
)
from kfac_core.collectives import Communicator, SingleCommunicator, connect
from kfac_core.collectives.mpi import MPICommunicator

if TYPE_CHECKING:
    from mpi4py import MPI

_LOG = logging.getLogger(__name__)
_LOOPBACK_DEVICE = Path("/sys/class/net/lo")

# What process managers set for the ranks that they start: Hydra, Slurm's pmi2 and pmix, Open MPI.
_MANAGED = ("PMI_RANK", "PMI_ID", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


@dataclass(frozen=True)
class World:
    """One rank's view of the ranks that train together.

    Attributes:
        backend: `nccl`, `gloo` or `mpi`; torch.distributed is initialised for the first two only.
        communicator: carries all traffic of the training.
        store: shared by all ranks, for small values; None in a world of one.
        staging_seconds: how long ranks wait for the data of others.
    """

    rank: int
    world_size: int
    device: torch.device
    backend: str
    communicator: Communicator = field(default_factory=connect)
    store: Store | None = None
    staging_seconds: float = 3600.0

    def all_gather(self, value: Any) -> list[Any]:
        """What every rank passed, by rank; a collective call, for agreements outside of the training step.

        Args:
            value: plain data for JSON, in which numbers stay exact.
        """
        texts = all_gather_bytes(self.communicator, self.device, json.dumps(value).encode())
        return [json.loads(text) for text in texts]

    def wait_for_data(self) -> None:
        """Return when every rank has its data; a collective would count slow copies as lost peers.

        Raises:
            TimeoutError: a rank was not done within the site's `staging_minutes`.
        """
        if self.store is None:
            return
        if self.store.add("data/ready", 1) == self.world_size:
            self.store.set("data/all", "")
        try:
            self.store.wait(["data/all"], timedelta(seconds=self.staging_seconds))
        except dist.DistStoreError:
            ready = self.store.add("data/ready", 0)
            raise TimeoutError(
                f"{self.world_size - ready} of {self.world_size} ranks had no data after "
                f"{self.staging_seconds:g} s (staging_minutes)"
            ) from None

    def wait_for_all(self) -> None:
        """Return when every rank has called this."""
        self.communicator.all_reduce(torch.zeros(1, device=self.device))


def join_world(attempt: Attempt, rank: int, world_size: int, local_rank: int) -> World:
    """Join the other ranks of `attempt` over the backend of its site.

    The rendezvous goes over MPI where the ranks are one MPI world, else through the attempt's folder.

    Raises:
        SiteError: the site's backend cannot work on this host, or this rank's GPU is missing.
        TimeoutError: rank 0 published no address in time.
        MembershipError: another process acts as a rank of the attempt.
    """
    launch = Launch.read(attempt)
    site = launch.site if launch is not None else Site(name="none")
    device = _device(site, local_rank)
    backend = _backend(site, device)
    peer_seconds, staging_seconds = 60 * site.peer_minutes, 60 * site.staging_minutes
    if world_size == 1:
        return World(rank, world_size, device, backend, SingleCommunicator())
    base, reason = find_mpi(rank, world_size, required=backend == "mpi")
    mpi = MPICommunicator(base, peer_seconds) if base is not None else None
    if backend == "mpi" and mpi is None:
        raise SiteError(
            f"backend=mpi, but {reason}; give the site an MPI launch that its MPI library understands (mpi: "
            f"pmi2 or pmix on Slurm; MPICH or a relative with launcher: local), or use backend: gloo"
        )
    one_host = is_one_host(launch)
    if mpi is not None:
        store = rendezvous_over_mpi(mpi, attempt, site, one_host=one_host)
    else:
        store = rendezvous_in_folder(attempt, rank, world_size, site, one_host=one_host)
    unlink_shared_memory()
    if backend == "mpi" and mpi is not None:
        return World(rank, world_size, device, backend, mpi, store, staging_seconds)
    if one_host and backend == "gloo" and _LOOPBACK_DEVICE.exists():  # the kernel would take this way anyway
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK_DEVICE.name)
    if backend == "nccl":  # K-FAC's and the model's communicators run in the order of the host's calls
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=peer_seconds),
        device_id=device if backend == "nccl" else None,  # connects now, before any clock runs
    )
    return World(rank, world_size, device, backend, connect(), store, staging_seconds)


def finalize_world(world: World) -> None:
    """Wait for the other ranks and end torch.distributed and MPI, after a successful run.

    A rank that failed just exits.
    """
    world.wait_for_all()
    if world.backend == "nccl" and dist.is_initialized():
        dist.destroy_process_group()
    finalize_mpi()


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


def _device(site: Site, local_rank: int) -> torch.device:
    """The GPU with the number `local_rank`; NCCL needs all GPUs of the node visible, for peer-to-peer."""
    if not site.gpus_per_rank:
        return torch.device("cpu")
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= visible:  # training on a CPU or on a peer's GPU would work too, and nobody would notice
        raise SiteError(
            f"site {site.name} has gpus_per_rank: 1, but torch {torch.__version__} on "
            f"{socket.gethostname()} sees {visible} GPUs and this is local rank {local_rank}; each rank must "
            "see the GPUs of all ranks on its node (kronscale doctor reports why one does not), or set "
            "gpus_per_rank: 0"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _backend(site: Site, device: torch.device) -> str:
    backend = site.backend
    default = "nccl" if device.type == "cuda" else "gloo"
    if backend not in ("auto", "mpi", default):
        raise SiteError(f"backend={backend} cannot carry tensors on {device}; allowed: auto, {default}, mpi")
    return default if backend == "auto" else backend
