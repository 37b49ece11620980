"""MPD-KFAC: model-parallel distributed inverses, the baseline of SPD-KFAC and DP-KFAC."""

from collections.abc import Sequence
from dataclasses import replace

from kfac_core.config import KFACConfig
from kfac_core.placement.cost import CostModel
from kfac_core.placement.placement import LayerShape, Placement
from kfac_core.placement.strategies.comm_opt import comm_opt


def mpd_kfac(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """Whole layers by round robin, as published; inverses are broadcast to all ranks (Osawa et al. 2019)."""
    layer_wise = replace(config, strategy="comm_opt", split_factors="never", assignment=config.placed_by)
    return comm_opt(layers, world_size, layer_wise, cost)
