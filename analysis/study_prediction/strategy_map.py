"""The fastest arm over ranks and link speed, and over ranks and update intervals.

Measured where the study measured it, predicted elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from analysis.cost_model.errors import CostModelError
from analysis.study_prediction.choice import Choice, choose
from analysis.study_prediction.measured import at_fraction
from analysis.study_prediction.prediction import StepPrediction, StudyModel
from kfac_core.errors import PlacementError

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


FACTOR_STEPS = (1, 2, 5, 10, 20, 50, 100)
"""Steps between factor updates in the map of intervals."""

INTERVAL_COLUMNS = (
    "world_size", "factor_update_steps", "inverse_update_steps", "arm", "seconds", "low", "high", "next",
    "next_ratio", "overlaps", "measured", "first_order", "cost_ratio",
)  # fmt: skip


def interval_map(
    model: StudyModel, world_sizes: Sequence[int], factor_steps: Sequence[int] = FACTOR_STEPS
) -> pd.DataFrame:
    """One row per world size and interval: the K-FAC arm with the fastest step, and its cost.

    An arm keeps its ratio of inverse to factor updates. Columns beside those of `strategy_map`:
    `first_order`, the arm without K-FAC with the fastest step, and `cost_ratio`, the step of `arm` over its:
    K-FAC breaks even if it needs so many times fewer epochs. How many epochs longer intervals cost is not
    known. Empty without an arm of K-FAC.
    """
    rows = []
    for steps in factor_steps:
        for size in world_sizes:
            ordered = _at_interval(model, size, steps)
            if ordered:
                rows.append(_interval_row(model, ordered, size))
    return pd.DataFrame(rows, columns=list(INTERVAL_COLUMNS))


def _at_interval(model: StudyModel, world_size: int, factor_steps: int) -> list[StepPrediction]:
    """K-FAC's arms with this interval, fastest step first; those that then are the same count once."""
    found: dict[object, StepPrediction] = {}
    for name, fitted in model.arms.items():
        own = at_fraction(fitted.arm.config, world_size)
        if own is None:
            continue
        setup = fitted.arm.setup(world_size)
        ratio = setup.inverse_update_steps // setup.factor_update_steps
        config = replace(own, factor_update_steps=factor_steps, inverse_update_steps=ratio * factor_steps)
        try:
            step = model.predict(name, world_size, config)
        except (CostModelError, PlacementError):
            continue
        key = (config, repr(fitted.arm.training))
        if key not in found or step.measured:
            found[key] = step
    return sorted(found.values(), key=lambda step: step.seconds.central)


def _interval_row(model: StudyModel, ordered: list[StepPrediction], world_size: int) -> dict[str, Any]:
    best, second = ordered[0], (*ordered, None)[1]
    assert best.config is not None  # noqa: S101  `_at_interval` gives arms of K-FAC
    plain = [
        model.predict(name, world_size)
        for name, fitted in model.arms.items()
        if fitted.arm.config is None and fitted.arm.local_batch_size(world_size) >= 1
    ]
    first = min(plain, key=lambda step: step.seconds.central, default=None)
    seconds = best.seconds
    row = {
        "world_size": world_size, "factor_update_steps": best.config.factor_update_steps,
        "inverse_update_steps": best.config.inverse_update_steps, "arm": best.arm.name,
        "seconds": seconds.central, "low": seconds.low, "high": seconds.high, "next": "",
        "next_ratio": math.nan, "overlaps": False, "measured": best.measured,
        "first_order": "" if first is None else first.arm.name,
        "cost_ratio": math.nan if first is None else seconds.central / first.seconds.central,
    }  # fmt: skip
    if second is not None:
        row |= {"next": second.arm.name, "next_ratio": second.seconds.central / seconds.central,
                "overlaps": second.seconds.low <= seconds.high}  # fmt: skip
    return row


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
