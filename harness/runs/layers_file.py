"""`layers.json`: what K-FAC preconditions in a run, and which rank does what, for figures and predictions.

Ranks are written as `[start, stop, step]`, so that the file of a thousand ranks stays as small as that of
two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kfac_core.placement import FactorShape, LayerPlacement, LayerShape, Placement

ROLES = ("factor_workers", "a_inverse_workers", "g_inverse_workers", "gradient_workers")


def describe(shapes: Sequence[LayerShape], placement: Placement) -> dict[str, Any]:
    """The layers in the model's order: factor sizes, and the ranks of every role."""
    return {
        "schema": 1,
        "world_size": placement.world_size,
        "grad_workers": placement.grad_workers,
        "layers": [_layer(shape, placement.layers[shape.name]) for shape in shapes],
    }


def spelt(ranks: Sequence[int]) -> list[int]:
    """`[start, stop, step]` of ascending, evenly spaced ranks, which all of a placement's are."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return [ranks[0], ranks[-1] + 1, step]


def _layer(shape: LayerShape, placed: LayerPlacement) -> dict[str, Any]:
    factors = {f"{name}_{key}": value for name, factor in (("a", shape.a), ("g", shape.g))
               for key, value in _factor(factor).items()}  # fmt: skip
    return {"name": shape.name, **factors, **{role: spelt(getattr(placed, role)) for role in ROLES}}


def _factor(factor: FactorShape) -> dict[str, int]:
    return {"dim": factor.dim, "blocks": factor.blocks}
