"""HYBRID-OPT: KAISA's family between memory-optimal and communication-optimal."""

from collections.abc import Sequence

from kfac_core.config import KFACConfig
from kfac_core.errors import PlacementError
from kfac_core.placement.balance import Work, balance, balance_both, totals
from kfac_core.placement.cost import CostModel
from kfac_core.placement.footprint import precondition_flops
from kfac_core.placement.placement import LayerPlacement, LayerShape, Placement


def hybrid_opt(
    layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel
) -> Placement:
    """Give each layer a group of gradient workers and one rank of it that inverts for all (KAISA, section 3).

    KAISA assigns layers, costliest first, to the group with the least work for inverses so far. From there,
    layers swap groups until preconditioning, which is in every step, is even too (`balance_both`).
    """
    if config.grad_worker_fraction is None:
        raise PlacementError("hybrid_opt needs grad_worker_fraction")
    return grid(layers, world_size, grad_workers(world_size, config.grad_worker_fraction), config, cost)


def grid(
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


def grad_workers(world_size: int, fraction: float) -> int:
    """Gradient workers per layer, `m = world_size * fraction`.

    A fraction is often a quotient whose float is slightly off (98 * (2 / 98) is not 2), so that a product
    within one part in a million of a whole number counts as that number.

    Raises:
        PlacementError: `m` is not a whole number >= 1, or does not divide `world_size`.
    """
    exact = world_size * fraction
    workers = round(exact)
    if workers < 1 or abs(exact - workers) > 1e-6 * exact or world_size % workers:
        allowed = ", ".join(f"{m}/{world_size}" for m in range(1, world_size + 1) if world_size % m == 0)
        raise PlacementError(
            f"grad_worker_fraction={fraction:g} gives {exact:g} gradient workers in a world of {world_size}; "
            f"use a fraction that gives a whole number dividing {world_size}: {allowed}"
        )
    return workers


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
