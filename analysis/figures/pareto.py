"""Time against memory, with the Pareto front of every setting."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis.comparisons import points
from analysis.figures import captions, drawing
from analysis.figures.captions import missed_key
from analysis.figures.drawing import ArmStyle, Drawing, NothingToDraw
from analysis.metrics import IDENTITY, in_order, time_to_accuracy
from analysis.records.study import Study
from analysis.statistics.intervals import median
from analysis.steps import peak_bytes, run_speeds

COLUMNS = 3


def draw(study: Study) -> Drawing:
    """A panel per world size; time to the target where runs reached it, else time per step."""
    runs = study.cells[IDENTITY].merge(peak_bytes(study), on="run").merge(run_speeds(study), on="run")
    runs = runs.merge(time_to_accuracy(study)[["run", "scored_seconds"]], on="run", how="left")
    if runs.empty:
        raise NothingToDraw("no run has recorded both its memory and a window of steps")
    by_target = bool((runs.groupby(["arm", "world_size"])["scored_seconds"].median() < math.inf).any())
    runs["time"] = runs["scored_seconds"] if by_target else runs["seconds_per_step"] * 1e3
    runs = in_order(study, runs.dropna(subset="time"))
    own_runs = {int(str(size)): own for size, own in runs.groupby("world_size")}
    figure, axes = drawing.panel_grid(
        [drawing.ranks_label(size, own) for size, own in own_runs.items()], COLUMNS, 2.3, 0.7,
        ylabel="time to target (s)" if by_target else "time per step (ms)",
    )  # fmt: skip
    looks = drawing.arm_styles(study, runs["arm"])
    fronts = [_panel(axis, own, looks) for own, axis in zip(own_runs.values(), axes, strict=True)]
    entries = drawing.handles(looks)
    missed = runs[runs["time"] == math.inf]
    if len(missed):
        entries.append(missed_key("missed, at the upper edge"))
    if any(fronts):
        entries.append(Line2D([], [], color=drawing.GREY, label="not beaten in both"))
    drawing.legend_below(figure, entries, columns=4)
    kind = " / ".join(sorted(runs["kind"].unique()))
    what = f"time to the target ({study.scoring.about})" if by_target else "time per step"
    caption = drawing.sentence(
        f"{what.capitalize()} against peak memory ({kind} of the rank that needs most); small markers are",
        f"runs ({drawing.counts(runs)}), large ones their medians.",
        "Lines join the medians of one setting that none beats in both." if any(fronts) else "",
        "Left and down is better. 1 MB = 1e6 bytes.",
        _misses(runs, missed),
        captions.remarks(study, runs),
    )
    return Drawing(figure, runs, caption)


def _panel(axis: Axes, runs: pd.DataFrame, looks: Mapping[str, ArmStyle]) -> bool:
    """Draw one world size; whether a line joins any medians."""
    centres: dict[str, list[tuple[float, float]]] = {}
    for arm, group in runs.groupby("arm", sort=False):
        look = looks[str(arm)]
        megabytes, missed = group["peak_bytes"] / 1e6, group["time"] == math.inf
        axis.plot(megabytes[~missed], group["time"][~missed], look.marker, color=look.colour, markersize=3,
                  alpha=0.4, mew=0)  # fmt: skip
        if missed.any():
            axis.plot(
                megabytes[missed], [1.0] * missed.sum(), look.marker, color=look.colour, markersize=4,
                markerfacecolor="white", transform=axis.get_xaxis_transform(), clip_on=False,
            )  # fmt: skip
        centre = median(megabytes.tolist()), median(group["time"].tolist())
        if centre[1] < math.inf:
            axis.plot(*centre, look.marker, color=look.colour, markersize=5.5)
            centres.setdefault(str(group["setting"].iloc[0]), []).append(centre)
    # settings apart: a smaller model always wins in both
    fronts = [front for beside in centres.values() if len(front := _front(beside)) > 1]
    for front in fronts:
        axis.plot(*zip(*front, strict=True), "-", color=drawing.GREY, linewidth=0.8, zorder=0)
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.set_xlabel("peak memory per rank (MB)")
    axis.set_ylim(bottom=0)
    return bool(fronts)


def _misses(runs: pd.DataFrame, missed: pd.DataFrame) -> str:
    """Caption: how many runs missed, and which arms have no median for that."""
    if missed.empty:
        return ""
    labels = drawing.world_size_labels(runs)
    without: dict[str, list[str]] = {}
    for arm, size, group in points(runs):
        if median(group["time"].tolist()) == math.inf:
            without.setdefault(arm, []).append(labels[size])
    named = "; ".join(
        f"{arm} on {' and '.join(sizes)} rank{'s' if sizes != ['1'] else ''}"
        for arm, sizes in without.items()
    )
    return drawing.sentence(
        f"{len(missed)} of {len(runs)} runs missed the target: hollow, at the upper edge.",
        f"No median, because half of the runs or more missed: {named}." if named else "",
    )


def _front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto-optimal points of (memory, time), ordered by memory."""
    front: list[tuple[float, float]] = []
    for memory, time in sorted(points):
        if not front or time < front[-1][1]:
            front.append((memory, time))
    return front
