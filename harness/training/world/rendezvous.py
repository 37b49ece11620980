"""Rendezvous: rank 0 opens a store, whose address the others learn over MPI, from a board or a file.

The kernel chooses the port, so two runs never compete for one. The store of one host listens on its loopback
interface only, and all ranks prove that they belong to the attempt before they use it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.launchers.address_board import (
    SECRET_BYTES,
    VARIABLE,
    get_address,
    new_secret,
    post_address,
    reachable_name,
)
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site
from harness.runs.store import Attempt
from harness.runs.stored_files import write_atomically
from harness.training.world.membership import prove_membership
from kfac_core.collectives.mpi import MPICommunicator

_LOOPBACK = "127.0.0.1"
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 1.0  # between looks at a file
TEXT_BYTES = 256  # a host name has at most 253


@dataclass(frozen=True)
class Patience:
    """How long ranks wait for each other (see `Site`), in seconds."""

    start: float
    peer: float
    staging: float

    @classmethod
    def of(cls, launch: Launch | None) -> Self:
        """As the attempt's site says."""
        site = launch.site if launch is not None else Site(name="none")
        minutes = (site.rendezvous_minutes, site.peer_minutes, site.staging_minutes)
        return cls(*(60 * one for one in minutes))


_DEFAULT = Patience.of(None)


def rendezvous_over_mpi(
    mpi: MPICommunicator, attempt: Attempt, patience: Patience, *, one_host: bool
) -> TCPStore:
    """Rank 0's store; its address is broadcast.

    Raises:
        MembershipError: somebody else acts as a rank, or as the store.
    """
    address, secret = torch.zeros(TEXT_BYTES, dtype=torch.uint8), torch.zeros(SECRET_BYTES, dtype=torch.uint8)
    store = None
    if mpi.rank == 0:
        store, where = _open_store(mpi.world_size, patience, one_host=one_host)
        address = encode_text(json.dumps(where))
        secret = torch.tensor(list(new_secret()), dtype=torch.uint8)
    mpi.broadcast(address, 0)
    mpi.broadcast(secret, 0)
    if store is None:
        store = _connect(json.loads(decode_text(address)), mpi.world_size, patience)
    prove_membership(store, mpi.rank, mpi.world_size, bytes(secret.tolist()), _name(attempt))
    return store


def rendezvous_in_folder(
    attempt: Attempt, rank: int, world_size: int, patience: Patience = _DEFAULT, *, one_host: bool
) -> TCPStore:
    """Rank 0's store. A secret is in the attempt's folder until all ranks have met.

    The ranks of one host find the store's address there too; of several hosts, on the board of their job's
    supervisor, where it has one.

    Raises:
        TimeoutError: rank 0 published no address in time.
        MembershipError: somebody else acts as a rank, or as the store.
    """
    published, board = attempt.path / "rendezvous.json", os.environ.get(VARIABLE)
    store = None
    if rank == 0:
        store, where = _open_store(world_size, patience, one_host=one_host)
    if board is not None and not one_host:
        secret = bytes.fromhex(_read_when_there(published, patience)["secret"])
        if store is not None:
            post_address(board, secret, where, patience.start)
        else:
            where = get_address(board, secret, patience.start)
    elif store is not None:
        secret = new_secret()
        write_atomically(published, json.dumps({**where, "secret": secret.hex()}), private=True)
    else:
        where = _read_when_there(published, patience)
        secret = bytes.fromhex(where["secret"])
    if store is None:
        store = _connect(where, world_size, patience)
    prove_membership(store, rank, world_size, secret, _name(attempt))
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


def _open_store(world_size: int, patience: Patience, *, one_host: bool) -> tuple[TCPStore, dict[str, Any]]:
    if one_host:  # no other host can connect
        listener = socket.create_server((_LOOPBACK, 0))
        port = listener.getsockname()[1]
        store = _store(_LOOPBACK, port, world_size, patience, listener=listener.detach())
        return store, {"host": _LOOPBACK, "port": port}
    host = reachable_name()
    store = _store(host, 0, world_size, patience, is_master=True)  # on all interfaces
    return store, {"host": host, "port": store.port}


def _read_when_there(published: Path, patience: Patience) -> dict[str, Any]:
    deadline, pause = time.monotonic() + patience.start, _FIRST_PAUSE_SECONDS
    while not published.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 published no {published} within {patience.start:.0f} s (rendezvous_minutes)"
            )
        time.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_PAUSE_SECONDS)
    found: dict[str, Any] = json.loads(published.read_text())
    return found


def _connect(where: dict[str, Any], world_size: int, patience: Patience) -> TCPStore:
    return _store(where["host"], where["port"], world_size, patience, is_master=False)


def _store(
    host: str, port: int, world_size: int, patience: Patience, *, is_master: bool = True,
    listener: int | None = None,
) -> TCPStore:  # fmt: skip
    return TCPStore(
        host, port, world_size, is_master=is_master, timeout=timedelta(seconds=patience.start),
        wait_for_workers=False, master_listen_fd=listener,
    )  # fmt: skip
