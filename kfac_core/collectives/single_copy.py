"""Exchanging with ranks on this host by reading their memory.

What Gloo moves between two processes of a host is copied into the kernel and out of it again, in pieces, by
threads that wake each other. `process_vm_readv` copies once, out of the peer's buffer into this rank's; MPI
libraries call it cross-memory attach. Two ranks agree on when over a Unix socket of their own: its messages
wake the thread that waits for them, and its end tells of a lost peer at once.

Nothing of it is left behind in a file system. A kernel may refuse it (containers, Yama), so ranks try it on
each other before they count on it. `KFAC_SINGLE_COPY=0` in the environment leaves everything to Gloo.
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

OFF = "KFAC_SINGLE_COPY"  # in the environment, 0 where ranks are to exchange as if on hosts of their own

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
_NAMESPACES = ("pid", "net")  # of process ids, and of the names of sockets

_MESSAGE = struct.Struct("qqq")  # tag, subject, value
_CREDENTIALS = struct.Struct("iII")  # process, user, group


class PeerProcess:
    """Another rank's process on this host.

    Messages are told apart by a tag and a subject, and kept until they are asked for.

    Args:
        rank: the process's, for people.
        pid: the process.
        connection: to it, a stream; closed with this.
        seconds: that it may be silent when something is expected of it; None is for ever.
    """

    def __init__(self, rank: int, pid: int, connection: socket.socket, seconds: float | None) -> None:
        self._rank, self._pid, self._connection = rank, pid, connection
        self._connection.setblocking(False)
        self._seconds = math.inf if seconds is None else seconds
        self._inbox: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self._begun = b""  # of a message

    def __del__(self) -> None:
        """The peer reads an end, should it still wait."""
        self._connection.close()

    def tell(self, tag: int, subject: int, value: int = 0) -> None:
        """Send a message; its errors are those of `hear`."""
        message = _MESSAGE.pack(tag, subject, value)
        while message:
            try:
                message = message[self._connection.send(message) :]
            except BlockingIOError:
                # The peer may be telling, too, and hear nothing before it is through.
                self._wait(select.POLLIN | select.POLLOUT)

    def hear(self, tag: int, subject: int) -> int:
        """Wait for a message; its value.

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
        """Return when there is room to tell, if that is among the events, or after taking what has come."""
        poll = select.poll()
        poll.register(self._connection, events)
        happened = poll.poll(None if math.isinf(self._seconds) else math.ceil(1000 * self._seconds))
        if not happened:
            raise TimeoutError(f"recv timed out: {self} was silent for {self._seconds:g} s")
        if happened[0][1] & ~select.POLLOUT:
            received = self._connection.recv(64 * _MESSAGE.size)
            if not received:
                raise ConnectionError(f"connection closed by peer: {self} is gone")
            self._begun += received
            whole = len(self._begun) - len(self._begun) % _MESSAGE.size
            for tag, subject, value in _MESSAGE.iter_unpack(self._begun[:whole]):
                self._inbox[tag, subject].append(value)
            self._begun = self._begun[whole:]

    def __str__(self) -> str:
        """As an error names it."""
        return f"rank {self._rank}, process {self._pid} on this host,"


def find_readable_peers(
    group: dist.ProcessGroup, seconds: float | None
) -> tuple[dict[int, PeerProcess], bool]:
    """Members of a Gloo group that can read this one and be read by it, by their rank in the group.

    Every member calls it at the same time. There are none on all of them where one has switched it off.

    Args:
        group: of any size and on any hosts.
        seconds: to wait for a peer that does not answer, later on; None is for ever.

    Returns:
        Them, and whether every member has all others, which all say alike.
    """
    rank, size, ranks = dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)
    own = torch.tensor([_host(), os.getpid(), 0, secrets.randbits(62)])
    own[2] = own.data_ptr()
    listener = _listening(own, size) if own[0] else None
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
    near = {
        other: PeerProcess(ranks[other], int(cards[other][1]), found.pop(other), seconds) for other in mutual
    }
    for connection in found.values():
        connection.close()
    return near, int(both.sum()) == size * (size - 1)


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
    """A number for this kernel and its names of processes and sockets; 0 where nobody is to be read."""
    if os.environ.get(OFF) == "0":
        return 0
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
        names = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in _NAMESPACES]
    except OSError:
        return 0
    return zlib.crc32(f"{kernel}{names}".encode()) + 1


def _listening(card: Tensor, size: int) -> socket.socket:
    """Where as many as `size` peers can connect, under a name without a file; lets them read this process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_name(card))
    listener.listen(size)
    if _YAMA.exists() and _YAMA.read_text().strip() == "1":
        # Only parents may read a process, unless it agrees to more: all of this user's, as for MPI libraries.
        _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    return listener


def _shows(card: Tensor, own: Tensor) -> bool:
    """Whether the memory that a card names holds that card."""
    if card[0] != own[0]:
        return False
    seen = torch.zeros_like(card)
    try:
        read(int(card[1]), int(card[2]), seen)
    except (OSError, AttributeError):  # refused, or a system without the call
        return False
    return torch.equal(seen, card)


def _reached(card: Tensor, rank: int) -> socket.socket | None:
    """A connection to the one that listens under this card, who is told whose it is."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_name(card))
        connection.send(_MESSAGE.pack(rank, 0, 0))
    except OSError:
        connection.close()
        return None
    return connection


def _accepted(listener: socket.socket, cards: Sequence[Tensor]) -> dict[int, socket.socket]:
    """The connection of the next peer that has made one, by its rank; another process is turned away."""
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
