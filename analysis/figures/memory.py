"""Memory per rank: the process's peak, and what K-FAC keeps, by arm and world size."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.comparisons import points
from analysis.figures import captions, drawing
from analysis.figures.drawing import ArmStyle, Drawing, NothingToDraw
from analysis.metrics import IDENTITY, in_order
from analysis.records.study import Study
from analysis.steps import memory_peaks

PEAK = "rss_peak"
HATCHES = {
    "kfac_factors": "",
    "kfac_second_order": "////",
    "kfac_gradients": "....",
    "kfac_statistics": "xxxx",
}
MEGABYTE = 1e6


def draw(study: Study) -> Drawing:
    """Left: peak resident memory of every rank. Right: K-FAC's state on the rank that holds most."""
    peaks = memory_peaks(study)
    peaks = peaks[(peaks["kind"] == PEAK) | peaks["kind"].str.startswith("kfac_")]
    if peaks.empty:
        raise NothingToDraw("no rank has recorded its memory")
    numbers = in_order(study, study.cells[IDENTITY].merge(peaks, on="run"))
    styles = drawing.arm_styles(study, numbers["arm"])
    figure, (left, right) = drawing.panels(drawing.TWO_COLUMNS, 2.7, columns=2)
    shifts = drawing.dodge(list(styles), width=0.66)
    for arm, world_size, rows in points(numbers):
        x = math.log2(world_size) + shifts[arm]
        _dots(left, x, rows[rows["kind"] == PEAK]["bytes"], styles[arm])
        _state(right, x, rows[rows["kind"] != PEAK], styles[arm], 0.6 / max(len(styles), 2))
    left.set_ylabel("peak RSS per rank (MB)")
    right.set_ylabel("K-FAC state per rank (MB)")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        drawing.world_size_axis(axis, numbers)
    drawing.legend_below(figure, _handles(styles, numbers), columns=3)
    return Drawing(figure, numbers, _caption(study, numbers))


def _dots(axis: Axes, x: float, values: pd.Series, style: ArmStyle) -> None:
    axis.plot(
        [x] * len(values), values / MEGABYTE, style.marker, color=style.colour, markersize=3.5, alpha=0.6
    )


def _state(axis: Axes, x: float, rows: pd.DataFrame, style: ArmStyle, width: float) -> None:
    """A stack by kind for the rank that holds most in any run, and a dot for each rank's total."""
    if rows.empty:
        return
    totals = rows.groupby(["run", "rank"])["bytes"].sum()
    largest = rows.set_index(["run", "rank"]).loc[[totals.idxmax()]].set_index("kind")["bytes"]
    bottom = 0.0
    for kind, value in largest.sort_index().items():
        height = float(value) / MEGABYTE
        hatch = HATCHES.get(str(kind), "++")
        axis.bar(x, height, width, bottom, color=style.colour, alpha=0.55, hatch=hatch, edgecolor="black",
                 linewidth=0.4)  # fmt: skip
        bottom += height
    axis.plot([x] * len(totals), totals / MEGABYTE, ".", color="black", markersize=3)


def _handles(styles: dict[str, ArmStyle], numbers: pd.DataFrame) -> list[Line2D | Patch]:
    kinds = sorted(set(numbers["kind"]) - {PEAK})
    return drawing.handles(styles) + [
        Patch(facecolor="white", edgecolor="black", linewidth=0.4, hatch=HATCHES.get(kind, "++"),
              label=kind.removeprefix("kfac_").replace("_", " "))
        for kind in kinds
    ]  # fmt: skip


def _caption(study: Study, numbers: pd.DataFrame) -> str:
    return drawing.sentence(
        "Left: peak resident memory, a dot per rank of every run; libraries and data are part of it.",
        "Right: bytes that K-FAC keeps, exact from tensor sizes; the stack is the rank that holds most, the",
        f"dots are all ranks ({drawing.counts(numbers)}). First-order arms keep none. 1 MB = 1e6 bytes.",
        captions.remarks(study, numbers, star=captions.STARRED),
    )
