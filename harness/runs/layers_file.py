"""`layers.json`: the layers that K-FAC preconditions in a run and the ranks of each role.

Ranks are written as `[start, stop, step]`, so the size of the file does not grow with the world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.runs.stored_files import STRICT, Count, Positive
from kfac_core.placement import LayerShape, Placement

ROLES = ("factor_workers", "a_inverse_workers", "g_inverse_workers", "gradient_workers")


Range = tuple[Count, Count, Positive]


@dataclass(frozen=True)
class StoredLayer:
    """A layer: dimensions of its factors, how many equal blocks they have, and the ranks of each role."""

    __pydantic_config__ = STRICT
    name: str
    a_dim: Positive
    a_blocks: Positive
    g_dim: Positive
    g_blocks: Positive
    factor_workers: Range
    a_inverse_workers: Range
    g_inverse_workers: Range
    gradient_workers: Range


@dataclass(frozen=True)
class LayersFile:
    """The content of `layers.json`."""

    __pydantic_config__ = STRICT
    schema: Literal[1]
    world_size: Positive
    grad_workers: Positive
    layers: tuple[StoredLayer, ...]


def describe(shapes: Sequence[LayerShape], placement: Placement) -> dict[str, Any]:
    """The layers in the model's order, with factor sizes and the ranks of each role."""
    layers = []
    for shape in shapes:
        placed = placement.layers[shape.name]
        a, g = shape.a, shape.g
        sizes = {"a_dim": a.dim, "a_blocks": a.blocks, "g_dim": g.dim, "g_blocks": g.blocks}
        ranks = {role: _as_range(getattr(placed, role)) for role in ROLES}
        layers.append({"name": shape.name, **sizes, **ranks})
    world = {"world_size": placement.world_size, "grad_workers": placement.grad_workers}
    return {"schema": 1, **world, "layers": layers}


def _as_range(ranks: Sequence[int]) -> list[int]:
    """`[start, stop, step]` of ascending, evenly spaced ranks, as a placement has them."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return [ranks[0], ranks[-1] + 1, step]
