"""The world of one rank: nothing to move."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kfac_core.collectives.communicator import PendingCollective, nothing
from kfac_core.placement import Ranks
from kfac_core.timing.timer import Traffic


class SingleCommunicator:
    """Every sum is complete and every part is here already."""

    rank = 0
    world_size = 1
    in_background = True
    near: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.traffic = Traffic()

    def prepare(self, groups: Sequence[Ranks], like: Tensor) -> None:
        """There are none."""

    def all_reduce(self, buffer: Tensor) -> None:
        """Nothing to add."""

    def begin_all_reduce(self, buffer: Tensor) -> PendingCollective:
        """Nothing to add."""
        return PendingCollective(nothing)

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> PendingCollective:
        """There are no others."""
        buffer.zero_()
        return PendingCollective(nothing)

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """Nothing to fetch."""

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """Nothing to fetch."""

    def apart(self) -> SingleCommunicator:
        """Nothing can mingle."""
        return self

    def meet(self, group: Ranks) -> None:
        """Nobody to wait for."""
