"""A fixed memory budget: the batch size, throughput and accuracy that each method reaches in it (KAISA)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from analysis.figures import captions, drawing
from analysis.figures.by_batch import BATCH_FIELDS
from analysis.figures.drawing import Drawing, NothingToDraw
from analysis.metrics import IDENTITY, finals, in_order
from analysis.records.study import Study
from analysis.steps import peak_bytes, run_speeds


def draw(study: Study) -> Drawing:
    """Left: the best throughput within a budget. Right: the best accuracy of runs of fixed length."""
    cells = study.cells.assign(series=study.series(*BATCH_FIELDS))
    runs = cells[[*IDENTITY, "series", "global_batch_size"]].merge(peak_bytes(study), on="run")
    runs = runs.merge(run_speeds(study)[["run", "samples_per_second"]], on="run")
    several = runs.groupby(["series", "world_size"])["global_batch_size"].transform("nunique") > 1
    runs = runs[several]
    if runs.empty:
        raise NothingToDraw("no arm with a second batch size, so memory buys nothing")
    size = captions.largest(runs)
    where = captions.largest_words(runs, size, "with several batch sizes")
    runs = runs[runs["world_size"] == size]
    last = finals(study)
    last = last[last["fixed_length"]][["run", "value", "metric"]]
    runs = in_order(study, runs.merge(last, on="run", how="left"))
    looks = drawing.styles(runs["series"])
    with_accuracy = runs["value"].notna().any()
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.6, columns=2 if with_accuracy else 1)
    points = _points(runs)
    for name, look in looks.items():
        own = points[points["series"] == name].sort_values("peak_bytes")
        for axis, column in zip(axes, ("samples_per_second", "value"), strict=False):
            best = own.dropna(subset=column)
            axis.plot(best["peak_bytes"] / 1e6, best[column], look.marker, color=look.colour, markersize=4)
            axis.plot(best["peak_bytes"] / 1e6, best[column].cummax(), look.line, drawstyle="steps-post",
                      color=look.colour, linewidth=1)  # fmt: skip
            rows: Iterator[Any] = best.itertuples(index=False)
            for row in rows:
                axis.annotate(f"{row.global_batch_size}", (row.peak_bytes / 1e6, getattr(row, column)),
                              xytext=(3, 3), textcoords="offset points", fontsize=5.5,
                              color=look.colour)  # fmt: skip
    axes[0].set_ylabel("samples per second")
    if with_accuracy:
        axes[1].set_ylabel(f"{runs['metric'].dropna().iloc[0]} at the end")
    for axis in axes:
        axis.set_xlabel("memory budget per rank (MB)")
        axis.margins(0.08)
    drawing.legend_below(figure, drawing.handles(looks, lines=True), columns=min(len(looks), 4))
    kind = " / ".join(sorted(runs["kind"].unique()))
    caption = drawing.sentence(
        f"What a memory budget per rank ({kind} of the rank that needs most) buys on",
        f"{where}: the step line is",
        "the best batch that fits. A marker is the median of the runs with one batch size, printed beside it",
        f"({drawing.counts(runs, ('series', 'global_batch_size'))}). 1 MB = 1e6 bytes.",
        captions.remarks(study, runs, study.cells["world_size"] == size),
    )
    return Drawing(figure, runs, caption)


def _points(runs: pd.DataFrame) -> pd.DataFrame:
    columns = ["peak_bytes", "samples_per_second", "value"]
    by = runs.groupby(["series", "global_batch_size"], sort=False)[columns]
    return by.median().reset_index()
