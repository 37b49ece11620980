"""Exchanges of parts on CPUs, from each rank straight to each other.

Gloo broadcasts along a binomial tree and reduces along a ring, a collective an owner, two of them at a time:
the owner of a part sends it once a level, and nobody forwards before all of it has arrived. Sent straight,
every wire carries what it must and no more, (P - 1) / P of an even buffer, and there is one round. Receives
are posted first: a peer's leave to send would otherwise queue behind this rank's own data.

A peer on this host is told where its part lies, and copies it (`kfac_core.collectives.single_copy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor

from kfac_core.collectives.communicator import Finish, PendingCollective, nothing
from kfac_core.collectives.single_copy import PeerProcess
from kfac_core.kernels.scratch import scratch

_ROOM = 2**20  # elements that may be on their way to a rank at the same time, 4 MiB of float32
_LEAST_PIECE = 2**14
_CACHED = 2**16  # elements that are read from a peer on this host and added before they leave the cache
_ADDRESS, _RELEASED = 0, 1  # what peers on one host tell each other


@dataclass(frozen=True)
class Peer:
    """A member of a group.

    Attributes:
        rank: its global one.
        near: its process, where the two can read each other's memory.
    """

    rank: int
    near: PeerProcess | None = None


def gather_parts(parts: Sequence[Tensor], rank: int, peers: Sequence[Peer], group: dist.ProcessGroup) -> None:
    """Each rank has filled its part; afterwards every rank holds all of them.

    Args:
        parts: one a member of the group, by its rank there.
        rank: this one's, in the group.
        peers: the members.
        group: what carries them.
    """
    _begin_gather(parts, rank, peers, group)()


def reduce_parts(
    parts: Sequence[Tensor], rank: int, peers: Sequence[Peer], group: dist.ProcessGroup, tag: int
) -> PendingCollective:
    """Begin to send all parts to their owners; this rank's own ends as the sum of the others'.

    The neighbour's part lands in its place. Those of further ranks travel in pieces, the next ones arriving
    while these are added, in order of rank: room for a whole part from every peer would be as much memory
    again as the buffer. Peers on this host come last.

    Args:
        parts: one a rank; those of the others are sent, this one's is written.
        rank: this one's, in the group.
        peers: the members.
        group: what carries them.
        tag: tells exchanges apart that are under way together; the same on all ranks.
    """
    neighbour, *further = _others(rank, peers)
    length = max(_LEAST_PIECE, _ROOM // (2 * max(1, len(further))))
    own = parts[rank]
    far = [other for other in further if peers[other].near is None]
    pieces = own.split(length) if far and own.numel() else ()
    room = own.new_empty(2, len(far), min(length, own.numel()) if far else 0)

    def receive(turn: int) -> list[Finish]:
        places = room[turn % 2, :, : pieces[turn].numel()] if turn < len(pieces) else ()
        return [_receive(place, peers[other], group, tag) for place, other in zip(places, far, strict=False)]

    landing, arriving = _receive(own, peers[neighbour], group, tag), receive(0)
    sends = [
        _send(piece, peers[other], group, tag)
        for other in (neighbour, *further)
        for piece in _sent_as(parts[other], peers[other], length, whole=(other + 1) % len(peers) == rank)
    ]
    ascending = sorted(range(len(far)), key=far.__getitem__)

    def arrive() -> None:
        nonlocal arriving
        landing()
        for turn, piece in enumerate(pieces):
            arrived, arriving = arriving, receive(turn + 1)
            for place in ascending:
                arrived[place]()
                piece.add_(room[turn % 2, place, : piece.numel()])
        _add(own, [near for other in sorted(further) if (near := peers[other].near) is not None], tag)

    return PendingCollective(arrive, partial(_finish, sends))


def all_reduce(
    parts: Sequence[Tensor], rank: int, peers: Sequence[Peer], group: dist.ProcessGroup, tag: int
) -> PendingCollective:
    """Begin to sum all parts over ranks that all share a host; afterwards every rank holds all sums.

    Each rank adds up one part, its own share first, and fetches the others' sums. Arguments are those of
    `reduce_parts`.
    """
    others = _others(rank, peers)
    sends = [_send(parts[other], peers[other], group, tag) for other in others]
    released: list[Finish] = []

    def arrive() -> None:
        _add(parts[rank], [near for other in sorted(others) if (near := peers[other].near) is not None], tag)
        _finish(sends)
        gather = _begin_gather(parts, rank, peers, group)
        gather.arrive()
        released.append(gather.release)

    return PendingCollective(arrive, partial(_finish, released))


def _begin_gather(
    parts: Sequence[Tensor], rank: int, peers: Sequence[Peer], group: dist.ProcessGroup
) -> PendingCollective:
    """Begin what `gather_parts` does."""
    receives = [_receive(parts[other], peers[other], group) for other in _others(rank, peers)]
    sends = [_send(parts[rank], peers[other], group) for other in _others(rank, peers)]
    return PendingCollective(partial(_finish, receives), partial(_finish, sends))


def _others(rank: int, peers: Sequence[Peer]) -> list[int]:
    """All but this one, beginning with its neighbour, so that not all ranks send to one at the same time."""
    return [(rank + step) % len(peers) for step in range(1, len(peers))]


def _sent_as(part: Tensor, to: Peer, length: int, *, whole: bool) -> Sequence[Tensor]:
    """In what pieces a part travels: `whole` to the one whose neighbour this rank is, and on this host."""
    return (part,) if whole or to.near is not None else part.split(length)


def _send(part: Tensor, to: Peer, group: dist.ProcessGroup, tag: int = 0) -> Finish:
    """Begin to send; over when the part may change again."""
    if not part.numel():
        return nothing
    if to.near is None:
        return partial(_wait, dist.isend(part, to.rank, group=group, tag=tag))
    to.near.tell(tag, _ADDRESS, part.data_ptr())
    return partial(_released, to.near, tag, part)


def _receive(part: Tensor, source: Peer, group: dist.ProcessGroup, tag: int = 0) -> Finish:
    """Begin to receive; over when the part is there."""
    if not part.numel():
        return nothing
    if source.near is None:
        return partial(_wait, dist.irecv(part, source.rank, group=group, tag=tag))
    return partial(_copy, source.near, tag, part)


def _copy(near: PeerProcess, tag: int, out: Tensor) -> None:
    near.read(near.hear(tag, _ADDRESS), out)
    near.tell(tag, _RELEASED)


def _add(own: Tensor, peers: Sequence[PeerProcess], tag: int) -> None:
    """Add what peers on this host have for this rank's part, piece by piece, in their order."""
    if not own.numel():
        return
    addresses = [near.hear(tag, _ADDRESS) for near in peers]
    for index, piece in enumerate(own.split(_CACHED) if peers else ()):
        room, start = scratch(piece, piece.numel()), _CACHED * own.element_size() * index
        for near, address in zip(peers, addresses, strict=True):
            near.read(address + start, room)
            piece.add_(room)
    for near in peers:
        near.tell(tag, _RELEASED)


def _released(near: PeerProcess, tag: int, part: Tensor) -> None:
    """The part is handed over to be there until then."""
    near.hear(tag, _RELEASED)


def _finish(begun: Sequence[Finish]) -> None:
    for finish in begun:
        finish()


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
