"""Communication between ranks of one host by reading each other's memory (cross-memory attach).

Gloo copies data between two processes of a host into the kernel and out again, in pieces, by threads that
wake each other. `process_vm_readv` copies it once, from the peer's buffer into this rank's, as MPI libraries
do. Two ranks synchronise over a Unix socket: its messages wake the waiting thread, and its end reports a lost
peer.

Nothing of it is left behind in a file system. A kernel may refuse it (containers, Yama), so ranks try it on
each other before they rely on it, and Gloo carries what is refused. The site profile's `single_copy` turns it
on or off, and `ptrace_any` lifts Yama's restriction.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import select
import socket
import struct
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
_NAMESPACES = ("pid", "net")  # of process ids, and of the names of sockets

_MESSAGE = struct.Struct("qqq")  # tag, subject, value
_CREDENTIALS = struct.Struct("iII")  # process, user, group


class PeerProcess:
    """Another rank's process on this host (`kfac_core.collectives.PeerMemory`).

    Messages are matched by tag and subject, and kept until they are received.

    Args:
        rank: its rank, for messages.
        pid: its process id.
        connection: a stream socket to it; closed with this object.
        seconds: how long to wait for a message; None waits for ever.
    """

    def __init__(self, rank: int, pid: int, connection: socket.socket, seconds: float | None) -> None:
        self._rank, self._pid, self._connection = rank, pid, connection
        self._connection.setblocking(False)
        self._seconds = math.inf if seconds is None else seconds
        self._inbox: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self._partial = b""  # message

    def __del__(self) -> None:
        """A peer that still waits then reads the end of the stream."""
        self._connection.close()

    def send(self, tag: int, subject: int, value: int = 0) -> None:
        """Send a message; its errors are those of `receive`."""
        message = _MESSAGE.pack(tag, subject, value)
        while message:
            try:
                message = message[self._connection.send(message) :]
            except BlockingIOError:
                # The peer may be sending too, and receive nothing before it is done.
                self._wait(select.POLLIN | select.POLLOUT)

    def receive(self, tag: int, subject: int) -> int:
        """Wait for a message and return its value.

        Raises:
            ConnectionError: the process is gone.
            TimeoutError: it has been silent for too long.
        """
        wanted = self._inbox[tag, subject]
        while not wanted:
            self._wait(select.POLLIN)
        value = wanted.popleft()
        if not wanted:
            del self._inbox[tag, subject]
        return value

    def read(self, address: int, out: Tensor) -> None:
        """Fill contiguous `out` from what begins at `address` in the process.

        Raises:
            ConnectionError: the process is gone.
        """
        try:
            read(self._pid, address, out)
        except OSError as error:
            raise ConnectionError(f"remote peer: {self} cannot be read: {error.strerror}") from error

    def _wait(self, events: int) -> None:
        """Wait until a message can be sent (if `events` ask for that) or until messages have arrived."""
        poll = select.poll()
        poll.register(self._connection, events)
        happened = poll.poll(None if math.isinf(self._seconds) else math.ceil(1000 * self._seconds))
        if not happened:
            raise TimeoutError(f"recv timed out: {self} was silent for {self._seconds:g} s")
        if happened[0][1] & ~select.POLLOUT:
            received = self._connection.recv(64 * _MESSAGE.size)
            if not received:
                raise ConnectionError(f"connection closed by peer: {self} is gone")
            self._partial += received
            whole = len(self._partial) - len(self._partial) % _MESSAGE.size
            for tag, subject, value in _MESSAGE.iter_unpack(self._partial[:whole]):
                self._inbox[tag, subject].append(value)
            self._partial = self._partial[whole:]

    def __str__(self) -> str:
        """For error messages."""
        return f"rank {self._rank}, process {self._pid} on this host,"


def find_readable_peers(
    group: dist.ProcessGroup, seconds: float | None, *, ptrace_any: bool = False
) -> tuple[dict[int, PeerProcess], bool]:
    """Members of a Gloo group that can read this rank's memory and be read by it (`PeerFinder`).

    Every member calls it at the same time.

    Args:
        group: of any size and on any hosts.
        seconds: how long to wait for a silent peer later on; None waits for ever.
        ptrace_any: where Yama lets only parents read a process, allow every process of this user to read this
            one, as MPI libraries do (`PR_SET_PTRACER_ANY`).

    Returns:
        The peers by rank in the group, and whether every member reads all others (the same on all members).
    """
    rank, size, ranks = dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)
    own = torch.tensor([_host(), os.getpid(), 0, secrets.randbits(62)])
    own[2] = own.data_ptr()
    listener = _listening(own, size, ptrace_any=ptrace_any) if own[0] else None
    cards = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(cards, own, group=group)
    allowed = all(bool(card[0]) for card in cards)
    sees = [allowed and other != rank and _shows(card, own) for other, card in enumerate(cards)]
    found: dict[int, socket.socket] = {}
    for other in range(rank + 1, size):
        if sees[other] and (connection := _reached(cards[other], rank)) is not None:
            found[other] = connection
        sees[other] = other in found
    rows = [torch.empty(size, dtype=torch.bool) for _ in ranks]
    dist.all_gather(rows, torch.tensor(sees), group=group)
    del own  # all have tried to read it
    matrix = torch.stack(rows)
    both = matrix & matrix.T
    mutual = both[rank].nonzero().flatten().tolist()
    if listener is not None:
        while not found.keys() >= set(mutual):  # lower ranks have all connected already
            found |= _accepted(listener, cards)
        listener.close()
    peers = {
        other: PeerProcess(ranks[other], int(cards[other][1]), found.pop(other), seconds) for other in mutual
    }
    for connection in found.values():
        connection.close()
    return peers, int(both.sum()) == size * (size - 1)


def read(pid: int, address: int, out: Tensor) -> None:
    """Fill contiguous `out` from the memory of process `pid` that begins at `address`.

    Raises:
        OSError: the process is gone, may not be read, or has nothing there.
    """
    done, size = 0, out.numel() * out.element_size()
    while done < size:  # one call moves 2 GiB at most
        here = _Segment(out.data_ptr() + done, size - done)
        there = _Segment(address + done, size - done)
        moved = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if moved <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += moved


class _Segment(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _host() -> int:
    """A number for this kernel and its process and network namespaces; 0 where they cannot be read."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
        names = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in _NAMESPACES]
    except OSError:
        return 0
    return zlib.crc32(f"{kernel}{names}".encode()) + 1


