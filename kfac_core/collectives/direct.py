"""Exchanges of parts over Gloo, from each rank straight to each other.

Gloo broadcasts along a binomial tree and reduces along a ring, a collective an owner, two of them at a time:
the owner of a part sends it once a level, and nobody forwards before all of it has arrived. Sent straight,
every wire carries what it must and no more, (P - 1) / P of an even buffer, and there is one round. Receives
are posted first: a peer's leave to send would otherwise queue behind this rank's own data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from kfac_core.collectives.communicator import Finish

_ROOM = 2**20  # elements that may be on their way to a rank at the same time, 4 MiB of float32
_LEAST_PIECE = 2**14


def gather_parts(parts: Sequence[Tensor], rank: int, peers: Sequence[int], group: dist.ProcessGroup) -> None:
    """Each rank has filled its part; afterwards every rank holds all of them.

    Args:
        parts: one a member of the group, by its rank there.
        rank: this one's, in the group.
        peers: the members' global ranks.
        group: what carries them.
    """
    receives = [_receive(parts[other], peers[other], group) for other in _others(rank, peers)]
    sends = [_send(parts[rank], peers[other], group) for other in _others(rank, peers)]
    _finish(receives + sends)


def reduce_parts(
    parts: Sequence[Tensor], rank: int, peers: Sequence[int], group: dist.ProcessGroup, tag: int
) -> Finish:
    """Begin to send all parts to their owners; what is returned ends with the others' sum in this rank's own.

    The neighbour's part lands in its place. Those of further ranks travel in pieces, the next ones arriving
    while these are added, in order of rank: room for a whole part from every peer would be as much memory
    again as the buffer.

    Args:
        parts: one a rank; those of the others are sent, this one's is written.
        rank: this one's, in the group.
        peers: the members' global ranks.
        group: what carries them.
        tag: tells exchanges apart that are under way together; the same on all ranks.
    """
    neighbour, *further = _others(rank, peers)
    length = max(_LEAST_PIECE, _ROOM // (2 * max(1, len(further))))
    own = parts[rank]
    pieces = own.split(length) if further and own.numel() else ()
    room = own.new_empty(2, len(further), min(length, own.numel()) if further else 0)

    def receive(turn: int) -> list[dist.Work | None]:
        places = room[turn % 2, :, : pieces[turn].numel()] if turn < len(pieces) else ()
        return [
            _receive(place, peers[other], group, tag) for place, other in zip(places, further, strict=False)
        ]

    landing, arriving = _receive(own, peers[neighbour], group, tag), receive(0)
    sends = [
        _send(piece, peers[other], group, tag)
        for other in (neighbour, *further)
        # this rank may be the neighbour of the other, who takes its part whole then
        for piece in parts[other].split(parts[other].numel() if (other + 1) % len(peers) == rank else length)
        if piece.numel()
    ]
    ascending = sorted(range(len(further)), key=further.__getitem__)

    def finish() -> None:
        nonlocal arriving
        _finish([landing])
        for turn, piece in enumerate(pieces):
            arrived, arriving = arriving, receive(turn + 1)
            for place in ascending:
                _finish([arrived[place]])
                piece.add_(room[turn % 2, place, : piece.numel()])
        _finish(sends)

    return finish


def _others(rank: int, peers: Sequence[int]) -> list[int]:
    """All but this one, beginning with its neighbour, so that not all ranks send to one at the same time."""
    return [(rank + step) % len(peers) for step in range(1, len(peers))]


def _send(part: Tensor, to: int, group: dist.ProcessGroup, tag: int = 0) -> dist.Work | None:
    return dist.isend(part, to, group=group, tag=tag) if part.numel() else None


def _receive(part: Tensor, source: int, group: dist.ProcessGroup, tag: int = 0) -> dist.Work | None:
    return dist.irecv(part, source, group=group, tag=tag) if part.numel() else None


def _finish(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
