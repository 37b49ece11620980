"""Which layers are worked on together: those of one shape on the same ranks (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kfac_core.placement.placement import FactorJob, LayerShape, Placement


def layer_groups(shapes: Sequence[LayerShape], placement: Placement) -> list[list[int]]:
    """Layers by gradient workers, then by shape, then by inverse workers; groups in column order.

    Layers whose factors have the same inverse workers are adjacent within their group, and so is their
    second-order data, which is ordered by its owner.
    """
    numbers: dict[Any, int] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        number = numbers.setdefault((shape.a, shape.g), len(numbers))
        column = placement.layers[shape.name].gradient_workers[0]
        groups.setdefault((column, number), []).append(index)

    def inverse_workers(index: int) -> Any:
        layer = placement.layers[shapes[index].name]
        return layer.a_inverse_workers, layer.g_inverse_workers, index

    return [sorted(groups[key], key=inverse_workers) for key in sorted(groups)]


def in_group_order(
    jobs: Sequence[FactorJob], shapes: Sequence[LayerShape], placement: Placement
) -> list[FactorJob]:
    """Factors by the group of their layer, in a group all A before all G, and then by place in the group."""
    groups = layer_groups(shapes, placement)
    place = {layer: (number, at) for number, group in enumerate(groups) for at, layer in enumerate(group)}
    return sorted(jobs, key=lambda job: (place[job.layer][0], job.kind, place[job.layer][1]))
