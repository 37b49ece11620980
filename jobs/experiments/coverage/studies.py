"""Simulated studies whose answer is known: the seconds of every run, its block, and when it ran.

The logarithm of a run's seconds is a sum of the arm's own scatter, of what its block has in common, of what
its place in time adds, and of the effect. All studies of a design are drawn at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

CORRELATION = 0.8
"""Of the load of a run and that of the next one in time."""


def _two_speeds(scatter: float, slower: float, share: float) -> Callable[..., Array]:
    def drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return rng.normal(0, scatter, shape) + math.log(slower) * (rng.random(shape) < share)

    return drawn


def _spikes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    slowed = rng.random(shape) < 0.1
    return rng.normal(0, 0.05, shape) + slowed * rng.uniform(math.log(1.3), math.log(2), shape)


NOISE: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = MappingProxyType(
    {
        "log-normal": lambda rng, shape: rng.normal(0, 0.1, shape),
        "wide log-normal": lambda rng, shape: rng.normal(0, 0.5, shape),
        "heavy tails": lambda rng, shape: 0.1 * rng.standard_t(3, shape),
        "skewed": lambda rng, shape: 0.15 * rng.standard_exponential(shape),
        "spikes": _spikes,
        "two speeds": _two_speeds(0.05, 1.22, 0.3),
        "two speeds far apart": _two_speeds(0.02, 2.0, 0.5),
    }
)
"""Scatter of the logarithm of a run's seconds. Spikes: a run in ten is 1.3 to 2 times slower. Two speeds:
three runs in ten are on a machine that is 1.22 times slower, or half of all runs on one twice as slow."""

Order = Literal["random", "fixed", "arm after arm", "at once"]


@dataclass(frozen=True)
class Design:
    """How studies are run and what disturbs them.

    Attributes:
        runs: of every arm, and of the baseline. In blocks both are the number of blocks.
        comparisons: arms beside the baseline.
        blocks: whether run i of every arm is in block i.
        order: of the arms of a block, drawn anew for each or always the same; without blocks, of all runs.
        noise: a key of `NOISE`.
        scatter: what multiplies the noise of the arms, and of the baseline.
        block_scatter: standard deviation of what the runs of a block have in common.
        block_speeds: whether half of the blocks ran on a machine that is twice as slow.
        drift: what every later run of the study takes longer.
        place: what every later run of a block takes longer.
        load: standard deviation of a load that the next run in time keeps four fifths of.
        interrupted: share of runs that were preempted.
        hazard: whether preemptions come at a constant rate, so that they meet long runs more often.
        missed: share of runs of equal arms that miss their target: the slowest.
        timed_out: share of runs of equal arms that a time limit ends: the slowest.
    """

    runs: tuple[int, int]
    comparisons: int = 1
    blocks: bool = True
    order: Order = "random"
    noise: str = "log-normal"
    scatter: tuple[float, float] = (1.0, 1.0)
    block_scatter: float = 0.2
    block_speeds: bool = False
    drift: float = 0.0
    place: float = 0.0
    load: float = 0.0
    interrupted: float = 0.0
    hazard: bool = False
    missed: float = 0.0
    timed_out: float = 0.0


class Studies:
    """Studies of one design.

    Attributes:
        logs: of seconds without an effect, `[study, arm, run]`; arm 0 is the baseline, NaN where it has fewer
            runs than others.
        slots: when each ran, in runs.
        loads: what load added to each.
    """

    def __init__(self, design: Design, rng: np.random.Generator, studies: int) -> None:
        self.design = design
        arms, most = design.comparisons + 1, max(design.runs)
        shape = (studies, arms, most)
        self.slots = _slots(design, rng, shape)
        noise = NOISE[design.noise](rng, shape)
        noise[:, 0] *= design.scatter[1]
        noise[:, 1:] *= design.scatter[0]
        noise[:, 0, design.runs[1] :] = math.nan
        noise[:, 1:, design.runs[0] :] = math.nan
        self.loads = _loads(design, rng, self.slots)
        self.logs = noise + _blocks(design, rng, shape) + self.loads
        self.logs += math.log1p(design.drift) * self.slots + math.log1p(design.place) * (self.slots % arms)
        self._luck = rng.random(shape)
        self._slowest = {share: float(np.nanquantile(self.logs, 1 - share))
                         for share in (design.missed, design.timed_out) if share}  # fmt: skip

    @property
    def selects(self) -> bool:
        """Whether which runs complete depends on their seconds."""
        return self.design.hazard or self.design.timed_out > 0

    def seconds(self, effect: float) -> Array:
        """Of every run if arm 1 is `effect` times as fast as the others; a miss is infinite."""
        logs = self._logs(effect)
        late = logs > self._slowest[self.design.missed] if self.design.missed else np.zeros(logs.shape, bool)
        return np.where(late, math.inf, np.exp(logs))

    def completed(self, effect: float) -> tuple[Mask, Mask]:
        """Which runs completed, and which a time limit has ended."""
        logs, design = self._logs(effect), self.design
        done = ~np.isnan(logs)
        rate = -math.log1p(-design.interrupted)
        exposure = np.exp(logs) if design.hazard else 1.0
        done &= ~(self._luck < 1 - np.exp(-rate * exposure))
        ended = np.zeros(logs.shape, bool)
        if design.timed_out:
            ended = done & (logs > self._slowest[design.timed_out])
        return done & ~ended, ended

    def columns(self, study: int, arm: int, seconds: Array, completed: Mask) -> dict[str, list[Any]]:
        """The completed runs of an arm as `analysis.comparisons` takes them.

        Args:
            study: its number.
            arm: its number.
            seconds: of all studies, from `seconds`.
            completed: of all studies, from `completed`.
        """
        kept = np.flatnonzero(completed[study, arm])
        start = self.slots[study, arm, kept]
        return {
            "scored_seconds": seconds[study, arm, kept].tolist(),
            "block": [f"block {run}" for run in kept] if self.design.blocks else [""] * len(kept),
            "started_at": start.tolist(),
            "ended_at": (start + 1).tolist(),
        }

    def _logs(self, effect: float) -> Array:
        logs = self.logs.copy()
        logs[:, 1] -= math.log(effect)
        return logs


def _slots(design: Design, rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
    studies, arms, runs = shape
    if design.order == "at once":
        return np.zeros(shape)
    if design.order == "arm after arm":
        return np.broadcast_to(np.arange(arms * runs, dtype=float).reshape(arms, runs), shape).copy()
    if not design.blocks:
        every = np.broadcast_to(np.arange(arms * runs, dtype=float), (studies, arms * runs))
        return rng.permuted(every, axis=1).reshape(shape)
    places = np.broadcast_to(np.arange(arms, dtype=float)[:, None], shape)
    if design.order == "random":
        places = rng.permuted(places, axis=1)
    return places + arms * np.arange(runs)


def _blocks(design: Design, rng: np.random.Generator, shape: tuple[int, int, int]) -> Array:
    """What the runs of a block have in common; nothing without blocks."""
    of_block = (shape[0], 1, shape[2])
    if not design.blocks:
        return np.zeros(of_block)
    if design.block_speeds:
        return math.log(2) * (rng.random(of_block) < 0.5)
    return rng.normal(0, design.block_scatter, of_block)


def _loads(design: Design, rng: np.random.Generator, slots: Array) -> Array:
    if not design.load:
        return np.zeros(slots.shape)
    studies, arms, runs = slots.shape
    load = rng.normal(0, design.load, (studies, arms * runs))
    for slot in range(1, arms * runs):
        load[:, slot] = CORRELATION * load[:, slot - 1] + math.sqrt(1 - CORRELATION**2) * load[:, slot]
    found = np.take_along_axis(load, slots.reshape(studies, -1).astype(int), axis=1)
    return found.reshape(slots.shape)
