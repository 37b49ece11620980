"""D-KFAC: data-parallel K-FAC without any distribution of the second-order work."""

from collections.abc import Sequence

from kfac_core.config import KFACConfig
from kfac_core.placement.assignment import replicate_preconditioning
from kfac_core.placement.cost import CostModel
from kfac_core.placement.placement import LayerShape, Placement


def d_kfac(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """Every rank inverts every factor; only factors are communicated (arXiv:2107.06533, figure 1)."""
    everyone = tuple(range(world_size))
    return replicate_preconditioning(layers, world_size, [everyone] * len(layers), [everyone] * len(layers))
