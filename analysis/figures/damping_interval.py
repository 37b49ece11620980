"""How sensitive a method is to damping and to the inverse interval: a heat map (DP-KFAC)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from analysis.figures import captions, drawing
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.metrics import finals, in_order, kfac_cells, time_to_accuracy
from analysis.records.study import Study
from analysis.statistics.intervals import median

FIELDS = ("kfac.damping", "kfac.inverse_update_steps", "kfac.factor_update_steps")


def draw(study: Study) -> Drawing:
    """A panel per method; median epochs to the target, or the last accuracy of runs of fixed length."""
    runs, label = _values(study)
    names = dict(zip(study.cells["run"], study.series(*FIELDS), strict=True))
    runs = runs.assign(series=runs["run"].map(names))
    options = {"damping": study.value_of(FIELDS[0]), "inverse_update_steps": study.value_of(FIELDS[1])}
    runs = runs.merge(study.cells[["run"]].assign(**options), on="run")  # a schedule is its text
    runs = runs.dropna(subset=list(options))
    size = captions.largest(runs) if len(runs) else 0
    where = captions.largest_words(runs, size, "measured") if len(runs) else ""
    runs = runs[runs["world_size"] == size]
    shape = runs.groupby("series")[["damping", "inverse_update_steps"]].transform("nunique").min(axis=1)
    runs = runs[shape > 1]
    if runs.empty:
        raise NothingToDraw("no arm with a second damping and a second inverse interval")
    runs = in_order(study, runs.reset_index(drop=True))
    series = list(dict.fromkeys(runs["series"]))
    width = drawing.ONE_COLUMN if len(series) == 1 else drawing.TWO_COLUMNS
    figure, axes = drawing.panel_grid(series, 3, 2.5, 0.3, width=width)
    finite = runs["shown"][np.isfinite(runs["shown"])]
    scale = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    for name, axis in zip(series, axes, strict=True):
        _map(axis, runs[runs["series"] == name], scale)
    entry = Patch(
        facecolor="white", edgecolor=drawing.GREY, hatch="////", label="median run missed or no run"
    )
    shown = Patch(facecolor=colormaps["cividis"](0.2), label=f"{label[0].lower()}{label[1:]}, median")
    drawing.legend_below(figure, [shown, entry], columns=1)
    caption = drawing.sentence(
        f"{label} by damping and steps between inverse updates, on {where}: the median over",
        "runs, printed in each field",
        f"({drawing.counts(runs, ('series', 'damping', 'inverse_update_steps'))});",
        "darker is less.",
        captions.remarks(
            study, runs, kfac_cells(study) & (study.cells["world_size"] == size), captions.STARRED
        ),
    )
    return Drawing(figure, runs, caption)


def _values(study: Study) -> tuple[pd.DataFrame, str]:
    last = finals(study)
    last = last[last["fixed_length"]]
    if len(last):
        metric = str(last["metric"].iloc[0])
        return last.assign(shown=last["value"]), f"{metric.capitalize()} at the end"
    scored = time_to_accuracy(study)
    return scored.assign(shown=scored["scored_epochs"]), "Epochs to the target"


def _map(axis: Axes, runs: pd.DataFrame, scale: tuple[float, float]) -> None:
    dampings = sorted(runs["damping"].unique(), key=_numbers_first)
    intervals = sorted(runs["inverse_update_steps"].unique(), key=_numbers_first)
    by_field = runs.groupby(["damping", "inverse_update_steps"], sort=False)["shown"]
    fields = by_field.apply(lambda values: median(values.tolist()))
    grid = np.array([[fields.get((d, e), math.nan) for e in intervals] for d in dampings], dtype=float)
    low, high = scale
    axis.imshow(np.where(np.isfinite(grid), grid, np.nan), cmap="cividis", vmin=low, vmax=high,
                aspect="auto", origin="lower")  # fmt: skip
    for (row, column), value in np.ndenumerate(grid):
        known = math.isfinite(value)
        if not known:
            axis.add_patch(_hatched(row, column))
        light = known and (value - low) > 0.55 * (high - low)
        axis.text(column, row, drawing.number(value) if known else "–", ha="center", va="center", fontsize=7,
                  color="black" if light or not known else "white")  # fmt: skip
    axis.set_xticks(range(len(intervals)), [_label(e) for e in intervals])
    axis.set_yticks(range(len(dampings)), [_label(d) for d in dampings])
    axis.set_xlabel("steps between inverse updates")
    axis.set_ylabel("damping")
    axis.grid(False)


def _numbers_first(value: float | str) -> tuple[bool, float, str]:
    """Sorts schedules, which are text, after the numbers."""
    return (True, 0.0, value) if isinstance(value, str) else (False, value, "")


def _label(value: float | str) -> str:
    """A tick's text; the milestones of a schedule are on a line of their own."""
    return value.replace(" at ", "\nat ") if isinstance(value, str) else drawing.number(value)


def _hatched(row: int, column: int) -> Patch:
    return Rectangle(
        (column - 0.5, row - 0.5), 1, 1, facecolor="white", edgecolor=drawing.GREY, hatch="////", lw=0
    )
