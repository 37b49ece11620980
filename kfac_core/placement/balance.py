"""Load balancing: assigns jobs to bins, such as layers to ranks (no torch).

Every rank computes the assignment for itself, and all must get the same one: of equals the first is taken.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from kfac_core.config import KFACConfig
from kfac_core.errors import ConfigError
from kfac_core.placement.placement import (
    FactorJob,
    FactorShape,
    LayerPlacement,
    LayerShape,
    Placement,
    Ranks,
    precondition_flops,
)

# ------------------------------------------------------------
# Cost models for placement: how long inverses take, and sending them to other ranks.


@dataclass(frozen=True)
class CostModel:
    """Costs in one unit, seconds where measured; only ratios matter.

    Attributes:
        inverse: cost of inverting or decomposing a factor.
        exchange: cost of handing so many elements to the other ranks; None where it is not known.
    """

    inverse: Callable[[FactorShape], float]
    exchange: Callable[[int], float] | None = None


CUBIC = CostModel(inverse=lambda factor: factor.blocks * float(factor.dim) ** 3)
"""n^3, the papers' model and the default."""

SPD_KFAC_64 = CostModel(
    inverse=lambda factor: 3.806e-4 + factor.blocks * 5.148e-13 * factor.dim**3,
    exchange=lambda elements: 0.929e-3 + 1.4335e-9 * elements,
)
"""Seconds on 64 RTX 2080 Ti over 100 Gb/s InfiniBand. `exchange` is as fitted in the release
of arXiv:2107.06533. The release's `inverse` would make every inversion slower than its exchange, which
contradicts the paper's measurements; it is fitted to these instead (results/prediction/spd_kfac.md)."""


