"""The target's metric over epochs and over training time, with the target."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.figures import captions, drawing, misses, worlds
from analysis.figures.drawing import ArmStyle, Drawing, NothingToDraw
from analysis.metrics import IDENTITY, arm_order
from analysis.records.study import Study

AXES = {"epoch": "epochs", "train_seconds": "training time (s)"}


def draw(study: Study) -> Drawing:
    """Every run a line, at the largest evaluated world size with a CPU for each rank."""
    columns = ["target_metric", "target_value"]
    numbers = study.cells[[*IDENTITY, *columns]].merge(
        study.evaluations.astype({"run": "str"})[["run", "step", *AXES, "metric", "value"]], on="run"
    )
    numbers = numbers[numbers["metric"] == numbers["target_metric"]]
    if numbers["value"].notna().sum() == 0:
        raise NothingToDraw("no run has been evaluated")
    size = worlds.largest(numbers)
    where = worlds.largest_words(numbers, size, "evaluated")
    numbers = numbers[numbers["world_size"] == size].reset_index(drop=True)
    numbers = misses.with_reached(study, numbers)
    styles = drawing.arm_styles(study, numbers["arm"])
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.6, columns=2, sharey=True)
    for axis, (column, label) in zip(axes, AXES.items(), strict=True):
        draw_runs(axis, numbers, column, styles, arm_order(study))
        for value in numbers["target_value"].unique():
            axis.axhline(value, color=drawing.GREY, linestyle=":", linewidth=1)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
    axes[0].set_ylabel(" / ".join(sorted(numbers["metric"].unique())))
    target = Line2D([], [], color=drawing.GREY, linestyle=":", label="target")
    entries = [*drawing.handles(styles, lines=True, size=3), *misses.missed_keys(numbers), target]
    drawing.legend_below(figure, entries, columns=min(len(entries), 4))
    return Drawing(figure, numbers, _caption(study, numbers, where))


def draw_runs(
    axis: Axes, numbers: pd.DataFrame, column: str, styles: dict[str, ArmStyle], arms: list[str]
) -> None:
    """A line for each run: `value` over `column`, with a marker where it ended, hollow if it missed."""
    for arm in arms:
        for _, run in numbers[numbers["arm"] == arm].groupby("run", sort=True):
            style = styles[arm]
            axis.plot(run[column], run["value"], style.line, color=style.colour, linewidth=0.8, alpha=0.8)
            last = run.tail(1)
            fill = style.colour if last["reached"].item() else "white"
            axis.plot(last[column], last["value"], style.marker, color=style.colour, markersize=3.5,
                      markerfacecolor=fill)  # fmt: skip


def _caption(study: Study, numbers: pd.DataFrame, where: str) -> str:
    size = numbers["world_size"].iloc[0]
    same_size = replace(study, cells=study.cells[study.cells["world_size"] == size])
    return drawing.sentence(
        f"Held-out {' / '.join(sorted(numbers['metric'].unique()))} on {where};",
        f"every run a line, a marker where it ended ({drawing.counts(numbers)}).",
        misses.missed_words(numbers),
        "Training time excludes evaluation. Dotted: the target.",
        captions.remarks(same_size, numbers),
    )
