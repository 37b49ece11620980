"""The grid that comm_opt, mpd_kfac, d_kfac and spd_kfac share: all ranks precondition every layer."""

from collections.abc import Sequence

from kfac_core.placement.placement import LayerPlacement, LayerShape, Placement, Ranks


def everywhere(
    layers: Sequence[LayerShape], world_size: int, a_workers: Sequence[Ranks], g_workers: Sequence[Ranks]
) -> Placement:
    """One column of gradient workers; the inverse workers of each layer's A and G as given."""
    everyone = tuple(range(world_size))
    return Placement(
        world_size,
        grad_workers=world_size,
        layers={
            layer.name: LayerPlacement(everyone, a, g, everyone)
            for layer, a, g in zip(layers, a_workers, g_workers, strict=True)
        },
    )
