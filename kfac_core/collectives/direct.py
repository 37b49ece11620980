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


def reduce_parts(parts: Sequence[Tensor], rank: int, peers: Sequence[int], group: dist.ProcessGroup) -> None:
    """Sum over all ranks; afterwards each rank's own part holds the sum, added in order of rank.

    Parts travel in pieces, the next ones arriving while these are added: room for a whole part from every
    peer would be as much memory again as the buffer.
    """
    others = _others(rank, peers)
    length = max(_LEAST_PIECE, _ROOM // (2 * len(others)))
    own, *rest = [parts[r].split(length) if parts[r].numel() else () for r in (rank, *others)]
    room = parts[rank].new_empty(2, len(others), min(length, parts[rank].numel()))

    def receive(turn: int) -> list[dist.Work | None]:
        places = room[turn % 2, :, : own[turn].numel()] if turn < len(own) else ()
        return [_receive(place, peers[other], group) for place, other in zip(places, others, strict=False)]

    arriving = receive(0)
    sends = [
        _send(piece, peers[other], group)
        for pieces, other in zip(rest, others, strict=True)
        for piece in pieces
    ]
    ascending = sorted(range(len(others)), key=others.__getitem__)
    for turn, piece in enumerate(own):
        arrived, arriving = arriving, receive(turn + 1)
        for place in ascending:
            _finish([arrived[place]])
            piece.add_(room[turn % 2, place, : piece.numel()])
    _finish(sends)


def _others(rank: int, peers: Sequence[int]) -> list[int]:
    """All but this one, beginning with its neighbour, so that not all ranks send to one at the same time."""
    return [(rank + step) % len(peers) for step in range(1, len(peers))]


def _send(part: Tensor, to: int, group: dist.ProcessGroup) -> dist.Work | None:
    return dist.isend(part, to, group=group) if part.numel() else None


def _receive(part: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work | None:
    return dist.irecv(part, source, group=group) if part.numel() else None


def _finish(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
