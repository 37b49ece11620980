"""What a study measured of every arm, world by world; `reading` makes it from a `Study`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from analysis.prediction.networks import Network
from analysis.prediction.work import Setup
from harness.cell import Training
from kfac_core.config import KFACConfig
from kfac_core.phases import Phase


@dataclass(frozen=True)
class World:
    """What one arm took on one world size.

    Attributes:
        runs: seconds a step of each run, on its slowest rank.
        window_spread: standard deviation of the log of a window's seconds a step, within a run.
        windows: mean number of windows of a run.
        ranks: by phase that computes, seconds a step of every rank; mean over runs.
        transfers: by phase that communicates, seconds a step without waiting for late ranks; an upper bound
            if waiting was not measured (`analysis.steps.waits`).
        peak_bytes: memory of the rank with most, median over runs; NaN if it was not recorded.
    """

    runs: tuple[float, ...]
    window_spread: float
    windows: float
    ranks: Mapping[str, tuple[float, ...]]
    transfers: Mapping[str, float]
    peak_bytes: float = math.nan

    @property
    def seconds(self) -> float:
        """Seconds a step of the typical run: the geometric mean."""
        return math.exp(sum(map(math.log, self.runs)) / len(self.runs))


@dataclass(frozen=True)
class Arm:
    """One arm of a study.

    Attributes:
        config: of K-FAC, or None.
        training: its batch sizes, and how gradients are averaged.
        worlds: measured, by world size; empty for a network that nobody ran.
        epochs: by world size, the median epochs to the target, where that is finite.
    """

    name: str
    network: Network
    config: KFACConfig | None
    training: Training
    worlds: Mapping[int, World]
    epochs: Mapping[int, float]

    def local_batch_size(self, world_size: int) -> int:
        """Examples per rank; 0 if the global batch has fewer examples than the world has ranks."""
        return self.training.batch_sizes(world_size)[1]

    def epochs_at(self, world_size: int) -> float | None:
        """Epochs to the target as on the nearest world whose runs reached it; None if none did."""
        known = sorted(self.epochs, key=lambda size: (abs(math.log2(size / world_size)), size))
        return self.epochs[known[0]] if known else None

    def setup(self, world_size: int, config: KFACConfig | None = None) -> Setup:
        """The arm at this world size, with its own settings of K-FAC or others; see `at_fraction`."""
        own = at_fraction(config or self.config, world_size)
        return Setup(self.network, own, world_size, self.local_batch_size(world_size))


@dataclass(frozen=True)
class Measured:
    """The arms of a study, and what was left out.

    Attributes:
        algorithm: the communication library: `gloo` or `nccl`.
        examples: of an epoch; 0 if no run was evaluated.
        one_host: whether all ranks of every run were on one host.
        notes: a sentence for everything that a reader has to know.
    """

    name: str
    algorithm: str
    examples: float
    arms: tuple[Arm, ...]
    one_host: bool
    notes: tuple[str, ...]

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """All that were measured, ascending."""
        return tuple(sorted({size for arm in self.arms for size in arm.worlds}))


def same_gradient_exchange(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """The arms, with one time for the exchange of gradients wherever they exchange the same.

    Arms that average as many gradients in the same way differ in this exchange by chance alone, and by the
    part of it that the backward pass happened to hide. Fitted apart, that chance would grow with the ranks.
    """
    phase = str(Phase.GRADIENT_COMM)
    found: dict[tuple[object, ...], list[float]] = {}
    for arm in arms:
        for size, world in arm.worlds.items():
            if phase in world.transfers:
                found.setdefault(_exchange_of(arm, size), []).append(world.transfers[phase])

    def evened(arm: Arm, size: int, world: World) -> World:
        if phase not in world.transfers:
            return world
        seconds = found[_exchange_of(arm, size)]
        return replace(world, transfers={**world.transfers, phase: sum(seconds) / len(seconds)})

    return tuple(
        replace(arm, worlds={size: evened(arm, size, world) for size, world in arm.worlds.items()})
        for arm in arms
    )


def _exchange_of(arm: Arm, world_size: int) -> tuple[object, ...]:
    """What makes two exchanges of gradients the same."""
    training, batch = arm.training, arm.local_batch_size(world_size)
    return world_size, arm.network.parameters, training.gradient_averaging, training.accumulate, batch


def at_fraction(config: KFACConfig | None, world_size: int) -> KFACConfig | None:
    """The settings with the fraction of hybrid_opt that divides the world and is nearest."""
    if config is None or config.strategy != "hybrid_opt" or config.grad_worker_fraction is None:
        return config
    fraction = config.grad_worker_fraction
    workers = min(
        (m for m in range(1, world_size + 1) if world_size % m == 0),
        key=lambda m: abs(m / world_size - fraction),
    )
    nearest = workers / world_size
    return config if math.isclose(nearest, fraction) else replace(config, grad_worker_fraction=nearest)
