"""Strategies: pure functions from layer shapes and world size to a `Placement`.

To add one: write `kfac_core/placement/strategies/<name>.py` with a function `<name>` of this signature, and
add the name to `kfac_core.config.STRATEGIES`. `tests/kfac_core/test_strategies.py` then covers it.
"""

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Protocol

from kfac_core.config import STRATEGIES as STRATEGY_NAMES
from kfac_core.config import KFACConfig
from kfac_core.errors import PlacementError
from kfac_core.placement.cost import CUBIC, CostModel, measured
from kfac_core.placement.placement import LayerShape, Placement
from kfac_core.placement.strategies.hybrid_opt import grad_workers


class Strategy(Protocol):
    """Decides, for every layer, whose batches count, who inverts and who preconditions."""

    def __call__(
        self, layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel
    ) -> Placement:
        """Place `layers` on ranks 0 to `world_size - 1`."""
        ...


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {name: getattr(import_module(f"{__name__}.{name}"), name) for name in STRATEGY_NAMES}
)


def place(
    config: KFACConfig, layers: Sequence[LayerShape], world_size: int, cost: CostModel | None = None
) -> Placement:
    """The placement that `config` asks for, balanced by `cost`, or by `config.costs`, or by n^3.

    Raises:
        PlacementError: the world is empty, the strategy cannot divide it as asked, or a cost is no finite
            number >= 0.
    """
    check_world_size(config, world_size)
    if cost is None:
        cost = measured(dict(config.costs.inverse_seconds)) if config.costs is not None else CUBIC
    for layer in layers:
        for kind, factor in (("A", layer.a), ("G", layer.g)):
            found = cost.inverse(factor)
            if not 0 <= found < math.inf:
                raise PlacementError(
                    f"the cost of inverting {kind} of layer {layer.name}, {factor.dim} rows, is {found}; "
                    "it has to be a finite number >= 0"
                )
    return STRATEGIES[config.strategy](layers, world_size, config, cost)


def check_world_size(config: KFACConfig, world_size: int) -> None:
    """Refuse a world that the strategy cannot divide; a sweep asks this before any rank starts.

    Raises:
        PlacementError: `world_size` is not a whole number >= 1, or the fraction gives no whole group.
    """
    if world_size < 1:
        raise PlacementError(f"world_size={world_size} must be a whole number of ranks >= 1")
    if config.strategy == "hybrid_opt" and config.grad_worker_fraction is not None:
        grad_workers(world_size, config.grad_worker_fraction)
