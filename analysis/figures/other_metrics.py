"""The metrics that the target does not name, over epochs and over training time, from the same runs."""

from __future__ import annotations

from dataclasses import replace

from analysis.figures import captions, drawing, misses, worlds
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.figures.learning_curves import AXES, draw_runs
from analysis.metrics import IDENTITY, arm_order
from analysis.records.study import Study


def draw(study: Study) -> Drawing:
    """A row of panels per metric; every run a line, at the same world size as the learning curves."""
    others = study.metrics[~study.metrics["is_target"]]
    columns = ["run", "step", *AXES, "metric", "value"]
    numbers = study.cells[IDENTITY].merge(others[columns], on="run")
    if numbers["value"].notna().sum() == 0:
        raise NothingToDraw("no run has recorded a metric beside its target's")
    size = worlds.largest(numbers)
    where = worlds.largest_words(numbers, size, "evaluated")
    numbers = numbers[numbers["world_size"] == size].reset_index(drop=True)
    numbers = misses.with_reached(study, numbers)
    styles, metrics = drawing.arm_styles(study, numbers["arm"]), list(dict.fromkeys(numbers["metric"]))
    rows = len(metrics)
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 1.7 * rows + 0.7, columns=2, rows=rows, sharey="row")
    for place, axis in enumerate(axes):
        metric, (column, label) = metrics[place // 2], list(AXES.items())[place % 2]
        draw_runs(axis, numbers[numbers["metric"] == metric], column, styles, arm_order(study))
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        if not place % 2:
            axis.set_ylabel(metric)
    entries = [*drawing.handles(styles, lines=True, size=3), *misses.missed_keys(numbers)]
    drawing.legend_below(figure, entries, columns=min(len(entries), 4))
    same_size = replace(study, cells=study.cells[study.cells["world_size"] == size])
    targets = " / ".join(sorted(study.cells["target_metric"].unique()))
    caption = drawing.sentence(
        f"What the evaluations of the same runs measured beside the target's {targets}, on",
        f"{where}; every run a line, a marker where it ended",
        f"({drawing.counts(numbers)}).",
        misses.missed_words(numbers),
        "Training time excludes evaluation.",
        captions.remarks(same_size, numbers),
    )
    return Drawing(figure, numbers, caption)
