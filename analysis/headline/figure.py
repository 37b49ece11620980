"""The figure of the headline: speed-ups with their intervals, and what they are made of."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures import drawing
from analysis.figures.drawing import Drawing
from analysis.headline.comparison import POINT, is_number

_ROW_INCHES = 0.17


def draw(table: pd.DataFrame, caption: str, replaced: Sequence[str] = ()) -> Drawing:
    """Left: every arm's speed-up. Right: epochs saved against what an epoch costs, with the break-even line.

    Args:
        table: of `speedups`. Arms without a speed-up, since a median run missed, keep a row without a point.
        caption: of the figure.
        replaced: names of studies that a later one replaces; their markers are hollow.
    """
    rows = table[(table["baseline"] != "") & (table["arm"] != table["baseline"])].reset_index(drop=True)
    looks = drawing.styles(rows["arm"])
    figure, axes = drawing.panels(drawing.TWO_COLUMNS, max(2.7, 0.9 + _ROW_INCHES * len(rows)), columns=2)
    _speedups(axes[0], rows, looks, replaced)
    _break_even(axes[1], rows, looks, replaced)
    drawing.legend_below(figure, drawing.handles(looks), columns=min(len(looks), 4))
    return Drawing(figure, rows, caption)


def _speedups(
    axis: Axes, rows: pd.DataFrame, looks: dict[str, drawing.ArmStyle], replaced: Sequence[str]
) -> None:
    several = rows[POINT].drop_duplicates()["study"].duplicated().any()
    studies = rows["study"].nunique() > 1
    labels = []
    for place, row in enumerate(rows.to_dict("records")):
        look = looks[row["arm"]]
        if row["low"] is not None and math.isfinite(row["low"]):
            high = row["high"] if row["high"] is not None and math.isfinite(row["high"]) else row["speedup"]
            axis.plot([row["low"], high], [place, place], color=look.colour, linewidth=1.2)
        if math.isfinite(row["speedup"]):
            axis.plot(row["speedup"], place, look.marker, **_marker(row, look, replaced))
        elif pd.isna(row["speedup"]):
            at = axis.get_yaxis_transform()
            axis.text(
                0.02, place, "a median run missed", transform=at, va="center", fontsize=7, color=look.colour
            )
        point = f"{row['model']} b{row['batch']} p{row['ranks']}: " if several else ""
        point = f"{row['study']}: {point}" if studies else point
        labels.append(f"{point}{row['arm']} ({row['reached']}/{row['runs']})")
    axis.set_yticks(range(len(rows)), labels)
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.grid(True, axis="x", color="#dddddd", linewidth=0.5)
    axis.axvline(1, color=drawing.GREY, linewidth=0.8)
    axis.set_xlabel("speed-up over the best first-order arm")


def _break_even(
    axis: Axes, rows: pd.DataFrame, looks: dict[str, drawing.ArmStyle], replaced: Sequence[str]
) -> None:
    shown = rows[rows["fewer_epochs"].map(is_number) & rows["cost_ratio"].map(is_number)]
    for row in shown.to_dict("records"):
        look = looks[row["arm"]]
        axis.plot(row["cost_ratio"], row["fewer_epochs"], look.marker, **_marker(row, look, replaced))
    ends = [*shown["cost_ratio"], *shown["fewer_epochs"], 1.0]
    low, high = 0.9 * min(ends), 1.1 * max(ends)
    axis.plot([low, high], [low, high], color=drawing.GREY, linewidth=0.8)
    axis.annotate("break-even", (high, high), ha="right", va="bottom", color=drawing.GREY, fontsize=7)
    axis.set_xlim(low, high)
    axis.set_ylim(low, 1.05 * high)
    axis.set_xlabel("seconds per epoch,\nover the best first-order arm's")
    axis.set_ylabel("times fewer epochs")


def _marker(row: dict[Hashable, Any], look: drawing.ArmStyle, replaced: Sequence[str]) -> dict[str, Any]:
    fill = "white" if row["study"] in replaced else look.colour
    return {"color": look.colour, "markersize": 5, "markerfacecolor": fill}
