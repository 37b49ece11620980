"""Measures waiting apart from moving bytes: a timed barrier before every collective."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kfac_core.collectives.communicator import Communicator, PendingCollective
from kfac_core.placement import Ranks


class SplitWait:
    """A communicator with a barrier before every collective, whose time counts as waiting.

    The time until the last peer has arrived goes to `traffic.wait_seconds`; the rest of a phase is moving
    bytes. The extra barrier's own latency is booked as waiting too: use this to measure, not for runs whose
    seconds are compared with those of others. Nothing overlaps: a pending collective starts when it is waited
    for, and on a GPU the host waits for the queued work before the barrier.

    Args:
        inner: carries the traffic, and counts it as without this wrapper.
    """

    in_background = False

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.traffic = inner.traffic
        self._everyone: Ranks = tuple(range(inner.world_size))
        self.traffic.wait_seconds = 0.0

    def prepare(self, groups: Sequence[Ranks], like: Tensor) -> None:
        """Passed on."""
        self._inner.prepare(groups, like)

    def all_reduce(self, buffer: Tensor) -> None:
        """Barrier, then sum."""
        self._timed_barrier(self._everyone, buffer)
        self._inner.all_reduce(buffer)

    def all_reduce_async(self, buffer: Tensor) -> PendingCollective:
        """Barrier, then sum, both when waited for."""
        return PendingCollective(partial(self.all_reduce, buffer))

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> PendingCollective:
        """Barrier, then reduce, both when waited for."""

        def wait_and_reduce() -> None:
            self._timed_barrier(self._everyone, buffer)
            self._inner.reduce_parts(buffer, sizes)()

        return PendingCollective(wait_and_reduce)

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """Barrier of the group, then all-gather."""
        self._timed_barrier(group, buffer)
        self._inner.gather_parts(buffer, sizes, group)

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """Barrier, then broadcast."""
        self._timed_barrier(self._everyone, buffer)
        self._inner.broadcast(buffer, source)

    def duplicate(self) -> SplitWait:
        """This communicator: nothing overlaps, so nothing interleaves."""
        return self

    def barrier(self, group: Ranks) -> None:
        """A barrier that is not timed: the caller has its own clock."""
        self._inner.barrier(group)

    def _timed_barrier(self, group: Ranks, buffer: Tensor) -> None:
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()  # own queued work is not waiting for peers
        started = time.perf_counter()
        self._inner.barrier(group)
        waited = time.perf_counter() - started
        self.traffic.wait_seconds = (self.traffic.wait_seconds or 0.0) + waited
