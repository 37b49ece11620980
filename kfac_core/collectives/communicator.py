"""The protocol of the drawer: what K-FAC asks of a network, in flat buffers cut into one part per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kfac_core.placement import Ranks
from kfac_core.timing.timer import Traffic

Finish = Callable[[], None]
"""Waits for the end of something that was begun."""


def nothing() -> None:
    """The end of what is over already."""


@dataclass(frozen=True)
class PendingCollective:
    """An exchange that was begun; called, it waits for all of it.

    Attributes:
        arrive: waits until this rank's result is in the buffer; before that nobody touches the buffer.
        release: after that, waits until peers have what they need of it; before that nobody writes there.
    """

    arrive: Finish
    release: Finish = nothing

    def __call__(self) -> None:
        """Arrive and release."""
        self.arrive()
        self.release()


class Communicator(Protocol):
    """Moves flat buffers between ranks; counts what it is handed.

    A buffer that several ranks have parts in is cut by `sizes`: consecutive element counts, one a member
    of the group, zeros allowed. Every member calls with the same sizes.

    Attributes:
        in_background: whether an exchange that was begun is under way before its end is waited for.
        near: ranks whose memory this one reads, where others would send it what is there.
    """

    rank: int
    world_size: int
    in_background: bool
    near: frozenset[int]
    traffic: Traffic

    def prepare(self, groups: Sequence[Ranks], like: Tensor) -> None:
        """Make ready for exchanges of buffers like `like` inside these groups.

        Every rank calls it at the same time, with all groups in one order, also those it is no member of.
        """
        ...

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum `buffer` over the world, in place."""
        ...

    def begin_all_reduce(self, buffer: Tensor) -> PendingCollective:
        """Begin to sum `buffer` over the world, in place; several may be under way, begun in one order."""
        ...

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> PendingCollective:
        """Begin to bring every part to its owner, whose own part then holds the sum of the *other* ranks'.

        What it held before is lost, and so are the other parts. Several may be under way, begun in one order.
        """
        ...

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """Each member of `group` has filled its part; afterwards every member holds all parts."""
        ...

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """Make `buffer` on every rank what it is on `source`."""
        ...

    def apart(self) -> Communicator:
        """The same world and counters, for exchanges that may mingle with this one's in any order."""
        ...

    def meet(self, group: Ranks) -> None:
        """Return when every member of `group` has called this; it moves nothing and is not counted."""
        ...
