"""DP-KFAC: distributed preconditioning (arXiv:2206.15143)."""

from collections.abc import Sequence
from dataclasses import replace

from kfac_core.config import KFACConfig
from kfac_core.placement.cost import CostModel
from kfac_core.placement.placement import LayerPlacement, LayerShape, Placement
from kfac_core.placement.strategies.mem_opt import mem_opt


def dp_kfac(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """MEM-OPT whose owner computes the factors from its own batch alone, without factor traffic.

    The factors average over `local_batch_size` examples instead of the global batch, so results differ from
    the other strategies' by design. Published with round robin, the default here.
    """
    config = replace(config, assignment=config.placed_by)
    placement = mem_opt(layers, world_size, config, cost)
    return Placement(
        world_size,
        grad_workers=1,
        layers={
            name: LayerPlacement(
                factor_workers=layer.gradient_workers,
                a_inverse_workers=layer.a_inverse_workers,
                g_inverse_workers=layer.g_inverse_workers,
                gradient_workers=layer.gradient_workers,
            )
            for name, layer in placement.layers.items()
        },
    )
