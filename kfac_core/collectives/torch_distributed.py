"""Collectives over torch.distributed: NCCL on GPUs, Gloo on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_core.collectives import direct
from kfac_core.collectives.communicator import Finish
from kfac_core.placement import Ranks
from kfac_core.timer import Traffic

_TAGS = 1 << 16  # far more than exchanges under way


class TorchCommunicator:
    """A process group, with subgroups made on first use.

    Ranks are those inside the group; only here are they turned into torch.distributed's global ones.
    Parts are reduced or broadcast one flat buffer per owner, all in flight at once: the number of
    collectives of a call depends on the world and never on the number of layers, and uneven parts need no
    padding.
    Over Gloo parts go straight from rank to rank, see `kfac_core.collectives.direct`.

    Args:
        process_group: the ranks that work together, this one among them; None is the whole world.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        whole = process_group if process_group is not None else dist.group.WORLD
        assert whole is not None  # noqa: S101  torch.distributed is initialised
        self._all = whole
        self._gloo = "gloo" in dist.get_backend(whole)
        self._global_ranks = dist.get_process_group_ranks(self._all)
        self.rank = dist.get_rank(self._all)
        self.world_size = len(self._global_ranks)
        self.traffic = Traffic()
        self._timeout = _timeout(
            whole
        )  # else a new group waits for a lost peer as long as torch does by default
        self._tag = 0  # of the newest exchange that goes straight from rank to rank
        self._groups: dict[Ranks, dist.ProcessGroup] = {tuple(range(self.world_size)): self._all}

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum `buffer` over the world, in place."""
        self._count(buffer)
        dist.all_reduce(buffer, group=self._all)

    def begin_all_reduce(self, buffer: Tensor) -> Finish:
        """The same without waiting for it."""
        self._count(buffer)
        return partial(_wait, [dist.all_reduce(buffer, group=self._all, async_op=True)])

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> Finish:
        """One reduction a part, to its owner."""
        parts = buffer.split(list(sizes))
        for part in parts:
            if part.numel():
                self._count(part)
        if self._is_direct(buffer):
            self._tag = self._tag % _TAGS + 1
            return direct.reduce_parts(parts, self.rank, self._global_ranks, self._all, self._tag)
        parts[self.rank].zero_()
        works = []
        for owner, part in enumerate(parts):
            if part.numel():
                works.append(dist.reduce(part, self._global_ranks[owner], group=self._all, async_op=True))
        return partial(_wait, works)

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """One broadcast a part, from its owner."""
        process_group, parts = self._group(group), buffer.split(list(sizes))
        place, members = group.index(self.rank), [self._global_ranks[rank] for rank in group]
        if parts[place].numel():
            self._count(parts[place])
        if self._is_direct(buffer):
            direct.gather_parts(parts, place, members, process_group)
            return
        works = [
            dist.broadcast(part, source, group=process_group, async_op=True)
            for part, source in zip(parts, members, strict=True)
            if part.numel()
        ]
        _wait(works)

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """One broadcast over the world."""
        if source == self.rank:
            self._count(buffer)
        dist.broadcast(buffer, self._global_ranks[source], group=self._all)

    def apart(self) -> TorchCommunicator:
        """A process group of its own for the same ranks."""
        # Made by its members alone, a group is named after how many others each of them knows of, which need
        # not be the same on all; so the whole world makes it together.
        whole = self._all is dist.group.WORLD
        backend = dist.get_backend(self._all)
        made = dist.new_group(
            self._global_ranks,
            timeout=self._timeout,
            backend=backend,
            use_local_synchronization=not whole,
        )
        assert made is not None  # noqa: S101  this rank is a member
        if "nccl" in backend:
            dist.barrier(group=made)  # connected now, not in a hook that not all ranks may reach at once
        other = TorchCommunicator(made)
        other.traffic = self.traffic
        return other

    def meet(self, group: Ranks) -> None:
        """A barrier of the group."""
        dist.barrier(group=self._group(group))

    def _is_direct(self, buffer: Tensor) -> bool:
        return buffer.is_cpu and self._gloo

    def _group(self, ranks: Ranks) -> dist.ProcessGroup:
        if ranks not in self._groups:
            # Only the members take part, so thousands of ranks can make their rows and columns at once.
            members = [self._global_ranks[rank] for rank in ranks]
            made = dist.new_group(
                members,
                timeout=self._timeout,
                backend=dist.get_backend(self._all),
                use_local_synchronization=True,
            )
            assert made is not None  # noqa: S101  this rank is a member
            self._groups[ranks] = made
        return self._groups[ranks]

    def _count(self, buffer: Tensor) -> None:
        self.traffic.calls += 1
        self.traffic.sent_bytes += buffer.numel() * buffer.element_size()


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long the group waits for a lost peer; None where it does not say."""
    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    try:
        options = group._get_backend(device).options
    except (AttributeError, RuntimeError):  # torch's fake group has none
        return None
    return getattr(options, "_timeout", None)
