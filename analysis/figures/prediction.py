"""Figures of predictions: measured values are filled, predicted values hollow."""

from __future__ import annotations

import math
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.figures import drawing
from analysis.figures.drawing import Drawing
from analysis.figures.phase_styles import EDGE, phase_look, phase_patch

_COLOURS = (*drawing.COLOURS, "#F0E442")  # SGD and all seven strategies


def breakdown(rows: pd.DataFrame, caption: str) -> Drawing:
    """Published and predicted phases side by side.

    Args:
        rows: `model`, `algorithm`, `phase`, `published_ms`, `predicted_ms`.
        caption: context for the reader.
    """
    algorithms = list(dict.fromkeys(rows["algorithm"]))
    phases = list(dict.fromkeys(rows["phase"]))
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, 2.8, columns=len(algorithms), sharey=True)
    for axis, algorithm in zip(axes, algorithms, strict=True):
        own = rows[rows["algorithm"] == algorithm]
        models = list(dict.fromkeys(own["model"]))
        for place, model in enumerate(models):
            for shift, column in ((-0.2, "published_ms"), (0.2, "predicted_ms")):
                bottom = 0.0
                for row in own[own["model"] == model].to_dict("records"):
                    colour, hatch = phase_look(row["phase"])
                    look: dict[str, Any]
                    if column == "predicted_ms":
                        look = {"facecolor": "none", "edgecolor": colour, "hatch": hatch, "linewidth": 1.0}
                    else:
                        look = {"facecolor": colour, "hatch": hatch, **EDGE}
                    axis.bar(place + shift, row[column], 0.36, bottom, **look)
                    bottom += row[column]
        axis.set_xticks(range(len(models)))
        axis.set_xticklabels(models)
        axis.set_title(algorithm, fontsize=8)
    axes[0].set_ylabel("time per step (ms)")
    handles = [phase_patch(phase) for phase in phases]
    hollow_patch = Patch(facecolor="none", edgecolor=drawing.GREY, label="predicted: hollow, right")
    drawing.legend_below(figure, [*handles, hollow_patch], columns=4)
    return Drawing(figure, rows, caption)


def scaling(rows: pd.DataFrame, caption: str) -> Drawing:
    """Seconds per step of every arm over world sizes, and its peak memory; crossovers as vertical lines.

    Args:
        rows: `arm`, `world_size`, `seconds`, `low`, `high`, `peak_bytes`, `fits`, `extrapolated` (larger than
            any world that was measured: shaded), `crossover` (a sentence where an arm overtakes another
            between this world size and the one before, or empty).
        caption: context for the reader; it names the largest measured world.
    """
    figure, (time, memory) = drawing.panels(drawing.TWO_COLUMNS, 3.0, columns=2)
    handles = []
    for place, arm in enumerate(dict.fromkeys(rows["arm"])):
        colour, marker = _COLOURS[place % len(_COLOURS)], drawing.MARKERS[place % len(drawing.MARKERS)]
        own = rows[rows["arm"] == arm]
        _line(time, own, own["seconds"], colour, marker)
        time.fill_between(_log2(own), own["low"], own["high"], color=colour, alpha=0.12, linewidth=0)
        _line(memory, own, own["peak_bytes"] / 2**30, colour, marker)
        handles.append(Line2D([], [], color=colour, marker=marker, mfc="none", markersize=4, label=arm))
    for row in rows[rows["crossover"] != ""].drop_duplicates("world_size").to_dict("records"):
        time.axvline(math.log2(row["world_size"]) - 0.5, color=drawing.GREY, linestyle=":", linewidth=0.7)
    beyond = rows[rows["extrapolated"]]["world_size"]
    with mpl.rc_context(drawing.STYLE):
        for axis in (time, memory):
            if len(beyond):
                axis.axvspan(math.log2(beyond.min()) - 0.5, math.log2(beyond.max()) + 0.5, color="#f3f3f3")
        time.set_yscale("log")
        memory.set_ylim(bottom=0)
        for axis, label in ((time, "seconds per step"), (memory, "peak memory of a rank (GiB)")):
            sizes = sorted(rows["world_size"].unique())
            axis.set_xticks([math.log2(size) for size in sizes])
            axis.set_xticklabels([str(size) for size in sizes], rotation=60)
            axis.set_xlabel("ranks (log2)")
            axis.set_ylabel(label)
    drawing.legend_below(figure, handles, columns=4)
    return Drawing(figure, rows, caption)


def _line(axis: Axes, own: pd.DataFrame, values: pd.Series[float], colour: str, marker: str) -> None:
    """Draw one arm: hollow markers, and a cross if it does not fit in memory."""
    axis.plot(_log2(own), values, color=colour, linewidth=0.8)
    for x, value, fits in zip(_log2(own), values, own["fits"], strict=True):
        axis.plot([x], [value], marker if fits else "x", color=colour, mfc="none", markersize=4)


def _log2(rows: pd.DataFrame) -> list[float]:
    return [math.log2(size) for size in rows["world_size"]]
