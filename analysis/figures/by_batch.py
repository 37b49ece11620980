"""Accuracy over batch size, own runs beside the published ones; shared by two figures."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.drawing import (
    TWO_COLUMNS,
    ArmStyle,
    Drawing,
    NothingToDraw,
    counts,
    handles,
    legend_below,
    panels,
    remarks,
    sentence,
    styles,
    whiskers,
)
from analysis.figures.response import draw_response, final_metric, summaries, ticks
from analysis.metrics import finals
from analysis.published import provenance
from analysis.records.study import Study

BATCH_FIELDS = ("training.global_batch_size", "training.local_batch_size")


def fixed_length_runs(study: Study, *axis: str) -> pd.DataFrame:
    """Last evaluations of the runs that continue after their target, with their `series` over `axis`.

    Raises:
        NothingToDraw: there are no such runs.
    """
    names = dict(zip(study.cells["run"], study.series(*axis), strict=True))
    runs = finals(study)
    runs = runs[runs["fixed_length"]].assign(series=lambda rows: rows["run"].map(names))
    if runs.empty:
        raise NothingToDraw(
            "no run of fixed length (training.stop_at_target: false), and where a run stops at its target "
            "its last accuracy says no more than that"
        )
    return runs.reset_index(drop=True)


def accuracy_by_batch(
    study: Study, runs: pd.DataFrame, table: pd.DataFrame, columns: Mapping[str, str], about: str
) -> Drawing:
    """Own runs on the left, the published on the right.

    Args:
        study: for remarks.
        runs: rows of `fixed_length_runs`, at least two batch sizes.
        table: the published numbers, a row per batch size; empty for none.
        columns: column of `table` by its label.
        about: where the published numbers were measured.
    """
    looks = styles([*dict.fromkeys(runs["series"]), *columns])
    own = {name: looks[name] for name in dict.fromkeys(runs["series"])}
    metric = " / ".join(sorted(runs["metric"].unique()))
    quantity = final_metric(runs)
    figure, axes = panels(TWO_COLUMNS, 2.7, columns=1 if table.empty else 2)
    found = draw_response(axes[0], runs, "global_batch_size", quantity, own)
    axes[0].set_xlabel("global batch size (examples)")
    axes[0].set_title("this study", fontsize=8)
    entries = handles(own, lines=True)
    if not table.empty:
        theirs = {label: looks[label] for label in columns}
        _published(axes[1], table, columns, theirs)
        axes[1].set_title(f"published: {about}", fontsize=8)
        entries += handles(theirs, lines=True)
    legend_below(figure, entries, columns=min(len(entries), 4))
    epochs = sorted(runs["epochs"].unique())
    length = f"{epochs[0]:g}" if len(epochs) == 1 else f"{epochs[0]:g} to {epochs[-1]:g}"
    caption = sentence(
        f"Held-out {metric} after {length} epochs, all ranks' evaluation together, against the global batch.",
        f"Every run is a dot ({counts(runs, ('series', 'global_batch_size'))}), lines join medians.",
        whiskers(found),
        f"Right: {about}, {provenance(table)}; another data set, to compare shapes, not heights."
        if not table.empty
        else "",
        remarks(study, runs),
    )
    return Drawing(figure, summaries(runs, "global_batch_size", [quantity]), caption)


def _published(
    axis: Axes, table: pd.DataFrame, columns: Mapping[str, str], looks: Mapping[str, ArmStyle]
) -> None:
    for label, column in columns.items():
        values = pd.to_numeric(table[column])
        percent = values * 100 if values.max() <= 1 else values
        look = looks[label]
        fill = look.colour if table["printed"].all() else "white"
        axis.plot(range(len(percent)), percent, look.line, color=look.colour, linewidth=0.7)
        axis.plot(
            range(len(percent)), percent, look.marker, color=look.colour, markerfacecolor=fill, markersize=4
        )
    ticks(axis, list(table["global_batch_size"]))
    axis.set_xlabel("global batch size (examples)")
    axis.set_ylabel("top-1 accuracy (%)")
