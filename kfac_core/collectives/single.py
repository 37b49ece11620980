"""The world of one rank: nothing to move."""

from collections.abc import Sequence

from torch import Tensor

from kfac_core.placement import Ranks
from kfac_core.timer import Traffic


class SingleCommunicator:
    """Every sum is complete and every part is here already."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.traffic = Traffic()

    def all_reduce(self, buffer: Tensor) -> None:
        """Nothing to add."""

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> None:
        """Nothing to add."""

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """Nothing to fetch."""

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """Nothing to fetch."""

    def meet(self, group: Ranks) -> None:
        """Nobody to wait for."""