def measured(
    seconds_by_dim: Mapping[int, float],
    exchange: Callable[[int], float] | None = None,
) -> CostModel:
    """A cost model through measured points, a straight line between them in logarithms.

    Beyond the ends the slope of the last segment goes on. Blocks of one number are not decomposed and cost
    as much as one of them.

    Args:
        seconds_by_dim: seconds to invert an `n` by `n` factor, at two or more sizes.
        exchange: cost of sharing, see `CostModel`.

    Raises:
        ConfigError: fewer than two points, or a point that is not positive.
    """
    if len(seconds_by_dim) < 2 or min(*seconds_by_dim, *seconds_by_dim.values()) <= 0:
        raise ConfigError(f"seconds_by_dim={dict(seconds_by_dim)} needs two or more positive points")
    points = sorted((math.log(dim), math.log(seconds)) for dim, seconds in seconds_by_dim.items())

    def inverse(factor: FactorShape) -> float:
        blocks = factor.blocks if factor.dim > 1 else 1
        position = math.log(factor.dim)
        upper = min(max(bisect_left(points, (position,)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[upper - 1], points[upper]
        return blocks * math.exp(y0 + (y1 - y0) * (position - x0) / (x1 - x0))

    return CostModel(inverse, exchange)


Work = tuple[float, float]
"""A job's two kinds of work: inverses, on update steps only, and preconditioning, in every step."""

Exchange = tuple[tuple[int, int], ...]
"""Jobs that move, each with its new bin: one job, or two that swap bins."""

_MIN_GAIN = 1e-9  # in squares of shares; anything smaller is rounding


def balance(costs: Sequence[float], bins: int) -> list[int]:
    """Assign jobs to bins, longest first, each to the least-loaded bin (Graham's LPT rule).

    Round robin is taken instead where it loads its fullest bin less.

    Returns:
        The bin of each job, in the order of `costs`.
    """
    loads = [(0.0, index) for index in range(bins)]
    chosen = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        load, index = loads[0]
        chosen[job] = index
        heapq.heapreplace(loads, (load + costs[job], index))
    in_turn = [job % bins for job in range(len(costs))]
    return min(chosen, in_turn, key=lambda bins_of: max(totals(costs, bins_of, bins)))


def balance_both(costs: Sequence[Work], bins: int) -> list[int]:
    """Assign jobs to bins so that both kinds of work are even, whatever their relative cost.

    Starts from `balance` by the first kind. Then local search: a job of the fullest bin of either kind moves
    to another bin or swaps bins with a job there, the best such exchange first, as long as the sum of squares
    of all loads, each a share of its kind, decreases. ResNet-50 on 2 ranks: the busiest rank inverts 1.2 %
    and preconditions 0.6 % more than the mean; with `balance` alone it is 0 and 15 %.
    """
    first, second = zip(*costs, strict=True) if costs else ((), ())
    shares = list(zip(_shares(first), _shares(second), strict=True))
    chosen = balance(first, bins)
    while True:
        kinds = [totals(kind, chosen, bins) for kind in zip(*shares, strict=True)]
        fullest = {loads.index(max(loads)) for loads in kinds}
        exchanges = _exchanges(shares, chosen, list(zip(*kinds, strict=True)), fullest)
        gain, exchange = max(exchanges, key=itemgetter(0), default=(0.0, ()))
        if not gain >= _MIN_GAIN:  # also true for NaN
            return chosen
        for job, index in exchange:
            chosen[job] = index


def totals(costs: Sequence[float], chosen: Sequence[int], bins: int) -> list[float]:
    """Load of each bin, from the bin of each job."""
    loads = [0.0] * bins
    for cost, index in zip(costs, chosen, strict=True):
        loads[index] += cost
    return loads


def _shares(costs: Sequence[float]) -> list[float]:
    total = sum(costs) or 1.0
    return [cost / total for cost in costs]


def _exchanges(
    shares: Sequence[Work], chosen: Sequence[int], loads: Sequence[Work], fullest: Collection[int]
) -> Iterator[tuple[float, Exchange]]:
    """Every move or swap of a job in one of the `fullest` bins, with its gain."""
    for job, here in enumerate(chosen):
        if here not in fullest:
            continue
        x, y = shares[job]
        for there in range(len(loads)):
            if there != here:
                yield _gain(loads[here], loads[there], x, y), ((job, there),)
        for other, there in enumerate(chosen):
            if there != here:
                x2, y2 = shares[other]
                yield _gain(loads[here], loads[there], x - x2, y - y2), ((job, there), (other, here))


def _gain(here: Work, there: Work, x: float, y: float) -> float:
    """The decrease in the sum of squares of two loads when (x, y) moves from `here` to `there`."""
    return 2 * (x * (here[0] - there[0] - x) + y * (here[1] - there[1] - y))


# ------------------------------------------------------------
# Which rank inverts which layer, and which ranks precondition it: the parts that strategies share.


def assign_to_grid(
    layers: Sequence[LayerShape], world_size: int, workers: int, config: KFACConfig, cost: CostModel
) -> Placement:
    """Place whole layers on a grid of `workers` rows."""
    everyone = tuple(range(world_size))
    columns = world_size // workers
    work = [_work(layer, config, cost) for layer in layers]
    inverse_worker = [index % world_size for index in range(len(layers))]
    if config.assignment != "round_robin":
        candidates = _balance_twice(work, workers, columns), inverse_worker
        inverse_worker = min(candidates, key=lambda owners: _unevenness(work, owners, workers, columns))
    return Placement(
        world_size,
        grad_workers=workers,
        layers={
            layer.name: LayerPlacement(
                factor_workers=everyone,
                a_inverse_workers=(owner,),
                g_inverse_workers=(owner,),
                gradient_workers=tuple(range(owner % columns, world_size, columns)),
            )
            for layer, owner in zip(layers, inverse_worker, strict=True)
        },
    )


def replicate_preconditioning(
    layers: Sequence[LayerShape], world_size: int, a_workers: Sequence[Ranks], g_workers: Sequence[Ranks]
) -> Placement:
    """One column of gradient workers; the inverse workers of each layer's A and G as given."""
    everyone = tuple(range(world_size))
    return Placement(
        world_size,
        grad_workers=world_size,
        layers={
            layer.name: LayerPlacement(everyone, a, g, everyone)
            for layer, a, g in zip(layers, a_workers, g_workers, strict=True)
        },
    )


def _work(layer: LayerShape, config: KFACConfig, cost: CostModel) -> Work:
    """A layer's cost to its inverse worker, and to each gradient worker in every step."""
    return cost.inverse(layer.a) + cost.inverse(layer.g), float(precondition_flops(config, layer))


def _balance_twice(work: Sequence[Work], workers: int, columns: int) -> list[int]:
    """Balance over columns, then over the ranks of each column; returns each layer's inverse worker."""
    column_of = balance_both(work, columns)
    owner = [0] * len(work)
    for column in range(columns):
        members = [job for job, chosen in enumerate(column_of) if chosen == column]
        rows = balance([work[job][0] for job in members], workers)
        for job, row in zip(members, rows, strict=True):
            owner[job] = row * columns + column
    return owner


def _unevenness(work: Sequence[Work], owners: Sequence[int], workers: int, columns: int) -> float:
    """Maximum over mean of the inverses by rank, plus that of preconditioning by column."""
    inverses, products = zip(*work, strict=True) if work else ((), ())
    by_rank = totals(inverses, owners, workers * columns)
    by_column = totals(products, [owner % columns for owner in owners], columns)
    return sum(len(loads) * max(loads) / (sum(loads) or 1.0) for loads in (by_rank, by_column))


# ------------------------------------------------------------
# Buckets: which factors are sent in one buffer, and in which order, from the placement (no torch).


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
