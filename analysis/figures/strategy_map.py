"""The figure of the fastest arm over ranks and link speed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.patches import Patch, Rectangle

from analysis.figures import drawing
from analysis.figures.drawing import Drawing

_NAMED = 8  # columns of fields that are wide enough for the name of an arm


def strategy_map(rows: pd.DataFrame, caption: str) -> Drawing:
    """A field per world size and link speed in the colour of its fastest arm.

    In it stands the time of the next arm over that of the fastest. A field is hatched where the bounds of
    these two overlap, and has a thick frame where the fastest was measured.

    Args:
        rows: as `analysis.study_prediction.strategy_map.strategy_map` gives them.
        caption: context for the reader.
    """
    sizes, speeds = sorted(rows["world_size"].unique()), sorted(rows["speed"].unique())
    height = 1.3 + 0.32 * len(speeds)
    figure, (axis,) = drawing.panels(drawing.TWO_COLUMNS, height, columns=1)
    colours = {arm: look.colour for arm, look in drawing.styles(sorted(rows["arm"].unique())).items()}
    with mpl.rc_context(drawing.STYLE):
        axis.grid(False)
        fields: Iterator[Any] = rows.itertuples(index=False)
        for row in fields:
            x, y = sizes.index(row.world_size), speeds.index(row.speed)
            hatch = "////" if row.overlaps else None
            field = Rectangle(
                (x, y), 1, 1, facecolor=colours[row.arm], alpha=0.45, hatch=hatch, linewidth=0.5
            )
            field.set_edgecolor("#ffffff")
            axis.add_patch(field)
            if row.measured:
                axis.add_patch(Rectangle((x + 0.03, y + 0.06), 0.94, 0.88, fill=False, linewidth=1.8))
            if not math.isnan(row.next_ratio):
                box = {"facecolor": "#ffffff", "alpha": 0.8, "linewidth": 0, "pad": 1.0}
                text = (
                    f"{row.arm}\n{row.next_ratio:.2f}×" if len(sizes) <= _NAMED else f"{row.next_ratio:.2f}×"
                )
                axis.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=6, bbox=box)
        axis.set_xlim(0, len(sizes))
        axis.set_ylim(0, len(speeds))
        axis.set_xticks([place + 0.5 for place in range(len(sizes))], [str(size) for size in sizes])
        axis.set_yticks([place + 0.5 for place in range(len(speeds))], _labels(rows, speeds))
        axis.set_xlabel("ranks")
        axis.set_ylabel("link (Mbit/s)" if rows["mbit_per_second"].notna().all() else "link over the study's")
        patches = [Patch(facecolor=colour, alpha=0.45, label=arm) for arm, colour in colours.items()]
        patches.append(Patch(facecolor="#dddddd", edgecolor="#ffffff", hatch="////", label="bounds overlap"))
        patches.append(Patch(facecolor="none", edgecolor="#000000", linewidth=1.8, label="measured"))
    drawing.legend_below(figure, patches, columns=4)
    return Drawing(figure, rows, caption)


def _labels(rows: pd.DataFrame, speeds: list[float]) -> list[str]:
    names = dict(zip(rows["speed"], rows["mbit_per_second"], strict=True))
    return [
        (f"{speed:g}×" if math.isnan(names[speed]) else f"{names[speed]:,.0f}")
        + (" (study)" if speed == 1 else "")
        for speed in speeds
    ]
