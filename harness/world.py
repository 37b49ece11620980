"""How a rank finds its world: process group, device, threads."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.store import Attempt, write_atomically

PEER_TIMEOUT = timedelta(minutes=5)  # a collective that waits longer has lost a peer
RENDEZVOUS_SECONDS = 120.0  # covers slow imports on a cold file system


@dataclass(frozen=True)
class World:
    """This rank's place among the others."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


def join_world(attempt: Attempt, rank: int, world_size: int, local_rank: int) -> World:
    """Join the process group of `attempt`; a world of one has none.

    Rank 0 opens a store on a port that the kernel chooses and publishes it in the attempt's folder, so no
    two runs can race for a port.

    Raises:
        TimeoutError: rank 0 published no address in time.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if world_size > 1:
        address = attempt.path / "rendezvous.json"
        store = _open_store(address, world_size) if rank == 0 else _find_store(address, world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=PEER_TIMEOUT)
    return World(rank, world_size, local_rank, device, backend)


def host_names(world: World) -> tuple[str, ...]:
    """Host of every rank, in rank order."""
    if world.world_size == 1:
        return (socket.gethostname(),)
    names: list[str] = [""] * world.world_size
    dist.all_gather_object(names, socket.gethostname())
    return tuple(names)


def _open_store(address: Path, world_size: int) -> TCPStore:
    host = socket.gethostname() if world_size > 1 else "localhost"
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        host = "localhost"  # a host that cannot resolve its own name can still host all of its ranks
    store = _store(host, 0, world_size, is_master=True)
    write_atomically(address, json.dumps({"host": host, "port": store.port}))
    return store


def _find_store(address: Path, world_size: int) -> TCPStore:
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while not address.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 published no {address} within {RENDEZVOUS_SECONDS:.0f} s")
        time.sleep(0.01)
    where = json.loads(address.read_text())
    return _store(where["host"], where["port"], world_size, is_master=False)


def _store(host: str, port: int, world_size: int, *, is_master: bool) -> TCPStore:
    return TCPStore(host, port, world_size, is_master=is_master, timeout=PEER_TIMEOUT, wait_for_workers=False)
