"""Rendezvous: rank 0 opens a store, and the other ranks learn its address over MPI or from the run folder.

The kernel chooses the port, so two runs never compete for one.
"""

from __future__ import annotations

import json
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.runs.atomic_files import write_atomically
from harness.runs.store import Attempt
from kfac_core.collectives.mpi import MPICommunicator

PEER_TIMEOUT = timedelta(minutes=5)  # a collective that waits longer has lost a peer
RENDEZVOUS_SECONDS = 120.0  # covers slow imports on a cold file system
TEXT_BYTES = 256  # a host name has at most 253


def rendezvous_over_mpi(mpi: MPICommunicator) -> TCPStore:
    """Rank 0's store; its address is broadcast."""
    address = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    store = None
    if mpi.rank == 0:
        store, where = _open_store(mpi.world_size)
        address = encode_text(json.dumps(where))
    mpi.broadcast(address, 0)
    return store if store is not None else _connect(json.loads(decode_text(address)), mpi.world_size)


def rendezvous_in_folder(attempt: Attempt, rank: int, world_size: int) -> TCPStore:
    """Rank 0's store; its address is published in the attempt's folder.

    Raises:
        TimeoutError: rank 0 published no address in time.
    """
    address = attempt.path / "rendezvous.json"
    if rank == 0:
        store, where = _open_store(world_size)
        write_atomically(address, json.dumps(where))
        return store
    return _connect(_wait_for_address(address), world_size)


def encode_text(text: str) -> Tensor:
    """`[TEXT_BYTES]` uint8, padded with zeros."""
    return torch.tensor(list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)


def decode_text(field: Tensor) -> str:
    """The text that `encode_text` encoded."""
    return bytes(field.tolist()).rstrip(b"\0").decode()


def _open_store(world_size: int) -> tuple[TCPStore, dict[str, Any]]:
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        host = "localhost"  # a host that cannot resolve its own name can still host all of its ranks
    store = _store(host, 0, world_size, is_master=True)
    return store, {"host": host, "port": store.port}


def _wait_for_address(address: Path) -> dict[str, Any]:
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while not address.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 published no {address} within {RENDEZVOUS_SECONDS:.0f} s")
        time.sleep(0.01)
    where: dict[str, Any] = json.loads(address.read_text())
    return where


def _connect(where: dict[str, Any], world_size: int) -> TCPStore:
    return _store(where["host"], where["port"], world_size, is_master=False)


def _store(host: str, port: int, world_size: int, *, is_master: bool) -> TCPStore:
    return TCPStore(host, port, world_size, is_master=is_master, timeout=PEER_TIMEOUT, wait_for_workers=False)
