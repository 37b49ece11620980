"""Cost models for placement: how long inverses take, and sending them to other ranks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kfac_core.errors import ConfigError
from kfac_core.placement.placement import FactorShape


@dataclass(frozen=True)
class CostModel:
    """Costs in one unit, seconds where measured; only ratios matter.

    Attributes:
        inverse: cost of inverting or decomposing a factor.
        exchange: cost of handing so many elements to the other ranks; None where it is not known.
    """

    inverse: Callable[[FactorShape], float]
    exchange: Callable[[int], float] | None = None


CUBIC = CostModel(inverse=lambda factor: factor.blocks * float(factor.dim) ** 3)
"""n^3, the papers' model and the default."""

SPD_KFAC_64 = CostModel(
    inverse=lambda factor: 3.806e-4 + factor.blocks * 5.148e-13 * factor.dim**3,
    exchange=lambda elements: 0.929e-3 + 1.4335e-9 * elements,
)
"""Seconds on 64 RTX 2080 Ti over 100 Gb/s InfiniBand. `exchange` is as fitted in the release
of arXiv:2107.06533. The release's `inverse` would make every inversion slower than its exchange, which
contradicts the paper's measurements; it is fitted to these instead (results/prediction/spd_kfac.md)."""


def measured(
    seconds_by_dim: Mapping[int, float],
    exchange: Callable[[int], float] | None = None,
) -> CostModel:
    """A cost model through measured points, a straight line between them in logarithms.

    Beyond the ends the slope of the last segment goes on. Blocks of one number are not decomposed and cost
    as much as one of them.

    Args:
        seconds_by_dim: seconds to invert an `n` by `n` factor, at two or more sizes.
        exchange: cost of sharing, see `CostModel`.

    Raises:
        ConfigError: fewer than two points, or a point that is not positive.
    """
    if len(seconds_by_dim) < 2 or min(*seconds_by_dim, *seconds_by_dim.values()) <= 0:
        raise ConfigError(f"seconds_by_dim={dict(seconds_by_dim)} needs two or more positive points")
    points = sorted((math.log(dim), math.log(seconds)) for dim, seconds in seconds_by_dim.items())

    def inverse(factor: FactorShape) -> float:
        blocks = factor.blocks if factor.dim > 1 else 1
        position = math.log(factor.dim)
        upper = min(max(bisect_left(points, (position,)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[upper - 1], points[upper]
        return blocks * math.exp(y0 + (y1 - y0) * (position - x0) / (x1 - x0))

    return CostModel(inverse, exchange)
