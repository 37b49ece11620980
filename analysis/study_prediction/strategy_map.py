"""The fastest arm over ranks and link speed: measured where the study measured it, predicted elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.cost_model.errors import CostModelError
from analysis.study_prediction.choice import Choice, choose
from analysis.study_prediction.prediction import StudyModel

SPEEDS = tuple(4.0**power for power in (-2, -1, 0, 1, 2, 3))
"""Speeds of the links over those of the study."""

COLUMNS = (
    "world_size", "speed", "mbit_per_second", "arm", "seconds", "low", "high", "next", "next_ratio",
    "overlaps", "measured", "unit",
)  # fmt: skip


def strategy_map(
    model: StudyModel, world_sizes: Sequence[int], speeds: Sequence[float] = SPEEDS
) -> pd.DataFrame:
    """One row per world size and link speed: the fastest of the study's arms, and how far ahead it is.

    Columns: `speed` of the links over the study's; `mbit_per_second` of the busiest wire in an all-reduce,
    NaN if its time does not depend on bytes; `seconds` with bounds, in the `unit` (to the target, or a step);
    `next_ratio`, the time of the next arm over that of the fastest; whether their bounds `overlaps`; and
    whether the fastest was `measured` there.

    Raises:
        CostModelError: nothing can be predicted at any of these points.
    """
    rows = []
    for speed in speeds:
        scaled = model if speed == 1 else model.at_speed(speed)
        for size in world_sizes:
            try:
                choice = choose(scaled, size, only_ran=True)
            except CostModelError:
                continue
            rows.append(_row(choice, size, speed, model))
    if not rows:
        raise CostModelError(f"nothing can be predicted at {', '.join(map(str, world_sizes))} ranks")
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _row(choice: Choice, world_size: int, speed: float, model: StudyModel) -> dict[str, Any]:
    best, second = choice.candidates[0], (*choice.candidates, None)[1]
    seconds = choice.seconds(best)
    law = model.links.laws.get("all_reduce")
    per_byte = 0.0 if law is None else law.coefficients[1]
    row = {
        "world_size": world_size, "speed": speed,
        "mbit_per_second": 8e-6 * speed / per_byte if per_byte > 0 else math.nan,
        "arm": best.name, "seconds": seconds.central, "low": seconds.low, "high": seconds.high,
        "next": "", "next_ratio": math.nan, "overlaps": False, "measured": best.step.measured,
        "unit": "to the target" if choice.to_target else "a step",
    }  # fmt: skip
    if second is not None:
        other = choice.seconds(second)
        row |= {"next": second.name, "next_ratio": other.central / seconds.central,
                "overlaps": other.low <= seconds.high}  # fmt: skip
    return row
