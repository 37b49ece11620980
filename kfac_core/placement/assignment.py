"""Which rank inverts which layer, and which ranks precondition it: the parts that strategies share."""

from collections.abc import Sequence

from kfac_core.config import KFACConfig
from kfac_core.placement.balance import Work, balance, balance_both, totals
from kfac_core.placement.cost import CostModel
from kfac_core.placement.footprint import precondition_flops
from kfac_core.placement.placement import LayerPlacement, LayerShape, Placement, Ranks


def assign_to_grid(
    layers: Sequence[LayerShape], world_size: int, workers: int, config: KFACConfig, cost: CostModel
) -> Placement:
    """Place whole layers on a grid of `workers` rows."""
    everyone = tuple(range(world_size))
    columns = world_size // workers
    work = [_work(layer, config, cost) for layer in layers]
    inverse_worker = [index % world_size for index in range(len(layers))]
    if config.assignment != "round_robin":
        candidates = _balance_twice(work, workers, columns), inverse_worker
        inverse_worker = min(candidates, key=lambda owners: _unevenness(work, owners, workers, columns))
    return Placement(
        world_size,
        grad_workers=workers,
        layers={
            layer.name: LayerPlacement(
                factor_workers=everyone,
                a_inverse_workers=(owner,),
                g_inverse_workers=(owner,),
                gradient_workers=tuple(range(owner % columns, world_size, columns)),
            )
            for layer, owner in zip(layers, inverse_worker, strict=True)
        },
    )


def replicate_preconditioning(
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


def _work(layer: LayerShape, config: KFACConfig, cost: CostModel) -> Work:
    """A layer's cost to its inverse worker, and to each gradient worker in every step."""
    return cost.inverse(layer.a) + cost.inverse(layer.g), float(precondition_flops(config, layer))


def _balance_twice(work: Sequence[Work], workers: int, columns: int) -> list[int]:
    """Balance over columns, then over the ranks of each column; returns each layer's inverse worker."""
    column_of = balance_both(work, columns)
    owner = [0] * len(work)
    for column in range(columns):
        members = [job for job, chosen in enumerate(column_of) if chosen == column]
        rows = balance([work[job][0] for job in members], workers)
        for job, row in zip(members, rows, strict=True):
            owner[job] = row * columns + column
    return owner


def _unevenness(work: Sequence[Work], owners: Sequence[int], workers: int, columns: int) -> float:
    """Maximum over mean of the inverses by rank, plus that of preconditioning by column."""
    inverses, products = zip(*work, strict=True) if work else ((), ())
    by_rank = totals(inverses, owners, workers * columns)
    by_column = totals(products, [owner % columns for owner in owners], columns)
    return sum(len(loads) * max(loads) / (sum(loads) or 1.0) for loads in (by_rank, by_column))
