"""Point-to-point exchange of parts on CPUs: each rank sends straight to each other rank.

Gloo broadcasts along a binomial tree and reduces along a ring, one collective per owner, two at a time. The
owner of a part sends it once per level of the tree, and no rank forwards before all of it has arrived.
Point to point takes one round, and each link carries only what it must, (P - 1) / P of an even buffer.
Receives are posted first: otherwise a peer's clear-to-send message would queue behind this rank's own data.

A peer on the same host receives the address of its part and copies it (`peer_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor

from kfac_core.collectives.communicator import PendingCollective, Wait, no_wait
from kfac_core.collectives.peer_memory import PeerMemory
from kfac_core.matmul import scratch

_RECEIVE_ELEMENTS = 2**20  # of all receive buffers of a rank together, 4 MiB of float32
_MIN_PIECE_ELEMENTS = 2**14
_CACHED_ELEMENTS = 2**16  # read from a peer on this host and added before they leave the cache
_ADDRESS, _RELEASED = 0, 1  # subjects of the messages between peers on one host


@dataclass(frozen=True)
class Peer:
    """A member of a group.

    Attributes:
        rank: its global rank.
        process: its process, where the two can read each other's memory.
    """

    rank: int
    process: PeerMemory | None = None


def gather_parts(parts: Sequence[Tensor], rank: int, peers: Sequence[Peer], group: dist.ProcessGroup) -> None:
    """All-gather: each rank has filled its part; afterwards every rank holds all of them.

    Args:
        parts: one per member, by rank in the group.
        rank: this rank in the group.
        peers: all members, by rank in the group.
        group: the process group that carries them.
    """
    _start_gather(parts, rank, peers, group)()


def reduce_parts(
    parts: Sequence[Tensor], rank: int, peers: Sequence[Peer], group: dist.ProcessGroup, tag: int
) -> PendingCollective:
    """Start to send all parts to their owners; this rank's own part becomes the sum of the others'.

    The next rank's part is received in place. Those of further ranks travel in pieces: the next pieces are
    received while the current ones are added, in order of rank. A receive buffer for a whole part from every
    peer would need as much memory again as the buffer. Peers on this host are added last.

    Args:
        parts: one per rank; those of the others are sent, this rank's is written.
        rank: this rank in the group.
        peers: all members, by rank in the group.
        group: the process group that carries them.
        tag: distinguishes pending exchanges; the same on all ranks.
    """
    neighbour, *further = _others(rank, peers)
    length = max(_MIN_PIECE_ELEMENTS, _RECEIVE_ELEMENTS // (2 * max(1, len(further))))
    own = parts[rank]
    remote = [other for other in further if peers[other].process is None]
    pieces = own.split(length) if remote and own.numel() else ()
    buffers = own.new_empty(2, len(remote), min(length, own.numel()) if remote else 0)  # double buffering

    def receive(turn: int) -> list[Wait]:
        targets = buffers[turn % 2, :, : pieces[turn].numel()] if turn < len(pieces) else ()
        return [
            _receive(target, peers[other], group, tag) for target, other in zip(targets, remote, strict=False)
        ]

    in_place, receiving = _receive(own, peers[neighbour], group, tag), receive(0)
    sends = [
        _send(piece, peers[other], group, tag)
        for other in (neighbour, *further)
        for piece in _pieces_to_send(
            parts[other], peers[other], length, whole=(other + 1) % len(peers) == rank
        )
    ]
    ascending = sorted(range(len(remote)), key=remote.__getitem__)

    def wait() -> None:
        nonlocal receiving
        in_place()
        for turn, piece in enumerate(pieces):
            received, receiving = receiving, receive(turn + 1)
            for index in ascending:
                received[index]()
                piece.add_(buffers[turn % 2, index, : piece.numel()])
        _add(own, _processes(sorted(further), peers), tag)

    return PendingCollective(wait, partial(_wait_all, sends))


def all_reduce(
    parts: Sequence[Tensor], rank: int, peers: Sequence[Peer], group: dist.ProcessGroup, tag: int
) -> PendingCollective:
    """Start to sum all parts over ranks that all share a host; afterwards every rank holds all sums.

    Each rank sums one part, its own share first, and fetches the others' sums. Arguments are those of
    `reduce_parts`.
    """
    others = _others(rank, peers)
    sends = [_send(parts[other], peers[other], group, tag) for other in others]
    releases: list[Wait] = []

    def wait() -> None:
        _add(parts[rank], _processes(sorted(others), peers), tag)
        _wait_all(sends)
        gather = _start_gather(parts, rank, peers, group)
        gather.wait()
        releases.append(gather.release)

    return PendingCollective(wait, partial(_wait_all, releases))


def _start_gather(
    parts: Sequence[Tensor], rank: int, peers: Sequence[Peer], group: dist.ProcessGroup
) -> PendingCollective:
    receives = [_receive(parts[other], peers[other], group) for other in _others(rank, peers)]
    sends = [_send(parts[rank], peers[other], group) for other in _others(rank, peers)]
    return PendingCollective(partial(_wait_all, receives), partial(_wait_all, sends))


def _others(rank: int, peers: Sequence[Peer]) -> list[int]:
    """All other ranks, starting with the next one, so that not all ranks send to the same one first."""
    return [(rank + step) % len(peers) for step in range(1, len(peers))]


def _processes(ranks: Sequence[int], peers: Sequence[Peer]) -> list[PeerMemory]:
    """Those of the ranks that are on this host."""
    return [process for rank in ranks if (process := peers[rank].process) is not None]


def _pieces_to_send(part: Tensor, to: Peer, length: int, *, whole: bool) -> Sequence[Tensor]:
    """A part as it travels: `whole` to a rank that receives it in place, and to one on this host."""
    return (part,) if whole or to.process is not None else part.split(length)


def _send(part: Tensor, to: Peer, group: dist.ProcessGroup, tag: int = 0) -> Wait:
    """Start to send; finished when the part may change again."""
    if not part.numel():
        return no_wait
    if to.process is None:
        return partial(_wait_work, dist.isend(part, to.rank, group=group, tag=tag))
    to.process.send(tag, _ADDRESS, part.data_ptr())
    return partial(_wait_released, to.process, tag, part)


def _receive(part: Tensor, source: Peer, group: dist.ProcessGroup, tag: int = 0) -> Wait:
    """Start to receive; finished when the part has arrived."""
    if not part.numel():
        return no_wait
    if source.process is None:
        return partial(_wait_work, dist.irecv(part, source.rank, group=group, tag=tag))
    return partial(_copy, source.process, tag, part)


def _copy(process: PeerMemory, tag: int, out: Tensor) -> None:
    process.read(process.receive(tag, _ADDRESS), out)
    process.send(tag, _RELEASED)


def _add(own: Tensor, processes: Sequence[PeerMemory], tag: int) -> None:
    """Add this rank's part of each of these processes, piece by piece, in this order."""
    if not own.numel():
        return
    addresses = [process.receive(tag, _ADDRESS) for process in processes]
    for index, piece in enumerate(own.split(_CACHED_ELEMENTS) if processes else ()):
        buffer, start = scratch(piece, piece.numel()), _CACHED_ELEMENTS * own.element_size() * index
        for process, address in zip(processes, addresses, strict=True):
            process.read(address + start, buffer)
            piece.add_(buffer)
    for process in processes:
        process.send(tag, _RELEASED)


def _wait_released(process: PeerMemory, tag: int, part: Tensor) -> None:
    """Wait until the peer has read `part`, which is an argument so that its memory stays allocated."""
    process.receive(tag, _RELEASED)


def _wait_all(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()


def _wait_work(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
