"""COMM-OPT: SC20's K-FAC-opt, KAISA at fraction 1."""

from collections.abc import Sequence

from kfac_core.config import KFACConfig
from kfac_core.placement.assignment import replicate_preconditioning
from kfac_core.placement.balance import balance
from kfac_core.placement.cost import CostModel
from kfac_core.placement.placement import LayerShape, Placement


def comm_opt(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """Split the work factor by factor, share the second-order data with all, precondition everywhere.

    A and G of one layer may be inverted on different ranks, so up to `2 * len(layers)` ranks invert at once
    (SC20, section IV-B). Steps without an update have no K-FAC traffic. The released SC20 code splits a
    layer only where ranks outnumber layers: `split_factors="when_ranks_exceed_layers"`.
    """
    split = config.split_factors or "always"
    if split == "always" or (split == "when_ranks_exceed_layers" and world_size > len(layers)):
        costs = [cost.inverse(factor) for layer in layers for factor in (layer.a, layer.g)]
        workers = _assign(costs, world_size, config)
        return replicate_preconditioning(
            layers, world_size, [(a,) for a in workers[::2]], [(g,) for g in workers[1::2]]
        )
    costs = [cost.inverse(layer.a) + cost.inverse(layer.g) for layer in layers]
    owners = [(owner,) for owner in _assign(costs, world_size, config)]
    return replicate_preconditioning(layers, world_size, owners, owners)


def _assign(costs: Sequence[float], world_size: int, config: KFACConfig) -> list[int]:
    if config.assignment == "round_robin":
        return [job % world_size for job in range(len(costs))]
    return balance(costs, world_size)
