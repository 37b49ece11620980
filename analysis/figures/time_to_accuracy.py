"""Time to the target and its two factors, epochs needed and seconds per epoch, by arm and world size."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.comparisons import points
from analysis.figures import captions, drawing
from analysis.figures.captions import missed_key
from analysis.figures.drawing import ArmStyle, Drawing, NothingToDraw
from analysis.metrics import time_to_accuracy
from analysis.records.study import Study
from analysis.statistics.intervals import Interval, level

PANELS = {
    "seconds": "time to target (s)",
    "epochs": "epochs to target",
    "seconds_per_epoch": "time per epoch (s)",
}
MEASURED = "seconds_per_epoch"
"""The panel in which a missed run is like any other: it is not a lower limit."""

_ARROW_POINTS = 14
_ROOM = 1.06, 1.35
"""Upper end of an axis over its highest dot, and over its highest miss, whose arrow and number need room."""


def draw(study: Study) -> Drawing:
    """Every run a dot; runs that missed their target are hollow, at their ends, with a counted arrow."""
    runs = time_to_accuracy(study).dropna(subset=["seconds"])
    if runs.empty:
        raise NothingToDraw("no run has trained up to its first evaluation")
    styles = drawing.arm_styles(study, runs["arm"])
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.6, columns=3)
    intervals: dict[tuple[str, int], dict[str, Interval]] = {}
    shifts = drawing.dodge(list(styles), width=0.66)
    for axis, (column, label) in zip(axes, PANELS.items(), strict=True):
        for arm, world_size, group in points(runs):
            x = math.log2(world_size) + shifts[arm]
            interval = _panel(axis, x, group, column, styles[arm])
            intervals.setdefault((arm, world_size), {})[column] = interval
        drawing.world_size_axis(axis, runs)
        axis.set_ylabel(label)
        _limit(axis, runs, column)
    entries: list[Any] = [*drawing.handles(styles, size=6)]
    if not runs["reached"].all():
        arrow = Line2D([], [], color=drawing.GREY, marker=r"$\uparrow$", markersize=7, linestyle="none")
        entries.append((missed_key("missed: at least, and how many runs"), arrow))
    drawing.legend_below(figure, entries, columns=min(len(styles) + 1, 4))
    numbers = runs.merge(_flat(intervals), on=["arm", "world_size"])
    drawn = [interval for of_point in intervals.values() for interval in of_point.values()]
    return Drawing(figure, numbers, _caption(study, numbers, drawn))


def _panel(axis: Axes, x: float, group: pd.DataFrame, column: str, style: ArmStyle) -> Interval:
    """Draw one arm at one world size; a missed run is drawn at its end, as a lower limit."""
    solid = group["reached"] | (column == MEASURED)
    reached, missed = group[solid], group[~solid].dropna(subset=column)
    look: dict[str, Any] = {
        "marker": style.marker,
        "linestyle": "none",
        "markersize": 4,
        "color": style.colour,
    }
    axis.plot([x] * len(reached), reached[column], alpha=0.7, markeredgewidth=0, **look)
    if len(missed):
        axis.plot([x] * len(missed), missed[column], markerfacecolor="white", **look)
        _arrow(axis, x, missed[column], style.colour)
    if column == MEASURED:
        interval = level(group[column].dropna().tolist())
    else:
        interval = level(group[column].where(group["reached"], math.inf).tolist())
    drawing.whisker(axis, x, interval, style.colour)
    return interval


def _arrow(axis: Axes, x: float, missed: pd.Series, colour: str) -> None:
    """One arrow above the misses and how many they are: they may lie on one another."""
    top = float(missed.max())
    axis.annotate(
        "", (x, top), xytext=(0, _ARROW_POINTS), textcoords="offset points",
        arrowprops={"arrowstyle": "<-", "color": colour, "linewidth": 0.8},
    )  # fmt: skip
    axis.annotate(
        str(len(missed)), (x, top), xytext=(0, _ARROW_POINTS), textcoords="offset points", fontsize=6,
        color=colour, ha="center", va="bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
    )  # fmt: skip


def _limit(axis: Axes, runs: pd.DataFrame, column: str) -> None:
    """From 0 to above what is drawn, arrows included."""
    over, over_misses = _ROOM
    tops = [axis.dataLim.y1 * over]
    if column != MEASURED:
        tops.append(float(runs[column][~runs["reached"]].max()) * over_misses)
    known = [top for top in tops if math.isfinite(top) and top > 0]
    axis.set_ylim(0, max(known, default=1.0))


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
        captions.whiskers(intervals),
        f"Hollow: {missed} of {len(numbers)} runs missed and are shown where they stopped, a lower limit;"
        " the number at an arrow says how many. Their time per epoch is measured."
        if missed
        else "",
        captions.remarks(study, numbers),
    )
