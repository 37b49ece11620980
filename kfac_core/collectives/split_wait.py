"""Waiting told apart from moving: every collective begins with a timed meeting of its ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kfac_core.collectives.communicator import Communicator, PendingCollective
from kfac_core.placement import Ranks


class SplitWait:
    """A communicator whose ranks meet before every collective; what that takes counts as waiting.

    The time until the last peer has arrived goes to `traffic.wait_seconds`; what a phase takes beyond it is
    moving bytes. The meeting is a barrier more for each collective, whose own latency is booked as waiting
    too: it is for measuring, not for runs whose seconds are to be compared with those of others. Nothing
    overlaps: what could begin early waits for its end to be asked for, and on a GPU the host waits for the
    work that is queued before it meets.

    Args:
        inner: carries the traffic, and counts it as if this were not there.
    """

    in_background = False

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.world_size, self.near = inner.rank, inner.world_size, inner.near
        self.traffic = inner.traffic
        self._everyone: Ranks = tuple(range(inner.world_size))
        self.traffic.wait_seconds = 0.0

    def prepare(self, groups: Sequence[Ranks], like: Tensor) -> None:
        """Handed on."""
        self._inner.prepare(groups, like)

    def all_reduce(self, buffer: Tensor) -> None:
        """Meet, then sum."""
        self._wait(self._everyone, buffer)
        self._inner.all_reduce(buffer)

    def begin_all_reduce(self, buffer: Tensor) -> PendingCollective:
        """Meet, then sum, all when the end is waited for."""
        return PendingCollective(partial(self.all_reduce, buffer))

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> PendingCollective:
        """Meet, then bring the parts together, all when the end is waited for."""

        def meet_and_reduce() -> None:
            self._wait(self._everyone, buffer)
            self._inner.reduce_parts(buffer, sizes)()

        return PendingCollective(meet_and_reduce)

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """Meet the group, then fetch all parts."""
        self._wait(group, buffer)
        self._inner.gather_parts(buffer, sizes, group)

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """Meet, then fetch."""
        self._wait(self._everyone, buffer)
        self._inner.broadcast(buffer, source)

    def apart(self) -> SplitWait:
        """Nothing overlaps here, so nothing mingles."""
        return self

    def meet(self, group: Ranks) -> None:
        """Waiting and nothing else; whoever asks for it has a clock of their own."""
        self._inner.meet(group)

    def _wait(self, group: Ranks, buffer: Tensor) -> None:
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()  # own work is no waiting for others
        began = time.perf_counter()
        self._inner.meet(group)
        waited = time.perf_counter() - began
        self.traffic.wait_seconds = (self.traffic.wait_seconds or 0.0) + waited
