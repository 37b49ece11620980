"""Runs that missed their target: which ones, and their hollow marker."""

from __future__ import annotations

import pandas as pd
from matplotlib.lines import Line2D

from analysis.figures.drawing import GREY
from analysis.metrics import time_to_accuracy
from analysis.records.study import Study

MISSED = "missed the target"


def with_reached(study: Study, numbers: pd.DataFrame) -> pd.DataFrame:
    """`numbers` with `reached`: whether its run reached the target.

    The study's rule decides; of a run that it does not score, such as one that failed, any evaluation does.
    """
    rows = study.evaluations.astype({"run": "str"}).merge(
        study.cells[["run", "target_metric", "target_value", "target_direction"]], on="run"
    )
    rows = rows[rows["metric"] == rows["target_metric"]]
    above = rows["value"] >= rows["target_value"]
    below = rows["value"] <= rows["target_value"]
    there = above.where(rows["target_direction"] == "higher", below)
    reached = dict(there.groupby(rows["run"]).any())
    scored = time_to_accuracy(study)
    reached |= dict(zip(scored["run"], scored["reached"], strict=True))
    return numbers.assign(reached=[bool(reached.get(run, False)) for run in numbers["run"]])


def missed_key(label: str = MISSED) -> Line2D:
    """A legend entry: a hollow marker in no arm's colour."""
    return Line2D([], [], color=GREY, marker="o", markerfacecolor="white", markersize=4, linestyle="none",
                  label=label)  # fmt: skip


def missed_keys(numbers: pd.DataFrame) -> list[Line2D]:
    """The entry, if any of these runs missed."""
    return [] if numbers["reached"].all() else [missed_key()]


def missed_words(numbers: pd.DataFrame) -> str:
    """Caption: how many of the drawn runs missed, and that they are hollow."""
    runs = numbers.drop_duplicates("run")
    missed = int((~runs["reached"]).sum())
    return f"Hollow: {missed} of {len(runs)} runs, which {MISSED}." if missed else ""
