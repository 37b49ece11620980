"""The communicator protocol: the collectives that K-FAC needs, on flat buffers with one part per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kfac_core.placement import Ranks
from kfac_core.timing.timer import Traffic

Wait = Callable[[], None]
"""Waits until a started operation has finished."""


def no_wait() -> None:
    """The `Wait` of an operation that has already finished."""


@dataclass(frozen=True)
class PendingCollective:
    """A collective that was started; calling it waits until it is complete.

    Attributes:
        wait: waits until this rank's result is in the buffer; do not touch the buffer before.
        release: after `wait`, waits until peers have read what they need; do not write the buffer before.
    """

    wait: Wait
    release: Wait = no_wait

    def __call__(self) -> None:
        """Wait, then release."""
        self.wait()
        self.release()


class Communicator(Protocol):
    """Runs collectives on flat buffers and counts the bytes that this rank hands over.

    `sizes` divides a buffer into one part per member of the group: consecutive element counts, zeros allowed.
    Every member passes the same sizes.

    Attributes:
        in_background: whether a started collective makes progress before it is waited for.
    """

    rank: int
    world_size: int
    in_background: bool
    traffic: Traffic

    def prepare(self, groups: Sequence[Ranks], like: Tensor) -> None:
        """Create these groups for collectives on buffers like `like`.

        Every rank calls it at the same time with all groups in the same order, including groups that it is
        not a member of.
        """
        ...

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum `buffer` over the world, in place."""
        ...

    def all_reduce_async(self, buffer: Tensor) -> PendingCollective:
        """Start to sum `buffer` over the world, in place; all ranks start collectives in the same order."""
        ...

    def reduce_parts(self, buffer: Tensor, sizes: Sequence[int]) -> PendingCollective:
        """Start to reduce every part to its owner, whose own part then holds the sum of the *other* ranks'.

        Previous contents of the own part are lost, and so are the other parts. All ranks start collectives
        in the same order.
        """
        ...

    def gather_parts(self, buffer: Tensor, sizes: Sequence[int], group: Ranks) -> None:
        """All-gather: each member of `group` has filled its part; afterwards every member holds all parts."""
        ...

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """Copy `buffer` from `source` to every rank."""
        ...

    def duplicate(self) -> Communicator:
        """A communicator of the same ranks and counters, whose collectives may interleave with this one's."""
        ...

    def barrier(self, group: Ranks) -> None:
        """Return when every member of `group` has called this; not counted as traffic."""
        ...
