"""SPD-KFAC: every rank inverts the factors that are cheaper to invert than to send (arXiv:2107.06533)."""

from collections.abc import Sequence

from kfac_core.config import KFACConfig
from kfac_core.placement.assignment import replicate_preconditioning
from kfac_core.placement.balance import balance
from kfac_core.placement.cost import SPD_KFAC_64, CostModel
from kfac_core.placement.footprint import data_elements
from kfac_core.placement.placement import LayerShape, Placement


def spd_kfac(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """Load-balancing placement: all ranks invert a factor where that costs less than sharing its inverse.

    The others are assigned, longest first, to the least-loaded rank (section IV-C, algorithm 1). Without a
    measured cost of sharing, both costs are those of the paper's machine.
    """
    if cost.exchange is None:
        cost = SPD_KFAC_64
    assert cost.exchange is not None  # noqa: S101  SPD_KFAC_64 has it
    factors = [factor for layer in layers for factor in (layer.a, layer.g)]
    costs = [cost.inverse(factor) for factor in factors]
    replicated = [
        seconds <= cost.exchange(data_elements(config, factor))
        for seconds, factor in zip(costs, factors, strict=True)
    ]
    shared = [index for index, by_all in enumerate(replicated) if not by_all]
    workers = [tuple(range(world_size))] * len(factors)
    for index, worker in zip(shared, balance([costs[index] for index in shared], world_size), strict=True):
        workers[index] = (worker,)
    return replicate_preconditioning(layers, world_size, workers[::2], workers[1::2])
