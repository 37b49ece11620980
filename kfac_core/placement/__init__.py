"""Who computes what, without torch: placements, strategies, load balancing, costs and memory footprint."""

from kfac_core.placement.placement import (
    FactorJob,
    FactorShape,
    LayerPlacement,
    LayerShape,
    Placement,
    Ranks,
)

__all__ = [
    "FactorJob",
    "FactorShape",
    "LayerPlacement",
    "LayerShape",
    "Placement",
    "Ranks",
]
