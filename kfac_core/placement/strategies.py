"""Strategies: pure functions from layer shapes and world size to a `Placement`.

To add one: write a function of `Strategy`'s signature here, and add it to `STRATEGIES` below and its name to
`kfac_core.config.STRATEGIES`. `tests/kfac_core/test_strategies.py` then covers it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from kfac_core.config import KFACConfig
from kfac_core.errors import PlacementError
from kfac_core.placement.balance import (
    CUBIC,
    SPD_KFAC_64,
    CostModel,
    assign_to_grid,
    balance,
    measured,
    replicate_preconditioning,
)
from kfac_core.placement.placement import LayerPlacement, LayerShape, Placement, data_elements


class Strategy(Protocol):
    """Decides, for every layer, whose batches count, who inverts and who preconditions."""

    def __call__(
        self, layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel
    ) -> Placement:
        """Place `layers` on ranks 0 to `world_size - 1`."""
        ...


def comm_opt(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """COMM-OPT: split the work factor by factor, share the second-order data, precondition everywhere.

    SC20's K-FAC-opt, KAISA at fraction 1. A and G of one layer may be inverted on different ranks, so up to
    `2 * len(layers)` ranks invert at once (SC20, section IV-B). Steps without an update have no K-FAC
    traffic. The released SC20 code splits a layer only where ranks outnumber layers:
    `split_factors="when_ranks_exceed_layers"`.
    """
    split = config.split_factors or "always"
    if split == "always" or (split == "when_ranks_exceed_layers" and world_size > len(layers)):
        costs = [cost.inverse(factor) for layer in layers for factor in (layer.a, layer.g)]
        workers = _assign(costs, world_size, config)
        return replicate_preconditioning(
            layers, world_size, [(a,) for a in workers[::2]], [(g,) for g in workers[1::2]]
        )
    costs = [cost.inverse(layer.a) + cost.inverse(layer.g) for layer in layers]
    owners = [(owner,) for owner in _assign(costs, world_size, config)]
    return replicate_preconditioning(layers, world_size, owners, owners)


def _assign(costs: Sequence[float], world_size: int, config: KFACConfig) -> list[int]:
    if config.assignment == "round_robin":
        return [job % world_size for job in range(len(costs))]
    return balance(costs, world_size)


def mem_opt(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """MEM-OPT: a layer's one owner inverts, preconditions in every step, and sends the result to all others.

    KAISA at fraction 1 / world_size. Second-order data is on one rank only; the cost is a model-sized
    exchange in every step. `assignment="round_robin"` is SC20's K-FAC-lw as published.
    """
    return assign_to_grid(layers, world_size, 1, config, cost)


def hybrid_opt(
    layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel
) -> Placement:
    """HYBRID-OPT: each layer has a group of gradient workers, one of which inverts for all.

    KAISA's family between memory-optimal and communication-optimal (section 3).
    KAISA assigns layers, costliest first, to the group with the least work for inverses so far. From there,
    layers swap groups until preconditioning, which is in every step, is even too (`balance_both`).
    """
    if config.grad_worker_fraction is None:
        raise PlacementError("hybrid_opt needs grad_worker_fraction")
    return assign_to_grid(
        layers, world_size, grad_workers(world_size, config.grad_worker_fraction), config, cost
    )


def grad_workers(world_size: int, fraction: float) -> int:
    """Gradient workers per layer, `m = world_size * fraction`.

    A fraction is often a quotient whose float is slightly off (98 * (2 / 98) is not 2), so that a product
    within one part in a million of a whole number counts as that number.

    Raises:
        PlacementError: `m` is not a whole number >= 1, or does not divide `world_size`.
    """
    exact = world_size * fraction
    workers = round(exact)
    if workers < 1 or abs(exact - workers) > 1e-6 * exact or world_size % workers:
        allowed = ", ".join(f"{m}/{world_size}" for m in range(1, world_size + 1) if world_size % m == 0)
        raise PlacementError(
            f"grad_worker_fraction={fraction:g} gives {exact:g} gradient workers in a world of {world_size}; "
            f"use a fraction that gives a whole number dividing {world_size}: {allowed}"
        )
    return workers


def dp_kfac(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """DP-KFAC (arXiv:2206.15143): MEM-OPT whose owner computes the factors from its own batch alone.

    The factors average over `local_batch_size` examples instead of the global batch, so results differ from
    the other strategies' by design, and no factor is sent. Published with round robin, the default here.
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


def d_kfac(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """D-KFAC: every rank inverts every factor; only factors are sent (arXiv:2107.06533, figure 1)."""
    everyone = tuple(range(world_size))
    return replicate_preconditioning(layers, world_size, [everyone] * len(layers), [everyone] * len(layers))


def mpd_kfac(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """MPD-KFAC: whole layers by round robin, as published, and inverses for all ranks (Osawa et al. 2019).

    The baseline of SPD-KFAC and DP-KFAC.
    """
    layer_wise = replace(config, strategy="comm_opt", split_factors="never", assignment=config.placed_by)
    return comm_opt(layers, world_size, layer_wise, cost)


def spd_kfac(layers: Sequence[LayerShape], world_size: int, config: KFACConfig, cost: CostModel) -> Placement:
    """SPD-KFAC (arXiv:2107.06533): all ranks invert a factor where that costs less than sharing its inverse.

    The others are assigned, longest first, to the least-loaded rank (section IV-C, algorithm 1). Without a
    measured cost of sharing, both costs are those of the paper's machine.
    """
    if cost.exchange is None:
        cost = SPD_KFAC_64
    assert cost.exchange is not None  # noqa: S101  SPD_KFAC_64 has it
    factors = [factor for layer in layers for factor in (layer.a, layer.g)]
    costs = [cost.inverse(factor) for factor in factors]
    replicated = [
        seconds <= cost.exchange(data_elements(config, factor))
        for seconds, factor in zip(costs, factors, strict=True)
    ]
    shared = [index for index, by_all in enumerate(replicated) if not by_all]
    workers = [tuple(range(world_size))] * len(factors)
    for index, worker in zip(shared, balance([costs[index] for index in shared], world_size), strict=True):
        workers[index] = (worker,)
    return replicate_preconditioning(layers, world_size, workers[::2], workers[1::2])


STRATEGIES: Mapping[str, Strategy] = MappingProxyType({
    strategy.__name__: strategy
    for strategy in (comm_opt, mem_opt, hybrid_opt, dp_kfac, mpd_kfac, d_kfac, spd_kfac)
})  # fmt: skip


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
