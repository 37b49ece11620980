"""Hours that cells would take: their number of steps, times the seconds of a step by the cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from analysis.cost_model.calibration import Calibration
from analysis.cost_model.errors import CostModelError
from analysis.cost_model.models.by_workload import model_of
from analysis.cost_model.prediction import ZERO, Seconds, predict
from analysis.cost_model.work import Setup
from harness.cell import Cell
from kfac_core.config import KFACConfig


@dataclass(frozen=True)
class PredictedHours:
    """Predicted training of several cells, each to its last epoch.

    Attributes:
        rank_hours: hours of all cells times their ranks, with bounds; a rank is a GPU where there are some.
        cells: how many are in it.
        longest: hours of the longest cell.
        without: reasons why others are not in it, with their number.
    """

    rank_hours: Seconds = ZERO
    cells: int = 0
    longest: float = 0.0
    without: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: PredictedHours) -> PredictedHours:
        """Both together."""
        return PredictedHours(
            self.rank_hours + other.rank_hours,
            self.cells + other.cells,
            max(self.longest, other.longest),
            self.without + other.without,
        )

    def __str__(self) -> str:
        """Such as `12 rank-hours of training (8 to 20), the longest cell 0.5 hours`."""
        hours = self.rank_hours
        parts = []
        if self.cells:
            parts.append(
                f"{hours.central:.3g} rank-hours of training ({hours.low:.3g} to {hours.high:.3g}), "
                f"the longest cell {self.longest:.2g} hours"
            )
        for reason, count in self.without.items():
            parts.append(f"{count} {'cell' if count == 1 else 'cells'} not in it: {reason}")
        return "; ".join(parts) or "no cell left to run"

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        hours = self.rank_hours
        return {
            "rank_hours": {"low": hours.low, "central": hours.central, "high": hours.high},
            "cells": self.cells,
            "longest_hours": self.longest,
            "without": dict(self.without),
        }


def predicted_hours(
    cells: Iterable[Cell], calibration: Calibration, examples: Callable[[Cell], int]
) -> PredictedHours:
    """Predict `cells`; those that differ in seed and name alone are predicted once.

    Forward and backward passes, K-FAC and communication are in it, as `predict` has them, for every epoch of
    the sweep: a run that stops at its target takes less. No communication is hidden behind the backward pass.
    Loading, evaluations, start, checkpoints and the exchanges of `sync_batch_norm` are not in it.

    Args:
        cells: with all options of their workload, as a sweep is read.
        calibration: of the machine.
        examples: of an epoch of a cell; 0 if only the data says how many.
    """
    total = PredictedHours()
    known: dict[str, Seconds | str] = {}
    for cell in cells:
        key = cell.model_copy(update={"seed": 0}).model_dump_json(exclude={"sweep", "method", "trial"})
        if key not in known:
            try:
                known[key] = training_seconds(cell, calibration, examples(cell))
            except CostModelError as error:
                known[key] = str(error)
        found = known[key]
        if isinstance(found, str):
            total += PredictedHours(without=Counter({found: 1}))
        else:
            hours = found / 3600
            ranks = cell.world_size
            whole = Seconds(ranks * hours.low, ranks * hours.central, ranks * hours.high)
            total += PredictedHours(whole, 1, hours.central)
    return total


def training_seconds(cell: Cell, calibration: Calibration, examples: int) -> Seconds:
    """Predicted seconds of all steps of a cell.

    Schedules of K-FAC's intervals count with their first value, as the windows of records do.

    Args:
        cell: with all options of its workload.
        calibration: of the machine.
        examples: of an epoch; 0 if only the data says how many.

    Raises:
        CostModelError: the network has no table, the number of examples is not known before the data is read,
            or the calibration lacks an operation.
    """
    if not examples:
        raise CostModelError(
            f"the examples of {cell.workload.name} are counted when they are read; set train_examples"
        )
    training = cell.training
    batch, local = training.batch_sizes(cell.world_size)
    per_epoch = examples // batch
    started = training.kfac_start_epoch if cell.kfac is not None else training.epochs
    first = min(started, training.epochs)
    total = _times(_step(cell, None, local, calibration), per_epoch * first)
    if cell.kfac is not None:
        total += _times(_step(cell, cell.kfac, local, calibration), per_epoch * (training.epochs - first))
    return total


def _step(cell: Cell, config: KFACConfig | None, local: int, calibration: Calibration) -> Seconds:
    model = model_of(cell.workload.name, cell.workload.options, None if config is None else config.skip)
    training = cell.training
    setup = Setup(
        model, config, cell.world_size, local,
        micro_batches=training.accumulate, factor_micro_batches=training.factor_micro_batches,
    )  # fmt: skip
    return predict(setup, calibration).total


def _times(seconds: Seconds, steps: float) -> Seconds:
    return Seconds(steps * seconds.low, steps * seconds.central, steps * seconds.high)
