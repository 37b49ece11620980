"""Time to the target and its two factors, epochs needed and seconds per epoch, by arm and world size."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.comparisons import points
from analysis.figures import drawing
from analysis.figures.drawing import ArmStyle, Drawing, NothingToDraw
from analysis.metrics import time_to_accuracy
from analysis.records.study import Study
from analysis.statistics.intervals import Interval, level

PANELS = {
    "seconds": "time to target (s)",
    "epochs": "epochs to target",
    "seconds_per_epoch": "time per epoch (s)",
}


def draw(study: Study) -> Drawing:
    """Every run a dot; a run that missed its target is hollow, with an arrow, at its end."""
    runs = time_to_accuracy(study).dropna(subset=["seconds"])
    if runs.empty:
        raise NothingToDraw("no run has trained up to its first evaluation")
    styles = drawing.arm_styles(study, runs["arm"])
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.6, columns=3)
    intervals: dict[tuple[str, int], dict[str, Interval]] = {}
    shifts = drawing.dodge(list(styles))
    for axis, (column, label) in zip(axes, PANELS.items(), strict=True):
        for arm, world_size, group in points(runs):
            x = math.log2(world_size) + shifts[arm]
            interval = _panel(axis, x, group, column, styles[arm])
            intervals.setdefault((arm, world_size), {})[column] = interval
        drawing.world_size_axis(axis, runs)
        axis.set_ylabel(label)
        axis.margins(y=0.15)  # the arrow of a miss points beyond its dot
        axis.set_ylim(bottom=0)
    entries = drawing.handles(styles, size=6)
    if not runs["reached"].all():
        entries.append(
            Line2D([], [], color=drawing.GREY, marker="o", markerfacecolor="white", linestyle="none",
                   label="missed: at least")
        )  # fmt: skip
    drawing.legend_below(figure, entries, columns=min(len(styles) + 1, 4))
    numbers = runs.merge(_flat(intervals), on=["arm", "world_size"])
    drawn = [interval for of_point in intervals.values() for interval in of_point.values()]
    return Drawing(figure, numbers, _caption(study, numbers, drawn))


def _panel(axis: Axes, x: float, group: pd.DataFrame, column: str, style: ArmStyle) -> Interval:
    """Draw one arm at one world size; a missed run is drawn at its end, as a lower limit."""
    reached, missed = group[group["reached"]], group[~group["reached"]]
    look: dict[str, Any] = {
        "marker": style.marker,
        "linestyle": "none",
        "markersize": 4,
        "color": style.colour,
    }
    axis.plot([x] * len(reached), reached[column], alpha=0.7, markeredgewidth=0, **look)
    axis.plot([x] * len(missed), missed[column], markerfacecolor="white", **look)
    if column != "seconds_per_epoch":
        for value in missed[column].dropna():
            axis.annotate(
                "", (x, value), xytext=(0, 14), textcoords="offset points",
                arrowprops={"arrowstyle": "<-", "color": style.colour, "linewidth": 0.8},
            )  # fmt: skip
        interval = level(group[column].where(group["reached"], math.inf).tolist())
    else:
        interval = level(group[column].dropna().tolist())
    drawing.whisker(axis, x, interval, style.colour)
    return interval


def _flat(intervals: dict[tuple[str, int], dict[str, Interval]]) -> pd.DataFrame:
    """A row per point: median, limits and method of every panel."""
    rows = []
    for (arm, size), of_point in intervals.items():
        row: dict[str, Any] = {"arm": arm, "world_size": size}
        for name, one in of_point.items():
            row |= {f"median_{name}": one.estimate, f"low_{name}": one.low, f"high_{name}": one.high}
            row["interval" if name == "seconds" else f"interval_{name}"] = one.method
        rows.append(row)
    return pd.DataFrame(rows)


def _caption(study: Study, numbers: pd.DataFrame, intervals: list[Interval]) -> str:
    targets = study.cells[["target_metric", "target_value", "target_direction"]].drop_duplicates()
    goal = " or ".join(
        f"{metric} {'at least' if direction == 'higher' else 'at most'} {value:g}"
        for metric, value, direction in targets.itertuples(index=False)
    )
    missed = int((~numbers["reached"]).sum())
    return drawing.sentence(
        f"Time to {goal}: {study.scoring.about}. Every run is a dot ({drawing.counts(numbers)}); the bar is",
        "the median, with a miss counted as slowest.",
        drawing.whiskers(intervals),
        f"{missed} of {len(numbers)} runs missed and are shown where they stopped." if missed else "",
        drawing.remarks(study, numbers),
    )