def _listening(card: Tensor, size: int, *, ptrace_any: bool) -> socket.socket:
    """A socket that up to `size` peers can connect to, under a name without a file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_name(card))
    listener.listen(size)
    if ptrace_any and _YAMA.exists() and _YAMA.read_text().strip() == "1":
        _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    return listener


def _shows(card: Tensor, own: Tensor) -> bool:
    """Whether the memory at the address that a card names holds that card."""
    if card[0] != own[0]:
        return False
    seen = torch.zeros_like(card)
    try:
        read(int(card[1]), int(card[2]), seen)
    except (OSError, AttributeError):  # refused, or a system without the call
        return False
    return torch.equal(seen, card)


def _reached(card: Tensor, rank: int) -> socket.socket | None:
    """Connect to the process that listens under this card, and send it this rank."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_name(card))
        connection.send(_MESSAGE.pack(rank, 0, 0))
    except OSError:
        connection.close()
        return None
    return connection


def _accepted(listener: socket.socket, cards: Sequence[Tensor]) -> dict[int, socket.socket]:
    """Accept the next connection, by the peer's rank; a process that is no peer is rejected."""
    connection, _ = listener.accept()
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, *_ = _CREDENTIALS.unpack(credentials)
    if pid not in {int(card[1]) for card in cards}:
        connection.close()
        return {}
    rank, *_ = _MESSAGE.unpack(connection.recv(_MESSAGE.size))
    return {rank: connection}


def _name(card: Tensor) -> str:
    return f"\0kfac-{int(card[3]):x}"


_libc: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
