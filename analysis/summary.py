"""The study in one table: an arm and world size a row, in words that need no figure."""

from __future__ import annotations

import math

import pandas as pd

from analysis.metrics import baselines, points, speedups_over_baseline, time_to_accuracy
from analysis.statistics import Interval, level
from analysis.tables import Study

COLUMNS = [
    "arm",
    "world_size",
    "runs",
    "reached",
    "median_seconds",
    "speedup",
    "epochs",
    "seconds_per_epoch",
    "method",
]


def summary_table(study: Study) -> pd.DataFrame:
    """One row per arm and world size that has trained; text columns are ready to print.

    Columns: `arm`, `world_size` (`*`: more ranks than CPUs), `runs`, `reached`, `median_seconds` to the
    target, `speedup` over the first-order arm at the same world size, with its interval where one is
    justified, `epochs` to the target and `seconds_per_epoch` (medians), `method` of the interval.
    """
    scored = time_to_accuracy(study)
    speedups = speedups_over_baseline(study, scored)
    base = baselines(study)
    rows = []
    for arm, size, runs in points(scored):
        epochs = level(runs["epochs"].where(runs["reached"], math.inf).tolist()).estimate
        speedup = speedups.get((arm, size))
        rows.append(
            {
                "arm": arm,
                "world_size": f"{size}*" if runs["oversubscribed"].any() else str(size),
                "runs": len(runs),
                "reached": int(runs["reached"].sum()),
                "median_seconds": spell(level(runs["scored_seconds"].tolist())),
                "speedup": _base_or_missing(arm, base) if speedup is None else spell(speedup, "×"),
                "epochs": _number(epochs),
                "seconds_per_epoch": _number(level(runs["seconds_per_epoch"].dropna().tolist()).estimate),
                "method": "" if speedup is None else speedup.method,
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)


def spell(interval: Interval, unit: str = "") -> str:
    """`12.3 [10.1, 15.0]`, the unit after the estimate, or the estimate alone where there is no interval."""
    if interval.low is None or interval.high is None:
        return _number(interval.estimate) + unit
    return f"{_number(interval.estimate)}{unit} [{_number(interval.low)}, {_number(interval.high)}]"


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return "not reached" if math.isinf(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _base_or_missing(arm: str, base: dict[str, str]) -> str:
    return "base" if base.get(arm) == arm else "–"
