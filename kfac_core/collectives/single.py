"""The communicator of a world of one rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kfac_core.collectives.communicator import PendingCollective, no_wait
from kfac_core.placement import Ranks
from kfac_core.timing.timer import Traffic


class SingleCommunicator:
    """Every collective is complete at once."""

    rank = 0
    world_size = 1
    in_background = True

    def __init__(self) -> None:
        self.traffic = Traffic()

    def prepare(self, groups: Sequence[Ranks], like: Tensor) -> None:
        """Nothing to prepare."""

    def all_reduce(self, buffer: Tensor) -> None:
        """Nothing to add."""

    def all_reduce_async(self, buffer: Tensor) -> PendingCollective:
        """Nothing to add."""
        return PendingCollective(no_wait)

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> PendingCollective:
        """Zero: the sum over no other ranks."""
        buffer.zero_()
        return PendingCollective(no_wait)

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """Nothing to fetch."""

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """Nothing to fetch."""

    def duplicate(self) -> SingleCommunicator:
        """This communicator: nothing can interleave."""
        return self

    def barrier(self, group: Ranks) -> None:
        """No other rank to wait for."""
