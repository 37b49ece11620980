"""A sweep before it is submitted: states, world sizes, placements, and the comparisons to come."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import variance
from typing import Any, Literal, get_args

from harness.cell import Cell
from harness.runs.arms import fields_of, name_arms
from harness.runs.attempt_outcome import State
from harness.runs.store import sweep_folder
from harness.study.cell_states import IN_FLIGHT, stored_states, taken_seconds
from kfac_core.config import KFACConfig
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.placement.strategies import STRATEGIES, place
from kfac_core.schedule import Curve, Milestones

PlanState = Literal["done", "failed", "pending", "new"]
"""What `submit` would find: a completed cell, one that ended otherwise, one in flight, one to start."""

_PLAN_STATES: tuple[PlanState, ...] = get_args(PlanState)
_ANY_LAYER = LayerShape("any", FactorShape(1), FactorShape(1))  # group sizes do not depend on the layer


@dataclass(frozen=True)
class PlanSummary:
    """A summary of cells.

    Attributes:
        cells: the cells in the order of their file.
        states: state by cell id.
        taken: completed cells with the seconds that they took.
    """

    cells: Sequence[Cell]
    states: Mapping[str, PlanState]
    taken: Sequence[tuple[Cell, float]] = ()

    @property
    def counts(self) -> dict[PlanState, int]:
        """Number of cells in each of the four states."""
        found = Counter(self.states.values())
        return {state: found[state] for state in _PLAN_STATES}

    @property
    def new(self) -> list[Cell]:
        """The cells that `submit` would start."""
        return [cell for cell in self.cells if self.states[cell.id] == "new"]

    @property
    def total_ranks(self) -> int:
        """Number of ranks of all cells together."""
        return sum(cell.world_size for cell in self.cells)

    @property
    def largest_world(self) -> int:
        """The largest world size."""
        return max(cell.world_size for cell in self.cells)

    @property
    def world_sizes(self) -> list[int]:
        """Distinct world sizes, ascending."""
        return sorted({cell.world_size for cell in self.cells})

    def grid(self) -> dict[str, dict[int, int]]:
        """Number of cells by method, then by world size; methods in the order of the file."""
        grid: dict[str, Counter[int]] = {}
        for cell in self.cells:
            grid.setdefault(cell.method, Counter())[cell.world_size] += 1
        return {method: dict(row) for method, row in grid.items()}

    def placements(self) -> dict[str, str]:
        """Description of the placement of each method."""
        sentences: dict[str, dict[str, None]] = {}
        worlds: dict[str, dict[KFACConfig | None, set[int]]] = {}
        for cell in self.cells:
            worlds.setdefault(cell.method, {}).setdefault(cell.kfac, set()).add(cell.world_size)
        for method, configs in worlds.items():
            for config, sizes in configs.items():
                sentences.setdefault(method, {})[placement_in_words(config, sorted(sizes))] = None
        return {method: " / ".join(found) for method, found in sentences.items()}

    def to_json(self) -> dict[str, Any]:
        """The summary as plain values, one entry per cell."""
        cells = [
            {
                "id": cell.id,
                "method": cell.method,
                "world_size": cell.world_size,
                "seed": cell.seed,
                "global_batch_size": cell.training.batch_sizes(cell.world_size)[0],
                "local_batch_size": cell.training.batch_sizes(cell.world_size)[1],
                "state": self.states[cell.id],
            }
            for cell in self.cells
        ]
        return {
            "counts": self.counts,
            "total_ranks": self.total_ranks,
            "largest_world": self.largest_world,
            "placements": self.placements(),
            "cells": cells,
        }


def plan_summary(cells: Sequence[Cell], runs: Path) -> PlanSummary:
    """Summarise `cells` and what is stored of them; writes nothing."""
    states: dict[str, PlanState] = {}
    taken: list[tuple[Cell, float]] = []
    for name in dict.fromkeys(cell.sweep for cell in cells):
        of_sweep = [cell for cell in cells if cell.sweep == name]
        for cell, stored in stored_states(sweep_folder(name, runs), of_sweep):
            states[cell.id] = _plan_state(stored.state)
            if stored.state == "COMPLETED" and stored.attempt is not None and stored.outcome is not None:
                taken.append((cell, taken_seconds(stored.attempt, stored.outcome)))
    return PlanSummary(cells, states, taken)


def placement_in_words(config: KFACConfig | None, world_sizes: Iterable[int]) -> str:
    """The strategy's own description, its gradient workers per layer on each world size, its schedules."""
    if config is None:
        return "no K-FAC"
    strategy = (STRATEGIES[config.strategy].__doc__ or config.strategy).splitlines()[0].rstrip(".")
    groups = ", ".join(f"{place(config, [_ANY_LAYER], size).grad_workers} of {size}" for size in world_sizes)
    changing = {
        field.name: value
        for field in fields(config)
        if isinstance(value := getattr(config, field.name), Milestones | Curve)
    }
    schedules = "".join(f"; {name}={value}" for name, value in changing.items())
    return f"{strategy}; gradient workers per layer: {groups}{schedules}"


def _plan_state(state: State) -> PlanState:
    if state == "STAGED":
        return "new"
    if state in IN_FLIGHT:
        return "pending"
    return "done" if state == "COMPLETED" else "failed"


@dataclass(frozen=True)
class PlannedComparisons:
    """Every arm against the first-order arm of its setting, on each world size that both have.

    Attributes:
        count: of comparisons.
        runs: of each arm, where it has fewest.
        scatter: standard deviation of the logs of train seconds within an arm and world size, over the runs
            that reached their target; None if no two of any point have.
    """

    count: int
    runs: int
    scatter: float | None


def planned_comparisons(cells: Sequence[Cell], runs: Path) -> PlannedComparisons:
    """The comparisons among `cells`; writes nothing."""
    cells = [cell for cell in cells if cell.trial is None]  # trials choose settings and compare nothing
    named = name_arms([fields_of(cell) for cell in cells])
    seeds: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell, (arm, _) in zip(cells, named, strict=True):
        seeds[arm, cell.world_size].append(cell)
    first_order: dict[str, list[tuple[bool, str, str]]] = defaultdict(list)
    for cell, (arm, setting) in zip(cells, named, strict=True):
        if cell.kfac is None:
            first_order[setting].append((cell.optimizer.name != "sgd", cell.method, arm))
    baseline = {arm: min(first_order[setting])[2] for arm, setting in named if first_order.get(setting)}
    found = [
        min(len(seeds[arm, size]), len(seeds[baseline[arm], size]))
        for arm, size in seeds
        if arm in baseline and baseline[arm] != arm and (baseline[arm], size) in seeds
    ]
    return PlannedComparisons(len(found), min(found, default=0), _scatter(list(seeds.values()), runs))


def _scatter(points: Sequence[Sequence[Cell]], runs: Path) -> float | None:
    squares, freedom = 0.0, 0
    for cells in points:
        stored = stored_states(sweep_folder(cells[0].sweep, runs), cells)
        outcomes = [state.outcome for _, state in stored if state.outcome is not None]
        logs = [
            math.log(one.train_seconds)
            for one in outcomes
            if one.state == "COMPLETED" and one.reached_target and one.train_seconds
        ]
        if len(logs) > 1:
            squares += variance(logs) * (len(logs) - 1)
            freedom += len(logs) - 1
    return math.sqrt(squares / freedom) if freedom else None
