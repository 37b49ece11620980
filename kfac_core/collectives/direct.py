"""Point-to-point exchange of parts on CPUs: each rank sends straight to each other rank.

Gloo broadcasts along a binomial tree and reduces along a ring, one collective per owner, two at a time. The
owner of a part sends it once per level of the tree, and no rank forwards before all of it has arrived.
Point to point takes one round, and each link carries only what it must, (P - 1) / P of an even buffer.
Receives are posted first: otherwise a peer's clear-to-send message would queue behind this rank's own data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from kfac_core.collectives.communicator import PendingCollective, Wait, no_wait

_RECEIVE_ELEMENTS = 2**20  # of all receive buffers of a rank together, 4 MiB of float32
_MIN_PIECE_ELEMENTS = 2**14


def gather_parts(
    parts: Sequence[Tensor], rank: int, members: Sequence[int], group: dist.ProcessGroup
) -> None:
    """All-gather: each rank has filled its part; afterwards every rank holds all of them.

    Args:
        parts: one per member, by rank in the group.
        rank: this rank in the group.
        members: global ranks of all members, by rank in the group.
        group: the process group that carries them.
    """
    others = _others(rank, members)
    receives = [_receive(parts[other], members[other], group) for other in others]
    sends = [_send(parts[rank], members[other], group) for other in others]
    _wait_all(receives)
    _wait_all(sends)


def reduce_parts(
    parts: Sequence[Tensor], rank: int, members: Sequence[int], group: dist.ProcessGroup, tag: int
) -> PendingCollective:
    """Start to send all parts to their owners; this rank's own part becomes the sum of the others'.

    The next rank's part is received in place. Those of further ranks travel in pieces: the next pieces are
    received while the current ones are added, in order of rank. A receive buffer for a whole part from every
    peer would need as much memory again as the buffer.

    Args:
        parts: one per rank; those of the others are sent, this rank's is written.
        rank: this rank in the group.
        members: global ranks of all members, by rank in the group.
        group: the process group that carries them.
        tag: distinguishes pending exchanges; the same on all ranks.
    """
    neighbour, *further = _others(rank, members)
    length = max(_MIN_PIECE_ELEMENTS, _RECEIVE_ELEMENTS // (2 * max(1, len(further))))
    own = parts[rank]
    pieces = own.split(length) if further and own.numel() else ()
    buffers = own.new_empty(2, len(further), min(length, own.numel()) if further else 0)  # double buffering

    def receive(turn: int) -> list[Wait]:
        targets = buffers[turn % 2, :, : pieces[turn].numel()] if turn < len(pieces) else ()
        return [
            _receive(target, members[other], group, tag)
            for target, other in zip(targets, further, strict=False)
        ]

    in_place, receiving = _receive(own, members[neighbour], group, tag), receive(0)
    sends = [
        _send(piece, members[other], group, tag)
        for other in (neighbour, *further)
        for piece in _pieces_to_send(parts[other], length, whole=(other + 1) % len(members) == rank)
    ]
    ascending = sorted(range(len(further)), key=further.__getitem__)

    def wait() -> None:
        nonlocal receiving
        in_place()
        for turn, piece in enumerate(pieces):
            received, receiving = receiving, receive(turn + 1)
            for index in ascending:
                received[index]()
                piece.add_(buffers[turn % 2, index, : piece.numel()])

    return PendingCollective(wait, partial(_wait_all, sends))


def _others(rank: int, members: Sequence[int]) -> list[int]:
    """All other ranks, starting with the next one, so that not all ranks send to the same one first."""
    return [(rank + step) % len(members) for step in range(1, len(members))]


def _pieces_to_send(part: Tensor, length: int, *, whole: bool) -> Sequence[Tensor]:
    """A part as it travels: `whole` to the rank that receives it in place."""
    return (part,) if whole else part.split(length)


def _send(part: Tensor, to: int, group: dist.ProcessGroup, tag: int = 0) -> Wait:
    """Start to send to a global rank; finished when the part may change again."""
    return partial(_wait_work, dist.isend(part, to, group=group, tag=tag)) if part.numel() else no_wait


def _receive(part: Tensor, source: int, group: dist.ProcessGroup, tag: int = 0) -> Wait:
    """Start to receive from a global rank; finished when the part has arrived."""
    return partial(_wait_work, dist.irecv(part, source, group=group, tag=tag)) if part.numel() else no_wait


def _wait_all(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()


def _wait_work(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
