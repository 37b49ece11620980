"""Rendezvous: rank 0 opens a store, and the other ranks learn its address over MPI or from the run folder.

The kernel chooses the port, so two runs never compete for one. The store of one host listens on its loopback
interface only, and all ranks prove that they belong to the attempt before they use it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.launchers.launch import Launch
from harness.runs.atomic_files import write_atomically
from harness.runs.store import Attempt
from harness.training.world.membership import SECRET_BYTES, new_secret, prove_membership
from kfac_core.collectives.mpi import MPICommunicator

PEER_TIMEOUT = timedelta(minutes=5)  # a collective that waits longer has lost a peer
RENDEZVOUS_SECONDS = 120.0  # covers slow imports on a cold file system
_LOOPBACK = "127.0.0.1"
TEXT_BYTES = 256  # a host name has at most 253


def rendezvous_over_mpi(mpi: MPICommunicator, attempt: Attempt, *, one_host: bool) -> TCPStore:
    """Rank 0's store; its address is broadcast.

    Raises:
        MembershipError: somebody else acts as a rank, or as the store.
    """
    address, secret = torch.zeros(TEXT_BYTES, dtype=torch.uint8), torch.zeros(SECRET_BYTES, dtype=torch.uint8)
    store = None
    if mpi.rank == 0:
        store, where = _open_store(mpi.world_size, one_host=one_host)
        address = encode_text(json.dumps(where))
        secret = torch.tensor(list(new_secret()), dtype=torch.uint8)
    mpi.broadcast(address, 0)
    mpi.broadcast(secret, 0)
    if store is None:
        store = _connect(json.loads(decode_text(address)), mpi.world_size)
    prove_membership(store, mpi.rank, mpi.world_size, bytes(secret.tolist()), _name(attempt))
    return store


def rendezvous_in_folder(attempt: Attempt, rank: int, world_size: int, *, one_host: bool) -> TCPStore:
    """Rank 0's store; its address and a secret are in the attempt's folder until all ranks have met.

    Raises:
        TimeoutError: rank 0 published no address in time.
        MembershipError: somebody else acts as a rank, or as the store.
    """
    published = attempt.path / "rendezvous.json"
    if rank == 0:
        store, where = _open_store(world_size, one_host=one_host)
        where["secret"] = new_secret().hex()
        write_atomically(published, json.dumps(where), private=True)
    else:
        where = _wait_for_address(published)
        store = _connect(where, world_size)
    prove_membership(store, rank, world_size, bytes.fromhex(where["secret"]), _name(attempt))
    if rank == 0:
        published.unlink()
    return store


def is_one_host(launch: Launch | None) -> bool:
    """Whether all ranks of the attempt run on this host."""
    if launch is not None and launch.launcher == "local":
        return True
    return os.environ.get("SLURM_STEP_NUM_NODES") == "1"


def encode_text(text: str) -> Tensor:
    """`[TEXT_BYTES]` uint8, padded with zeros."""
    return torch.tensor(list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)


def decode_text(field: Tensor) -> str:
    """The text that `encode_text` encoded."""
    return bytes(field.tolist()).rstrip(b"\0").decode()


def _name(attempt: Attempt) -> str:
    return "/".join(attempt.path.parts[-3:])


def _open_store(world_size: int, *, one_host: bool) -> tuple[TCPStore, dict[str, Any]]:
    if one_host:  # no other host can connect
        listener = socket.create_server((_LOOPBACK, 0))
        port = listener.getsockname()[1]
        store = _store(_LOOPBACK, port, world_size, listener=listener.detach())
        return store, {"host": _LOOPBACK, "port": port}
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        host = "localhost"  # a host that cannot resolve its own name can still host all of its ranks
    store = _store(host, 0, world_size, is_master=True)  # on all interfaces
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


def _store(
    host: str, port: int, world_size: int, *, is_master: bool = True, listener: int | None = None
) -> TCPStore:
    return TCPStore(
        host, port, world_size, is_master=is_master, timeout=PEER_TIMEOUT, wait_for_workers=False,
        master_listen_fd=listener,
    )  # fmt: skip
