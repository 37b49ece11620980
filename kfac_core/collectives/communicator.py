"""The protocol of the drawer: what K-FAC asks of a network, in flat buffers cut into one part per rank."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kfac_core.placement import Ranks
from kfac_core.timer import Traffic


class Communicator(Protocol):
    """Moves flat buffers between ranks; counts what it is handed.

    A buffer that several ranks have parts in is cut by `sizes`: consecutive element counts, one a member
    of the group, zeros allowed. Every member calls with the same sizes.
    """

    rank: int
    world_size: int
    traffic: Traffic

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum `buffer` over the world, in place."""
        ...

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> None:
        """Sum over the world; afterwards each rank's own part holds the sum, the rest is undefined."""
        ...

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """Each member of `group` has filled its part; afterwards every member holds all parts."""
        ...

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """Make `buffer` on every rank what it is on `source`."""
        ...

    def meet(self, group: Ranks) -> None:
        """Return when every member of `group` has called this; it moves nothing and is not counted."""
        ...
