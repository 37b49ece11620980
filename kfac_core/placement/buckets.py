"""Buckets: which factors are sent in one buffer, and in which order, from the placement (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kfac_core.placement.placement import FactorJob

_MAX_BUCKETS = 16  # about: a bucket holds at least a sixteenth of all elements
_MIN_ELEMENTS = 1 << 18  # of a bucket, 1 MiB of float32: below it a network's latency matters
_MIN_ELEMENTS_AT_STEP = 1 << 22  # 16 MiB without overlap: the next is packed while one is in flight


@dataclass(frozen=True)
class Bucket:
    """Factors that are sent together, in one flat buffer.

    Attributes:
        jobs: in buffer order; those of one owner are adjacent.
        sizes: elements by owner, one number per rank; None where every rank gets the sum.
    """

    jobs: tuple[FactorJob, ...]
    sizes: tuple[int, ...] | None

    @cached_property
    def layers(self) -> frozenset[int]:
        """The layers whose statistics must be complete before it is sent."""
        return frozenset(job.layer for job in self.jobs)


def buckets(jobs: Sequence[FactorJob], world_size: int, *, overlap: bool) -> list[Bucket]:
    """All factors that are sent, as buckets in sending order.

    The last layers come first, as a backward pass completes them. A bucket holds either factors with one
    owner or factors that all ranks keep. Without overlap, a world of
    more than two ranks uses one bucket of each kind: a bucket of few layers has few owners, and the links to
    all other ranks would be idle while it is sent.

    Args:
        jobs: all factors.
        world_size: number of ranks.
        overlap: whether buckets are sent during the backward pass, where smaller ones pay off.
    """
    sent = [job for job in jobs if job.is_sent]
    if not overlap and world_size > 2:
        return _divided(sent, world_size)
    minimum = _MIN_ELEMENTS if overlap else _MIN_ELEMENTS_AT_STEP
    minimum = max(minimum, sum(map(sent_elements, sent)) // _MAX_BUCKETS)
    found, current, filled = [], list[FactorJob](), 0
    for layer in sorted({job.layer for job in sent}, reverse=True):
        own = [job for job in sent if job.layer == layer]
        current += own
        filled += sum(map(sent_elements, own))
        if filled >= minimum:
            found += _divided(current, world_size)
            current, filled = [], 0
    return found + _divided(current, world_size)


def sent_elements(job: FactorJob) -> int:
    """Elements that a rank sends for one factor: a triangle, its loss terms and its rows."""
    return job.shape.packed_elements + 2


def _divided(jobs: Sequence[FactorJob], world_size: int) -> list[Bucket]:
    """A bucket of the factors with one owner, in the owners' order, and one of those with several."""
    to_one = sorted(
        (job for job in jobs if len(job.inverse_workers) == 1), key=lambda job: job.inverse_workers[0]
    )
    to_all = [job for job in jobs if len(job.inverse_workers) > 1]
    sizes = [0] * world_size
    for job in to_one:
        sizes[job.inverse_workers[0]] += sent_elements(job)
    found = [Bucket(tuple(to_one), tuple(sizes))] if to_one else []
    return [*found, Bucket(tuple(to_all), None)] if to_all else found
