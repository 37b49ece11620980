"""Maps of the fastest arm: over ranks and link speed, and over ranks and update intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from analysis.figures import drawing
from analysis.figures.drawing import Drawing

_NAMED = 8  # columns of fields that are wide enough for the name of an arm


def links(rows: pd.DataFrame, caption: str, own: str = "study") -> Drawing:
    """A field per world size and link speed in the colour of its fastest arm.

    In it stands the time of the next arm over that of the fastest. A field is hatched where the bounds of
    these two overlap, and has a thick frame where the fastest was measured.

    Args:
        rows: as `analysis.study_prediction.strategy_map.strategy_map` gives them, or that of `cost_model`.
        caption: context for the reader.
        own: whose links have the speed of one.
    """
    speeds = sorted(rows["speed"].unique())
    label = "link (Mbit/s)" if rows["mbit_per_second"].notna().all() else f"link over the {own}'s"
    return _fields(rows, "speed", _speeds(rows, speeds, own), label, lambda row: row.next_ratio, caption)


def intervals(rows: pd.DataFrame, caption: str) -> Drawing:
    """A field per world size and update interval in the colour of the K-FAC arm with the fastest step.

    In it stands the step of this arm over that of the fastest arm without K-FAC. Hatched and framed as in
    `links`.

    Args:
        rows: as `analysis.study_prediction.strategy_map.interval_map` gives them.
        caption: context for the reader.
    """
    pairs = rows.drop_duplicates("factor_update_steps").sort_values("factor_update_steps")
    names = [
        f"{f}, {e}" for f, e in zip(pairs["factor_update_steps"], pairs["inverse_update_steps"], strict=True)
    ]
    label = "steps between factor\nand inverse updates"
    return _fields(rows, "factor_update_steps", names, label, lambda row: row.cost_ratio, caption)


def _fields(
    rows: pd.DataFrame,
    column: str,
    names: Sequence[str],
    label: str,
    ratio: Callable[[Any], float],
    caption: str,
) -> Drawing:
    """The fields of a map, a row for each value of `column`, in ascending order, with these names."""
    sizes, values = sorted(rows["world_size"].unique()), sorted(rows[column].unique())
    figure, (axis,) = drawing.panels(drawing.TWO_COLUMNS, 1.3 + 0.32 * len(values), columns=1)
    colours = {arm: look.colour for arm, look in drawing.styles(sorted(rows["arm"].unique())).items()}
    with mpl.rc_context(drawing.STYLE):
        axis.grid(False)
        fields: Iterator[Any] = rows.itertuples(index=False)
        for row in fields:
            place = sizes.index(row.world_size), values.index(getattr(row, column))
            _field(axis, place, row, colours[row.arm], ratio(row), named=len(sizes) <= _NAMED)
        axis.set_xlim(0, len(sizes))
        axis.set_ylim(0, len(values))
        axis.set_xticks([place + 0.5 for place in range(len(sizes))], [str(size) for size in sizes])
        axis.set_yticks([place + 0.5 for place in range(len(values))], names)
        axis.set_xlabel("ranks")
        axis.set_ylabel(label)
        patches = [Patch(facecolor=colour, alpha=0.45, label=arm) for arm, colour in colours.items()]
        patches.append(Patch(facecolor="#dddddd", edgecolor="#ffffff", hatch="////", label="bounds overlap"))
        if rows["measured"].any():
            patches.append(Patch(facecolor="none", edgecolor="#000000", linewidth=1.8, label="measured"))
    drawing.legend_below(figure, patches, columns=4)
    return Drawing(figure, rows, caption)


def _field(axis: Axes, place: tuple[int, int], row: Any, colour: str, ratio: float, *, named: bool) -> None:
    x, y = place
    hatch = "////" if row.overlaps else None
    field = Rectangle((x, y), 1, 1, facecolor=colour, alpha=0.45, hatch=hatch, linewidth=0.5)
    field.set_edgecolor("#ffffff")
    axis.add_patch(field)
    if row.measured:
        axis.add_patch(Rectangle((x + 0.03, y + 0.06), 0.94, 0.88, fill=False, linewidth=1.8))
    if not math.isnan(ratio):
        box = {"facecolor": "#ffffff", "alpha": 0.8, "linewidth": 0, "pad": 1.0}
        text = f"{row.arm}\n{ratio:.2f}×" if named else f"{ratio:.2f}×"
        axis.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=6, bbox=box)


def _speeds(rows: pd.DataFrame, speeds: list[float], own: str) -> list[str]:
    names = dict(zip(rows["speed"], rows["mbit_per_second"], strict=True))
    return [
        (f"{speed:g}×" if math.isnan(names[speed]) else f"{names[speed]:,.0f}")
        + (f" ({own})" if speed == 1 else "")
        for speed in speeds
    ]
