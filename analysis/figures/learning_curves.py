"""The target's metric over epochs and over training time, with the target."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.figures import drawing
from analysis.figures.drawing import ArmStyle, Drawing, NothingToDraw
from analysis.metrics import IDENTITY, arm_order
from analysis.records.study import Study

AXES = {"epoch": "epochs", "train_seconds": "training time (s)"}


def draw(study: Study) -> Drawing:
    """Every run a line, at the largest world size that has evaluations."""
    columns = ["target_metric", "target_value"]
    numbers = study.cells[[*IDENTITY, *columns]].merge(
        study.evaluations.astype({"run": "str"})[["run", "step", *AXES, "metric", "value"]], on="run"
    )
    numbers = numbers[numbers["metric"] == numbers["target_metric"]]
    if numbers["value"].notna().sum() == 0:
        raise NothingToDraw("no run has been evaluated")
    numbers = numbers[numbers["world_size"] == numbers["world_size"].max()].reset_index(drop=True)
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
    drawing.legend_below(
        figure, [*drawing.handles(styles, lines=True, size=3), target], columns=min(len(styles) + 1, 4)
    )
    return Drawing(figure, numbers, _caption(study, numbers))


def draw_runs(
    axis: Axes, numbers: pd.DataFrame, column: str, styles: dict[str, ArmStyle], arms: list[str]
) -> None:
    """A line for each run: `value` over `column`, with a marker where it ended."""
    for arm in arms:
        for _, run in numbers[numbers["arm"] == arm].groupby("run", sort=True):
            style = styles[arm]
            axis.plot(run[column], run["value"], style.line, color=style.colour, linewidth=0.8, alpha=0.8)
            last = run.tail(1)
            axis.plot(last[column], last["value"], style.marker, color=style.colour, markersize=3.5)


def _caption(study: Study, numbers: pd.DataFrame) -> str:
    size = int(numbers["world_size"].max())
    ranks = f"{size} rank" + ("s" if size > 1 else "") + ("*" if numbers["oversubscribed"].any() else "")
    same_size = replace(study, cells=study.cells[study.cells["world_size"] == size])
    return drawing.sentence(
        f"Held-out {' / '.join(sorted(numbers['metric'].unique()))} on {ranks}, the largest world size",
        f"evaluated; every run a line, a marker where it ended ({drawing.counts(numbers)}).",
        "Training time excludes evaluation. Dotted: the target.",
        drawing.remarks(same_size, numbers),
    )
