"""COMM-OPT: SC20's K-FAC-opt, KAISA at fraction 1."""

from collections.abc import Sequence

from kfac_core.config import KFACConfig
from kfac_core.placement import CostModel, LayerPlacement, LayerShape, Placement, balance


def comm_opt(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """Split the work factor by factor, share the second-order data with all, precondition everywhere.

    A and G of one layer may go to different ranks, so up to `2 * len(layers)` ranks invert at once
    (SC20, section IV-B). Steps without an update need no K-FAC traffic.
    """
    everyone = tuple(range(world_size))
    costs = [cost(factor) for layer in layers for factor in (layer.a, layer.g)]
    if config.assignment == "round_robin":
        workers = [job % world_size for job in range(len(costs))]
    else:
        workers = balance(costs, world_size)
    return Placement(
        world_size,
        grad_workers=world_size,
        layers={
            layer.name: LayerPlacement(
                factor_workers=everyone,
                a_inverse_workers=(workers[2 * index],),
                g_inverse_workers=(workers[2 * index + 1],),
                gradient_workers=everyone,
            )
            for index, layer in enumerate(layers)
        },
    )
