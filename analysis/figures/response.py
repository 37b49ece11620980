"""Quantities over a field that a sweep varies, a line for every series; shared by several figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.drawing import ArmStyle, number, whisker
from analysis.statistics.intervals import Interval, level


@dataclass(frozen=True)
class Quantity:
    """A column of the runs that a panel shows, multiplied by `factor` and labelled with its unit."""

    column: str
    label: str
    factor: float = 1.0


def final_metric(runs: pd.DataFrame) -> Quantity:
    """The target's metric at the end of the runs, accuracy in percent."""
    metric = " / ".join(sorted(runs["metric"].unique()))
    if metric == "accuracy":
        return Quantity("value", "accuracy at the end (%)", 100.0)
    return Quantity("value", f"{metric} at the end")


def draw_response(
    axis: Axes, runs: pd.DataFrame, x: str, quantity: Quantity, looks: Mapping[str, ArmStyle]
) -> list[Interval]:
    """Draw every run as a dot, and join the medians, with an interval if n allows one.

    Args:
        axis: the panel.
        runs: rows with `series`, `x` and the quantity's column.
        x: column of the field that varies; its values are drawn in order, at equal distances.
        quantity: what the panel shows.
        looks: the series to draw, in order.
    """
    values = sorted(runs[x].unique())
    place = {value: position for position, value in enumerate(values)}
    found = []
    for index, (name, look) in enumerate(looks.items()):
        own = runs[runs["series"] == name].dropna(subset=quantity.column)
        shift = (index - (len(looks) - 1) / 2) * min(0.16, 0.5 / len(looks))
        centres = []
        for value, group in own.groupby(x, sort=True):
            at = place[value] + shift
            dots = group[quantity.column] * quantity.factor
            axis.plot([at] * len(dots), dots, look.marker, color=look.colour, alpha=0.5, markersize=3, mew=0)
            interval = level(group[quantity.column].tolist())
            whisker(axis, at, interval.scaled(quantity.factor), look.colour)
            centres.append((at, interval.estimate * quantity.factor))
            found.append(interval)
        if centres:
            axis.plot(*zip(*centres, strict=True), look.line, color=look.colour, linewidth=0.9)
    ticks(axis, values)
    axis.set_ylabel(quantity.label)
    return found


def ticks(axis: Axes, values: Sequence[float]) -> None:
    """Mark the values of a field at equal distances."""
    axis.set_xticks(range(len(values)), [number(value) for value in values])
    axis.set_xlim(-0.5, len(values) - 0.5)


def summaries(runs: pd.DataFrame, x: str, quantities: Sequence[Quantity]) -> pd.DataFrame:
    """Runs with the drawn medians and limits: the CSV of such a figure."""
    rows = []
    for (series, value), group in runs.groupby(["series", x], sort=False):
        row: dict[str, object] = {"series": series, x: value}
        for quantity in quantities:
            interval = level(group[quantity.column].dropna().tolist())
            for part in ("estimate", "low", "high", "method"):
                row[f"{quantity.column}_{part}"] = getattr(interval, part)
        rows.append(row)
    return runs.merge(pd.DataFrame(rows), on=["series", x])
