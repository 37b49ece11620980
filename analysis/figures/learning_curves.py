"""How runs learn, a line for each: the target's metric, the other metrics, and the training loss."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.figures import captions, drawing
from analysis.figures.drawing import ArmStyle, Drawing, NothingToDraw
from analysis.metrics import IDENTITY, in_order
from analysis.records.study import Study

EPOCHS = {"epoch": "epochs", "train_seconds": "training time (s)"}
STEPS = {"step": "steps", "train_seconds": "training time (s)"}


def draw(study: Study) -> Drawing:
    """The target's metric over epochs and over training time, with the target."""
    columns = ["run", "step", *EPOCHS, "metric", "value"]
    cells = study.cells[[*IDENTITY, "target_metric", "target_value"]]
    numbers = cells.merge(study.evaluations.astype({"run": "str"})[columns], on="run")
    numbers = numbers[numbers["metric"] == numbers["target_metric"]]
    if numbers["value"].notna().sum() == 0:
        raise NothingToDraw("no run has been evaluated")
    where, numbers = _largest(study, numbers)
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.6, columns=2, sharey=True)
    looks = _lines(study, axes, numbers, EPOCHS, "value")
    for axis in axes:
        for value in numbers["target_value"].unique():
            axis.axhline(value, color=drawing.GREY, linestyle=":", linewidth=1)
    metric = " / ".join(sorted(numbers["metric"].unique()))
    axes[0].set_ylabel(metric)
    target = Line2D([], [], color=drawing.GREY, linestyle=":", label="target")
    entries = [*drawing.handles(looks, lines=True, size=3), *captions.missed_keys(numbers), target]
    drawing.legend_below(figure, entries, columns=min(len(entries), 4))
    caption = _caption(study, numbers, f"Held-out {metric} on {where}", "Dotted: the target.")
    return Drawing(figure, numbers, caption)


def draw_other_metrics(study: Study) -> Drawing:
    """A row of panels for every metric that the target does not name, from the same runs."""
    others = study.metrics[~study.metrics["is_target"]]
    numbers = study.cells[IDENTITY].merge(others[["run", "step", *EPOCHS, "metric", "value"]], on="run")
    if numbers["value"].notna().sum() == 0:
        raise NothingToDraw("no run has recorded a metric beside its target's")
    where, numbers = _largest(study, numbers)
    metrics = list(dict.fromkeys(numbers["metric"]))
    height = 1.7 * len(metrics) + 0.7
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, height, columns=2, rows=len(metrics), sharey="row")
    for metric, left, right in zip(metrics, axes[::2], axes[1::2], strict=True):
        own = numbers[numbers["metric"] == metric]
        looks = _lines(study, [left, right], own, EPOCHS, "value", numbers)
        left.set_ylabel(metric)
    entries = [*drawing.handles(looks, lines=True, size=3), *captions.missed_keys(numbers)]
    drawing.legend_below(figure, entries, columns=min(len(entries), 4))
    targets = " / ".join(sorted(study.cells["target_metric"].unique()))
    what = f"What the evaluations of the same runs measured beside the target's {targets}, on {where}"
    return Drawing(figure, numbers, _caption(study, numbers, what))


def draw_losses(study: Study) -> Drawing:
    """Training loss over steps and time (NLCG's curves, TPDS22's); a non-finite loss ends its line."""
    columns = ["run", *STEPS, "train_loss"]
    numbers = study.cells[IDENTITY].merge(study.evaluations.astype({"run": "str"})[columns], on="run")
    losses = numbers["train_loss"]
    if not np.isfinite(losses).any():
        raise NothingToDraw("no run has recorded a training loss")
    where, numbers = _largest(study, numbers)
    numbers = in_order(study, numbers.sort_values(["run", "step"]))
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.6, columns=2, sharey=True)
    looks = _lines(study, axes, numbers, STEPS, "train_loss")
    finite = np.isfinite(numbers["train_loss"])
    losses = numbers["train_loss"][finite]
    if losses.min() > 0 and losses.max() > 10 * losses.min():  # less than a decade has no round tick labels
        axes[0].set_yscale("log")
    axes[0].set_ylabel("training loss")
    entries = [*drawing.handles(looks, lines=True), *captions.missed_keys(numbers)]
    drawing.legend_below(figure, entries, columns=min(len(entries), 4))
    bad = int(numbers[~finite]["run"].nunique())
    ended = f"{bad} run(s) met a non-finite loss; their lines end before it." if bad else ""
    what = f"Training loss, the mean since the last evaluation over all ranks, on {where}"
    return Drawing(figure, numbers, _caption(study, numbers, what, ended))


def _largest(study: Study, numbers: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """The rows of the largest world size with a CPU for each rank, with `reached`, and its words."""
    size = captions.largest(numbers)
    where = captions.largest_words(numbers, size, "evaluated")
    own = numbers[numbers["world_size"] == size].reset_index(drop=True)
    return where, captions.with_reached(study, own)


def _lines(
    study: Study, axes: list[Axes], numbers: pd.DataFrame, over: Mapping[str, str], column: str,
    every: pd.DataFrame | None = None,
) -> dict[str, ArmStyle]:  # fmt: skip
    """A line for each run in every panel, with a marker where it ended, hollow if it missed its target."""
    looks = drawing.arm_styles(study, (numbers if every is None else every)["arm"])
    for axis, (x, label) in zip(axes, over.items(), strict=True):
        for arm, look in looks.items():
            for _, run in numbers[numbers["arm"] == arm].groupby("run", sort=True):
                axis.plot(run[x], run[column], look.line, color=look.colour, linewidth=0.8, alpha=0.8)
                last = run[np.isfinite(run[column])].tail(1)
                fill = look.colour if run["reached"].all() else "white"
                axis.plot(last[x], last[column], look.marker, color=look.colour, markersize=3.5,
                          markerfacecolor=fill)  # fmt: skip
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
    return looks


def _caption(study: Study, numbers: pd.DataFrame, what: str, also: str = "") -> str:
    same_size = study.only(study.cells["world_size"] == numbers["world_size"].iloc[0])
    return drawing.sentence(
        f"{what}; every run a line, a marker where it ended ({drawing.counts(numbers)}).",
        captions.missed_words(numbers),
        "Training time excludes evaluation.",
        also,
        captions.remarks(same_size, numbers),
    )
