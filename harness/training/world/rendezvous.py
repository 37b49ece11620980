"""Rendezvous: rank 0 opens a store, whose address the others learn over MPI, from a board or a file.

The kernel chooses the port, so two runs never compete for one. A store listens for connections, on several
hosts from everywhere (that of one host on its loopback interface only), and asks nobody who they are. So
before the ranks rely on it, all prove that they belong to the attempt: each knows a secret that only they can
read. The secret protects who takes part, not what is sent: traffic is not encrypted.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.errors import MembershipError
from harness.launchers.address_board import VARIABLE, get_address, new_secret, post_address, reachable_name
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site
from harness.runs.store import Attempt
from harness.runs.stored_files import write_atomically
from kfac_core.collectives import Communicator
from kfac_core.collectives.mpi import MPICommunicator

_LOOPBACK = "127.0.0.1"
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 1.0  # between looks at a file
_CHALLENGE_BYTES = 16
_REFUSED = "refused"
_DEFAULT = Site(name="none")


def rendezvous_over_mpi(mpi: MPICommunicator, attempt: Attempt, site: Site, *, one_host: bool) -> TCPStore:
    """Rank 0's store; its address and the secret go over MPI.

    Raises:
        MembershipError: somebody else acts as a rank, or as the store.
    """
    store, address, seconds = None, b"", 60 * site.rendezvous_minutes
    if mpi.rank == 0:
        store, where = _open_store(mpi.world_size, seconds, one_host=one_host)
        address = json.dumps({**where, "secret": new_secret().hex()}).encode()
    where = json.loads(all_gather_bytes(mpi, torch.device("cpu"), address)[0])
    if store is None:
        store = _store(where["host"], where["port"], mpi.world_size, seconds, is_master=False)
    prove_membership(store, mpi.rank, mpi.world_size, bytes.fromhex(where["secret"]), _name(attempt))
    return store


def rendezvous_in_folder(
    attempt: Attempt, rank: int, world_size: int, site: Site = _DEFAULT, *, one_host: bool
) -> TCPStore:
    """Rank 0's store. A secret is in the attempt's folder until all ranks have met.

    The ranks of one host find the store's address there too; of several hosts, on the board of their job's
    supervisor, where it has one.

    Raises:
        TimeoutError: rank 0 published no address in time.
        MembershipError: somebody else acts as a rank, or as the store.
    """
    published, board = attempt.path / "rendezvous.json", os.environ.get(VARIABLE)
    store, seconds = None, 60 * site.rendezvous_minutes
    if rank == 0:
        store, where = _open_store(world_size, seconds, one_host=one_host)
    if board is not None and not one_host:
        secret = bytes.fromhex(_read_when_there(published, seconds)["secret"])
        if store is not None:
            post_address(board, secret, where, seconds)
        else:
            where = get_address(board, secret, seconds)
    elif store is not None:
        secret = new_secret()
        write_atomically(published, json.dumps({**where, "secret": secret.hex()}), private=True)
    else:
        where = _read_when_there(published, seconds)
        secret = bytes.fromhex(where["secret"])
    if store is None:
        store = _store(where["host"], where["port"], world_size, seconds, is_master=False)
    prove_membership(store, rank, world_size, secret, _name(attempt))
    if rank == 0:
        published.unlink()
    return store


def is_one_host(launch: Launch | None) -> bool:
    """Whether all ranks of the attempt run on this host."""
    if launch is not None and launch.launcher == "local":
        return True
    return os.environ.get("SLURM_STEP_NUM_NODES") == "1"


def prove_membership(store: Store, rank: int, world_size: int, secret: bytes, run: str) -> None:
    """Prove to all ranks that this process is `rank` of `run`, and have them prove it; all ranks call it.

    Each rank publishes a random challenge and then an HMAC of all challenges under its own rank (challenge
    and response with a shared key, FIPS 198-1). Rank 0 collects the challenges, checks the answers, and
    vouches for them by an HMAC of its own, so that the store is read four times a rank in all. A stranger's
    rank cannot answer, a stranger's store or rank 0 cannot vouch, and nothing of another attempt or of an
    earlier start fits.

    Args:
        store: of the ranks; its `get` waits for the key.
        rank: of this process.
        world_size: number of ranks.
        secret: known to the ranks only.
        run: name of what they take part in, the same on all.

    Raises:
        MembershipError: another process acts as a rank, or as the store.
    """
    own = secrets.token_hex(_CHALLENGE_BYTES)
    store.set(f"membership/challenge/{rank}", own)
    if rank == 0:
        collected = [_get(store, f"membership/challenge/{of}") for of in range(world_size)]
        store.set("membership/challenges", "\n".join(collected))
    challenges = _get(store, "membership/challenges").split("\n")
    if challenges[rank : rank + 1] != [own] and len(challenges) == world_size:
        raise MembershipError(f"another process acts as rank {rank} of {run}; this one does not take part")

    def answer(of: str) -> str:
        message = "\n".join([run, str(world_size), of, *challenges])
        return hmac.new(secret, message.encode(), "sha256").hexdigest()

    store.set(f"membership/answer/{rank}", answer(str(rank)))
    if rank == 0:
        _check_answers(store, [answer(str(of)) for of in range(world_size)], run)
        store.set("membership/vouched", answer("all"))
    elif not hmac.compare_digest(_get(store, "membership/vouched"), answer("all")):
        raise MembershipError(
            f"the store or rank 0 could not prove that all belong to {run}: somebody there does not know the "
            f"secret in its run folder, and so is another user's or another attempt's"
        )


def all_gather_bytes(communicator: Communicator, device: torch.device, own: bytes) -> list[bytes]:
    """Entry r is what rank r passed; lengths may differ."""
    lengths = torch.zeros(communicator.world_size, dtype=torch.int64, device=device)
    lengths[communicator.rank] = len(own)
    communicator.all_reduce(lengths)
    sizes: list[int] = lengths.tolist()
    buffer = torch.zeros(sum(sizes), dtype=torch.uint8)
    if own:  # torch.frombuffer rejects an empty buffer
        buffer.split(sizes)[communicator.rank].copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    buffer = buffer.to(device)
    communicator.gather_parts(buffer, sizes, tuple(range(communicator.world_size)))
    return [part.numpy().tobytes() for part in buffer.cpu().split(sizes)]


def _check_answers(store: Store, expected: Sequence[str], run: str) -> None:
    answers = [_get(store, f"membership/answer/{of}") for of in range(len(expected))]
    pairs = zip(answers, expected, strict=True)
    strangers = [of for of, (got, right) in enumerate(pairs) if not hmac.compare_digest(got, right)]
    if strangers:
        store.set("membership/vouched", _REFUSED)  # else the others would wait for it
        raise MembershipError(
            f"ranks {strangers} could not prove that they belong to {run}: they do not know the secret in "
            f"its run folder, and so are another user's or another attempt's"
        )


def _get(store: Store, key: str) -> str:
    text: str = store.get(key).decode("ascii", errors="backslashreplace")
    return text


def _name(attempt: Attempt) -> str:
    return "/".join(attempt.path.parts[-3:])


def _open_store(world_size: int, seconds: float, *, one_host: bool) -> tuple[TCPStore, dict[str, Any]]:
    if one_host:  # no other host can connect
        listener = socket.create_server((_LOOPBACK, 0))
        port = listener.getsockname()[1]
        store = _store(_LOOPBACK, port, world_size, seconds, listener=listener.detach())
        return store, {"host": _LOOPBACK, "port": port}
    host = reachable_name()
    store = _store(host, 0, world_size, seconds)  # on all interfaces
    return store, {"host": host, "port": store.port}


def _store(
    host: str,
    port: int,
    world_size: int,
    seconds: float,
    *,
    is_master: bool = True,
    listener: int | None = None,
) -> TCPStore:
    return TCPStore(
        host, port, world_size, is_master=is_master, timeout=timedelta(seconds=seconds),
        wait_for_workers=False, master_listen_fd=listener,
    )  # fmt: skip


def _read_when_there(published: Path, seconds: float) -> dict[str, Any]:
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    while not published.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 published no {published} within {seconds:.0f} s (rendezvous_minutes)")
        time.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_PAUSE_SECONDS)
    address: dict[str, Any] = json.loads(published.read_text())
    return address
