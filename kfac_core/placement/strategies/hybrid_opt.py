"""HYBRID-OPT: KAISA's family between memory-optimal and communication-optimal."""

from collections.abc import Sequence

from kfac_core.config import KFACConfig
from kfac_core.errors import PlacementError
from kfac_core.placement.assignment import assign_to_grid
from kfac_core.placement.cost import CostModel
from kfac_core.placement.placement import LayerShape, Placement


def hybrid_opt(
    layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel
) -> Placement:
    """Give each layer a group of gradient workers and one rank of it that inverts for all (KAISA, section 3).

    KAISA assigns layers, costliest first, to the group with the least work for inverses so far. From there,
    layers swap groups until preconditioning, which is in every step, is even too (`balance_both`).
    """
    if config.grad_worker_fraction is None:
        raise PlacementError("hybrid_opt needs grad_worker_fraction")
    return assign_to_grid(
        layers, world_size, grad_workers(world_size, config.grad_worker_fraction), config, cost
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
