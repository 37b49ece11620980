"""Collectives over torch.distributed: NCCL on GPUs, Gloo on CPUs.

On CPUs parts go point to point: each rank sends straight to each other rank. Gloo broadcasts along a binomial
tree and reduces along a ring, one collective per owner, two at a time. The owner of a part sends it once per
level of the tree, and no rank forwards before all of it has arrived. Point to point takes one round, and each
link carries only what it must, (P - 1) / P of an even buffer. Receives are posted first: otherwise a peer's
clear-to-send message would queue behind this rank's own data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from kfac_core.collectives.communicator import PendingCollective, Wait, no_wait
from kfac_core.placement import Ranks
from kfac_core.timing import Traffic

_TAGS = 1 << 16  # far more than exchanges under way
_RECEIVE_ELEMENTS = 2**20  # of all receive buffers of a rank together, 4 MiB of float32
_MIN_PIECE_ELEMENTS = 2**14


_SPARE: dict[dist.ProcessGroup, list[dist.ProcessGroup]] = {}
"""Process groups of duplicates that were closed, by the group that they duplicate."""


class TorchCommunicator:
    """A process group, and subgroups of it.

    Ranks are those inside the group; only here are they turned into torch.distributed's global ones.
    Parts are reduced or broadcast one flat buffer per owner, all in flight at once: the number of
    collectives of a call depends on the world and never on the number of layers, and uneven parts need no
    padding.
    Over Gloo parts go straight from rank to rank.

    Args:
        process_group: the ranks that work together, this one among them; None is the whole world.
    """

    in_background = True

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        whole = process_group if process_group is not None else dist.group.WORLD
        assert whole is not None  # noqa: S101  torch.distributed is initialised
        self._all = whole
        self._gloo = backend_on("cpu", whole) == "gloo"
        self._global_ranks = dist.get_process_group_ranks(self._all)
        self.rank = dist.get_rank(self._all)
        self.world_size = len(self._global_ranks)
        self.traffic = Traffic()
        self._timeout = _timeout(whole)  # else a new group waits for a lost peer as long as torch's default
        self._device: torch.device | None = None
        self._duplicate_of: dist.ProcessGroup | None = None
        self._tag = 0  # of the newest exchange that goes straight from rank to rank
        self._groups: dict[Ranks, dist.ProcessGroup] = {tuple(range(self.world_size)): self._all}

    def prepare(self, groups: Sequence[Ranks], like: Tensor) -> None:
        """Make the groups, but for Gloo's direct exchanges, which need none, and connect their members.

        NCCL would connect them in the first collective, inside a step that is measured.

        A group that its members make by themselves is named after the number of groups that each of them
        knows of. It need not be the same on all, who would wait for each other under different names; so all
        ranks make all groups in one order.
        """
        self._device = like.device
        for ranks in () if self._is_direct(like) else groups:
            made = self._made([self._global_ranks[rank] for rank in ranks], member=self.rank in ranks)
            if made is not None:
                self._groups[ranks] = made
        if self._is_grouped(like):
            for group in self._groups.values():  # in one order on all ranks: whole, column, row
                dist.all_reduce(like.new_zeros(1), group=group)

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum `buffer` over the world, in place."""
        self.all_reduce_async(buffer)()

    def all_reduce_async(self, buffer: Tensor) -> PendingCollective:
        """The same without waiting for it."""
        self._count(buffer)
        return PendingCollective(partial(_wait, [dist.all_reduce(buffer, group=self._all, async_op=True)]))

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> PendingCollective:
        """One reduction a part, to its owner."""
        parts = buffer.split(list(sizes))
        for part in parts:
            if part.numel():
                self._count(part)
        if self._is_direct(buffer):
            return _reduce_directly(parts, self.rank, self._global_ranks, self._all, self._next_tag())
        parts[self.rank].zero_()

        def reduce(owner: int, part: Tensor) -> dist.Work | None:
            work: dist.Work | None = dist.reduce(
                part, self._global_ranks[owner], group=self._all, async_op=True
            )
            return work

        return PendingCollective(partial(_wait, self._started(reduce, parts, self._all)))

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """One broadcast a part, from its owner."""
        parts, place = buffer.split(list(sizes)), group.index(self.rank)
        if parts[place].numel():
            self._count(parts[place])
        members = [self._global_ranks[rank] for rank in group]
        if self._is_direct(buffer):
            _gather_directly(parts, place, members, self._all)
            return

        def broadcast(place: int, part: Tensor) -> dist.Work | None:
            work: dist.Work | None = dist.broadcast(
                part, members[place], group=self._groups[group], async_op=True
            )
            return work

        _wait(self._started(broadcast, parts, self._groups[group]))

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """One broadcast over the world."""
        if source == self.rank:
            self._count(buffer)
        dist.broadcast(buffer, self._global_ranks[source], group=self._all)

    def duplicate(self) -> TorchCommunicator:
        """A process group of its own for the same ranks."""
        spare = _SPARE.get(self._all)
        made = spare.pop() if spare else self._made(self._global_ranks, member=True)
        assert made is not None  # noqa: S101  this rank is a member
        other = TorchCommunicator(made)
        other._duplicate_of = self._all
        if self._device is not None:  # connected now, not in a hook that not all ranks may reach at once
            other.prepare((), torch.empty(0, device=self._device))
        other.traffic = self.traffic
        return other

    def close(self) -> None:
        """Keep the process group for the next duplicate: its ranks need not find each other again."""
        if self._duplicate_of is not None:
            _SPARE.setdefault(self._duplicate_of, []).append(self._all)

    def barrier(self, group: Ranks) -> None:
        """A barrier of the group; over Gloo a word from each member to each other.

        On a GPU the host waits too: a collective by itself is only queued on the stream.
        """
        if self._gloo:
            words, members = torch.zeros(len(group)).split(1), [self._global_ranks[rank] for rank in group]
            _gather_directly(words, group.index(self.rank), members, self._all)
        elif self._device is not None and self._device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._groups[group])
            torch.cuda.current_stream(self._device).synchronize()
        else:
            dist.barrier(group=self._groups[group])

    def _started(
        self,
        start: Callable[[int, Tensor], dist.Work | None],
        parts: Sequence[Tensor],
        group: dist.ProcessGroup,
    ) -> Sequence[dist.Work | None]:
        """Start a collective for each part that is not empty; over NCCL all of them as one operation.

        One by one each would be a launch on the communicator's stream, and each would wait for the one
        before.
        """
        filled = [(place, part) for place, part in enumerate(parts) if part.numel()]
        if not (filled and self._is_grouped(parts[0])):
            return [start(place, part) for place, part in filled]
        with _coalescing_manager(group, parts[0].device, async_ops=True) as together:
            for place, part in filled:
                start(place, part)
        works: Sequence[dist.Work | None] = together.works
        return works

    def _is_grouped(self, buffer: Tensor) -> bool:
        """Whether collectives on such a buffer can be issued as one; a fake world does as NCCL does."""
        return backend_on(buffer.device.type, self._all) in ("nccl", "fake")

    def _next_tag(self) -> int:
        self._tag = self._tag % _TAGS + 1
        return self._tag

    def _is_direct(self, buffer: Tensor) -> bool:
        return buffer.is_cpu and self._gloo

    def _made(self, members: list[int], *, member: bool) -> dist.ProcessGroup | None:
        """A new group of these global ranks; None on a rank that is no member of it."""
        whole = self._all is dist.group.WORLD  # else ranks outside are not here to take part
        if not (whole or member):
            return None
        made = dist.new_group(
            members,
            timeout=self._timeout,
            backend=None if whole else dist.get_backend_config(self._all),
            use_local_synchronization=not whole,
        )
        return made if member else None

    def _count(self, buffer: Tensor) -> None:
        self.traffic.calls += 1
        self.traffic.sent_bytes += buffer.numel() * buffer.element_size()


def backend_on(device: str, group: dist.ProcessGroup | None = None) -> str:
    """The backend that carries tensors of a kind of device, such as `nccl`; empty if none does.

    Without a name, `init_process_group()` makes a group whose own backend is `undefined`.
    """
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {pair[0]: pair[-1] for pair in pairs}.get(device, "")


def _gather_directly(
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


def _reduce_directly(
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
    return partial(_wait, [dist.isend(part, to, group=group, tag=tag)]) if part.numel() else no_wait


def _receive(part: Tensor, source: int, group: dist.ProcessGroup, tag: int = 0) -> Wait:
    """Start to receive from a global rank; finished when the part has arrived."""
    return partial(_wait, [dist.irecv(part, source, group=group, tag=tag)]) if part.numel() else no_wait


def _wait_all(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long the group waits for a lost peer; None where it does not say."""
    device = torch.device("cuda" if backend_on("cuda", group) == "nccl" else "cpu")
    try:
        options = group._get_backend(device).options
    except (AttributeError, RuntimeError):  # torch's fake group has none
        return None
    return getattr(options, "_timeout", None)
