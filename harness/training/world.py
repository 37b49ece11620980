"""How a rank finds its world: device, rendezvous, and what carries the traffic."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.errors import SiteError
from harness.launchers.launch import Launch
from harness.runs.store import Attempt, write_atomically
from harness.training.mpi import find_mpi, finish_mpi, forget_shared_memory
from kfac_core.collectives import Communicator, connect
from kfac_core.collectives.mpi import MPICommunicator
from kfac_core.collectives.single import SingleCommunicator

PEER_TIMEOUT = timedelta(minutes=5)  # a collective that waits longer has lost a peer
RENDEZVOUS_SECONDS = 120.0  # covers slow imports on a cold file system

_TEXT_BYTES = 256  # a host name has at most 253


@dataclass(frozen=True)
class World:
    """This rank's place among the others.

    Attributes:
        backend: `nccl`, `gloo` or `mpi`; torch.distributed is there for the first two only.
        communicator: carries all traffic of the training; no other way is taken.
        store: what all ranks can write small values into; None in a world of one.
        no_mpi: why MPI carries nothing, not even the rendezvous; empty where it does.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    communicator: Communicator = field(default_factory=connect)
    store: Store | None = None
    no_mpi: str = ""

    def wait_for_all(self) -> None:
        """Return when every rank has called this."""
        self.communicator.all_reduce(torch.zeros(1, device=self.device))


def join_world(attempt: Attempt, rank: int, world_size: int, local_rank: int) -> World:
    """Join the other ranks of `attempt` over the backend of its site.

    Rank 0 opens a store on a port that the kernel chooses and says which: over MPI where the ranks are one
    MPI world, else in the attempt's folder. So no two runs can race for a port.

    Raises:
        SiteError: the site's backend cannot work here, or the GPU that it promises this rank is not there.
        TimeoutError: rank 0 gave no address in time.
    """
    launch = Launch.read(attempt)
    device = _device(launch, local_rank)
    backend = _backend(launch, device)
    if world_size == 1:
        alone = SingleCommunicator()
        return World(
            rank, world_size, local_rank, device, backend, alone, no_mpi="a world of one asks nobody"
        )
    base, reason = find_mpi(rank, world_size, wanted=backend == "mpi")
    mpi = MPICommunicator(base, PEER_TIMEOUT.total_seconds()) if base is not None else None
    if backend == "mpi" and mpi is None:
        raise SiteError(
            f"backend=mpi, but {reason}; give the site an MPI launch that its MPI library understands (mpi: "
            f"pmi2 or pmix on Slurm; MPICH or a relative with launcher: local), or use backend: gloo"
        )
    store = _meet_over_mpi(mpi) if mpi is not None else _meet_in_folder(attempt, rank, world_size)
    forget_shared_memory()
    if backend == "mpi" and mpi is not None:
        return World(rank, world_size, local_rank, device, backend, mpi, store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=PEER_TIMEOUT)
    return World(rank, world_size, local_rank, device, backend, connect(), store, reason)


def leave_world(world: World) -> None:
    """Wait for the others and sign off, at the end of what went well; a rank that failed just exits."""
    world.wait_for_all()
    finish_mpi()


def host_names(world: World) -> tuple[str, ...]:
    """Host of every rank, in rank order."""
    names = torch.zeros(world.world_size, _TEXT_BYTES, dtype=torch.uint8, device=world.device)
    names[world.rank] = _as_bytes(socket.gethostname())
    everyone = tuple(range(world.world_size))
    world.communicator.gather_parts(names.view(-1), [_TEXT_BYTES] * world.world_size, everyone)
    return tuple(_as_text(name) for name in names)


def _device(launch: Launch | None, local_rank: int) -> torch.device:
    """By local rank, all GPUs of the node being visible: NCCL needs them to be, for peer-to-peer."""
    if launch is None or not launch.site.gpus_per_rank:
        return torch.device("cpu")
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= visible:  # on a CPU, or on a peer's GPU, it would train as well, and nobody would know
        raise SiteError(
            f"site {launch.site.name} has gpus_per_rank: 1, but torch {torch.__version__} on "
            f"{socket.gethostname()} sees {visible} GPUs and this is local rank {local_rank}; each has to "
            "see the GPUs of all ranks on its node (kronscale doctor says why one does not), or set "
            "gpus_per_rank: 0"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _backend(launch: Launch | None, device: torch.device) -> str:
    asked = launch.site.backend if launch is not None else "auto"
    own = "nccl" if device.type == "cuda" else "gloo"
    if asked not in ("auto", "mpi", own):
        raise SiteError(f"backend={asked} cannot carry tensors on {device}; allowed: auto, {own}, mpi")
    return own if asked == "auto" else asked


def _meet_over_mpi(mpi: MPICommunicator) -> TCPStore:
    """Rank 0's store, its address broadcast."""
    address = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    store = None
    if mpi.rank == 0:
        store, where = _open_store(mpi.world_size)
        address = _as_bytes(json.dumps(where))
    mpi.broadcast(address, 0)
    return store if store is not None else _reach_store(json.loads(_as_text(address)), mpi.world_size)


def _meet_in_folder(attempt: Attempt, rank: int, world_size: int) -> TCPStore:
    """Rank 0's store, its address published in the attempt's folder."""
    address = attempt.path / "rendezvous.json"
    if rank == 0:
        store, where = _open_store(world_size)
        write_atomically(address, json.dumps(where))
        return store
    return _reach_store(_published(address), world_size)


def _open_store(world_size: int) -> tuple[TCPStore, dict[str, Any]]:
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        host = "localhost"  # a host that cannot resolve its own name can still host all of its ranks
    store = _store(host, 0, world_size, is_master=True)
    return store, {"host": host, "port": store.port}


def _published(address: Path) -> dict[str, Any]:
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while not address.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 published no {address} within {RENDEZVOUS_SECONDS:.0f} s")
        time.sleep(0.01)
    where: dict[str, Any] = json.loads(address.read_text())
    return where


def _reach_store(where: dict[str, Any], world_size: int) -> TCPStore:
    return _store(where["host"], where["port"], world_size, is_master=False)


def _store(host: str, port: int, world_size: int, *, is_master: bool) -> TCPStore:
    return TCPStore(host, port, world_size, is_master=is_master, timeout=PEER_TIMEOUT, wait_for_workers=False)


def _as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _as_text(field: Tensor) -> str:
    return bytes(field.tolist()).rstrip(b"\0").decode()
