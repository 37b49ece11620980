"""Which factors travel together, and in which order: arithmetic on the placement (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kfac_core.placement.placement import FactorJob

_PIECES = 16  # buckets of equal size that all factors would fill
_LEAST_ELEMENTS = 1 << 18  # of a bucket, 1 MiB of float32: below it a network's latency counts
_LEAST_AT_ONCE = 1 << 22  # 16 MiB, where all leave at the step: the next is packed while one is on its way


@dataclass(frozen=True)
class Bucket:
    """Factors that leave together, in one flat buffer.

    Attributes:
        jobs: in the order in which they lie there; those of one owner next to each other.
        sizes: elements by owner, one number a rank; None where every rank gets the sum.
    """

    jobs: tuple[FactorJob, ...]
    sizes: tuple[int, ...] | None

    @cached_property
    def layers(self) -> frozenset[int]:
        """The layers whose statistics must be complete before it can leave."""
        return frozenset(job.layer for job in self.jobs)


def buckets(jobs: Sequence[FactorJob], world_size: int, *, overlap: bool) -> list[Bucket]:
    """All factors that travel, in the order in which their buckets leave.

    The last layers' first, as a backward pass completes them. In a bucket are either factors that have an
    owner or factors that all ranks keep. Where nothing overlaps, there is more than one of a kind on two
    ranks only: buckets cut by layer have few owners each, and on more ranks the others' wires would lie idle
    (ResNet-50 on 8: the busiest owners of all buckets together receive 5 times what the busiest one does).

    Args:
        jobs: all factors.
        world_size: number of ranks.
        overlap: whether buckets leave during the backward pass; small ones are worth it then.
    """
    travelling = [job for job in jobs if job.travels]
    if not overlap and world_size > 2:
        return _divided(travelling, world_size)
    least = _LEAST_ELEMENTS if overlap else _LEAST_AT_ONCE
    least = max(least, sum(map(travelling_elements, travelling)) // _PIECES)
    found, together, filled = [], list[FactorJob](), 0
    for layer in sorted({job.layer for job in travelling}, reverse=True):
        own = [job for job in travelling if job.layer == layer]
        together += own
        filled += sum(map(travelling_elements, own))
        if filled >= least:
            found += _divided(together, world_size)
            together, filled = [], 0
    return found + _divided(together, world_size)


def travelling_elements(job: FactorJob) -> int:
    """Elements that a rank hands over for one factor: a triangle, and the number of examples behind it."""
    return job.shape.packed_elements + 1


def _divided(jobs: Sequence[FactorJob], world_size: int) -> list[Bucket]:
    """Those that have one owner, in the owners' order, and those that have several."""
    to_one = sorted(
        (job for job in jobs if len(job.inverse_workers) == 1), key=lambda job: job.inverse_workers[0]
    )
    to_all = [job for job in jobs if len(job.inverse_workers) > 1]
    sizes = [0] * world_size
    for job in to_one:
        sizes[job.inverse_workers[0]] += travelling_elements(job)
    found = [Bucket(tuple(to_one), tuple(sizes))] if to_one else []
    return [*found, Bucket(tuple(to_all), None)] if to_all else found
