"""HYBRID-OPT: KAISA's family between memory-optimal and communication-optimal."""

from collections.abc import Sequence

from kfac_core.config import KFACConfig
from kfac_core.cost import CostModel
from kfac_core.errors import PlacementError
from kfac_core.footprint import precondition_flops
from kfac_core.placement import LayerPlacement, LayerShape, Placement, balance
from kfac_core.schedule import interval_at


def hybrid_opt(
    layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel
) -> Placement:
    """Give each layer a group of gradient workers, the group with the least work so far (KAISA, section 3).

    Inside the group the least-loaded rank inverts both factors of the layer and shares them.
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
    loads = [_load(layer, config, cost) for layer in layers]
    round_robin = [index % world_size for index in range(len(layers))]
    inverse_worker = round_robin
    if config.assignment != "round_robin":
        balanced = _balance_twice(loads, workers, columns)
        if _heaviest(loads, balanced, columns) <= _heaviest(loads, round_robin, columns):
            inverse_worker = balanced
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

    A fraction is often written as a quotient whose float is slightly off (98 * (2 / 98) is not 2), so the
    nearest whole number is taken when the product is within one part in a million of it.

    Raises:
        PlacementError: `m` is no whole number >= 1, or does not divide `world_size`.
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


def _load(layer: LayerShape, config: KFACConfig, cost: CostModel) -> tuple[float, float]:
    """Of its inverse worker, and of each of its gradient workers; in a step where products have a cost."""
    inverse = cost.inverse(layer.a) + cost.inverse(layer.g)
    if cost.products is None:
        return inverse, 0.0
    steps = interval_at(config.inverse_update_steps, 0, 1)
    return inverse / steps, cost.products(precondition_flops(config, layer))


def _balance_twice(loads: Sequence[tuple[float, float]], workers: int, columns: int) -> list[int]:
    """Columns first, then the ranks inside each column; returns the inverse worker of each layer."""
    column_of = balance([inverse + workers * products for inverse, products in loads], columns)
    owner = [0] * len(loads)
    for column in range(columns):
        members = [job for job, chosen in enumerate(column_of) if chosen == column]
        rows = balance([loads[job][0] for job in members], workers)
        for job, row in zip(members, rows, strict=True):
            owner[job] = row * columns + column
    return owner


def _heaviest(loads: Sequence[tuple[float, float]], owners: Sequence[int], columns: int) -> float:
    """Load of the busiest rank: what it inverts, and what its column preconditions."""
    inverses, products = dict.fromkeys(owners, 0.0), dict.fromkeys(range(columns), 0.0)
    for (inverse, product), owner in zip(loads, owners, strict=True):
        inverses[owner] += inverse
        products[owner % columns] += product
    return max((inverses[owner] + products[owner % columns] for owner in inverses), default=0.0)
