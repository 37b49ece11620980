"""What a figure shows, in words for somebody who does not see it: its panels, arms and medians."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.drawing import Drawing, number, ranks

MOST_POINTS, MOST_PANELS, MOST_ARMS = 12, 6, 8
"""Most entries of each list; a longer text would be read to its end by nobody, and the CSV has all."""

VALUES = {
    "median_seconds": "median time to target in seconds", "scored_seconds": "time to target in seconds",
    "seconds_per_step": "step time in seconds", "joules": "energy in joules",
}  # fmt: skip
"""Columns of a figure's numbers of which medians are given, the first that it has, if a row is a run."""


def alt_text(title: str, drawing: Drawing) -> str:
    """Title, panels with the range of their data, arms, and medians by arm and ranks if there are any."""
    panels = [text for axis in drawing.figure.axes if (text := _panel(axis))]
    labels = _listed(_labels(drawing), MOST_ARMS, "entries")
    parts = [title, _listed(panels, MOST_PANELS, "panels"), f"Shown: {labels}" if labels else ""]
    return ". ".join(filter(None, [*parts, _medians(drawing.numbers)])) + "."


def _panel(axis: Axes) -> str:
    """`accuracy over epoch, from 0.1 to 0.98`; of a switched-off panel its text; empty for a colour bar."""
    if not axis.axison:
        return "; ".join(text.get_text().replace("\n", " ") for text in axis.texts)
    if not axis.has_data():
        return ""
    what, over = axis.get_ylabel(), axis.get_xlabel()
    name = axis.get_title().replace("\n", " ")
    text = ": ".join(filter(None, [name, " over ".join(filter(None, [what, over]))]))
    low, high = axis.dataLim.intervaly if what else (math.nan, math.nan)
    known = all(map(math.isfinite, (low, high)))
    return f"{text}, from {number(low)} to {number(high)}" if known and text else text


def _labels(drawing: Drawing) -> list[str]:
    figure = drawing.figure
    legends: list[Any] = [*figure.legends, *(axis.get_legend() for axis in figure.axes)]
    return list(dict.fromkeys(one.get_text() for legend in legends if legend for one in legend.get_texts()))


def _medians(numbers: pd.DataFrame) -> str:
    column = next((name for name in VALUES if name in numbers), None)
    if column is None or not {"run", "arm", "world_size"} <= set(numbers.columns):
        return ""
    if numbers["run"].duplicated().any():  # of phases, windows or ranks, whose median means nothing
        return ""
    medians = numbers.groupby(["arm", "world_size"], sort=False)[column].median().dropna().reset_index()
    told = [
        f"{arm} on {ranks(size)}: {'missed' if math.isinf(value) else number(value)}"
        for arm, size, value in medians.itertuples(index=False)
    ]
    return f"Medians, {VALUES[column]}: {_listed(told, MOST_POINTS, 'points')}" if told else ""


def _listed(texts: list[str], most: int, what: str) -> str:
    more = [f"{len(texts) - most} more {what}"] if len(texts) > most else []
    return "; ".join([*texts[:most], *more])
