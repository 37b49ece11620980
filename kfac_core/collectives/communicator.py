"""The communicator protocol: the collectives that K-FAC needs, on flat buffers with one part per rank.

Beside it: the communicator of a world of one, one that measures waiting apart from moving bytes, and whether
all ranks compute on devices of one kind.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kfac_core.placement import Ranks
from kfac_core.timing import Traffic

_TEXTS = 1 << 20  # numbers of texts; float32 holds each exactly

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

    def close(self) -> None:
        """Give a duplicate back, for the next `duplicate`; every rank calls it at the same time."""
        ...

    def barrier(self, group: Ranks) -> None:
        """Return when every member of `group` has called this; not counted as traffic."""
        ...


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

    def close(self) -> None:
        """Nothing was made for it."""

    def barrier(self, group: Ranks) -> None:
        """No other rank to wait for."""


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

    def close(self) -> None:
        """Nothing was made for it."""

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


def of_all_ranks(communicator: Communicator, own: Tensor) -> Tensor:
    """`own` [n] of every rank, `[ranks, n]`; all ranks call it at the same time. Not counted as traffic."""
    traffic = communicator.traffic
    before = traffic.calls, traffic.sent_bytes, traffic.wait_seconds
    rows = own.new_zeros(communicator.world_size, len(own))
    rows[communicator.rank].copy_(own)
    communicator.all_reduce(rows)
    traffic.calls, traffic.sent_bytes, traffic.wait_seconds = before
    return rows


def differing(communicator: Communicator, texts: Sequence[str], like: Tensor) -> list[int]:
    """Places of the texts that are not the same on all ranks, which call it at the same time."""
    own = [1 + zlib.crc32(text.encode()) % _TEXTS for text in texts]
    rows = of_all_ranks(communicator, torch.tensor(own, dtype=torch.float32, device=like.device))
    columns = [[float(number) for number in column.unbind()] for column in rows.cpu().unbind(1)]
    return [place for place, column in enumerate(columns) if len(set(column) - {0.0}) > 1]


def are_alike(communicator: Communicator, like: Tensor) -> bool:
    """Whether all ranks have the same kind of device; they ask at the same time."""
    return not differing(communicator, [kind_of(like.device)], like)


def kind_of(device: torch.device) -> str:
    """What the bits of a decomposition depend on; on a CPU also the threads that share the work."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.__version__}"
    return f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} {torch.__version__}"
