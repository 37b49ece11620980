"""The fastest strategy of a model on a machine, over ranks and link speed, as far as it fits in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.cost_model.arms import ARMS, SGD, Question
from analysis.cost_model.calibration import Calibration
from analysis.cost_model.prediction import Prediction, priced
from analysis.cost_model.work import Work

SPEEDS = tuple(4.0**power for power in (-2, -1, 0, 1, 2, 3))
"""Speeds of the links over those of the calibration."""

COLUMNS = (
    "world_size", "speed", "mbit_per_second", "arm", "seconds", "low", "high", "next", "next_ratio",
    "overlaps", "measured", "unit", "does_not_fit",
)  # fmt: skip


def strategy_map(
    question: Question, world_sizes: Sequence[int], speeds: Sequence[float] = SPEEDS
) -> pd.DataFrame:
    """One row per world size and link speed: K-FAC's fastest strategy, and how far ahead it is.

    Columns as of the map of a study (`analysis.study_prediction.strategy_map`), and `does_not_fit`: the
    strategies that need more memory than a rank has. SGD is left out: without epochs its step says nothing.
    Nothing was `measured`. Points at which no strategy fits are left out.
    """
    rows = []
    for size in world_sizes:
        works = {arm: Work(question.setup(arm, size)) for arm in ARMS if arm != SGD}
        for speed in speeds:
            machine = question.calibration.at_speed(speed)
            found = {arm: priced(work, machine) for arm, work in works.items()}
            fitting = {arm: one for arm, one in found.items() if question.fits(one)}
            too_big = " ".join(arm for arm in found if arm not in fitting)
            if fitting:
                rows.append(_row(question, fitting, size, speed, machine) | {"does_not_fit": too_big})
    return pd.DataFrame(rows, columns=list(COLUMNS)).sort_values(["speed", "world_size"], ignore_index=True)


def _row(
    question: Question, found: dict[str, Prediction], size: int, speed: float, machine: Calibration
) -> dict[str, Any]:
    ordered = sorted(found, key=lambda arm: question.to_accuracy(arm, found[arm]))
    best = found[ordered[0]].total
    link = machine.links["between"].get("all_reduce")
    row = {
        "world_size": size, "speed": speed,
        "mbit_per_second": _mbit(link.seconds_per_byte, link.world_size) if link else math.nan,
        "arm": ordered[0], "seconds": best.central, "low": best.low, "high": best.high, "next": "",
        "next_ratio": math.nan, "overlaps": False, "measured": False, "unit": "a step",
    }  # fmt: skip
    if len(ordered) > 1:
        other = found[ordered[1]].total
        row |= {"next": ordered[1], "next_ratio": other.central / best.central,
                "overlaps": other.low <= best.high}  # fmt: skip
    return row


def _mbit(seconds_per_byte: float, ranks: int) -> float:
    """Of the busiest wire, which carries 2 (P - 1) / P of an all-reduce's buffer."""
    if not seconds_per_byte:
        return math.nan
    return 8e-6 * 2 * (ranks - 1) / ranks / seconds_per_byte
