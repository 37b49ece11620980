"""The comparisons that a sweep's report will make, and the scatter of its runs so far."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import variance

from harness.cell import Cell
from harness.runs.arms import fields_of, name_arms
from harness.runs.store import sweep_folder
from harness.study.cell_states import stored_states


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
