"""Collectives over torch.distributed: NCCL on GPUs, Gloo on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from kfac_core.placement import Ranks
from kfac_core.timer import Traffic


class TorchCommunicator:
    """The default process group, with subgroups made on first use.

    Parts are reduced or broadcast one flat buffer per owner, all in flight at once: the number of
    collectives depends on the world and never on the number of layers, and uneven parts need no padding.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.traffic = Traffic()
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {tuple(range(self.world_size)): None}

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum `buffer` over the world, in place."""
        self._count(buffer)
        dist.all_reduce(buffer)

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> None:
        """One reduction a part, to its owner."""
        works = []
        for owner, part in enumerate(buffer.split(list(sizes))):
            if part.numel():
                self._count(part)
                works.append(dist.reduce(part, owner, async_op=True))
        _wait(works)

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """One broadcast a part, from its owner."""
        process_group = self._group(group)
        works = []
        for owner, part in zip(group, buffer.split(list(sizes)), strict=True):
            if part.numel():
                if owner == self.rank:
                    self._count(part)
                works.append(dist.broadcast(part, owner, group=process_group, async_op=True))
        _wait(works)

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """One broadcast over the world."""
        if source == self.rank:
            self._count(buffer)
        dist.broadcast(buffer, source)

    def _group(self, ranks: Ranks) -> dist.ProcessGroup | None:
        if ranks not in self._groups:
            # Only the members take part, so thousands of ranks can make their rows and columns at once.
            self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[ranks]

    def _count(self, buffer: Tensor) -> None:
        self.traffic.calls += 1
        self.traffic.sent_bytes += buffer.numel() * buffer.element_size()


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
