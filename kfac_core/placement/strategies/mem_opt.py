"""MEM-OPT: SC20's K-FAC-lw, KAISA at fraction 1 / world_size."""

from collections.abc import Sequence

from kfac_core.config import KFACConfig
from kfac_core.placement.assignment import assign_to_grid
from kfac_core.placement.cost import CostModel
from kfac_core.placement.placement import LayerShape, Placement


def mem_opt(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """One rank owns a layer: it inverts it, preconditions in every step and sends the result to all others.

    Second-order data is on one rank only; the cost is a model-sized exchange in every step.
    `assignment="round_robin"` is K-FAC-lw as published in SC20.
    """
    return assign_to_grid(layers, world_size, 1, config, cost)
