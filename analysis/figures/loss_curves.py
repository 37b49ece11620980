"""Training loss against steps and time (NLCG's loss curves, TPDS22's language model)."""

from __future__ import annotations

import numpy as np

from analysis.figures import captions, drawing, misses, worlds
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.metrics import IDENTITY, in_order
from analysis.records.study import Study

AXES = {"step": "steps", "train_seconds": "training time (s)"}


def draw(study: Study) -> Drawing:
    """Every run a line, at the same world size as the learning curves; a non-finite loss ends its line."""
    columns = ["run", *AXES, "train_loss"]
    numbers = study.cells[IDENTITY].merge(study.evaluations.astype({"run": "str"})[columns], on="run")
    if not np.isfinite(numbers["train_loss"]).any():
        raise NothingToDraw("no run has recorded a training loss")
    size = worlds.largest(numbers)
    where = worlds.largest_words(numbers, size, "evaluated")
    numbers = numbers[numbers["world_size"] == size].sort_values(["run", "step"])
    numbers = misses.with_reached(study, in_order(study, numbers))
    looks = drawing.arm_styles(study, numbers["arm"])
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.6, columns=2, sharey=True)
    for axis, (column, label) in zip(axes, AXES.items(), strict=True):
        for arm, look in looks.items():
            for _, run in numbers[numbers["arm"] == arm].groupby("run", sort=True):
                axis.plot(
                    run[column], run["train_loss"], look.line, color=look.colour, linewidth=0.8, alpha=0.8
                )
                last = run[np.isfinite(run["train_loss"])].tail(1)
                fill = look.colour if run["reached"].all() else "white"
                axis.plot(last[column], last["train_loss"], look.marker, color=look.colour, markersize=3,
                          markerfacecolor=fill)  # fmt: skip
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
    losses = numbers["train_loss"][np.isfinite(numbers["train_loss"])]
    if losses.min() > 0 and losses.max() > 10 * losses.min():  # less than a decade has no round tick labels
        axes[0].set_yscale("log")
    axes[0].set_ylabel("training loss")
    entries = [*drawing.handles(looks, lines=True), *misses.missed_keys(numbers)]
    drawing.legend_below(figure, entries, columns=min(len(entries), 4))
    bad = int(numbers[~np.isfinite(numbers["train_loss"])]["run"].nunique())
    same_size = study.only(study.cells["world_size"] == size)
    caption = drawing.sentence(
        f"Training loss, the mean since the last evaluation over all ranks, on {where}; every",
        f"run a line ({drawing.counts(numbers)}), a marker where it ended.",
        misses.missed_words(numbers),
        "Training time excludes evaluation.",
        f"{bad} run(s) met a non-finite loss; their lines end before it." if bad else "",
        captions.remarks(same_size, numbers),
    )
    return Drawing(figure, numbers, caption)
